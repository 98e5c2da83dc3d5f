"""Which entries of a tier are evicted next: leaves first, by priority, policy score and age. Pure.

An entry is evictable when no other entry here continues it, its row is not held, and it is not pinned. Entries that
may have become evictable are queued, with their scores, the next time a victim is needed.
"""

from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass

from kvrelay.kvcache.eviction.policies import EntryUsage, EvictionPolicy, EvictionQueue
from kvrelay.types import BlockHash


@dataclass(slots=True, eq=False)
class TierEntry:
    """One block of a tier."""

    usage: EntryUsage
    row: int
    parent: BlockHash | None
    priority: int
    tenant: str
    ticket: int = 0  # of its valid item in the eviction queues; 0: none


class VictimQueues:
    """Chooses victims among the `entries` of one tier: over all tenants, and within a tenant that has a quota."""

    def __init__(
        self,
        entries: Mapping[BlockHash, TierEntry],
        policy: EvictionPolicy,
        *,
        is_kept: Callable[[BlockHash, TierEntry], bool],
        has_quota: Callable[[str], bool],
    ) -> None:
        """`is_kept`: whether an entry is held or pinned. `has_quota`: whether a tenant may have one, so that it
        needs a queue of its own.
        """
        self._entries, self._policy, self._is_kept, self._has_quota = entries, policy, is_kept, has_quota
        self._children: dict[BlockHash, int] = {}  # entries here that continue this hash, cached here or not
        self._pending: dict[BlockHash, None] = {}  # may have become evictable since the queues were last updated
        self._tickets = 0
        self._num_revisions = policy.num_revisions
        self._queue: EvictionQueue[BlockHash] = EvictionQueue(self._is_valid)
        self._tenant_queues: dict[str, EvictionQueue[BlockHash]] = {}

    def may_evict(self, digest: BlockHash) -> None:
        """This entry may have become evictable."""
        self._pending[digest] = None

    def must_keep(self, entry: TierEntry) -> None:
        """This entry is held, pinned, continued, or has a new score: its item in the queues is void."""
        entry.ticket = 0

    def used(self, digest: BlockHash, entry: TierEntry) -> None:
        """This entry needs a new score."""
        entry.ticket = 0
        if digest not in self._children:
            self._pending[digest] = None

    def added(self, digest: BlockHash, entry: TierEntry) -> None:
        """A new entry; the one that it continues is no leaf any more."""
        if entry.parent is not None:
            self._count_child(entry.parent, 1)
            above = self._entries.get(entry.parent)
            if above is not None:
                above.ticket = 0
        self._pending[digest] = None

    def removed(self, digest: BlockHash, entry: TierEntry, *, is_detached: bool) -> None:
        """An entry is gone. `is_detached`: `choose` returned it, so its parent's children were counted without it."""
        self._pending.pop(digest, None)
        if entry.parent is not None and not is_detached:
            self._count_child(entry.parent, -1)
            if entry.parent in self._entries:
                self._pending[entry.parent] = None

    def tenant_gone(self, tenant: str) -> None:
        """This tenant has no entries any more."""
        self._tenant_queues.pop(tenant, None)

    def _count_child(self, parent: BlockHash, change: int) -> None:
        count = self._children.get(parent, 0) + change
        if count:
            self._children[parent] = count
        else:
            del self._children[parent]

    def choose(
        self, num_needed: int, num_of_tenant: int, tenant: str, now_s: float, unpinned: Iterable[BlockHash]
    ) -> list[BlockHash] | None:
        """`num_needed` victims, first to go first, of which `num_of_tenant` are this tenant's. None: not possible.

        Victims are out of the queues, and their parents' children counted without them: follow with `removed` or
        `restore`. `unpinned`: entries whose pins have just ended.
        """
        self._update_queues(unpinned, now_s)
        victims: list[BlockHash] = []
        for queue, needed in ((self._tenant_queues.get(tenant), num_of_tenant), (self._queue, num_needed)):
            while len(victims) < needed:
                digest = None if queue is None else queue.pop()
                if digest is None:
                    self.restore(victims)
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
        if above is not None and self.is_evictable(entry.parent, above):
            self._enqueue(entry.parent, above, now_s)

    def restore(self, victims: Sequence[BlockHash]) -> None:
        """Undo `choose`."""
        for digest in victims:
            entry = self._entries[digest]
            self._pending[digest] = None
            if entry.parent is not None:
                self._count_child(entry.parent, 1)
                above = self._entries.get(entry.parent)
                if above is not None:
                    above.ticket = 0

    def is_evictable(self, digest: BlockHash, entry: TierEntry) -> bool:
        return digest not in self._children and not self._is_kept(digest, entry)

    def _is_valid(self, digest: BlockHash, ticket: int) -> bool:
        entry = self._entries.get(digest)
        return entry is not None and entry.ticket == ticket

    def _update_queues(self, unpinned: Iterable[BlockHash], now_s: float) -> None:
        """Queue what became evictable, scored as of now."""
        for digest in unpinned:
            self._pending[digest] = None
        if self._policy.num_revisions != self._num_revisions:
            self._num_revisions = self._policy.num_revisions
            self._pending.update(dict.fromkeys(digest for digest, entry in self._entries.items() if entry.ticket))
        for digest in self._pending:
            entry = self._entries.get(digest)
            if entry is not None and self.is_evictable(digest, entry):
                self._enqueue(digest, entry, now_s)
        self._pending.clear()

    def _enqueue(self, digest: BlockHash, entry: TierEntry, now_s: float) -> None:
        self._tickets += 1
        entry.ticket = self._tickets
        score = self._policy.score(entry.usage, now_s)
        self._queue.push(entry.priority, score, entry.ticket, digest)
        if self._has_quota(entry.tenant):
            queue = self._tenant_queues.setdefault(entry.tenant, EvictionQueue(self._is_valid))
            queue.push(entry.priority, score, entry.ticket, digest)

    def check(self) -> None:
        """Raise AssertionError unless children are counted and every evictable entry is queued or pending."""
        children = Counter(entry.parent for entry in self._entries.values() if entry.parent is not None)
        assert children == self._children, "children are miscounted"
        for digest, entry in self._entries.items():
            is_waiting = bool(entry.ticket) or digest in self._pending
            assert is_waiting or not self.is_evictable(digest, entry), "an entry can never be evicted"
            assert not entry.ticket or self.is_evictable(digest, entry), "an entry in use is queued"
        assert len(self._queue.items) <= 2 * len(self._entries) + 64, "the queue grows"
