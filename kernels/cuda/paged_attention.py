"""Paged attention over FlashInfer's wrappers: which wrappers a step needs, when they are planned, and how they run.

FlashInfer plans attention per (scale, window, softcap), which a caller passes to `attend` only: a
step's plan keeps the metadata, and each such variant is planned at its first use in the step.
"""

from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor

from kvrelay.kernels.backend import AttentionBatch, AttentionShape, AttentionVariant, KvOrder
from kvrelay.kernels.cuda.cascade import CascadeDecode, Levels, make_levels
from kvrelay.kernels.cuda.plan import (
    DECODE_KERNELS,
    PagedIndex,
    has_attention,
    in_memory_order,
    is_unpacked,
    paged_index,
    plan_decode,
    plan_latent,
    plan_prefill,
    unpacked,
)
from kvrelay.kernels.cuda.prefill_kernels import PrefillKernels
from kvrelay.kernels.cuda.staging import DeviceStaging
from kvrelay.kernels.oracle.reference import ReferencePlan

WORKSPACE_BYTES = 256 << 20
Queries = tuple[Tensor, ...]


@dataclass(slots=True)
class CudaPlan:
    """One step: device copies of its metadata, and the attention wrappers planned for it so far.

    device_positions: [T] int64, device_slots: [T] int32, device_zeros: [T] int32, on the device. `decode` covers the
    batch's decode rows, `prefill` the rest. decode_blocks, prefill_blocks: [n] int64 on the device, blocks to unpack;
    the indices of `decode` and `prefill` then count from the first of these. Latent attention has one kernel for both:
    steps with prompts are all `prefill`. num_decode: rows of `decode`.
    """

    shape: AttentionShape
    batch: AttentionBatch
    device_positions: Tensor
    device_slots: Tensor
    device_zeros: Tensor
    num_decode: int = 0
    decode: PagedIndex | None = None
    prefill: PagedIndex | None = None
    fallback: ReferencePlan | None = None
    decode_blocks: Tensor | None = None
    prefill_blocks: Tensor | None = None
    levels: Levels | None = None  # of decode rows that share prefixes, for variants without a window
    wrappers: dict[AttentionVariant, tuple[Any, Any]] = field(default_factory=dict)


class PagedAttention:
    """FlashInfer's attention wrappers of one device, kept between steps. Call it from the engine thread only.

    saved_tokens: tokens of KV that decode rows did not read again; see Backend.cascade_saved_tokens.
    """

    def __init__(self, flashinfer: Any, device: torch.device, staging: DeviceStaging) -> None:
        self._flashinfer, self._device, self._staging = flashinfer, device, staging
        # FlashInfer requires zeros at first use
        self._workspace = torch.zeros(WORKSPACE_BYTES, dtype=torch.uint8, device=device)
        self._wrappers: dict[tuple[str, KvOrder, AttentionVariant], Any] = {}
        self._whole_caches: dict[tuple[int, int], tuple[Tensor, Tensor, Tensor]] = {}
        self.prefill_kernels = PrefillKernels(flashinfer, self._workspace)
        self.saved_tokens = 0

    def describe(self) -> str:
        """The kernels in use, in short words."""
        return f"decode {DECODE_KERNELS}, prefill {self.prefill_kernels.describe()}"

    def can_share_prefixes(self, shape: AttentionShape) -> bool:
        """Whether cascade attention is possible for this shape."""
        return has_attention(shape) and not is_unpacked(shape) and shape.latent_dim is None

    # ---- plans

    def fill_plan(self, plan: CudaPlan) -> None:
        """Add the paged indices of the plan's batch, staged for FlashInfer."""
        batch, shape, n = plan.batch, plan.shape, plan.batch.num_decode
        num_seqs = batch.context_lens.shape[0]
        plan.num_decode = n = 0 if shape.latent_dim is not None and n < num_seqs else n
        if n:
            if self.can_share_prefixes(shape):
                plan.levels = make_levels(batch.context_lens[:n], batch.block_tables[:n], shape.block_size)
            plan.decode = paged_index(batch.context_lens[:n], batch.block_tables[:n], shape.block_size)
        if n < num_seqs:
            queries = (batch.query_starts[n:] - batch.query_starts[n]).to(torch.int32)
            plan.prefill = paged_index(batch.context_lens[n:], batch.block_tables[n:], shape.block_size, queries)
        if is_unpacked(shape):
            plan.decode, plan.decode_blocks = self._renumbered(plan.decode)
            plan.prefill, plan.prefill_blocks = self._renumbered(plan.prefill)
        if plan.decode is not None:
            plan.decode = plan.decode.staged(self._staging)
        if plan.prefill is not None:
            plan.prefill = plan.prefill.staged(self._staging)

    def _renumbered(self, index: PagedIndex | None) -> tuple[PagedIndex | None, Tensor | None]:
        """The index into a cache that consists of just these blocks, in order; and the blocks, on the device."""
        if index is None:
            return None, None
        numbers = torch.arange(index.indices.shape[0], dtype=torch.int32)
        return replace(index, indices=numbers), self._staging.put(index.indices.to(torch.int64))

    # ---- wrappers

    def graph_wrapper(self, shape: AttentionShape, buffers: PagedIndex) -> Any:
        """A wrapper of decode rows for CUDA graphs, whose metadata lies in these device buffers, which never move."""
        common = {"use_cuda_graph": True, "backend": DECODE_KERNELS}
        if shape.latent_dim is not None:
            return self._flashinfer.mla.BatchMLAPagedAttentionWrapper(
                self._workspace,
                qo_indptr=buffers.qo_indptr,
                kv_indptr=buffers.indptr,
                kv_indices=buffers.indices,
                kv_len_arr=buffers.kv_lens,
                **common,
            )
        return self._flashinfer.BatchDecodeWithPagedKVCacheWrapper(
            self._workspace,
            shape.kv_layout,
            use_tensor_cores=True,
            paged_kv_indptr_buffer=buffers.indptr,
            paged_kv_indices_buffer=buffers.indices,
            paged_kv_last_page_len_buffer=buffers.last_page_len,
            **common,
        )

    def plan_graph(self, wrapper: Any, index: PagedIndex, shape: AttentionShape, variant: AttentionVariant) -> None:
        """Write a step of decode rows into the buffers of a graph's wrapper."""
        self._plan(plan_decode, wrapper, index, shape, variant)

    def _plan(
        self,
        heads: Callable[..., None],
        wrapper: Any,
        index: PagedIndex,
        shape: AttentionShape,
        variant: AttentionVariant,
    ) -> None:
        """heads: plans wrappers of attention with keys and values per head."""
        with self._staging.planning(wrapper):
            if shape.latent_dim is None:
                heads(wrapper, index, shape, variant)
            else:
                plan_latent(self._flashinfer, wrapper, index, shape, variant)

    def _wrapper(self, rows: str, shape: AttentionShape, variant: AttentionVariant, kernels: str) -> Any:
        """The wrapper of a step's decode rows, or of its chunks; planned anew every step.

        FlashInfer's decode wrapper would run the same kernel, and copy row numbers from pageable memory.
        """
        is_latent = shape.latent_dim is not None  # a draft model may be another kind than its target
        key = (f"{'latent ' if is_latent else ''}{rows} {kernels}", shape.kv_layout, variant)
        if key not in self._wrappers and not is_latent:
            make = self._flashinfer.BatchPrefillWithPagedKVCacheWrapper
            self._wrappers[key] = make(self._workspace, shape.kv_layout, backend=kernels)
        elif key not in self._wrappers:
            make = self._flashinfer.mla.BatchMLAPagedAttentionWrapper
            self._wrappers[key] = make(self._workspace, backend=kernels)
        return self._wrappers[key]

    def _planned(self, plan: CudaPlan, variant: AttentionVariant) -> tuple[Any, Any]:
        """The decode and prefill wrappers, ready to run this step (None where the step has no such part)."""
        if variant not in plan.wrappers:
            decode: Any = None
            prefill: Any = None
            if plan.levels is not None and variant[1] is None:
                decode = self._cascade(plan, plan.levels, variant)
            elif plan.decode is not None:
                decode = self._ready("decode", plan.decode, plan.shape, variant)
            if plan.prefill is not None:
                prefill = self._ready("prefill", plan.prefill, plan.shape, variant)
            plan.wrappers[variant] = (decode, prefill)
        return plan.wrappers[variant]

    def _cascade(self, plan: CudaPlan, levels: Levels, variant: AttentionVariant) -> CascadeDecode:
        """Decode rows in two levels, planned for this step; all layers of this variant read the shared blocks once."""
        key = ("cascade", plan.shape.kv_layout, variant)
        if key not in self._wrappers:
            self._wrappers[key] = CascadeDecode(self._flashinfer, self._workspace, plan.shape.kv_layout, DECODE_KERNELS)
        cascade: CascadeDecode = self._wrappers[key]
        with self._staging.planning(cascade):
            cascade.plan(levels, plan.shape, self._staging, variant)
        self.saved_tokens += levels.spared_tokens
        return cascade

    def _ready(self, rows: str, index: PagedIndex, shape: AttentionShape, variant: AttentionVariant) -> Any:
        """The wrapper of a step's decode rows, or of its chunks, planned for this step."""
        is_chosen = rows == "prefill" and shape.latent_dim is None
        kernels = self.prefill_kernels.of(shape, variant) if is_chosen else DECODE_KERNELS
        wrapper = self._wrapper(rows, shape, variant, kernels)
        self._plan(plan_prefill, wrapper, index, shape, variant)
        return wrapper

    # ---- kernels

    def attend(
        self, out: Tensor, queries: Queries, kv_layer: Tensor, plan: CudaPlan, variant: AttentionVariant
    ) -> None:
        """Attention of queries [T, heads, head_dim] into `out`, both contiguous; see Backend.attention.

        Of latent attention: (q, q_rotary), see Backend.latent_attention.
        """
        decode, prefill = self._planned(plan, variant)
        n, is_latent = plan.num_decode, plan.shape.latent_dim is not None
        kv_cache = kv_layer[:, 0, :, 0] if is_latent else in_memory_order(kv_layer, plan.shape.kv_layout)
        own, rest = slice(0, n), slice(n, None)
        for wrapper, rows, blocks in ((decode, own, plan.decode_blocks), (prefill, rest, plan.prefill_blocks)):
            if wrapper is None:
                continue
            q, cache = tuple(x[rows] for x in queries), unpacked(kv_cache, blocks, out.dtype)
            if is_latent:
                wrapper.run(query=q, kv_cache=cache, out=out[rows])
            else:
                wrapper.run(*q, cache, out=out[rows])

    def append(self, k: Tensor, v: Tensor, kv_cache: Tensor, kv_layout: KvOrder, slots: Tensor, zeros: Tensor) -> None:
        """Scatter k, v [T, kv_heads, head_dim] into a cache given as it lies in memory. slots, zeros: [T] int32.

        The cache counts as one sequence that fills all blocks in order: a token's position in it is its slot, so that
        the append needs no block tables.
        """
        k, v = (x if x.stride(-1) == 1 else x.contiguous() for x in (k, v))
        whole = self._whole_cache(kv_cache.shape[0], kv_cache.shape[3 if kv_layout == "HND" else 2])
        self._flashinfer.append_paged_kv_cache(k, v, zeros, slots, kv_cache, *whole, kv_layout)

    def append_latent(self, latents: Tensor, keys: Tensor, kv_layer: Tensor, slots: Tensor, zeros: Tensor) -> None:
        """The same for latents [T, latent_dim] and keys [T, rope_dim] of a latent layer."""
        latents, keys = (x if x.stride(-1) == 1 else x.contiguous() for x in (latents, keys))
        cache = kv_layer[:, 0, :, 0].tensor_split((latents.shape[1],), dim=-1)
        whole = self._whole_cache(kv_layer.shape[0], kv_layer.shape[2])
        self._flashinfer.append_paged_mla_kv_cache(latents, keys, zeros, slots, *cache, *whole)

    def _whole_cache(self, num_blocks: int, block_size: int) -> tuple[Tensor, Tensor, Tensor]:
        """Block ids, where they start and the last block's tokens, of a cache that is one sequence."""
        key = (num_blocks, block_size)
        if key not in self._whole_caches:
            numbers = ([0, num_blocks], [block_size])
            indptr, last = (torch.tensor(row, dtype=torch.int32, device=self._device) for row in numbers)
            self._whole_caches[key] = torch.arange(num_blocks, dtype=torch.int32, device=self._device), indptr, last
        return self._whole_caches[key]
