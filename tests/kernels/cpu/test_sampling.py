"""Sampling: filters against a naive loop, ties, and that draws follow the distribution."""

import math

import pytest
import torch

from kvrelay.kernels.backend import SamplingBatch
from kvrelay.kernels.cpu.backend import CpuBackend


def settings(rows, *, temperature=1.0, top_k=0, top_p=1.0, min_p=0.0, uniform=0.5):
    uniform = uniform if isinstance(uniform, torch.Tensor) else torch.full((rows,), uniform)
    return SamplingBatch(
        torch.full((rows,), temperature),
        torch.full((rows,), top_k),
        torch.full((rows,), top_p),
        torch.full((rows,), min_p),
        uniform.double(),
    )


@pytest.fixture(params=["reference", "torch_only", "compiled", "compiled_2_threads"])
def backend(request):
    return request.getfixturevalue(request.param)


def naive(logits, temperature, top_k, top_p, min_p):
    """{id: probability} by the book, in plain Python."""
    scaled = [x / temperature for x in logits]
    ids = sorted(range(len(scaled)), key=lambda i: (-scaled[i], i))
    if top_k:
        ids = [i for i in ids if scaled[i] >= scaled[ids[min(top_k, len(ids)) - 1]]]
    weights = {i: math.exp(scaled[i] - scaled[ids[0]]) for i in ids}
    total, before, kept = sum(weights.values()), 0.0, []
    for i in ids:
        if top_p < 1 and before >= top_p * total and kept:
            break
        before += weights[i]
        kept.append(i)
    kept = [i for i in kept if weights[i] >= min_p * weights[ids[0]]]
    total = sum(weights[i] for i in kept)
    return {i: weights[i] / total for i in sorted(kept)}


def draw_naively(logits, uniform, *filters):
    left = naive(logits, *filters)
    token, sum_so_far = max(left), 0.0
    for candidate, probability in left.items():
        sum_so_far += probability
        if sum_so_far > uniform:
            return candidate
    return token


@pytest.mark.parametrize("top_k", [0, 1, 5, 1000])
@pytest.mark.parametrize("top_p", [1.0, 0.9, 0.3, 1e-6])
@pytest.mark.parametrize("min_p", [0.0, 0.1])
@pytest.mark.parametrize("temperature", [1.0, 0.5, 2.0])
def test_draws_equal_the_naive_sampler(backend, temperature, top_k, top_p, min_p):
    generator = torch.Generator().manual_seed(3)
    logits = 3 * torch.randn(40, 101, generator=generator)
    uniform = torch.rand(40, generator=generator)
    batch = settings(40, temperature=temperature, top_k=top_k, top_p=top_p, min_p=min_p, uniform=uniform)
    expected = [
        draw_naively(row, u, temperature, top_k, top_p, min_p)
        for row, u in zip(logits.tolist(), uniform.tolist(), strict=True)
    ]
    assert backend.sample(logits, batch).tolist() == expected


def test_temperature_zero_takes_the_first_of_equal_maxima(backend):
    logits = torch.zeros(3, 1000)
    logits[0, [500, 17, 999]] = 2.0
    logits[1, 999] = 1.0
    assert backend.sample(logits, settings(3, temperature=0.0)).tolist() == [17, 999, 0]


def test_greedy_and_drawn_rows_share_a_batch(backend):
    logits = torch.tensor([[0.0, 5.0, 0.0], [0.0, 5.0, 0.0]])
    batch = settings(2, uniform=0.0)
    batch = SamplingBatch(torch.tensor([0.0, 1.0]), batch.top_k, batch.top_p, batch.min_p, batch.uniform)
    assert backend.sample(logits, batch).tolist() == [1, 0]


def test_ties_at_the_kth_value_all_stay(backend):
    logits = torch.tensor([[3.0, 1.0, 1.0, 1.0, 0.0]]).repeat(200, 1)
    uniform = torch.arange(200) / 200
    assert set(backend.sample(logits, settings(200, top_k=2, uniform=uniform)).tolist()) == {0, 1, 2, 3}


def test_ties_at_the_nucleus_border_stay_lowest_id_first(backend):
    logits = torch.zeros(100, 10)
    uniform = torch.arange(100) / 100
    assert set(backend.sample(logits, settings(100, top_p=0.25, uniform=uniform)).tolist()) == {0, 1, 2}


def test_tokens_of_minus_infinity_are_never_drawn(backend):
    logits = torch.full((50, 64), float("-inf"))
    logits[:, [3, 60]] = 0.0
    uniform = torch.arange(50) / 50
    for batch in (settings(50, uniform=uniform), settings(50, top_k=10, top_p=0.99, uniform=uniform)):
        assert set(backend.sample(logits, batch).tolist()) == {3, 60}
    assert backend.sample(logits, settings(50, uniform=1 - 1e-12)).tolist() == [60] * 50


def test_draws_follow_the_distribution(backend):
    logits = torch.tensor([0.3, -1.0, 2.0, 0.0, 1.1, -0.4])
    uniform = torch.rand(20000, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
    drawn = backend.sample(logits.repeat(20000, 1), settings(20000, uniform=uniform))
    expected = logits.softmax(0) * 20000
    chi2 = ((drawn.bincount(minlength=6) - expected) ** 2 / expected).sum()
    assert chi2 < 20.5  # 5 degrees of freedom, p = 0.001; the numbers are seeded


def test_backends_agree_on_a_real_vocabulary(reference, compiled):
    generator = torch.Generator().manual_seed(8)
    logits = 4 * torch.randn(24, 49152, generator=generator)
    uniform = torch.rand(24, generator=generator)
    for filters in ({}, {"top_k": 50}, {"top_p": 0.9}, {"top_k": 200, "top_p": 0.95, "min_p": 0.02}):
        batch = settings(24, uniform=uniform, temperature=0.8, **filters)
        assert torch.equal(reference.sample(logits, batch), compiled.sample(logits, batch))


def test_a_model_that_computes_nan_crashes_nothing():
    logits = torch.randn(3, 5000)
    logits[0, ::7] = float("nan")
    logits[1] = float("nan")
    batch = SamplingBatch(
        temperature=torch.full((3,), 0.8),
        top_k=torch.tensor([40, 0, 0]),
        top_p=torch.tensor([0.9, 0.5, 1.0]),
        min_p=torch.zeros(3),
        uniform=torch.tensor([0.1, 0.5, 0.9], dtype=torch.float64),
    )
    tokens = CpuBackend(1).sample(logits, batch)
    assert ((tokens >= 0) & (tokens < 5000)).all()
