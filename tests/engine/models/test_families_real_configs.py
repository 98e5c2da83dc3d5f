"""The published config.json of real models (their facts, as uploaded) and what we must read out of them."""

import math
from typing import Any

import pytest

from kvrelay.engine.checkpoints.files import expected_shapes
from kvrelay.engine.models.spec import ModelSpec
from kvrelay.errors import UnsupportedModel

QWEN25 = {
    "architectures": ["Qwen2ForCausalLM"],
    "attention_dropout": 0.0,
    "bos_token_id": 151643,
    "eos_token_id": 151645,
    "hidden_act": "silu",
    "max_position_embeddings": 32768,
    "model_type": "qwen2",
    "rms_norm_eps": 1e-06,
    "rope_theta": 1000000.0,
    "torch_dtype": "bfloat16",
    "use_cache": True,
    "use_sliding_window": False,
}
LLAMA3_ROPE = {
    "factor": 32.0,
    "high_freq_factor": 4.0,
    "low_freq_factor": 1.0,
    "original_max_position_embeddings": 8192,
    "rope_type": "llama3",
}
GEMMA3_TEXT = {
    "architectures": ["Gemma3ForCausalLM"],
    "attention_bias": False,
    "attn_logit_softcapping": None,
    "bos_token_id": 2,
    "eos_token_id": [1, 106],
    "final_logit_softcapping": None,
    "head_dim": 256,
    "hidden_activation": "gelu_pytorch_tanh",
    "max_position_embeddings": 32768,
    "model_type": "gemma3_text",
    "num_attention_heads": 4,
    "num_key_value_heads": 1,
    "pad_token_id": 0,
    "query_pre_attn_scalar": 256,
    "rms_norm_eps": 1e-06,
    "rope_local_base_freq": 10000,
    "rope_scaling": None,
    "rope_theta": 1000000,
    "sliding_window": 512,
    "vocab_size": 262144,
}
CONFIGS: dict[str, dict[str, Any]] = {
    "Qwen2.5-0.5B-Instruct": QWEN25
    | {"hidden_size": 896, "intermediate_size": 4864, "max_window_layers": 21, "num_attention_heads": 14}
    | {"num_hidden_layers": 24, "num_key_value_heads": 2, "sliding_window": 32768, "tie_word_embeddings": True}
    | {"vocab_size": 151936},
    "Qwen2.5-7B-Instruct": QWEN25
    | {"hidden_size": 3584, "intermediate_size": 18944, "max_window_layers": 28, "num_attention_heads": 28}
    | {"num_hidden_layers": 28, "num_key_value_heads": 4, "sliding_window": 131072, "tie_word_embeddings": False}
    | {"vocab_size": 152064},
    "Qwen3-0.6B": QWEN25
    | {"architectures": ["Qwen3ForCausalLM"], "model_type": "qwen3", "attention_bias": False, "head_dim": 128}
    | {"hidden_size": 1024, "intermediate_size": 3072, "max_position_embeddings": 40960, "max_window_layers": 28}
    | {"num_attention_heads": 16, "num_hidden_layers": 28, "num_key_value_heads": 8, "rope_scaling": None}
    | {"sliding_window": None, "tie_word_embeddings": True, "vocab_size": 151936},
    "Llama-3.2-1B-Instruct": {
        "architectures": ["LlamaForCausalLM"],
        "attention_bias": False,
        "bos_token_id": 128000,
        "eos_token_id": [128001, 128008, 128009],
        "head_dim": 64,
        "hidden_act": "silu",
        "hidden_size": 2048,
        "intermediate_size": 8192,
        "max_position_embeddings": 131072,
        "mlp_bias": False,
        "model_type": "llama",
        "num_attention_heads": 32,
        "num_hidden_layers": 16,
        "num_key_value_heads": 8,
        "pretraining_tp": 1,
        "rms_norm_eps": 1e-05,
        "rope_scaling": LLAMA3_ROPE,
        "rope_theta": 500000.0,
        "tie_word_embeddings": True,
        "vocab_size": 128256,
    },
    "Mistral-7B-Instruct-v0.3": {
        "architectures": ["MistralForCausalLM"],
        "attention_dropout": 0.0,
        "bos_token_id": 1,
        "eos_token_id": 2,
        "hidden_act": "silu",
        "hidden_size": 4096,
        "intermediate_size": 14336,
        "max_position_embeddings": 32768,
        "model_type": "mistral",
        "num_attention_heads": 32,
        "num_hidden_layers": 32,
        "num_key_value_heads": 8,
        "rms_norm_eps": 1e-05,
        "rope_theta": 1000000.0,
        "sliding_window": None,
        "tie_word_embeddings": False,
        "vocab_size": 32768,
    },
    "SmolLM2-135M-Instruct": {
        "architectures": ["LlamaForCausalLM"],
        "attention_bias": False,
        "bos_token_id": 1,
        "eos_token_id": 2,
        "hidden_act": "silu",
        "hidden_size": 576,
        "intermediate_size": 1536,
        "is_llama_config": True,
        "max_position_embeddings": 8192,
        "mlp_bias": False,
        "model_type": "llama",
        "num_attention_heads": 9,
        "num_hidden_layers": 30,
        "num_key_value_heads": 3,
        "pad_token_id": 2,
        "rms_norm_eps": 1e-05,
        "rope_interleaved": False,
        "rope_scaling": None,
        "rope_theta": 100000,
        "tie_word_embeddings": True,
        "vocab_size": 49152,
    },
    "gemma-3-270m-it": GEMMA3_TEXT
    | {"_sliding_window_pattern": 6, "eos_token_id": 1, "hidden_size": 640, "intermediate_size": 2048}
    | {"layer_types": (["sliding_attention"] * 5 + ["full_attention"]) * 3, "num_hidden_layers": 18}
    | {"use_bidirectional_attention": False},
    "gemma-3-1b-it": GEMMA3_TEXT
    | {"hidden_size": 1152, "intermediate_size": 6912, "num_hidden_layers": 26, "sliding_window_pattern": 6},
    "gemma-3-4b-it": {
        "architectures": ["Gemma3ForConditionalGeneration"],
        "boi_token_index": 255999,
        "eoi_token_index": 256000,
        "eos_token_id": [1, 106],
        "image_token_index": 262144,
        "mm_tokens_per_image": 256,
        "model_type": "gemma3",
        "text_config": {
            "hidden_size": 2560,
            "intermediate_size": 10240,
            "model_type": "gemma3_text",
            "num_hidden_layers": 34,
            "rope_scaling": {"factor": 8.0, "rope_type": "linear"},
            "sliding_window": 1024,
        },
        "vision_config": {"hidden_size": 1152, "model_type": "siglip_vision_model", "num_hidden_layers": 27},
    },
    "gemma-3-27b-it": {
        "architectures": ["Gemma3ForConditionalGeneration"],
        "eos_token_id": [1, 106],
        "model_type": "gemma3",
        "text_config": {
            "head_dim": 128,
            "hidden_size": 5376,
            "intermediate_size": 21504,
            "model_type": "gemma3_text",
            "num_attention_heads": 32,
            "num_hidden_layers": 62,
            "num_key_value_heads": 16,
            "query_pre_attn_scalar": 168,
            "rope_scaling": {"factor": 8.0, "rope_type": "linear"},
            "sliding_window": 1024,
        },
        "vision_config": {"model_type": "siglip_vision_model"},
    },
}
GENERATION: dict[str, dict[str, Any]] = {
    "Qwen2.5-0.5B-Instruct": {"eos_token_id": [151645, 151643], "pad_token_id": 151643},
    "Qwen3-0.6B": {"eos_token_id": [151645, 151643]},
    "gemma-3-270m-it": {"eos_token_id": [1, 106], "cache_implementation": "hybrid"},
}
SHAPES = {  # architecture, layers, hidden, FFN, heads, KV heads, head size, vocabulary, context, tied
    "Qwen2.5-0.5B-Instruct": ("qwen2", 24, 896, 4864, 14, 2, 64, 151936, 32768, True),
    "Qwen2.5-7B-Instruct": ("qwen2", 28, 3584, 18944, 28, 4, 128, 152064, 32768, False),
    "Qwen3-0.6B": ("qwen3", 28, 1024, 3072, 16, 8, 128, 151936, 40960, True),
    "Llama-3.2-1B-Instruct": ("llama", 16, 2048, 8192, 32, 8, 64, 128256, 131072, True),
    "Mistral-7B-Instruct-v0.3": ("mistral", 32, 4096, 14336, 32, 8, 128, 32768, 32768, False),
    "SmolLM2-135M-Instruct": ("llama", 30, 576, 1536, 9, 3, 64, 49152, 8192, True),
    "gemma-3-270m-it": ("gemma3_text", 18, 640, 2048, 4, 1, 256, 262144, 32768, True),
    "gemma-3-1b-it": ("gemma3_text", 26, 1152, 6912, 4, 1, 256, 262144, 32768, True),
    "gemma-3-4b-it": ("gemma3_text", 34, 2560, 10240, 8, 4, 256, 262208, 131072, True),
    "gemma-3-27b-it": ("gemma3_text", 62, 5376, 21504, 32, 16, 128, 262208, 131072, True),
}
THETAS = {
    "Qwen2.5-0.5B-Instruct": 1e6,
    "Qwen2.5-7B-Instruct": 1e6,
    "Qwen3-0.6B": 1e6,
    "Llama-3.2-1B-Instruct": 5e5,
    "Mistral-7B-Instruct-v0.3": 1e6,
    "SmolLM2-135M-Instruct": 1e5,
}
EOS = {
    "Qwen2.5-0.5B-Instruct": {151645, 151643},
    "Qwen3-0.6B": {151645, 151643},
    "Llama-3.2-1B-Instruct": {128001, 128008, 128009},
    "Mistral-7B-Instruct-v0.3": {2},
    "gemma-3-270m-it": {1, 106},
    "gemma-3-1b-it": {1, 106},
    "gemma-3-4b-it": {1, 106},
}


def spec_of(name: str) -> ModelSpec:
    return ModelSpec.from_config(CONFIGS[name], GENERATION.get(name))


@pytest.mark.parametrize("name", CONFIGS)
def test_the_shape_is_read(name: str) -> None:
    s = spec_of(name)
    sizes = (s.num_layers, s.hidden_size, s.ffn_size, s.num_heads, s.num_kv_heads, s.head_dim, s.vocab_size)
    assert (s.architecture, *sizes, s.max_position, s.is_tied) == SHAPES[name]
    assert s.norm_eps == (1e-5 if name.startswith(("Llama", "Mistral", "SmolLM2")) else 1e-6)


@pytest.mark.parametrize("name", CONFIGS)
def test_the_parts_are_the_familys(name: str) -> None:
    spec, is_gemma = spec_of(name), name.startswith("gemma")
    assert spec.has_qkv_bias is name.startswith("Qwen2.5")
    assert spec.has_qk_norm is name.startswith(("Qwen3", "gemma"))
    assert (spec.has_o_bias, spec.has_mlp_bias) == (False, False)
    assert (spec.norm_offset, spec.sandwich_norms) == (is_gemma, is_gemma)
    assert spec.activation == ("gelu_tanh" if is_gemma else "silu")
    assert spec.embed_scale == (spec.hidden_size**0.5 if is_gemma else None)
    assert (spec.attention_softcap, spec.final_softcap) == (None, None)
    assert spec.query_scale == pytest.approx(168**-0.5 if "27b" in name else spec.head_dim**-0.5)


@pytest.mark.parametrize("name", THETAS)
def test_plain_families_attend_to_everything_with_one_rope(name: str) -> None:
    spec = spec_of(name)
    assert set(spec.layer_windows) == {None}
    assert set(spec.layer_ropes) == {0}
    assert [rope.theta for rope in spec.ropes] == [THETAS[name]]
    assert spec.ropes[0].kind == ("llama3" if name.startswith("Llama") else "default")


def test_llama_32_stretches_its_rope() -> None:
    (rope,) = spec_of("Llama-3.2-1B-Instruct").ropes
    assert (rope.factor, rope.low_freq_factor, rope.high_freq_factor) == (32.0, 1.0, 4.0)
    assert rope.original_max_position == 8192


@pytest.mark.parametrize(
    ("name", "window", "factor"),
    [
        ("gemma-3-270m-it", 512, 1.0),
        ("gemma-3-1b-it", 512, 1.0),
        ("gemma-3-4b-it", 1024, 8.0),
        ("gemma-3-27b-it", 1024, 8.0),
    ],
)
def test_gemma3_slides_five_times_in_six(name: str, window: int, factor: float) -> None:
    spec = spec_of(name)
    full = [layer for layer in range(spec.num_layers) if spec.layer_windows[layer] is None]
    assert full == list(range(5, spec.num_layers, 6))
    assert set(spec.layer_windows) == {None, window}
    assert all(
        (rope == 0) == (window is None) for rope, window in zip(spec.layer_ropes, spec.layer_windows, strict=True)
    )
    assert [(rope.theta, rope.factor) for rope in spec.ropes] == [(1e6, factor), (1e4, 1.0)]


@pytest.mark.parametrize("name", EOS)
def test_every_end_is_known(name: str) -> None:
    assert set(spec_of(name).eos_ids) == EOS[name]


QWEN3_MOE = {
    "architectures": ["Qwen3MoeForCausalLM"],
    "model_type": "qwen3_moe",
    "hidden_act": "silu",
    "head_dim": 128,
} | {
    "attention_bias": False,
    "decoder_sparse_step": 1,
    "hidden_size": 2048,
    "intermediate_size": 6144,
    "max_position_embeddings": 40960,
    "max_window_layers": 48,
    "mlp_only_layers": [],
    "moe_intermediate_size": 768,
    "norm_topk_prob": True,
    "num_attention_heads": 32,
    "num_experts": 128,
    "num_experts_per_tok": 8,
    "num_hidden_layers": 48,
    "num_key_value_heads": 4,
    "rms_norm_eps": 1e-06,
    "rope_theta": 1000000.0,
    "sliding_window": None,
    "use_sliding_window": False,
    "tie_word_embeddings": False,
    "vocab_size": 151936,
}
QWEN15_MOE = {"architectures": ["Qwen2MoeForCausalLM"], "model_type": "qwen2_moe", "hidden_act": "silu"} | {
    "decoder_sparse_step": 1,
    "hidden_size": 2048,
    "intermediate_size": 5632,
    "max_position_embeddings": 8192,
    "max_window_layers": 21,
    "moe_intermediate_size": 1408,
    "norm_topk_prob": False,
    "num_attention_heads": 16,
    "num_experts": 60,
    "num_experts_per_tok": 4,
    "num_hidden_layers": 24,
    "num_key_value_heads": 16,
    "rms_norm_eps": 1e-06,
    "rope_theta": 1000000.0,
    "shared_expert_intermediate_size": 5632,
    "sliding_window": 32768,
    "tie_word_embeddings": False,
    "use_sliding_window": False,
    "vocab_size": 151936,
}
MIXTRAL = {"architectures": ["MixtralForCausalLM"], "model_type": "mixtral", "hidden_act": "silu"} | {
    "hidden_size": 4096,
    "intermediate_size": 14336,
    "max_position_embeddings": 32768,
    "num_attention_heads": 32,
    "num_experts_per_tok": 2,
    "num_hidden_layers": 32,
    "num_key_value_heads": 8,
    "num_local_experts": 8,
    "rms_norm_eps": 1e-05,
    "rope_theta": 1000000.0,
    "sliding_window": None,
    "tie_word_embeddings": False,
    "vocab_size": 32000,
}


@pytest.mark.parametrize(
    ("config", "layers", "num_experts", "num_chosen", "ffn", "shared", "billions"),
    [
        (QWEN3_MOE, 48, 128, 8, 768, 0, 30.5),
        (QWEN15_MOE, 24, 60, 4, 1408, 5632, 14.3),
        (MIXTRAL, 32, 8, 2, 14336, 0, 46.7),
    ],
    ids=["Qwen3-30B-A3B", "Qwen1.5-MoE-A2.7B", "Mixtral-8x7B"],
)
def test_mixtures_of_experts_have_the_sizes_that_they_are_named_for(
    config: dict[str, Any], layers: int, num_experts: int, num_chosen: int, ffn: int, shared: int, billions: float
) -> None:
    spec = ModelSpec.from_config(config)
    assert spec.experts is not None and spec.experts.layers == frozenset(range(layers))
    choice = spec.experts.choice
    assert (choice.num_experts, choice.num_chosen, choice.normalise) == (num_experts, num_chosen, ffn != 1408)
    assert (spec.experts.ffn_size, spec.experts.shared_ffn_size, spec.experts.has_shared_gate) == (
        ffn,
        shared,
        shared > 0,
    )
    assert (spec.has_qk_norm, spec.has_qkv_bias) == (ffn == 768, ffn == 1408)
    assert set(spec.layer_windows) == {None}
    total = sum(math.prod(shape) for shape in expected_shapes(spec).values())
    assert round(total / 1e9, 1) == billions


REFUSED: dict[str, dict[str, Any]] = {
    "SmolLM3-3B": {
        "architectures": ["SmolLM3ForCausalLM"],
        "model_type": "smollm3",
        "no_rope_layer_interval": 4,
        "no_rope_layers": [1, 1, 1, 0] * 9,
        "num_hidden_layers": 36,
    },
    "Phi-3-mini-4k-instruct": {"architectures": ["Phi3ForCausalLM"], "model_type": "phi3"},
    "Phi-3.5-MoE-instruct": {"architectures": ["PhiMoEForCausalLM"], "model_type": "phimoe"},
    "Qwen3-Next-80B-A3B": {"architectures": ["Qwen3NextForCausalLM"], "model_type": "qwen3_next"},
    "Qwen2.5-VL-3B": {"architectures": ["Qwen2_5_VLForConditionalGeneration"], "model_type": "qwen2_5_vl"},
    "gemma-3n-E2B-it": {"architectures": ["Gemma3nForConditionalGeneration"], "model_type": "gemma3n"},
    "embeddinggemma-300m": {"architectures": ["Gemma3TextModel"], "model_type": "gemma3_text"},
    "Llama-4-Scout": {"architectures": ["Llama4ForConditionalGeneration"], "model_type": "llama4"},
    "Ministral-3-3B": {"architectures": ["Mistral3ForConditionalGeneration"], "model_type": "mistral3"},
    "granite-3.3-2b": {"architectures": ["GraniteForCausalLM"], "model_type": "granite"},
    "OLMo-2-1B": {"architectures": ["Olmo2ForCausalLM"], "model_type": "olmo2"},
    "gpt-oss-20b": {"architectures": ["GptOssForCausalLM"], "model_type": "gpt_oss"},
}


@pytest.mark.parametrize("name", REFUSED)
def test_what_we_have_no_parts_for_is_refused_by_its_name(name: str) -> None:
    """SmolLM3 above all: as a plain Llama it would rotate the layers that have no rotary embedding."""
    with pytest.raises(UnsupportedModel, match=REFUSED[name]["architectures"][0]):
        ModelSpec.from_config(REFUSED[name])


def test_a_config_without_architectures_is_judged_by_its_type() -> None:
    with pytest.raises(UnsupportedModel, match="smollm3"):
        ModelSpec.from_config({key: value for key, value in REFUSED["SmolLM3-3B"].items() if key != "architectures"})


@pytest.mark.parametrize("method", ["quark", "hqq", "torchao", "bitsandbytes"])
def test_quantised_folders_are_refused_with_a_way_out(method: str) -> None:
    config = CONFIGS["Qwen2.5-7B-Instruct"] | {"quantization_config": {"quant_method": method}}
    with pytest.raises(UnsupportedModel, match=f"{method}.*GGUF"):
        ModelSpec.from_config(config)
