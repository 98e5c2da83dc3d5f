"""Latent attention (MLA) over FlashInfer's BatchMLAPagedAttentionWrapper: supported shapes and planning.

UNVERIFIED ON A GPU, as backend.py is.
"""

from typing import Any

import torch
from torch import Tensor

from kvrelay.kernels.backend import AttentionBatch, AttentionShape

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
