"""kernels/cuda/quantized_triton.py and torch's scaled product by their definitions, on CPU tensors."""

import sys
import types

import pytest
import torch
from torch.nn import functional as F

from kvrelay.kernels.cuda.stacked_weights import StackedWeights

_E2M1 = torch.tensor([0, 0.5, 1, 1.5, 2, 3, 4, 6, -0.0, -0.5, -1, -1.5, -2, -3, -4, -6])


def numbers_of(weights: StackedWeights):
    """[E, N, inputs] float32: unit * (scale * value + offset)."""
    values = weights.values
    if weights.kind in ("int4", "mxfp4"):
        codes = torch.stack((values & 15, values >> 4), -1).flatten(2)
        values = codes.float() if weights.kind == "int4" else _E2M1[codes.long()]
    elif weights.kind == "fp8":
        values = values.view(torch.float8_e4m3fn).float()
    _, outputs, inputs = values.shape

    def spread(scales):
        rows = torch.arange(outputs) // weights.tile[0]
        return weights.unit * scales.float()[:, rows][:, :, torch.arange(inputs) // weights.tile[1]]

    numbers = values.float() * spread(weights.scales)
    if weights.offsets is not None:
        numbers = numbers + spread(weights.offsets)
    return numbers[:, :, : weights.in_features]


def multiply(rows, weights, bias=None, ends=None):
    numbers, out = numbers_of(weights), []
    cuts = [0, rows.shape[0]] if ends is None else [0, *ends.tolist()]
    for number, begin, end in zip(numbers, cuts, cuts[1:], strict=False):
        out.append(rows[begin:end].float() @ number.to(rows.dtype).float().T)
    found = torch.cat(out)
    return (found if bias is None else found + bias.float()).to(rows.dtype)


def quantize_rows(x, group=None, given=None):
    wide = F.pad(x.float(), (0, 0, 0, -x.shape[0] % 4))
    groups = wide.unflatten(1, (-1, group or x.shape[1]))
    scales = groups.abs().amax(-1) / 448
    scales = torch.where(scales > 0, scales, 1.0) if given is None else given.expand(scales.shape)
    values = (groups / scales.unsqueeze(-1)).clamp(-448, 448).flatten(1).to(torch.float8_e4m3fn)
    return values, scales.T.contiguous().T if group else scales.contiguous()


def scaled_mm(a, b, scale_a, recipe_a, scale_b, recipe_b, *, output_dtype):
    """With torch 2.11's rules for CUDA: layouts of the operands, and of the scales of both recipes."""
    (m, k), n, kinds = a.shape, b.shape[1], F.ScalingType
    assert a.is_contiguous() and b.T.is_contiguous() and not any(size % 16 for size in (k, n))
    if recipe_a is kinds.RowWise:
        assert scale_a.shape == (m, 1) and scale_b.numel() == n and scale_a.is_contiguous() and scale_b.is_contiguous()
        return ((a.float() * scale_a) @ (b.float() * scale_b.reshape(1, n))).to(output_dtype)
    assert (recipe_a, recipe_b) == (kinds.BlockWise1x128, kinds.BlockWise128x128) and k % 128 == n % 128 == 0
    padded = -(-k // 128 // 4) * 4
    assert scale_a.shape == (m, k // 128) and scale_a.stride() == (1, m)
    assert scale_b.shape == (padded, n // 128) and scale_b.stride() == (1, padded)
    by_input = scale_b[: k // 128].repeat_interleave(128, 0).repeat_interleave(128, 1)
    return ((a.float() * scale_a.repeat_interleave(128, 1)) @ (b.float() * by_input)).to(output_dtype)


@pytest.fixture
def fake_products(monkeypatch):
    fake = types.ModuleType("quantized_triton")
    fake.multiply, fake.quantize_rows = multiply, quantize_rows
    monkeypatch.setitem(sys.modules, "kvrelay.kernels.cuda.quantized_triton", fake)
    monkeypatch.setattr(F, "scaled_mm", scaled_mm)
    return fake
