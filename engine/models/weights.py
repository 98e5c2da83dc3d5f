"""Reads weights from safetensors, one tensor at a time, so that loading never holds the checkpoint twice.

engine/checkpoints/files.py maps tensor names and checks the files.
"""

import contextlib
import json
from collections.abc import Iterator
from io import BufferedReader
from pathlib import Path
from types import TracebackType
from typing import Any, Self

import torch
from torch import Tensor

from kvrelay.engine.checkpoints.experts import stored_name
from kvrelay.engine.checkpoints.files import locate_tensors
from kvrelay.engine.checkpoints.shapes import expected_shapes
from kvrelay.engine.models.spec import ModelSpec
from kvrelay.errors import CheckpointCorrupt

_DTYPES = {"F64": torch.float64, "F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16}


class WeightReader:
    """The tensors of one checkpoint folder; a context manager that holds the files open.

    Raises: see `locate_tensors`, before any weight is read.
    """

    def __init__(self, folder: Path, spec: ModelSpec) -> None:
        self._where = locate_tensors(folder, spec)
        self._files: dict[Path, BufferedReader] = {}
        self._stack = contextlib.ExitStack()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._files.clear()
        self._stack.close()

    def __contains__(self, name: str) -> bool:
        return name in self._where

    def read(self, name: str, dtype: torch.dtype | None, device: torch.device) -> Tensor:
        """A copy of one tensor, in its stored dtype if `dtype` is None. Read, not mapped: mapped files count as
        resident.
        """
        stored = self._where[name]
        tensor = torch.empty(stored.shape, dtype=_DTYPES[stored.dtype])
        flat: Any = tensor.reshape(-1).view(torch.uint8).numpy()
        view = memoryview(flat)
        try:
            file = self._file(stored.path)
            file.seek(stored.begin)
            count = file.readinto(view)
        except OSError as error:
            raise CheckpointCorrupt(str(stored.path), f"tensor {stored.name} cannot be read: {error}") from error
        if count != len(view):
            raise CheckpointCorrupt(str(stored.path), f"tensor {stored.name} ends early")
        return tensor.to(device=device, dtype=dtype)

    def _file(self, path: Path) -> BufferedReader:
        if path not in self._files:
            self._files[path] = self._stack.enter_context(path.open("rb"))
        return self._files[path]


def random_weights(config: dict[str, Any], folder: Path, *, seed: int = 0, dtype: torch.dtype = torch.float32) -> Path:
    """Write a checkpoint folder (config.json + model.safetensors) of random weights for an HF config.

    Scaled so that the next token depends on the whole context, not on the last token alone: a wrong block
    in the cache shows. No tokenizer is written (see tiny.py).
    """
    from safetensors.torch import save_file

    spec = ModelSpec.from_config(config)
    generator = torch.Generator().manual_seed(seed)
    tensors = {
        stored_name(name, spec.architecture): tensor.to(dtype) for name, tensor in _random_tensors(spec, generator)
    }
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps(config, indent=2))
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    return folder


def _random_tensors(spec: ModelSpec, generator: torch.Generator) -> Iterator[tuple[str, Tensor]]:
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
