"""A decode worker's last steps were slow, then it had nothing to do: that is held against it for a while, not for
ever.
"""

import pytest

from kvrelay.plane.reports import LoadReport
from tests.router.decision.test_placement_rules import ask, cluster

pytestmark = pytest.mark.pure


TARGET = {"policy": "joint"}


def two_workers(**settings):
    return cluster(prefill=["p"], decode=["slow", "fast"], **TARGET, **settings)


def report(router, worker_id, seq, now_s, *, step_s, running=0):
    router.apply_load(
        worker_id,
        LoadReport(seq=seq, running=running, free_blocks=1000, total_blocks=1000, decode_step_s=step_s, steps=10 * seq),
        now_s,
    )


def chosen(router, now_s, count=12):
    """Of so many requests, all of which stay."""
    return {
        router.select_and_reserve(ask(f"r{number}", prompt=f"prompt {number}"), now_s).decode for number in range(count)
    }


def heartbeats(router, first_s, last_s, *, running=0):
    for beat in range(int(first_s), int(last_s) + 1, 2):
        report(router, "slow", beat, float(beat), step_s=0.4, running=running)
        report(router, "fast", beat, float(beat), step_s=0.02)


def test_slow_steps_are_held_against_a_worker_at_first():
    router = two_workers()
    heartbeats(router, 2, 2)
    assert chosen(router, 2.0) == {"fast"}


def test_after_a_rest_it_is_tried_again():
    router = two_workers()
    heartbeats(router, 2, 60)
    assert "slow" in chosen(router, 60.0)


def test_while_it_steps_slowly_it_is_left_alone_however_long():
    router = two_workers()
    heartbeats(router, 2, 60, running=1)
    assert chosen(router, 60.0) == {"fast"}


def test_what_it_shows_then_counts_at_once():
    router = two_workers()
    heartbeats(router, 2, 60)
    report(router, "slow", 62, 62.0, step_s=0.4, running=1)
    report(router, "slow", 64, 64.0, step_s=0.4)
    report(router, "fast", 64, 64.0, step_s=0.02)
    assert chosen(router, 64.0) == {"fast"}
