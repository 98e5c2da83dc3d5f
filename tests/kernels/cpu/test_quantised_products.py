"""Quantised linear layers on the CPU: the product of the weights they hold, for every shape, and no row sees its
neighbours.
"""

import math

import numpy as np
import pytest
import torch

from kvrelay.kernels.common.quant_scheme import Scheme
from kvrelay.kernels.common.quantized import TorchQuantLinear, quantize, unit_of
from kvrelay.kernels.cpu import selfcheck
from kvrelay.kernels.cpu.native_kernels import NativeQuantLinear

BF16 = torch.bfloat16
INT4, INT8 = Scheme(4), Scheme(8)
SCHEMES = [INT4, INT8, Scheme(4, 64), Scheme(8, 128)]
SHAPES = [(1, 1), (16, 32), (17, 33), (150, 70), (70, 300)]
ROWS = (1, 2, 3, 4, 5, 6, 7, 12, 13, 18, 19, 33, 70)


def random(*shape, seed=0):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def restored(linear, in_features):
    """The weight that a packed one holds, restored by its own products."""
    return linear(torch.eye(in_features)).T


@pytest.mark.parametrize("scheme", SCHEMES, ids=str)
@pytest.mark.parametrize(("out_features", "in_features"), SHAPES)
def test_every_product_is_that_of_the_weight_it_holds(cpu, scheme, out_features, in_features):
    weight, bias = random(out_features, in_features) / in_features**0.5, random(out_features, seed=1)
    held = restored(cpu.pack_quantized(weight, None, scheme, torch.float32), in_features).double()
    for dtype, tolerance in ((torch.float32, 2e-5), (BF16, 2e-2)):
        for b in (None, bias):
            linear = cpu.pack_quantized(weight, b, scheme, dtype)
            for rows in ROWS:
                x = random(rows, in_features, seed=rows).to(dtype)
                found = linear(x)
                assert found.dtype == dtype and found.shape == (rows, linear.out_features)
                expected = x.double() @ held.T + (0 if b is None else b.double())
                torch.testing.assert_close(found.double(), expected, atol=tolerance, rtol=tolerance)


@pytest.mark.parametrize(
    ("scheme", "least", "most"), [(INT8, 0.003, 0.007), (INT4, 0.05, 0.08), (Scheme(4, 128), 0.08, 0.12)]
)
def test_the_reported_error_is_the_real_one(cpu, scheme, least, most):
    weight = random(200, 300)
    linear = cpu.pack_quantized(weight, None, scheme, torch.float32)
    error = float((restored(linear, 300) - weight).norm() / weight.norm())
    assert least < error < most
    assert linear.error.relative == pytest.approx(error, rel=1e-3)
    assert linear.error.num_weights == 200 * 300
    assert (linear.error + linear.error).relative == pytest.approx(error, rel=1e-3)


@pytest.mark.parametrize("scheme", SCHEMES, ids=str)
def test_compiled_and_plain_torch_choose_alike(compiled, scheme):
    weight = random(40, 200) * torch.logspace(-6, 3, 40).unsqueeze(1)
    ours = compiled.pack_quantized(weight, None, scheme, torch.float32)
    theirs = TorchQuantLinear(weight, None, scheme)
    assert ours.error.relative == pytest.approx(theirs.error.relative, rel=1e-3)
    rows = weight.norm(dim=1)
    assert float(((restored(ours, 200) - restored(theirs, 200)).norm(dim=1) / rows).median()) < 1e-6


@pytest.mark.parametrize("dtype", [torch.float32, BF16])
@pytest.mark.parametrize("scheme", [INT4, INT8], ids=str)
def test_a_row_alone_equals_itself_in_any_batch_bit_for_bit(compiled, compiled_2_threads, scheme, dtype):
    weight = random(150, 300)
    for backend in (compiled, compiled_2_threads):
        linear = backend.pack_quantized(weight, None, scheme, dtype)
        x = random(250, 300).to(dtype)
        alone = torch.cat([linear(x[i : i + 1]) for i in range(250)])
        for rows in (*ROWS, 103, 200, 250):
            assert torch.equal(linear(x[:rows]), alone[:rows])


@pytest.mark.parametrize("rows", [1, 2, 5, 6, 13, 40])
@pytest.mark.parametrize(
    ("scheme", "least", "most"), [(INT4, -8, 7), (Scheme(4, 64), 0, 15), (INT8, -127, 127)], ids=str
)
def test_whole_numbers_are_multiplied_without_any_rounding_but_the_last(cpu, scheme, least, most, rows):
    """Sums below 2^24 of products that bf16 holds: every input meets its own integer, and no bit is lost on the way."""
    generator = torch.Generator().manual_seed(rows)
    weight = torch.randint(least, most + 1, (70, 160), generator=generator).float()
    weight[:, ::32], weight[:, 31::32] = least, most  # so that a step is 1 in every group
    x = torch.randint(-6, 7, (rows, 160), generator=generator).float()
    for dtype in (BF16, torch.float32):
        linear = cpu.pack_quantized(weight, None, scheme, dtype)
        due = (x.double() @ weight.double().T).to(dtype)
        assert torch.equal(linear(x.to(dtype)), due)
        assert not torch.equal(linear(x.roll(1, dims=1).to(dtype)), due)


def ggml_q4_1(rows):
    """What GGUF's Q4_1 makes of rows [N, K]: half floats and 16 steps between a group's ends."""
    groups = rows.numpy().reshape(rows.shape[0], -1, 32)
    low, high = groups.min(-1, keepdims=True), groups.max(-1, keepdims=True)
    step = ((high - low) / 15).astype(np.float16).astype(np.float32)
    offset = low.astype(np.float16).astype(np.float32)
    return np.clip(np.round((groups - offset) / step), 0, 15) * step + offset


def ggml_q4_0(rows):
    """Q4_0: the value of the largest magnitude is -8 steps."""
    groups = rows.numpy().reshape(rows.shape[0], -1, 32)
    at = np.abs(groups).argmax(-1)[..., None]
    step = (np.take_along_axis(groups, at, -1) / -8).astype(np.float16).astype(np.float32)
    return np.clip(np.round(groups / step), -8, 7) * step


def ggml_q8_0(rows):
    """Q8_0: the largest magnitude is 127 steps."""
    groups = rows.numpy().reshape(rows.shape[0], -1, 32)
    step = (np.abs(groups).max(-1, keepdims=True) / 127).astype(np.float16).astype(np.float32)
    return np.round(groups / step) * step


@pytest.mark.parametrize(("was", "scheme"), [(ggml_q4_1, INT4), (ggml_q4_0, INT4), (ggml_q8_0, INT8)])
def test_weights_that_were_such_integers_before_come_out_as_they_were(cpu, was, scheme):
    weight = torch.from_numpy(was(random(50, 96) * 0.03)).flatten(1).float()
    linear = cpu.pack_quantized(weight, None, scheme, torch.float32)
    assert linear.error.relative < 1e-6
    assert cpu.pack_quantized(random(50, 96), None, scheme, torch.float32).error.relative > 1e-3


def test_a_wrong_scale_is_noticed(compiled):
    """The control of the comparisons above: one bit of one half float of one group."""
    weight, x = random(40, 64), random(5, 64, seed=1)
    linear = compiled.pack_quantized(weight, None, INT4, torch.float32)
    right = linear(x)
    linear._packed[1] ^= 0x04  # the exponent's lowest bit of output 0's first scale
    wrong = linear(x)
    assert torch.equal(wrong[:, 1:], right[:, 1:])
    assert float((wrong[:, 0] - right[:, 0]).abs().max()) > 1e-2


def test_a_wrong_kernel_does_not_pass_the_check_at_start(compiled, monkeypatch):
    assert selfcheck.first_wrong_kernel(compiled) is None
    call = NativeQuantLinear.__call__
    monkeypatch.setattr(
        NativeQuantLinear, "__call__", lambda self, x: call(self, x) * (1.0 if x.shape[0] < 31 else 1.01)
    )
    assert selfcheck.first_wrong_kernel(compiled) == "quantised linear"


@pytest.mark.parametrize("size", [1e-30, 1e-6, 1.0, 3e4])
def test_scales_keep_their_precision_whatever_the_weights_size(cpu, size):
    linear = cpu.pack_quantized(random(20, 64) * size, None, INT8, torch.float32)
    assert linear.error.relative < 0.007
    assert 2**14 <= float((random(20, 64) * size).abs().max()) / unit_of(random(20, 64) * size) < 2**15


def test_zeros_and_equal_weights_are_exact(cpu):
    for value in (0.0, 0.5, -0.25):
        linear = cpu.pack_quantized(torch.full((20, 40), value), None, INT4, torch.float32)
        assert linear.error.relative == 0.0
        torch.testing.assert_close(linear(torch.ones(3, 40)), torch.full((3, 20), 40 * value))


def test_strided_rows_no_rows_and_other_types(cpu, compiled):
    linear, x = cpu.pack_quantized(random(40, 24), None, INT4, torch.float32), random(5, 48)
    torch.testing.assert_close(linear(x[:, 24:]), linear(x[:, 24:].contiguous()))
    assert linear(x[:0, :24]).shape == (0, 40)
    with pytest.raises(TypeError, match="bfloat16"):
        compiled.pack_quantized(random(8, 8), None, INT4, torch.float32)(random(1, 8).to(BF16))


def test_float16_falls_back_to_torch(compiled):
    linear = compiled.pack_quantized(random(8, 64), None, INT8, torch.float16)
    assert isinstance(linear, TorchQuantLinear)
    assert linear(random(2, 64).half()).dtype == torch.float16


def test_integers_fill_their_range():
    held = quantize(random(64, 256), INT4)
    assert (int(held.integers.min()), int(held.integers.max())) == (0, 15)
    held = quantize(random(64, 250), INT8)
    assert int(held.integers.abs().max()) == 127 and held.restored().shape == (64, 250)
    assert math.log2(unit_of(random(64, 256))).is_integer()
