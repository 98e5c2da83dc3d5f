"""A draft model drafts for those sequences and that far ahead where it pays, and is next to free where it does not."""

import random
from dataclasses import replace

import pytest

from kvrelay.engine.speculation.draft_choice import (
    Acceptance,
    DraftCandidate,
    DraftModelChoice,
    DraftSource,
    Pass,
    PassTimes,
    Prices,
    Speculation,
    choose,
)

pytestmark = pytest.mark.pure


CHEAP = Prices(fixed=0.05, token=0.02, behind=0.002, one_pass=lambda count: 0.1, near=10)
GOOD = DraftCandidate(rate=0.9, most=8, num_behind=2, num_left=100)


def test_a_good_model_that_is_cheap_drafts_far_ahead():
    assert choose([GOOD], CHEAP, 8) == [8]


def test_a_token_is_drafted_while_its_chance_is_worth_its_pass():
    (length,) = choose([replace(GOOD, rate=0.6)], CHEAP, 8)
    assert 0.6**length > 0.12 > 0.6 ** (length + 1)


@pytest.mark.parametrize(
    ("change", "prices"),
    [
        ({"rate": 0.05}, CHEAP),
        ({}, replace(CHEAP, one_pass=lambda count: 0.95)),
        ({}, replace(CHEAP, token=0.95)),
        ({}, replace(CHEAP, fixed=20.0)),
        ({"most": 0}, CHEAP),
        ({"instead": 6.0}, CHEAP),
    ],
    ids=["bad", "slow model", "busy device", "dear steps", "no room", "its own text says more"],
)
def test_nothing_is_drafted_where_it_does_not_pay(change, prices):
    assert choose([replace(GOOD, **change)], prices, 8) == [0]


def test_sequences_share_the_passes():
    dear = replace(CHEAP, one_pass=lambda count: 1.5)
    assert choose([GOOD], dear, 8) == [0]
    assert choose([GOOD] * 4, dear, 8) == [8] * 4


def test_each_stops_where_its_own_chances_end_and_bad_ones_are_left_out():
    far, near, none = choose([GOOD, replace(GOOD, rate=0.4), replace(GOOD, rate=0.01)], CHEAP, 8)
    assert far == 8 and 0 < near < far and none == 0


def test_a_text_from_which_there_is_a_better_draft_is_left_to_it():
    assert choose([GOOD, replace(GOOD, instead=7.0)], CHEAP, 8) == [8, 0]


def test_a_long_text_is_caught_up_on_while_there_is_enough_left_to_say():
    behind = replace(GOOD, num_behind=2000)
    assert choose([behind], CHEAP, 8) == [8]
    assert choose([replace(behind, num_left=4)], CHEAP, 8) == [0]
    assert choose([replace(behind, num_left=4), GOOD], CHEAP, 8) == [0, 8]


def test_times_of_passes_are_taken_from_the_weights_until_they_are_measured():
    times = PassTimes(share=0.25)
    assert times.one_pass(4, 0.020) == 0.005 and times.behind(1, 0.020) < 0.005
    for _ in range(40):
        times.observe(Pass(4, 4, 0.003), 0.020)
        times.observe(Pass(4, 104, 0.053), 0.020)
    assert times.one_pass(5, 0.020) == pytest.approx(0.003, rel=0.01) and times.one_pass(8, 0.020) == 0.005
    assert times.behind(4, 0.020) == pytest.approx(0.0005, rel=0.01)


def test_a_pause_of_the_machine_is_no_pass():
    times = PassTimes(share=0.25)
    times.observe(Pass(1, 1, 3.0), 0.020)
    assert times.one_pass(1, 0.020) < 0.0063
    times.observe(Pass(1, 101, 90.0), 0.020)
    assert times.behind(1, 0.020) < 0.001


class Device:
    """Steps of some sequences on a device that takes so long, with a model that is right so often. Seconds."""

    def __init__(
        self,
        *,
        sequences: int,
        rate: float,
        pass_s: float,
        token_s: float = 0.0005,
        prompt: int = 200,
        share: float = 0.15,
    ) -> None:
        self.rate, self.pass_s, self.token_s = rate, pass_s, token_s
        self.speculation = Speculation(most=8)
        self.by_model, self.choice = DraftSource(0.7, Acceptance(1.4, 2.0)), DraftModelChoice(share)
        self.each = [Acceptance() for _ in range(sequences)]
        self.behind = [prompt] * sequences
        self.chance, self.left = random.Random(3), 1000
        self.num_tokens = self.num_drafted = self.num_caught_up = 0

    def step(self) -> float:
        """One step; what it takes."""
        count = len(self.each)
        lengths = self._lengths(count)
        passes = self._passes(lengths)
        if (plain_s := self.speculation.times.plain(count)) is not None:
            self.choice.observe_passes(passes, plain_s)
        lengths = [length if behind <= 512 else 0 for length, behind in zip(lengths, self.behind, strict=True)]
        step_s = 0.020 + (0.002 + self.token_s * sum(lengths) if any(lengths) else 0.0)
        self.speculation.times.observe(count, sum(lengths), step_s)
        total_s = step_s + sum(one.seconds for one in passes)
        self.choice.observe_step(total_s)
        for index, length in enumerate(lengths):
            kept = next((at for at in range(length) if self.chance.random() >= self.rate), length)
            if length:
                self.by_model.observe(self.each[index], kept, length)
                self.behind[index] = 1 + (kept == length)
            else:
                self.behind[index] += 1
            self.num_tokens += 1 + kept
            self.num_drafted += length
        return total_s

    def _lengths(self, count: int) -> list[int]:
        if not self.speculation.begins(count):
            return [0] * count
        candidates = [
            DraftCandidate(self.by_model.rate(one), 8, behind, self.left)
            for one, behind in zip(self.each, self.behind, strict=True)
        ]
        times = self.speculation.times
        return self.choice.lengths(
            candidates, 8, count, times.plain(count), times.extra(count), has_drafts=False, chunk=512
        )

    def _passes(self, lengths: list[int]) -> list[Pass]:
        rows = [index for index, length in enumerate(lengths) if length]
        if not rows:
            return []
        tokens = sum(min(self.behind[index], 512) for index in rows)
        self.num_caught_up += tokens - len(rows)
        for index in rows:
            self.behind[index] = max(1, self.behind[index] - 512) if self.behind[index] > 512 else self.behind[index]
        first = Pass(len(rows), tokens, self.pass_s + self.pass_s / 20 * (tokens - len(rows)))
        return [first] + [Pass(len(rows), len(rows), self.pass_s)] * (max(lengths) - 1)


def speed(device: Device, steps: int = 600) -> float:
    """Tokens per second of the second half."""
    for _ in range(steps // 2):
        device.step()
    device.num_tokens = device.num_drafted = 0
    total_s = sum(device.step() for _ in range(steps - steps // 2))
    return device.num_tokens / total_s


@pytest.mark.parametrize(("sequences", "least"), [(1, 1.9), (4, 1.9)])
def test_a_good_small_model_brings_much(sequences, least):
    device = Device(sequences=sequences, rate=0.9, pass_s=0.002)
    assert speed(device) > least * sequences / 0.020


@pytest.mark.parametrize(
    ("rate", "pass_s", "sequences", "token_s"),
    [(0.1, 0.002, 1, 0.0005), (0.9, 0.019, 1, 0.0005), (0.9, 0.002, 16, 0.003), (0.5, 0.008, 4, 0.0005)],
    ids=["bad", "as slow as the other", "busy", "both"],
)
def test_a_model_that_does_not_pay_stops_and_costs_next_to_nothing(rate, pass_s, sequences, token_s):
    device = Device(sequences=sequences, rate=rate, pass_s=pass_s, token_s=token_s)
    assert speed(device) > 0.95 * sequences / 0.020
    assert device.num_drafted < 0.3 * 300


def test_drafting_begins_again_when_the_model_gets_better():
    device = Device(sequences=1, rate=0.0, pass_s=0.002)
    assert speed(device) < 1.02 / 0.020
    device.rate = 0.95
    assert speed(device, steps=2000) > 1.8 / 0.020


def test_what_is_about_to_end_is_not_caught_up_on():
    device = Device(sequences=2, rate=0.9, pass_s=0.004, prompt=5000)
    device.speculation.times.observe(2, 0, 0.020)
    for _ in range(4):
        device.speculation.times.observe(2, 6, 0.025)
    device.left = 3
    for _ in range(8):
        device.step()
    assert device.num_caught_up == 0
    device.left = 1000
    for _ in range(30):
        device.step()
    assert device.num_caught_up > 9000 and device.num_drafted > 50
