"""Workers of one machine slow each other down while both compute, and only then."""

import pytest

from kvrelay.cluster.profiles.profile import parse_profile
from kvrelay.cluster.simulator.steps import Machine, slowed
from kvrelay.types import Role
from tests.cluster.simulator.simulator_cases import DECODE, chats, entry, everything_is_given_back, profile, simulate

pytestmark = pytest.mark.pure


class SimulatedWorker:
    def __init__(self):
        self.heard = []

    def crowd_changed(self, before, now):
        self.heard.append((before, now))


def test_computing_workers_are_notified_of_each_other():
    machine, one, other, third = Machine(), SimulatedWorker(), SimulatedWorker(), SimulatedWorker()
    machine.begins(one)
    assert machine.crowd_with(one) == 1 and machine.crowd_with(other) == 2
    for worker in (other, third):
        machine.begins(worker)
        machine.begins(worker)
    machine.ends(other)
    machine.ends(other)
    assert one.heard == [(1, 2), (2, 3), (3, 2)] and third.heard == [(3, 2)] and other.heard == [(2, 3)]


def test_more_than_were_measured_are_as_the_most_that_were():
    assert [slowed((1.0, 1.5), crowd) for crowd in (1, 2, 3)] == [1.0, 1.5, 1.5] and slowed((), 4) == 1.0


def shared(**slowdown):
    return profile(workers_per_node=4, slowdown=slowdown, local_bytes_per_s=1e12)


def alone_s(context, tokens):
    return sum(DECODE.decode_step_s(1, context + step) for step in range(1, tokens))


def test_one_that_computes_alone_is_as_fast_as_ever():
    assert (
        simulate([entry(0.5)], workers=shared(prefill=(1.0, 3.0), decode=(1.0, 3.0))).tally.tpot_s[0]
        == simulate([entry(0.5)], workers=shared()).tally.tpot_s[0]
    )


def test_two_that_decode_side_by_side_take_as_long_as_was_measured():
    """Two requests of the same length, on a worker each, that begin together."""
    two = [entry(0.5, 100, 101), entry(0.5, 100, 101)]
    plain, crowded = (
        simulate(two, workers=shared(decode=ratios), decode=2, settings={"router": {"policy": "round_robin"}})
        for ratios in ((), (1.0, 1.5))
    )
    for before, after in zip(plain.tally.tpot_s, crowded.tally.tpot_s, strict=True):
        assert after == pytest.approx(1.5 * before, rel=0.05)


def test_a_step_under_way_goes_on_more_slowly_when_another_begins_and_recovers():
    """A long answer beside a short one: it is slowed for just as long as the short one lasts."""
    settings = {"router": {"policy": "round_robin"}}
    both = [entry(0.5, 100, 401), entry(1.5, 100, 51)]
    workers = shared(decode=(1.0, 2.0))
    alone = simulate(both[:1], workers=workers, settings=settings)
    beside = simulate(both, workers=workers, settings=settings)
    longest = max(beside.tally.tpot_s[index] * tokens for index, tokens in ((0, 50), (1, 400)))
    short_s = 2 * alone_s(100, 51)
    assert longest - alone.tally.tpot_s[0] * 400 == pytest.approx(short_s / 2, rel=0.15)


def test_a_busy_cluster_on_one_machine_ends_clean_and_is_never_faster():
    entries = chats(60)
    free, crowded = (
        simulate(entries, workers=shared(prefill=ratios, decode=ratios)) for ratios in ((), (1.0, 1.3, 1.8))
    )
    assert crowded.tally.outcomes == free.tally.outcomes == {"done": 60}
    assert sum(crowded.tally.tpot_s) > sum(free.tally.tpot_s)
    everything_is_given_back(crowded)
    assert not any(machine._computing for machine in crowded.fleet._machines.values())


def test_faults_leave_the_machine_with_who_computes():
    faults = [
        {"kind": "freeze", "at_s": 0.6, "target": "p0", "for_s": 1.0},
        {"kind": "crash", "at_s": 0.8, "target": "d1", "for_s": 1.0},
    ]
    sim = simulate(chats(60), workers=shared(prefill=(1.0, 1.3), decode=(1.0, 1.4)), faults=faults)
    assert sum(sim.tally.outcomes.values()) == 60
    everything_is_given_back(sim)
    assert not any(machine._computing for machine in sim.fleet._machines.values())


def test_the_file_keeps_it():
    given = shared(prefill=(1.0, 1.2), decode=(1.0, 1.4))
    read = parse_profile(given.text(), "it")
    assert read == given and read.slowdown_of(Role.DECODE) == (1.0, 1.4) and profile().slowdown_of(Role.DECODE) == ()
