"""Paged attention over FlashInfer's wrappers: which wrappers a step needs, when they are planned, and how they run.

UNVERIFIED ON A GPU. FlashInfer plans attention per (scale, window, softcap), which a caller passes to `attend` only: a
step's plan keeps the metadata, and each such variant is planned at its first use in the step.
"""

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
    plan_prefill,
    unpacked,
)
from kvrelay.kernels.cuda.prefill_kernels import PrefillKernels
from kvrelay.kernels.cuda.staging import DeviceStaging
from kvrelay.kernels.oracle.reference import ReferencePlan

WORKSPACE_BYTES = 256 << 20


@dataclass(slots=True)
class CudaPlan:
    """One step: device copies of its metadata, and the attention wrappers planned for it so far.

    device_positions: [T] int64, device_slots: [T] int32, device_zeros: [T] int32, on the device. `decode` covers the
    batch's decode rows, `prefill` the rest. decode_blocks, prefill_blocks: [n] int64 on the device, blocks to unpack;
    the indices of `decode` and `prefill` then count from the first of these. Latent attention handles all sequences in
    one: `latent` and `latent_blocks`.
    """

    shape: AttentionShape
    batch: AttentionBatch
    device_positions: Tensor
    device_slots: Tensor
    device_zeros: Tensor
    decode: PagedIndex | None = None
    prefill: PagedIndex | None = None
    fallback: ReferencePlan | None = None
    decode_blocks: Tensor | None = None
    prefill_blocks: Tensor | None = None
    latent: PagedIndex | None = None
    latent_blocks: Tensor | None = None
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

    def levels(self, batch: AttentionBatch, shape: AttentionShape) -> Levels | None:
        """The prefixes that the batch's decode rows share, or None where sharing does not pay."""
        n = batch.num_decode
        if n < 2 or not self.can_share_prefixes(shape):
            return None
        return make_levels(batch.context_lens[:n], batch.block_tables[:n], shape.block_size)

    # ---- plans

    def fill_plan(self, plan: CudaPlan) -> None:
        """Add the paged indices of the plan's batch, staged for FlashInfer."""
        batch, shape, n = plan.batch, plan.shape, plan.batch.num_decode
        if shape.latent_dim is not None:
            queries = batch.query_starts.to(torch.int32)
            plan.latent = paged_index(batch.context_lens, batch.block_tables, shape.block_size, queries)
            if is_unpacked(shape):
                plan.latent, plan.latent_blocks = self._renumbered(plan.latent)
            assert plan.latent is not None
            plan.latent = plan.latent.staged(self._staging)
            return
        if n:
            plan.levels = self.levels(batch, shape)
            plan.decode = paged_index(batch.context_lens[:n], batch.block_tables[:n], shape.block_size)
        if n < batch.context_lens.shape[0]:
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

    def graph_wrapper(self, kv_layout: KvOrder, indptr: Tensor, indices: Tensor, last_page_len: Tensor) -> Any:
        """A decode wrapper for CUDA graphs, whose metadata lies in these device buffers (int32), which never move."""
        return self._flashinfer.BatchDecodeWithPagedKVCacheWrapper(
            self._workspace,
            kv_layout,
            use_cuda_graph=True,
            use_tensor_cores=True,
            paged_kv_indptr_buffer=indptr,
            paged_kv_indices_buffer=indices,
            paged_kv_last_page_len_buffer=last_page_len,
            backend=DECODE_KERNELS,
        )

    def _wrapper(self, rows: str, shape: AttentionShape, variant: AttentionVariant, kernels: str) -> Any:
        """The wrapper of a step's decode rows, or of its chunks; planned anew every step.

        FlashInfer's decode wrapper would run the same kernel, and copy row numbers from pageable memory.
        """
        key = (f"{rows} {kernels}", shape.kv_layout, variant)
        if key not in self._wrappers:
            make = self._flashinfer.BatchPrefillWithPagedKVCacheWrapper
            self._wrappers[key] = make(self._workspace, shape.kv_layout, backend=kernels)
        return self._wrappers[key]

    def _planned(self, plan: CudaPlan, variant: AttentionVariant) -> tuple[Any, Any]:
        """The decode and prefill wrappers, ready to run this step (None where the step has no such part)."""
        if variant not in plan.wrappers:
            decode: Any = None
            prefill: Any = None
            if plan.levels is not None and variant[1] is None:
                decode = self._cascade(plan, plan.levels, variant)
            elif plan.decode is not None:
                decode = self._wrapper("decode", plan.shape, variant, DECODE_KERNELS)
                with self._staging.planning(decode):
                    plan_prefill(decode, plan.decode, plan.shape, variant)
            if plan.prefill is not None:
                kernels = self.prefill_kernels.of(plan.shape, variant)
                prefill = self._wrapper("prefill", plan.shape, variant, kernels)
                with self._staging.planning(prefill):
                    plan_prefill(prefill, plan.prefill, plan.shape, variant)
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

    def _latent_wrapper(self, plan: CudaPlan, index: PagedIndex, variant: AttentionVariant) -> Any:
        if variant not in plan.wrappers:
            key = ("latent", plan.shape.kv_layout, variant)
            if key not in self._wrappers:
                make = self._flashinfer.mla.BatchMLAPagedAttentionWrapper
                self._wrappers[key] = make(self._workspace, backend=DECODE_KERNELS)
            wrapper = self._wrappers[key]
            with self._staging.planning(wrapper):
                self._plan_latent(wrapper, plan, index, variant[0])
            plan.wrappers[variant] = (wrapper, None)
        return plan.wrappers[variant][0]

    def _plan_latent(self, wrapper: Any, plan: CudaPlan, index: PagedIndex, scale: float) -> None:
        """All sequences of a step, decode rows and prompt chunks alike; causal, bottom-right."""
        shape = plan.shape
        assert shape.latent_dim is not None
        wrapper.plan(
            metadata=self._flashinfer.mla.MLAPlanMetadata.csr(
                index.qo_indptr, index.indptr, index.indices, index.kv_lens
            ),
            num_heads=shape.num_heads,
            head_dim_ckv=shape.latent_dim,
            head_dim_kpe=shape.head_dim - shape.latent_dim,
            page_size=shape.block_size,
            causal=True,
            sm_scale=scale,
            q_data_type=shape.dtype,
            kv_data_type=shape.dtype,
        )

    # ---- kernels

    def attend(self, out: Tensor, q: Tensor, kv_layer: Tensor, plan: CudaPlan, variant: AttentionVariant) -> None:
        """Attention of q [T, heads, head_dim] into `out`, both contiguous; see Backend.attention."""
        decode, prefill = self._planned(plan, variant)
        n, kv_cache = plan.batch.num_decode, in_memory_order(kv_layer, plan.shape.kv_layout)
        if decode is not None:
            decode.run(q[:n], unpacked(kv_cache, plan.decode_blocks, q.dtype), out=out[:n])
        if prefill is not None:
            prefill.run(q[n:], unpacked(kv_cache, plan.prefill_blocks, q.dtype), out=out[n:])

    def attend_latent(self, q: Tensor, kv_layer: Tensor, plan: CudaPlan, scale: float, latent_dim: int) -> Tensor:
        """See Backend.latent_attention."""
        assert plan.latent is not None
        wrapper = self._latent_wrapper(plan, plan.latent, (scale, None, None))
        out = torch.empty((*q.shape[:2], latent_dim), dtype=q.dtype, device=q.device)
        cache = unpacked(kv_layer, plan.latent_blocks, q.dtype)[:, 0, :, 0]
        wrapper.run(query=q.contiguous(), kv_cache=cache, out=out)
        return out

    def append(self, k: Tensor, v: Tensor, kv_cache: Tensor, kv_layout: KvOrder, slots: Tensor, zeros: Tensor) -> None:
        """Scatter k, v [T, kv_heads, head_dim] into a cache given as it lies in memory. slots, zeros: [T] int32.

        The cache counts as one sequence that fills all blocks in order: a token's position in it is its slot, so that
        the append needs no block tables.
        """
        k, v = (x if x.stride(-1) == 1 else x.contiguous() for x in (k, v))
        num_blocks, block_size = kv_cache.shape[0], kv_cache.shape[3 if kv_layout == "HND" else 2]
        key = (num_blocks, block_size)
        if key not in self._whole_caches:
            numbers = ([0, num_blocks], [block_size])
            indptr, last = (torch.tensor(row, dtype=torch.int32, device=self._device) for row in numbers)
            self._whole_caches[key] = torch.arange(num_blocks, dtype=torch.int32, device=self._device), indptr, last
        indices, indptr, last = self._whole_caches[key]
        self._flashinfer.append_paged_kv_cache(k, v, zeros, slots, kv_cache, indices, indptr, last, kv_layout)
