"""Weights in groups of 4- or 8-bit integers: the format, its error, and products in plain torch.

For an output and a group of inputs, w = scale * q + offset. Scale and offset are half floats in units of a power of two
that the whole weight shares. kernels/cpu/native_kernels.py has the compiled form, with the same integers.
"""

import math
from collections.abc import Sequence

import torch
from torch import Tensor
from torch.nn import functional as F

from kvrelay.kernels.backend import Linear
from kvrelay.kernels.common.quant_scheme import Scheme
from kvrelay.kernels.common.stored_weights import QuantizedWeight, error_against

_CHUNK_VALUES = 8 << 20  # quantised in one pass, to bound memory
_HALF_MOST = 65504.0


class HeadByHead:
    """One product per head: every row's sums run in one order, which a batched product does not guarantee."""

    def __init__(self, heads: Sequence[Linear]) -> None:
        self._heads = tuple(heads)

    def __call__(self, x: Tensor) -> Tensor:
        out = torch.empty((*x.shape[:2], self._heads[0].out_features), dtype=x.dtype, device=x.device)
        for index, head in enumerate(self._heads):
            out[:, index] = head(x[:, index])
        return out


def unit_of(weight: Tensor) -> float:
    """The power of two that is the unit of scales: the largest weight is between 2^14 and 2^15 units."""
    most = max(abs(float(x)) for x in weight.aminmax()) if weight.numel() else 0.0
    return math.ldexp(1.0, max(math.frexp(most)[1], -100) - 15) if most else 1.0


def quantize(weight: Tensor, scheme: Scheme) -> QuantizedWeight:
    """Quantise a weight [N, K] of any floating type."""
    unit = unit_of(weight)
    rows = max(1, _CHUNK_VALUES // max(weight.shape[1], 1))
    fits = (_quantize_rows(part.float() / unit, scheme) for part in weight.split(rows))
    parts = ((q.to(torch.int8), scale, offset) for q, scale, offset in fits)
    integers, scales, offsets = (torch.cat(column) for column in zip(*parts, strict=True))
    return QuantizedWeight(integers, scales * unit, offsets * unit, weight.shape[1], scheme.bits)


def _quantize_rows(rows: Tensor, scheme: Scheme) -> tuple[Tensor, Tensor, Tensor]:
    """The search of kernels/cpu/native/quant_pack.c (fit_group), over all groups in one batch."""
    groups = F.pad(rows, (0, -rows.shape[1] % scheme.group)).unflatten(1, (-1, scheme.group))
    if (tail := rows.shape[1] % scheme.group) != 0:
        groups[:, -1, tail:] = groups[:, -1, :1]
    low, high = groups.amin(-1), groups.amax(-1)
    extreme = torch.where(-low > high, low, high)
    if scheme.bits == 8:
        return _fit(groups, extreme.abs() / 127, torch.zeros_like(extreme), -127, 127)[:3]
    best = _fit(groups, (high - low) / 15, low, 0, 15)
    enough = 1e-12 * groups.square().sum(-1)
    best = _better(best, _fit(groups, extreme / -8, extreme, 0, 15), enough)
    for _ in range(2):
        best = _better(best, _fit(groups, *_regression(groups, best[0], best[1:3]), 0, 15), enough)
    return best[:3]


_Fit = tuple[Tensor, Tensor, Tensor, Tensor]  # integers, scales, offsets, squared errors


def _fit(groups: Tensor, scale: Tensor, offset: Tensor, low: int, high: int) -> _Fit:
    scale, offset = (x.clamp(-_HALF_MOST, _HALF_MOST).half().float().unsqueeze(-1) for x in (scale, offset))
    inverse = torch.where(scale == 0, 0.0, 1 / scale)
    q = ((groups - offset) * inverse).clamp(low, high).round()
    error = (q * scale + offset - groups).square().sum(-1)
    return q, scale.squeeze(-1), offset.squeeze(-1), error


def _better(best: _Fit, other: _Fit, enough: Tensor) -> _Fit:
    wins = (other[3] < best[3]) & (best[3] > enough)
    q = torch.where(wins.unsqueeze(-1), other[0], best[0])
    scale, offset, error = (torch.where(wins, theirs, ours) for ours, theirs in zip(best[1:], other[1:], strict=True))
    return q, scale, offset, error


def _regression(groups: Tensor, q: Tensor, now: tuple[Tensor, ...]) -> tuple[Tensor, Tensor]:
    """The least-squares scale and offset for the integers; those of `now` where all integers are equal."""
    q, values = q.double(), groups.double()
    mean_q, mean_v = q.mean(-1), values.mean(-1)
    spread = q.square().sum(-1) - q.shape[-1] * mean_q.square()
    scale = ((q * values).sum(-1) - q.shape[-1] * mean_q * mean_v) / spread.clamp(min=0.5)
    offset = mean_v - scale * mean_q
    flat = spread < 0.5
    return torch.where(flat, now[0], scale.float()), torch.where(flat, now[1], offset.float())


class TorchQuantLinear:
    """The fallback: dequantises the whole weight for every product, which saves memory and no time."""

    def __init__(self, weight: Tensor, bias: Tensor | None, scheme: Scheme) -> None:
        self.out_features = weight.shape[0]
        self._weight = quantize(weight, scheme)
        self._bias = None if bias is None else bias.float()
        num_bytes = weight.numel() + 4 * self._weight.scales.numel() * (2 if scheme.bits == 4 else 1)
        self.error = error_against(weight, self._weight, num_bytes)

    def __call__(self, x: Tensor) -> Tensor:
        return F.linear(x.float(), self._weight.restored(), self._bias).to(x.dtype)
