"""FP8 (e4m3) numbers with a scale for each vector, as KV pools hold them: head_dim bytes, then a float32 scale.

A vector is one token's key or value of one head. Its scale follows from the vector alone: nothing is calibrated, and
whoever moves the bytes moves the scale. Scales are powers of two, so that reading is exact in float32 and bfloat16
alike, and writing what was read changes no number. kernels/cpu/native/fp8.h does the same, bit for bit.

Errors: at most 2**-4 of a number, and 2**-17 of the vector's largest where that is more.
Source: OCP 8-bit Floating Point Specification (2023); scales of powers of two as in OCP Microscaling Formats (2023).
"""

import torch
from torch import Tensor

SCALE_BYTES = 4
_LARGEST_MANTISSA = 0.875  # 448 = 0.875 * 2**9


def encoded(values: Tensor) -> Tensor:
    """[..., dim] of any float dtype -> [..., dim + 4] uint8. A vector with an infinity or NaN is all NaN afterwards."""
    wide = values.float()
    scale = scales(wide)
    numbers = (wide / scale).to(torch.float8_e4m3fn).view(torch.uint8)
    own = scale.clone(memory_format=torch.contiguous_format)  # strides that torch can view as bytes, without rows, too
    return torch.cat((numbers, own.view(torch.uint8)), dim=-1)


def decoded(rows: Tensor) -> Tensor:
    """[..., dim + 4] uint8 -> [..., dim] float32, exact."""
    numbers = rows[..., :-SCALE_BYTES].contiguous().view(torch.float8_e4m3fn).float()
    scale = rows[..., -SCALE_BYTES:].clone(memory_format=torch.contiguous_format)  # aligned, wherever it lay
    return numbers * scale.view(torch.float32)


def scales(wide: Tensor) -> Tensor:
    """[..., dim] float32 -> [..., 1] float32: the smallest power of two, at least 2**-126, that brings all to 448 or below.

    1 where everything is zero, NaN where something is not finite.
    """
    largest = wide.abs().amax(dim=-1, keepdim=True)
    mantissa, exponent = torch.frexp(largest)
    exponent = exponent - 9 + (mantissa > _LARGEST_MANTISSA).to(exponent.dtype)
    scale = torch.ldexp(torch.ones_like(largest), exponent.clamp(min=-126))
    scale = torch.where(largest == 0, 1.0, scale)
    return torch.where(largest.isfinite(), scale, float("nan"))


def stored(values: Tensor, dtype: torch.dtype) -> Tensor:
    """Vectors [..., dim] as a pool's tensor of this dtype holds them: uint8 stands for `encoded`."""
    return encoded(values) if dtype == torch.uint8 else values.to(dtype)


def loaded(rows: Tensor) -> Tensor:
    """What a pool's tensor holds, as numbers: uint8 is `decoded`, all else stays as it is."""
    return decoded(rows) if rows.dtype == torch.uint8 else rows
