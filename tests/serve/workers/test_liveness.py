"""Workers that do not answer: whom the ingress pings, suspects and loses, and what their sequences see of it."""

import asyncio

import pytest

from kvrelay.serve.workers.liveness import (
    CHECK_S,
    LONGEST_S,
    LOST_S,
    QUIET_S,
    SLOWEST_FACTOR,
    SUSPECTED_S,
    Liveness,
    LivenessWatch,
    Peer,
)
from kvrelay.serve.workers.worker_link import Links
from kvrelay.types import BOTH, sides
from tests.serve.conftest import collect, sequence

pytestmark = pytest.mark.pure


class Cluster:
    """Workers under one virtual clock: `answers_after_s` by name, None for one that is frozen."""

    def __init__(self, **roles: str) -> None:
        self.roles, self.now_s, self.liveness = roles, 0.0, Liveness[str]()
        self.answers_after_s: dict[str, float | None] = dict.fromkeys(roles, 0.0)
        self.heard_s, self.due_s = dict.fromkeys(roles, 0.0), dict[str, float]()
        self.holding = set(roles)
        self.num_pings = dict.fromkeys(roles, 0)
        self.suspected_s, self.lost_s = dict[str, float](), dict[str, float]()

    def run(self, seconds: float, step_s: float = CHECK_S) -> None:
        end_s = self.now_s + seconds
        while self.now_s < end_s:
            self.now_s += step_s
            for name in [name for name, at_s in self.due_s.items() if at_s <= self.now_s]:
                self.heard_s[name] = self.due_s.pop(name)
            live = {name: role for name, role in self.roles.items() if name not in self.lost_s}
            verdicts = self.liveness.check(
                {name: Peer(self.heard_s[name], name in self.holding, sides(role)) for name, role in live.items()},
                self.now_s,
            )
            for name in verdicts.to_ping:
                self.num_pings[name] += 1
                if (after_s := self.answers_after_s[name]) is not None:
                    self.due_s[name] = self.now_s + after_s
            for name in verdicts.suspected:
                self.suspected_s.setdefault(name, self.now_s)
            for name in verdicts.lost:
                self.lost_s[name] = self.now_s


def test_a_frozen_worker_is_suspected_and_then_lost_and_the_others_are_not():
    cluster = Cluster(p0="prefill", d0="decode", d1="decode")
    cluster.run(10.0)
    begun_s = cluster.now_s
    cluster.answers_after_s["d0"] = None
    cluster.run(10.0)
    assert set(cluster.suspected_s) == set(cluster.lost_s) == {"d0"}
    assert SUSPECTED_S <= cluster.suspected_s["d0"] - begun_s <= QUIET_S + SUSPECTED_S + 2 * CHECK_S
    assert LOST_S <= cluster.lost_s["d0"] - begun_s <= QUIET_S + LOST_S + 2 * CHECK_S


def test_a_worker_that_holds_nothing_is_not_pinged_and_one_that_sends_is_not_either():
    cluster = Cluster(d0="decode", d1="decode")
    cluster.holding = {"d1"}
    for _ in range(100):
        cluster.heard_s["d1"] = cluster.now_s
        cluster.run(CHECK_S)
    assert cluster.num_pings == {"d0": 0, "d1": 0}
    cluster.run(1.0)
    assert cluster.num_pings["d0"] == 0 < cluster.num_pings["d1"]


def test_time_in_which_the_ingress_itself_did_not_run_counts_against_nobody():
    cluster = Cluster(d0="decode", d1="decode", d2="decode")
    cluster.run(1.0)
    cluster.answers_after_s["d0"] = 0.3
    cluster.run(QUIET_S + CHECK_S)  # the ping is under way
    cluster.due_s = dict.fromkeys(cluster.due_s, cluster.now_s + 30.0 + CHECK_S)  # its answer waits to be read
    cluster.now_s += 30.0
    cluster.run(5.0)
    assert not cluster.suspected_s and not cluster.lost_s


def test_the_slower_its_recent_answers_the_more_time_a_worker_has():
    slow = Cluster(d0="decode", d1="decode")
    slow.answers_after_s["d0"] = 0.45
    slow.run(5.0)
    begun_s, slow.answers_after_s["d0"] = slow.now_s, None
    slow.run(10.0)
    assert slow.lost_s["d0"] - begun_s >= SLOWEST_FACTOR * 0.4

    forgotten = Cluster(d0="decode", d1="decode")
    forgotten.answers_after_s["d0"] = 0.45
    forgotten.run(5.0)
    forgotten.answers_after_s["d0"] = 0.0
    forgotten.run(60.0)
    begun_s, forgotten.answers_after_s["d0"] = forgotten.now_s, None
    forgotten.run(10.0)
    assert forgotten.lost_s["d0"] - begun_s <= QUIET_S + LOST_S + 3 * CHECK_S


def test_while_most_are_silent_it_is_rather_the_network_and_they_get_more_time():
    cluster = Cluster(p0="prefill", d0="decode", d1="decode")
    cluster.answers_after_s |= {"p0": None, "d0": None}
    cluster.run(LONGEST_S)
    assert set(cluster.suspected_s) == {"p0", "d0"} and not cluster.lost_s
    cluster.run(1.0)
    assert set(cluster.lost_s) == {"p0", "d0"}


@pytest.mark.parametrize(
    ("roles", "frozen", "lost"),
    [
        ({"p0": "prefill", "d0": "decode"}, "d0", False),
        ({"p0": "prefill", "d0": "decode"}, "p0", True),  # the decode worker computes prompts, too
        ({"b0": BOTH}, "b0", False),
        ({"b0": BOTH, "b1": BOTH}, "b0", True),
        ({"b0": BOTH, "p1": "prefill"}, "b0", False),
    ],
)
def test_a_worker_is_lost_only_while_another_one_can_decode_instead(roles, frozen, lost):
    cluster = Cluster(**roles)
    cluster.answers_after_s[frozen] = None
    cluster.run(60.0)
    assert set(cluster.lost_s) == ({frozen} if lost else set()) and frozen in cluster.suspected_s


# ---- over the ingress's links


async def test_a_sequence_on_a_frozen_decode_worker_goes_on_with_another_one(make_cluster):
    cluster = await make_cluster(prefill=0, decode=2)
    for worker in cluster.decode:
        worker.pause_at = 3
    reading = asyncio.create_task(collect(cluster.dispatcher.generate(sequence())))
    frozen = await paused(cluster.decode)
    other = next(worker for worker in cluster.decode if worker is not frozen)
    frozen.is_frozen, other.pause_at = True, None
    tokens, _ = await asyncio.wait_for(reading, 30)
    assert len(tokens) == 8
    frozen.is_frozen = False
    await frozen.until(lambda worker: worker.num_greetings == 2)  # it is connected to again


async def test_a_prompt_on_a_frozen_prefill_worker_is_computed_elsewhere(make_cluster):
    cluster = await make_cluster(prefill=1, decode=1)
    cluster.prefill[0].is_frozen = True
    tokens, _ = await asyncio.wait_for(collect(cluster.dispatcher.generate(sequence())), 30)
    assert len(tokens) == 8


async def test_new_requests_pass_a_suspected_worker_by_and_use_it_where_it_is_the_only_one(make_cluster):
    cluster = await make_cluster(prefill=0, decode=2)
    router = cluster.dispatcher.router
    router.set_suspected(frozenset({"d0"}))
    for number in range(8):
        await collect(cluster.dispatcher.generate(sequence(request_id=f"r{number}")))
    assert not any(hasattr(message, "request") for message in cluster.decode[0].received)
    router.set_suspected(frozenset({"d0", "d1"}))
    assert len((await collect(cluster.dispatcher.generate(sequence(request_id="last"))))[0]) == 8


async def paused(workers):
    """The first of them that waits in a stream's middle."""
    waits = {asyncio.create_task(worker.paused.wait()): worker for worker in workers}
    done, pending = await asyncio.wait(waits, return_when=asyncio.FIRST_COMPLETED)
    for task in pending:
        task.cancel()
    return waits[done.pop()]


async def test_the_watch_of_an_idle_ingress_does_not_wake_until_a_sequence_is_submitted(monkeypatch):
    links, checked, slept = Links(), asyncio.Event(), []
    watch = LivenessWatch(links, None, lambda: None)
    monkeypatch.setattr(watch, "check", checked.set)
    real_sleep = asyncio.sleep

    async def sleep(seconds):
        slept.append(seconds)
        await real_sleep(0)

    monkeypatch.setattr("kvrelay.serve.workers.liveness.asyncio.sleep", sleep)
    running = asyncio.create_task(watch.run())
    for _ in range(20):
        await real_sleep(0)
    assert not slept and not checked.is_set()
    submission = links.open("r1")
    async with asyncio.timeout(5):
        await checked.wait()
    assert slept[0] == CHECK_S
    submission.close("ended")
    for _ in range(20):
        await real_sleep(0)
    slept.clear()
    for _ in range(20):
        await real_sleep(0)
    assert not slept
    running.cancel()
