"""Several ingresses and one worker between them: each knows what the others have sent there, by sums that the worker
relays.
"""

import itertools

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvrelay.engine.worker.load_sharing import AssignedShares
from kvrelay.pacing import Paced
from kvrelay.plane.messages import Assigned
from kvrelay.plane.reports import AssignedByOthers
from kvrelay.router.decision.router import Router
from kvrelay.router.types import Decision
from tests.cluster.simulator.simulator_cases import chats, simulate
from tests.router.decision.test_placement_rules import ask, cluster, decided, load

pytestmark = pytest.mark.pure


PEERS = ("a", "b", "c")


def share(tokens=0, prompts=0, sequences=0, blocks=0):
    return Assigned(tokens=tokens, prompts=prompts, sequences=sequences, blocks=blocks)


# ---- the worker's sums

counts = st.integers(0, 1000)
shares_given = st.builds(share, counts, counts, counts, counts)
peers = st.sampled_from(PEERS)
steps = st.one_of(
    st.tuples(st.just("join"), peers),
    st.tuples(st.just("leave"), peers),
    st.tuples(st.just("hear"), peers, shares_given),
    st.tuples(st.just("tell")),
)


@given(st.lists(steps, max_size=40))
def test_each_has_been_told_the_sum_of_the_others(script):
    shares, said, told = AssignedShares(), {}, {}
    for step in [*script, ("tell",)]:
        match step:
            case ("join", peer):
                shares.join(peer)
                said.setdefault(peer, None)
            case ("leave", peer):
                shares.leave(peer)
                said.pop(peer, None)
                told.pop(peer, None)
            case ("hear", peer, given_share):
                assert shares.hear(peer, given_share) == (peer in said)
                if peer in said:
                    said[peer] = given_share
            case _:
                news = shares.take_changes()
                assert all(told.get(peer) != others for peer, others in news), "it has been told that already"
                told |= dict(news)
    for peer in said:
        others = [one for other, one in said.items() if other != peer]
        known = [one for one in others if one is not None]
        want = AssignedByOthers(
            len(others),
            len(known) == len(others),
            *(sum(getattr(one, name) for one in known) for name in ("tokens", "prompts", "sequences", "blocks")),
        )
        assert told.get(peer, AssignedByOthers(0, True)) == want


def test_an_ingress_that_is_alone_is_told_nothing():
    shares = AssignedShares()
    shares.join("a")
    assert shares.hear("a", share(5)) and shares.take_changes() == []


def test_numbers_that_no_router_has_cannot_spoil_the_sums():
    shares = AssignedShares()
    shares.join("a")
    shares.join("b")
    shares.hear("a", share(-5, prompts=1 << 62))
    (others,) = [others for peer, others in shares.take_changes() if peer == "b"]
    assert others.tokens == 0 and 0 < others.prompts < 1 << 50


# ---- two routers


class Together:
    """Routers of several ingresses over the same workers, which relay."""

    def __init__(self, count, **workers):
        self.routers = [cluster(**workers) for _ in range(count)]
        self.workers = {name: AssignedShares() for names in workers.values() for name in names}
        for shares in self.workers.values():
            for number in range(count):
                shares.join(number)
        self.relay()

    def relay(self):
        """Until nobody has anything to tell."""
        while True:
            news = [(number, *one) for number, router in enumerate(self.routers) for one in router.take_assigned()]
            for number, worker_id, assigned in news:
                self.workers[worker_id].hear(number, assigned)
            told = [(worker_id, *one) for worker_id, shares in self.workers.items() for one in shares.take_changes()]
            for worker_id, number, others in told:
                self.routers[number].apply_others(worker_id, others)
            if not news and not told:
                return

    def loads(self):
        """What each router counts, by worker."""
        return [
            {
                view.worker_id: (
                    view.load["queued_tokens"],
                    view.load["queued_requests"],
                    view.load["sequences"],
                    view.load["free_blocks"],
                )
                for view in router.workers()
            }
            for router in self.routers
        ]


moves = st.lists(
    st.tuples(
        st.integers(0, 2),
        st.sampled_from(["route", "first", "end"]),
        st.integers(0, 5),
        st.sampled_from([40, 500, 3000]),
    ),
    max_size=25,
)


@given(moves)
def test_whatever_happens_all_count_the_same_load(script):
    together = Together(3, prefill=["p1", "p2"], decode=["d1", "d2"])
    for number, move, name, tokens in script:
        router, request_id = together.routers[number], f"{number}-{name}"
        if move == "route":
            router.select_and_reserve(ask(request_id, tokens=tokens, prompt=request_id), 0.0)
        elif move == "first":
            router.on_first_token(request_id, 1.0)
        else:
            router.on_end(request_id)
    together.relay()
    first, *others = together.loads()
    assert others == [first, first]
    for number, name in itertools.product(range(3), range(6)):
        together.routers[number].on_end(f"{number}-{name}")
    together.relay()
    assert together.loads() == Together(3, prefill=["p1", "p2"], decode=["d1", "d2"]).loads()


@pytest.mark.parametrize("is_shared", [True, False])
def test_ingresses_that_share_spread_a_burst_and_others_do_not(is_shared):
    together = Together(4, prefill=["p1", "p2", "p3", "p4"], decode=["d1"])
    chosen = []
    for number, router in enumerate(together.routers):
        chosen.append(
            decided(router.select_and_reserve(ask(f"r{number}", tokens=4000, prompt=f"{number}"), 0.0)).prefill
        )
        if is_shared:
            together.relay()
    assert sorted(chosen) == (["p1", "p2", "p3", "p4"] if is_shared else ["p1"] * 4)


def test_a_report_that_has_not_seen_our_own_yet_hides_nothing_of_the_others():
    """As it does where they do not share: the report's tokens are taken for ours."""
    together = Together(2, prefill=["p1"], decode=["d1"])
    mine, other = together.routers
    other.select_and_reserve(ask("other", tokens=2000, prompt="o", force="remote"), 0.0)
    together.relay()
    mine.select_and_reserve(ask("mine", tokens=1000, prompt="m", force="remote"), 0.0)
    load(mine, "p1", queued_tokens=2000)
    assert together.loads()[0]["p1"][0] == 3000
    alone = cluster(["p1"], ["d1"])
    alone.select_and_reserve(ask("mine", tokens=1000, prompt="m", force="remote"), 0.0)
    load(alone, "p1", queued_tokens=2000)
    assert alone.workers()[1].load["queued_tokens"] == 2000


def test_while_one_has_not_said_the_report_counts_for_it():
    router = cluster(["p1"], ["d1"])
    router.apply_others("p1", AssignedByOthers(2, False, tokens=100, prompts=1))
    load(router, "p1", queued_tokens=900)
    assert router.workers()[1].load["queued_tokens"] == 900
    router.apply_others("p1", AssignedByOthers(2, True, tokens=100, prompts=1))
    assert router.workers()[1].load["queued_tokens"] == 100
    load(router, "p1", queued_tokens=900)
    assert router.workers()[1].load["queued_tokens"] == 100


def test_only_where_others_listen_is_anything_told():
    router = cluster(["p1"], ["d1"])
    router.select_and_reserve(ask("r1", force="remote"), 0.0)
    assert router.take_assigned() == []
    router.apply_others("p1", AssignedByOthers(1, False))
    assert router.take_assigned() == [("p1", share(tokens=1000, prompts=1, sequences=1))]
    assert router.take_assigned() == []
    router.apply_others("p1", AssignedByOthers(0, True))
    router.on_end("r1")
    assert router.take_assigned() == []


def test_a_worker_that_goes_is_told_of_no_more_and_begins_anew():
    router = cluster(["p1"], ["d1"])
    router.apply_others("p1", AssignedByOthers(1, True, tokens=700))
    assert isinstance(router.select_and_reserve(ask("r1", force="remote"), 0.0), Decision)
    info = router._workers.accounts["p1"].info
    router.worker_down("p1")
    router.on_end("r1")
    assert router.take_assigned() == []
    router.worker_up(info)
    assert router.workers()[1].load["queued_tokens"] == 0
    router.apply_others("p2", AssignedByOthers(1, True, tokens=700))  # nobody knows it: nothing happens
    assert [view.worker_id for view in router.workers()] == ["d1", "p1"]


def test_a_connection_made_again_tells_again():
    """The worker has forgotten with the old one what we had said."""
    router = cluster(["p1"], ["d1"])
    router.apply_others("p1", AssignedByOthers(1, True, tokens=700))
    router.select_and_reserve(ask("r1", force="remote"), 0.0)
    router.take_assigned()
    router.worker_up(router._workers.accounts["p1"].info)
    assert router.workers()[1].load["queued_tokens"] == 1000
    router.apply_others("p1", AssignedByOthers(1, False))
    assert router.take_assigned() == [("p1", share(tokens=1000, prompts=1, sequences=1))]


# ---- in time


class Timer:
    def __init__(self):
        self.now_s, self.due = 0.0, []

    def after(self, delay_s, call):
        self.due.append((self.now_s + delay_s, call))

    def run(self, until_s):
        while self.due and min(self.due, key=lambda one: one[0])[0] <= until_s:
            one = min(self.due, key=lambda one: one[0])
            self.due.remove(one)
            self.now_s = one[0]
            one[1]()
        self.now_s = until_s


@given(st.lists(st.integers(0, 30), max_size=20))
def test_what_is_paced_follows_every_asking_within_the_period_and_not_more_often(gaps):
    timer, called, asked = Timer(), [], []
    paced = Paced(lambda: called.append(timer.now_s), 10.0, now=lambda: timer.now_s, after=timer.after)
    for gap in gaps:
        timer.run(timer.now_s + gap)
        asked.append(timer.now_s)
        paced.request()
    timer.run(timer.now_s + 10.0)
    assert all(later - sooner >= 10.0 for sooner, later in itertools.pairwise(called))
    assert all(any(at <= call <= at + 10.0 for call in called) for at in asked)
    assert len(called) <= len(asked)


def _mean_ttft_s():
    cases = {"ingress": 6, "prefill": 4, "decode": 4, "message_s": 0.0005, "settings": {}}
    sim = simulate(chats(160, every_s=0.012), **cases)
    assert sim.summary()["outcomes"] == {"done": 160}
    return sum(sim.tally.ttft_s) / len(sim.tally.ttft_s)


def test_six_ingresses_that_share_wait_less_than_six_that_do_not(monkeypatch):
    shared_s = _mean_ttft_s()
    monkeypatch.setattr(Router, "apply_others", lambda self, worker_id, others: None)
    assert shared_s < 0.9 * _mean_ttft_s()


def test_when_all_is_over_nobody_counts_anything_not_even_of_an_ingress_that_was_restarted():
    faults = [
        {"kind": "ingress_restart", "at_s": 0.8, "target": "i1"},
        {"kind": "crash", "at_s": 1.1, "target": "p1", "for_s": 0.4},
    ]
    sim = simulate(chats(120, every_s=0.012), ingress=3, faults=faults, detect_s=0.05, start_s=0.0)
    assert set(sim.summary()["outcomes"]) == {"done", "error"}  # those that the restarted one had are lost
    sim.clock.run(sim.clock.now_s + 1.0)
    for ingress in sim.ingresses:
        views = ingress.router.workers()
        assert {view.worker_id for view in views} == {"p0", "p1", "d0", "d1"}
        assert [(view.load["queued_tokens"], view.load["sequences"]) for view in views] == [(0, 0)] * 4
    reports = [worker.reports for worker in sim.workers if worker.is_alive]
    assert all(report._assigned.total() == (0, 0, 0, 0) for report in reports)
