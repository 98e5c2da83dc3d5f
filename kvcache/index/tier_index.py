"""What a tier below the device holds: slots of one block each, by prefix hash. Pure bookkeeping, no bytes.

Owns which slot holds which block, which may be overwritten next, and the slots' generations; the tier that owns the
memory or the file moves the bytes. Not thread-safe: one owner thread. Times are the caller's clock, in seconds.

A slot is in exactly one state:
  free      nothing worth keeping
  reserved  handed out by `reserve`, being written, not to be found yet
  cached    has an entry: can be matched; evicted by policy unless held, pinned or continued by another entry here
  leaving   its entry was discarded while held; free when the last hold ends
"""

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

from kvrelay.kvcache.eviction.score_queue import EvictionQueue
from kvrelay.kvcache.eviction.sketch import FrequencySketch
from kvrelay.kvcache.eviction.usage import EntryUsage, EvictionPolicy
from kvrelay.kvcache.index.changes import CacheChange
from kvrelay.kvcache.index.pin_times import Pins
from kvrelay.types import BlockHash

_DEFAULT_TENANT = ""


@dataclass(frozen=True, slots=True)
class TierCounts:
    """How many slots are in each state; the first four add up to the tier's size."""

    free: int
    reserved: int
    cached: int
    leaving: int
    held: int  # of the cached
    pinned: int  # of the cached


@dataclass(slots=True, eq=False)
class _Entry:
    usage: EntryUsage
    slot: int
    parent: BlockHash | None
    priority: int
    tenant: str
    ticket: int = 0  # of its valid item in the eviction queues; 0: none


class TierIndex:
    """Entries of one block, evicted leaves first: one that another entry here continues stays."""

    def __init__(
        self,
        num_slots: int,
        policy: EvictionPolicy,
        *,
        quotas: Mapping[str, int | None] | None = None,
        default_quota: int | None = None,
        pin_limit: int | None = None,
        admission: FrequencySketch | None = None,
        admit_after: int = 2,
        keep_changes: bool = False,
    ) -> None:
        """`quotas`: most slots of each tenant, `default_quota` of those not named (None, in both: as many as there are).

        `pin_limit`: most entries pinned at once; default: half the slots. `admission`: counts offers, so that `wants`
        refuses a block until its `admit_after`-th. `keep_changes`: for `drain_changes`, which somebody then has to call.
        """
        if num_slots < 1:
            raise ValueError(f"a tier needs at least one slot, not {num_slots}")
        self.num_slots = num_slots
        self.policy = policy
        self._quotas = dict(quotas or {})
        self._default_quota = default_quota
        self._admission = admission
        self._admit_after = admit_after
        self._free: dict[int, None] = dict.fromkeys(range(num_slots - 1, -1, -1))
        self._reserved: dict[int, str] = {}  # slot -> tenant
        self._leaving: set[int] = set()
        self._holds: dict[int, int] = {}  # slot -> how many hold it
        self._digests: list[BlockHash | None] = [None] * num_slots
        self._generations = [0] * num_slots
        self._entries: dict[BlockHash, _Entry] = {}
        self._children: dict[BlockHash, int] = {}  # entries here that continue this hash, whether it is here or not
        self._tenant_slots: dict[str, int] = {}  # reserved and cached
        self._pins = Pins(num_slots // 2 if pin_limit is None else pin_limit)
        self._unqueued: dict[BlockHash, None] = {}  # may have become evictable since the queues were last looked at
        self._tickets = 0
        self._num_revisions = policy.num_revisions
        self._queue = EvictionQueue(self._is_queued)
        self._tenant_queues: dict[str, EvictionQueue] = {}  # of tenants with a quota
        self._keep_changes = keep_changes
        self._stored: dict[BlockHash, None] = {}
        self._removed: dict[BlockHash, None] = {}
        self.num_evicted = 0

    # ---- finding

    def __len__(self) -> int:
        return len(self._entries)

    def __contains__(self, digest: BlockHash) -> bool:
        return digest in self._entries

    def slot(self, digest: BlockHash) -> int | None:
        entry = self._entries.get(digest)
        return None if entry is None else entry.slot

    def match(self, hashes: Sequence[BlockHash], start: int = 0) -> list[int]:
        """Slots of the unbroken run of entries from `hashes[start]` on; what comes before may be in other tiers."""
        slots: list[int] = []
        for index in range(start, len(hashes)):
            entry = self._entries.get(hashes[index])
            if entry is None:
                break
            slots.append(entry.slot)
        return slots

    def use(self, hashes: Iterable[BlockHash], now_s: float, *, priority: int | None = None) -> None:
        """A request was served these entries (those that are here); `priority` can raise theirs, never lower it."""
        for digest in hashes:
            entry = self._entries.get(digest)
            if entry is None:
                continue
            entry.usage.hits += 1
            entry.usage.used_s = now_s
            self.policy.used(entry.usage, now_s)
            if priority is not None and priority > entry.priority:
                entry.priority = priority
            entry.ticket = 0
            if digest not in self._children:
                self._unqueued[digest] = None

    def wants(self, digest: BlockHash) -> bool:
        """Whether a block that is offered now should be written here. Every offer counts, so ask once for each."""
        if digest in self._entries:
            return False
        return self._admission is None or self._admission.touch(digest) >= self._admit_after

    # ---- slots

    def reserve(self, count: int, now_s: float, *, tenant: str = _DEFAULT_TENANT) -> list[int] | None:
        """`count` slots to write to, evicting by policy; None (and no change) when so many cannot be had.

        A tenant over its quota gets slots of its own entries only. Each slot goes to `put` or `cancel`.
        """
        victims = self._choose_victims(count, now_s, tenant)
        if victims is None:
            return None
        for digest in victims:
            self.policy.evicted(self._entries[digest].usage, now_s)
            self._forget(digest, is_detached=True)
        self.num_evicted += len(victims)
        slots = [self._free.popitem()[0] for _ in range(count)]
        for slot in slots:
            self._reserved[slot] = tenant
            self._generations[slot] += 1
        self._count_tenant(tenant, count)
        return slots

    def next_victims(self, count: int, now_s: float, *, tenant: str = _DEFAULT_TENANT) -> list[BlockHash]:
        """What `reserve(count)` would evict now, first to go first: what a write-back has to save. Empty if it could not."""
        victims = self._choose_victims(count, now_s, tenant)
        if victims is None:
            return []
        self._restore(victims)
        return victims

    def cancel(self, slots: Iterable[int]) -> None:
        """Reserved slots that will not be put: free again."""
        for slot in slots:
            tenant = self._reserved.pop(slot)
            self._count_tenant(tenant, -1)
            self._free[slot] = None

    def put(
        self,
        digest: BlockHash,
        slot: int,
        now_s: float,
        *,
        parent: BlockHash | None,
        end_tokens: int,
        priority: int = 0,
        num_hits: int = 0,
    ) -> bool:
        """This reserved slot now holds `digest`'s block. False: it was here already, and the slot is free again.

        `num_hits`: matches that it had in the tier that it comes from.
        """
        if digest in self._entries:
            self.cancel((slot,))
            return False
        tenant = self._reserved.pop(slot)
        above = self._entries.get(parent) if parent is not None else None
        usage = EntryUsage(digest, 1, end_tokens, inserted_s=now_s, used_s=now_s, hits=num_hits)
        usage.above = None if above is None else above.usage
        entry = _Entry(usage, slot, parent, priority, tenant)
        self._entries[digest] = entry
        self._digests[slot] = digest
        if parent is not None:
            self._count_child(parent, 1)
        if above is not None:
            above.ticket = 0
        self.policy.inserted(usage, now_s)
        self._unqueued[digest] = None
        if self._keep_changes and self._removed.pop(digest, 0) == 0:
            self._stored[digest] = None
        return True

    def take(self, slot: int, *, tenant: str = _DEFAULT_TENANT) -> None:
        """Reserve this very slot, which is free: what a store does for each block that it finds again after a restart."""
        del self._free[slot]
        self._reserved[slot] = tenant
        self._generations[slot] += 1
        self._count_tenant(tenant, 1)

    def generation(self, slot: int) -> int:
        """How often this slot has been handed out: a reference with an older number is stale."""
        return self._generations[slot]

    def discard(self, hashes: Iterable[BlockHash], now_s: float) -> int:
        """Forget these now, found corrupt or no longer wanted; how many were here. A held slot is free when its holds end."""
        here = [digest for digest in hashes if digest in self._entries]
        for digest in here:
            self.policy.evicted(self._entries[digest].usage, now_s)
            self._forget(digest)
        return len(here)

    # ---- what may not go

    def hold(self, hashes: Iterable[BlockHash]) -> list[int]:
        """Keep these entries, all of which are here, while their bytes are read; gives their slots, for `unhold`."""
        entries = [self._entries[digest] for digest in hashes]
        for entry in entries:
            entry.ticket = 0
            self._holds[entry.slot] = self._holds.get(entry.slot, 0) + 1
        return [entry.slot for entry in entries]

    def unhold(self, slots: Iterable[int]) -> None:
        """One hold less on each of these slots."""
        for slot in slots:
            self._holds[slot] -= 1
            if self._holds[slot]:
                continue
            del self._holds[slot]
            digest = self._digests[slot]
            if digest is not None:
                self._unqueued[digest] = None
            else:
                self._leaving.remove(slot)
                self._free[slot] = None

    def pin(self, hashes: Iterable[BlockHash], until_s: float) -> int:
        """Keep these entries (those that are here) until then; how many are pinned now, fewer when the limit is reached."""
        count = 0
        for digest in hashes:
            entry = self._entries.get(digest)
            if entry is not None and self._pins.add(digest, until_s):
                entry.ticket = 0
                count += 1
        return count

    def unpin(self, hashes: Iterable[BlockHash]) -> None:
        """End the pins of these, if they have any."""
        for digest in hashes:
            if self._pins.remove(digest):
                self._unqueued[digest] = None

    # ---- eviction

    def _is_evictable(self, digest: BlockHash, entry: _Entry) -> bool:
        return digest not in self._children and entry.slot not in self._holds and digest not in self._pins

    def _is_queued(self, digest: BlockHash, ticket: int) -> bool:
        entry = self._entries.get(digest)
        return entry is not None and entry.ticket == ticket

    def _enqueue_news(self, now_s: float) -> None:
        """Put what became evictable into the queues, with its score as of now."""
        for digest in self._pins.expire(now_s):
            self._unqueued[digest] = None
        if self.policy.num_revisions != self._num_revisions:
            self._num_revisions = self.policy.num_revisions
            self._unqueued.update(dict.fromkeys(digest for digest, entry in self._entries.items() if entry.ticket))
        for digest in self._unqueued:
            entry = self._entries.get(digest)
            if entry is not None and self._is_evictable(digest, entry):
                self._enqueue(digest, entry, now_s)
        self._unqueued.clear()

    def _enqueue(self, digest: BlockHash, entry: _Entry, now_s: float) -> None:
        self._tickets += 1
        entry.ticket = self._tickets
        score = self.policy.score(entry.usage, now_s)
        self._queue.push(entry.priority, score, entry.ticket, digest)
        if self._quota(entry.tenant) is not None:
            queue = self._tenant_queues.setdefault(entry.tenant, EvictionQueue(self._is_queued))
            queue.push(entry.priority, score, entry.ticket, digest)

    def _choose_victims(self, count: int, now_s: float, tenant: str) -> list[BlockHash] | None:
        """Entries that make room for `count` more slots of this tenant, out of the queues, children's counts without them.

        None, and all as before, when there is no such room.
        """
        self._enqueue_news(now_s)
        quota = self._quota(tenant)
        over = 0 if quota is None else max(0, self.num_tenant_slots(tenant) + count - quota)
        victims: list[BlockHash] = []
        needs = ((self._tenant_queues.get(tenant), over), (self._queue, count - len(self._free)))
        for queue, need in needs:
            while len(victims) < need:
                digest = None if queue is None else queue.pop()
                if digest is None:
                    self._restore(victims)
                    return None
                victims.append(digest)
                self._detach(digest, now_s)
        return victims

    def _detach(self, digest: BlockHash, now_s: float) -> None:
        """As if this entry were gone: its parent may be evictable now."""
        entry = self._entries[digest]
        entry.ticket = 0
        if entry.parent is None:
            return
        self._count_child(entry.parent, -1)
        above = self._entries.get(entry.parent)
        if above is not None and self._is_evictable(entry.parent, above):
            self._enqueue(entry.parent, above, now_s)

    def _restore(self, victims: Sequence[BlockHash]) -> None:
        """Undo `_detach`."""
        for digest in victims:
            entry = self._entries[digest]
            self._unqueued[digest] = None
            if entry.parent is not None:
                self._count_child(entry.parent, 1)
                above = self._entries.get(entry.parent)
                if above is not None:
                    above.ticket = 0

    def _forget(self, digest: BlockHash, *, is_detached: bool = False) -> None:
        entry = self._entries.pop(digest)
        self._digests[entry.slot] = None
        self._pins.remove(digest)
        self._unqueued.pop(digest, None)
        self._count_tenant(entry.tenant, -1)
        if entry.parent is not None and not is_detached:
            self._count_child(entry.parent, -1)
            if entry.parent in self._entries:
                self._unqueued[entry.parent] = None
        if entry.slot in self._holds:
            self._leaving.add(entry.slot)
        else:
            self._free[entry.slot] = None
        if self._keep_changes and self._stored.pop(digest, 0) == 0:  # not merely stored since the last drain
            self._removed[digest] = None

    # ---- quotas and counts

    def _quota(self, tenant: str) -> int | None:
        return self._quotas.get(tenant, self._default_quota)

    def num_tenant_slots(self, tenant: str) -> int:
        """Slots that count against this tenant's quota: reserved and cached ones."""
        return self._tenant_slots.get(tenant, 0)

    def _count_tenant(self, tenant: str, change: int) -> None:
        count = self._tenant_slots.get(tenant, 0) + change
        if count:
            self._tenant_slots[tenant] = count
        else:
            self._tenant_slots.pop(tenant, None)
            if tenant in self._tenant_queues:
                del self._tenant_queues[tenant]

    def _count_child(self, parent: BlockHash, change: int) -> None:
        count = self._children.get(parent, 0) + change
        if count:
            self._children[parent] = count
        else:
            del self._children[parent]

    # ---- news and the ledger

    def drain_changes(self) -> CacheChange | None:
        """What became and what ceased to be matchable since the last call, or None. Needs `keep_changes`."""
        assert self._keep_changes, "this tier keeps no changes"
        if not self._stored and not self._removed:
            return None
        change = CacheChange(tuple(self._stored), tuple(self._removed))
        self._stored.clear()
        self._removed.clear()
        return change

    @property
    def has_changes(self) -> bool:
        """Whether something has changed since they were drained."""
        return bool(self._stored or self._removed)

    def hashes(self) -> list[BlockHash]:
        """All that `match` can find now."""
        return list(self._entries)

    def counts(self) -> TierCounts:
        return TierCounts(
            free=len(self._free),
            reserved=len(self._reserved),
            cached=len(self._entries),
            leaving=len(self._leaving),
            held=len(self._holds) - len(self._leaving),
            pinned=len(self._pins),
        )

    def check(self) -> None:
        """Raise AssertionError unless every slot is in exactly one state and all counts agree."""
        cached = {entry.slot for entry in self._entries.values()}
        states = (set(self._free), set(self._reserved), cached, self._leaving)
        assert sum(map(len, states)) == self.num_slots, "a slot is lost or in two states"
        assert set().union(*states) == set(range(self.num_slots)), "a slot is lost"
        assert len(cached) == len(self._entries), "two entries have one slot"
        named = {digest: slot for slot, digest in enumerate(self._digests) if digest is not None}
        assert named == {digest: entry.slot for digest, entry in self._entries.items()}, "slots and entries disagree"
        assert self._holds.keys() <= cached | self._leaving, "a slot without content is held"
        assert self._leaving <= self._holds.keys(), "a slot leaves that nobody holds"
        assert sum(digest in self._pins for digest in self._entries) == len(self._pins), "what is not here is pinned"
        children = Counter(entry.parent for entry in self._entries.values() if entry.parent is not None)
        assert children == self._children, "children are miscounted"
        tenants = Counter(entry.tenant for entry in self._entries.values()) + Counter(self._reserved.values())
        assert tenants == self._tenant_slots, "tenants' slots are miscounted"
        for digest, entry in self._entries.items():
            is_waiting = bool(entry.ticket) or digest in self._unqueued
            assert is_waiting or not self._is_evictable(digest, entry), "an entry can never be evicted"
            assert not entry.ticket or self._is_evictable(digest, entry), "an entry in use is queued"
        assert len(self._queue) <= 2 * len(self._entries) + 64, "the queue grows"
