"""Multi-head latent attention (MLA) in its absorbed form: the cache holds latents; keys and values are never computed.

The up-projections of keys and values are applied to the query and to the result instead, head by head, so that all
heads attend over one small vector per token. Source: DeepSeek-V2 (2024), section 2.1.
"""

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from kvrelay.engine.models.spec_parts import LATENT_NORM_EPS, LatentSpec
from kvrelay.kernels.backend import Backend, HeadLinears, Linear


@dataclass(frozen=True, slots=True)
class LatentAttention:
    """One layer's packed weights. query_down, query_norm: if queries have a latent of their own."""

    query_down: Linear | None
    query_norm: Tensor | None
    query: Linear  # -> [T, heads * (nope_dim + rope_dim)]
    kv_down: Linear  # -> [T, kv_rank + rope_dim]
    kv_norm: Tensor
    key_up: HeadLinears  # absorbed: nope_dim -> kv_rank
    value_up: HeadLinears  # kv_rank -> value_dim
    o: Linear


def attend_latents(
    layer: LatentAttention,
    spec: LatentSpec,
    backend: Backend,
    x: Tensor,
    cos_sin: Tensor,
    positions: Tensor,
    slots: Tensor,
    plan: Any,
    kv_layer: Tensor,
    *,
    scale: float,
) -> Tensor:
    """Self-attention of normed x [T, hidden] -> [T, hidden], storing this step's cache entries."""
    plain, turned = _queries(layer, spec, backend, x)
    latent, key = layer.kv_down(x).split((spec.kv_rank, spec.rope_dim), dim=-1)
    latent = backend.rms_norm(latent, layer.kv_norm, LATENT_NORM_EPS)
    turned, key = backend.rope(turned, key.unsqueeze(1), cos_sin, positions)
    backend.store_latent(torch.cat((latent, key.squeeze(1)), dim=-1), kv_layer, slots)
    q = torch.cat((layer.key_up(plain), turned), dim=-1)
    out = backend.latent_attention(q, kv_layer, plan, scale=scale, latent_dim=spec.kv_rank)
    return layer.o(layer.value_up(out).flatten(1))


def _queries(layer: LatentAttention, spec: LatentSpec, backend: Backend, x: Tensor) -> tuple[Tensor, Tensor]:
    """[T, heads, nope_dim] and, not yet rotated, [T, heads, rope_dim]."""
    if layer.query_down is not None and layer.query_norm is not None:
        x = backend.rms_norm(layer.query_down(x), layer.query_norm, LATENT_NORM_EPS)
    plain, turned = layer.query(x).unflatten(-1, (-1, spec.query_dim)).split((spec.nope_dim, spec.rope_dim), dim=-1)
    return plain, turned


def halves_of_pairs(rows: Tensor, rope_dim: int) -> Tensor:
    """The last `rope_dim` of rows [..., n, columns] (or of a bias, columns 1), pairs separated into two halves.

    Our kernels rotate halves; the scores are the same when queries and keys are permuted alike.
    """
    turned = rows[..., -rope_dim:, :]
    return torch.cat((rows[..., :-rope_dim, :], turned[..., 0::2, :], turned[..., 1::2, :]), dim=-2)
