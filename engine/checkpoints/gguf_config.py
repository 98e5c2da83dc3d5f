"""GGUF metadata to a Hugging Face config.json: one table of families, llama.cpp's rules for what files omit.

Pure: decides from metadata and tensor names alone.
"""

import math
from collections.abc import Mapping, Sequence
from typing import Any

from kvrelay.errors import CheckpointCorrupt, UnsupportedModel

Json = dict[str, Any]

# Texts that end a turn or a document in any vocabulary that has them as one token (from llama.cpp's list).
END_TEXTS = ("<|im_end|>", "<|eot_id|>", "<|eom_id|>", "<end_of_turn>", "<|endoftext|>", "<|end_of_text|>", "<|end|>")
_LLAMA3 = {"low_freq_factor": 1.0, "high_freq_factor": 4.0, "original_max_position_embeddings": 8192}  # all of 3.x


FAMILIES = {  # Hugging Face's model_type and architecture of a `general.architecture`
    "llama": ("llama", "LlamaForCausalLM"),
    "qwen2": ("qwen2", "Qwen2ForCausalLM"),
    "qwen3": ("qwen3", "Qwen3ForCausalLM"),
    "qwen3moe": ("qwen3_moe", "Qwen3MoeForCausalLM"),
    "gemma": ("gemma", "GemmaForCausalLM"),
    "gemma2": ("gemma2", "Gemma2ForCausalLM"),
    "gemma3": ("gemma3_text", "Gemma3ForCausalLM"),
}


class Metadata:
    """A file's metadata, with keys of its own architecture reachable by their short names."""

    def __init__(self, source: str, values: Mapping[str, Any]) -> None:
        self.source, self.values = source, values
        self.architecture = str(values.get("general.architecture", ""))
        if self.architecture not in FAMILIES:
            raise UnsupportedModel(source, f"GGUF architecture {self.architecture!r}; supported: {', '.join(FAMILIES)}")
        self.is_gemma = self.architecture.startswith("gemma")

    def get(self, key: str, default: Any = None) -> Any:
        value = self.values.get(f"{self.architecture}.{key}", default)
        return short_float(value) if isinstance(value, float) else value

    def need(self, key: str) -> Any:
        value = self.get(key)
        if value is None:
            raise CheckpointCorrupt(self.source, f"metadata {self.architecture}.{key} is missing")
        return value

    def token(self, name: str) -> int | None:
        """The id of a special token such as "bos" or "eot", if the file names one inside its vocabulary."""
        value = self.values.get(f"tokenizer.ggml.{name}_token_id")
        size = len(self.values.get("tokenizer.ggml.tokens", ()))
        return int(value) if value is not None and 0 <= int(value) < size else None


def short_float(value: float) -> float:
    """The shortest decimal of the same float32: 1e-05 for 9.999999747378752e-06."""
    import numpy as np

    return float(str(np.float32(value)))


def hf_config(meta: Metadata, shapes: Mapping[str, Sequence[int]], rope_freqs: Sequence[float] | None) -> Json:
    """config.json for a file whose tensors have these (row-major) shapes.

    rope_freqs: the values of the tensor rope_freqs.weight (Llama 3's stretched frequencies), if present.
    """
    if int(meta.get("expert_count", 0)) and meta.architecture != "qwen3moe":
        raise UnsupportedModel(meta.source, f"mixture-of-experts weights of {meta.architecture}")
    hidden, heads = int(meta.need("embedding_length")), int(_one(meta, "attention.head_count"))
    head_dim = int(meta.get("attention.key_length") or meta.get("rope.dimension_count") or hidden // heads)
    if int(meta.get("attention.value_length", head_dim)) != head_dim:
        raise UnsupportedModel(meta.source, "keys and values of different lengths")
    if int(meta.get("rope.dimension_count", head_dim)) != head_dim:
        raise UnsupportedModel(meta.source, "rotary embedding over a part of each head")
    model_type, architecture = FAMILIES[meta.architecture]
    ids = {f"{name}_token_id": meta.token(long) for name, long in (("bos", "bos"), ("eos", "eos"), ("pad", "padding"))}
    config: Json = {
        "architectures": [architecture],
        "model_type": model_type,
        "dtype": "bfloat16",
        "vocab_size": int(shapes["token_embd.weight"][0]),
        "hidden_size": hidden,
        "intermediate_size": int(_one(meta, "feed_forward_length")),
        "num_hidden_layers": int(meta.need("block_count")),
        "num_attention_heads": heads,
        "num_key_value_heads": int(_one(meta, "attention.head_count_kv", heads)),
        "head_dim": head_dim,
        "max_position_embeddings": int(meta.need("context_length")),
        "rms_norm_eps": float(meta.need("attention.layer_norm_rms_epsilon")),
        "tie_word_embeddings": "output.weight" not in shapes,
        "rope_parameters": _rope(meta, rope_freqs, head_dim),
        **ids,
    }
    if meta.is_gemma:
        return config | _gemma(meta, hidden // heads, head_dim)
    return config | {"hidden_act": "silu"} | _biases(meta, shapes) | _experts(meta, shapes)


def _one(meta: Metadata, key: str, default: Any = None) -> Any:
    """A value that some files give per layer; all layers must agree."""
    value = meta.get(key, default) if default is not None else meta.need(key)
    if isinstance(value, list):
        if len(set(value)) != 1:
            raise UnsupportedModel(meta.source, f"{key} differs between layers")
        return value[0]
    return value


def _biases(meta: Metadata, shapes: Mapping[str, Sequence[int]]) -> Json:
    if meta.architecture == "qwen2":
        return {"use_sliding_window": False}
    has = [f"blk.0.attn_{part}.bias" in shapes for part in ("q", "k", "v", "output")]
    if len(set(has)) != 1:
        raise UnsupportedModel(meta.source, "biases on some of the attention matrices only")
    extra = (
        {"mlp_bias": "blk.0.ffn_up.bias" in shapes} if meta.architecture == "llama" else {"use_sliding_window": False}
    )
    return {"attention_bias": has[0]} | extra


def _experts(meta: Metadata, shapes: Mapping[str, Sequence[int]]) -> Json:
    """llama.cpp normalises the weights of Qwen 3's chosen experts unless the file disables it."""
    if meta.architecture != "qwen3moe":
        return {}
    layers = range(int(meta.need("block_count")))
    return {
        "num_experts": int(meta.need("expert_count")),
        "num_experts_per_tok": int(meta.need("expert_used_count")),
        "moe_intermediate_size": int(meta.need("expert_feed_forward_length")),
        "norm_topk_prob": bool(meta.get("expert_weights_norm", True)),
        "decoder_sparse_step": 1,
        "mlp_only_layers": [layer for layer in layers if f"blk.{layer}.ffn_gate_inp.weight" not in shapes],
    }


def _gemma(meta: Metadata, mean_head: int, head_dim: int) -> Json:
    """llama.cpp derives the query scale from the model's size: only the 27B ones do not use head_dim."""
    layers = int(meta.need("block_count"))
    is_27b = (meta.architecture, layers) in (("gemma2", 46), ("gemma3", 62))
    config: Json = {"hidden_activation": "gelu_pytorch_tanh", "hidden_act": "gelu_pytorch_tanh"}
    if meta.architecture == "gemma":
        return config
    window = int(meta.get("attention.sliding_window", 0))
    pattern = meta.get("attention.sliding_window_pattern", 2 if meta.architecture == "gemma2" else 6)
    sliding = pattern if isinstance(pattern, list) else [bool((i + 1) % int(pattern)) for i in range(layers)]
    types = ["sliding_attention" if s and window else "full_attention" for s in sliding]
    return config | {
        "query_pre_attn_scalar": mean_head if is_27b else head_dim,
        "sliding_window": window or None,
        "layer_types": types,
        "attn_logit_softcapping": meta.get("attn_logit_softcapping"),
        "final_logit_softcapping": meta.get("final_logit_softcapping"),
    }


def _rope(meta: Metadata, rope_freqs: Sequence[float] | None, head_dim: int) -> Json:
    default_theta = 1e6 if meta.architecture == "gemma3" else 1e4
    theta = float(meta.get("rope.freq_base", default_theta))
    rope = {"rope_theta": theta} | (_llama3(meta, rope_freqs, theta, head_dim) if rope_freqs else _scaling(meta))
    if meta.architecture != "gemma3":
        return rope
    local = {"rope_type": "default", "rope_theta": float(meta.get("rope.freq_base_swa", 1e4))}
    return {"full_attention": rope, "sliding_attention": local}


def _scaling(meta: Metadata) -> Json:
    kind = str(meta.get("rope.scaling.type", "none"))
    factor = float(meta.get("rope.scaling.factor") or meta.get("rope.scale_linear") or 1.0)
    if kind == "none" or factor == 1.0:
        return {"rope_type": "default"}
    if kind == "linear":
        return {"rope_type": "linear", "factor": factor}
    if kind == "yarn":
        original = int(meta.need("rope.scaling.original_context_length"))
        return {"rope_type": "yarn", "factor": factor, "original_max_position_embeddings": original}
    raise UnsupportedModel(meta.source, f"rope scaling {kind!r}; known: linear, yarn")


def _llama3(meta: Metadata, rope_freqs: Sequence[float], theta: float, head_dim: int) -> Json:
    """Recover Llama 3's rope settings from the file's divisors; refuses divisors that do not match."""
    factor = round(max(rope_freqs), 4)
    divisors = [_llama3_divisor(theta ** (2 * index / head_dim), factor) for index in range(head_dim // 2)]
    if len(divisors) != len(rope_freqs) or not all(map(_is_close, divisors, rope_freqs)):
        raise UnsupportedModel(meta.source, "rope_freqs.weight is not Llama 3's rope scaling")
    return {"rope_type": "llama3", "factor": factor} | _LLAMA3


def _is_close(one: float, other: float) -> bool:
    return math.isclose(one, other, rel_tol=1e-3)


def _llama3_divisor(turn: float, factor: float) -> float:
    """The divisor of one frequency. Source: Llama 3.1's rope scaling."""
    low, high, original = _LLAMA3.values()
    wavelength = 2 * math.pi * turn
    if wavelength < original / high:
        return 1.0
    if wavelength > original / low:
        return factor
    share = float((original / wavelength - low) / (high - low))
    return 1.0 / ((1 - share) / factor + share)


def end_ids(meta: Metadata) -> list[int]:
    """Every EOS id: the named ones first, then control tokens with a known text."""
    tokens = meta.values.get("tokenizer.ggml.tokens", [])
    kinds = meta.values.get("tokenizer.ggml.token_type") or [1] * len(tokens)
    named = [meta.token(name) for name in ("eos", "eot", "eom")]
    by_text = [
        index
        for index, (token, kind) in enumerate(zip(tokens, kinds, strict=False))
        if token in END_TEXTS and kind != 1  # 1 is an ordinary piece of text
    ]
    return list(dict.fromkeys(index for index in [*named, *by_text] if index is not None))


def generation_config(meta: Metadata) -> Json:
    """generation_config.json: BOS, EOS and padding ids."""
    ids = {"bos_token_id": meta.token("bos"), "eos_token_id": end_ids(meta) or None}
    ids |= {"pad_token_id": meta.token("padding")}
    return {key: value for key, value in ids.items() if value is not None}
