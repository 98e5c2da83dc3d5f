"""How far log-probabilities are from float32's: a model in 16 bits beside the same model by the oracle; and those of
whole texts by the reference backend, each text in one step, without an engine.
"""

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import torch
from torch import Tensor

from kvrelay.engine.checkpoints.loading import load_model
from kvrelay.engine.execution.runner import kv_layout
from kvrelay.engine.models.decoder import DecoderModel
from kvrelay.kernels.oracle.grid_steps import KernelCase, make_step
from kvrelay.kernels.oracle.reference import ReferenceBackend
from kvrelay.kvcache.memory.storage import DTYPES, KV_DTYPES, KvStorage

RMS_MOST = 2.0  # times the oracle's error; seen: 0.9 to 1.2
DEVIATIONS = 4.0  # of a mean's standard error

TextLogprobs = tuple[Tensor, Tensor]
"""Of some tokens at each position of a text, its next token first: (tokens, log-probabilities in float64)."""


@dataclass(frozen=True, slots=True)
class DtypeError:
    """How far a model is from float32 on the same tokens. In nats; agreement as a share of the positions."""

    rms: float
    worst: float
    surprise: float  # mean negative log-probability of the text minus float32's: the logarithm of perplexities' ratio
    spread: float  # root mean square of that by position
    agreement: float  # of the likeliest token
    num_positions: int

    def excess(self, theirs: "DtypeError") -> list[str]:
        """In what this is further off than `theirs`, the oracle's in the same dtype, explains."""
        chance = DEVIATIONS / math.sqrt(self.num_positions)  # times a standard deviation: of a mean over the positions
        deviation = math.sqrt(theirs.agreement * (1 - theirs.agreement) + 1 / self.num_positions)
        found = []
        if not self.rms <= RMS_MOST * theirs.rms:
            found.append(f"log-probabilities {self.rms:.2g} off, the oracle's {theirs.rms:.2g}")
        if not abs(self.surprise) <= abs(theirs.surprise) + chance * theirs.spread:
            found.append(f"perplexity {math.expm1(self.surprise):+.2%}")
        if not self.agreement >= theirs.agreement - chance * deviation:
            found.append(f"the best token in {self.agreement:.1%}, the oracle's in {theirs.agreement:.1%}")
        return found


def dtype_error(parts: Iterable[TextLogprobs], exact: Tensor) -> DtypeError:
    """exact: float32's log-probabilities [positions of all parts, vocabulary]."""
    tokens, logprobs = map(torch.cat, zip(*parts, strict=True))
    error = logprobs - exact.gather(1, tokens)
    return DtypeError(
        rms=float(error.square().mean().sqrt()),
        worst=float(error.abs().max()),
        surprise=-float(error[:, 0].mean()),
        spread=float(error[:, 0].square().mean().sqrt()),
        agreement=float((tokens[:, 1] == exact.argmax(1)).double().mean()),
        num_positions=len(error),
    )


def on_same_tokens(logprobs: Tensor, text: list[int], top: int) -> TextLogprobs:
    """The text's tokens and the likeliest ones, of log-probabilities [positions, vocabulary]."""
    tokens = torch.cat((torch.tensor(text[1:]).unsqueeze(1), logprobs.topk(top, dim=-1).indices), 1)
    return tokens, logprobs.gather(1, tokens)


class WholeTexts:
    """One model. Its weights and what it has computed stay.

    Args:
        folder: a prepared checkpoint.
        dtype, kv_dtype: keys of DTYPES and KV_DTYPES.
    """

    def __init__(self, folder: Path, device: str, dtype: str = "float32", kv_dtype: str = "float32") -> None:
        self._folder, self._backend = folder, ReferenceBackend(device)
        self._dtype, self._kv_dtype = DTYPES[dtype], KV_DTYPES[kv_dtype]
        self._model: DecoderModel | None = None
        self._known: dict[tuple[int, ...], Tensor] = {}

    def __call__(self, text: Sequence[int], first: int) -> Tensor:
        """Log-probabilities [len(text) - first, vocabulary] in float64 on the CPU, of tokens number `first` and on.

        Raises ModelError.
        """
        key = (first, *text)
        if key not in self._known:
            self._known[key] = self._computed(text, first).cpu()
        return self._known[key].double()

    @torch.inference_mode()
    def _computed(self, text: Sequence[int], first: int) -> Tensor:
        backend, num_tokens = self._backend, len(text) - 1
        self._model = model = self._model or load_model(self._folder, backend, self._dtype, kv_dtype=self._kv_dtype)
        batch = make_step(KernelCase(((num_tokens, num_tokens),))).batch
        layout = replace(kv_layout(model), num_blocks=int(batch.block_tables.max()) + 1)
        plan, storage = backend.plan(batch, model.attention_shape), KvStorage(layout, backend.device)
        hidden = model.forward(torch.tensor(text[:-1]), batch, plan, storage.layers)
        return model.logits(hidden[first - 1 :]).log_softmax(-1)
