"""Penalties, bias and bans of many rows: collected on the host row by row, applied by a few device operations; and
log-probabilities of sampled and of top tokens: few numbers per row reach the host.

An operation touches each logit at most once, so that its result does not depend on an order.
"""

from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from kvrelay.kernels.common.sampling_search import to_device


class LogitChanges:
    """Changes to logits [R, vocab]: collect them by row, then call `applied`."""

    def __init__(self, vocab: int) -> None:
        self._vocab = vocab
        self._penalised, self._lowered, self._biased, self._banned = _Places(), _Places(), _Places(), _Places()

    def penalise(self, row: int, token_ids: Sequence[int], penalty: float) -> None:
        """Repetition penalty: logits of these tokens are divided by it, negative ones multiplied."""
        self._penalised.add(row * self._vocab + np.unique(token_ids), penalty)

    def lower(self, row: int, token_ids: Sequence[int], presence: float, frequency: float) -> None:
        """Presence and frequency penalties of tokens in the output."""
        seen, counts = np.unique(token_ids, return_counts=True)
        self._lowered.add(row * self._vocab + seen, presence + frequency * counts)

    def bias(self, row: int, biases: Mapping[int, float]) -> None:
        self._biased.add(row * self._vocab + np.fromiter(biases, np.int64), list(biases.values()))

    def ban(self, row: int, token_ids: Collection[int]) -> None:
        if token_ids:
            self._banned.add(row * self._vocab + np.unique(list(token_ids)), -np.inf)

    @property
    def is_empty(self) -> bool:
        return not any(places.indices for places in (self._penalised, self._lowered, self._biased, self._banned))

    def applied(self, logits: Tensor) -> Tensor:
        """The changed logits, float32 [R, vocab]; a copy where anything changes."""
        if self.is_empty:
            return logits
        changed = logits.clone(memory_format=torch.contiguous_format)
        flat = changed.view(-1)
        changes: tuple[tuple[_Places, Callable[[Tensor, Tensor], Tensor]], ...] = (
            (self._penalised, lambda old, by: torch.where(old > 0, old / by, old * by)),
            (self._lowered, torch.sub),
            (self._biased, torch.add),
            (self._banned, lambda old, to: to),
        )
        for places, change in changes:
            if places.indices:
                at, numbers = places.on(logits.device)
                flat[at] = change(flat[at], numbers)
        return changed


class _Places:
    """Indices into the flattened logits, with a number each."""

    def __init__(self) -> None:
        self.indices: list[np.ndarray] = []
        self._numbers: list[np.ndarray] = []

    def add(self, indices: np.ndarray, numbers: "float | Sequence[float] | np.ndarray") -> None:
        self.indices.append(indices.astype(np.int64, copy=False))
        self._numbers.append(np.broadcast_to(np.asarray(numbers, dtype=np.float32), indices.shape))

    def on(self, device: torch.device) -> tuple[Tensor, Tensor]:
        """(indices int64, numbers float32) on the device."""
        parts = (np.concatenate(self.indices), np.concatenate(self._numbers))
        indices, numbers = (to_device(torch.from_numpy(part), device) for part in parts)
        return indices, numbers


@dataclass(frozen=True, slots=True)
class LogProbabilities:
    """Per row, on the host: the sampled token's, and the top ones with their ids, best first."""

    own: list[float]
    top: list[list[float]]
    top_ids: list[list[int]]


def packed_log_probabilities(logits: Tensor, tokens: Tensor, rows: Sequence[int], most: int) -> Tensor:
    """Input of `unpacked`: [len(rows), 1 + 2 most] float64 on the logits' device. Does not wait for the device.

    logits: float32 [R, vocab]. tokens: [R] int64 on the same device. most: number of top tokens.
    """
    if len(rows) < logits.shape[0]:
        at = to_device(torch.tensor(rows, dtype=torch.int64), logits.device)
        logits, tokens = logits[at], tokens[at]
    own = logits.gather(1, tokens.unsqueeze(1))
    norm = logits.logsumexp(dim=1, keepdim=True)
    top = logits.topk(most, dim=1)
    numbers = torch.cat((own - norm, top.values - norm), dim=1).double()
    return torch.cat((numbers, top.indices.double()), dim=1)  # ids in float64 are exact


def unpacked(packed: Tensor) -> LogProbabilities:
    """packed: a tensor on the host, from `packed_log_probabilities`."""
    most = packed.shape[1] // 2
    values, ids = packed[:, : most + 1].tolist(), packed[:, most + 1 :].long().tolist()
    return LogProbabilities([row[0] for row in values], [row[1:] for row in values], ids)
