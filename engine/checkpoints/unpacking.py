"""The stored tensors of a quantised weight as a StoredWeight.

Layouts: compressed-tensors packs an output's inputs, the first in a word's lowest bits, plus half their range (zero
points likewise, over outputs). GPTQ packs inputs of the transposed weight, zero points over outputs. AWQ packs outputs,
too, in the order 0, 2, 4, 6, 1, 3, 5, 7.
"""

from collections.abc import Callable

import torch
from torch import Tensor
from torch.nn import functional as F

from kvrelay.engine.checkpoints.stored_tensors import INPUT_SCALES, SCALES, Shape
from kvrelay.engine.models.quantization import WeightFormat
from kvrelay.errors import CheckpointCorrupt
from kvrelay.kernels.common.stored_weights import Fp8Weight, Mxfp4Weight, QuantizedWeight, StoredWeight

_AWQ_ORDER = (0, 4, 1, 5, 2, 6, 3, 7)  # where a word's outputs are
Parts = Callable[[str], Tensor | None]  # a tensor by the name of its part


def unpacked(form: WeightFormat, module: str, shape: Shape, part: Parts) -> StoredWeight:
    """The weight [N, K]. Its tensors are those that check_parts has seen."""
    if form.packing == "fp8":
        return _fp8(form, shape, part)
    if form.packing == "mxfp4":
        return Mxfp4Weight(_needed(part, "weight_packed"), _needed(part, *SCALES).view(torch.uint8))
    (n, k), half, order = shape, 1 << (form.bits - 1), None
    zeros = part("weight_zero_point" if form.packing in ("int8", "int32") else "qzeros") if form.has_zeros else None
    if form.packing == "int8":
        integers, scales = _needed(part, "weight").int() + half, _needed(part, *SCALES)
        zeros = None if zeros is None else zeros.int() + half
    elif form.packing == "int32":
        integers, scales = _spread(_needed(part, "weight_packed"), form.bits)[:, :k], _needed(part, *SCALES)
        zeros = None if zeros is None else _spread(zeros.T, form.bits).T[:n]
    else:
        words, scales = _needed(part, "qweight"), _needed(part, "scales").T
        if form.packing == "awq":
            order = torch.tensor(_AWQ_ORDER, device=words.device)
        integers = _spread(words.T, form.bits) if order is None else _spread(words, form.bits, order).T
        zeros = None if zeros is None else _spread(zeros, form.bits, order).T + form.zero_shift
        index = part("g_idx") if form.group else None
        if index is not None and bool((index != torch.arange(k, device=index.device) // form.group).any()):
            raise CheckpointCorrupt("config.json", f"{module} has groups by activation order, desc_act denies it")
    group, middle = form.group or k, 0 if form.bits == 4 else 128
    scales = scales.float().reshape(-1, -(-k // group)).expand(n, -1).contiguous()
    zeros = torch.full_like(scales, half) if zeros is None else zeros.reshape(-1, scales.shape[1]).float()
    padded = F.pad(integers - middle, (0, scales.shape[1] * group - k)).to(torch.int8)
    return QuantizedWeight(padded.unflatten(1, (-1, group)), scales, (middle - zeros) * scales, k, form.bits)


def _needed(part: Parts, *names: str) -> Tensor:
    return next(tensor for name in names if (tensor := part(name)) is not None)


def _spread(words: Tensor, bits: int, order: Tensor | None = None) -> Tensor:
    """[rows, columns] int32 as the unsigned integers in them, [rows, columns * 32 / bits], lowest bits first."""
    shifts = torch.arange(0, 32, bits, device=words.device, dtype=torch.int32)
    spread = (words.unsqueeze(-1) >> shifts) & ((1 << bits) - 1)
    return (spread if order is None else spread[..., order]).flatten(1)


def _fp8(form: WeightFormat, shape: Shape, part: Parts) -> Fp8Weight:
    (n, k), scales = shape, _needed(part, *SCALES).float()
    inputs = [float(scale) for name in INPUT_SCALES if (scale := part(name)) is not None]
    tile = (1, k) if form.block is None or scales.shape in ((n,), (n, 1)) else form.block
    tile = (n, k) if scales.numel() == 1 else tile
    return Fp8Weight(_needed(part, "weight"), scales.reshape(-(-n // tile[0]), -1), tile, next(iter(inputs), None))
