"""Quantised weights in the CUDA backend: which product takes which weight, over products on CPU tensors."""

# ruff: noqa: F811

import logging
import sys

import pytest
import torch

from kvrelay.kernels.common.experts import ExpertLoop
from kvrelay.kernels.common.quant_scheme import Scheme
from kvrelay.kernels.common.quantized import quantize
from kvrelay.kernels.common.stored_weights import Fp8Weight, Mxfp4Weight, QuantizedWeight
from kvrelay.kernels.cuda import quantized, stacked_weights
from kvrelay.kernels.cuda.experts import CudaExperts, StoredExperts, pack_experts
from kvrelay.kernels.cuda.quantized import Fp8Linear, Products, StoredLinear
from kvrelay.kernels.oracle import exact
from kvrelay.kernels.oracle.grid import judge
from kvrelay.kernels.oracle.reference import ReferenceBackend, ReferenceLinear
from tests.kernels.cuda.fake_gpu import fake_gpu  # noqa: F401
from tests.kernels.cuda.fake_products import fake_products, numbers_of  # noqa: F401
from tests.kernels.cuda.test_experts import one_thread  # noqa: F401

CPU, BF16 = torch.device("cpu"), torch.bfloat16
KINDS = ("int8", "int4", "fp8", "mxfp4")
SCALED = ("scaled by rows", "scaled in blocks")


def random(*shape, seed=0):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def fp8(n, k, tile, seed=0, **more):
    scales = random(-(-n // tile[0]), -(-k // tile[1]), seed=seed + 1).abs() + 0.1
    return Fp8Weight(random(n, k, seed=seed).to(torch.float8_e4m3fn), scales, tile, **more)


def mxfp4(n, k, seed=0):
    generator = torch.Generator().manual_seed(seed)
    codes = torch.randint(0, 256, (n, k // 2), generator=generator).to(torch.uint8)
    return Mxfp4Weight(codes, torch.randint(118, 124, (n, k // 32), generator=generator).to(torch.uint8))


WEIGHTS = {
    "fp8 tensor": fp8(48, 64, (48, 64)),
    "fp8 outputs": fp8(48, 64, (1, 64)),
    "fp8 blocks": fp8(256, 384, (128, 128)),
    "fp8 uneven blocks": fp8(200, 320, (128, 128)),
    "fp8 odd": fp8(17, 33, (17, 33)),
    "int4": quantize(random(48, 70), Scheme(4)),
    "int8": quantize(random(48, 70), Scheme(8, 64)),
    "mxfp4": mxfp4(48, 64),
}


@pytest.mark.parametrize("name", WEIGHTS)
def test_the_stored_form_has_the_restored_numbers(name):
    weight = WEIGHTS[name]
    form = stacked_weights.as_stored(weight)
    assert torch.equal(numbers_of(form)[0], weight.restored())
    assert torch.equal(numbers_of(stacked_weights.stack([form, form]))[1], weight.restored())


def test_scales_of_integers_are_half_floats_where_that_is_exact():
    ours = stacked_weights.stack([stacked_weights.as_stored(WEIGHTS["int4"])])
    assert ours.scales.dtype == ours.offsets.dtype == torch.float16
    assert ours.num_bytes == 48 * (96 // 2 + 2 * 2 * 3)
    theirs = QuantizedWeight(torch.ones(4, 2, 32, dtype=torch.int8), random(4, 2), random(4, 2), 64, 4)
    wide = stacked_weights.stack([stacked_weights.as_stored(theirs)])
    assert wide.scales.dtype == torch.float32 and torch.equal(numbers_of(wide)[0], theirs.restored())


@pytest.mark.parametrize("product", [*KINDS, *SCALED])
def test_a_product_that_is_right_is_taken_and_a_wrong_one_is_not(product, fake_products, monkeypatch, caplog):
    for dtype in (BF16, torch.float16):
        quantized.check(product, CPU, dtype)
    real, real_scaled = fake_products.multiply, torch.nn.functional.scaled_mm
    fake_products.multiply = lambda rows, *args, **more: real(rows.roll(1, 1), *args, **more)
    monkeypatch.setattr(
        torch.nn.functional, "scaled_mm", lambda a, b, *args, **more: real_scaled(a, b, *args, **more) * 1.5
    )
    with pytest.raises(RuntimeError, match="times as far off as rounding explains"):
        quantized.check(product, CPU, BF16)
    assert not Products(CPU)._works(product, BF16)
    assert "do not work here" in caplog.text


@pytest.mark.parametrize("name", WEIGHTS)
@pytest.mark.parametrize("dtype", [torch.float32, BF16], ids=str)
def test_a_linear_over_stored_weights_equals_the_restored_one(name, dtype, fake_products):
    weight, bias = WEIGHTS[name], random(WEIGHTS[name].out_features, seed=5).to(dtype)
    linear, error = Products(CPU).linear(weight, bias, dtype)
    is_scaled = dtype == BF16 and name in ("fp8 tensor", "fp8 outputs", "fp8 blocks")
    assert isinstance(linear, Fp8Linear if is_scaled else StoredLinear)
    assert error.num_weights == weight.restored().numel() and error.relative <= (0 if is_scaled else 2**-8)
    assert error.num_bytes <= 1.3 * weight.num_bytes
    for rows in (1, 5, 33):
        x = random(rows, 2 * weight.in_features, seed=rows).to(dtype)[:, weight.in_features :]
        lost = exact.lost_as_fp8(x, 128 if name == "fp8 blocks" else x.shape[1]) if is_scaled else None
        restored = weight.restored()
        due = exact.linear(x, restored, bias, held=3 * restored.abs(), lost=lost)
        assert linear(x).dtype == dtype and due.ratio(linear(x)) <= 1


def test_a_static_input_scale_is_the_checkpoints(fake_products):
    weight = fp8(32, 64, (32, 64), input_scale=0.01)
    linear, _ = Products(CPU).linear(weight, None, BF16)
    x = random(3, 64).to(BF16)
    due = (x.float() / 0.01).clamp(-448, 448).to(torch.float8_e4m3fn).float() * 0.01 @ weight.restored().T
    torch.testing.assert_close(linear(x).float(), due, rtol=1e-2, atol=1e-2 * float(due.abs().max()))


def test_without_triton_weights_are_restored_with_one_line(fake_gpu, caplog, monkeypatch):
    monkeypatch.setitem(sys.modules, "kvrelay.kernels.cuda.quantized_triton", None)
    weight, x = fp8(17, 33, (17, 33)), random(3, 33).to(BF16)
    with caplog.at_level(logging.WARNING):
        for _ in range(2):
            linear, error = fake_gpu.pack_stored(weight, None, BF16)
    assert isinstance(linear, ReferenceLinear) and error.num_bytes == 2 * 17 * 33
    assert caplog.text.count("products with fp8 weights in torch.bfloat16 do not work here: they are restored") == 1
    torch.testing.assert_close(linear(x), x @ weight.restored().to(BF16).T)
    held = fake_gpu.pack_quantized(random(48, 64), None, Scheme(4), BF16)
    assert 0.02 < held.error.relative < 0.2


def gate(x):
    return ReferenceBackend("cpu").gated_activation(x, "silu")


def expert_weights(kind, number):
    hidden, ffn = 64, 96
    if kind == "fp8":
        return fp8(2 * ffn, hidden, (1, hidden), seed=number), fp8(hidden, ffn, (32, 32), seed=number + 50)
    if kind == "mxfp4":
        return mxfp4(2 * ffn, hidden, number), mxfp4(hidden, ffn, number + 50)
    plain = random(2 * ffn, hidden, seed=number), random(hidden, ffn, seed=number + 50)
    return plain if kind == "plain" else tuple(quantize(x, Scheme(int(kind[3:]))) for x in plain)


@pytest.mark.parametrize(
    ("kind", "scheme"), [(kind, None) for kind in KINDS] + [("plain", Scheme(4)), ("plain", Scheme(8))]
)
def test_quantised_experts_equal_the_loop_over_restored_ones(kind, scheme, fake_products):
    pairs = [expert_weights(kind, number) for number in range(8)]
    experts = pack_experts(iter(pairs), Products(CPU), gate, torch.float32, scheme)
    assert isinstance(experts, StoredExperts)
    if scheme is not None:
        pairs = [tuple(quantize(weight, scheme) for weight in pair) for pair in pairs]
        assert 0.001 < experts.error.relative < 0.2
    plain = [tuple(ReferenceLinear(weight.restored(), None) for weight in pair) for pair in pairs]
    for tokens in (0, 1, 7, 40):
        x, shares = random(tokens, 64) / 8, random(tokens, 3, seed=9).softmax(-1)
        chosen = torch.stack([torch.randperm(8)[:3] for _ in range(tokens)]) if tokens else torch.empty(0, 3).long()
        due = ExpertLoop(plain, gate)(x, shares, chosen)
        torch.testing.assert_close(experts(x, shares, chosen), due, rtol=1e-4, atol=1e-4 * (1 + 1e3 * (kind == "fp8")))


def test_experts_that_no_product_takes_are_restored(fake_products, caplog):
    pairs = [expert_weights(kind, 0) for kind in ("fp8", "int8")]  # unlike
    experts = pack_experts(iter(pairs), Products(CPU), gate, BF16)
    assert isinstance(experts, CudaExperts) and 0 < experts.error.relative < 2**-8
    restored = sum((2 * weight.restored().numel() for pair in pairs for weight in pair), 0)
    assert experts.error.num_bytes == restored


def test_the_backends_quantised_products_are_the_oracles(fake_gpu, fake_products):
    found = judge("quantised linear", fake_gpu, BF16)
    assert found.ok and found.num_cases > 100
