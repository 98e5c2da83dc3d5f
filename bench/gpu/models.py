"""Random weights in the shapes of known models, written as bf16 checkpoints that kvrelay and Hugging Face both load."""

import json
import math
import shutil
from pathlib import Path
from typing import Any

import torch

from bench.gpu.section import Context, LeftOut
from kvrelay.engine.checkpoints.files import expected_shapes, stored_name
from kvrelay.engine.checkpoints.tiny import TINY_CONFIGS, byte_tokenizer
from kvrelay.engine.models.spec import ModelSpec

LLAMA_8B: dict[str, Any] = {
    "architectures": ["LlamaForCausalLM"], "model_type": "llama", "hidden_size": 4096, "intermediate_size": 14336,
    "num_hidden_layers": 32, "num_attention_heads": 32, "num_key_value_heads": 8, "head_dim": 128, "vocab_size": 128256,
    "max_position_embeddings": 131072, "rms_norm_eps": 1e-5, "tie_word_embeddings": False, "bos_token_id": 128000,
    "eos_token_id": 128001, "dtype": "bfloat16", "hidden_act": "silu", "attention_bias": False, "mlp_bias": False,
    "rope_parameters": {"rope_type": "default", "rope_theta": 500000.0},
}  # fmt: skip
# of 48 layers as many as two workers can hold on one device
QWEN3_MOE: dict[str, Any] = {
    "architectures": ["Qwen3MoeForCausalLM"], "model_type": "qwen3_moe", "hidden_size": 2048, "intermediate_size": 6144,
    "moe_intermediate_size": 768, "num_hidden_layers": 8, "num_attention_heads": 32, "num_key_value_heads": 4,
    "head_dim": 128, "num_experts": 128, "num_experts_per_tok": 8, "norm_topk_prob": True, "vocab_size": 151936,
    "max_position_embeddings": 40960, "rms_norm_eps": 1e-6, "tie_word_embeddings": False, "bos_token_id": 151643,
    "eos_token_id": 151645, "dtype": "bfloat16", "hidden_act": "silu", "decoder_sparse_step": 1, "mlp_only_layers": [],
    "rope_parameters": {"rope_type": "default", "rope_theta": 1000000.0},
}  # fmt: skip
# DeepSeek-V2-Lite, 4 of 27 layers: latent attention and experts
DEEPSEEK_LITE: dict[str, Any] = {
    "architectures": ["DeepseekV2ForCausalLM"], "model_type": "deepseek_v2", "hidden_size": 2048,
    "intermediate_size": 10944, "moe_intermediate_size": 1408, "num_hidden_layers": 4, "num_attention_heads": 16,
    "num_key_value_heads": 16, "kv_lora_rank": 512, "q_lora_rank": None, "qk_rope_head_dim": 64,
    "qk_nope_head_dim": 128, "v_head_dim": 128, "n_routed_experts": 64, "n_shared_experts": 2, "num_experts_per_tok": 6,
    "n_group": 1, "topk_group": 1, "topk_method": "greedy", "first_k_dense_replace": 1, "routed_scaling_factor": 1.0,
    "norm_topk_prob": False, "vocab_size": 102400, "max_position_embeddings": 32768, "rms_norm_eps": 1e-6,
    "tie_word_embeddings": False, "bos_token_id": 100000, "eos_token_id": 100001, "dtype": "bfloat16",
    "hidden_act": "silu", "rope_parameters": {"rope_type": "default", "rope_theta": 10000.0},
}  # fmt: skip

_TINY: dict[str, Any] = {
    "hidden_size": 64, "intermediate_size": 64, "moe_intermediate_size": 32, "num_hidden_layers": 2, "head_dim": 32,
    "num_attention_heads": 4, "num_key_value_heads": 2, "num_experts": 8, "num_experts_per_tok": 2, "vocab_size": 320,
    "bos_token_id": 1, "eos_token_id": 2, "max_position_embeddings": 2048,
}  # fmt: skip
TINY_QWEN3_MOE = QWEN3_MOE | _TINY

# for a rehearsal: what decides which kernels run stays (heads and their sizes, experts for a token)
_NARROW = {
    "hidden_size": 512, "intermediate_size": 512, "moe_intermediate_size": 128, "num_hidden_layers": 2,
    "vocab_size": 4096, "bos_token_id": 1, "eos_token_id": 2,
}  # fmt: skip

CONFIGS: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {  # name -> (the real shape, the tiny one)
    "llama-8b": (LLAMA_8B, TINY_CONFIGS["llama"]),
    "llama-8b, 2 layers": (LLAMA_8B | {"num_hidden_layers": 2}, TINY_CONFIGS["llama"]),
    "qwen3-moe, 8 of 48 layers": (QWEN3_MOE, TINY_QWEN3_MOE),
    "deepseek-v2-lite, 4 of 27 layers": (DEEPSEEK_LITE, TINY_CONFIGS["deepseek_v2"]),
}


def config_of(context: Context, name: str) -> dict[str, Any]:
    real, tiny = CONFIGS[name]
    narrow = {key: min(size, real[key]) for key, size in _NARROW.items() if key in real} if context.rehearse else {}
    return tiny if context.tiny else real | narrow


def step_parameters(spec: ModelSpec) -> int:
    """Numbers that a dense model's decode step reads: all but the rows of an embedding table that is no head, too."""
    shapes = expected_shapes(spec)
    unread = 0 if spec.is_tied else math.prod(shapes["embed_tokens.weight"])
    return sum(map(math.prod, shapes.values())) - unread


def linear_parameters(spec: ModelSpec) -> int:
    """In products over every prompt token: all matrices but embedding and head."""
    shapes = expected_shapes(spec)
    return sum(math.prod(shape) for name, shape in shapes.items() if len(shape) == 2 and name.startswith("layers."))


def folder_of(context: Context, name: str) -> Path:
    """The checkpoint of that name, written at its first use; sections share it.

    Raises LeftOut: no room on the disk. UnsupportedModel: kvrelay does not know the architecture.
    """
    config = config_of(context, name)
    folder = context.scratch / "".join(letter if letter.isalnum() else "-" for letter in name)
    if (folder / "model.safetensors").exists():
        return folder
    spec = ModelSpec.from_config(config)
    need = 2 * sum(map(math.prod, expected_shapes(spec).values()))
    if shutil.disk_usage(context.scratch).free < 1.1 * need:
        raise LeftOut(f"{name}: {need / 1e9:.0f} GB of weights do not fit the disk")
    folder.mkdir(parents=True, exist_ok=True)
    _write(config, spec, folder, torch.device(context.device))
    byte_tokenizer(folder, spec.vocab_size)
    return folder


def _write(config: dict[str, Any], spec: ModelSpec, folder: Path, device: torch.device) -> None:
    """safetensors by hand, tensor by tensor: the whole need not fit the memory. Ends with the rename that makes it
    visible.
    """
    shapes = {stored_name(name, spec.architecture): shape for name, shape in expected_shapes(spec).items()}
    header: dict[str, Any] = {"__metadata__": {"format": "pt"}}
    end = 0
    for name, shape in shapes.items():
        begin, end = end, end + 2 * math.prod(shape)
        header[name] = {"dtype": "BF16", "shape": list(shape), "data_offsets": [begin, end]}
    text = json.dumps(header).encode()
    generator = torch.Generator(device).manual_seed(0)
    unfinished = folder / "unfinished"
    with unfinished.open("wb") as file:
        file.write(len(text).to_bytes(8, "little") + text)
        for name, shape in shapes.items():
            noise = torch.randn(shape, generator=generator, dtype=torch.bfloat16, device=device)
            if len(shape) == 2:
                tensor = noise * (0.02 if "embed_tokens" in name else shape[1] ** -0.5)
            else:
                tensor = noise * 0.05 + (0.0 if name.endswith("bias") else 1.0)
            file.write(memoryview(tensor.cpu().reshape(-1).view(torch.uint8).numpy()))
    (folder / "config.json").write_text(json.dumps(config | {"dtype": "bfloat16"}, indent=1))
    unfinished.rename(folder / "model.safetensors")
