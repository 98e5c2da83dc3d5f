"""Penalties, bias and bans of many rows at once equal a loop over tokens; log-probabilities equal a softmax's."""

import math
from collections import Counter

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from kvrelay.kernels.common.logits import LogitChanges, packed_log_probabilities, unpacked

VOCAB = 12
TOKENS = st.lists(st.integers(0, VOCAB - 1), max_size=9)
PENALTY = st.sampled_from([1.0, 1.3, 0.8])
WISHES = st.tuples(
    TOKENS,
    PENALTY,
    st.sampled_from([0.0, 0.7]),
    st.sampled_from([0.0, -0.4]),
    st.dictionaries(st.integers(0, VOCAB - 1), st.sampled_from([-2.0, 0.5]), max_size=4),
    TOKENS,
)


def by_hand(row, wish):
    """One row as a list, changed token by token."""
    seen, repetition, presence, frequency, bias, banned = wish
    for token in set(seen):
        row[token] = row[token] / repetition if row[token] > 0 else row[token] * repetition
    for token, count in Counter(seen).items():
        row[token] -= presence + frequency * count
    for token, value in bias.items():
        row[token] += value
    for token in banned:
        row[token] = -math.inf
    return row


def noted(wishes):
    changes = LogitChanges(VOCAB)
    for row, (seen, repetition, presence, frequency, bias, banned) in wishes.items():
        if seen:
            changes.penalise(row, seen, repetition)
            changes.lower(row, seen, presence, frequency)
        if bias:
            changes.bias(row, bias)
        changes.ban(row, banned)
    return changes


@settings(max_examples=25, deadline=None)
@given(st.dictionaries(st.integers(0, 4), WISHES, max_size=4), st.integers(0, 1000))
def test_rows_are_changed_as_by_hand_and_others_stay(wishes, seed):
    logits = torch.randn(5, VOCAB, generator=torch.Generator().manual_seed(seed))
    before = logits.clone()
    found = noted(wishes).applied(logits)
    expected = [by_hand(row, wishes[i]) if i in wishes else row for i, row in enumerate(logits.tolist())]
    torch.testing.assert_close(found, torch.tensor(expected), atol=1e-6, rtol=1e-5)
    assert torch.equal(logits, before)


def test_logits_that_nothing_changes_are_not_copied():
    logits = torch.randn(2, VOCAB)
    assert noted({}).applied(logits) is logits
    assert noted({0: ([], 1.0, 0.0, 0.0, {}, [3])}).applied(logits) is not logits


@pytest.mark.parametrize("most", [0, 1, 20])
def test_log_probabilities_equal_a_softmax(most):
    logits = 5 * torch.randn(4, 300, generator=torch.Generator().manual_seed(1))
    logits[2, 7] = -math.inf
    expected = logits.double().log_softmax(dim=1)
    found = unpacked(packed_log_probabilities(logits, torch.tensor([0, 299, 7, 5]), range(4), most))
    for row, token in enumerate([0, 299, 7, 5]):
        assert found.own[row] == pytest.approx(float(expected[row, token]), abs=1e-5)
        order = expected[row].sort(descending=True)
        assert found.top_ids[row] == order.indices[:most].tolist()
        assert found.top[row] == pytest.approx(order.values[:most].tolist(), abs=1e-5)
    assert found.own[2] == -math.inf
