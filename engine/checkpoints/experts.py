"""Layouts of experts in checkpoints: separate (names of Qwen and DeepSeek, or of Mixtral), or fused over all experts.

The decoder's names are those of separate experts: `layers.0.mlp.experts.7.gate_proj.weight`. Pure: imports no torch.
"""

import re

_MIXTRAL = {"gate_proj": "w1", "down_proj": "w2", "up_proj": "w3"}
_OF_MIXTRAL = {theirs: ours for ours, theirs in _MIXTRAL.items()}
_ONE = re.compile(r"(layers\.\d+)\.mlp\.(gate|experts\.\d+\.(gate_proj|up_proj|down_proj))\.weight")
_THEIR_ONE = re.compile(r"(layers\.\d+)\.block_sparse_moe\.(gate|experts\.\d+\.(w1|w2|w3))\.weight")
_FUSED = re.compile(r"(.*layers\.\d+\.mlp\.experts)\.(gate_up_proj|down_proj)")


def stored_name(name: str, architecture: str) -> str:
    """The name of the decoder's tensor `name` in published checkpoints of this architecture."""
    if name == "lm_head.weight":
        return name
    match = _ONE.fullmatch(name) if architecture == "mixtral" else None
    if match is None:
        return f"model.{name}"
    of_expert = match[2].removesuffix(match[3]) + _MIXTRAL[match[3]] if match[3] else match[2]
    return f"model.{match[1]}.block_sparse_moe.{of_expert}.weight"


def plain_name(name: str) -> str:
    """The decoder's name of a tensor that may have Mixtral's name."""
    match = _THEIR_ONE.search(name)
    if match is None:
        return name
    of_expert = match[2].removesuffix(match[3]) + _OF_MIXTRAL[match[3]] if match[3] else match[2]
    return f"{name[: match.start()]}{match[1]}.mlp.{of_expert}.weight"


def parts_of(name: str, shape: tuple[int, ...]) -> list[tuple[str, tuple[int, ...]]]:
    """The tensors, in order, that a stored one holds; more than one where it is fused over all experts.

    gate_up_proj is [experts, 2 ffn, hidden], gate before up; down_proj [experts, hidden, ffn]. Hugging Face writes them
    with save_original_format=False.
    """
    match = _FUSED.fullmatch(name)
    if match is None or len(shape) != 3 or shape[1] % 2:
        return [(plain_name(name), shape)]
    names = ("gate_proj", "up_proj") if match[2] == "gate_up_proj" else ("down_proj",)
    of_one = (shape[1] // len(names), shape[2])
    return [(f"{match[1]}.{index}.{part}.weight", of_one) for index in range(shape[0]) for part in names]
