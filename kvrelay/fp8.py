"""FP8 (e4m3) numbers with a scale for each vector, as KV pools hold them: head_dim bytes, then a float32 scale.

A vector is one token's key or value of one head. Its scale follows from the vector alone: there is no calibration, and
copying the bytes copies the scale. Scales are powers of two, so that decoding is exact in float32 and bfloat16, and
encoding decoded numbers changes none. kernels/cpu/native/fp8.h gives the same bits.

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
    own = scale.clone(
        memory_format=torch.contiguous_format
    )  # strides that torch can view as bytes, also with zero rows
    return torch.cat((numbers, own.view(torch.uint8)), dim=-1)


def decoded(rows: Tensor) -> Tensor:
    """[..., dim + 4] uint8 -> [..., dim] float32, exact."""
    numbers = rows[..., :-SCALE_BYTES].contiguous().view(torch.float8_e4m3fn).float()
    scale = rows[..., -SCALE_BYTES:].clone(memory_format=torch.contiguous_format)  # aligned
    return numbers * scale.view(torch.float32)


def scales(wide: Tensor) -> Tensor:
    """[..., dim] float32 -> [..., 1] float32: the smallest power of two, at least 2**-126, that brings all to 448 or
    below.

    1 where everything is zero, NaN where something is not finite.
    """
    largest = wide.abs().amax(dim=-1, keepdim=True)
    mantissa, exponent = torch.frexp(largest)
    exponent = exponent - 9 + (mantissa > _LARGEST_MANTISSA).to(exponent.dtype)
    scale = torch.ldexp(torch.ones_like(largest), exponent.clamp(min=-126))
    scale = torch.where(largest == 0, 1.0, scale)
    return torch.where(largest.isfinite(), scale, float("nan"))


def stored(values: Tensor, dtype: torch.dtype) -> Tensor:
    """Vectors [..., dim] as a pool's tensor of this dtype holds them; uint8 means `encoded`."""
    return encoded(values) if dtype == torch.uint8 else values.to(dtype)


def loaded(rows: Tensor) -> Tensor:
    """A pool's rows as numbers: uint8 is `decoded`, other dtypes stay."""
    return decoded(rows) if rows.dtype == torch.uint8 else rows
