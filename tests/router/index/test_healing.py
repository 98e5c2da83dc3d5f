"""An index heals whatever a channel does to a worker's news: a state machine with a lossy, reordering one; audits.

Snapshots come whole or in parts, and go in at once or a slice at a time.
"""

import pytest
from hypothesis import Phase, settings
from hypothesis import strategies as st
from hypothesis.stateful import (
    RuleBasedStateMachine,
    initialize,
    invariant,
    precondition,
    rule,
    run_state_machine_as_test,
)

from kvrelay.plane.reports import BELOW_POOL, CHANGING, IN_POOL, NOWHERE, KvEvents, KvSnapshot
from kvrelay.router.index.indexed_worker import AuditCounts, IndexedWorker, SnapshotIngest, Sweep
from kvrelay.router.index.prefix_index import MAX_OUTDATED, PrefixIndex
from kvrelay.router.types import IndexState
from tests.router.index.index_cases import ScheduledIndex, depths, holders_of, kv_events, kv_snapshot, match
from tests.scale import scaled

pytestmark = pytest.mark.pure


CHAIN = [f"h{i}".encode().ljust(16) for i in range(12)]


class Worker:
    """A worker that tells what it has, and numbers what it tells."""

    def __init__(self):
        self.seq, self.pool, self.in_any_tier = 0, set(), set()
        self.told = {0: (set(), set())}  # by seq

    def become(self, pool, in_any_tier):
        """The event that tells it."""
        had, has = self.pool | self.in_any_tier, pool | in_any_tier
        changes = {
            "stored": has - had,
            "removed": had - has,
            "lowered": (in_any_tier - pool) - (self.in_any_tier - self.pool),
            "raised": (pool - self.pool) & had,
        }
        self.seq, self.pool, self.in_any_tier = self.seq + 1, pool, in_any_tier - pool
        self.told[self.seq] = self.pool, self.in_any_tier
        return "event", self.seq, {set_id: sorted(hashes) for set_id, hashes in changes.items()}

    def snapshot(self):
        return [
            (
                "snapshot",
                self.seq,
                {"hashes": sorted(self.pool | self.in_any_tier), "lowered": sorted(self.in_any_tier)},
            )
        ]

    def parts(self):
        """The same in parts, always as many for one number."""
        [(set_id, seq, fields)] = self.snapshot()
        most, hashes, parts = 1 + seq % 5, fields["hashes"], []
        for part, start in enumerate(range(0, max(1, len(hashes)), most)):
            some, is_last = hashes[start : start + most], start + most >= len(hashes)
            fields = {
                "hashes": some,
                "lowered": sorted(self.in_any_tier.intersection(some)),
                "part": part,
                "is_last": is_last,
            }
            parts.append((set_id, seq, fields))
        return parts

    def answer(self, hashes):
        return [IN_POOL if one in self.pool else BELOW_POOL if one in self.in_any_tier else NOWHERE for one in hashes]


class ChannelMachine(RuleBasedStateMachine):
    """What is sent may arrive late, out of order, twice or never. In the end the channel is quiet and an audit asks."""

    blocks = st.integers(0, len(CHAIN)).flatmap(lambda n: st.just(set(CHAIN[:n])) | st.sets(st.sampled_from(CHAIN)))

    @initialize(is_deferred=st.booleans())
    def begin(self, is_deferred):
        self.index, self.worker = ScheduledIndex(chunk=2, is_deferred=is_deferred), Worker()
        self.index.add_worker("other", max_blocks=100)
        self.index.apply_snapshot("other", kv_snapshot(0, CHAIN[::2]))
        self.start()
        [message] = self.worker.snapshot()
        self.deliver(message)

    def start(self):
        """A new incarnation over a new connection: nothing of the old one arrives any more."""
        self.worker, self.channel, self.is_asked = Worker(), [], True
        self.index.add_worker("w", max_blocks=100)

    @rule(is_restart=st.booleans(), in_parts=st.booleans())
    def reconnect(self, is_restart, in_parts):
        if is_restart:
            self.start()
        else:
            self.channel, self.is_asked = [], True
            self.index.mark_stale("w")
        self.channel += self.worker.parts() if in_parts else self.worker.snapshot()

    @rule(pool=blocks, in_any_tier=blocks)
    def change(self, pool, in_any_tier):
        if (pool, in_any_tier - pool) != (self.worker.pool, self.worker.in_any_tier):
            self.channel.append(self.worker.become(pool, in_any_tier))

    @precondition(lambda self: self.is_asked)
    @rule(is_lost=st.booleans(), in_parts=st.booleans())
    def answer_with_a_snapshot(self, is_lost, in_parts):
        self.is_asked = False
        if not is_lost:
            self.channel += self.worker.parts() if in_parts else self.worker.snapshot()

    @rule(changes=st.lists(blocks, max_size=4), slices=st.integers(0, 2))
    def connect_again_and_change_while_the_parts_come(self, changes, slices):
        """All of it arrives, in order."""
        self.channel, self.is_asked = [], True
        self.index.mark_stale("w")
        for part in self.worker.parts():
            self.deliver(part)
            self.work(slices)
            if changes and changes[0] != self.worker.pool:
                self.deliver(self.worker.become(changes.pop(0), self.worker.in_any_tier))

    @rule(times=st.integers(1, 9))
    def work(self, times):
        while times and self.index.work():
            times -= 1
            assert self.index.num_scheduled, "there is work that nothing has scheduled"

    @invariant()
    def who_is_exact_is_so(self):
        if hasattr(self, "index") and self.index.state("w") is IndexState.EXACT:
            assert self.held() == self.worker.told[self.index._members["w"].seq]

    def held(self):
        """What the index has of it: (in its pool, below)."""
        member = self.index._members["w"]
        masks = {one: member.holders.mask(one) & member.both for one in CHAIN}
        return {one for one in CHAIN if masks[one] == member.both}, {
            one for one in CHAIN if masks[one] == member.anywhere
        }

    @precondition(lambda self: self.channel)
    @rule(fate=st.sampled_from(["deliver", "deliver", "deliver", "lose", "twice"]), data=st.data())
    def pass_on(self, fate, data):
        place = data.draw(st.just(0) | st.integers(0, len(self.channel) - 1))
        message = self.channel[place]
        if fate != "twice":
            del self.channel[place]
        if fate != "lose":
            self.deliver(message)

    def deliver(self, message):
        set_id, seq, fields = message
        index = self.index
        take, kind = (index.apply_events, KvEvents) if set_id == "event" else (index.apply_snapshot, KvSnapshot)
        self.is_asked |= not take("w", kind(seq=seq, **fields))

    def audit(self, seed):
        """Over a channel that works. Whether all is well."""
        hashes = self.index.audit_sample("w", seed, 24)
        if hashes is None:  # it has sent nothing yet: no worker with events, as far as the index knows
            return False
        return self.index.apply_audit("w", self.worker.seq, hashes, self.worker.answer(hashes))

    def teardown(self):
        if not hasattr(self, "index"):
            return
        for message in self.channel[:-1]:  # and the last one is lost, so that nothing follows to tell of it
            self.deliver(message)
        for seed in range(4):
            while self.index.work():
                pass
            if not self.audit(seed):
                for message in self.worker.parts():
                    self.deliver(message)
        assert self.index.state("w") is IndexState.EXACT
        for first in range(len(CHAIN)):
            found = depths(self.index, CHAIN[first:])
            expected = [
                next((i for i, one in enumerate(CHAIN[first:]) if one not in held), len(CHAIN) - first)
                for held in (self.worker.pool, self.worker.pool | self.worker.in_any_tier)
            ]
            assert found.get("w") == (tuple(expected) if expected[1] else None)
        assert self.index.num_blocks("w") == len(self.worker.pool | self.worker.in_any_tier)
        assert self.index.num_blocks("other") == len(CHAIN[::2])
        assert holders_of(self.index).num_sweeps == 0


@pytest.fixture(autouse=True)
def small_slices():
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("kvrelay.router.index.indexed_worker.SLICE", 2)
        patch.setattr("kvrelay.router.index.holders._STRETCH", 3)
        yield


TestChannelMachine = ChannelMachine.TestCase
TestChannelMachine.settings = settings(max_examples=scaled(100), stateful_step_count=30, deadline=None)


@pytest.mark.parametrize("broken", ["gaps", "no audit", "blind audit", "lowered", "events forgotten", "rest stays"])
def test_the_machine_finds_a_broken_rule(broken, monkeypatch):
    """Controls: gaps unnoticed; nobody asks in the end; audits that do not look; tiers that are not kept.

    Slices that put in what an event has removed; what a snapshot does not name stays.
    """
    if broken == "gaps":
        receive = IndexedWorker.receive

        def no_gaps(self, seq):
            self.seq = max(self.seq, seq - 1)
            return receive(self, seq)

        monkeypatch.setattr(IndexedWorker, "receive", no_gaps)
        monkeypatch.setattr(ChannelMachine, "audit", lambda self, seed: True)
    elif broken == "blind audit":
        monkeypatch.setattr(PrefixIndex, "apply_audit", lambda self, *rest: True)
    elif broken == "no audit":
        monkeypatch.setattr(ChannelMachine, "audit", lambda self, seed: True)
    elif broken == "events forgotten":
        monkeypatch.setattr(SnapshotIngest, "touch", lambda self, *changes: None)
    elif broken == "rest stays":
        monkeypatch.setattr(Sweep, "step", lambda self: self.stop() or 0)
    else:
        move = IndexedWorker.move
        monkeypatch.setattr(IndexedWorker, "move", lambda self, hashes, *, in_pool: move(self, hashes, in_pool=True))
        monkeypatch.setattr(ChannelMachine, "audit", lambda self, seed: self.index.state("w") is IndexState.EXACT)
    with pytest.raises(AssertionError):
        run_state_machine_as_test(
            ChannelMachine,
            settings=settings(
                max_examples=400, stateful_step_count=30, deadline=None, database=None, phases=[Phase.generate]
            ),
        )


def fed(**held):
    index = PrefixIndex()
    for worker_id, hashes in held.items():
        index.add_worker(worker_id, max_blocks=100)
        index.apply_snapshot(worker_id, kv_snapshot(3, hashes))
    return index


def test_a_snapshot_from_before_a_lost_event_heals_nothing_and_is_asked_for_again_a_few_times():
    index = fed(w=CHAIN[:2])
    assert index.apply_events("w", kv_events(9, [], [])) is False
    answers = [index.apply_snapshot("w", kv_snapshot(8, CHAIN[:3])) for _ in range(MAX_OUTDATED + 1)]
    assert answers == [False] * MAX_OUTDATED + [True]
    assert index.state("w") is IndexState.STALE
    index.apply_snapshot("w", kv_snapshot(9, CHAIN[:3]))
    assert (index.state("w"), match(index, CHAIN)) == (IndexState.EXACT, {"w": 3})


def test_a_sample_has_what_is_claimed_what_went_of_late_and_what_others_hold():
    index = fed(w=CHAIN[:6], other=CHAIN[4:10])
    index.apply_events("w", kv_events(4, [], [CHAIN[0]]))
    for seed in range(20):
        hashes = index.audit_sample("w", seed, 8)
        assert hashes == index.audit_sample("w", seed, 8) and len(set(hashes)) == len(hashes) <= 8
        assert CHAIN[0] in hashes and set(hashes) & set(CHAIN[6:10]) and set(hashes) & set(CHAIN[1:6])
    assert index.audit_sample("nobody", 0, 8) is None


def test_a_stale_worker_is_asked_for_its_number_alone():
    index = fed(w=CHAIN)
    assert index.apply_events("w", kv_events(99, [], [])) is False  # a number that it never gave
    assert index.audit_sample("w", 0, 8) == []
    assert [index.apply_snapshot("w", kv_snapshot(4, CHAIN)), index.state("w")] == [False, IndexState.STALE]
    assert index.apply_audit("w", 4, [], []) is False
    assert [index.apply_snapshot("w", kv_snapshot(4, CHAIN)), index.state("w")] == [True, IndexState.EXACT]


@pytest.mark.parametrize(
    ("tiers", "state", "counts"),
    [
        ([IN_POOL, IN_POOL, NOWHERE], IndexState.EXACT, AuditCounts(3, 0, 0)),
        ([IN_POOL, NOWHERE, NOWHERE], IndexState.STALE, AuditCounts(3, 1, 0)),
        ([BELOW_POOL, IN_POOL, NOWHERE], IndexState.STALE, AuditCounts(3, 1, 0)),
        ([IN_POOL, IN_POOL, BELOW_POOL], IndexState.DEGRADED, AuditCounts(3, 0, 1)),
        ([CHANGING, CHANGING, CHANGING], IndexState.EXACT, AuditCounts(0, 0, 0)),
    ],
)
def test_an_answer_that_disagrees_is_counted_and_asks_for_a_snapshot(tiers, state, counts):
    index = fed(w=CHAIN[:2])
    assert index.apply_audit("w", 3, CHAIN[:3], tiers) is (state is IndexState.EXACT)
    assert (index.state("w"), index.audit_counts("w")) == (state, counts)


def test_an_answer_from_beyond_the_events_means_that_some_were_lost():
    index = fed(w=CHAIN[:2])
    assert index.apply_audit("w", 4, [], []) is False
    assert (index.state("w"), match(index, CHAIN)) == (IndexState.STALE, {})


def test_an_answer_that_was_overtaken_changes_nothing_but_a_second_one_is_believed():
    index = fed(w=CHAIN[:2])
    assert index.apply_audit("w", 1, CHAIN[:1], [NOWHERE]) is True
    assert index.state("w") is IndexState.EXACT
    assert index.apply_audit("w", 1, CHAIN[:1], [NOWHERE]) is False
    index.apply_snapshot("w", kv_snapshot(1, CHAIN[:1]))
    assert (index.state("w"), match(index, CHAIN)) == (IndexState.EXACT, {"w": 1})


def test_audits_of_who_left_are_forgotten():
    index = fed(w=CHAIN[:2])
    index.apply_audit("w", 3, CHAIN[:1], [NOWHERE])
    index.remove_worker("w")
    assert index.apply_audit("w", 3, CHAIN[:1], [NOWHERE]) is True
    assert index.audit_counts("w") == AuditCounts()
