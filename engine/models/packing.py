"""Packs a checkpoint's tensors by the backend; each original is freed once it is packed."""

from collections.abc import Iterator

import torch
from torch import Tensor

from kvrelay.engine.checkpoints.shapes import shared_name
from kvrelay.engine.models.mla import LatentAttention, halves_of_pairs
from kvrelay.engine.models.mlp import ExpertMlp, GatedMlp, Mlp
from kvrelay.engine.models.spec import ModelSpec
from kvrelay.engine.models.spec_experts import ExpertSpec
from kvrelay.engine.models.spec_mla import LatentSpec
from kvrelay.engine.models.weights import WeightReader
from kvrelay.kernels.backend import Backend, HeadLinears, Linear
from kvrelay.kernels.common.quant_scheme import Scheme, WeightError
from kvrelay.kernels.common.quantized import HeadByHead


def _stacked(parts: list[Tensor]) -> Tensor:
    return parts[0] if len(parts) == 1 else torch.cat(parts)


class Packer:
    """The parts of one checkpoint, for one backend."""

    def __init__(
        self, reader: WeightReader, spec: ModelSpec, backend: Backend, dtype: torch.dtype, scheme: Scheme | None = None
    ) -> None:
        self._reader, self._spec, self._backend, self._dtype, self._scheme = reader, spec, backend, dtype, scheme
        self.error = WeightError()  # of all weights quantised so far

    def tensor(self, name: str) -> Tensor:
        return self._reader.read(name, self._dtype, self._backend.device)

    def norm(self, name: str) -> Tensor:
        """A norm's weight; Gemma's 1 + w is folded in, in float32."""
        if self._spec.norm_offset:
            return self._reader.read(name, torch.float32, self._backend.device) + 1.0
        return self.tensor(name)

    def linear(self, *names: str) -> Linear:
        """One packed product of several matrices stacked by rows, with their biases."""
        weight = _stacked([self._weight(f"{name}.weight") for name in names])
        has_bias = f"{names[0]}.bias" in self._reader
        return self._pack(weight, _stacked([self.tensor(f"{name}.bias") for name in names]) if has_bias else None)

    def head(self, embedding: Tensor) -> Linear:
        """The LM head; some models share its weights with `embedding`."""
        if not self._spec.is_tied:
            return self.linear("lm_head")
        return self._pack(embedding if self._scheme is None else self._weight("embed_tokens.weight"), None)

    def _weight(self, name: str) -> Tensor:
        """A linear weight; not rounded to the model's dtype if it will be quantised."""
        return self._reader.read(name, self._dtype if self._scheme is None else None, self._backend.device)

    def _pack(self, weight: Tensor, bias: Tensor | None) -> Linear:
        if self._scheme is None:
            return self._backend.pack_linear(weight, bias)
        linear = self._backend.pack_quantized(weight, bias, self._scheme, self._dtype)
        self.error += linear.error
        return linear

    def _pack_heads(self, weight: Tensor) -> HeadLinears:
        if self._scheme is None:
            return self._backend.pack_heads(weight)
        return HeadByHead([self._pack(head, None) for head in weight])

    def mlp(self, at: str, layer: int) -> Mlp:
        """The MLP of layer `layer`, at this name."""
        experts = self._spec.experts
        if experts is None or layer not in experts.layers:
            return self._gated_mlp(at)
        return self._expert_mlp(at, experts)

    def _gated_mlp(self, at: str) -> GatedMlp:
        gate_up, down = self.linear(f"{at}.gate_proj", f"{at}.up_proj"), self.linear(f"{at}.down_proj")
        return GatedMlp(self._backend, self._spec.activation, gate_up, down)

    def _expert_mlp(self, at: str, spec: ExpertSpec) -> ExpertMlp:
        device, correction = self._backend.device, f"{at}.gate.e_score_correction_bias"
        experts = self._backend.pack_experts(
            self._expert_weights(at, spec), self._spec.activation, self._dtype, self._scheme
        )
        self.error += experts.error
        return ExpertMlp(
            self._backend,
            spec.choice,
            self._wide_linear(f"{at}.gate"),
            self._reader.read(correction, torch.float32, device) if correction in self._reader else None,
            experts,
            self._gated_mlp(f"{at}.{shared_name(spec)}") if spec.shared_ffn_size else None,
            self._wide_linear(f"{at}.shared_expert_gate") if spec.has_shared_gate else None,
        )

    def _expert_weights(self, at: str, spec: ExpertSpec) -> Iterator[tuple[Tensor, Tensor]]:
        """(gate and up, down) of each expert, read lazily."""
        for index in range(spec.choice.num_experts):
            gate, up, down = (
                self._weight(f"{at}.experts.{index}.{part}_proj.weight") for part in ("gate", "up", "down")
            )
            yield torch.cat((gate, up)), down

    def _wide_linear(self, name: str) -> Linear:
        """A linear layer in float32 for any model dtype: routing must not depend on rounding."""
        return self._backend.pack_linear(self._reader.read(f"{name}.weight", torch.float32, self._backend.device))

    def latent_attention(self, at: str, spec: LatentSpec) -> LatentAttention:
        has_down = spec.query_rank is not None
        heads, kv_up = self._spec.num_heads, self._weight(f"{at}.kv_b_proj.weight")
        keys, values = kv_up.unflatten(0, (heads, -1)).split((spec.nope_dim, spec.value_dim), dim=1)
        return LatentAttention(
            query_down=self.linear(f"{at}.q_a_proj") if has_down else None,
            query_norm=self.norm(f"{at}.q_a_layernorm.weight") if has_down else None,
            query=self._rotary_linear(f"{at}.{'q_b_proj' if has_down else 'q_proj'}", spec, heads),
            kv_down=self._rotary_linear(f"{at}.kv_a_proj_with_mqa", spec, 1),
            kv_norm=self.norm(f"{at}.kv_a_layernorm.weight"),
            key_up=self._pack_heads(keys.transpose(1, 2).contiguous()),
            value_up=self._pack_heads(values.contiguous()),
            o=self.linear(f"{at}.o_proj"),
        )

    def _rotary_linear(self, name: str, spec: LatentSpec, heads: int) -> Linear:
        """A linear layer whose outputs end, head by head, in a rotary part."""
        weight = self._in_halves(self._weight(f"{name}.weight"), spec, heads)
        bias = self.tensor(f"{name}.bias")[:, None] if f"{name}.bias" in self._reader else None
        return self._pack(weight, None if bias is None else self._in_halves(bias, spec, heads)[:, 0])

    @staticmethod
    def _in_halves(rows: Tensor, spec: LatentSpec, heads: int) -> Tensor:
        if not spec.is_interleaved:
            return rows
        return halves_of_pairs(rows.unflatten(0, (heads, -1)), spec.rope_dim).flatten(0, 1)
