"""Workers that come and go in a simulated cluster, by plan or by the planner."""

from itertools import pairwise

import pytest

from kvrelay.cluster.autoscaling import worker_model
from kvrelay.cluster.autoscaling.worker_model import model_of
from kvrelay.router.planning import capacity
from kvrelay.router.planning.types import PlanningTarget, SpeedCurve, Workload
from tests.cluster.simulator.simulator_cases import SETTINGS, chats, entry, everything_is_given_back, profile, simulate

pytestmark = pytest.mark.pure


def counts(sim, role):
    return [wanted for _, name, wanted in sim.fleet.changes if name == role]


@pytest.mark.slow
def test_workers_that_are_added_serve_when_they_have_started():
    load = chats(400, every_s=0.02)
    few = simulate(load, prefill=1, decode=1)
    more = simulate(load, prefill=1, decode=1, scale=[{"at_s": 0.5, "prefill": 4, "decode": 3}], start_s=1.0)
    assert more.tally.outcomes == {"done": 400}
    assert sum(more.tally.ttft_s) < 0.7 * sum(few.tally.ttft_s)
    new = [worker for worker in more.workers if worker.worker_id not in ("p0", "d0")]
    assert [worker.started_s for worker in new] == [1.5] * 5
    assert all(worker.engine.num_steps for worker in new)
    everything_is_given_back(more)


def test_who_is_given_up_finishes_what_it_has_and_no_request_is_tried_twice():
    sim = simulate(chats(300), prefill=3, decode=3, scale=[{"at_s": 4.0, "prefill": 1, "decode": 1}])
    assert sim.tally.outcomes == {"done": 300} and sim.tally.num_attempts == 300
    stopped = [worker for worker in sim.workers if not worker.is_alive]
    assert len(stopped) == 4 and all(worker.stopped_s >= 4.0 for worker in stopped)
    everything_is_given_back(sim)


def test_who_does_not_finish_in_time_goes_and_its_streams_go_on_elsewhere():
    load = [entry(0.1 * index, 100, 400) for index in range(8)]
    sim = simulate(load, scale=[{"at_s": 2.0, "decode": 1}], drain_s=1.0)
    assert sim.tally.outcomes == {"done": 8} and sim.tally.num_attempts > 8
    everything_is_given_back(sim)


def test_a_start_that_is_no_longer_wanted_is_not_made():
    sim = simulate(chats(200), scale=[{"at_s": 1.0, "decode": 5}, {"at_s": 1.5, "decode": 2}], start_s=2.0)
    assert len(sim.workers) == 4


def test_worker_hours_are_paid_from_the_start_on():
    sim = simulate([entry(0.0), entry(36.0)], scale=[{"at_s": 18.0, "decode": 3}], start_s=9.0)
    assert sim.summary()["worker_hours"] == (4 * sim.ended_s + sim.ended_s - 18.0) / 3600


def planned(**fields):
    own = {"mode": "auto", "max_prefill": 6, "max_decode": 6, "scale_down_delay_s": 20.0} | fields
    return SETTINGS | {"planner": own}


@pytest.mark.slow
def test_the_planner_adds_workers_for_a_rush_and_gives_them_up_after_it(monkeypatch):
    monkeypatch.setattr(worker_model, "INTERVAL_S", 2.0)
    quiet = [entry(0.5 * index, 600, 60) for index in range(40)]
    rush = [entry(20.0 + 0.01 * index, 600, 60) for index in range(2000)]
    after = [entry(41.0 + 0.5 * index, 600, 60) for index in range(160)]
    settings = planned() | {"router": SETTINGS["router"] | {"max_queue_s": 120}}  # until the new workers are there
    sim = simulate(quiet + rush + after, prefill=1, decode=1, settings=settings, start_s=1.0)
    assert max(counts(sim, "prefill")) >= 3
    assert counts(sim, "prefill")[-1] < max(counts(sim, "prefill"))
    assert sim.tally.outcomes["done"] >= 2150  # reservations may time out before the new workers are there
    assert sum(sim.tally.outcomes.values()) == 2200 and set(sim.tally.outcomes) <= {"done", "overloaded"}
    times = [at_s for at_s, *_ in sim.fleet.changes]
    assert all(later >= earlier for earlier, later in pairwise(times))
    everything_is_given_back(sim)


def test_the_planner_adds_aggregated_workers_for_a_rush_and_gives_them_up_after_it(monkeypatch):
    monkeypatch.setattr(worker_model, "INTERVAL_S", 2.0)
    quiet = [entry(0.5 * index, 600, 60) for index in range(40)]
    rush = [entry(20.0 + 0.02 * index, 600, 60) for index in range(700)]
    after = [entry(35.0 + 0.5 * index, 600, 60) for index in range(160)]
    settings = planned() | {"router": SETTINGS["router"] | {"max_queue_s": 120}}
    sim = simulate(quiet + rush + after, prefill=0, decode=1, settings=settings, start_s=1.0)
    assert not counts(sim, "prefill") and not sim.fleet.num_switches
    assert 3 <= max(counts(sim, "decode")) <= 6 and counts(sim, "decode")[-1] == 1
    assert sum(sim.tally.outcomes.values()) == 900 and sim.tally.outcomes["done"] >= 860
    everything_is_given_back(sim)


@pytest.mark.parametrize(("rate", "needed"), [(6.0, 1), (8.0, 2)])
def test_long_prompts_of_short_answers_need_more_decode_workers_where_the_planner_says_so(rate, needed):
    """A decode worker holds a place for each prompt while that is computed, 1.2 s of these, and has eight."""
    slow = SpeedCurve(overhead_s=0.0, weights_s=0.01, token_s=0.002, pair_s=0.0, context_s=0.0)
    sizes = {"max_running": 8, "num_blocks": 4096, "token_budget": 512, "link_bytes_per_s": 1e9}
    worker, load = profile(prefill=slow, decode=slow, **sizes), Workload(rate, 600, 2, input_cv2=0.0)
    target = PlanningTarget(3.0, 0.1)
    assert capacity.workers_for(capacity.decode_fits, load, model_of(worker), target, 9) == needed
    entries = [entry(index / rate, 600, 2) for index in range(200)]
    runs = [simulate(entries, workers=worker, prefill=12, decode=count, max_tokens=2048) for count in (1, 2)]
    late = [sum(ttft_s > target.ttft_s for ttft_s in sim.tally.ttft_s) for sim in runs]
    assert late[needed - 1] == 0 and all(number > 20 for number in late[: needed - 1])


@pytest.mark.parametrize("may_switch", [True, False])
def test_a_worker_changes_its_role_before_one_is_started(monkeypatch, may_switch):
    monkeypatch.setattr(worker_model, "INTERVAL_S", 2.0)
    prompts = [entry(0.05 * index, 900, 2) for index in range(800)]
    answers = [entry(40.0 + 0.1 * index, 20, 400) for index in range(800)]
    own = planned(max_workers=4, switch_roles=may_switch)
    sim = simulate(prompts + answers, prefill=2, decode=2, settings=own, start_s=10.0, max_tokens=1024)
    assert (sim.summary()["switches"] > 0) is may_switch
    started_as = dict(sim.scenario.worker_ids())
    changed = [one for one in sim.workers if started_as.get(one.worker_id, one.role) is not one.role]
    assert bool(changed) is may_switch
    assert all(one.engine.num_steps for one in changed)
    assert sum(sim.tally.outcomes.values()) == 1600 and set(sim.tally.outcomes) <= {"done", "overloaded"}
    everything_is_given_back(sim)


def test_without_the_planner_counts_stay():
    assert simulate(chats(100)).fleet.changes == []
