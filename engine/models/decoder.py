"""The decoder: one forward pass for every model family, from the parts that a ModelSpec lists.

All arithmetic goes through the backend. Owns the packed weights and the rotary tables of one model.
"""

import logging
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from kvrelay.engine.models.mla import LatentAttention, attend_latents
from kvrelay.engine.models.mlp import Mlp
from kvrelay.engine.models.packing import Packer
from kvrelay.engine.models.rope import cos_sin_table
from kvrelay.engine.models.spec import ModelSpec
from kvrelay.engine.models.weights import WeightReader
from kvrelay.kernels.backend import AttentionBatch, AttentionShape, Backend, HeadInputs, KvOrder, Linear
from kvrelay.kernels.common.quant_scheme import Scheme, WeightError

logger = logging.getLogger(__name__)

_LOG_EVERY_S = 5.0  # while weights are loaded
_FIRST_POSITIONS = 2048  # rotary rows made at load; more are added when a sequence gets there


@dataclass(frozen=True, slots=True)
class HeadAttention:
    """Attention with keys and values per head or per group of heads (MHA, GQA, MQA)."""

    qkv: Linear
    head_norms: tuple[Tensor, Tensor] | None  # of queries and of keys
    o: Linear


@dataclass(frozen=True, slots=True)
class Layer:
    """One decoder layer's packed weights. A norm that the family lacks is None."""

    input_norm: Tensor
    attention: HeadAttention | LatentAttention
    post_attention_norm: Tensor | None
    mlp_norm: Tensor
    mlp: Mlp
    post_mlp_norm: Tensor | None


class DecoderModel:
    """A decoder-only transformer over a paged KV cache. Stateless between calls but for its rotary tables."""

    def __init__(
        self,
        spec: ModelSpec,
        backend: Backend,
        dtype: torch.dtype,
        *,
        embedding: Tensor,
        layers: Sequence[Layer],
        final_norm: Tensor,
        lm_head: Linear,
        block_size: int = 16,
        kv_layout: KvOrder = "NHD",
        kv_dtype: torch.dtype | None = None,
    ) -> None:
        self.spec, self.dtype = spec, dtype
        self.attention_shape = AttentionShape(
            spec.num_heads,
            spec.num_kv_heads,
            spec.head_dim,
            block_size,
            dtype,
            kv_layout,
            kv_dtype or dtype,
            latent_dim=None if spec.latent is None else spec.latent.kv_rank,
        )
        self._backend, self._embedding, self._layers = backend, embedding, tuple(layers)
        self._final_norm, self._lm_head = final_norm, lm_head
        # Hugging Face rounds the scale to the model's dtype before it multiplies
        self._embed_scale = float(torch.tensor(spec.embed_scale or 1.0, dtype=dtype))
        self.weight_error: WeightError | None = None  # of quantised weights
        self._cos_sin: tuple[Tensor, ...] = ()
        self.reserve_positions(min(_FIRST_POSITIONS, spec.max_position))

    @property
    def num_positions(self) -> int:
        """Rows that the rotary tables have now."""
        return self._cos_sin[0].shape[0] if self._cos_sin else 0

    def reserve_positions(self, num_positions: int) -> bool:
        """Extend the rotary tables to at least this many positions. True when they moved: captured graphs are stale
        then.
        """
        if num_positions <= self.num_positions:
            return False
        rows = max(num_positions, min(2 * self.num_positions, self.spec.max_position))
        self._cos_sin = tuple(
            cos_sin_table(rope, self.spec.rotary_dim, rows).to(self._backend.device) for rope in self.spec.ropes
        )
        return True

    def forward(
        self,
        token_ids: Tensor,
        batch: AttentionBatch,
        plan: Any,
        kv_layers: Sequence[Tensor],
        on_layer: Callable[[int], None] | None = None,
    ) -> Tensor:
        """Compute this step's tokens, writing their keys and values into the cache.

        Args:
            token_ids: [T] int64.
            batch: the step's metadata; `plan` is backend.plan(batch, self.attention_shape).
            kv_layers: per layer [num_blocks, 2, block_size, num_kv_heads, head_dim], latent ones with one part.
            on_layer: called with i when layer i's cache writes and compute have been issued.

        Returns: [T, hidden] after the final norm.
        """
        spec, backend = self.spec, self._backend
        self.reserve_positions(batch.max_context_len)
        positions, slots = batch.positions, batch.slot_mapping  # on the CPU: the backend moves them, once per step
        residual = backend.embed(token_ids.to(backend.device), self._embedding, self._embed_scale)
        x = backend.rms_norm(residual, self._layers[0].input_norm, spec.norm_eps)
        for index, layer in enumerate(self._layers):
            x = self._attend(layer, index, x, positions, slots, plan, kv_layers[index])
            x, residual = backend.add_rms_norm(x, residual, layer.mlp_norm, spec.norm_eps)
            x = layer.mlp(x)
            if layer.post_mlp_norm is not None:
                x = backend.rms_norm(x, layer.post_mlp_norm, spec.norm_eps)
            x, residual = backend.add_rms_norm(x, residual, self._norm_after(index), spec.norm_eps)
            if on_layer is not None:
                on_layer(index)
        return x

    def _norm_after(self, index: int) -> Tensor:
        """The norm that follows layer `index`: the next layer's first, or the final one."""
        return self._layers[index + 1].input_norm if index + 1 < len(self._layers) else self._final_norm

    def _attend(
        self, layer: Layer, index: int, x: Tensor, positions: Tensor, slots: Tensor, plan: Any, kv_layer: Tensor
    ) -> Tensor:
        """Self-attention of normed x [T, hidden] -> [T, hidden], storing this step's keys and values."""
        spec, backend, cos_sin = self.spec, self._backend, self._cos_sin[self.spec.layer_ropes[index]]
        if isinstance(layer.attention, LatentAttention):
            assert spec.latent is not None
            x = attend_latents(
                layer.attention,
                spec.latent,
                backend,
                x,
                cos_sin,
                positions,
                slots,
                plan,
                kv_layer,
                scale=spec.query_scale,
            )
        else:
            x = self._attend_heads(layer.attention, index, x, cos_sin, positions, slots, plan, kv_layer)
        if layer.post_attention_norm is not None:
            x = backend.rms_norm(x, layer.post_attention_norm, spec.norm_eps)
        return x

    def _attend_heads(
        self,
        layer: HeadAttention,
        index: int,
        x: Tensor,
        cos_sin: Tensor,
        positions: Tensor,
        slots: Tensor,
        plan: Any,
        kv_layer: Tensor,
    ) -> Tensor:
        spec, backend = self.spec, self._backend
        num_q, num_kv = spec.num_heads, spec.num_kv_heads
        heads = layer.qkv(x).view(-1, num_q + 2 * num_kv, spec.head_dim)
        q, k, v = heads.split_with_sizes((num_q, num_kv, num_kv), dim=1)  # half of what split costs
        inputs = HeadInputs(layer.head_norms, spec.norm_eps, cos_sin, positions, kv_layer, slots)
        q = backend.norm_rope_store(q, k, v, inputs)
        out = backend.attention(
            q,
            kv_layer,
            plan,
            scale=spec.query_scale,
            window=spec.layer_windows[index],
            softcap=spec.attention_softcap,
        )
        return layer.o(out.reshape(-1, num_q * spec.head_dim))

    def logits(self, hidden: Tensor) -> Tensor:
        """Scores over the vocabulary for rows of `forward`'s result: [R, hidden] -> [R, vocab] float32."""
        logits = self._backend.widened(self._lm_head(hidden))
        if (cap := self.spec.final_softcap) is not None:
            logits = torch.tanh(logits / cap) * cap
        return logits


def _pack_layers(packer: Packer, spec: ModelSpec) -> list[Layer]:
    layers: list[Layer] = []
    logged_s = time.monotonic()
    for index in range(spec.num_layers):
        layers.append(_pack_layer(packer, spec, index))
        if time.monotonic() - logged_s > _LOG_EVERY_S:
            logged_s = time.monotonic()
            logger.info("%d of %d layers are loaded", index + 1, spec.num_layers)
    return layers


def _pack_layer(packer: Packer, spec: ModelSpec, index: int) -> Layer:
    at = f"layers.{index}"
    sandwich = spec.sandwich_norms
    before_mlp = "pre_feedforward_layernorm" if sandwich else "post_attention_layernorm"
    latent = spec.latent
    return Layer(
        input_norm=packer.norm(f"{at}.input_layernorm.weight"),
        attention=_pack_heads(packer, spec, at)
        if latent is None
        else packer.latent_attention(f"{at}.self_attn", latent),
        post_attention_norm=packer.norm(f"{at}.post_attention_layernorm.weight") if sandwich else None,
        mlp_norm=packer.norm(f"{at}.{before_mlp}.weight"),
        mlp=packer.mlp(f"{at}.mlp", index),
        post_mlp_norm=packer.norm(f"{at}.post_feedforward_layernorm.weight") if sandwich else None,
    )


def _pack_heads(packer: Packer, spec: ModelSpec, at: str) -> HeadAttention:
    return HeadAttention(
        qkv=packer.linear(*(f"{at}.self_attn.{name}_proj" for name in "qkv")),
        head_norms=(packer.norm(f"{at}.self_attn.q_norm.weight"), packer.norm(f"{at}.self_attn.k_norm.weight"))
        if spec.has_qk_norm
        else None,
        o=packer.linear(f"{at}.self_attn.o_proj"),
    )


def load_model(
    folder: Path,
    backend: Backend,
    dtype: torch.dtype,
    *,
    block_size: int = 16,
    kv_layout: KvOrder = "NHD",
    kv_dtype: torch.dtype | None = None,
    quantization: Scheme | None = None,
) -> DecoderModel:
    """The model of a checkpoint folder, packed for `backend`, with weights quantised by `quantization`, if given.

    `block_size` (tokens), `kv_layout` and `kv_dtype` (None: `dtype`) are the KV cache's.

    Raises:
        UnsupportedModel, CheckpointCorrupt, ModelNotFound: see ModelSpec.from_folder and WeightReader.
    """
    spec = ModelSpec.from_folder(folder)
    with torch.no_grad(), WeightReader(folder, spec) as reader:
        start_s, packer = time.monotonic(), Packer(reader, spec, backend, dtype, quantization)
        embedding = packer.tensor("embed_tokens.weight")
        model = DecoderModel(
            spec,
            backend,
            dtype,
            embedding=embedding,
            layers=_pack_layers(packer, spec),
            final_norm=packer.norm("norm.weight"),
            lm_head=packer.head(embedding),
            block_size=block_size,
            kv_layout=kv_layout,
            kv_dtype=kv_dtype,
        )
    if quantization is not None:
        model.weight_error = packer.error
        logger.info(
            "weights are %s: relative RMS error %.3f%%, %.0f MiB instead of %.0f; took %.1f s",
            quantization,
            100 * packer.error.relative,
            packer.error.num_bytes / 2**20,
            packer.error.num_weights * dtype.itemsize / 2**20,
            time.monotonic() - start_s,
        )
    return model
