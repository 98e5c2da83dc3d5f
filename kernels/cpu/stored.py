"""Integers of a checkpoint in the layout of the compiled kernels (native/quant.h), as they are."""

import torch
from torch import Tensor
from torch.nn import functional as F

from kvrelay.kernels.common.quant_scheme import Scheme, WeightError
from kvrelay.kernels.common.quantized import unit_of
from kvrelay.kernels.common.stored_weights import QuantizedWeight, error_of

_GROUPS = (128, 96, 64, 32)  # which the kernels support


def native_form(weight: object) -> QuantizedWeight | None:
    """The same weight in groups that the kernels support; None: there is no such form.

    Larger groups are divided, each part with the whole's scale. Integers of 8 bits have no offsets in the kernels.
    """
    if not isinstance(weight, QuantizedWeight) or (weight.bits == 8 and bool(weight.offsets.any())):
        return None
    integers, scales, offsets = weight.integers, weight.scales, weight.offsets
    if integers.shape[1] == 1:  # one scale for an output: padded with inputs that are zero
        integers = F.pad(integers, (0, -weight.group % _GROUPS[-1]))
    group = next((size for size in _GROUPS if integers.shape[2] % size == 0), None)
    if group is None:
        return None
    times = integers.shape[2] // group
    scales, offsets = (x.repeat_interleave(times, 1) for x in (scales, offsets))
    return QuantizedWeight(
        integers.unflatten(2, (times, group)).flatten(1, 2), scales, offsets, weight.in_features, weight.bits
    )


def scheme_of_pair(*weights: object) -> Scheme | None:
    """The scheme that these weights have in common in their native form."""
    schemes = {None if form is None else Scheme(form.bits, form.group) for form in map(native_form, weights)}
    return schemes.pop() if len(schemes) == 1 else None


def laid_out(weight: QuantizedWeight, panel_width: int) -> tuple[Tensor, float, WeightError]:
    """A weight in native form as (panels uint8, unit, error): scales and offsets become half floats."""
    exact = weight.restored()
    unit = max(unit_of(x) for x in (exact, weight.scales, weight.offsets))
    scales, offsets = ((x / unit).half() for x in (weight.scales, weight.offsets))
    held = QuantizedWeight(weight.integers, scales.float() * unit, offsets.float() * unit, weight.in_features)
    codes = weight.integers.view(torch.uint8)
    codes = codes[..., 0::2] | codes[..., 1::2] << 4 if weight.bits == 4 else codes ^ 128
    words = codes.contiguous().view(torch.int32)  # the first input in the lowest bits
    columns = (_in_panels(x, panel_width) for x in ((scales, offsets, words) if weight.bits == 4 else (scales, words)))
    packed = torch.cat([x.contiguous().flatten(2).view(torch.uint8) for x in columns], 2).flatten()
    return packed, unit, error_of(held.restored(), exact, packed.numel())


def _in_panels(rows: Tensor, width: int) -> Tensor:
    """[N, groups, ...] as [panels, groups, ..., width], with rows of zeros at the end."""
    padded = torch.cat((rows, rows.new_zeros(-rows.shape[0] % width, *rows.shape[1:])))
    panels: Tensor = padded.unflatten(0, (-1, width)).movedim(1, -1)
    return panels
