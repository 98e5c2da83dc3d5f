"""Steps with prompts as piecewise CUDA graphs: the work between attention calls is captured, attention is not.

One graph spans from a layer's output projection to the next layer's rotated queries, for a number
of tokens of a ladder, to which a step is padded. Between graphs, keys are stored and attention is planned and run over
the step's own tokens alone, so that padding writes nothing. The model's code is unchanged: at its calls of `store_kv`
and `attention` the backend, while it has a `Recorder`, ends one graph and begins the next.
"""

import gc
import logging
from collections.abc import Collection, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from kvrelay.kernels.backend import (
    AttentionBatch,
    AttentionShape,
    AttentionVariant,
    DecodeGraphs,
    GraphSpec,
    ModelForward,
    OnLayer,
    PieceGraphs,
)
from kvrelay.kernels.cuda.backend import Call, CudaBackend, Recorder
from kvrelay.kernels.cuda.cuda_graphs import Captures, CudaGraphs, ladder
from kvrelay.kernels.cuda.experts import has_grouped_products
from kvrelay.kernels.cuda.paged_attention import CudaPlan

logger = logging.getLogger(__name__)

# tokens; longer steps keep the device busy without graphs
SIZES = (8, 16, 32, 64, 96, 128, 192, 256, 320, 384, 448, 512)


def sizes_up_to(max_tokens: int) -> tuple[int, ...]:
    """The sizes for steps of up to `max_tokens` tokens."""
    return (*(size for size in SIZES if size < max_tokens), min(max_tokens, SIZES[-1]))


@dataclass(frozen=True, slots=True)
class _Pieces:
    """One size: graphs with an attention call between each two, the buffers that they read, and the result."""

    graphs: list[Any]
    calls: list[Call]
    token_ids: Tensor
    positions: Tensor
    hidden: Tensor


class StepPieces(Captures):
    """Piecewise graphs of one model's steps, by number of tokens."""

    _what = "steps in pieces"

    def __init__(self, backend: CudaBackend, shape: AttentionShape, *, sizes: Sequence[int] = SIZES) -> None:
        super().__init__(backend, shape, sizes)
        self._shared: tuple[Any, Tensor] | None = None  # stream of captures, attention output

    def fits(self, batch: AttentionBatch) -> bool:
        return self.is_possible and batch.positions.shape[0] <= self._sizes[-1]

    def choose_kernels(self, variants: Collection[AttentionVariant]) -> None:
        """Time the prefill attention kernels for these variants and take the fastest."""
        if self.is_possible and self._shape.latent_dim is None:
            for variant in sorted(variants, key=str):
                self._backend.paged.prefill_kernels.try_out(self._shape, variant)

    def run(
        self, token_ids: Tensor, batch: AttentionBatch, forward: ModelForward, on_layer: OnLayer | None = None
    ) -> Tensor:
        """Hidden states [T, hidden] of a batch that fits; captures at the first batch of its size.

        token_ids: [T] int64. on_layer: see DecoderModel.forward. The result is overwritten by the next run.
        """
        num_tokens = batch.positions.shape[0]
        pieces: _Pieces = self._of(next(size for size in self._sizes if size >= num_tokens), forward)
        plan = self._backend.plan(batch, self._shape)
        pieces.token_ids[:num_tokens].copy_(token_ids)
        pieces.positions[:num_tokens].copy_(plan.device_positions)
        pieces.graphs[0].replay()
        for index, call in enumerate(pieces.calls):
            self._attend(call, plan, num_tokens)
            pieces.graphs[index + 1].replay()
            if on_layer is not None:
                on_layer(index)
        return pieces.hidden[:num_tokens]

    def _attend(self, call: Call, plan: CudaPlan, num_tokens: int) -> None:
        assert self._shared is not None
        own = slice(0, num_tokens)
        backend, (first, second) = self._backend, call.stored
        store = backend.store_kv if self._shape.latent_dim is None else backend.store_latent
        store(first[own], second[own], call.kv_layer, plan.batch.slot_mapping)
        queries = tuple(q[own] for q in call.queries)
        backend.paged.attend(self._shared[1][own], queries, call.kv_layer, plan, call.variant)

    def _make_shared(self) -> tuple[Any, Tensor]:
        device, shape = self._backend.device, self._shape
        head_dim = shape.latent_dim or shape.head_dim
        out = torch.zeros(self._sizes[-1], shape.num_heads, head_dim, dtype=shape.dtype, device=device)
        return torch.cuda.Stream(device), out

    def _capture(self, size: int, forward: ModelForward, batch: AttentionBatch) -> _Pieces:
        stream, out = self._shared = self._shared or self._make_shared()
        backend = self._backend
        plan = backend.plan(batch, self._shape)
        token_ids = torch.zeros(size, dtype=torch.int64, device=backend.device)
        recorder = Recorder(out[:size], backend.graph_pool)
        torch.cuda.synchronize(backend.device)
        gc.collect()  # now, so that nothing is freed during the capture
        stream.wait_stream(torch.cuda.current_stream(backend.device))
        with torch.cuda.device(backend.device), torch.cuda.stream(stream):
            with backend.attending_by(Recorder(out[:size], None)):
                forward(token_ids, batch, plan)
            with backend.attending_by(recorder):
                recorder.begin()
                try:
                    hidden = forward(token_ids, batch, plan)
                finally:
                    recorder.end()
        torch.cuda.current_stream(backend.device).wait_stream(stream)
        logger.debug("captured a step of %d tokens in %d pieces", size, len(recorder.graphs))
        return _Pieces(recorder.graphs, recorder.calls, token_ids, plan.device_positions, hidden)


class CapturingCudaBackend(CudaBackend):
    """CudaBackend with graphs of decode steps, and of pieces of steps with prompts."""

    def decode_graphs(self, spec: GraphSpec) -> DecodeGraphs | None:
        """Experts are captured where their products are grouped: otherwise their choice waits for the device."""
        if spec.expert_sizes is not None and not has_grouped_products(self.device, spec.dtype, *spec.expert_sizes):
            return None
        spec.reserve_positions(spec.max_blocks * spec.shape.block_size)  # all at once, so that no capture is lost
        return CudaGraphs(
            self,
            spec.shape,
            max_blocks=spec.max_blocks,
            sizes=ladder(spec.max_running),
            num_layers=spec.num_full_layers,
        )

    def piece_graphs(self, spec: GraphSpec) -> PieceGraphs | None:
        return StepPieces(self, spec.shape, sizes=sizes_up_to(spec.max_tokens))
