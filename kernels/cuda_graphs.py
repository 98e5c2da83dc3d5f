"""Decode steps as CUDA graphs: captured once per batch size of a ladder, replayed with new metadata.

UNVERIFIED ON A GPU. A batch is padded to the next size of the ladder by repeating its first row: the
copies compute and store what the row itself does, so they change nothing. Shapes whose attention falls back to
plain torch are never captured: that path bakes the step's blocks into its kernels' arguments.
"""

import dataclasses
import logging
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from kvrelay.kernels.backend import AttentionBatch, AttentionShape
from kvrelay.kernels.cuda import _ATTENTION_KERNELS, CudaBackend
from kvrelay.kernels.cuda_cascade import EAGER_WORTH_BYTES
from kvrelay.kernels.cuda_plan import CudaPlan, Variant, has_attention, is_unpacked, paged_index, plan_decode

logger = logging.getLogger(__name__)

LADDER = (1, 2, 4, 8, 16, 24, 32, 48, 64, 96, 128)
Forward = Callable[[Tensor, AttentionBatch, CudaPlan], Tensor]  # (token ids, batch, plan) -> hidden [B, H]


def padded(token_ids: Tensor, batch: AttentionBatch, size: int) -> tuple[Tensor, AttentionBatch]:
    """A decode batch of S <= size sequences, made `size` long by repeating row 0."""
    rows = torch.zeros(size, dtype=torch.int64)
    rows[: token_ids.shape[0]] = torch.arange(token_ids.shape[0])
    return token_ids[rows], dataclasses.replace(
        batch,
        query_starts=torch.arange(size + 1, dtype=torch.int32),
        context_lens=batch.context_lens[rows],
        block_tables=batch.block_tables[rows],
        slot_mapping=batch.slot_mapping[rows],
        positions=batch.positions[rows],
        num_decode=size,
    )


@dataclass(slots=True)
class _Graph:
    """One batch size: the graph, the device buffers that it reads, and where its result lies."""

    graph: Any
    token_ids: Tensor
    plan: CudaPlan
    hidden: Tensor


class DecodeGraphs:
    """Graphs of one model's decode step. Call `run` from the engine thread only.

    Args:
        backend: whose kernels the forward calls.
        shape: of the model's attention layers.
        max_blocks: most blocks that one sequence may have.
        sizes: batch sizes to capture, ascending; larger batches run without a graph.
        num_layers: of full attention, whose rows may share prefixes; 0: cascade attention is never preferred to a graph.
    """

    def __init__(
        self,
        backend: CudaBackend,
        shape: AttentionShape,
        *,
        max_blocks: int,
        sizes: Sequence[int] = LADDER,
        num_layers: int = 0,
    ) -> None:
        self._num_layers = num_layers
        self._backend, self._shape, self._max_blocks = backend, shape, max_blocks
        self._sizes = tuple(sizes)
        self._graphs: dict[int, _Graph] = {}

    def fits(self, batch: AttentionBatch) -> bool:
        """Whether the batch is all decode, no larger than the largest graph, and FlashInfer reads the cache itself."""
        size = batch.context_lens.shape[0]
        if is_unpacked(self._shape):
            return False
        if not (
            has_attention(self._shape) and batch.num_decode == size <= self._sizes[-1] and batch.max_query_len == 1
        ):
            return False
        return not self._is_worth_more_without(batch)

    def _is_worth_more_without(self, batch: AttentionBatch) -> bool:
        """Whether rows share so much that a step with cascade attention, which is not captured, is the shorter one.

        Its groups change with every batch, and a captured wrapper's number of sequences may not.
        """
        if self._num_layers == 0 or (levels := self._backend.levels(batch, self._shape)) is None:
            return False
        token_bytes = 2 * self._shape.num_kv_heads * self._shape.head_dim * self._shape.dtype.itemsize
        return levels.spared_tokens * token_bytes * self._num_layers >= EAGER_WORTH_BYTES

    def reset(self) -> None:
        """Forget all graphs: something that they read has moved."""
        self._graphs.clear()

    def run(self, token_ids: Tensor, batch: AttentionBatch, forward: Forward) -> Tensor:
        """Hidden states [S, hidden] of a batch that fits; captures at the first batch of its size.

        token_ids: [S] int64 on the CPU. The result is overwritten by the next run.
        """
        num_rows = token_ids.shape[0]
        size = next(size for size in self._sizes if size >= num_rows)
        token_ids, batch = padded(token_ids, batch, size)
        captured = self._graphs.get(size)
        if captured is None:
            captured = self._graphs[size] = self._capture(token_ids, batch, forward)
        self._refill(captured, token_ids, batch)
        captured.graph.replay()
        return captured.hidden[:num_rows]

    def _refill(self, captured: _Graph, token_ids: Tensor, batch: AttentionBatch) -> None:
        """New contents for the buffers that the graph reads, attention schedules included."""
        plan = captured.plan
        captured.token_ids.copy_(token_ids)  # from pageable memory: waits for the device, as in CudaBackend.plan
        plan.device_positions.copy_(batch.positions)
        plan.device_slots.copy_(batch.slot_mapping)
        index = paged_index(batch.context_lens, batch.block_tables, self._shape.block_size)
        for variant, (wrapper, _) in plan.wrappers.items():
            plan_decode(wrapper, index, self._shape, variant)

    def _wrapper(self, batch_size: int) -> Any:
        """A decode wrapper whose metadata lives in buffers that never move."""
        device = self._backend.device
        return self._backend._flashinfer.BatchDecodeWithPagedKVCacheWrapper(
            self._backend._workspace,
            self._shape.kv_layout,
            use_cuda_graph=True,
            use_tensor_cores=True,
            paged_kv_indptr_buffer=torch.zeros(batch_size + 1, dtype=torch.int32, device=device),
            paged_kv_indices_buffer=torch.zeros(batch_size * self._max_blocks, dtype=torch.int32, device=device),
            paged_kv_last_page_len_buffer=torch.ones(batch_size, dtype=torch.int32, device=device),
            backend=_ATTENTION_KERNELS,
        )

    def _variants(self, token_ids: Tensor, batch: AttentionBatch, forward: Forward) -> list[Variant]:
        """Which attention variants the model uses: run the step once without a graph and look."""
        plan = self._backend.plan(batch, self._shape)
        forward(token_ids.to(self._backend.device), batch, plan)
        torch.cuda.synchronize(self._backend.device)
        return list(plan.wrappers)

    def _capture(self, token_ids: Tensor, batch: AttentionBatch, forward: Forward) -> _Graph:
        variants = self._variants(token_ids, batch, forward)
        plan = self._backend.plan(batch, self._shape)
        index = paged_index(batch.context_lens, batch.block_tables, self._shape.block_size)
        for variant in variants:
            wrapper = self._wrapper(token_ids.shape[0])
            plan_decode(wrapper, index, self._shape, variant)
            plan.wrappers[variant] = (wrapper, None)
        static_ids = token_ids.to(self._backend.device)
        side = torch.cuda.Stream(self._backend.device)
        side.wait_stream(torch.cuda.current_stream(self._backend.device))
        with torch.cuda.stream(side):  # warm up: lazy library handles may not be made during capture
            for _ in range(2):
                forward(static_ids, batch, plan)
        torch.cuda.current_stream(self._backend.device).wait_stream(side)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.device(self._backend.device), torch.cuda.graph(graph):
            hidden = forward(static_ids, batch, plan)
        logger.info("captured the decode step of %d sequences as a CUDA graph", token_ids.shape[0])
        return _Graph(graph, static_ids, plan, hidden)
