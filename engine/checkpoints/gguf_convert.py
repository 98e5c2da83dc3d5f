"""Converts a GGUF file to a checkpoint folder: config.json, model.safetensors, tokenizer files.

Streams row by row, so that memory stays small for any model. Reverts llama.cpp's changes: the
rotary interleaving of q and k (Llama), the folded 1 + w of norms (Gemma), short tensor names.
"""

import json
import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from kvrelay.engine.checkpoints.gguf_config import Metadata, generation_config, hf_config
from kvrelay.engine.checkpoints.gguf_file import GgufFile, GgufTensor
from kvrelay.engine.checkpoints.gguf_tokenizer import write_tokenizer
from kvrelay.errors import CheckpointCorrupt, UnsupportedModel

_CHUNK_ELEMENTS = 4 << 20
_LOSSLESS_BYTES = 4 << 30  # quantised weights are kept as float32 up to this folder size, else as bfloat16
_STORED = {"F32": "F32", "F16": "F16", "BF16": "BF16"}
_ITEMSIZE = {"F32": 4, "F16": 2, "BF16": 2}

_NAMES = {
    "token_embd": "model.embed_tokens",
    "output_norm": "model.norm",
    "output": "lm_head",
    "attn_norm": "input_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "attn_q_norm": "self_attn.q_norm",
    "attn_k_norm": "self_attn.k_norm",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
    "ffn_norm": "post_attention_layernorm",
}
_SANDWICH_NAMES = {
    "ffn_norm": "pre_feedforward_layernorm",
    "post_attention_norm": "post_attention_layernorm",
    "post_ffw_norm": "post_feedforward_layernorm",
}
_EXPERT_NAMES = {  # of qwen3moe, beside the others; the last three are of all experts in one tensor
    "ffn_gate_inp": "mlp.gate",
    "ffn_gate_exps": "mlp.experts.{}.gate_proj",
    "ffn_up_exps": "mlp.experts.{}.up_proj",
    "ffn_down_exps": "mlp.experts.{}.down_proj",
}
_IGNORED = ("rope_freqs.weight",)


@dataclass(frozen=True, slots=True)
class _Job:
    """One tensor's conversion from GGUF to one or several consecutive safetensors tensors."""

    names: tuple[str, ...]
    tensor: GgufTensor
    dtype: str  # its name in safetensors
    order: npt.NDArray[np.int64] | None  # order of the rows
    minus_one: bool

    @property
    def num_bytes(self) -> int:
        return self.tensor.num_elements * _ITEMSIZE[self.dtype]


def convert_gguf(path: Path, folder: Path, progress: Callable[[float], None] | None = None) -> None:
    """Write the checkpoint of a GGUF file into an existing empty folder.

    Args:
        progress: called with the fraction of weights written.

    Raises:
        CheckpointCorrupt, UnsupportedModel: see GgufFile, hf_config and write_tokenizer.
    """
    with GgufFile(path) as file:
        try:
            meta, config = _write_description(file, folder)
            jobs = _jobs(file, meta, config)
        except (TypeError, ValueError, LookupError, ArithmeticError) as error:
            raise CheckpointCorrupt(str(path), f"inconsistent metadata: {error}") from error
        _write_safetensors(file, jobs, folder / "model.safetensors", progress)


def _write_description(file: GgufFile, folder: Path) -> tuple[Metadata, dict[str, Any]]:
    """All files but the weights; returns the metadata and the config written."""
    meta = Metadata(str(file.path), file.metadata)
    if "token_embd.weight" not in file.tensors:
        raise UnsupportedModel(meta.source, "no token_embd.weight: not a language model's weights")
    shapes = {name: tensor.shape for name, tensor in file.tensors.items()}
    config = hf_config(meta, shapes, _rope_freqs(file))
    write_tokenizer(meta, folder)
    (folder / "config.json").write_text(json.dumps(config, indent=2))
    (folder / "generation_config.json").write_text(json.dumps(generation_config(meta), indent=2))
    return meta, config


def _rope_freqs(file: GgufFile) -> list[float] | None:
    tensor = file.tensors.get("rope_freqs.weight")
    return None if tensor is None else [float(value) for value in file.rows(tensor, slice(None)).ravel()]


def hf_name(name: str, architecture: str) -> str | None:
    """Hugging Face's name of a GGUF tensor, or None for one that the model does not use.

    {} stands for an expert's number if the tensor holds all experts.
    """
    match = re.fullmatch(r"(?:blk\.(\d+)\.)?(\w+)\.(weight|bias)", name)
    if match is None:
        return None
    layer, short, kind = match.groups()
    names = _NAMES | _SANDWICH_NAMES if architecture in ("gemma2", "gemma3") else _NAMES
    if architecture == "qwen3moe":
        names = names | _EXPERT_NAMES
    if short not in names:
        return None
    return f"{names[short]}.{kind}" if layer is None else f"model.layers.{layer}.{names[short]}.{kind}"


def _jobs(file: GgufFile, meta: Metadata, config: dict[str, Any]) -> list[_Job]:
    num_elements = sum(tensor.num_elements for tensor in file.tensors.values())
    quantised = "F32" if 4 * num_elements <= _LOSSLESS_BYTES else "BF16"
    jobs: list[_Job] = []
    for tensor in file.tensors.values():
        if tensor.name in _IGNORED:
            continue
        name = hf_name(tensor.name, meta.architecture)
        if name is None:
            raise UnsupportedModel(meta.source, f"tensor {tensor.name} has no place in a {meta.architecture} model")
        dtype = _STORED.get(tensor.type_name, quantised)
        minus_one = meta.is_gemma and tensor.name.endswith("norm.weight")
        jobs.append(_Job(_numbered(name, tensor, meta), tensor, dtype, _row_order(tensor, meta, config), minus_one))
    return jobs


def _numbered(name: str, tensor: GgufTensor, meta: Metadata) -> tuple[str, ...]:
    """The names of the tensors that it holds. Raises UnsupportedModel if its shape does not match its name."""
    if ("{}" in name) != (len(tensor.shape) == 3):
        raise UnsupportedModel(meta.source, f"tensor {tensor.name} of shape {list(tensor.shape)}")
    return tuple(name.format(index) for index in range(tensor.shape[0])) if "{}" in name else (name,)


def _row_order(tensor: GgufTensor, meta: Metadata, config: dict[str, Any]) -> npt.NDArray[np.int64] | None:
    """Rows of q and k from llama.cpp's interleaved rotary pairs back to Hugging Face's two halves."""
    heads = {".attn_q.": config["num_attention_heads"], ".attn_k.": config["num_key_value_heads"]}
    count = next((count for part, count in heads.items() if part in tensor.name), None)
    if count is None or not meta.family.permutes_qk:
        return None
    return np.arange(tensor.shape[0]).reshape(count, -1, 2).swapaxes(1, 2).reshape(-1)


def _write_safetensors(
    file: GgufFile, jobs: list[_Job], target: Path, progress: Callable[[float], None] | None
) -> None:
    header: dict[str, Any] = {"__metadata__": {"format": "pt"}}
    end = 0
    for job in jobs:
        shape = job.tensor.shape if len(job.tensor.shape) < 3 else job.tensor.shape[1:]
        for name in job.names:
            begin, end = end, end + job.num_bytes // len(job.names)
            header[name] = {"dtype": job.dtype, "shape": list(shape), "data_offsets": [begin, end]}
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    written = 0
    with target.open("wb") as out:
        out.write(len(text).to_bytes(8, "little") + text)
        for job in jobs:
            for chunk in _chunks(file, job):
                written += out.write(chunk)
                if progress is not None:
                    progress(written / end)


def _chunks(file: GgufFile, job: _Job) -> Iterator[bytes]:
    """The tensor's bytes in its stored type, some rows at a time."""
    if len(job.tensor.shape) == 1:
        values = file.rows(job.tensor, slice(None)).ravel()
        if job.order is not None:
            values = values[job.order]
        yield _encode(values - 1.0 if job.minus_one else values, job.dtype)
        return
    step = max(1, _CHUNK_ELEMENTS // job.tensor.shape[-1])
    for begin in range(0, job.tensor.num_rows, step):
        part = slice(begin, min(begin + step, job.tensor.num_rows))
        yield _encode(file.rows(job.tensor, part if job.order is None else job.order[part]), job.dtype)


def _encode(values: npt.NDArray[np.float32], dtype: str) -> bytes:
    if dtype == "F32":
        return np.ascontiguousarray(values, dtype="<f4").tobytes()
    if dtype == "F16":
        return values.astype("<f2").tobytes()
    bits = np.ascontiguousarray(values, dtype="<f4").view(np.uint32)
    rounded = (bits + 0x7FFF + ((bits >> 16) & 1)) >> 16  # to nearest, ties to even
    return rounded.astype("<u2").tobytes()
