"""Prompts that are late in any case: they wait at the router, in order, and keep nothing from those that are in
time.
"""

import math
from collections import Counter

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvrelay.plane.messages import Timings
from kvrelay.plane.reports import KvSnapshot
from kvrelay.router.decision import deferral
from kvrelay.router.decision.deferral import OVERDUE_TOKENS, Deferral
from kvrelay.router.decision.deferral_queue import OLDEST_EVERY, DeferralQueue
from kvrelay.router.decision.router import Router
from kvrelay.router.types import Deferred, RoutingRefusal, SloRequirement, SloTarget
from kvrelay.settings.router import RouterSettings, SloSettings
from tests.cluster.simulator.simulator_cases import entry, everything_is_given_back, profile, simulate
from tests.router.decision.test_placement_rules import BLOCK, ask, decided, info, load, refused

pytestmark = pytest.mark.pure


LONG = OVERDUE_TOKENS + BLOCK
BLOCKS = 5000
"""Of each worker: a long prompt takes more than a tenth of them."""
HURRIED = {"policy_options": {"ttft_s": 0.5}}


# ---- the line


def waiting(*requests):
    line = DeferralQueue()
    for number, fields in enumerate(requests):
        line.defer(ask(f"r{number}", **fields), 0.0)
    return line


def calls(line):
    return [int(called[1:]) for called in iter(line.call, None)]


def test_first_come_first_served():
    assert calls(waiting({}, {}, {})) == [0, 1, 2]


def test_lower_priorities_are_served_earlier():
    assert calls(waiting({"priority": 1}, {}, {"priority": -1})) == [2, 1, 0]


def test_tenants_take_turns_by_their_tokens():
    """`b` has had 500 when `a` has had 1,000."""
    long, short = {"tenant": "a", "tokens": 1000}, {"tenant": "b", "tokens": 500}
    assert calls(waiting(long, long, long, short, short, short)) == [0, 3, 4, 1, 5, 2]


def test_a_tenant_with_three_times_the_weight_is_called_three_times_as_often():
    line = waiting(*[{"tenant": "a"}] * 9, *[{"tenant": "b", "weight": 3.0}] * 9)
    assert sum(number >= 9 for number in calls(line)[:8]) == 6


def test_a_tenant_that_comes_late_has_saved_nothing_up():
    """`b` comes when `a` has had four: from then on they take turns."""
    line = waiting(*[{"tenant": "a"}] * 8)
    assert [line.call() for _ in range(4)] == ["r0", "r1", "r2", "r3"]
    for number in (20, 21, 22):
        line.defer(ask(f"r{number}", tenant="b"), 0.0)
    assert calls(line) == [20, 4, 21, 5, 22, 6, 7]


member = st.tuples(st.integers(-2, 2), st.sampled_from("abc"), st.integers(1, 5000))


@given(st.lists(st.one_of(member, st.just("call"), st.integers(0, 40)), max_size=120))
def test_everybody_is_called_once_and_nobody_is_starved(steps):
    """A bound as in the engine's line: the oldest goes every so many calls."""
    line, came, waits, called = DeferralQueue(), 0, {}, Counter()
    for step in steps:
        if step == "call":
            name = line.call()
            assert (name is None) == (not waits)
            if name is not None:
                called[name] += 1
                assert line.called == {name}
                line.remove(name)
                before, at = waits.pop(name)
                assert called.total() - at <= OLDEST_EVERY * (before + 1)
        elif isinstance(step, int):
            line.remove(f"r{step}")
            waits.pop(f"r{step}", None)
        else:
            priority, tenant, tokens = step
            line.defer(ask(f"r{came}", priority=priority, tenant=tenant, tokens=tokens, hashes=()), 0.0)
            waits[f"r{came}"] = (len(waits), called.total())
            came += 1
        assert len(line.waiting) == len(waits) and not line.called
    assert max(called.values(), default=1) == 1
    while line.call() is not None:
        pass
    for name in list(line.called):
        line.remove(name)
    assert not line._queues and not line._counters and not line._since_s


# ---- the router


def cluster(prefill=("p1",), decode=("d1",), slo=None, **settings):
    router = Router(RouterSettings(**(HURRIED | settings)), tokens_per_hash=BLOCK, slo=slo)
    for role, names in (("prefill", prefill), ("decode", decode)):
        for name in names:
            router.worker_up(info(name, role, num_blocks=BLOCKS, max_model_len=1_000_000))
            router.apply_snapshot(name, KvSnapshot(seq=0, hashes=[]))
            load(router, name, free_blocks=BLOCKS, prefill_tokens_per_s=2000.0)
    return router


def late(request_id, **fields):
    """Four seconds of work."""
    return ask(request_id, **({"tokens": LONG, "prompt": request_id, "may_wait": True, "force": None} | fields))


def asked(router, request_id, **fields):
    return router.select_and_reserve(late(request_id, **fields), 0.0)


def counted(router):
    return sum(view.assigned_requests for view in router.workers())


def test_one_goes_and_the_next_waits_for_its_prompt():
    router = cluster()
    decided(asked(router, "r1"))
    before = router.workers()
    assert isinstance(asked(router, "r2"), Deferred) and router.num_deferred == 1
    assert router.workers() == before, "something is counted for it"
    assert router.take_ready() is None
    router.on_first_token("r1", 5.0)
    assert router.take_ready() == "r2" and router.take_ready() is None
    decided(asked(router, "r2"))
    assert router.num_deferred == 0


def test_who_was_called_and_goes_away_leaves_its_place_to_the_next():
    router = cluster()
    for name in ("r1", "r2", "r3"):
        asked(router, name)
    router.on_end("r1")
    assert (router.take_ready(), router.take_ready()) == ("r2", None)
    router.on_end("r2")
    assert router.take_ready() == "r3"


def test_short_late_prompts_go_together():
    """A step has room for many."""
    router = cluster(policy_options={"ttft_s": 1e-6})
    size = OVERDUE_TOKENS // 8
    choices = [asked(router, f"r{number}", tokens=size, force="remote") for number in range(9)]
    assert [isinstance(choice, Deferred) for choice in choices] == [False] * 8 + [True]


def test_who_is_in_time_goes_past_them():
    router = cluster()
    asked(router, "r1"), asked(router, "r2")
    load(router, "p1", free_blocks=BLOCKS, prefill_tokens_per_s=2000.0, overdue=1, overdue_tokens=LONG)
    decided(asked(router, "short", tokens=300))
    assert router.num_deferred == 1


def test_another_worker_takes_it():
    router = cluster(prefill=["p1", "p2"])
    assert {decided(asked(router, name)).prefill for name in ("r1", "r2")} == {"p1", "p2"}
    assert isinstance(asked(router, "r3"), Deferred)


def test_while_all_have_prompts_in_time_it_waits_until_it_is_owed_a_turn():
    """A late one of average length: every sixteenth."""
    router = cluster()
    decided(asked(router, "there", tokens=OVERDUE_TOKENS - 100, force="remote"))
    queued = OVERDUE_TOKENS - 100 + 1200  # of others, 0.6 s
    load(router, "p1", free_blocks=BLOCKS, prefill_tokens_per_s=2000.0, queued_tokens=queued)
    assert isinstance(asked(router, "long", force="remote"), Deferred)
    gone = 0
    while (turn := router.take_ready()) is None:
        gone += 1
        decided(asked(router, f"quick{gone}", tokens=100, max_tokens=1, hashes=(), may_wait=False))
        router.on_end(f"quick{gone}")
    assert (turn, gone) == ("long", OLDEST_EVERY)
    assert decided(asked(router, "long")).prefill == "p1"


def test_while_late_prompts_keep_few_blocks_they_may_wait_in_the_lines():
    router = cluster(decode=["d1", "d2", "d3"])
    choices = [asked(router, f"r{number}", force="remote") for number in range(4)]
    assert [isinstance(choice, Deferred) for choice in choices] == [False, False, False, True], "1,539 of 15,000 blocks"
    router.on_end("r0")
    assert router.take_ready() == "r3"


def test_who_comes_late_does_not_overtake_who_waits():
    router = cluster(decode=["d1", "d2", "d3"])
    for number in range(4):
        asked(router, f"r{number}", force="remote")
    router.on_end("r0")
    assert isinstance(asked(router, "r4", force="remote"), Deferred)
    assert router.take_ready() == "r3"


def test_what_a_decode_worker_computes_itself_keeps_no_blocks_in_line():
    router = cluster(prefill=[], decode=["d1"])
    for number in range(5):
        assert decided(asked(router, f"r{number}")).decode == "d1"


@pytest.mark.parametrize(
    ("settings", "fields"),
    [
        ({"policy": "least_loaded", "policy_options": {}}, {}),
        ({}, {"may_wait": False}),
        ({"policy_options": {"ttft_s": 1000.0}}, {}),
    ],
)
def test_nobody_waits(settings, fields):
    router = cluster(**settings)
    for number in range(4):
        decided(asked(router, f"r{number}", **fields))
    assert router.take_ready() is None


def test_a_worker_that_dies_holds_nobody_up():
    router = cluster(prefill=["p1", "p2"])
    for name in ("r1", "r2", "r3"):
        asked(router, name)
    router.worker_down("p1")
    assert router.take_ready() is None, "the other one has enough"
    router.worker_up(info("p1", "prefill", epoch="e2", num_blocks=BLOCKS, max_model_len=1_000_000))
    assert router.take_ready() == "r3"
    assert decided(asked(router, "r3")).prefill == "p1"
    for name in ("r1", "r2", "r3"):
        router.on_end(name)
    assert counted(router) == 0 and not router._ledger.with_overdue


def test_with_no_worker_left_they_are_called_to_hear_it():
    router = cluster()
    for name in ("r1", "r2", "r3"):
        asked(router, name)
    router.worker_down("p1"), router.worker_down("d1")
    assert [router.take_ready() for _ in range(3)] == ["r2", "r3", None]
    assert refused(asked(router, "r2")).reason == "no_decode_worker"


def test_a_prompt_that_waits_is_counted_once_as_an_arrival():
    """Asking again says nothing new of how hot a prefix is."""
    router, hashes = cluster(), late("r2").block_hashes

    def arrivals():
        return router._popularity.arrivals_per_s(hashes, len(hashes), 0.0)

    asked(router, "r1")
    assert isinstance(asked(router, "r2"), Deferred)
    once = arrivals()
    router.on_end("r1")
    assert router.take_ready() == "r2"
    decided(asked(router, "r2"))
    assert arrivals() == once > 0
    asked(router, "r3", prompt="r2")
    assert arrivals() > once


@pytest.mark.parametrize(("on_miss", "kind"), [("queue", Deferred), ("refuse", RoutingRefusal)])
def test_with_an_slo_only_who_asks_to_be_queued_waits(on_miss, kind):
    target = SloTarget("default", 0.5, None)
    router = cluster(slo=SloSettings(ttft_s=0.5))
    slo = SloRequirement((target,), on_miss)
    for number in range(4):  # what workers take is learned from outcomes
        decided(asked(router, f"t{number}", tokens=2000))
        router.on_first_token(f"t{number}", 1.0, timings=Timings(compute_s=1.0))
        router.on_end(f"t{number}")
    decided(asked(router, "r1"))
    choices = [asked(router, f"r{number}", slo=slo) for number in (2, 3)]
    assert isinstance(choices[-1], kind), choices
    if kind is Deferred:
        router.on_first_token("r1", 5.0)
        assert router.take_ready() is not None


# ---- a cluster in overload


def flood(*, long_every, count=600, every_s=0.02):
    """Mostly short prompts; some take many times what is wanted."""
    return [entry(number * every_s, 4000 if number % long_every == 0 else 100, 8) for number in range(count)]


def flooded():
    settings = {"router": {"local_prefill_tokens": 0, "max_inflight": 10_000, "policy_options": {"ttft_s": 0.3}}}
    workers = profile(num_blocks=1024, link_bytes_per_s=1e9, local_bytes_per_s=1e9, max_running=128)
    return simulate(flood(long_every=8), settings=settings, workers=workers, ttft_s=0.3, tpot_s=1.0)


def test_who_is_late_anyway_keeps_nobody_else_from_being_in_time(monkeypatch):
    with_it = flooded()
    monkeypatch.setattr(Deferral, "is_overdue", lambda *_: False)
    without = flooded()
    shares = [sim.tally.num_ttft_kept / 600 for sim in (with_it, without)]
    assert shares[0] > 0.85 > 0.6 > shares[1]
    assert [sim.tally.outcomes["done"] for sim in (with_it, without)] == [600, 600], "everybody is served in the end"
    assert with_it.summary()["deferred"] > 20 and without.summary()["deferred"] == 0
    for sim in (with_it, without):
        everything_is_given_back(sim)


def test_refusing_few_long_overdue_prompts_keeps_many_requests_in_time_and_refuses_fewer_in_the_end(monkeypatch):
    settings = {"router": {"local_prefill_tokens": 0, "max_inflight": 10_000, "policy_options": {"ttft_s": 0.3}}}
    settings["router"]["max_queue_s"] = 3.0
    monkeypatch.setattr(deferral, "SURPLUS_SPANS", math.inf)  # nor any other new one while the overload lasts
    workers = profile(num_blocks=4096, link_bytes_per_s=1e9, local_bytes_per_s=1e9, max_running=128)

    def run():
        entries = flood(long_every=15, count=1500, every_s=0.013)
        sim = simulate(entries, settings=settings, workers=workers, ttft_s=0.3, tpot_s=1.0)
        everything_is_given_back(sim)
        assert set(sim.tally.outcomes) == {"done", "overloaded"}
        return sim.tally.num_ttft_kept / 1500, sim.tally.outcomes["overloaded"], sim.summary()["ttft_s"]["p99"]

    with_it = run()
    monkeypatch.setattr(deferral, "OVERDUE_WAIT", math.inf)
    without = run()
    assert with_it[0] > 0.75 > 0.65 > without[0]
    assert 0 < with_it[1] < without[1] / 3 and with_it[2] < without[2]


def test_who_waits_for_too_long_is_told_so_and_leaves_the_line():
    settings = {"router": {"local_prefill_tokens": 0, "max_inflight": 10_000, "policy_options": {"ttft_s": 0.3}}}
    settings["serve"] = {"request_timeout_s": 2.0}
    sim = simulate(flood(long_every=2), settings=settings, workers=profile(num_blocks=1024, link_bytes_per_s=1e9))
    assert sim.tally.outcomes["error"] > 20 and sim.tally.outcomes["done"] > 200
    assert all(not ingress.deferred and not ingress.router.num_deferred for ingress in sim.ingresses)
    everything_is_given_back(sim)
