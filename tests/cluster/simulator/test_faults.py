"""What breaks in a simulated cluster, and that its requests come through where production's would."""

import pytest

from kvrelay import types
from tests.cluster.simulator.simulator_cases import (
    SETTINGS,
    chats,
    entry,
    everything_is_given_back,
    profile,
    simulate,
    simulation,
)

pytestmark = pytest.mark.pure


def fault(kind, at_s, target, for_s=None, **fields):
    return {"kind": kind, "at_s": at_s, "target": target, "for_s": for_s} | fields


def test_a_crash_of_a_decode_worker_costs_attempts_and_no_request():
    sim = simulate(chats(200), faults=[fault("crash", 3.0, "d0", 2.0)], detect_s=0.1)
    assert sim.tally.outcomes == {"done": 200}
    assert sim.tally.num_attempts > 200 and sim.summary()["retries"] > 0
    everything_is_given_back(sim)


def test_a_stream_goes_on_elsewhere_with_what_it_had():
    load = [entry(0.0, 100, 400)]
    whole = simulate(load).tally.tpot_s[0] * 399
    sim = simulate(load, faults=[fault("crash", 2.0, "d0")], detect_s=0.0)
    assert sim.tally.outcomes == {"done": 1} and sim.tally.num_attempts == 2
    assert whole < sim.tally.tpot_s[0] * 399 < whole + 0.5  # not begun anew: that would be 2 s more


def test_a_crash_of_a_prefill_worker_costs_attempts_and_no_request():
    sim = simulate(chats(200, every_s=0.02), faults=[fault("crash", 1.0, "p1", 2.0)], detect_s=0.1)
    assert sim.tally.outcomes == {"done": 200} and sim.summary()["retries"] > 0
    everything_is_given_back(sim)


@pytest.mark.parametrize("target", ["p0", "p1"])
def test_a_prefill_worker_may_crash_at_any_moment_of_a_request(target):
    """Messages take 0.2 s: also while the decode worker asks it to confirm what it has read."""
    for tenths in range(5, 35):
        faults = [fault("crash", tenths / 10, target)]
        sim = simulate([entry(0.5), entry(0.6)], faults=faults, message_s=0.2, detect_s=0.5)
        assert sim.tally.outcomes == {"done": 2}
        everything_is_given_back(sim)


def test_without_any_decode_worker_left_requests_fail():
    sim = simulate(chats(100), faults=[fault("crash", 2.0, "d0"), fault("crash", 2.0, "d1")], detect_s=0.0)
    assert sim.tally.outcomes["done"] < 60 and sim.tally.outcomes["error"] > 20
    everything_is_given_back(sim)


def test_who_comes_back_is_used_again_with_an_empty_cache():
    sim = simulate(chats(300), faults=[fault("crash", 2.0, "d0", 1.0)], detect_s=0.1)
    old, new = [worker for worker in sim.workers if worker.worker_id == "d0"]
    assert not old.is_alive and old.info.epoch != new.info.epoch
    assert new.engine.num_steps > 100
    assert sim.summary()["workers"]["decode"]["started"] == 3


def test_a_short_freeze_only_takes_time():
    load = [entry(0.0, 100, 100)]
    plain = simulate(load)
    sim = simulate(load, faults=[fault("freeze", 0.5, "d0", 1.0)])
    assert sim.tally.num_attempts == 1
    assert sim.tally.tpot_s[0] * 99 == pytest.approx(plain.tally.tpot_s[0] * 99 + 1.0, abs=0.05)
    everything_is_given_back(sim)


def test_a_long_freeze_is_given_up_and_the_worker_taken_again_when_it_thaws():
    sim = simulate(chats(300), faults=[fault("freeze", 3.0, "d0", 4.0)])
    assert sim.tally.outcomes == {"done": 300} and sim.summary()["retries"] > 0
    everything_is_given_back(sim)
    steps = next(worker for worker in sim.workers if worker.worker_id == "d0").engine.num_steps
    assert steps > 200 and len(sim.workers) == 4


def test_a_slow_worker_is_slow_for_as_long_as_it_is():
    load = [entry(0.0, 100, 100)]
    plain, slow = simulate(load), simulate(load, faults=[fault("slow", 0.0, "d0", share=0.25)])
    assert slow.tally.tpot_s[0] == pytest.approx(4 * plain.tally.tpot_s[0], rel=0.05)
    assert simulate(load, faults=[fault("slow", 0.0, "d0", 0.2, share=0.25)]).tally.tpot_s[0] < slow.tally.tpot_s[0] / 2


def test_a_slow_link_is_waited_for():
    load = [entry(0.5, 1280, 2)]
    plain, slow = (
        simulate(load),
        simulate(load, faults=[fault("link", 0.1, "p0", share=0.1), fault("link", 0.1, "p1", share=0.1)]),
    )
    assert slow.tally.tpot_s[0] > 3 * plain.tally.tpot_s[0]


@pytest.mark.slow
def test_a_restarted_ingress_loses_its_streams_and_knows_the_caches_again():
    sim = simulate(chats(300), ingress=2, faults=[fault("ingress_restart", 5.0, "i0")])
    assert 0 < sim.tally.outcomes["error"] < 50 and sim.tally.outcomes["done"] > 250
    sim.clock.run(sim.clock.now_s + 1.0)
    one, other = (
        {view.worker_id: view.indexed_blocks for view in ingress.router.workers()} for ingress in sim.ingresses
    )
    assert one == other
    everything_is_given_back(sim)


@pytest.mark.slow
def test_many_crashes_are_survived_and_the_same_each_time():
    crashes = [fault("crash", 1.5 * number + 1.0, f"{'pd'[number % 2]}{number % 3}", 1.0) for number in range(10)]
    fields = {"faults": crashes, "detect_s": 0.1, "prefill": 3, "decode": 3}
    sim = simulate(chats(400), **fields)
    assert sim.faults.happened["crash"] >= 3
    assert sim.tally.outcomes["done"] > 380
    assert sim.summary() == simulate(chats(400), **fields).summary()
    everything_is_given_back(sim)


def test_a_request_that_takes_too_long_is_ended():
    settings = SETTINGS | {"serve": {"request_timeout_s": 1.0}}
    sim = simulate([entry(0.0, 100, 400)], settings=settings)
    assert sim.tally.outcomes == {"error": 1}
    everything_is_given_back(sim)


def test_a_full_line_turns_away_and_another_worker_is_tried(monkeypatch):
    monkeypatch.setattr(types, "MAX_WAITING", 4)
    sim = simulation(chats(60, every_s=0.001), workers=profile(num_blocks=40), settings=SETTINGS).run()
    assert sim.tally.outcomes["overloaded"] > 0 and sim.tally.outcomes["done"] > 0
    everything_is_given_back(sim)


def test_a_prefill_worker_that_went_before_it_was_asked_is_replaced():
    """It crashes while the request is in line for blocks at the only decode worker."""
    load = [entry(0.0, 1500, 60), *(entry(0.01 * index, 1500, 60) for index in range(1, 8))]
    sim = simulate(
        load,
        decode=1,
        workers=profile(num_blocks=200),
        faults=[fault("crash", 0.5, "p0"), fault("crash", 0.5, "p1", 0.5)],
        detect_s=0.0,
    )
    assert sim.tally.outcomes == {"done": 8} and sim.summary()["retries"] > 0
    everything_is_given_back(sim)
