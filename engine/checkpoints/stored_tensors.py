"""The tensors that make up a quantised weight, by format: names, dtypes and shapes. Pure: imports no torch.

dtypes are safetensors' names. N: outputs, K: inputs.
"""

import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

from kvrelay.engine.models.quantization import WeightFormat
from kvrelay.errors import CheckpointCorrupt

Shape = tuple[int, ...]

ITEMSIZES = {
    "F64": 8, "F32": 4, "F16": 2, "BF16": 2, "F8_E4M3": 1, "F8_E8M0": 1, "U8": 1, "I8": 1, "I32": 4, "I64": 8,
}  # fmt: skip
PLAIN = ("F64", "F32", "F16", "BF16")  # dtypes of weights that are not quantised
_FLOATS = ("F32", "F16", "BF16", "F64")
SCALES, INPUT_SCALES = ("weight_scale", "weight_scale_inv"), ("input_scale", "activation_scale")
PARTS = (
    *SCALES, *INPUT_SCALES, "weight_packed", "weight_zero_point", "weight_shape", "weight_g_idx", "qweight", "qzeros",
    "scales", "g_idx", "input_scale_ub",
)  # fmt: skip
KV_SCALES = re.compile(r"\.(kv|k|v|q|prob|output)_(scale|zero_point)$")


@dataclass(frozen=True, slots=True)
class StoredTensor:
    """A tensor's file, name and bytes (`begin` to `end`) there. dtype: safetensors' name."""

    path: Path
    name: str
    dtype: str
    shape: Shape
    begin: int
    end: int

    def is_zero(self) -> bool:
        """Whether all its bytes are."""
        with self.path.open("rb") as file:
            file.seek(self.begin)
            return not any(file.read(self.end - self.begin))


class Part(NamedTuple):
    """A tensor of a quantised weight: its possible names, dtypes and shapes."""

    names: tuple[str, ...]
    dtypes: tuple[str, ...]
    shapes: tuple[Shape, ...]
    is_needed: bool = True


def parts_of_format(form: WeightFormat, shape: Shape) -> tuple[Part, ...]:
    """The tensors of a weight [N, K]."""
    (n, k), per = shape, 32 // form.bits
    groups = -(-k // form.group) if form.group else 1
    if form.packing == "fp8":
        blocks = () if form.block is None else ((-(-n // form.block[0]), -(-k // form.block[1])),)
        scale = Part(SCALES, (*_FLOATS, "F8_E8M0"), ((), (1,), (1, 1), (n,), (n, 1), *blocks))
        return Part(("weight",), ("F8_E4M3",), (shape,)), scale, Part(INPUT_SCALES, _FLOATS, ((), (1,)), False)
    if form.packing == "mxfp4":
        scale = Part(SCALES[:1], ("U8", "F8_E8M0"), ((n, k // 32),))
        return Part(("weight_packed",), ("U8",), ((n, k // 2),)), scale
    by_group: tuple[Shape, ...] = ((n, groups), *(((), (1,), (n,)) if groups == 1 else ()))
    if form.packing == "int8":
        zeros = Part(("weight_zero_point",), ("I8",), by_group, form.has_zeros)
        return Part(("weight",), ("I8",), (shape,)), Part(SCALES[:1], _FLOATS, by_group), zeros
    if form.packing == "int32":
        zeros = Part(("weight_zero_point",), ("I32",), ((-(-n // per), groups),), form.has_zeros)
        packed = Part(("weight_packed",), ("I32",), ((n, -(-k // per)),))
        return packed, Part(SCALES[:1], _FLOATS, by_group), zeros
    packed = Part(("qweight",), ("I32",), ((k // per, n) if form.packing == "gptq" else (k, n // per),))
    zeros = Part(("qzeros",), ("I32",), ((groups, n // per),), form.has_zeros)
    return packed, Part(("scales",), _FLOATS, ((groups, n),)), zeros


def check_parts(
    folder: str, module: str, form: WeightFormat | None, shape: Shape, found: Mapping[str, StoredTensor]
) -> None:
    """Check the tensors `found` (by the names of parts) of the weight [N, K] of `module`. Raises CheckpointCorrupt."""
    if form is None or "weight_g_idx" in found:
        why = "is quantised" if form is None else "has groups by activation order"
        raise CheckpointCorrupt(folder, f"{module} {why}, but quantization_config leaves it out")
    (n, k), per = shape, 32 // form.bits
    outputs, inputs = {"gptq": (per, per), "awq": (per, 1), "mxfp4": (1, 32)}.get(form.packing, (1, 1))
    if n % outputs or k % inputs:
        raise CheckpointCorrupt(folder, f"{module} of {n} outputs and {k} inputs cannot be stored as {form}")
    for part in parts_of_format(form, shape):
        tensor = next((found[name] for name in part.names if name in found), None)
        if tensor is None and part.is_needed:
            names = " or ".join(f"{module}.{name}" for name in part.names)
            raise CheckpointCorrupt(folder, f"tensor {names} is missing: the weights are {form}")
        if tensor is not None and (tensor.dtype not in part.dtypes or tensor.shape not in part.shapes):
            expected = " or ".join(part.dtypes), " or ".join(str(list(size)) for size in part.shapes)
            what = f"{tensor.dtype} {list(tensor.shape)}, expected {expected[0]} {expected[1]}: the weights are {form}"
            raise CheckpointCorrupt(str(tensor.path), f"tensor {tensor.name} is {what}")
