"""A step's plan on CUDA: shapes, paged indices, and the arguments of FlashInfer's plans.

UNVERIFIED ON A GPU, as backend.py is.
"""

from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from kvrelay import fp8
from kvrelay.kernels.backend import AttentionBatch, AttentionShape, KvOrder
from kvrelay.kernels.cuda.cascade import Levels
from kvrelay.kernels.oracle.reference import ReferencePlan

HALF = frozenset((torch.float16, torch.bfloat16))
HEAD_DIMS = frozenset((64, 128, 256))
_MAX_THREADS = 1024  # of one CUDA block
Variant = tuple[float, int | None, float | None]  # scale, window, softcap


@dataclass(frozen=True, slots=True)
class PagedIndex:
    """FlashInfer's view of some sequences' blocks, int32; indptr and last_page_len on the CPU, where FlashInfer plans.

    indptr: [S+1] into indices [sum of blocks], block ids. last_page_len: [S] tokens in the last block.
    """

    indptr: Tensor
    indices: Tensor
    last_page_len: Tensor


@dataclass(slots=True)
class CudaPlan:
    """One step: device copies of its metadata, and the attention wrappers planned for it so far. A record, hence its
    size.

    positions, slot_mapping: the batch's own, on the CPU. device_positions: [T] int64, device_slots: [T] int32,
    device_zeros: [T] int32, on the device. `decode` covers the first `num_decode` sequences, `prefill` the rest, with
    qo_indptr [P+1] on the CPU. decode_blocks, prefill_blocks: [n] int64 on the device, blocks to unpack; the indices of
    `decode` and `prefill` then count from the first of these. Latent attention handles all sequences in one: `latent`
    and `latent_blocks`.
    """

    shape: AttentionShape
    batch: AttentionBatch
    positions: Tensor
    slot_mapping: Tensor
    device_positions: Tensor
    device_slots: Tensor
    device_zeros: Tensor
    num_decode: int
    decode: PagedIndex | None
    prefill: PagedIndex | None
    qo_indptr: Tensor | None
    fallback: ReferencePlan | None
    decode_blocks: Tensor | None = None
    prefill_blocks: Tensor | None = None
    latent: PagedIndex | None = None
    latent_blocks: Tensor | None = None
    levels: Levels | None = None  # of decode rows that share prefixes, for variants without a window
    wrappers: dict[Variant, tuple[Any, Any]] = field(default_factory=dict)


def has_attention(shape: AttentionShape) -> bool:
    """Whether FlashInfer has attention kernels for this shape; else its steps run in plain torch."""
    return shape.dtype in HALF and shape.head_dim in HEAD_DIMS


def is_unpacked(shape: AttentionShape) -> bool:
    """Whether the cache's dtype is not the model's, so that blocks are unpacked for FlashInfer."""
    return shape.kv_dtype not in (None, shape.dtype)


def in_memory_order(kv_layer: Tensor, kv_layout: KvOrder) -> Tensor:
    """The cache in FlashInfer's form for `kv_layout`: its dimensions in memory order."""
    return kv_layer.transpose(2, 3) if kv_layout == "HND" else kv_layer


def has_append(k: Tensor, kv_cache: Tensor) -> bool:
    """Whether FlashInfer can append k [T, kv_heads, head_dim] to this cache, given in memory order.

    Its kernel uses one CUDA block of kv_heads * head_dim / max(8, head_dim / 32) threads per token.
    """
    _, num_heads, head_dim = k.shape
    if k.dtype not in HALF or k.dtype != kv_cache.dtype or head_dim not in HEAD_DIMS or not kv_cache.is_contiguous():
        return False
    return num_heads * head_dim // max(8, head_dim // 32) <= _MAX_THREADS


def paged_index(context_lens: Tensor, block_tables: Tensor, block_size: int) -> PagedIndex:
    """Flatten block tables [S, max_blocks] to the blocks in use."""
    counts = (context_lens + block_size - 1) // block_size
    indptr = torch.zeros(counts.shape[0] + 1, dtype=torch.int32)
    indptr[1:] = counts.cumsum(0)
    used = torch.arange(block_tables.shape[1]).unsqueeze(0) < counts.unsqueeze(1)
    last = context_lens - (counts - 1) * block_size
    return PagedIndex(indptr, block_tables[used].to(torch.int32), last.to(torch.int32))


def unpacked(kv_cache: Tensor, blocks: Tensor | None, dtype: torch.dtype) -> Tensor:
    """These blocks of the cache in another dtype, in order; None: the cache itself."""
    return kv_cache if blocks is None else fp8.loaded(kv_cache[blocks]).to(dtype)


def options_of(variant: Variant, dtype: torch.dtype) -> dict[str, Any]:
    scale, window, softcap = variant
    return {
        "sm_scale": scale,
        "window_left": -1 if window is None else window - 1,
        "logits_soft_cap": softcap,
        "q_data_type": dtype,
        "kv_data_type": dtype,
    }


def plan_decode(wrapper: Any, index: PagedIndex, shape: AttentionShape, variant: Variant) -> None:
    """Plan a BatchDecodeWithPagedKVCacheWrapper for one-token sequences."""
    wrapper.plan(
        index.indptr,
        index.indices,
        index.last_page_len,
        shape.num_heads,
        shape.num_kv_heads,
        shape.head_dim,
        shape.block_size,
        **options_of(variant, shape.dtype),
    )


def plan_prefill(wrapper: Any, qo_indptr: Tensor, index: PagedIndex, shape: AttentionShape, variant: Variant) -> None:
    """Plan a BatchPrefillWithPagedKVCacheWrapper for chunks of queries, qo_indptr [P+1] int32; causal, bottom-right."""
    wrapper.plan(
        qo_indptr,
        index.indptr,
        index.indices,
        index.last_page_len,
        shape.num_heads,
        shape.num_kv_heads,
        shape.head_dim,
        shape.block_size,
        causal=True,
        **options_of(variant, shape.dtype),
    )
