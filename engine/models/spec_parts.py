"""Parts of a ModelSpec that some families have: DeepSeek's latent attention (MLA), and mixture of experts (MoE).

Pure, like spec.py, which reads configs with this file's help: imports no torch and no transformers.
"""

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal

from kvrelay.engine.models.families import ConfigText
from kvrelay.errors import CheckpointCorrupt, UnsupportedModel
from kvrelay.kernels.common.quant_scheme import ExpertChoice

LATENT_NORM_EPS = 1e-6  # of the norms on latents, as in the published code; the config's value is for other norms


@dataclass(frozen=True, slots=True)
class LatentSpec:
    """Multi-head latent attention. Sizes are elements.

    A token's cache entry is one vector of `width` numbers for all heads: its normed latent (`kv_rank`), then its key's
    rotary part (`rope_dim`). Keys are `nope_dim` numbers made of the latent and the rotary part, values `value_dim`.
    query_rank: size of the queries' own latent; None: they have none.
    is_interleaved: the checkpoint has rotary pairs side by side, not half a vector apart.
    """

    kv_rank: int
    rope_dim: int
    nope_dim: int
    value_dim: int
    query_rank: int | None
    is_interleaved: bool
    has_bias: bool

    @property
    def width(self) -> int:
        return self.kv_rank + self.rope_dim

    @property
    def query_dim(self) -> int:
        return self.nope_dim + self.rope_dim


def latent_spec(text: ConfigText) -> LatentSpec:
    """Raises CheckpointCorrupt, UnsupportedModel."""
    if text.size("num_key_value_heads") != text.size("num_attention_heads"):
        raise UnsupportedModel(text.name, "latent attention whose num_key_value_heads is not num_attention_heads")
    spec = LatentSpec(
        kv_rank=text.size("kv_lora_rank"),
        rope_dim=text.size("qk_rope_head_dim"),
        nope_dim=text.size("qk_nope_head_dim"),
        value_dim=text.size("v_head_dim"),
        query_rank=None if text.get("q_lora_rank") is None else text.size("q_lora_rank"),
        is_interleaved=bool(text.get("rope_interleave")),
        has_bias=bool(text.get("attention_bias")),
    )
    if spec.rope_dim % 2:
        raise CheckpointCorrupt("config.json", f"qk_rope_head_dim {spec.rope_dim} is odd")
    return spec


def latent_query_scale(spec: LatentSpec, *, rope_kind: str, factor: float, mscale_all_dim: float | None) -> float:
    """The factor of q·k; a stretched context makes it larger. Source: DeepSeek-V2 (2024), YaRN (2023)."""
    scale = float(spec.query_dim**-0.5)
    if rope_kind == "default" or not mscale_all_dim or factor <= 1:
        return scale
    return scale * (0.1 * mscale_all_dim * math.log(factor) + 1.0) ** 2


@dataclass(frozen=True, slots=True)
class ExpertSpec:
    """The expert MLPs of `layers`, and an optional shared expert. Sizes are elements.

    ffn_size: of each expert. shared_ffn_size: of the shared one; 0: there is none.
    has_shared_gate: the shared expert's output is multiplied by the sigmoid of one more projection of the token.
    """

    layers: frozenset[int]
    choice: ExpertChoice
    ffn_size: int
    shared_ffn_size: int = 0
    has_shared_gate: bool = False


def expert_spec(text: ConfigText, num_layers: int) -> ExpertSpec | None:
    """None where every layer is dense. Raises CheckpointCorrupt, UnsupportedModel."""
    read = _READERS.get(text.name)
    spec = None if read is None else read(text, num_layers)
    if spec is not None:
        _check(spec.choice)
    return spec


def _deepseek(text: ConfigText, num_layers: int) -> ExpertSpec | None:
    first_layer = int(text.get("first_k_dense_replace") or 0)
    if text.get("n_routed_experts") is None or first_layer >= num_layers:
        return None
    scoring: Literal["softmax", "sigmoid"] = "sigmoid" if text.get("topk_method") == "noaux_tc" else "softmax"
    _refuse_unknown_router(text, scoring)
    is_grouped = text.get("topk_method") != "greedy"
    ffn_size = text.size("moe_intermediate_size")
    choice = ExpertChoice(
        num_experts=text.size("n_routed_experts"),
        num_chosen=text.size("num_experts_per_tok"),
        scoring=scoring,
        num_groups=text.size("n_group") if is_grouped else 1,
        num_chosen_groups=text.size("topk_group") if is_grouped else 1,
        normalise=bool(text.get("norm_topk_prob")),
        scale=float(text.get("routed_scaling_factor")),
    )
    layers = frozenset(range(first_layer, num_layers))
    return ExpertSpec(layers, choice, ffn_size, shared_ffn_size=ffn_size * text.size("n_shared_experts"))


def _refuse_unknown_router(text: ConfigText, scoring: str) -> None:
    """Refuse router options that Hugging Face's code ignores for the family."""
    known = ("noaux_tc",) if text.name == "deepseek_v3" else ("greedy", "group_limited_greedy")
    if text.get("topk_method") not in known:
        raise UnsupportedModel(text.name, f"topk_method {text.get('topk_method')!r}; known: {', '.join(known)}")
    if text.get("scoring_func") not in (None, scoring):
        raise UnsupportedModel(text.name, f"scoring_func {text.get('scoring_func')!r}; known: {scoring}")
    if text.get("moe_layer_freq") not in (None, 1):
        raise UnsupportedModel(text.name, "moe_layer_freq other than 1")
    if scoring == "softmax" and text.get("norm_topk_prob"):
        raise UnsupportedModel(text.name, "norm_topk_prob with softmax scores")


def _qwen(text: ConfigText, num_layers: int) -> ExpertSpec | None:
    """Layers that `mlp_only_layers` names are dense, and of the others all but every `decoder_sparse_step`-th."""
    if text.name == "qwen2_moe" and (text.get("use_sliding_window") or not text.get("qkv_bias")):
        raise UnsupportedModel(text.name, "use_sliding_window, or attention without qkv_bias")
    dense, step = text.get("mlp_only_layers") or (), text.size("decoder_sparse_step")
    layers = frozenset(layer for layer in range(num_layers) if layer not in dense and (layer + 1) % step == 0)
    key = "num_local_experts" if "num_local_experts" in text.raw else "num_experts"  # the key in transformers 5
    if not layers or text.get(key) == 0:
        return None
    choice = ExpertChoice(
        num_experts=text.size(key),
        num_chosen=text.size("num_experts_per_tok"),
        normalise=bool(text.get("norm_topk_prob")),
    )
    has_shared = text.name == "qwen2_moe"
    shared = text.size("shared_expert_intermediate_size") if has_shared else 0
    return ExpertSpec(layers, choice, text.size("moe_intermediate_size"), shared, has_shared_gate=has_shared)


def _mixtral(text: ConfigText, num_layers: int) -> ExpertSpec:
    choice = ExpertChoice(text.size("num_local_experts"), text.size("num_experts_per_tok"), normalise=True)
    return ExpertSpec(frozenset(range(num_layers)), choice, text.size("intermediate_size"))


_READERS: dict[str, Callable[[ConfigText, int], ExpertSpec | None]] = {
    "deepseek_v2": _deepseek,
    "deepseek_v3": _deepseek,
    "qwen2_moe": _qwen,
    "qwen3_moe": _qwen,
    "mixtral": _mixtral,
}


def _check(choice: ExpertChoice) -> None:
    per_group, left = divmod(choice.num_experts, choice.num_groups)
    if left or choice.num_chosen_groups > choice.num_groups:
        raise CheckpointCorrupt(
            "config.json",
            f"{choice.num_experts} experts in {choice.num_groups} groups, {choice.num_chosen_groups} of them chosen",
        )
    if choice.scoring == "sigmoid" and per_group < 2:
        raise CheckpointCorrupt("config.json", "a group of experts is scored by its two best, but has only one")
    if choice.num_chosen > per_group * choice.num_chosen_groups:
        raise CheckpointCorrupt("config.json", f"a token cannot choose {choice.num_chosen} experts: there are fewer")
