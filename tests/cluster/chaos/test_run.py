"""A part is harmed again only once it is whole, and a run ends although one never is."""

import asyncio
from itertools import count

import pytest

from kvrelay.cluster.chaos import run as module
from kvrelay.cluster.chaos import schedule
from kvrelay.cluster.chaos.faults import FaultKind, NothingToHarm
from kvrelay.cluster.chaos.history import StreamHistory
from kvrelay.cluster.chaos.run import SURE, ChaosRun

pytestmark = pytest.mark.pure

RUN = {"num_clients": 1, "seconds": 0.3, "rate": 1000.0, "seed": 0}


class FakeCluster:
    """Its decode workers are not whole for the next `num_looks` looks."""

    def __init__(self, workers=()):
        self.num_looks, self.workers = 0, list(workers)

    def lacking(self):
        self.num_looks -= 1
        return {"decode"} if self.num_looks >= 0 else set()

    def pids(self):
        return set()

    def status(self):
        return {"workers": self.workers}


class FakeClients:
    """Send nothing."""

    is_over = False

    async def run(self, num_clients):
        return


class Harm(FaultKind):
    """The decode workers are not whole for some looks."""

    part = "decode"

    def __init__(self, cluster, num_looks):
        self.cluster, self.looks, self.num_good = cluster, num_looks, []

    async def strike(self, choice):
        self.num_good.append(-self.cluster.num_looks)
        self.cluster.num_looks = self.looks


@pytest.fixture
def make(monkeypatch):
    monkeypatch.setattr(module, "POLL_S", 0.0001)

    def made(cluster):
        ticks = count()  # a millisecond passes with each look at the clock
        return ChaosRun(cluster, FakeClients(), StreamHistory(), lambda: next(ticks) / 1000)

    return made


async def test_a_part_is_harmed_again_once_several_looks_have_shown_it_whole(make):
    cluster = FakeCluster()
    harm = Harm(cluster, 3)
    run = make(cluster)
    await run.run({"kill-decode": harm}, **RUN)
    assert len(harm.num_good) > 2 and min(harm.num_good[1:]) >= SURE
    assert all(one.whole_s is not None for one in run.seen.faults) and run.seen.leaks == []


class Overlapping(FaultKind):
    """The first ones last until there are twelve; every other time there is nothing to harm."""

    part, overlaps = "clients", True

    def __init__(self):
        self.num_begun, self.are_many = 0, asyncio.Event()

    async def strike(self, choice):
        self.num_begun += 1
        if self.num_begun == 12:
            self.are_many.set()
        if self.num_begun % 2:
            raise NothingToHarm
        await self.are_many.wait()


async def test_kinds_that_overlap_strike_on_while_the_last_ones_last_and_count_where_they_harm(make):
    kind = Overlapping()
    run = make(FakeCluster())
    await run.run({"leave": kind}, **RUN)
    assert kind.num_begun >= 12
    assert len(run.seen.faults) == kind.num_begun // 2


class Entered(FaultKind):
    """Notes which kinds are under way together."""

    is_held = True

    def __init__(self, part, also, under_way):
        self.part, self.also, self.under_way, self.together = part, also, under_way, set()

    async def strike(self, choice):
        self.under_way.add(self.part)

    def undo(self):
        self.together |= self.under_way
        self.under_way.discard(self.part)


async def test_a_host_and_its_workers_are_not_harmed_at_once(make, monkeypatch):
    monkeypatch.setattr(schedule, "SHORTEST_S", 0.001)
    monkeypatch.setattr(schedule, "LONGEST_S", 0.002)
    under_way = set()
    kinds = {
        "crash-host": Entered("hosts", ("decode", "prefill"), under_way),
        "kill-decode": Entered("decode", (), under_way),
        "kill-prefill": Entered("prefill", (), under_way),
    }
    run = make(FakeCluster())
    await run.run(kinds, **RUN)
    assert {one.kind for one in run.seen.faults} == set(kinds)
    assert kinds["crash-host"].together == {"hosts"}
    assert "hosts" not in kinds["kill-decode"].together | kinds["kill-prefill"].together


async def test_a_part_that_does_not_come_back_is_reported_and_left_alone(make, monkeypatch):
    monkeypatch.setattr(module, "WHOLE_S", 0.05)
    harm = Harm(cluster := FakeCluster(), 1 << 30)
    run = make(cluster)
    await run.run({"kill-decode": harm}, **RUN)
    assert [one.whole_s for one in run.seen.faults] == [None]


async def test_blocks_that_are_not_back_in_the_end_are_leaks(make, monkeypatch):
    monkeypatch.setattr(module, "POOLS_S", 0.05)
    load = {"used_blocks": 2, "leased_blocks": 0, "quarantined_blocks": 0, "free_blocks": 8, "total_blocks": 10}
    run = make(FakeCluster([{"worker_id": "decode-0", "is_up": True, "load": load}]))
    await run.run({}, **RUN)
    assert run.seen.leaks == ["decode-0: {'used_blocks': 2}, 0 lost"]
