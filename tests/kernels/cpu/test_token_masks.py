"""Token masks in every sampler on CPUs: a masked token is never drawn, and what is drawn is drawn as if it had -inf."""

import dataclasses
import math

import numpy as np
import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from kvrelay.kernels.backend import SamplingBatch
from kvrelay.kernels.common.logits import LogitChanges
from kvrelay.kernels.oracle import reference
from tests.kernels.common.test_sampling_search import mixture

VOCABS = (1, 31, 32, 33, 257, 1003)
EDGES = (0.0, 1 - 2**-53)


@pytest.fixture(params=["reference", "torch_only", "compiled", "compiled_2_threads"])
def backend(request):
    return request.getfixturevalue(request.param)


def packed(allowed):
    """Words [K, ceil(V / 32)] int32 of booleans [K, V]; bits past the vocabulary are set, as no sampler may mind."""
    bits = np.ones((len(allowed), -(-allowed.shape[1] // 32) * 32), dtype=np.uint8)
    bits[:, : allowed.shape[1]] = allowed.numpy()
    return torch.from_numpy(np.packbits(bits, axis=1, bitorder="little").view(np.int32).copy())


def masked(batch, allowed, rows):
    return dataclasses.replace(batch, masks=packed(allowed), mask_rows=torch.tensor(rows, dtype=torch.int32))


def one_or_more(generator, count, vocab, share):
    """Booleans [count, vocab]: about this share, at least one in each row."""
    allowed = torch.rand(count, vocab, generator=generator) < share
    allowed[torch.arange(count), torch.randint(vocab, (count,), generator=generator)] = True
    return allowed


@settings(max_examples=20, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    seed=st.integers(0, 1 << 30),
    rows=st.integers(1, 6),
    vocab=st.sampled_from(VOCABS),
    share=st.sampled_from([0.0, 0.05, 0.5, 0.98]),
    data=st.data(),
)
def test_draws_are_those_of_minus_infinity(backend, seed, rows, vocab, share, data):
    """Fewer masks than rows, rows without one, one row's mask for another: all filters, ties and infinities."""
    logits, batch = mixture(seed, rows, vocab)
    allowed = one_or_more(torch.Generator().manual_seed(seed), data.draw(st.integers(1, rows)), vocab, share)
    own = data.draw(st.lists(st.integers(-1, len(allowed) - 1), min_size=rows, max_size=rows))
    may = [torch.ones(vocab, dtype=torch.bool) if at < 0 else allowed[at] for at in own]
    banned = torch.stack([row.masked_fill(~mask, -math.inf) for row, mask in zip(logits, may, strict=True)])
    real = banned.amax(dim=1) > -math.inf  # of the others, whose only tokens have -inf, see below
    tokens = backend.sample(logits, masked(batch, allowed, own))
    assert torch.equal(tokens[real], reference.draw(banned, batch)[real])
    for uniform in EDGES:  # where a weight that one sampler rounds to 0 decides
        at_edge = dataclasses.replace(batch, uniform=torch.full((rows,), uniform, dtype=torch.float64))
        edge = backend.sample(logits, masked(at_edge, allowed, own)).tolist()
        assert all(mask[token] for mask, token in zip(may, edge, strict=True))
    assert all(mask[token] for mask, token in zip(may, tokens.tolist(), strict=True))


@pytest.mark.parametrize("vocab", [33, 1003, 4096])
def test_a_mask_with_all_bits_changes_nothing(backend, vocab):
    for seed in range(3):
        logits, batch = mixture(seed, 5, vocab)
        everything = masked(batch, torch.ones(1, vocab, dtype=torch.bool), [0] * 5)
        assert torch.equal(backend.sample(logits, everything), backend.sample(logits, batch))


@pytest.mark.parametrize("only", [0, 31, 32, 999, 1002])
def test_the_only_allowed_token_is_drawn_from_any_numbers(backend, only):
    logits, _ = mixture(0, 6, 1003)
    logits[1], logits[2], logits[3, only] = math.nan, -math.inf, -math.inf
    logits[4, :500], logits[5] = math.nan, math.inf
    allowed = torch.zeros(1, 1003, dtype=torch.bool)
    allowed[0, only] = True
    for seed in (1, 8, 15):
        _, batch = mixture(seed, 6, 1003)
        for uniform in EDGES:
            batch = dataclasses.replace(batch, uniform=torch.full((6,), uniform, dtype=torch.float64))
            assert backend.sample(logits, masked(batch, allowed, [0] * 6)).tolist() == [only] * 6


@pytest.mark.parametrize("worst", [-math.inf, math.nan])
def test_of_tokens_without_a_number_the_lowest_allowed_one_is_drawn(backend, worst):
    """As when a request bans what its grammar wants: the grammar wins."""
    logits, batch = mixture(2, 4, 300)
    allowed = torch.zeros(1, 300, dtype=torch.bool)
    allowed[0, [70, 71, 299]] = True
    logits[:, allowed[0]] = worst
    assert backend.sample(logits, masked(batch, allowed, [0] * 4)).tolist() == [70] * 4


def test_a_bias_comes_before_the_mask(backend):
    """It cannot bring a masked token back, and a ban leaves the other allowed ones."""
    logits, _ = mixture(0, 1, 100)
    batch = SamplingBatch(*(torch.tensor([x]) for x in (0.7, 3, 1.0, 0.0)), torch.tensor([0.4]).double())
    allowed = torch.zeros(1, 100, dtype=torch.bool)
    allowed[0, [40, 41]] = True
    changes = LogitChanges(100)
    changes.bias(0, {7: 100.0})
    changes.ban(0, [41])
    assert backend.sample(changes.applied(logits), masked(batch, allowed, [0])).tolist() == [40]


def test_a_mask_without_a_bit_crashes_nothing(backend):
    logits, batch = mixture(1, 4, 1003)
    tokens = backend.sample(logits, masked(batch, torch.zeros(2, 1003, dtype=torch.bool), [1, 0, -1, 1]))
    assert ((tokens >= 0) & (tokens < 1003)).all()
    assert tokens[2] == backend.sample(logits, batch)[2]


def test_masks_of_another_size_type_or_row_are_refused(backend):
    logits, batch = mixture(1, 2, 100)
    good = masked(batch, torch.ones(1, 100, dtype=torch.bool), [0, -1])
    assert good.masks is not None and good.mask_rows is not None
    for wrong in (
        {"masks": good.masks[:, :3]},
        {"masks": good.masks.long()},
        {"mask_rows": good.mask_rows[:1]},
        {"mask_rows": torch.tensor([1, 0], dtype=torch.int32)},
        {"mask_rows": torch.tensor([0, -2], dtype=torch.int32)},
    ):
        with pytest.raises(ValueError, match="mask_rows are"):
            backend.sample(logits, dataclasses.replace(good, **wrong))
    assert backend.sample(logits[:0], masked(mixture(1, 0, 100)[1], torch.ones(0, 100), [])).tolist() == []


def test_a_sampler_that_forgets_masks_is_seen(compiled):
    """The control."""
    logits, batch = mixture(0, 6, 1003)
    allowed = one_or_more(torch.Generator().manual_seed(1), 6, 1003, 0.1)
    tokens = compiled.sample(logits, batch)
    assert not allowed[torch.arange(6), tokens].all()
    assert not torch.equal(tokens, compiled.sample(logits, masked(batch, allowed, list(range(6)))))
