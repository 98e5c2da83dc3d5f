"""Families of models: what a model_type fixes, and Hugging Face's defaults for keys that its configs omit. Pure."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

from kvrelay.errors import CheckpointCorrupt

Json = Mapping[str, Any]


@dataclass(frozen=True, slots=True)
class Family:
    """What a model_type fixes, and Hugging Face's defaults for keys that its configs omit."""

    name: str
    defaults: Json
    qkv_bias: bool | None = None  # None: as the config's attention_bias (for o_proj, too)
    qk_norm: bool = False
    norm_offset: bool = False
    sandwich: bool = False
    scale_embeddings: bool = False
    window: Literal["none", "all", "asked", "upper", "alternate", "pattern"] = "none"
    has_mlp_bias: bool = False
    is_latent: bool = False
    attention_softcap: bool = False  # Gemma 3 has the key, but neither it nor Hugging Face applies it


_COMMON: dict[str, Any] = {
    "vocab_size": 32000, "hidden_size": 4096, "intermediate_size": 11008, "num_hidden_layers": 32,
    "num_attention_heads": 32, "num_key_value_heads": None, "head_dim": None, "max_position_embeddings": 2048,
    "rms_norm_eps": 1e-6, "hidden_act": "silu", "tie_word_embeddings": False, "attention_bias": False,
    "mlp_bias": False, "sliding_window": None, "rope_theta": 10_000.0, "bos_token_id": None, "eos_token_id": None,
}  # fmt: skip
_LLAMA_IDS = {"bos_token_id": 1, "eos_token_id": 2}
_MISTRAL = {"intermediate_size": 14336, "num_key_value_heads": 8, "max_position_embeddings": 131072}
_QWEN = {"vocab_size": 151936, "intermediate_size": 22016, "num_key_value_heads": 32, "max_position_embeddings": 32768}
_GEMMA = {
    "vocab_size": 256000, "hidden_size": 2304, "intermediate_size": 9216, "num_hidden_layers": 26,
    "num_attention_heads": 8, "num_key_value_heads": 4, "head_dim": 256, "hidden_act": "gelu_pytorch_tanh",
    "max_position_embeddings": 8192, "tie_word_embeddings": True, "bos_token_id": 2, "eos_token_id": 1,
    "query_pre_attn_scalar": 256, "sliding_window": 4096,
}  # fmt: skip
_GEMMA1 = {
    "hidden_size": 3072, "intermediate_size": 24576, "num_hidden_layers": 28, "num_attention_heads": 16,
    "num_key_value_heads": 16, "query_pre_attn_scalar": None, "sliding_window": None,
}  # fmt: skip
_GEMMA3 = {
    "vocab_size": 262208, "max_position_embeddings": 131072, "rope_theta": 1e6, "rope_local_base_freq": 1e4,
    "sliding_window_pattern": 6,
}  # fmt: skip
_GEMMA_PARTS: dict[str, Any] = {"norm_offset": True, "scale_embeddings": True}
_QWEN2_MOE: dict[str, Any] = {
    "hidden_size": 2048, "intermediate_size": 5632, "num_hidden_layers": 24, "num_attention_heads": 16,
    "num_key_value_heads": 16, "qkv_bias": True, "decoder_sparse_step": 1, "moe_intermediate_size": 1408,
    "shared_expert_intermediate_size": 5632, "num_experts": 60, "num_experts_per_tok": 4, "norm_topk_prob": False,
    "sliding_window": 4096,
}  # fmt: skip
_QWEN3_MOE: dict[str, Any] = {
    "hidden_size": 2048, "intermediate_size": 6144, "num_hidden_layers": 24, "num_key_value_heads": 4,
    "decoder_sparse_step": 1, "moe_intermediate_size": 768, "num_experts": 128, "num_experts_per_tok": 8,
    "norm_topk_prob": False, "sliding_window": 4096,
}  # fmt: skip
_MIXTRAL: dict[str, Any] = {
    "intermediate_size": 14336, "num_key_value_heads": 8, "max_position_embeddings": 131072, "rms_norm_eps": 1e-5,
    "rope_theta": 1e6, "num_local_experts": 8, "num_experts_per_tok": 2,
}  # fmt: skip
_DEEPSEEK_V2: dict[str, Any] = {
    "vocab_size": 102400, "kv_lora_rank": 512, "q_lora_rank": 1536, "qk_rope_head_dim": 64, "qk_nope_head_dim": 128,
    "v_head_dim": 128, "rope_interleave": True, "moe_intermediate_size": 1407, "n_routed_experts": 64,
    "n_shared_experts": 2, "first_k_dense_replace": 0, "routed_scaling_factor": 1.0, "topk_method": "greedy",
    "bos_token_id": 1, "eos_token_id": 2,
}  # fmt: skip
_DEEPSEEK_V3: dict[str, Any] = {
    "vocab_size": 129280, "hidden_size": 7168, "intermediate_size": 18432, "num_hidden_layers": 61,
    "num_attention_heads": 128, "num_key_value_heads": 128, "max_position_embeddings": 4096,
    "moe_intermediate_size": 2048, "n_routed_experts": 256, "n_shared_experts": 1, "first_k_dense_replace": 3,
    "routed_scaling_factor": 2.5, "n_group": 8, "topk_group": 4, "num_experts_per_tok": 8, "norm_topk_prob": True,
    "topk_method": "noaux_tc", "bos_token_id": 0, "eos_token_id": 1,
}  # fmt: skip

FAMILIES: dict[str, Family] = {
    family.name: family
    for family in (
        Family("llama", _COMMON | _LLAMA_IDS, has_mlp_bias=True),
        Family("mistral", _COMMON | _LLAMA_IDS | _MISTRAL | {"sliding_window": 4096}, qkv_bias=False, window="all"),
        Family("qwen2", _COMMON | _QWEN, qkv_bias=True, window="upper"),
        Family("qwen3", _COMMON | _QWEN | {"head_dim": 128}, qk_norm=True, window="upper"),
        Family("qwen2_moe", _COMMON | _QWEN | _QWEN2_MOE, qkv_bias=True),
        Family("qwen3_moe", _COMMON | _QWEN | _QWEN3_MOE, qk_norm=True, window="asked"),
        Family("mixtral", _COMMON | _LLAMA_IDS | _MIXTRAL, qkv_bias=False, window="all"),
        Family("gemma", _COMMON | _GEMMA | _GEMMA1, **_GEMMA_PARTS),
        Family(
            "gemma2",
            _COMMON | _GEMMA | {"final_logit_softcapping": 30.0, "attn_logit_softcapping": 50.0},
            sandwich=True,
            window="alternate",
            attention_softcap=True,
            **_GEMMA_PARTS,
        ),
        Family(
            "gemma3_text", _COMMON | _GEMMA | _GEMMA3, sandwich=True, qk_norm=True, window="pattern", **_GEMMA_PARTS
        ),
        Family("deepseek_v2", _COMMON | _DEEPSEEK_V2, is_latent=True, has_mlp_bias=True),
        Family("deepseek_v3", _COMMON | _DEEPSEEK_V2 | _DEEPSEEK_V3, is_latent=True),
    )
}
ALIASES = {"gemma3": "gemma3_text"}
ARCHITECTURES = {
    "LlamaForCausalLM": "llama", "MistralForCausalLM": "mistral", "Qwen2ForCausalLM": "qwen2",
    "Qwen3ForCausalLM": "qwen3", "Qwen2MoeForCausalLM": "qwen2_moe", "Qwen3MoeForCausalLM": "qwen3_moe",
    "MixtralForCausalLM": "mixtral", "GemmaForCausalLM": "gemma", "Gemma2ForCausalLM": "gemma2",
    "Gemma3ForCausalLM": "gemma3_text", "Gemma3ForConditionalGeneration": "gemma3_text",
    "DeepseekV2ForCausalLM": "deepseek_v2", "DeepseekV3ForCausalLM": "deepseek_v3",
}  # fmt: skip


@dataclass(slots=True)
class ConfigText:
    """The decoder's own config: its keys, then the family's defaults."""

    family: Family
    raw: Json
    name: str = field(init=False)

    def __post_init__(self) -> None:
        self.name = self.family.name

    def get(self, key: str) -> Any:
        return self.raw[key] if key in self.raw else self.family.defaults.get(key)

    def size(self, key: str) -> int:
        value = self.get(key)
        if isinstance(value, bool) or not isinstance(value, int) or value <= 0:
            raise CheckpointCorrupt("config.json", f"{key} is {value!r}, not a positive integer")
        return value
