"""Tiny random models on disk, and what Hugging Face says of them."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from transformers import AutoModelForCausalLM, LlamaConfig, LlamaForCausalLM

LLAMA: dict[str, Any] = {
    "vocab_size": 97, "hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 3, "num_attention_heads": 4,
    "num_key_value_heads": 2, "max_position_embeddings": 256, "tie_word_embeddings": False, "bos_token_id": 1,
    "eos_token_id": 2, "initializer_range": 0.2,
}  # fmt: skip


def tiny_llama(folder: Path, *, seed: int = 1, **changes: Any) -> Path:
    """Write a Llama of `LLAMA`'s shape, with changes, into `folder`."""
    torch.manual_seed(seed)
    LlamaForCausalLM(LlamaConfig(**LLAMA | changes)).save_pretrained(folder)
    return folder


def greedy_oracle(folder: Path) -> Callable[[list[int], int], list[int]]:
    """Hugging Face's greedy generate in float32, end-of-sequence ignored: (prompt, tokens) -> tokens."""
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    model.generation_config.eos_token_id = None

    def generate(prompt: list[int], count: int = 10) -> list[int]:
        ids = torch.tensor([prompt])
        out = model.generate(
            ids, attention_mask=torch.ones_like(ids), max_new_tokens=count, do_sample=False, pad_token_id=0
        )
        return out[0, len(prompt) :].tolist()

    return generate
