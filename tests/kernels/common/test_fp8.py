"""FP8 KV: every code is the number in OCP's table, encoding rounds to nearest, and the compiled kernels agree."""

import dataclasses

import pytest
import torch

from kvrelay import fp8
from kvrelay.kernels.backend import AttentionShape
from tests.kernels.oracle.kernel_cases import KernelCase, KernelStep, make_step, only, run_attention, written_out

BF16, FP8 = torch.bfloat16, torch.float8_e4m3fn
CASES = {
    "decode and chunks": KernelCase(((1, 33), (1, 530), (17, 49))),
    "window and softcap": KernelCase(((1, 90), (20, 80)), window=33, softcap=20.0),
    "MQA, head 20": KernelCase(((1, 40), (9, 20)), heads=8, kv_heads=1, head_dim=20),
    "head 256, block of 1": KernelCase(((1, 40), (9, 20)), heads=4, kv_heads=1, head_dim=256, block_size=1),
}


def by_the_book(code):
    """An e4m3 code's number: sign, 4 bits of exponent with bias 7, 3 of mantissa; subnormals below 8."""
    sign, exponent, mantissa = code >> 7, code >> 3 & 15, code & 7
    size = mantissa / 8 * 2.0**-6 if exponent == 0 else (1 + mantissa / 8) * 2.0 ** (exponent - 7)
    return -size if sign else size


def fp8_shape(case):
    return dataclasses.replace(case.shape, kv_dtype=FP8)


def fp8_step(case):
    """A step over an fp8 cache, and the same over what that cache says in float32."""
    step = make_step(case)
    layer = fp8.encoded(step.kv_layer.float())
    plain = dataclasses.replace(case, dtype=torch.float32)
    return dataclasses.replace(step, kv_layer=layer), KernelStep(plain, step.q.float(), fp8.decoded(layer), step.batch)


def run(backend, step):
    case = step.case
    plan = backend.plan(step.batch, fp8_shape(case))
    return backend.attention(step.q, step.kv_layer, plan, scale=0.125, window=case.window, softcap=case.softcap)


def vectors(seed=0, dim=64):
    """Vectors of every size, with outliers; zeros, a subnormal and the borders of the scale among them."""
    generator = torch.Generator().manual_seed(seed)
    rows = torch.randn(300, dim, generator=generator) * torch.logspace(-35, 35, 300)[:, None]
    rows[::7, -1] *= 300
    rows[0], rows[1], rows[2] = 0, 1e-41, torch.linspace(-1, 1, dim)
    rows[3, :2], rows[3, 2:] = torch.tensor([448.0, 17.0]), 0
    rows[4, :2], rows[4, 2:] = torch.tensor([448.1, 17.0]), 0
    return rows


def test_every_code_is_the_number_of_the_standard():
    codes = torch.tensor([code for code in range(256) if code & 0x7F != 0x7F], dtype=torch.uint8)
    scale = torch.tensor([0.25]).view(torch.uint8)
    rows = torch.cat((codes, scale))
    assert fp8.decoded(rows).tolist() == [by_the_book(code) * 0.25 for code in codes.tolist()]


def test_encoding_takes_the_nearest_number_of_the_smallest_scale_that_holds_the_vector():
    table = torch.tensor([by_the_book(code) for code in range(127)], dtype=torch.float64)
    rows = vectors()
    encoded = fp8.encoded(rows)
    scale = fp8.scales(rows)[:, 0].double()
    largest = rows.abs().amax(1).double()
    ordinary = (largest > 2.0**-117) & (largest > 0)
    assert (largest <= 448 * scale).all() and (largest > 224 * scale)[ordinary].all()
    assert (scale.log2() % 1 == 0).all()
    size = (rows.double().abs() / scale[:, None])[..., None]
    best = (size - table).abs().amin(-1) * scale[:, None]
    assert ((fp8.decoded(encoded).double() - rows.double()).abs() <= best).all()


def test_an_error_is_a_sixteenth_of_a_number_or_2_to_the_minus_17_of_the_largest():
    rows = vectors(1).double()[5:]
    wrong = (fp8.decoded(fp8.encoded(rows)).double() - rows).abs()
    assert (wrong <= torch.maximum(rows.abs() / 16, rows.abs().amax(1, keepdim=True) * 2.0**-17)).all()


def test_writing_what_was_read_changes_no_number_and_bfloat16_holds_it():
    once = fp8.decoded(fp8.encoded(vectors(2)))[2:]
    assert torch.equal(fp8.decoded(fp8.encoded(once)), once)
    assert torch.equal(once.to(BF16).float(), once)


@pytest.mark.parametrize("lost", [float("inf"), float("nan")])
def test_a_vector_that_is_not_finite_is_lost_as_a_whole_and_no_other(cpu, reference, lost):
    k = torch.ones(3, 2, 16)
    k[1, 0, 5] = lost
    for backend in (cpu, reference):
        layer = torch.zeros(1, 2, 4, 2, 20, dtype=torch.uint8)
        backend.store_kv(k, torch.ones_like(k), layer, torch.arange(3))
        lost_ones = fp8.decoded(layer).isnan().all(-1)
        assert lost_ones.nonzero().tolist() == [[0, 0, 1, 0]] and fp8.decoded(layer).isnan().sum() == 16


@pytest.mark.parametrize("dim", [64, 3])
@pytest.mark.parametrize("source", [torch.float32, BF16])
@pytest.mark.parametrize("kind", [torch.uint8, BF16, torch.float32])
def test_a_cache_of_another_dtype_is_written_as_torch_writes_it_bit_for_bit(cpu, source, kind, dim):
    k, v = vectors(3, dim).to(source).view(100, 3, dim), vectors(4, dim).to(source).view(100, 3, dim)
    layer = torch.zeros(13, 2, 8, 3, dim + 4 * (kind == torch.uint8), dtype=kind)
    slots = torch.randperm(104)[:100]
    cpu.store_kv(k, v, layer, slots)
    expected = torch.zeros_like(layer)
    expected[slots // 8, 0, slots % 8] = fp8.stored(k, kind)
    expected[slots // 8, 1, slots % 8] = fp8.stored(v, kind)
    assert torch.equal(layer, expected)


@pytest.mark.parametrize("dtype", [torch.float32, BF16])
@pytest.mark.parametrize("name", CASES)
def test_attention_over_fp8_is_attention_over_what_the_cache_says(cpu, reference, name, dtype):
    step, plain = fp8_step(dataclasses.replace(CASES[name], dtype=dtype))
    expected = written_out(plain, 0.125)
    tolerance = 1e-5 if dtype == torch.float32 else 2e-2
    for backend in (cpu, reference):
        torch.testing.assert_close(run(backend, step).double(), expected, atol=tolerance, rtol=tolerance)


@pytest.mark.parametrize("kind", [BF16, torch.float32, torch.float16])
def test_a_plain_cache_need_not_have_the_models_dtype(cpu, kind):
    step = make_step(KernelCase(((1, 33), (9, 70))))
    layer = step.kv_layer.to(kind)
    expected = written_out(dataclasses.replace(step, kv_layer=layer), 0.125)
    plan = cpu.plan(step.batch, dataclasses.replace(step.case.shape, kv_dtype=kind))
    found = cpu.attention(step.q, layer, plan, scale=0.125, window=None, softcap=None)
    torch.testing.assert_close(found.double(), expected, atol=1e-5, rtol=1e-5)


def test_a_sequence_over_fp8_alone_equals_itself_in_a_batch_bit_for_bit(compiled, compiled_2_threads):
    step, _ = fp8_step(KernelCase(((1, 33), (1, 700), (16, 48), (40, 600))))
    together = run(compiled, step)
    assert torch.equal(together, run(compiled_2_threads, step))
    for s in range(4):
        rows = slice(int(step.batch.query_starts[s]), int(step.batch.query_starts[s + 1]))
        assert torch.equal(run(compiled_2_threads, only(step, s)), together[rows])


def test_fp8_attention_is_within_a_twentieth_of_the_exact_one(cpu):
    step = make_step(KernelCase(((1, 90), (17, 49))))
    exact = run_attention(cpu, step)
    quantised = run(cpu, dataclasses.replace(step, kv_layer=fp8.encoded(step.kv_layer)))
    assert 1e-3 < (quantised - exact).norm() / exact.norm() < 0.05


def test_a_shape_says_what_its_cache_holds():
    shape = AttentionShape(4, 2, 64, 16, BF16)
    assert shape.kv_dtype is None and dataclasses.replace(shape, kv_dtype=FP8).kv_dtype is FP8
