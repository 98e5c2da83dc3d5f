"""Sampling without sorting equals the rule that sorts: over random logits, ties, infinities and mixtures of filters."""

import dataclasses
import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from kvrelay.kernels.backend import SamplingBatch
from kvrelay.kernels.common import sampling_search
from kvrelay.kernels.common.sampling_search import SettingsCache, least_kept, ordered_places, settings_of
from kvrelay.kernels.oracle import reference

CPU = torch.device("cpu")
VOCABS = (1, 2, 31, 257, 1003)


@pytest.fixture(autouse=True)
def one_thread():
    """Rows this short gain nothing from more."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


def mixture(seed, rows, vocab):
    """Logits [rows, vocab] with some ties and -inf, and a batch with different settings in every row."""
    g = torch.Generator().manual_seed(seed)
    logits = 4 * torch.randn(rows, vocab, generator=g)
    kind = seed % 4
    if kind == 1:  # many equal ones; with -0.0 among zeros
        logits = logits.round() * 0.5
    elif kind == 2:
        logits[torch.rand(rows, vocab, generator=g) < 0.5] = -math.inf
        logits[torch.arange(rows), torch.randint(vocab, (rows,), generator=g)] = 1.0
    elif kind == 3:  # nearly certain, or far from it
        logits *= torch.tensor([[12.0], [1e-3]]).repeat(rows, 1)[:rows]

    def one_of(*values, dtype=torch.float32):
        return torch.tensor(values, dtype=dtype)[torch.randint(len(values), (rows,), generator=g)]

    batch = SamplingBatch(
        one_of(0.0, 0.3, 1.0, 1.7),
        one_of(0, 0, 1, 2, 40, vocab, vocab + 5, dtype=torch.int64),
        one_of(1.0, 1.0, 0.95, 0.5, 0.013, 0.0),
        one_of(0.0, 0.0, 0.07, 0.4, 1.0),
        torch.rand(rows, generator=g, dtype=torch.float64),
    )
    return logits, batch


def drawn(logits, batch, draw=sampling_search.draw):
    return draw(logits, settings_of(batch, CPU), batch.uniform)


@settings(max_examples=40, deadline=None)
@given(seed=st.integers(0, 1 << 30), rows=st.integers(1, 5), vocab=st.sampled_from(VOCABS))
def test_what_stays_and_the_token_are_the_rules(seed, rows, vocab):
    logits, batch = mixture(seed, rows, vocab)
    assert drawn(logits, batch).tolist() == reference.draw(logits, batch).tolist()
    weights = sampling_search.kept_weights(logits, settings_of(batch, CPU))
    expected = reference.filtered_weights(logits, batch)
    shares = weights.double() / weights.sum(dim=1, keepdim=True)
    torch.testing.assert_close(shares, expected / expected.sum(dim=1, keepdim=True), atol=1e-12, rtol=1e-9)


@settings(max_examples=20, deadline=None)
@given(
    st.lists(st.floats(width=32, allow_nan=False) | st.sampled_from([0.0, -0.0, math.inf, -math.inf]), min_size=1),
    st.data(),
)
def test_the_kth_largest_is_found_by_digits(values, data):
    k = data.draw(st.integers(1, len(values)))
    places = ordered_places(torch.tensor([values], dtype=torch.float32))
    assert places[0].argsort(stable=True).tolist() == torch.tensor(values).argsort(stable=True).tolist()
    ones = torch.ones(1, len(values), dtype=torch.int64)
    least, above = least_kept(places, 32, ones, torch.tensor([[k]]))
    assert least.item() == places[0].sort(descending=True).values[k - 1]
    assert above.item() == int((places > least).sum())


def test_of_equal_ones_at_the_edge_of_top_p_the_lowest_ids_stay():
    logits = torch.zeros(1, 10)
    logits[0, 7] = 1.0
    batch = SamplingBatch(*(torch.tensor([x]) for x in (1.0, 0, 0.5, 0.0)), torch.tensor([0.999], dtype=torch.float64))
    kept = sampling_search.kept_weights(logits, settings_of(batch, CPU)).nonzero()[:, 1].tolist()
    assert kept == [0, 1, 2, 3, 7]  # e / (e + 9) = 0.232, and 0.085 each
    assert drawn(logits, batch).tolist() == [7]


def test_a_number_just_below_one_draws_a_token_that_stays():
    logits = torch.full((1, 130_000), -math.inf)
    logits[0, [3, 60]] = 0.0
    batch = SamplingBatch(
        *(torch.tensor([x]) for x in (1.0, 0, 1.0, 0.0)), torch.tensor([1 - 2**-53], dtype=torch.float64)
    )
    assert drawn(logits, batch).tolist() == [60]


def test_rows_that_are_no_numbers_crash_nothing():
    logits = torch.randn(4, 500)
    logits[0, ::7], logits[1], logits[2] = math.nan, math.nan, -math.inf
    logits[3, [4, 9]] = math.inf
    _, batch = mixture(0, 4, 500)
    tokens = drawn(logits, dataclasses.replace(batch, temperature=torch.ones(4)))
    assert ((tokens >= 0) & (tokens < 500)).all() and tokens[3] in (4, 9)


def test_a_wrong_rule_is_seen():
    """The control: a k that is off by one, or a share by 1 %, keeps other tokens."""
    off_k, off_p = 0, 0
    for seed in range(0, 12, 2):
        logits, batch = mixture(seed, 9, 257)
        right = reference.filtered_weights(logits, batch) > 0
        for change in ({"top_k": batch.top_k + (batch.top_k > 0)}, {"top_p": batch.top_p + 0.01}):
            found = sampling_search.kept_weights(logits, settings_of(dataclasses.replace(batch, **change), CPU)) > 0
            off_k += "top_k" in change and not torch.equal(found, right)
            off_p += "top_p" in change and not torch.equal(found, right)
    assert off_k > 1 and off_p > 1


def test_settings_are_moved_once_for_batches_that_share_them():
    last, (_, batch) = SettingsCache(CPU), mixture(0, 4, 31)
    first = last.of(batch)
    again = SamplingBatch(batch.temperature, batch.top_k, batch.top_p, batch.min_p, torch.rand(4, dtype=torch.float64))
    assert last.of(again) is first
    other = SamplingBatch(batch.temperature, batch.top_k.clone(), batch.top_p, batch.min_p, batch.uniform)
    assert last.of(other) is not first
