"""DeepSeek's latent attention (MLA) as data, with defaults for keys that configs omit.

Pure, like spec.py, which reads configs with this file's help: imports no torch and no transformers.
"""

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Protocol

from kvrelay.errors import CheckpointCorrupt, UnsupportedModel

LATENT_NORM_EPS = 1e-6  # of the norms on latents, as in the published code; the config's value is for other norms

# Hugging Face's defaults; V3's extend V2's.
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


class ConfigText(Protocol):
    """A decoder's config with its family's defaults."""

    @property
    def name(self) -> str: ...
    @property
    def raw(self) -> Mapping[str, Any]: ...
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
    """The factor of q·k; a stretched context makes it larger. Source: DeepSeek-V2 (2024), YaRN (2023)."""
    scale = float(spec.query_dim**-0.5)
    if rope_kind == "default" or not mscale_all_dim or factor <= 1:
        return scale
    return scale * (0.1 * mscale_all_dim * math.log(factor) + 1.0) ** 2
