"""TierIndex: no slot lost, nothing evicted that is held, pinned or continued, the policy's order, quotas kept."""

from dataclasses import dataclass, field

import hypothesis.strategies as st
import pytest
from hypothesis.stateful import RuleBasedStateMachine, rule

from kvrelay.kvcache.eviction.policies import Lru
from kvrelay.kvcache.index.tier_index import OfferedBefore, TierCounts, TierIndex
from kvrelay.kvcache.index.victims import VictimQueues
from kvrelay.types import BlockHash
from tests.kvcache.pool import machine_steps

pytestmark = pytest.mark.pure


def name(text: str) -> BlockHash:
    return BlockHash(text.encode().ljust(16, b"."))


def put_chain(tier: TierIndex, names: str, now_s: float, *, tenant: str = "", priority: int = 0) -> list[BlockHash]:
    """A chain "abc" of blocks a <- b <- c, put block by block; those already there stay."""
    hashes = [name(names[: end + 1]) for end in range(len(names))]
    for index, digest in enumerate(hashes):
        slots = tier.reserve(1, now_s, tenant=tenant)
        assert slots is not None
        parent = hashes[index - 1] if index else None
        tier.put(digest, slots[0], now_s, parent=parent, end_tokens=16 * (index + 1), priority=priority)
    return hashes


def test_a_chain_is_found_from_any_block_on_as_far_as_it_is_unbroken():
    tier = TierIndex(8, Lru())
    a, ab, abc = put_chain(tier, "abc", 0)
    slots = [tier.row(digest) for digest in (a, ab, abc)]
    assert tier.match([a, ab, abc, name("abcd")]) == slots
    assert tier.match([name("?"), ab, abc], start=1) == slots[1:]
    assert tier.match([name("?"), ab, abc]) == []
    tier.discard([ab], 1)
    assert tier.match([a, ab, abc]) == slots[:1]
    assert tier.match([a, ab, abc], start=2) == slots[2:]


def test_reserved_slots_are_not_found_until_they_are_put():
    tier = TierIndex(2, Lru())
    (slot,) = tier.reserve(1, 0) or ()
    assert tier.match([name("a")]) == []
    assert tier.put(name("a"), slot, 0, parent=None, end_tokens=16)
    assert tier.match([name("a")]) == [slot]


def test_a_second_copy_gives_its_slot_back():
    tier = TierIndex(2, Lru())
    put_chain(tier, "a", 0)
    (slot,) = tier.reserve(1, 0) or ()
    assert not tier.put(name("a"), slot, 0, parent=None, end_tokens=16)
    assert tier.counts() == TierCounts(free=1, reserved=0, cached=1, leaving=0, held=0, pinned=0)


def test_the_tail_of_the_chain_used_longest_ago_goes_first():
    tier = TierIndex(5, Lru())
    old = put_chain(tier, "ab", 0)
    put_chain(tier, "xyz", 1)
    assert tier.next_victims(3, 2) == [old[1], old[0], name("xyz")]
    tier.use(old, 3)
    assert tier.next_victims(3, 4) == [name("xyz"), name("xy"), name("x")]
    tier.check()


def test_a_preview_of_victims_changes_nothing_and_tells_the_truth():
    tier = TierIndex(4, Lru())
    put_chain(tier, "ab", 0)
    put_chain(tier, "xy", 1)
    expected = tier.next_victims(3, 2)
    assert len(tier) == 4
    assert tier.next_victims(5, 2) == []
    before = set(tier.hashes())
    assert tier.reserve(3, 2) is not None
    assert before - set(tier.hashes()) == set(expected)


def test_no_room_is_a_value_and_changes_nothing():
    tier = TierIndex(3, Lru())
    chain = put_chain(tier, "abc", 0)
    tier.hold([chain[1]])
    assert tier.reserve(2, 1) is None  # only c is a leaf that nobody holds
    assert len(tier) == 3
    assert tier.reserve(1, 1) is not None
    assert chain[2] not in tier


def test_a_held_entry_stays_until_its_last_hold_ends():
    tier = TierIndex(1, Lru())
    (digest,) = put_chain(tier, "a", 0)
    slots = tier.hold([digest])
    tier.hold([digest])
    tier.unhold(slots)
    assert tier.reserve(1, 1) is None
    tier.unhold(slots)
    assert tier.reserve(1, 1) == slots


def test_a_block_discarded_while_held_is_not_found_and_its_slot_is_not_reused():
    tier = TierIndex(1, Lru())
    (digest,) = put_chain(tier, "a", 0)
    slots = tier.hold([digest])
    assert tier.discard([digest, name("?")], 1) == 1
    assert tier.match([digest]) == []
    assert tier.counts().leaving == 1
    assert tier.reserve(1, 1) is None
    tier.unhold(slots)
    assert tier.reserve(1, 1) == slots


def test_a_pin_holds_until_its_time_and_a_renewed_one_until_the_later():
    tier = TierIndex(1, Lru(), pin_limit=1)
    chain = put_chain(tier, "a", 0)
    assert tier.pin(chain, 10) == 1
    assert tier.pin(chain, 20) == 1
    assert tier.pin(chain, 15) == 1
    assert tier.reserve(1, 19) is None
    assert tier.reserve(1, 20) is not None


def test_pins_over_the_limit_are_refused_and_an_ended_pin_makes_room():
    tier = TierIndex(4, Lru())
    chain = put_chain(tier, "abc", 0)
    assert tier.pin(chain, 10) == 2
    tier.unpin(chain[:1])
    assert tier.pin(chain[2:], 10) == 1
    assert tier.counts().pinned == 2


def test_a_lower_priority_goes_first_however_lately_it_was_used():
    tier = TierIndex(2, Lru())
    put_chain(tier, "a", 0, priority=1)
    put_chain(tier, "b", 9)
    assert tier.next_victims(1, 10) == [name("b")]
    tier.use([name("b")], 11, priority=2)
    assert tier.next_victims(1, 12) == [name("a")]
    tier.use([name("b")], 13, priority=0)  # never lowered
    assert tier.next_victims(1, 14) == [name("a")]


def test_a_tenant_over_its_quota_evicts_its_own_blocks_only():
    tier = TierIndex(6, Lru(), quota=lambda tenant: 2)
    other = put_chain(tier, "x", 0, tenant="other")
    small = put_chain(tier, "ab", 1, tenant="small")
    assert tier.reserve(3, 2, tenant="small") is None
    slots = tier.reserve(1, 2, tenant="small")
    assert slots is not None
    assert small[1] not in tier and other[0] in tier
    assert tier.counts().free == 3  # though there was room
    tier.hold(small[:1])
    assert tier.reserve(1, 2, tenant="small") is None
    tier.cancel(slots)
    assert tier.reserve(1, 2, tenant="small") is not None


def test_a_quota_that_shrinks_takes_the_tenants_least_used_blocks_and_no_others():
    quotas = {"greedy": 4, "small": 4}
    tier = TierIndex(12, Lru(), quota=quotas.get)
    other, none = put_chain(tier, "xy", 0, tenant="small"), put_chain(tier, "z", 0)
    old, new = put_chain(tier, "ab", 1, tenant="greedy"), put_chain(tier, "cd", 2, tenant="greedy")
    quotas["greedy"] = 2
    tier.hold(old[:1])
    tier.trim(3)
    left = [digest in tier for digest in (*old, *new)]
    assert left == [True, False, True, False]  # leaves went, and nothing that is held
    assert all(digest in tier for digest in (*other, *none))
    quotas["greedy"] = 0
    tier.trim(4)
    assert [digest in tier for digest in (*old, *new)] == [True, False, False, False]
    assert tier.reserve(1, 5, tenant="greedy") is None
    tier.check()


def test_a_block_is_wanted_at_its_second_offer_where_an_admission_filter_is_set():
    tier = TierIndex(4, Lru(), admission=OfferedBefore(64))
    assert [tier.wants(name("a")), tier.wants(name("a")), tier.wants(name("b"))] == [False, True, False]
    assert TierIndex(4, Lru()).wants(name("a"))
    put_chain(tier, "a", 0)
    assert not tier.wants(name("a"))


def test_changes_tell_what_can_be_matched_and_cancel_out():
    tier = TierIndex(2, Lru(), keep_changes=True)
    put_chain(tier, "ab", 0)
    tier.discard([name("ab")], 1)
    change = tier.drain_changes()
    assert change is not None
    assert (change.stored, change.removed) == ((name("a"),), ())
    tier.discard([name("a")], 2)
    change = tier.drain_changes()
    assert change is not None
    assert (change.stored, change.removed) == ((), (name("a"),))
    assert tier.drain_changes() is None


def test_blocks_found_after_a_restart_take_their_own_slots():
    tier = TierIndex(3, Lru())
    tier.take(1)
    assert tier.put(name("a"), 1, 0, parent=None, end_tokens=16)
    assert tier.row(name("a")) == 1
    assert sorted(tier.reserve(2, 0) or ()) == [0, 2]


# ---- any order of operations, against a model that knows no queues

SLOTS = 7
PATHS = ["a", "ab", "abc", "abd", "b", "ba", "bab", "c"]
TENANTS = {"a": "small", "b": "", "c": "big"}  # by a chain's first letter, as a salt would have it
QUOTAS = {"small": 3, "big": 3}


@dataclass
class Walk:
    """Drives one TierIndex by numbers, and knows by brute force what may happen."""

    quotas: dict[str, int] = field(default_factory=QUOTAS.copy)
    tier: TierIndex = field(init=False)
    now_s: float = 0
    reserved: list[tuple[int, str]] = field(default_factory=list)
    held: list[tuple[int, BlockHash]] = field(default_factory=list)
    used_s: dict[BlockHash, float] = field(default_factory=dict)
    pins: dict[BlockHash, float] = field(default_factory=dict)
    published: set[BlockHash] = field(default_factory=set)

    def __post_init__(self) -> None:
        self.tier = TierIndex(SLOTS, Lru(), quota=self.quotas.get, pin_limit=2, keep_changes=True)

    def step(self, number: int) -> None:
        self.now_s += 1
        number, path = divmod(number, len(PATHS))
        actions = (self.reserve, self.put, self.put, self.cancel, self.use, self.hold, self.unhold, self.pin, self.drop)
        (*actions, self.trim)[number % (len(actions) + 1)](PATHS[path])
        self.tier.check()
        assert set(self.tier.hashes()) == set(self.used_s)

    def evictable(self, here: set[BlockHash]) -> list[BlockHash]:
        """Of these entries, those that may go now, least recently used first."""
        inner = {name(path[:-1]) for path in PATHS if name(path) in here}
        held = {digest for slot, digest in self.held if self.tier.row(digest) == slot}
        kept = inner | held | {digest for digest, end_s in self.pins.items() if end_s > self.now_s}
        return sorted(here - kept, key=lambda digest: self.used_s[digest])

    def can_go(self, need: int, *, tenant: str | None) -> set[BlockHash] | None:
        """What is left when `need` entries go, of one tenant or all; None when they cannot."""
        here = set(self.used_s)
        for _ in range(need):
            own = [one for one in self.evictable(here) if tenant in (None, TENANTS[chr(one[0])])]
            if not own:
                return None
            here.remove(own[0])
        return here

    def reserve(self, path: str) -> None:
        tenant, count = TENANTS[path[0]], len(path)
        mine = sum(TENANTS[chr(one[0])] == tenant for one in self.used_s) + sum(t == tenant for _, t in self.reserved)
        over = max(0, mine + count - self.quotas.get(tenant, SLOTS + count + mine))
        need = max(0, count - self.tier.counts().free)
        expected = self.can_go(need, tenant=None) if not over else self.can_go(over, tenant=tenant)
        slots = self.tier.reserve(count, self.now_s, tenant=tenant)
        if over < need and over:  # own ones go first, then anybody's: the model does not follow the mixed order
            expected = set(self.tier.hashes()) if slots is not None else None
        if slots is None:
            assert expected is None, "there was room"
            return
        assert set(self.tier.hashes()) == expected, "others went than should have"
        gone = self.used_s.keys() - expected
        assert not any(self.tier.row(one) for one in gone)
        for one in gone:
            del self.used_s[one]
            self.pins.pop(one, None)
        taken = {slot for slot, _ in self.reserved} | {slot for slot, _ in self.held}
        assert not taken & set(slots), "a slot in use was handed out"
        self.reserved += [(slot, tenant) for slot in slots]

    def trim(self, path: str) -> None:
        """A tenant's quota changes; what tenants have beyond theirs goes, as far as it can."""
        if TENANTS[path[0]]:
            self.quotas[TENANTS[path[0]]] = 1 + (self.quotas[TENANTS[path[0]]] + len(path)) % 4
        expected = set(self.used_s)
        for tenant, quota in self.quotas.items():
            mine = [TENANTS[chr(one[0])] for one in self.used_s] + [whose for _, whose in self.reserved]
            over = max(0, mine.count(tenant) - quota)
            while (left := self.can_go(over, tenant=tenant)) is None:
                over -= 1
            expected &= left
        self.tier.trim(self.now_s)
        assert set(self.tier.hashes()) == expected, "others went than should have"
        for one in self.used_s.keys() - expected:
            del self.used_s[one]
            self.pins.pop(one, None)

    def put(self, path: str) -> None:
        mine = [one for one in self.reserved if one[1] == TENANTS[path[0]]]
        if not mine:
            return
        self.reserved.remove(mine[0])
        parent = name(path[:-1]) if len(path) > 1 else None
        is_new = self.tier.put(name(path), mine[0][0], self.now_s, parent=parent, end_tokens=16 * len(path))
        assert is_new == (name(path) not in self.used_s)
        if is_new:
            self.used_s[name(path)] = self.now_s

    def cancel(self, path: str) -> None:
        if self.reserved:
            self.tier.cancel([self.reserved.pop()[0]])

    def use(self, path: str) -> None:
        hashes = [name(path[: end + 1]) for end in range(len(path))]
        self.now_s += 1
        self.tier.use(hashes[:1], self.now_s)
        self.used_s.update({hashes[0]: self.now_s} if hashes[0] in self.used_s else {})

    def hold(self, path: str) -> None:
        if name(path) in self.used_s and len(self.held) < 3:
            self.held += [(slot, name(path)) for slot in self.tier.hold([name(path)])]

    def unhold(self, path: str) -> None:
        if self.held:
            self.tier.unhold([self.held.pop(0)[0]])

    def pin(self, path: str) -> None:
        live = {digest: end_s for digest, end_s in self.pins.items() if digest in self.used_s}
        if self.tier.pin([name(path)], self.now_s + 8):
            self.pins = {**live, name(path): self.now_s + 8}

    def drop(self, path: str) -> None:
        assert self.tier.discard([name(path)], self.now_s) == (name(path) in self.used_s)
        self.used_s.pop(name(path), None)
        self.pins.pop(name(path), None)
        change = self.tier.drain_changes()
        if change is not None:
            assert not set(change.stored) & self.published and set(change.removed) <= self.published
            self.published = (self.published - set(change.removed)) | set(change.stored)
        assert self.published == set(self.used_s)


class IndexMachine(RuleBasedStateMachine):
    @rule(numbers=st.binary(min_size=100, max_size=800))
    def walk(self, numbers):
        walk = Walk()
        for number in numbers:
            walk.step(number)
        machine_steps.taken["index"] += len(numbers)
        walk.tier.cancel([slot for slot, _ in walk.reserved])
        walk.tier.unhold([slot for slot, _ in walk.held])
        walk.tier.discard(walk.tier.hashes(), walk.now_s)
        assert walk.tier.counts().free == SLOTS


@pytest.mark.slow
def test_any_order_of_operations_keeps_the_ledger_and_the_order():
    machine_steps.live("index", IndexMachine, examples=40, rules_each=4)


@pytest.mark.parametrize("broken", ["holds", "children", "tickets"])
def test_the_walk_notices_an_index_that_forgets(broken, monkeypatch):
    """Negative control: with one of the three reasons to stay ignored, some walk fails."""
    real = VictimQueues.is_evictable

    def lenient(self, digest, entry):
        if broken == "holds":
            return digest not in self._children and digest not in self._is_kept.__self__._pins
        if broken == "children":
            return not self._is_kept(digest, entry)
        return real(self, digest, entry) and entry.usage.end_tokens != 16

    monkeypatch.setattr(VictimQueues, "is_evictable", lenient)
    with pytest.raises((AssertionError, KeyError)):
        for seed in range(40):
            walk = Walk()
            for index in range(400):
                walk.step((index * 7919 + seed * 104729 + index * index * 31) % 251)
