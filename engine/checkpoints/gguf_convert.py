"""Converts a GGUF file to a checkpoint folder: config.json, model.safetensors, tokenizer files.

Streams row by row, so that memory stays small for any model, which transformers' own loader does not: it holds all
weights as float32. Reverts llama.cpp's changes: the rotary interleaving of q and k (Llama), the folded 1 + w of norms
(Gemma), short tensor names.
"""

import json
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import numpy.typing as npt
from gguf.quants import dequantize, quantize

from kvrelay.engine.checkpoints.files import expected_shapes
from kvrelay.engine.checkpoints.gguf_config import Metadata, generation_config, hf_config
from kvrelay.engine.checkpoints.gguf_tokenizer import write_tokenizer
from kvrelay.engine.models.spec import ModelSpec
from kvrelay.errors import CheckpointCorrupt, UnsupportedModel

_CHUNK_ELEMENTS = 4 << 20
_LOSSLESS_BYTES = 4 << 30  # quantised weights are kept as float32 up to this folder size, else as bfloat16
_ITEMSIZE = {"F32": 4, "F16": 2, "BF16": 2}  # types that are stored as they are
_ROPE_FREQS = "rope_freqs.weight"  # in the config: no weight of ours


class _Reader(gguf.GGUFReader):  # type: ignore[misc]  # untyped
    """GGUFReader, which alone takes a cut-off array for a shorter one, and a damaged count for a very long one."""

    def _get(self, offset: int, dtype: Any, count: int = 1, *args: Any, **kwargs: Any) -> Any:
        if offset + np.dtype(dtype).itemsize * int(count) > len(self.data):
            raise ValueError("truncated: it runs past the end of the file")
        return super()._get(offset, dtype, count, *args, **kwargs)


class GgufFile:
    """An open GGUF file: `metadata` by key, `tensors` by name, with row-major `shapes`.

    Raises:
        CheckpointCorrupt: not a GGUF file, or a damaged one.
        UnsupportedModel: one part of a split model.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        try:
            reader = _Reader(path)
            self.metadata = {name: field.contents() for name, field in reader.fields.items()}
        except (ValueError, LookupError, ArithmeticError, OSError) as error:
            raise CheckpointCorrupt(str(path), f"not a readable GGUF file: {error}") from error
        if int(self.metadata.get("split.count", 0)) > 1:
            raise UnsupportedModel(str(path), "one part of a split GGUF; merge it with gguf-split first")
        self.tensors = {tensor.name: tensor for tensor in reader.tensors}
        self.shapes = {name: tuple(map(int, reversed(tensor.shape))) for name, tensor in self.tensors.items()}
        if empty := [name for name, shape in self.shapes.items() if not shape]:
            raise CheckpointCorrupt(str(path), f"tensor {empty[0]} has no dimensions")

    def rows(self, name: str, rows: slice | npt.NDArray[np.int64]) -> npt.NDArray[np.float32]:
        """Rows as float32, [rows, last dimension]. Raises UnsupportedModel for types without a decoder."""
        tensor = self.tensors[name]
        try:
            values = dequantize(tensor.data.reshape(-1, tensor.data.shape[-1])[rows], tensor.tensor_type)
        except (NotImplementedError, KeyError) as error:
            raise UnsupportedModel(str(self.path), f"tensor {name}: type {tensor.tensor_type.name}") from error
        return np.ascontiguousarray(values, dtype=np.float32)


@dataclass(frozen=True, slots=True)
class _Job:
    """One tensor's conversion from GGUF to one or several consecutive safetensors tensors."""

    source: str
    shape: tuple[int, ...]  # row-major
    names: tuple[str, ...]
    dtype: str  # its name in safetensors
    order: npt.NDArray[np.int64] | None  # order of the rows
    minus_one: bool

    @property
    def num_bytes(self) -> int:
        return int(np.prod(self.shape)) * _ITEMSIZE[self.dtype]


def convert_gguf(path: Path, folder: Path, progress: Callable[[float], None] | None = None) -> None:
    """Write the checkpoint of a GGUF file into an existing empty folder.

    Args:
        progress: called with the fraction of weights written.

    Raises:
        CheckpointCorrupt, UnsupportedModel: see GgufFile, hf_config and write_tokenizer.
    """
    file = GgufFile(path)
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
    freqs = file.rows(_ROPE_FREQS, slice(None)).ravel().tolist() if _ROPE_FREQS in file.tensors else None
    config = hf_config(meta, file.shapes, freqs)
    write_tokenizer(meta, folder)
    (folder / "config.json").write_text(json.dumps(config, indent=2))
    (folder / "generation_config.json").write_text(json.dumps(generation_config(meta), indent=2))
    return meta, config


def tensor_names(spec: ModelSpec, architecture: str) -> dict[str, tuple[str, ...]]:
    """By GGUF's name of a tensor: Hugging Face's names of what it holds, several for all experts of a layer."""
    arch = next(arch for arch, name in gguf.MODEL_ARCH_NAMES.items() if name == architecture)
    names = gguf.get_tensor_name_map(arch, spec.num_layers)
    found: dict[str, tuple[str, ...]] = {}
    for plain in expected_shapes(spec):
        theirs = plain if plain.startswith("lm_head") else f"model.{plain}"
        stem, _, suffix = theirs.rpartition(".")
        before, is_expert, after = stem.partition(".experts.")
        short = names.get_name(f"{before}.experts.{after.partition('.')[2]}" if is_expert else stem)
        found[f"{short}.{suffix}"] = (*found.get(f"{short}.{suffix}", ()), theirs)
    return found


def _jobs(file: GgufFile, meta: Metadata, config: dict[str, Any]) -> list[_Job]:
    num_elements = sum(int(np.prod(shape)) for shape in file.shapes.values())
    quantised = "F32" if _ITEMSIZE["F32"] * num_elements <= _LOSSLESS_BYTES else "BF16"
    known = tensor_names(ModelSpec.from_config(config), meta.architecture)
    jobs: list[_Job] = []
    for name, tensor in file.tensors.items():
        if name == _ROPE_FREQS:
            continue
        shape, names = file.shapes[name], known.get(name)
        if names is None:
            raise UnsupportedModel(meta.source, f"tensor {name} has no place in a {meta.architecture} model")
        if (len(names) if len(names) > 1 else None) != (shape[0] if len(shape) == 3 else None):
            raise UnsupportedModel(meta.source, f"tensor {name} of shape {list(shape)}")
        dtype = tensor.tensor_type.name if tensor.tensor_type.name in _ITEMSIZE else quantised
        minus_one = meta.is_gemma and name.endswith("norm.weight")
        jobs.append(_Job(name, shape, names, dtype, _row_order(name, shape, meta, config), minus_one))
    return jobs


def _row_order(
    name: str, shape: tuple[int, ...], meta: Metadata, config: dict[str, Any]
) -> npt.NDArray[np.int64] | None:
    """Rows of q and k from llama.cpp's interleaved rotary pairs back to Hugging Face's two halves."""
    heads = {".attn_q.": config["num_attention_heads"], ".attn_k.": config["num_key_value_heads"]}
    count = next((count for part, count in heads.items() if part in name), None)
    if count is None or meta.architecture != "llama":  # the only one whose rows llama.cpp interleaves
        return None
    return np.arange(shape[0]).reshape(count, -1, 2).swapaxes(1, 2).reshape(-1)


def _write_safetensors(
    file: GgufFile, jobs: list[_Job], target: Path, progress: Callable[[float], None] | None
) -> None:
    header: dict[str, Any] = {"__metadata__": {"format": "pt"}}
    end = 0
    for job in jobs:
        for name in job.names:
            begin, end = end, end + job.num_bytes // len(job.names)
            header[name] = {"dtype": job.dtype, "shape": job.shape[-2:], "data_offsets": [begin, end]}
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
    kind = gguf.GGMLQuantizationType[job.dtype]
    if len(job.shape) == 1:
        values = file.rows(job.source, slice(None)).ravel()
        values = values if job.order is None else values[job.order]
        yield quantize(values - 1.0 if job.minus_one else values, kind).tobytes()
        return
    step, num_rows = max(1, _CHUNK_ELEMENTS // job.shape[-1]), int(np.prod(job.shape[:-1]))
    for begin in range(0, num_rows, step):
        part = slice(begin, min(begin + step, num_rows))
        yield quantize(file.rows(job.source, part if job.order is None else job.order[part]), kind).tobytes()
