"""Quantised weights as checkpoints store them: fp8 with scales for tiles, small integers in groups, MXFP4.

Frozen records over tensors of one device. Rows are outputs (N), columns are inputs (K). A backend packs them as they
are (`Backend.pack_stored`) or restores them first.
"""

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, fields, replace
from typing import Any, Self

import torch
from torch import Tensor

from kvrelay.kernels.common.quant_scheme import WeightError

MXFP4_GROUP = 32  # inputs that share a scale
_PIECE_VALUES = 8 << 20  # restored at a time: some 20 bytes for each, where a whole weight may leave no room
_E2M1 = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)  # by the code's lower three bits; the fourth is the sign


@dataclass(frozen=True, slots=True)
class Fp8Weight:
    """values [N, K] float8_e4m3fn; scales [ceil(N / rows), ceil(K / columns)] float32 for tiles of (rows, columns).

    tile: (N, K) the whole weight, (1, K) an output, (128, 128) a block.
    input_scale: what the inputs are divided by before they become fp8, from calibration; None: from the inputs.
    """

    values: Tensor
    scales: Tensor
    tile: tuple[int, int]
    input_scale: float | None = None

    @property
    def out_features(self) -> int:
        return self.values.shape[0]

    @property
    def in_features(self) -> int:
        return self.values.shape[1]

    @property
    def num_bytes(self) -> int:
        return self.values.numel() + 4 * self.scales.numel()

    def restored(self) -> Tensor:
        """The weight [N, K] float32."""
        by_column = self.scales.repeat_interleave(self.tile[1], 1)[:, : self.in_features]
        return self.values.float() * by_column.repeat_interleave(self.tile[0], 0)[: self.out_features]

    def rows(self, index: Tensor) -> Self | None:
        """The rows at index [M] int64, in that order; None where a tile would mix rows of several tiles."""
        height = min(self.tile[0], self.out_features)
        tiles = index // height
        first, tile = tiles[::height], (min(height, len(index)), self.tile[1])
        if not torch.equal(tiles, first.repeat_interleave(height)[: len(index)]):
            return None
        return replace(self, values=self.values[index], scales=self.scales[first], tile=tile)

    def in_tiles_of(self, rows: int) -> Self:
        """The same weight with tiles of `rows` rows, which divide the tiles' own."""
        times = -(-self.tile[0] // rows)
        scales = self.scales.repeat_interleave(times, 0)[: -(-self.out_features // rows)]
        return replace(self, scales=scales, tile=(rows, self.tile[1]))


@dataclass(frozen=True, slots=True)
class QuantizedWeight:
    """integers [N, groups, group] int8; scales, offsets [N, groups] float32; w = scale * integer + offset.

    bits 4: integers are 0 to 15. bits 8: -128 to 127. Inputs past `in_features` are padding. In checkpoints offsets are
    whole multiples of the scales (their zero points).
    """

    integers: Tensor
    scales: Tensor
    offsets: Tensor
    in_features: int
    bits: int = 8

    @property
    def out_features(self) -> int:
        return self.integers.shape[0]

    @property
    def group(self) -> int:
        """Inputs that share a scale."""
        return self.integers.shape[2]

    @property
    def num_bytes(self) -> int:
        return self.integers.numel() * self.bits // 8 + (4 if self.bits == 4 else 2) * self.scales.numel()

    def restored(self) -> Tensor:
        """The weight [N, in_features] float32."""
        wide = self.integers.float() * self.scales.unsqueeze(-1) + self.offsets.unsqueeze(-1)
        return wide.flatten(1)[:, : self.in_features]

    def rows(self, index: Tensor) -> Self:
        """The rows at index [M] int64, in that order."""
        scales, offsets = self.scales[index], self.offsets[index]
        return replace(self, integers=self.integers[index], scales=scales, offsets=offsets)


@dataclass(frozen=True, slots=True)
class Mxfp4Weight:
    """codes [N, K / 2] uint8, two e2m1 numbers a byte, the first in the low bits; scales [N, K / 32] uint8 (e8m0)."""

    codes: Tensor
    scales: Tensor

    @property
    def out_features(self) -> int:
        return self.codes.shape[0]

    @property
    def in_features(self) -> int:
        return 2 * self.codes.shape[1]

    @property
    def num_bytes(self) -> int:
        return self.codes.numel() + self.scales.numel()

    def restored(self) -> Tensor:
        """The weight [N, K] float32."""
        table = torch.tensor((*_E2M1, *(-x for x in _E2M1)), device=self.codes.device)
        numbers = table[torch.stack((self.codes & 15, self.codes >> 4), -1).flatten(1).long()]
        return numbers * powers_of_two(self.scales).float().repeat_interleave(MXFP4_GROUP, 1)

    def rows(self, index: Tensor) -> Self:
        """The rows at index [M] int64, in that order."""
        return replace(self, codes=self.codes[index], scales=self.scales[index])


def powers_of_two(exponents: Tensor) -> Tensor:
    """e8m0 numbers, uint8, in bfloat16, by their bits: exactly. 255 is NaN."""
    bits = exponents.to(torch.int16) << 7
    bits = bits.masked_fill(exponents == 0, 0x0040).masked_fill(exponents == 255, 0x7FC0)
    return bits.view(torch.bfloat16)


StoredWeight = Fp8Weight | QuantizedWeight | Mxfp4Weight
AnyWeight = Tensor | StoredWeight


def stacked(parts: Sequence[AnyWeight], dtype: torch.dtype) -> AnyWeight:
    """One weight of several with the same inputs, one below the other.

    Tiles of fp8 become as small as keeps them apart: scales of whole tensors become scales of outputs. The largest
    static input scale is taken. Unlike parts are restored to `dtype`; plain tensors keep their own.
    """
    if len(parts) == 1:
        return parts[0]
    fp8 = [part for part in parts if isinstance(part, Fp8Weight)]
    integers = [part for part in parts if isinstance(part, QuantizedWeight)]
    mxfp4 = [part for part in parts if isinstance(part, Mxfp4Weight)]
    if len(fp8) == len(parts) and len({min(part.tile[1], part.in_features) for part in fp8}) == 1:
        return _stacked_fp8(fp8)
    if len(integers) == len(parts) and len({(part.bits, part.group) for part in integers}) == 1:
        columns = [[part.integers, part.scales, part.offsets] for part in integers]
        whole, scales, offsets = (torch.cat(column) for column in zip(*columns, strict=True))
        return replace(integers[0], integers=whole, scales=scales, offsets=offsets)
    if len(mxfp4) == len(parts):
        return Mxfp4Weight(torch.cat([part.codes for part in mxfp4]), torch.cat([part.scales for part in mxfp4]))
    plain = [plain_weight(part, dtype) for part in parts]
    if plain[0].is_meta:  # only a shape: torch.cat would find it in Python, and import torch's compiler for that
        return plain[0].new_empty(sum(map(len, plain)), *plain[0].shape[1:])
    return torch.cat(plain)


def _stacked_fp8(parts: Sequence[Fp8Weight]) -> Fp8Weight:
    sizes = [part.out_features for part in parts[:-1]] + [part.tile[0] for part in parts]
    rows = math.gcd(*sizes) if parts[0].tile[1] < parts[0].in_features else 1
    parts = [part.in_tiles_of(rows) for part in parts]
    values, scales = (torch.cat([getattr(part, name) for part in parts]) for name in ("values", "scales"))
    inputs = [part.input_scale for part in parts]
    static = None if None in inputs else max(scale for scale in inputs if scale is not None)
    return Fp8Weight(values, scales, parts[0].tile, static)


def pieces(weight: StoredWeight) -> Iterator[tuple[slice, Tensor]]:
    """(rows, their numbers [M, K] float32), a bounded number at a time, in order."""
    if isinstance(weight, Fp8Weight) and weight.tile[0] >= weight.out_features:
        weight = weight.in_tiles_of(1)
    height, num_rows = weight.tile[0] if isinstance(weight, Fp8Weight) else 1, weight.out_features
    rows = max(_PIECE_VALUES // max(weight.in_features, 1) // height, 1) * height
    tensors = {field.name: x for field in fields(weight) if isinstance(x := getattr(weight, field.name), Tensor)}
    columns = [x.split(rows if len(x) == num_rows else rows // height) for x in tensors.values()]
    for index, parts in enumerate(zip(*columns, strict=True)):
        piece: dict[str, Any] = dict(zip(tensors, parts, strict=True))
        yield slice(index * rows, (index + 1) * rows), replace(weight, **piece).restored()


def dequantised(weight: StoredWeight, dtype: torch.dtype) -> tuple[Tensor, WeightError]:
    """The weight [N, K] rounded to `dtype`, and the error of that."""
    rounded = torch.empty(weight.out_features, weight.in_features, dtype=dtype, device=weight.scales.device)
    error = WeightError()
    for rows, exact in pieces(weight):
        rounded[rows] = exact
        error += error_of(rounded[rows].float(), exact, 0)
    return rounded, replace(error, num_bytes=rounded.numel() * rounded.itemsize)


def error_against(
    exact: Tensor | None, weight: StoredWeight, num_bytes: int, dtype: torch.dtype = torch.float32
) -> WeightError:
    """The error of a weight of `num_bytes`, rounded to `dtype`, against `exact` [N, K]; None: against itself."""
    error = WeightError()
    for rows, numbers in pieces(weight):
        error += error_of(numbers.to(dtype).float(), numbers if exact is None else exact[rows].float(), 0)
    return replace(error, num_bytes=num_bytes)


def error_of(held: Tensor, exact: Tensor, num_bytes: int) -> WeightError:
    """The error of the weight `held` [N, K], which takes `num_bytes`, against `exact`."""
    off, size = (float(torch.linalg.vector_norm(x)) ** 2 for x in (held - exact, exact))
    return WeightError(off, size, exact.numel(), num_bytes)


def plain_weight(weight: AnyWeight, dtype: torch.dtype = torch.float32) -> Tensor:
    """A tensor as it is, a quantised weight restored to `dtype`."""
    return weight if isinstance(weight, Tensor) else weight.restored().to(dtype)


def shape_of(weight: AnyWeight) -> tuple[int, int]:
    """(outputs, inputs)."""
    if isinstance(weight, Tensor):
        return weight.shape[0], weight.shape[1]
    return weight.out_features, weight.in_features
