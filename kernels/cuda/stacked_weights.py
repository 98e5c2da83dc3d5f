"""Quantised weights in the form that the Triton kernels read, one weight or those of a layer's experts."""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Literal, cast

import torch
from torch import Tensor

from kvrelay.kernels.common.quantized import unit_of
from kvrelay.kernels.common.stored_weights import MXFP4_GROUP, Fp8Weight, Mxfp4Weight, StoredWeight, powers_of_two

Kind = Literal["int8", "int4", "fp8", "mxfp4"]
_WHOLE = 1 << 30  # a tile as wide as the weight


@dataclass(frozen=True, slots=True)
class StackedWeights:
    """One weight, or those of experts (E), as the kernels read them: number = unit * (scale * value + offset).

    values: [E, N, K] int8 (kind int8) or uint8 (fp8: e4m3), or [E, N, K / 2] uint8, the even input's value in the low
    bits (int4: 0 to 15; mxfp4: e2m1). scales, offsets: [E, N / tile[0], K / tile[1]], rounded up, of any floating type.
    in_features: inputs; K may be larger, by padding.
    """

    kind: Kind
    values: Tensor
    scales: Tensor
    offsets: Tensor | None
    tile: tuple[int, int]
    in_features: int
    unit: float = 1.0

    @property
    def shape(self) -> tuple[int, int, int]:
        """(E, N, inputs)"""
        return self.values.shape[0], self.values.shape[1], self.in_features

    @property
    def num_bytes(self) -> int:
        tensors = (self.values, self.scales, self.offsets)
        return sum(x.numel() * x.itemsize for x in tensors if x is not None)


def as_stored(weight: StoredWeight) -> StackedWeights | None:
    """The form of one weight (E = 1) that the kernels read; None: they do not read such weights."""
    if isinstance(weight, Fp8Weight):
        rows, columns = weight.tile
        tile = (rows, columns if columns < weight.in_features else _WHOLE)
        values = weight.values.contiguous().view(torch.uint8)
        return StackedWeights("fp8", values[None], weight.scales[None], None, tile, weight.in_features)
    if isinstance(weight, Mxfp4Weight):
        scales = powers_of_two(weight.scales)
        return StackedWeights("mxfp4", weight.codes[None], scales[None], None, (1, MXFP4_GROUP), weight.in_features)
    values, kind = weight.integers.flatten(1), cast(Kind, f"int{weight.bits}")
    if kind == "int4":
        if values.shape[1] % 2:
            return None
        values = values[:, 0::2] | values[:, 1::2] << 4
        values = values.view(torch.uint8)
    offsets = weight.offsets[None] if bool(weight.offsets.any()) else None
    tile = (1, weight.group if weight.scales.shape[1] > 1 else _WHOLE)
    return StackedWeights(kind, values[None], weight.scales[None], offsets, tile, weight.in_features)


def stack(weights: Sequence[StackedWeights]) -> StackedWeights | None:
    """The weights of several experts as one, with scales as small as loses nothing; None: they are not alike."""
    first = weights[0]
    alike = ((one.kind, one.values.shape, one.tile, one.in_features) for one in weights)
    if any(each != (first.kind, first.values.shape, first.tile, first.in_features) for each in alike):
        return None
    values, scales = (torch.cat([getattr(one, name) for one in weights]) for name in ("values", "scales"))
    offsets = None
    if any(one.offsets is not None for one in weights):
        offsets = torch.cat([torch.zeros_like(x.scales) if x.offsets is None else x.offsets for x in weights])
    return _compact(replace(first, values=values, scales=scales, offsets=offsets))


def _compact(weights: StackedWeights) -> StackedWeights:
    """With integers' scales and offsets as half floats, in units of a power of two, where that is exact."""
    if weights.kind not in ("int8", "int4"):
        return weights
    wide = [weights.scales] if weights.offsets is None else [weights.scales, weights.offsets]
    unit = max(map(unit_of, wide))
    halves = [(x / unit).half() for x in wide]
    if not all(bool((half.float() * unit == x).all()) for half, x in zip(halves, wide, strict=True)):
        return weights
    return replace(weights, scales=halves[0], offsets=halves[1] if len(halves) > 1 else None, unit=unit)
