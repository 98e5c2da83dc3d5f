"""Decode steps as CUDA graphs: captured once per batch size of a ladder, replayed with new metadata.

A batch is padded to the next captured size by repeating the row with the least context: the copies
compute and store the same values as that row, so they change nothing. All sizes share one memory pool and one set of
block id buffers: only one graph runs at a time. Shapes whose attention falls back to plain torch are never captured,
because that path bakes the step's blocks into its kernels' arguments.
"""

import dataclasses
import logging
import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

from kvrelay.kernels.backend import AttentionBatch, AttentionShape, AttentionVariant, ModelForward, OnLayer
from kvrelay.kernels.cuda.backend import CudaBackend
from kvrelay.kernels.cuda.cascade import EAGER_WORTH_BYTES, WORTH, find_groups
from kvrelay.kernels.cuda.paged_attention import CudaPlan
from kvrelay.kernels.cuda.plan import PagedIndex, has_attention, is_unpacked, paged_index

logger = logging.getLogger(__name__)

_LOG_EVERY_S = 5.0


def ladder(most: int) -> tuple[int, ...]:
    """Batch sizes up to `most`, spaced so that padding costs a few percent at any size."""
    sizes = (1, 2, 4, *range(8, 64, 8), *range(64, 256, 16), *range(256, most, 32))
    return (*(size for size in sizes if size < most), most)


def idle_batch(size: int) -> AttentionBatch:
    """Sequences of one token, all in the first slot: the batch that is captured before there are requests."""
    ones, zeros = torch.ones(size, dtype=torch.int32), torch.zeros(size, dtype=torch.int64)
    return AttentionBatch(
        query_starts=torch.arange(size + 1, dtype=torch.int32),
        context_lens=ones,
        block_tables=torch.zeros(size, 1, dtype=torch.int32),
        slot_mapping=zeros,
        positions=zeros.clone(),
        num_decode=size,
        max_query_len=1,
        max_context_len=1,
    )


def padded(batch: AttentionBatch, size: int) -> tuple[AttentionBatch, int]:
    """A decode batch of S <= size sequences, padded to `size` by repeating the row with the least context; and that
    row.
    """
    num_rows = batch.context_lens.shape[0]
    if num_rows == size:
        return batch, 0
    shortest = int(batch.context_lens.numpy().argmin())
    rows = np.full(size, shortest)
    rows[:num_rows] = np.arange(num_rows)

    def repeated(x: Tensor) -> Tensor:  # in numpy: torch's threads cost more than so few numbers do
        return torch.from_numpy(x.numpy()[rows])

    return dataclasses.replace(
        batch,
        query_starts=torch.from_numpy(np.arange(size + 1, dtype=np.int32)),
        context_lens=repeated(batch.context_lens),
        block_tables=repeated(batch.block_tables),
        slot_mapping=repeated(batch.slot_mapping),
        positions=repeated(batch.positions),
        num_decode=size,
    ), shortest


class Captures:
    """Captures of one model's steps, by size. Call it from the engine thread only.

    Args:
        backend: the backend whose kernels the forward calls.
        shape: of the model's attention layers.
        sizes: to capture, ascending; larger steps run without graphs.
    """

    _what: str  # is captured, for the log

    def __init__(self, backend: CudaBackend, shape: AttentionShape, sizes: Sequence[int]) -> None:
        self._backend, self._shape, self._sizes = backend, shape, tuple(sizes)
        self._graphs: dict[int, Any] = {}

    @property
    def is_possible(self) -> bool:
        """Whether FlashInfer supports this shape and reads the cache itself."""
        return has_attention(self._shape) and not is_unpacked(self._shape)

    @property
    def has_captures(self) -> bool:
        return bool(self._graphs)

    def reset(self) -> None:
        """Drop all graphs, after something that they read has moved."""
        self._graphs.clear()

    def warm_up(self, forward: ModelForward) -> None:
        """Capture every size before the first request, the largest first, so that smaller ones fit into its memory.

        Writes the cache's first slot, which must be unused.
        """
        if not self.is_possible:
            return
        device, began_s = self._backend.device, time.monotonic()
        (free, _), logged_s, num_sizes = torch.cuda.mem_get_info(device), began_s, len(self._sizes)
        for number, size in enumerate(sorted(self._sizes, reverse=True), 1):
            self._of(size, forward)
            if time.monotonic() - logged_s > _LOG_EVERY_S:
                logged_s = time.monotonic()
                logger.info("%d of %d sizes of %s are captured", number, num_sizes, self._what)
        taken, seconds = free - torch.cuda.mem_get_info(device)[0], time.monotonic() - began_s
        logger.info("%s are captured in %d sizes: %.1f s, %.0f MiB", self._what, num_sizes, seconds, taken / 2**20)

    def _of(self, size: int, forward: ModelForward, batch: AttentionBatch | None = None) -> Any:
        """What is captured for this size, now from the batch (None: an idle one) if it is the first."""
        if size not in self._graphs:
            self._graphs[size] = self._capture(size, forward, idle_batch(size) if batch is None else batch)
        return self._graphs[size]

    def _capture(self, size: int, forward: ModelForward, batch: AttentionBatch) -> Any:
        raise NotImplementedError


@dataclass(slots=True)
class _Graph:
    """One batch size: the graph, the device buffers that it reads, and its result."""

    graph: Any
    token_ids: Tensor
    plan: CudaPlan
    hidden: Tensor


@dataclass(frozen=True, slots=True)
class _Shared:
    """Shared by all sizes: device buffers of FlashInfer's indices for the largest size; the stream of captures."""

    index: PagedIndex
    stream: Any


class CudaGraphs(Captures):
    """CUDA graphs of one model's decode step.

    Args:
        max_blocks: most blocks of a sequence.
        num_layers: layers of full attention, whose rows may share prefixes; 0: graphs are always preferred to cascade
            attention.
    """

    _what = "decode steps"
    with_layers = False

    def __init__(
        self,
        backend: CudaBackend,
        shape: AttentionShape,
        *,
        max_blocks: int,
        sizes: Sequence[int] = ladder(128),
        num_layers: int = 0,
    ) -> None:
        super().__init__(backend, shape, sizes)
        self._num_layers, self._paged, self._max_blocks = num_layers, backend.paged, max_blocks
        self._shared: _Shared | None = None

    def fits(self, batch: AttentionBatch) -> bool:
        """Whether the batch is all decode, no larger than the largest graph, and FlashInfer reads the cache itself."""
        size = batch.context_lens.shape[0]
        is_decode = batch.num_decode == size <= self._sizes[-1] and batch.max_query_len == 1
        return self.is_possible and is_decode and not self._is_worth_more_without(batch)

    def _is_worth_more_without(self, batch: AttentionBatch) -> bool:
        """Whether rows share so much that a step with cascade attention, which is not captured, takes less time.

        Its groups change with every batch, and a captured wrapper's number of sequences cannot.
        """
        shape = self._shape
        if self._num_layers == 0 or not self._paged.can_share_prefixes(shape):
            return False
        token_bytes = 2 * shape.num_kv_heads * shape.head_dim * shape.dtype.itemsize * self._num_layers
        worth = max(WORTH, -(-EAGER_WORTH_BYTES // token_bytes))
        return bool(find_groups(batch.context_lens.numpy(), batch.block_tables.numpy(), shape.block_size, worth))

    def run(
        self, token_ids: Tensor, batch: AttentionBatch, forward: ModelForward, on_layer: OnLayer | None = None
    ) -> Tensor:
        """Hidden states [S, hidden] of a batch that fits; captures at the first batch of its size.

        token_ids: [S] int64 on the device. The result is overwritten by the next run.
        """
        num_rows = token_ids.shape[0]
        size = next(size for size in self._sizes if size >= num_rows)
        batch, repeated = padded(batch, size)
        captured: _Graph = self._of(size, forward, batch)
        captured.token_ids[:num_rows].copy_(token_ids)
        if num_rows < size:
            captured.token_ids[num_rows:].copy_(captured.token_ids[repeated : repeated + 1].expand(size - num_rows))
        self._refill(captured, batch)
        captured.graph.replay()
        return captured.hidden[:num_rows]

    def logits_of(self, hidden: Tensor) -> Tensor | None:
        """The head is not captured."""
        return None

    def _refill(self, captured: _Graph, batch: AttentionBatch) -> None:
        """Write new contents into the buffers that the graph reads, attention schedules included."""
        plan = captured.plan
        staging = self._backend.staging
        staging.fill(plan.device_positions, batch.positions)
        staging.fill(plan.device_slots, batch.slot_mapping.to(torch.int32))
        index = self._index(batch)
        for variant, (wrapper, _) in plan.wrappers.items():
            self._paged.plan_graph(wrapper, index, self._shape, variant)

    def _index(self, batch: AttentionBatch) -> PagedIndex:
        index = paged_index(batch.context_lens, batch.block_tables, self._shape.block_size)
        return index.staged(self._backend.staging)

    def _variants(self, token_ids: Tensor, batch: AttentionBatch, forward: ModelForward) -> list[AttentionVariant]:
        """The attention variants that the model uses, found by running the step once without a graph."""
        plan = self._backend.plan(batch, self._shape)
        forward(token_ids, batch, plan)
        torch.cuda.synchronize(self._backend.device)
        return list(plan.wrappers)

    def _make_shared(self) -> _Shared:
        most, device = self._sizes[-1], self._backend.device
        sizes = (most + 1, most * self._max_blocks, most, most, most + 1)
        buffers = (torch.zeros(size, dtype=torch.int32, device=device) for size in sizes)
        return _Shared(PagedIndex(*buffers), torch.cuda.Stream(device))

    def _capture(self, size: int, forward: ModelForward, batch: AttentionBatch) -> _Graph:
        shared = self._shared = self._shared or self._make_shared()
        device = self._backend.device
        static_ids = torch.zeros(size, dtype=torch.int64, device=device)
        variants = self._variants(static_ids, batch, forward)
        plan = self._backend.plan(batch, self._shape)
        index = self._index(batch)
        for variant in variants:
            wrapper = self._paged.graph_wrapper(self._shape, shared.index.of(size))
            self._paged.plan_graph(wrapper, index, self._shape, variant)
            plan.wrappers[variant] = (wrapper, None)
        shared.stream.wait_stream(torch.cuda.current_stream(device))
        with torch.cuda.stream(shared.stream):  # warm up: lazy library handles cannot be created during capture
            for _ in range(2):
                forward(static_ids, batch, plan)
        torch.cuda.current_stream(device).wait_stream(shared.stream)
        graph = torch.cuda.CUDAGraph()
        # thread_local: threads that move KV may use the device meanwhile
        capturing = torch.cuda.graph(
            graph, pool=self._backend.graph_pool, stream=shared.stream, capture_error_mode="thread_local"
        )
        with torch.cuda.device(device), capturing:
            hidden = forward(static_ids, batch, plan)
        logger.debug("captured the decode step of %d sequences as a CUDA graph", size)
        return _Graph(graph, static_ids, plan, hidden)
