"""Which workers the planner switches, starts and stops, so that each role has its count."""

import itertools

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvrelay.router.planning.damping import Damper
from kvrelay.router.planning.roles import PlacedWorker, change_notice, change_problem, role_plan
from kvrelay.router.planning.types import CountLimits, WorkerCounts
from kvrelay.types import Role

pytestmark = pytest.mark.pure

P, D = Role.PREFILL, Role.DECODE
WIDE = CountLimits()


@pytest.mark.parametrize(
    ("roles", "worker", "role", "problem"),
    [
        ("p1=prefill d1=decode d2=decode", "d1", "prefill", None),
        ("p1=prefill d1=decode d2=decode", "d1", "both", None),
        ("p1=prefill d1=decode", "p1", "decode", None),  # decode workers compute prompts too
        ("p1=prefill d1=decode", "d1", "both", None),
        ("p1=prefill d1=decode", "d1", "decode", None),
        ("p1=both d1=decode", "d1", "prefill", None),
        ("p1=prefill d1=decode", "d1", "prefill", "d1 is the last worker that decodes: without one, nothing can be"),
        ("p1=prefill d1=both", "d1", "prefill", "d1 is the last worker that decodes"),
        ("p1=prefill d1=decode d2=changing", "d1", "prefill", "d1 is the last worker that decodes"),
        ("p1=prefill d1=decode", "d2", "prefill", "there is no worker 'd2'; there are: d1, p1"),
        ("", "d1", "decode", "there is no worker 'd1'; there are: none"),
        ("p1=prefill d1=decode", "d1", "store", "there is no role 'store': give prefill, decode or both"),
        ("p1=prefill d1=decode", "d1", "changing", "there is no role 'changing'"),
    ],
)
def test_a_role_that_leaves_no_decode_worker_or_that_nobody_has_is_refused_with_the_reason(
    roles, worker, role, problem
):
    found = change_problem(dict(one.split("=") for one in roles.split()), worker, role)
    assert found is None if problem is None else (found or "").startswith(problem)


def test_a_change_that_leaves_no_prefill_worker_is_allowed_and_noted():
    assert change_notice({"p1": "decode", "d1": "decode"}).startswith("no prefill worker is left")
    assert change_notice({"p1": "both", "d1": "decode"}) == change_notice({"p1": "prefill"}) == ""


def placed(*names, **now):
    """p1 and so on are of the prefill deployment; `now`: the role of those that have switched."""
    homes = {"p": P, "d": D}
    return [PlacedWorker(name, homes[name[0]], now.get(name, homes[name[0]]), (float(name[1:]),)) for name in names]


def deployed_of(workers, starting=(0, 0)):
    return WorkerCounts(
        *(sum(one.home is home for one in workers) + num for home, num in zip(Role, starting, strict=True))
    )


def plan(wanted, workers, *, limits=WIDE, starting=(0, 0), **others):
    return role_plan(WorkerCounts(*wanted), deployed_of(workers, starting), workers, limits, **others)


def test_one_role_more_and_the_other_less_is_a_switch_of_the_cheapest_worker_and_no_process():
    found = plan((2, 1), placed("p1", "d1", "d2"))
    assert found.switches == {"d1": P} and found.replicas == {P: 1, D: 2} and not found.leaving


def test_a_worker_that_comes_home_goes_first_and_before_it_one_that_was_ordered_to():
    workers = placed("p5", "d1", "p9", p9=D)
    assert plan((2, 1), workers).switches == {"p9": P}
    assert plan((2, 1), workers, ordered=["d1"]).switches == {"d1": P}


def test_without_switches_processes_start_and_stop():
    found = plan((2, 1), placed("p1", "d1", "d2"), may_switch=False)
    assert not found.switches and found.replicas == {P: 2, D: 1} and found.leaving == {"d1"}


def test_more_of_both_switch_nobody():
    assert plan((2, 3), placed("p1", "d1")).replicas == {P: 2, D: 3}


def test_one_that_serve_has_replaced_is_back_home_and_is_switched_again():
    now = placed("p1", "d1", "d2", d2=P)
    assert plan((2, 1), now) == plan((2, 1), now, ordered=["d2"]) and not plan((2, 1), now).switches
    crashed = plan((2, 1), placed("p1", "d1"), starting=(0, 1))  # its replacement loads its model
    assert not crashed.switches and crashed.replicas == {P: 1, D: 2} and not crashed.leaving
    assert plan((2, 1), placed("p1", "d1", "d3")).switches == {"d1": P}


def test_the_last_running_worker_of_a_role_is_never_switched():
    found = plan((2, 1), placed("p1", "d1"), starting=(0, 1))
    assert not found.switches and found.replicas == {P: 1, D: 2}


def test_a_deployment_that_is_full_has_the_other_one_start_the_worker():
    limits = CountLimits(1, 3, 1, 3)
    workers = placed("p1", "p2", "p3", "d1", p2=D, p3=D)
    assert plan((2, 3), workers, limits=limits).replicas == {P: 3, D: 2}
    running = placed("p1", "p2", "p3", "d1", "d2", p2=D, p3=D)
    assert plan((2, 3), running, limits=limits).switches == {"p2": P}


def test_the_last_replica_of_a_deployment_stays_and_another_worker_goes():
    workers = placed("p1", "d1", "d2", p1=D, d1=P)  # decode: p1, d2
    found = plan((1, 1), workers)
    assert found.leaving == {"d2"} and found.replicas == {P: 1, D: 1} and not found.switches


roles = st.sampled_from(list(Role))
clusters = st.lists(st.tuples(roles, roles), max_size=6)
counts = st.tuples(st.integers(1, 6), st.integers(1, 6))


@given(clusters, counts, st.sets(st.integers(0, 7)))
def test_the_wanted_counts_come_about_within_the_limits_and_with_as_few_processes_as_possible(homes, wanted, ordered):
    homes = [(P, P), (D, D), *homes]  # each deployment has a replica, and each role a worker
    workers = [PlacedWorker(f"w{number}", home, role, (number % 3,)) for number, (home, role) in enumerate(homes)]
    limits = CountLimits(1, 8, 1, 8)
    for step in range(4):
        before = deployed_of(workers)
        found = plan(wanted, workers, limits=limits, ordered={f"w{number}" for number in ordered})
        assert all(1 <= found.replicas[role] <= 8 for role in Role)
        if step == 0:
            changed = [abs(found.replicas[role] - getattr(before, role)) for role in Role]
            assert sum(changed) == abs(sum(wanted) - len(workers)), "only as many start or stop as are missing or over"
        stay = [one for one in workers if one.worker_id not in found.leaving]
        workers = [
            PlacedWorker(one.worker_id, one.home, found.switches.get(one.worker_id, one.role), one.cost) for one in stay
        ]
        for home in Role:
            missing = found.replicas[home] - sum(one.home is home for one in workers)
            workers += [PlacedWorker(f"{home}{step}{number}", home, home) for number in range(missing)]
    assert WorkerCounts(*(sum(one.role is role for one in workers) for role in Role)) == wanted
    assert plan(wanted, workers, limits=limits).switches == {}


needs = st.lists(st.integers(1, 5), min_size=10, max_size=80)


@given(needs, st.data())
def test_giving_workers_to_the_other_role_keeps_the_bound_on_turns(course, data):
    hold_s, step_s, it, changes = 40.0, 10.0, Damper(1, 40.0), []
    for number, need in enumerate(course):
        before = it.count
        it.step(need, need, number * step_s, most=5)
        if (spare := it.spare(need, number * step_s, it.rise_s)) and data.draw(st.booleans()):
            it.give(spare, number * step_s)
        assert it.count >= 1
        if it.count != before:
            changes.append((number * step_s, it.count > before))
    ups_to_downs = [at_s for (_, was), (at_s, up) in itertools.pairwise(changes) if was and not up]
    assert all(later - earlier >= hold_s for earlier, later in itertools.pairwise(ups_to_downs))
