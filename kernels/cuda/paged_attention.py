"""Paged attention over FlashInfer's wrappers: which wrappers a step needs, when they are planned, and how they run.

UNVERIFIED ON A GPU. FlashInfer plans attention per (scale, window, softcap), which a caller passes to `attend` only: a
step's plan keeps the metadata, and each such variant is planned at its first use in the step.
"""

from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from kvrelay.kernels.backend import AttentionBatch, AttentionShape, KvOrder
from kvrelay.kernels.cuda.cascade import CascadeDecode, Levels, make_levels
from kvrelay.kernels.cuda.plan import (
    CudaPlan,
    PagedIndex,
    Variant,
    has_attention,
    in_memory_order,
    is_unpacked,
    options_of,
    paged_index,
    plan_decode,
    plan_prefill,
    unpacked,
)
from kvrelay.kernels.cuda.prefill import PrefillKernels
from kvrelay.kernels.cuda.staging import DeviceStaging

WORKSPACE_BYTES = 256 << 20
DECODE_KERNELS = "fa2"  # on every processor from sm_80 on, with window and softcap at any block size


class PagedAttention:
    """FlashInfer's attention wrappers of one device, kept between steps. Call it from the engine thread only.

    saved_tokens: tokens of KV that decode rows did not read again; see Backend.cascade_saved_tokens.
    """

    def __init__(self, flashinfer: Any, device: torch.device, staging: DeviceStaging) -> None:
        self._flashinfer, self._device, self._staging = flashinfer, device, staging
        # FlashInfer requires zeros at first use
        self._workspace = torch.zeros(WORKSPACE_BYTES, dtype=torch.uint8, device=device)
        self._wrappers: dict[tuple[str, KvOrder, Variant], Any] = {}
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
        batch, shape, n = plan.batch, plan.shape, plan.num_decode
        if shape.latent_dim is not None:
            plan.latent = paged_index(batch.context_lens, batch.block_tables, shape.block_size)
            if is_unpacked(shape):
                plan.latent, plan.latent_blocks = self._renumbered(plan.latent)
            plan.latent = self.staged(plan.latent)
            return
        if n:
            plan.levels = self.levels(batch, shape)
            plan.decode = paged_index(batch.context_lens[:n], batch.block_tables[:n], shape.block_size)
        if n < batch.context_lens.shape[0]:
            plan.prefill = paged_index(batch.context_lens[n:], batch.block_tables[n:], shape.block_size)
            plan.qo_indptr = (batch.query_starts[n:] - batch.query_starts[n]).to(torch.int32)
        if is_unpacked(shape):
            plan.decode, plan.decode_blocks = self._renumbered(plan.decode)
            plan.prefill, plan.prefill_blocks = self._renumbered(plan.prefill)
        plan.decode, plan.prefill = self.staged(plan.decode), self.staged(plan.prefill)

    def staged(self, index: PagedIndex | None) -> PagedIndex | None:
        """The index with its block ids on the device and the rest in pinned memory, so that planning does not wait."""
        if index is None:
            return None
        return PagedIndex(index.indptr.pin_memory(), self._staging.put(index.indices), index.last_page_len.pin_memory())

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

    def _decode_wrapper(self, kv_layout: KvOrder, variant: Variant) -> Any:
        """The wrapper of this variant; it is planned anew every step."""
        key = ("decode", kv_layout, variant)
        if key not in self._wrappers:
            make = self._flashinfer.BatchDecodeWithPagedKVCacheWrapper
            # tensor cores: any group size
            self._wrappers[key] = make(self._workspace, kv_layout, backend=DECODE_KERNELS, use_tensor_cores=True)
        return self._wrappers[key]

    def _prefill_wrapper(self, shape: AttentionShape, variant: Variant) -> Any:
        kernels = self.prefill_kernels.of(shape, variant)
        key = (f"prefill {kernels}", shape.kv_layout, variant)
        if key not in self._wrappers:
            make = self._flashinfer.BatchPrefillWithPagedKVCacheWrapper
            self._wrappers[key] = make(self._workspace, shape.kv_layout, backend=kernels)
        return self._wrappers[key]

    def _planned(self, plan: CudaPlan, variant: Variant) -> tuple[Any, Any]:
        """The decode and prefill wrappers, ready to run this step (None where the step has no such part)."""
        if variant not in plan.wrappers:
            decode: Any = None
            prefill: Any = None
            if plan.levels is not None and variant[1] is None:
                decode = self._cascade(plan, plan.levels, variant)
            elif plan.decode is not None:
                decode = self._decode_wrapper(plan.shape.kv_layout, variant)
                with self._staging.planning(decode):
                    plan_decode(decode, plan.decode, plan.shape, variant)
            if plan.prefill is not None:
                assert plan.qo_indptr is not None
                prefill = self._prefill_wrapper(plan.shape, variant)
                with self._staging.planning(prefill):
                    plan_prefill(prefill, plan.qo_indptr, plan.prefill, plan.shape, variant)
            plan.wrappers[variant] = (decode, prefill)
        return plan.wrappers[variant]

    def _cascade(self, plan: CudaPlan, levels: Levels, variant: Variant) -> CascadeDecode:
        """Decode rows in two levels, planned for this step; all layers of this variant read the shared blocks once."""
        key = ("cascade", plan.shape.kv_layout, variant)
        if key not in self._wrappers:
            self._wrappers[key] = CascadeDecode(self._flashinfer, self._workspace, plan.shape.kv_layout, DECODE_KERNELS)
        cascade: CascadeDecode = self._wrappers[key]
        with self._staging.planning(cascade):
            cascade.plan(levels, plan.shape, self._staging, options_of(variant, plan.shape.dtype))
        self.saved_tokens += levels.spared_tokens
        return cascade

    def _latent_wrapper(self, plan: CudaPlan, index: PagedIndex, variant: Variant) -> Any:
        if variant not in plan.wrappers:
            key = ("latent", plan.shape.kv_layout, variant)
            if key not in self._wrappers:
                self._wrappers[key] = make_wrapper(self._flashinfer, self._workspace, DECODE_KERNELS)
            wrapper, scale = self._wrappers[key], variant[0]
            with self._staging.planning(wrapper):
                plan_latent(self._flashinfer, wrapper, plan.batch, index.indptr, index.indices, plan.shape, scale)
            plan.wrappers[variant] = (wrapper, None)
        return plan.wrappers[variant][0]

    # ---- kernels

    def attend(self, out: Tensor, q: Tensor, kv_layer: Tensor, plan: CudaPlan, variant: Variant) -> None:
        """Attention of q [T, heads, head_dim] into `out`, both contiguous; see Backend.attention."""
        decode, prefill = self._planned(plan, variant)
        n, kv_cache = plan.num_decode, in_memory_order(kv_layer, plan.shape.kv_layout)
        if decode is not None:
            decode.run(q[:n], unpacked(kv_cache, plan.decode_blocks, q.dtype), out=out[:n])
        if prefill is not None:
            prefill.run(q[n:], unpacked(kv_cache, plan.prefill_blocks, q.dtype), out=out[n:])

    def attend_latent(self, q: Tensor, kv_layer: Tensor, plan: CudaPlan, scale: float, latent_dim: int) -> Tensor:
        """See Backend.latent_attention."""
        assert plan.latent is not None
        wrapper = self._latent_wrapper(plan, plan.latent, (scale, None, None))
        return run_latent(wrapper, q, unpacked(kv_layer, plan.latent_blocks, q.dtype), latent_dim)

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


_DTYPES = frozenset((torch.float16, torch.bfloat16))
_MOST_HEADS = 128


def has_latent_attention(shape: AttentionShape) -> bool:
    """Whether FlashInfer's fa2 kernel computes latent attention of this shape.

    Latents come in multiples of 128, rotary parts of 64. Its tiles are 64 or, from 65 heads on, 128 rows of heads: if
    the heads do not divide a tile, it would skip a visible key, and refuses the plan.
    """
    if shape.latent_dim is None or shape.dtype not in _DTYPES:
        return False
    rope_dim = shape.head_dim - shape.latent_dim
    return shape.latent_dim % 128 == 0 and rope_dim % 64 == 0 and _MOST_HEADS % shape.num_heads == 0


def make_wrapper(flashinfer: Any, workspace: Tensor, kernels: str) -> Any:
    """A wrapper, to be planned for every step."""
    return flashinfer.mla.BatchMLAPagedAttentionWrapper(workspace, backend=kernels)


def plan_latent(
    flashinfer: Any,
    wrapper: Any,
    batch: AttentionBatch,
    indptr: Tensor,
    indices: Tensor,
    shape: AttentionShape,
    scale: float,
) -> None:
    """Plan all sequences of a step, decode rows and prompt chunks alike; causal, bottom-right.

    indptr: [S+1] int32 into indices, block ids, int32; metadata on the CPU.
    """
    assert shape.latent_dim is not None
    wrapper.plan(
        metadata=flashinfer.mla.MLAPlanMetadata.csr(
            batch.query_starts.to(torch.int32), indptr, indices, batch.context_lens.to(torch.int32)
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


def run_latent(wrapper: Any, q: Tensor, kv_layer: Tensor, latent_dim: int) -> Tensor:
    """q [T, heads, head_dim], a layer's cache [num_blocks, 1, block_size, 1, head_dim] -> [T, heads, latent_dim]."""
    out = torch.empty((*q.shape[:2], latent_dim), dtype=q.dtype, device=q.device)
    wrapper.run(query=q.contiguous(), kv_cache=kv_layer[:, 0, :, 0], out=out)
    return out
