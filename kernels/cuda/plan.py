"""What FlashInfer's plans take: which shapes its kernels support, paged indices, and arguments."""

from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

from kvrelay import fp8
from kvrelay.kernels.backend import AttentionShape, AttentionVariant, KvOrder
from kvrelay.kernels.cuda.staging import DeviceStaging

HALF = frozenset((torch.float16, torch.bfloat16))
HEAD_DIMS = frozenset((64, 128, 256))
DECODE_KERNELS = "fa2"  # on every processor from sm_80 on, with window and softcap at any block size
LATENT_APPEND = (512, 64)  # latent and rotary numbers, the only ones that FlashInfer's append knows
_MAX_THREADS = 1024  # of one CUDA block
_MOST_HEADS = 128


@dataclass(frozen=True, slots=True)
class PagedIndex:
    """FlashInfer's view of some sequences' blocks, int32; on the CPU, where FlashInfer plans, but for `indices`.

    indptr: [S+1] into indices [sum of blocks], block ids. last_page_len, kv_lens: [S] tokens, in the last block and in
    all. qo_indptr: [S+1] into their queries.
    """

    indptr: Tensor
    indices: Tensor
    last_page_len: Tensor
    kv_lens: Tensor
    qo_indptr: Tensor

    def of(self, n: int) -> "PagedIndex":
        """The beginnings of these buffers, for n sequences."""
        return PagedIndex(
            self.indptr[: n + 1], self.indices, self.last_page_len[:n], self.kv_lens[:n], self.qo_indptr[: n + 1]
        )

    def staged(self, staging: DeviceStaging) -> "PagedIndex":
        """With its block ids on the device and the rest in pinned memory, so that planning does not wait."""
        parts = (self.indptr, self.indices, self.last_page_len, self.kv_lens, self.qo_indptr)
        whole = torch.from_numpy(np.concatenate([part.numpy() for part in parts])).pin_memory()  # at once: quicker
        indptr, indices, *rest = whole.split([part.shape[0] for part in parts])
        return PagedIndex(indptr, staging.put(indices), *rest)


def has_attention(shape: AttentionShape) -> bool:
    """Whether FlashInfer has attention kernels for this shape; else its steps run in plain torch.

    Latents come in multiples of 128, rotary parts of 64. Its tiles are 64 or, from 65 heads on, 128 rows of heads: if
    the heads do not divide a tile, it would skip a visible key, and refuses the plan.
    """
    if shape.dtype not in HALF or shape.latent_dim is None:
        return shape.dtype in HALF and shape.head_dim in HEAD_DIMS
    rope_dim = shape.head_dim - shape.latent_dim
    return shape.latent_dim % 128 == 0 and rope_dim % 64 == 0 and _MOST_HEADS % shape.num_heads == 0


def is_unpacked(shape: AttentionShape) -> bool:
    """Whether the cache's dtype is not the model's, so that blocks are unpacked for FlashInfer."""
    return shape.kv_dtype not in (None, shape.dtype)


def in_memory_order(kv_layer: Tensor, kv_layout: KvOrder) -> Tensor:
    """The cache in FlashInfer's form for `kv_layout`: its dimensions in memory order."""
    return kv_layer.transpose(2, 3) if kv_layout == "HND" else kv_layer


def has_append(k: Tensor, kv_cache: Tensor) -> bool:
    """Whether FlashInfer can append k [T, kv_heads, head_dim] to this cache, given in memory order.

    Blocks may lie apart. Its kernel uses one CUDA block of kv_heads * head_dim / max(8, head_dim / 32) threads for each
    token.
    """
    _, num_heads, head_dim = k.shape
    if k.dtype not in HALF or k.dtype != kv_cache.dtype or head_dim not in HEAD_DIMS:
        return False
    return num_heads * head_dim // max(8, head_dim // 32) <= _MAX_THREADS


def has_latent_append(latents: Tensor, keys: Tensor, kv_layer: Tensor) -> bool:
    """Whether FlashInfer can append latents [T, latent_dim] and keys [T, rope_dim] to this cache."""
    sizes = (latents.shape[1], keys.shape[1])
    return sizes == LATENT_APPEND and latents.dtype in HALF and latents.dtype == kv_layer.dtype


def paged_index(
    context_lens: Tensor,
    block_tables: Tensor,
    block_size: int,
    qo_indptr: Tensor | None = None,
    skipped: Tensor | None = None,
) -> PagedIndex:
    """Flatten block tables [S, max_blocks] to the blocks in use, from number skipped[s] on.

    qo_indptr: see PagedIndex; None: one query each. In numpy: torch's threads cost more than so few numbers do.
    """
    contexts, tables = context_lens.numpy(), block_tables.numpy()
    counts, number = -(-contexts // block_size), np.arange(tables.shape[1])
    last, used = contexts - (counts - 1) * block_size, number < counts[:, None]
    if skipped is not None:
        used &= number >= skipped.numpy()[:, None]
        counts = counts - skipped.numpy()
    indptr = np.concatenate(([0], np.cumsum(counts)))
    queries = np.arange(len(counts) + 1) if qo_indptr is None else qo_indptr.numpy()
    found = (indptr, tables[used], last, (counts - 1) * block_size + last, queries)
    return PagedIndex(*(torch.from_numpy(x.astype(np.int32, copy=False)) for x in found))


def unpacked(kv_cache: Tensor, blocks: Tensor | None, dtype: torch.dtype) -> Tensor:
    """These blocks of the cache in another dtype, in order; None: the cache itself."""
    return kv_cache if blocks is None else fp8.loaded(kv_cache[blocks]).to(dtype)


def _arguments(
    index: PagedIndex, shape: AttentionShape, variant: AttentionVariant
) -> tuple[list[Tensor | int], dict[str, Any]]:
    """Those that the plans of decode and prefill wrappers share."""
    scale, window, softcap = variant
    options = {
        "sm_scale": scale,
        "window_left": -1 if window is None else window - 1,
        "logits_soft_cap": softcap,
        "q_data_type": shape.dtype,
        "kv_data_type": shape.dtype,
    }
    sizes = [shape.num_heads, shape.num_kv_heads, shape.head_dim, shape.block_size]
    return [index.indptr, index.indices, index.last_page_len, *sizes], options


def plan_decode(wrapper: Any, index: PagedIndex, shape: AttentionShape, variant: AttentionVariant) -> None:
    """Plan a BatchDecodeWithPagedKVCacheWrapper for one-token sequences."""
    arguments, options = _arguments(index, shape, variant)
    wrapper.plan(*arguments, seq_lens=index.kv_lens, **options)


def plan_latent(
    flashinfer: Any, wrapper: Any, index: PagedIndex, shape: AttentionShape, variant: AttentionVariant
) -> None:
    """Plan a BatchMLAPagedAttentionWrapper for decode rows and prompt chunks alike; causal, bottom-right."""
    assert shape.latent_dim is not None
    wrapper.plan(
        metadata=flashinfer.mla.MLAPlanMetadata.csr(index.qo_indptr, index.indptr, index.indices, index.kv_lens),
        num_heads=shape.num_heads,
        head_dim_ckv=shape.latent_dim,
        head_dim_kpe=shape.head_dim - shape.latent_dim,
        page_size=shape.block_size,
        causal=True,
        sm_scale=variant[0],
        q_data_type=shape.dtype,
        kv_data_type=shape.dtype,
        query_layout="split",
    )


def plan_prefill(
    wrapper: Any, index: PagedIndex, shape: AttentionShape, variant: AttentionVariant, *, causal: bool = True
) -> None:
    """Plan a BatchPrefillWithPagedKVCacheWrapper for chunks of queries; causal, bottom-right."""
    arguments, options = _arguments(index, shape, variant)
    wrapper.plan(index.qo_indptr, *arguments, causal=causal, seq_lens=index.kv_lens, **options)
