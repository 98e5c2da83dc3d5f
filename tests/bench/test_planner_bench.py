"""bench/planner/planner.py: how the best static split is searched for, and the reactive contender."""

import math
import random
from itertools import product

import pytest

from bench.planner.loads import made_days
from bench.planner.planner import summary_of
from bench.planner.reactive import DelayedCount, QueueTargets
from bench.planner.runs import Outcome
from bench.planner.search import KEPT, best_of, better, static_counts, static_splits
from kvrelay.router.planning.types import WorkerCounts

pytestmark = pytest.mark.alone


CAME = (100, 100, 100, 100)


def outcome(kept_ttft: list[int], kept_tpot: list[int], hours: float) -> Outcome:
    kept = tuple(map(min, kept_ttft, kept_tpot))
    return Outcome(
        sum(CAME), sum(kept), hours, 0.0, (0, 0), (0, 0), (0, 0), CAME, kept, tuple(kept_ttft), tuple(kept_tpot)
    )


def kept_by(workers: int, needed: float) -> int:
    """Of a hundred: 95 where there are as many as needed, and fewer the more are missing."""
    return round(100 * min(1.0, 1.0 - 0.05 * math.exp(min(needed - workers, 2.9) * 1.2)))


def static(needed: WorkerCounts):
    def run(counts: WorkerCounts) -> Outcome:
        pair = [[kept_by(have, need)] * len(CAME) for have, need in zip(counts, needed, strict=True)]
        return outcome(*pair, float(counts.total))

    return run


@pytest.mark.parametrize("guess", [WorkerCounts(1, 1), WorkerCounts(5, 2), WorkerCounts(12, 12)])
@pytest.mark.parametrize("needed", [WorkerCounts(3, 7), WorkerCounts(6, 2), WorkerCounts(9, 8)])
def test_the_search_finds_the_best_of_all_static_splits(guess: WorkerCounts, needed: WorkerCounts):
    run, ran = static(needed), []
    tried = static_splits(lambda one: ran.append(one) or run(one), guess, 12)  # type: ignore[func-returns-value]
    found = tried[counts := best_of(tried)]
    best = max(
        run(WorkerCounts(*pair)).per_hour
        for pair in product(range(1, 13), repeat=2)
        if run(WorkerCounts(*pair)).kept_share >= KEPT
    )
    assert found == run(counts) and found.kept_share >= KEPT
    assert found.per_hour == best
    assert len(ran) == len(set(ran)) <= 30  # of 144


@pytest.mark.parametrize("guess", [1, 7, 40])
@pytest.mark.parametrize("needed", [1, 7, 24])
def test_the_search_finds_the_fewest_aggregated_workers_that_keep_enough(guess: int, needed: int):
    def run(counts: WorkerCounts) -> Outcome:
        assert counts.prefill == 0
        return outcome([kept_by(counts.decode, needed)] * len(CAME), [100] * len(CAME), float(counts.decode))

    fewest = next(count for count in range(1, 25) if run(WorkerCounts(0, count)).kept_share >= KEPT)
    assert best_of(static_counts(run, guess, 24)) == WorkerCounts(0, fewest)


def test_who_keeps_too_little_is_never_better_however_cheap():
    cheap, dear = outcome([80] * 4, [99] * 4, 1.0), outcome([91] * 4, [99] * 4, 50.0)
    assert better(dear, cheap) and not better(cheap, dear)


def test_ratios_are_of_the_same_day():
    days = [
        {
            "planner": ("", outcome([95] * 4, [99] * 4, hours)),
            "static": ("1 + 1", outcome([95] * 4, [99] * 4, 2 * hours)),
        }
        for hours in (10.0, 70.0)
    ]
    planner, fixed = summary_of("made", days)
    assert planner["over static"] == "2.00 (2.00 to 2.00)" and "over static" not in fixed


def test_a_shorter_day_has_the_same_requests_per_second():
    long, short = (made_days(1, chat_per_s=0.4, agents_per_s=0.2, seed=3, day_s=hours * 3600.0) for hours in (12, 6))
    assert max(one.arrival_s for one in short) < 6 * 3600.0
    assert len(short) == pytest.approx(len(long) / 2, rel=0.2)


def test_a_reactive_count_is_what_ray_serve_decides():
    """Of its default policy's rule for delays, at every decision of a random course."""
    from ray.serve.autoscaling_policy import _apply_delay_logic
    from ray.serve.config import AutoscalingConfig

    usual = AutoscalingConfig()
    own = QueueTargets()
    assert (own.upscale_delay_s, own.downscale_delay_s) == (usual.upscale_delay_s, usual.downscale_delay_s)
    assert own.prefill == own.decode == usual.target_ongoing_requests
    config = AutoscalingConfig(upscale_delay_s=30.0, downscale_delay_s=120.0)
    draw, count, rays, state, course = random.Random(4), DelayedCount(3), 3, {}, []
    wanted = 3
    for number in range(2000):
        if draw.random() < 0.08:
            wanted = draw.randint(1, 8)
        rays, state = _apply_delay_logic(wanted, rays, config, state, 10.0 * number)
        course.append(rays)
        assert count.step(wanted, 10.0 * number, 30.0, 120.0) == rays
    assert len(set(course)) > 4
