"""Tiny checkpoints with random weights, one per family: the smallest folders that kvrelay can serve.

For `kvrelay verify`, tests and benchmarks. Windows are shorter than ordinary prompts and softcaps are low, so
that each family's parts affect the output.
"""

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from kvrelay.engine.checkpoints.files import expected_shapes, stored_name
from kvrelay.engine.models.spec import ModelSpec
from kvrelay.errors import UnsupportedModel

_VOCAB = 320
_SPECIAL = ("<pad>", "<s>", "</s>")
_CHAT_TEMPLATE = (
    "{% for message in messages %}{{ message['role'] }}: {{ message['content'] }}\n{% endfor %}"
    "{% if add_generation_prompt %}assistant: {% endif %}"
)

_BASE: dict[str, Any] = {
    "vocab_size": _VOCAB, "hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 4,
    "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 32, "max_position_embeddings": 2048,
    "rms_norm_eps": 1e-6, "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2, "tie_word_embeddings": False,
    "dtype": "float32",
}  # fmt: skip
_ROPE = {"rope_parameters": {"rope_type": "default", "rope_theta": 10000.0}}
_LLAMA3 = {
    "rope_type": "llama3", "rope_theta": 10000.0, "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
    "original_max_position_embeddings": 256,
}  # fmt: skip
_GEMMA: dict[str, Any] = {
    "hidden_activation": "gelu_pytorch_tanh", "tie_word_embeddings": True, "query_pre_attn_scalar": 40
}  # fmt: skip
_HALF_SLIDING = {"sliding_window": 24, "layer_types": ["sliding_attention", "full_attention"] * 2}

_YARN = {
    "rope_type": "yarn", "rope_theta": 10000.0, "factor": 8.0, "original_max_position_embeddings": 256, "mscale": 0.7,
    "mscale_all_dim": 0.9,
}  # fmt: skip
_DEEPSEEK: dict[str, Any] = {
    "num_key_value_heads": 4, "head_dim": 16, "kv_lora_rank": 32, "qk_rope_head_dim": 16, "qk_nope_head_dim": 24,
    "v_head_dim": 20, "first_k_dense_replace": 1, "moe_intermediate_size": 32, "n_routed_experts": 8,
    "num_experts_per_tok": 3, "n_group": 4, "topk_group": 2,
}  # fmt: skip


def _config(model_type: str, architecture: str, *parts: dict[str, Any], **own: Any) -> dict[str, Any]:
    """The family's config: later parts, then its own keys, win."""
    config = _BASE | _ROPE
    for part in parts:
        config |= part
    return config | {"model_type": model_type, "architectures": [f"{architecture}ForCausalLM"]} | own


_LINEAR = {"rope_type": "linear", "factor": 2.0, "rope_theta": 100000.0}
_LOCAL = {"rope_type": "default", "rope_theta": 1000.0}
_EIGHT = {"num_experts": 8, "num_experts_per_tok": 3, "moe_intermediate_size": 32, "norm_topk_prob": True}
_SIX = {"num_experts": 6, "num_experts_per_tok": 2, "moe_intermediate_size": 32, "shared_expert_intermediate_size": 48}

TINY_CONFIGS: dict[str, dict[str, Any]] = {
    "llama": _config("llama", "Llama", rope_parameters=_LLAMA3, tie_word_embeddings=True),
    "mistral": _config("mistral", "Mistral", sliding_window=40),
    "qwen2": _config("qwen2", "Qwen2", head_dim=16),
    "qwen3": _config("qwen3", "Qwen3"),
    "gemma2": _config(
        "gemma2", "Gemma2", _GEMMA, _HALF_SLIDING, attn_logit_softcapping=5.0, final_logit_softcapping=10.0
    ),
    "gemma3": _config(
        "gemma3_text", "Gemma3", _GEMMA, _HALF_SLIDING,
        rope_parameters={"full_attention": _LINEAR, "sliding_attention": _LOCAL},
    ),
    "qwen3_moe": _config("qwen3_moe", "Qwen3Moe", _EIGHT, mlp_only_layers=[2]),
    "qwen2_moe": _config("qwen2_moe", "Qwen2Moe", _SIX, head_dim=16, decoder_sparse_step=2),
    "mixtral": _config("mixtral", "Mixtral", sliding_window=40, num_local_experts=4, num_experts_per_tok=2),
    "deepseek_v2": _config(
        "deepseek_v2", "DeepseekV2", _DEEPSEEK,
        q_lora_rank=None, topk_method="group_limited_greedy", n_shared_experts=2, routed_scaling_factor=2.0,
    ),
    "deepseek_v3": _config(
        "deepseek_v3", "DeepseekV3", _DEEPSEEK, rope_parameters=_YARN,
        q_lora_rank=28, n_shared_experts=1, routed_scaling_factor=2.5, norm_topk_prob=True,
    ),
}  # fmt: skip


def tiny_checkpoint(family: str, folder: Path, *, seed: int = 0, **own: Any) -> Path:
    """Write a complete folder (config, float32 weights, byte tokenizer, chat template) and return it.

    own: keys of its config. Raises UnsupportedModel for a family that is not in TINY_CONFIGS.
    """
    if family not in TINY_CONFIGS:
        raise UnsupportedModel(family, f"tiny checkpoints exist for {', '.join(TINY_CONFIGS)}")
    random_weights(TINY_CONFIGS[family] | own, folder, seed=seed)
    byte_tokenizer(folder)
    return folder


def random_weights(config: dict[str, Any], folder: Path, *, seed: int = 0, dtype: Any = None) -> Path:
    """Write a checkpoint folder (config.json + model.safetensors) of random weights for an HF config.

    Scaled so that the next token depends on the whole context, not on the last token alone: a wrong block
    in the cache shows. No tokenizer is written. dtype: torch's; None: float32.
    """
    import torch
    from safetensors.torch import save_file

    spec = ModelSpec.from_config(config)
    generator = torch.Generator().manual_seed(seed)
    tensors = {
        stored_name(name, spec.architecture): tensor.to(dtype or torch.float32)
        for name, tensor in _random_tensors(spec, generator)
    }
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps(config, indent=2))
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    return folder


def _random_tensors(spec: ModelSpec, generator: Any) -> Iterator[tuple[str, Any]]:
    import torch

    embedding = 0.2 / (spec.embed_scale or 1.0)  # small compared with the layers' additions to the residual
    louder = {"q_proj": 2.0, "k_proj": 2.0, "v_proj": 1.5, "o_proj": 1.5}  # sharp attention with an effect
    louder |= {"q_b_proj": 2.0, "kv_b_proj": 2.0, "kv_a_proj_with_mqa": 2.0}
    for name, shape in expected_shapes(spec).items():
        noise = torch.randn(shape, generator=generator)
        if name == "embed_tokens.weight":
            yield name, noise * embedding
        elif len(shape) == 2:
            yield name, noise * louder.get(name.split(".")[-2], 1.0) * shape[1] ** -0.5
        elif name.endswith("bias"):
            yield name, noise * 0.1
        else:
            centre = 1.8 if name.endswith(("q_norm.weight", "k_norm.weight")) else 1.0
            yield name, noise * 0.1 + centre - (1.0 if spec.norm_offset else 0.0)


def byte_tokenizer(folder: Path, vocab_size: int = 0) -> None:
    """A tokenizer whose tokens are three special ones (pad 0, bos 1, eos 2) and the 256 bytes (3 to 258); up to
    `vocab_size`, words that no text becomes, so that whatever a model of random weights draws is text.
    """
    from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers

    letters = sorted(pre_tokenizers.ByteLevel.alphabet())
    words = (f"\u0120{index}" for index in range(len(_SPECIAL) + len(letters), vocab_size))  # a space and a number
    vocab = {token: index for index, token in enumerate((*_SPECIAL, *letters, *words))}
    tokenizer = Tokenizer(models.BPE(vocab=vocab, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens([AddedToken(token, special=True, normalized=False) for token in _SPECIAL])
    tokenizer.save(str(folder / "tokenizer.json"))
    names = dict(zip(("pad_token", "bos_token", "eos_token"), _SPECIAL, strict=True))
    config = {"tokenizer_class": "PreTrainedTokenizerFast", "clean_up_tokenization_spaces": False, **names}
    (folder / "tokenizer_config.json").write_text(json.dumps(config, indent=2))
    (folder / "chat_template.jinja").write_text(_CHAT_TEMPLATE)
