"""Rotary embedding tables: inverse frequencies per kind, and the cos/sin table that kernels read.

Computed in float32, term by term as the published definitions do, so that tables equal Hugging Face's.
"""

import math

import torch
from torch import Tensor

from kvrelay.engine.models.spec import RopeSpec
from kvrelay.errors import UnsupportedModel


def inverse_frequencies(rope: RopeSpec, head_dim: int) -> tuple[Tensor, float]:
    """([head_dim/2] float32, factor on cosines and sines). Raises UnsupportedModel.

    Source: RoPE (Su et al., 2021); linear: kaiokendev; llama3: Llama 3.1; yarn: Peng et al., 2023.
    """
    exponents = torch.arange(0, head_dim, 2, dtype=torch.int64).to(torch.float32) / head_dim
    wavelengths = rope.theta**exponents
    plain = 1.0 / wavelengths
    match rope.kind:
        case "default" | "dynamic":
            return plain, 1.0
        case "linear":
            return plain / rope.factor, 1.0
        case "llama3":
            return _llama3(rope, plain), 1.0
        case "yarn":
            return _yarn(rope, wavelengths, head_dim), _yarn_attention_factor(rope)
    raise UnsupportedModel("rope", f"type {rope.kind!r}")


def cos_sin_table(rope: RopeSpec, head_dim: int, num_positions: int) -> Tensor:
    """[num_positions, head_dim] float32: head_dim/2 cosines, then as many sines."""
    frequencies, factor = inverse_frequencies(rope, head_dim)
    angles = torch.arange(num_positions, dtype=torch.float32)[:, None] * frequencies
    return torch.cat((angles.cos() * factor, angles.sin() * factor), dim=-1)


def _llama3(rope: RopeSpec, plain: Tensor) -> Tensor:
    """Long wavelengths are stretched by `factor`, short ones kept, those between blended."""
    longest = rope.original_max_position / rope.low_freq_factor
    shortest = rope.original_max_position / rope.high_freq_factor
    wavelength = 2 * math.pi / plain
    stretched = torch.where(wavelength > longest, plain / rope.factor, plain)
    share = (rope.original_max_position / wavelength - rope.low_freq_factor) / (
        rope.high_freq_factor - rope.low_freq_factor
    )
    blended = (1 - share) * stretched / rope.factor + share * stretched
    is_between = (wavelength >= shortest) & (wavelength <= longest)
    return torch.where(is_between, blended, stretched)


def _yarn(rope: RopeSpec, wavelengths: Tensor, head_dim: int) -> Tensor:
    """Interpolate low-frequency dimensions, keep high-frequency ones, ramp between."""

    def dimension_of(rotations: float) -> float:
        turns = math.log(rope.original_max_position / (rotations * 2 * math.pi))
        return head_dim * turns / (2 * math.log(rope.theta))

    low, high = dimension_of(rope.beta_fast), dimension_of(rope.beta_slow)
    if rope.truncate:
        low, high = math.floor(low), math.ceil(high)
    low, high = max(low, 0), min(high, head_dim - 1)
    if low == high:
        high += 0.001
    ramp = torch.clamp((torch.arange(head_dim // 2, dtype=torch.float32) - low) / (high - low), 0, 1)
    keep = 1 - ramp
    return (1.0 / (rope.factor * wavelengths)) * (1 - keep) + (1.0 / wavelengths) * keep


def _yarn_attention_factor(rope: RopeSpec) -> float:
    if rope.attention_factor is not None:
        return rope.attention_factor
    if rope.mscale and rope.mscale_all_dim:
        return _mscale(rope.factor, rope.mscale) / _mscale(rope.factor, rope.mscale_all_dim)
    return _mscale(rope.factor, 1.0)


def _mscale(factor: float, weight: float) -> float:
    return 1.0 if factor <= 1 else 0.1 * weight * math.log(factor) + 1.0
