"""What a worker says of its speed: a moving average that its first steps do not spoil."""

import pytest

from kvrelay.engine.step.reports import FIRST_STEPS, StepTiming

pytestmark = pytest.mark.pure


def test_a_first_step_that_is_far_slower_counts_for_nothing():
    speed = StepTiming()
    speed.observe(1, 1, 1.4)
    assert speed.decode_step_s == speed.step_s == 0.0
    speed.observe(1, 1, 0.01)
    assert speed.decode_step_s == speed.step_s == 0.01


def test_of_the_next_ones_the_fastest_counts():
    speed = StepTiming()
    for seconds in (1.4, 0.3, 0.01):
        speed.observe(1, 1, seconds)
    assert speed.decode_step_s == 0.01


def test_a_first_prompt_that_is_far_slower_counts_for_nothing():
    speed = StepTiming()
    speed.observe(512, 0, 5.12)
    assert speed.prefill_tokens_per_s == 0.0
    speed.observe(512, 0, 0.256)
    assert speed.prefill_tokens_per_s == pytest.approx(2000)


def test_later_ones_are_averaged_whichever_way_they_go():
    speed = StepTiming()
    for _ in range(FIRST_STEPS):
        speed.observe(1, 1, 0.02)
    speed.observe(1, 1, 0.01)
    assert speed.decode_step_s == pytest.approx(0.018)
    speed.observe(1, 1, 0.03)
    assert 0.018 < speed.decode_step_s < 0.021


def test_a_first_step_that_is_fast_is_no_more_than_a_beginning():
    speed = StepTiming()
    speed.observe(1, 1, 0.001)
    speed.observe(1, 1, 0.001)
    for _ in range(60):
        speed.observe(8, 8, 0.02)
    assert speed.decode_step_s == pytest.approx(0.02, rel=1e-3)


def test_many_equal_steps_at_once_are_as_many_one_by_one():
    one, other = StepTiming(), StepTiming()
    one.observe(4, 4, 0.02, 10)
    for _ in range(10):
        other.observe(4, 4, 0.02)
    assert one.decode_step_s == pytest.approx(other.decode_step_s) and one.num_decode_steps == other.num_decode_steps


def test_a_prompts_short_last_chunk_counts_for_little_of_its_speed():
    speed = StepTiming()
    for _ in range(40):
        speed.observe(2000, 0, 0.1)
        speed.observe(100, 0, 0.02)
    assert speed.prefill_tokens_per_s == pytest.approx(2100 / 0.12, rel=0.05)  # an average of both rates: 12,500
