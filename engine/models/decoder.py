"""The decoder: one forward pass for every model family, from the parts that a ModelSpec lists.

All arithmetic goes through the backend. Owns the packed weights and the rotary tables of one model.
"""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from kvrelay.engine.models.spec import ModelSpec, RopeSpec
from kvrelay.engine.models.spec_parts import LATENT_NORM_EPS, LatentSpec
from kvrelay.errors import UnsupportedModel
from kvrelay.kernels.backend import (
    Activation,
    AttentionBatch,
    AttentionShape,
    Backend,
    Experts,
    HeadInputs,
    HeadLinears,
    KvOrder,
    Linear,
)
from kvrelay.kernels.common.quant_scheme import ExpertChoice, WeightError

_FIRST_POSITIONS = 2048  # rotary rows made at load; more are added when a sequence gets there


Mlp = Callable[[Tensor], Tensor]  # [T, hidden] -> [T, hidden]


class GatedMlp:
    """down(act(gate) * up), gate and up stacked in one weight."""

    def __init__(self, backend: Backend, activation: Activation, gate_up: Linear, down: Linear) -> None:
        self._backend, self._activation, self._gate_up, self._down = backend, activation, gate_up, down

    def __call__(self, x: Tensor) -> Tensor:
        return self._down(self._backend.gated_activation(self._gate_up(x), self._activation))


class ExpertMlp:
    """The weighted sum of the experts that each token chooses, and the shared expert where there is one.

    Args:
        router: [T, hidden] float32 -> [T, num_experts].
        correction: [num_experts] float32, added to the scores for the choice only; None: there is none.
        shared_gate: [T, hidden] float32 -> [T, 1], whose sigmoid multiplies the shared expert's output.
    """

    def __init__(
        self,
        backend: Backend,
        choice: ExpertChoice,
        router: Linear,
        correction: Tensor | None,
        experts: Experts,
        shared: Mlp | None,
        shared_gate: Linear | None,
    ) -> None:
        self._backend, self._choice, self.router, self._correction = backend, choice, router, correction
        self.experts, self._shared, self._shared_gate = experts, shared, shared_gate

    def __call__(self, x: Tensor) -> Tensor:
        wide = self._backend.widened(x)
        weights, chosen = self._backend.choose_experts(self.router(wide), self._correction, self._choice)
        base = None if self._shared is None else self._shared(x)
        return self.experts(x, weights, chosen, base, None if self._shared_gate is None else self._shared_gate(wide))


@dataclass(frozen=True, slots=True)
class HeadAttention:
    """Attention with keys and values per head or per group of heads (MHA, GQA, MQA)."""

    qkv: Linear
    head_norms: tuple[Tensor, Tensor] | None  # of queries and of keys
    o: Linear


@dataclass(frozen=True, slots=True)
class LatentAttention:
    """Multi-head latent attention (MLA), absorbed: the cache holds latents; keys and values are never computed.

    The up-projections of keys and values are applied to the query and to the result instead, head by head, so that all
    heads attend over one small vector per token. Source: DeepSeek-V2 (2024), section 2.1. query_down, query_norm: if
    queries have a latent of their own.
    """

    query_down: Linear | None
    query_norm: Tensor | None
    query: Linear  # -> [T, heads * (nope_dim + rope_dim)]
    kv_down: Linear  # -> [T, kv_rank + rope_dim]
    kv_norm: Tensor
    key_up: HeadLinears  # absorbed: nope_dim -> kv_rank
    value_up: HeadLinears  # kv_rank -> value_dim
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
        self._backend, self._embedding, self.layers = backend, embedding, tuple(layers)
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
        residual = backend.embed(token_ids.to(backend.device), self._embedding, self._embed_scale)
        x = backend.rms_norm(residual, self.layers[0].input_norm, spec.norm_eps)
        for index, layer in enumerate(self.layers):
            x = self._attend(layer, index, x, batch, plan, kv_layers[index])
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
        return self.layers[index + 1].input_norm if index + 1 < len(self.layers) else self._final_norm

    def _attend(
        self, layer: Layer, index: int, x: Tensor, batch: AttentionBatch, plan: Any, kv_layer: Tensor
    ) -> Tensor:
        """Self-attention of normed x [T, hidden] -> [T, hidden], storing this step's keys and values."""
        spec, cos_sin = self.spec, self._cos_sin[self.spec.layer_ropes[index]]
        if isinstance(layer.attention, LatentAttention):
            assert spec.latent is not None
            x = self._attend_latents(layer.attention, spec.latent, x, cos_sin, batch, plan, kv_layer)
        else:
            window = spec.layer_windows[index]
            x = self._attend_heads(layer.attention, window, x, cos_sin, batch, plan, kv_layer)
        if layer.post_attention_norm is not None:
            x = self._backend.rms_norm(x, layer.post_attention_norm, spec.norm_eps)
        return x

    def _attend_heads(
        self,
        layer: HeadAttention,
        window: int | None,
        x: Tensor,
        cos_sin: Tensor,
        batch: AttentionBatch,
        plan: Any,
        kv_layer: Tensor,
    ) -> Tensor:
        spec, backend = self.spec, self._backend
        num_q, num_kv = spec.num_heads, spec.num_kv_heads
        heads = layer.qkv(x).view(-1, num_q + 2 * num_kv, spec.head_dim)
        q, k, v = heads.split_with_sizes((num_q, num_kv, num_kv), dim=1)  # half of what split costs
        # positions and slots are on the CPU: the backend moves them, once per step
        inputs = HeadInputs(layer.head_norms, spec.norm_eps, cos_sin, batch.positions, kv_layer, batch.slot_mapping)
        q, cap = backend.norm_rope_store(q, k, v, inputs), spec.attention_softcap
        out = backend.attention(q, kv_layer, plan, scale=spec.query_scale, window=window, softcap=cap)
        return layer.o(out.reshape(-1, num_q * spec.head_dim))

    def _attend_latents(
        self,
        layer: LatentAttention,
        spec: LatentSpec,
        x: Tensor,
        cos_sin: Tensor,
        batch: AttentionBatch,
        plan: Any,
        kv_layer: Tensor,
    ) -> Tensor:
        backend, queries = self._backend, x
        if layer.query_down is not None and layer.query_norm is not None:
            queries = backend.rms_norm(layer.query_down(x), layer.query_norm, LATENT_NORM_EPS)
        heads = layer.query(queries).unflatten(-1, (-1, spec.query_dim))
        plain, turned = heads.split((spec.nope_dim, spec.rope_dim), dim=-1)
        latent, key = layer.kv_down(x).split((spec.kv_rank, spec.rope_dim), dim=-1)
        latent = backend.rms_norm(latent, layer.kv_norm, LATENT_NORM_EPS)
        turned, key = backend.rope(turned, key.unsqueeze(1), cos_sin, batch.positions)
        backend.store_latent(latent, key.squeeze(1), kv_layer, batch.slot_mapping)
        q, scale = layer.key_up(plain), self.spec.query_scale
        out = backend.latent_attention(q, turned, kv_layer, plan, scale=scale)
        return layer.o(layer.value_up(out).flatten(1))

    def logits(self, hidden: Tensor) -> Tensor:
        """Scores over the vocabulary for rows of `forward`'s result: [R, hidden] -> [R, vocab] float32."""
        logits = self._backend.widened(self._lm_head(hidden))
        if (cap := self.spec.final_softcap) is not None:
            logits = torch.tanh(logits / cap) * cap
        return logits


def inverse_frequencies(rope: RopeSpec, head_dim: int) -> tuple[Tensor, float]:
    """([head_dim/2] float32, factor on cosines and sines). Raises UnsupportedModel.

    Source: RoPE (Su et al., 2021); linear: kaiokendev; llama3: Llama 3.1; yarn: Peng et al., 2023.
    """
    exponents = torch.arange(0, head_dim, 2, dtype=torch.int64).to(torch.float32) / head_dim
    wavelengths = rope.theta**exponents
    plain = 1.0 / wavelengths
    match rope.kind:
        case "default" | "dynamic":
            return plain, 1.0
        case "linear":
            return plain / rope.factor, 1.0
        case "llama3":
            return _llama3(rope, plain), 1.0
        case "yarn":
            return _yarn(rope, wavelengths, head_dim), _yarn_attention_factor(rope)
    raise UnsupportedModel("rope", f"type {rope.kind!r}")


def cos_sin_table(rope: RopeSpec, head_dim: int, num_positions: int) -> Tensor:
    """[num_positions, head_dim] float32: head_dim/2 cosines, then as many sines."""
    frequencies, factor = inverse_frequencies(rope, head_dim)
    angles = torch.arange(num_positions, dtype=torch.float32)[:, None] * frequencies
    return torch.cat((angles.cos() * factor, angles.sin() * factor), dim=-1)


def _llama3(rope: RopeSpec, plain: Tensor) -> Tensor:
    """Long wavelengths are stretched by `factor`, short ones kept, those between blended."""
    longest = rope.original_max_position / rope.low_freq_factor
    shortest = rope.original_max_position / rope.high_freq_factor
    wavelength = 2 * math.pi / plain
    stretched = torch.where(wavelength > longest, plain / rope.factor, plain)
    share = (rope.original_max_position / wavelength - rope.low_freq_factor) / (
        rope.high_freq_factor - rope.low_freq_factor
    )
    blended = (1 - share) * stretched / rope.factor + share * stretched
    is_between = (wavelength >= shortest) & (wavelength <= longest)
    return torch.where(is_between, blended, stretched)


def _yarn(rope: RopeSpec, wavelengths: Tensor, head_dim: int) -> Tensor:
    """Interpolate low-frequency dimensions, keep high-frequency ones, ramp between."""

    def dimension_of(rotations: float) -> float:
        turns = math.log(rope.original_max_position / (rotations * 2 * math.pi))
        return head_dim * turns / (2 * math.log(rope.theta))

    low, high = dimension_of(rope.beta_fast), dimension_of(rope.beta_slow)
    if rope.truncate:
        low, high = math.floor(low), math.ceil(high)
    low, high = max(low, 0), min(high, head_dim - 1)
    if low == high:
        high += 0.001
    ramp = torch.clamp((torch.arange(head_dim // 2, dtype=torch.float32) - low) / (high - low), 0, 1)
    keep = 1 - ramp
    return (1.0 / (rope.factor * wavelengths)) * (1 - keep) + (1.0 / wavelengths) * keep


def _yarn_attention_factor(rope: RopeSpec) -> float:
    if rope.attention_factor is not None:
        return rope.attention_factor
    if rope.mscale and rope.mscale_all_dim:
        return _mscale(rope.factor, rope.mscale) / _mscale(rope.factor, rope.mscale_all_dim)
    return _mscale(rope.factor, 1.0)


def _mscale(factor: float, weight: float) -> float:
    return 1.0 if factor <= 1 else 0.1 * weight * math.log(factor) + 1.0
