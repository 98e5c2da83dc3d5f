"""Log-probabilities of sampled and of top tokens, computed on the device: few numbers per row reach the host."""

from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True, slots=True)
class LogProbabilities:
    """Per row, on the host: the sampled token's, and the top ones with their ids, best first."""

    own: list[float]
    top: list[list[float]]
    top_ids: list[list[int]]


def packed_log_probabilities(logits: Tensor, tokens: Tensor, most: int) -> Tensor:
    """Input of `unpacked`: [R, 1 + 2 most] float64 on the logits' device. Does not wait for the device.

    logits: float32 [R, vocab]. tokens: [R] int64 on the same device. most: number of top tokens.
    """
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
