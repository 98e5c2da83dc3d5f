"""Norms, rotary embedding, gated activations, embedding and the cache write against plain formulas."""

import math

import pytest
import torch

BF16 = torch.bfloat16
DTYPES = [torch.float32, BF16, torch.float16]


def random(*shape, dtype=torch.float32, seed=0):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed)).to(dtype)


def close(found, expected, dtype):
    assert found.dtype == dtype
    tolerance = {torch.float32: 1e-5, BF16: 1e-2, torch.float16: 2e-3}[dtype]
    torch.testing.assert_close(found.double(), expected.double(), atol=tolerance, rtol=tolerance)


@pytest.fixture(params=["reference", "torch_only", "compiled", "compiled_2_threads"])
def backend(request):
    return request.getfixturevalue(request.param)


def normed(x, weight, eps):
    x = x.double()
    return x / (x.square().mean(-1, keepdim=True) + eps).sqrt() * weight.double()


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("shape", [(1, 576), (7, 64), (300, 100), (5, 9, 64), (5, 3, 20), (2, 1)])
def test_rms_norm(backend, dtype, shape):
    x = 3 * random(*shape, dtype=dtype)
    for weight in (random(shape[-1]), random(shape[-1], dtype=dtype)):
        close(backend.rms_norm(x, weight, 1e-5), normed(x, weight, 1e-5), dtype)


def test_rms_norm_of_heads_inside_the_fused_qkv(backend):
    fused = random(7, 15 * 64)
    heads = fused[:, 64 * 9 : 64 * 12].unflatten(1, (3, 64))
    close(backend.rms_norm(heads, torch.ones(64), 1e-6), normed(heads, torch.ones(64), 1e-6), torch.float32)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("rows", [1, 7, 200])
def test_add_rms_norm_rounds_the_sum_first(backend, dtype, rows):
    x, residual, weight = random(rows, 100, dtype=dtype), random(rows, 100, dtype=dtype, seed=1), random(100)
    total = x + residual
    found, kept = backend.add_rms_norm(x.clone(), residual.clone(), weight, 1e-5)
    assert torch.equal(kept, total)
    close(found, normed(total, weight, 1e-5), dtype)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("rotary", [64, 32, 20])
def test_rope_turns_pairs_half_apart(backend, dtype, rotary):
    angles = torch.outer(torch.arange(50.0), 1e4 ** -(torch.arange(rotary // 2) / (rotary // 2)))
    table = torch.cat((angles.cos(), angles.sin()), 1).contiguous()
    positions = torch.tensor([0, 3, 49, 3])
    fused = random(4, 15 * 64, dtype=dtype)
    q, k = fused[:, : 9 * 64].unflatten(1, (9, 64)), fused[:, 9 * 64 : 12 * 64].unflatten(1, (3, 64))
    expected = []
    for x in (q, k):
        pairs = torch.complex(x[..., : rotary // 2].double(), x[..., rotary // 2 : rotary].double())
        turned = pairs * torch.polar(torch.ones(4, 1, rotary // 2).double(), angles[positions].unsqueeze(1).double())
        expected.append(torch.cat((turned.real, turned.imag, x[..., rotary:].double()), -1))
    for found, want in zip(backend.rope(q, k, table, positions), expected, strict=True):
        close(found, want, dtype)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("rows", "features"), [(1, 1536), (3, 37), (40, 512)])
def test_gated_activations(backend, dtype, rows, features):
    gate_up = 4 * random(rows, 2 * features, dtype=dtype)
    gate, up = gate_up.double().chunk(2, 1)
    close(backend.gated_activation(gate_up, "silu"), gate / (1 + (-gate).exp()) * up, dtype)
    inner = math.sqrt(2 / math.pi) * (gate + 0.044715 * gate**3)
    close(backend.gated_activation(gate_up, "gelu_tanh"), 0.5 * gate * (1 + inner.tanh()) * up, dtype)


@pytest.mark.parametrize("kind", ["silu", "gelu_tanh"])
def test_activations_stay_finite_far_out(backend, kind):
    gate = torch.tensor([-1e4, -200.0, -89.0, 0.0, 89.0, 200.0, 1e4, 1.0])
    found = backend.gated_activation(torch.cat((gate, torch.ones(8))).unsqueeze(0), kind)[0]
    torch.testing.assert_close(found[[0, 1, 3, 5, 6]], torch.tensor([0.0, 0.0, 0.0, 200.0, 1e4]), atol=1e-5, rtol=1e-6)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("block_size", [1, 16])
def test_store_kv_writes_its_slots_and_no_other(backend, dtype, block_size):
    cache = torch.full((80 // block_size, 2, block_size, 3, 20), 7.0, dtype=dtype)
    fused = random(6, 300, dtype=dtype)
    k, v = fused[:, :60].unflatten(1, (3, 20)), fused[:, 60:120].unflatten(1, (3, 20))
    slots = torch.tensor([0, 79, 16, 17, 33, 5])
    backend.store_kv(k, v, cache, slots)
    flat = cache.transpose(0, 1).reshape(2, 80, 3, 20)
    assert torch.equal(flat[0, slots], k) and torch.equal(flat[1, slots], v)
    untouched = torch.ones(80, dtype=torch.bool)
    untouched[slots] = False
    assert bool((flat[:, untouched] == 7).all())


def test_embed_takes_rows(backend):
    table = random(10, 6)
    assert torch.equal(backend.embed(torch.tensor([3, 3, 0]), table), table[[3, 3, 0]])


def test_numbers_that_are_not_numbers_stay_so(backend):
    x = torch.tensor([[float("nan"), 1.0] * 20], dtype=BF16)
    assert bool(backend.rms_norm(x, torch.ones(40), 1e-5).isnan().all())
