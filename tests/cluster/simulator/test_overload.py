"""Two minutes of three times what a cluster can do, without SLOs: who is accepted ends, and starts soon."""

import random
from dataclasses import dataclass, field

import pytest

from kvrelay.cluster.simulator.results import Tally
from kvrelay.router.planning.types import SpeedCurve
from tests.cluster.simulator.simulator_cases import entry, everything_is_given_back, profile, simulation

pytestmark = [pytest.mark.pure, pytest.mark.slow]

LOAD_S, MAX_QUEUE_S, UNBOUNDED_S = 120.0, 30.0, 3600.0
PREFILL = SpeedCurve(overhead_s=0.005, weights_s=0.02, token_s=2e-3, pair_s=0.0, context_s=0.0)
DECODE = SpeedCurve(overhead_s=0.005, weights_s=0.02, token_s=2e-3, pair_s=0.0, context_s=0.0, sequence_s=2e-3)
SLOW = {"prefill": PREFILL, "decode": DECODE, "num_blocks": 1024, "max_running": 16, "link_bytes_per_s": 1e9}


@dataclass(slots=True)
class Jobs(Tally):
    """Keeps the requests themselves."""

    jobs: list = field(default_factory=list)

    def add(self, job):
        Tally.add(self, job)
        self.jobs.append(job)


@dataclass(frozen=True)
class Case:
    """A cluster, what its requests are like, and about how many of them it starts in a second."""

    name: str
    capacity_per_s: float
    tokens: int
    output: int
    cluster: dict


PREFILL_BOUND = Case("prefill-bound", 1.5, 300, 20, {"prefill": 1, "decode": 1})
DECODE_BOUND = Case("decode-bound", 1.15, 60, 150, {"prefill": 1, "decode": 1})
AGGREGATED = Case("aggregated", 1.3, 150, 60, {"prefill": 0, "decode": 1})
SEVERAL = Case("several", 6.0, 300, 20, {"prefill": 4, "decode": 3, "ingress": 2})


def overloaded(case, factor, max_queue_s=MAX_QUEUE_S, load_s=LOAD_S):
    """The simulation, whose tally keeps the requests. Prompts are of half to one and a half times the length."""
    draw, entries, now_s = random.Random(7), [], 0.0
    while (now_s := now_s + draw.expovariate(factor * case.capacity_per_s)) < load_s:
        lengths = [int(mean * draw.uniform(0.5, 1.5)) for mean in (case.tokens, case.output)]
        entries.append(entry(now_s, *lengths))
    settings = {"router": {"max_inflight": 10_000, "max_queue_s": max_queue_s}}
    sim = simulation(entries, workers=profile(**SLOW), settings=settings, **case.cluster)
    sim.tally = Jobs(0.0, 5.0, 0.1)
    return sim.run()


def done(sim):
    return [job for job in sim.tally.jobs if job.outcome == "done"]


def ended_per_s(sim, from_s=LOAD_S / 4, until_s=LOAD_S):
    return sum(from_s <= job.end_s < until_s for job in done(sim)) / (until_s - from_s)


def longest_ttft_s(sim):
    return max(job.ttft_s for job in done(sim))


def num_late(sim):
    """Of those that were served, how many had not ended half a minute after the load."""
    return sum(job.end_s > LOAD_S + 30.0 for job in done(sim))


STARTED_S = MAX_QUEUE_S + 10.0
"""Beside the time at the ingress: 5 s of prompts at the workers, the prompt itself, and what the estimate is off."""


@pytest.mark.parametrize("case", [PREFILL_BOUND, DECODE_BOUND, AGGREGATED], ids=lambda case: case.name)
def test_who_is_accepted_in_a_long_overload_starts_soon_and_the_workers_stay_busy(case):
    sim, unbounded = overloaded(case, 3), overloaded(case, 3, UNBOUNDED_S)
    assert set(sim.tally.outcomes) == {"done", "overloaded"}
    assert longest_ttft_s(sim) < STARTED_S and sim.ended_s < LOAD_S + STARTED_S + 10.0
    assert ended_per_s(sim) > 0.85 * ended_per_s(unbounded), "decode workers get fewer prompts while queues are short"
    assert all(job.retry_after_s >= 1.0 for job in sim.tally.jobs if job.outcome == "overloaded")
    everything_is_given_back(sim)
    assert longest_ttft_s(unbounded) > 2 * STARTED_S and num_late(unbounded) > 5 * num_late(sim), "the control"


@pytest.mark.parametrize("case", [PREFILL_BOUND, DECODE_BOUND, AGGREGATED, SEVERAL], ids=lambda case: case.name)
def test_once_what_had_queued_has_started_the_cluster_serves_in_time_what_it_can(case, monkeypatch):
    def in_time_per_s():
        """Over the last quarter of the load."""
        last = [job for job in done(overloaded(case, 3)) if job.arrival_s >= 0.75 * LOAD_S]
        return sum(job.ttft_s <= 5.0 for job in last) / (0.25 * LOAD_S)

    assert in_time_per_s() > 0.9 * case.capacity_per_s
    monkeypatch.setattr("kvrelay.router.decision.deferral.FULL_SHARE", 1000.0)
    assert in_time_per_s() < 0.3 * case.capacity_per_s, "the control"


def test_ten_times_the_capacity_is_like_three_times():
    sim, moderate = overloaded(PREFILL_BOUND, 10), overloaded(PREFILL_BOUND, 3)
    assert longest_ttft_s(sim) < STARTED_S
    assert ended_per_s(sim) > 0.9 * ended_per_s(moderate)


def test_each_of_several_ingresses_has_its_share():
    sim = overloaded(SEVERAL, 3)
    assert longest_ttft_s(sim) < STARTED_S
    served = [ingress.stats.outcomes["stop"] for ingress in sim.ingresses]
    assert min(served) > 0.6 * max(served)
    everything_is_given_back(sim)


def test_a_cluster_that_keeps_up_refuses_and_defers_nobody():
    sim = overloaded(PREFILL_BOUND, 1)
    assert set(sim.tally.outcomes) == {"done"} and not sim.summary()["deferred"]


@pytest.mark.parametrize("case", [PREFILL_BOUND, AGGREGATED, SEVERAL], ids=lambda case: case.name)
def test_an_overload_that_lasts_is_seen_before_the_queue_is_full(case, monkeypatch):
    def in_time():
        """A second, over the whole load."""
        return sum(job.ttft_s <= 5.0 for job in done(overloaded(case, 3))) / LOAD_S

    with_it = in_time()
    monkeypatch.setattr("kvrelay.router.decision.deferral.SURPLUS_SPANS", 1000)
    assert with_it > 1.2 * in_time(), "the control: half a minute of requests has been queued first"


@pytest.mark.parametrize("case", [PREFILL_BOUND, AGGREGATED], ids=lambda case: case.name)
def test_where_few_requests_come_an_overload_that_lasts_is_seen_too(case, monkeypatch):
    """About one and a half times what one worker can do."""

    def in_time():
        return sum(job.ttft_s <= 5.0 for job in done(overloaded(case, 2)))

    with_it = in_time()
    monkeypatch.setattr("kvrelay.router.decision.deferral.SURPLUS_SPANS", 1000)
    assert with_it > 1.5 * in_time(), "the control: half of them are late"


def test_a_burst_is_queued_whole():
    """Eight seconds of three times what it can start."""
    sim = overloaded(SEVERAL, 3, load_s=8.0)
    assert set(sim.tally.outcomes) == {"done"}
