"""Prompt lookup finds what a plain search finds; drafts are made while they pay, and no longer."""

import random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvrelay.engine.speculation.draft_choice import Acceptance, Speculation, SpeculationTimes, expected
from kvrelay.engine.speculation.speculation import PromptLookup

pytestmark = pytest.mark.pure


def plainly(tokens: list[int], most: int, longest: int, shortest: int) -> list[int]:
    for size in range(min(longest, len(tokens) - 1), shortest - 1, -1):
        for start in range(len(tokens) - size - 1, -1, -1):
            if tokens[start : start + size] == tokens[-size:]:
                text = tokens[start + size :]
                return [text[index % len(text)] for index in range(most)]
    return []


@given(st.lists(st.sampled_from([0, 1, 255, 256, 257, 65536, 1 << 24]), min_size=1, max_size=40), st.integers(0, 6))
def test_a_draft_is_what_a_plain_search_finds_while_the_text_grows(tokens, most):
    lookup = PromptLookup()
    for end in range(1, len(tokens) + 1):
        assert lookup.draft(tokens[:end], most) == (plainly(tokens[:end], most, 4, 2) if most else [])


def test_bytes_that_straddle_tokens_are_no_match():
    shifted = [0x00000100, 0x00000200, 0x00000300, 7, 0x00010000, 0x00020000, 9, 0x00000001, 0x00000002]
    assert PromptLookup().draft(shifted, 3) == plainly(shifted, 3, 4, 2) == []


def test_what_repeats_goes_on_with_its_period():
    assert PromptLookup().draft([5, 1, 2, 3, 1, 2, 3, 1, 2, 3], 5) == [1, 2, 3, 1, 2]


def test_longer_matches_come_first_then_later_ones(monkeypatch):
    text = [1, 2, 3, 8, 9, 2, 3, 7, 1, 2, 3]
    assert PromptLookup().draft(text, 1) == [8]
    monkeypatch.setattr("kvrelay.engine.speculation.speculation.LONGEST", 2)
    assert PromptLookup().draft(text, 1) == [7]


def test_behind_a_wrong_token_nothing_is_learned():
    one = Acceptance()
    one.observe(0, 8)
    assert (one.accepted, one.drafted) == (0, 1)
    one.observe(8, 8)
    assert one.accepted == 8 and one.drafted == pytest.approx(8.9)


def test_the_fit_finds_what_a_draft_adds():
    times, chance = SpeculationTimes(), random.Random(1)
    times.observe(1, 0, 0.020)
    for _ in range(200):
        count = chance.randint(1, 8)
        times.observe(1, count, 0.020 + 0.003 + 0.001 * count)
    fixed, each = times.extra(1)
    assert fixed == pytest.approx(0.003, rel=0.01) and each == pytest.approx(0.001, rel=0.01)


def test_plain_steps_are_seen_before_anything_is_drafted_and_a_slow_one_does_not_count():
    speculation = Speculation(most=8)
    for seconds in (0.5, 0.02, 0.021):
        assert not speculation.begins(1)
        speculation.times.observe(1, 0, seconds)
    assert speculation.begins(1) and not speculation.begins(2)
    assert speculation.times.plain(1) == 0.021
    for seconds in (9.0, 0.03, 0.03, 0.03):
        speculation.times.observe(1, 0, seconds)
    assert speculation.times.plain(1) == 0.03


def test_a_fit_from_one_length_charges_all_to_the_tokens():
    times = SpeculationTimes()
    times.observe(4, 0, 0.010)
    for _ in range(10):
        times.observe(4, 5, 0.020)
    assert times.extra(1) is None and times.extra(4) == (0.0, pytest.approx(0.002))


def lengths_of(speculation: Speculation, each: list[Acceptance]) -> list[int]:
    """Of a step of all of these."""
    return speculation.lengths(len(each), each) if speculation.begins(len(each)) else [0] * len(each)


def run(
    rate: float, *, sequences: int, token_s: float, fixed_s: float = 0.002, steps: int = 400
) -> tuple[float, float]:
    """(tokens per second, drafted tokens per step) of a device that takes so long, with drafts that are so often
    right.
    """
    speculation, chance = Speculation(most=8), random.Random(3)
    each = [Acceptance() for _ in range(sequences)]
    tokens, clock, drafted = 0, 0.0, 0
    for step in range(steps):
        lengths = lengths_of(speculation, each)
        seconds = 0.020 + (fixed_s + token_s * sum(lengths) if any(lengths) else 0.0)
        speculation.times.observe(sequences, sum(lengths), seconds)
        for acceptance, length in zip(each, lengths, strict=True):
            kept = next((index for index in range(length) if chance.random() >= rate), length)
            tokens += 1 + kept
            if length:
                speculation.observe(acceptance, kept, length)
        if step >= steps // 2:
            clock, drafted = clock + seconds, drafted + sum(lengths)
        else:
            tokens = 0
    return tokens / clock, drafted / (steps - steps // 2)


def test_good_drafts_on_an_idle_device_are_long_and_bring_much():
    speed, drafted = run(0.9, sequences=1, token_s=0.0005)
    assert drafted > 5 and speed > 3.0 * 1 / 0.020


@pytest.mark.parametrize(
    ("rate", "sequences", "token_s"),
    [(0.05, 1, 0.002), (0.9, 16, 0.0030), (0.3, 8, 0.0020)],
    ids=["bad", "busy", "both"],
)
def test_drafts_that_do_not_pay_stop_and_cost_next_to_nothing(rate, sequences, token_s):
    speed, drafted = run(rate, sequences=sequences, token_s=token_s)
    assert drafted < 0.6 and speed > 0.97 * sequences / 0.020


def test_a_step_that_does_not_begin_is_one_in_which_no_draft_would_have_paid():
    """However good: asked all the same, it gives none, but for the plain steps and those whose time is not known."""
    fine = [Acceptance(accepted=1e6, drafted=1e6) for _ in range(16)]
    for token_s, begins in ((0.0005, True), (0.0009, True), (0.0010, False), (0.003, False)):
        speculation = Speculation(most=8)
        assert not speculation.begins(16)
        for length in (0, 0, 0, 8, 8, 3, 40):
            speculation.times.observe(16, length, 0.020 + token_s * length)
        assert speculation.begins(16) is begins
        assert any(speculation.lengths(16, fine)) is begins
    tries = [speculation.begins(16) for _ in range(64)]
    assert sum(tries) == 2  # of four tries two fall on steps that are to be plain


def test_drafting_begins_again_when_it_pays_again():
    speculation, one = Speculation(most=8), Acceptance()
    for phase, rate in enumerate((0, 1)):
        total = 0
        for _ in range(300):
            (length,) = lengths_of(speculation, [one])
            speculation.times.observe(1, length, 0.020 + 0.002 * length)
            if length:
                speculation.observe(one, length * rate, length)
            total += length
        assert (total > 600) == bool(phase)


@pytest.mark.parametrize("length", [0, 1, 5])
def test_expected_is_the_sum_of_the_chances(length):
    kept = [
        min(length, next((i for i in range(length) if random.Random(n * 31 + i).random() >= 0.6), length))
        for n in range(20000)
    ]
    assert expected(0.6, length) == pytest.approx(sum(kept) / len(kept), abs=0.05)
