"""The index of who holds which prefix: hits, gaps, snapshots, restarts; and a state machine over all of it."""

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from kvrelay.plane.reports import KvEvents, KvSnapshot, LoadReport, WorkerInfo
from kvrelay.router.decision.router import Router
from kvrelay.router.index.indexed_worker import RETRY_EVERY
from kvrelay.router.index.prefix_index import PrefixIndex
from kvrelay.router.types import Decision, IndexState, RouteRequest
from kvrelay.settings.router import RouterSettings
from kvrelay.types import Fingerprint
from tests.router.index.index_cases import kv_events, kv_snapshot, match
from tests.scale import scaled

pytestmark = pytest.mark.pure


BLOCK = 16
FINGERPRINT = Fingerprint(1, "m", "bfloat16", BLOCK, 2, 2, 8, "seed")
CHAINS = [tuple(f"{name}{i}".encode().ljust(16) for i in range(6)) for name in "abc"]
ALL_HASHES = [block_hash for chain in CHAINS for block_hash in chain]
A = CHAINS[0]


def fed(*workers, max_blocks=100):
    index = PrefixIndex()
    for worker_id in workers:
        index.add_worker(worker_id, max_blocks=max_blocks)
        index.apply_snapshot(worker_id, kv_snapshot(0, []))
    return index


def test_a_match_counts_leading_blocks_per_worker():
    index = fed("w1", "w2", "w3")
    index.apply_events("w1", kv_events(1, A[:2], []))
    index.apply_events("w2", kv_events(1, A[:5], []))
    index.apply_events("w3", kv_events(1, A[1:], []))  # not the first block: no prefix
    assert match(index, A) == {"w1": 2, "w2": 5}


def test_a_match_ends_at_a_hole():
    index = fed("w1")
    index.apply_events("w1", kv_events(1, A, []))
    index.apply_events("w1", kv_events(2, [], [A[2]]))
    assert match(index, A) == {"w1": 2}


def test_a_prompt_without_full_blocks_matches_nobody():
    index = fed("w1")
    index.apply_events("w1", kv_events(1, A, []))
    assert match(index, ()) == {}


def test_before_its_first_snapshot_a_worker_is_stale_and_asked_once():
    index = PrefixIndex()
    index.add_worker("w1", max_blocks=100)
    assert index.apply_events("w1", kv_events(1, A, [])) is False
    assert index.apply_events("w1", kv_events(2, A, [])) is True
    assert (index.state("w1"), match(index, A)) == (IndexState.STALE, {})


def test_a_gap_makes_stale_and_a_snapshot_heals():
    index = fed("w1", "w2")
    index.apply_events("w1", kv_events(1, A, []))
    index.apply_events("w2", kv_events(1, A[:1], []))
    assert index.apply_events("w1", kv_events(3, [], [])) is False
    assert (index.state("w1"), match(index, A)) == (IndexState.STALE, {"w2": 1})
    index.apply_snapshot("w1", kv_snapshot(4, A[:3]))
    assert (index.state("w1"), match(index, A)) == (IndexState.EXACT, {"w1": 3, "w2": 1})


def test_events_older_than_the_snapshot_change_nothing():
    index = fed("w1")
    index.apply_snapshot("w1", kv_snapshot(5, A[:3]))
    assert index.apply_events("w1", kv_events(4, [], A[:3])) is True
    assert index.apply_events("w1", kv_events(5, A[3:], [])) is True
    assert match(index, A) == {"w1": 3}
    assert index.apply_events("w1", kv_events(6, A[3:], [])) is True
    assert match(index, A) == {"w1": 6}


def test_a_snapshot_older_than_the_events_is_ignored():
    index = fed("w1")
    index.apply_events("w1", kv_events(1, A, []))
    index.apply_snapshot("w1", kv_snapshot(0, []))
    assert match(index, A) == {"w1": 6}


def test_a_lost_snapshot_is_asked_for_again():
    index = fed("w1")
    asked = [seq for seq in range(5, 5 + 2 * RETRY_EVERY) if not index.apply_events("w1", kv_events(seq, [], []))]
    assert asked == [5, 5 + RETRY_EVERY]


def test_a_removal_of_the_unknown_degrades_but_still_hits():
    index = fed("w1")
    index.apply_events("w1", kv_events(1, A[:2], []))
    assert index.apply_events("w1", kv_events(2, [], [A[5]])) is False
    assert (index.state("w1"), match(index, A)) == (IndexState.DEGRADED, {"w1": 2})
    assert index.apply_events("w1", kv_events(3, [], [A[5]])) is True  # asked already
    index.apply_snapshot("w1", kv_snapshot(4, A[:2]))
    assert index.state("w1") is IndexState.EXACT


def test_a_worker_that_announces_without_bound_is_cut_off():
    index = fed("w1", max_blocks=4)
    assert index.apply_events("w1", kv_events(1, A, [])) is False
    assert (index.state("w1"), index.num_blocks("w1"), len(index)) == (IndexState.DEGRADED, 4, 4)


def test_a_removed_worker_leaves_nothing():
    index = fed("w1", "w2")
    index.apply_events("w1", kv_events(1, A, []))
    index.apply_events("w2", kv_events(1, A[:2], []))
    index.remove_worker("w1")
    assert (match(index, A), len(index)) == ({"w2": 2}, 2)
    index.remove_worker("w2")
    index.remove_worker("w2")
    assert len(index) == 0


def test_a_new_worker_on_a_freed_place_inherits_nothing():
    index = fed("w1", "w2", "w3")
    index.apply_events("w2", kv_events(1, A, []))
    index.remove_worker("w2")
    index.add_worker("w4", max_blocks=100)
    index.apply_snapshot("w4", kv_snapshot(0, []))
    index.apply_events("w3", kv_events(1, A[:1], []))
    assert match(index, A) == {"w3": 1}


def test_a_worker_with_larger_blocks_is_found_by_every_kth_hash():
    index = fed("w1")
    index.add_worker("w2", max_blocks=100, stride=2)
    index.apply_snapshot("w2", kv_snapshot(0, [A[1], A[3]]))
    index.apply_events("w1", kv_events(1, A[:5], []))
    assert match(index, A) == {"w1": 5, "w2": 4}
    assert match(index, A[:3]) == {"w1": 3, "w2": 2}
    assert match(index, A[:1]) == {"w1": 1}


def test_a_worker_with_larger_blocks_is_not_found_by_hashes_that_end_none_of_them():
    index = PrefixIndex()
    index.add_worker("w2", max_blocks=100, stride=2)
    index.apply_snapshot("w2", kv_snapshot(0, [A[0], A[2], A[4]]))
    assert match(index, A) == {}


def test_a_worker_may_come_back_with_other_blocks():
    index = PrefixIndex()
    for stride, expected in ((2, {"w1": 6}), (1, {}), (3, {})):
        index.add_worker("w1", max_blocks=100, stride=stride)
        index.apply_snapshot("w1", kv_snapshot(0, [A[1], A[3], A[5]]))
        assert match(index, A) == expected


def info(worker_id, epoch="e1", role="prefill"):
    return WorkerInfo(
        worker_id=worker_id,
        role=role,
        epoch=epoch,
        host="h",
        port=1,
        node_id="n",
        model="m",
        fingerprint=FINGERPRINT,
        block_size=2 * BLOCK if worker_id.endswith("2") else BLOCK,
        num_blocks=100,
        max_model_len=1600,
        max_running=8,
        kv_bytes_per_token=100,
        device="cpu",
        transports=[],
    )


def routed(router, request_id="r", chain=A):
    return router.select_and_reserve(
        RouteRequest(request_id, chain, num_tokens=len(chain) * BLOCK + 1, max_tokens=4, force="remote"), 0.0
    )


def router_with(*workers):
    router = Router(RouterSettings(), tokens_per_hash=BLOCK)
    for worker in workers:
        router.worker_up(worker)
        router.apply_snapshot(worker.worker_id, KvSnapshot(seq=0, hashes=[]))
    return router


def test_a_stale_index_never_gives_a_hit():
    router = router_with(info("p1"), info("d1", role="decode"))
    router.apply_events("p1", KvEvents(seq=1, stored=list(A)))
    assert routed(router).cached_tokens_prefill == 96
    router.on_end("r")
    assert router.apply_events("p1", KvEvents(seq=3)) is False
    assert routed(router).cached_tokens_prefill == 0


def test_a_restarted_worker_starts_empty():
    router = router_with(info("p1"), info("d1", role="decode"))
    router.apply_events("p1", KvEvents(seq=1, stored=list(A)))
    routed(router)
    router.worker_up(info("p1", epoch="e2"))
    view = router.workers()[1]
    assert (view.epoch, view.indexed_blocks, view.assigned_requests, view.assigned_tokens) == ("e2", 0, 0, 0)
    router.on_end("r")  # of the earlier life
    assert router.workers()[1].assigned_tokens == 0


def test_a_reconnected_worker_gives_no_hit_until_its_snapshot():
    router = router_with(info("p1"), info("d1", role="decode"))
    router.apply_events("p1", KvEvents(seq=1, stored=list(A)))
    router.worker_up(info("p1"))
    assert routed(router).cached_tokens_prefill == 0
    router.on_end("r")
    router.apply_snapshot("p1", KvSnapshot(seq=1, hashes=list(A)))
    assert routed(router).cached_tokens_prefill == 96


def test_words_of_a_worker_that_is_gone_change_nothing():
    router = router_with(info("p1"))
    router.worker_down("p1")
    router.apply_load("p1", LoadReport(seq=1, running=5), 0.0)
    router.apply_snapshot("p1", KvSnapshot(seq=1, hashes=list(A)))
    assert router.apply_events("p1", KvEvents(seq=1, stored=list(A))) is True
    router.worker_down("p1")
    assert router.workers() == []


class RouterMachine(RuleBasedStateMachine):
    """Random lives of workers and requests against the plainest possible model."""

    names = st.sampled_from(["p1", "p2", "d1", "d2"])

    def __init__(self):
        super().__init__()
        self.router = Router(RouterSettings(), tokens_per_hash=BLOCK)
        self.held = {}  # worker -> set of hashes that it really has
        self.seq = {}
        self.exact = set()
        self.live = {}  # request -> (computing worker, tokens, decode worker), each worker with its incarnation
        self.epochs = {}
        self.next_request = 0

    @rule(name=names)
    def start_or_restart(self, name):
        self.epochs[name] = self.epochs.get(name, 0) + 1
        self.router.worker_up(info(name, f"e{self.epochs[name]}", "prefill" if name[0] == "p" else "decode"))
        self.router.apply_snapshot(name, KvSnapshot(seq=0, hashes=[]))
        self.held[name], self.seq[name] = set(), 0
        self.exact.add(name)

    @rule(name=names)
    def die(self, name):
        self.router.worker_down(name)
        self.held.pop(name, None)
        self.exact.discard(name)
        self.epochs[name] = self.epochs.get(name, 0) + 1

    @precondition(lambda self: self.held)
    @rule(data=st.data(), lost=st.booleans())
    def change_blocks(self, data, lost):
        name = data.draw(st.sampled_from(sorted(self.held)))
        have = self.held[name]
        removed = data.draw(st.sets(st.sampled_from(sorted(have)), max_size=4)) if have else set()
        stored = data.draw(st.sets(st.sampled_from(ALL_HASHES), max_size=8)) - have
        self.held[name] = (have | stored) - removed
        self.seq[name] += 1
        if lost:
            self.exact.discard(name)
            return
        event = KvEvents(seq=self.seq[name], stored=sorted(stored), removed=sorted(removed))
        self.router.apply_events(name, event)

    @precondition(lambda self: self.held)
    @rule(data=st.data())
    def snapshot(self, data):
        name = data.draw(st.sampled_from(sorted(self.held)))
        self.router.apply_snapshot(name, KvSnapshot(seq=self.seq[name], hashes=sorted(self.held[name])))
        self.exact.add(name)

    @precondition(lambda self: self.held)
    @rule(data=st.data(), queued=st.integers(0, 500), running=st.integers(0, 9), free=st.integers(0, 100))
    def report(self, data, queued, running, free):
        name = data.draw(st.sampled_from(sorted(self.held)))
        report = LoadReport(seq=1, queued_tokens=queued, running=running, free_blocks=free, total_blocks=100)
        self.router.apply_load(name, report, 1.0)

    @rule(
        chain=st.sampled_from(CHAINS),
        blocks=st.integers(0, 6),
        tail=st.integers(1, 15),
        needs_decode=st.booleans(),
        force=st.sampled_from([None, "local", "remote"]),
        excluded=st.frozensets(names, max_size=2),
    )
    def route(self, chain, blocks, tail, needs_decode, force, excluded):
        request_id = f"r{self.next_request}"
        self.next_request += 1
        tokens = blocks * BLOCK + tail
        request = RouteRequest(request_id, chain[:blocks], tokens, 8, needs_decode, excluded, force)
        choice = self.router.select_and_reserve(request, 0.0)
        if not isinstance(choice, Decision):
            return
        chosen = {choice.prefill, choice.decode} - {None}
        assert chosen and chosen <= set(self.held) and not chosen & excluded
        compute = choice.prefill or choice.decode
        uncached = tokens - choice.cached_tokens_prefill
        assert 1 <= uncached <= tokens
        self.live[request_id] = (compute, self.epochs[compute], uncached, choice.decode, self.epochs.get(choice.decode))

    @precondition(lambda self: self.live)
    @rule(data=st.data())
    def first_token(self, data):
        request_id = data.draw(st.sampled_from(sorted(self.live)))
        self.router.on_first_token(request_id, 2.0)
        self.live[request_id] = (None, None, 0, *self.live[request_id][3:])

    @precondition(lambda self: self.live)
    @rule(data=st.data())
    def end(self, data):
        request_id = data.draw(st.sampled_from(sorted(self.live)))
        self.router.on_end(request_id)
        self.router.on_end(request_id)
        del self.live[request_id]

    @invariant()
    def accounts_are_the_live_requests(self):
        for view in self.router.workers():
            name, epoch = view.worker_id, self.epochs[view.worker_id]
            computing = [one for one in self.live.values() if one[0] == name and one[1] == epoch]
            assert view.assigned_tokens == sum(one[2] for one in computing)
            sequences = sum(one[3] == name and one[4] == epoch for one in self.live.values())
            sequences += sum(one[3] != name for one in computing)
            assert view.assigned_requests == sequences
            assert view.load["queued_tokens"] >= view.assigned_tokens
            assert view.load["sequences"] >= view.assigned_requests

    @invariant()
    def index_is_what_brute_force_finds(self):
        index = self.router.index
        for chain in CHAINS:
            expected = {}
            for name in self.exact:
                stride = 2 if name.endswith("2") else 1
                ends = chain[stride - 1 :: stride]
                depth = next((i for i, h in enumerate(ends) if h not in self.held[name]), len(ends))
                if depth:
                    expected[name] = depth * stride
            found = match(index, chain)
            for name, depth in expected.items():
                assert found.get(name, 0) == depth
            for name in found.keys() - expected.keys():  # lost an event that it cannot know of yet
                assert name in self.held and name not in self.exact

    def teardown(self):
        for request_id in list(self.live):
            self.router.on_end(request_id)
        assert [(v.assigned_requests, v.assigned_tokens) for v in self.router.workers()] == [(0, 0)] * len(self.held)
        assert len(self.router._ledger) == 0 and not self.router._ledger._pending
        for name in list(self.held):
            self.router.worker_down(name)
        assert len(self.router.index) == 0


TestRouterMachine = RouterMachine.TestCase
TestRouterMachine.settings = settings(max_examples=scaled(60), stateful_step_count=30, deadline=None)
