"""What DeepSeek's decoders have besides: latent attention (MLA) and a choice among experts (MoE), as data.

Pure, like spec.py, which reads configs with this file's help: imports no torch and no transformers.
"""

import math
from dataclasses import dataclass
from typing import Any, Literal, Protocol

from kvrelay.errors import CheckpointCorrupt, UnsupportedModel

LATENT_NORM_EPS = 1e-6  # of the norms on latents, whatever the config says of the others (so in the published code)

# Hugging Face's defaults; V3's stand on V2's.
DEEPSEEK_V2: dict[str, Any] = {
    "vocab_size": 102400,
    "kv_lora_rank": 512,
    "q_lora_rank": 1536,
    "qk_rope_head_dim": 64,
    "qk_nope_head_dim": 128,
    "v_head_dim": 128,
    "rope_interleave": True,
    "moe_intermediate_size": 1407,
    "n_routed_experts": 64,
    "n_shared_experts": 2,
    "first_k_dense_replace": 0,
    "routed_scaling_factor": 1.0,
    "topk_method": "greedy",
    "bos_token_id": 1,
    "eos_token_id": 2,
}
DEEPSEEK_V3: dict[str, Any] = {
    "vocab_size": 129280,
    "hidden_size": 7168,
    "intermediate_size": 18432,
    "num_hidden_layers": 61,
    "num_attention_heads": 128,
    "num_key_value_heads": 128,
    "max_position_embeddings": 4096,
    "moe_intermediate_size": 2048,
    "n_routed_experts": 256,
    "n_shared_experts": 1,
    "first_k_dense_replace": 3,
    "routed_scaling_factor": 2.5,
    "n_group": 8,
    "topk_group": 4,
    "num_experts_per_tok": 8,
    "norm_topk_prob": True,
    "topk_method": "noaux_tc",
    "bos_token_id": 0,
    "eos_token_id": 1,
}


@dataclass(frozen=True, slots=True)
class LatentSpec:
    """Multi-head latent attention. Sizes are elements.

    A token's cache entry is one vector of `width` numbers for all heads: its normed latent (`kv_rank`), then its key's
    rotary part (`rope_dim`). Keys are `nope_dim` numbers made of the latent and the rotary part, values `value_dim`.
    query_rank: queries go through a latent of their own; None: they do not.
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


@dataclass(frozen=True, slots=True)
class ExpertSpec:
    """A layer's MLP as `num_chosen` of `num_experts` small ones, and one shared by all tokens.

    first_layer: layers before it have one dense MLP. ffn_size: of each expert. shared_ffn_size: of the shared one.
    scoring: "sigmoid" scores are corrected by a learnt term for the choice (not for the weights).
    num_groups, num_chosen_groups: experts are chosen from the best groups; (1, 1): from all.
    normalise: the chosen experts' weights are made to add up to 1; then all are multiplied by `scale`.
    """

    first_layer: int
    num_experts: int
    num_chosen: int
    ffn_size: int
    shared_ffn_size: int
    scoring: Literal["softmax", "sigmoid"]
    num_groups: int
    num_chosen_groups: int
    normalise: bool
    scale: float


class ConfigText(Protocol):
    """A decoder's config with its family's defaults behind it."""

    @property
    def name(self) -> str: ...
    def get(self, key: str) -> Any: ...
    def size(self, key: str) -> int: ...


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
    """What q·k is multiplied by; a stretched context makes it larger. Source: DeepSeek-V2 (2024), YaRN (2023)."""
    scale = float(spec.query_dim**-0.5)
    if rope_kind == "default" or not mscale_all_dim or factor <= 1:
        return scale
    return scale * (0.1 * mscale_all_dim * math.log(factor) + 1.0) ** 2


def expert_spec(text: ConfigText, num_layers: int) -> ExpertSpec | None:
    """None where every layer is dense. Raises CheckpointCorrupt, UnsupportedModel."""
    first_layer = int(text.get("first_k_dense_replace") or 0)
    if text.get("n_routed_experts") is None or first_layer >= num_layers:
        return None
    scoring: Literal["softmax", "sigmoid"] = "sigmoid" if text.get("topk_method") == "noaux_tc" else "softmax"
    _refuse_unknown(text, scoring)
    is_grouped = text.get("topk_method") != "greedy"
    ffn_size = text.size("moe_intermediate_size")
    spec = ExpertSpec(
        first_layer=first_layer,
        num_experts=text.size("n_routed_experts"),
        num_chosen=text.size("num_experts_per_tok"),
        ffn_size=ffn_size,
        shared_ffn_size=ffn_size * text.size("n_shared_experts"),
        scoring=scoring,
        num_groups=text.size("n_group") if is_grouped else 1,
        num_chosen_groups=text.size("topk_group") if is_grouped else 1,
        normalise=bool(text.get("norm_topk_prob")),
        scale=float(text.get("routed_scaling_factor")),
    )
    _check(spec)
    return spec


def _refuse_unknown(text: ConfigText, scoring: str) -> None:
    """Each family has its own routers; Hugging Face's code ignores the keys that say otherwise, and we do not guess."""
    known = ("noaux_tc",) if text.name == "deepseek_v3" else ("greedy", "group_limited_greedy")
    if text.get("topk_method") not in known:
        raise UnsupportedModel(text.name, f"topk_method {text.get('topk_method')!r}; known: {', '.join(known)}")
    if text.get("scoring_func") not in (None, scoring):
        raise UnsupportedModel(text.name, f"scoring_func {text.get('scoring_func')!r}; known: {scoring}")
    if text.get("moe_layer_freq") not in (None, 1):
        raise UnsupportedModel(text.name, "moe_layer_freq other than 1")
    if scoring == "softmax" and text.get("norm_topk_prob"):
        raise UnsupportedModel(text.name, "norm_topk_prob with softmax scores")


def _check(spec: ExpertSpec) -> None:
    per_group, left = divmod(spec.num_experts, spec.num_groups)
    if left or spec.num_chosen_groups > spec.num_groups:
        raise CheckpointCorrupt(
            "config.json",
            f"{spec.num_experts} experts in {spec.num_groups} groups of which {spec.num_chosen_groups} are chosen",
        )
    if spec.scoring == "sigmoid" and per_group < 2:
        raise CheckpointCorrupt("config.json", "a group of experts is scored by its two best, but has one")
    if spec.num_chosen > per_group * spec.num_chosen_groups:
        raise CheckpointCorrupt("config.json", f"a token cannot choose {spec.num_chosen} experts of so few")
