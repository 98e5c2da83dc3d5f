"""What a tier below the pool holds: one entry per block, by prefix hash. Pure bookkeeping, no bytes.

Owns which row holds which block, and which entry is evicted next; the tier that owns the memory or the file moves the
bytes. Not thread-safe: one owner thread. Times are the caller's clock, in seconds.
"""

from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

from kvrelay.kvcache.eviction.policies import EntryUsage, EvictionPolicy
from kvrelay.kvcache.index.changes import CacheChange, ChangeLog
from kvrelay.kvcache.index.pins import TimedPins
from kvrelay.kvcache.index.tier_rows import TierRows
from kvrelay.kvcache.index.victims import TierEntry, VictimQueues
from kvrelay.types import BlockHash

Quota = Callable[[str], int | None]
"""Most rows, or bytes, of a tenant, as of now; None: unlimited."""
_DEFAULT_TENANT = ""


def in_rows(quota: Quota, row_bytes: int) -> Quota:
    """A quota of bytes as one of whole rows."""
    return lambda tenant: None if (most := quota(tenant)) is None else most // row_bytes


@dataclass(frozen=True, slots=True)
class TierCounts:
    """How many rows are in each state; the first four add up to the tier's size."""

    free: int
    reserved: int
    cached: int
    leaving: int
    held: int  # of the cached
    pinned: int  # of the cached


class OfferedBefore:
    """Remembers the last `10 * capacity` offers at least, and twice as many at most, in two Bloom filters.

    A collision may admit a hash at its first offer, and never refuses one.

    Source: the doorkeeper of TinyLFU (Einziger, Friedman, Manes, 2017).
    """

    def __init__(self, capacity: int) -> None:
        self._period = 10 * max(capacity, _MIN_CAPACITY)
        self._mask = (1 << (8 * self._period - 1).bit_length()) - 1
        self._new, self._old = bytearray(self._mask + 1 >> 3), bytearray(self._mask + 1 >> 3)
        self._num_new = 0

    def offer(self, digest: BlockHash) -> bool:
        """Remember this offer; returns whether there was one before."""
        number, mask = int.from_bytes(digest[-16:], "little"), self._mask  # evenly distributed
        bits = number & mask, number >> 64 & mask
        was_offered = any(all(seen[bit >> 3] >> (bit & 7) & 1 for bit in bits) for seen in (self._new, self._old))
        if self._num_new >= self._period:
            self._old, self._new, self._num_new = self._new, bytearray(len(self._new)), 0
        self._num_new += 1
        for bit in bits:
            self._new[bit >> 3] |= 1 << (bit & 7)
        return was_offered


class TierIndex:
    """Entries of one block each. An entry that another one here continues is not evicted before that one.

    More than 25 methods: the one face of rows, quotas, pins, victims and changes, mostly a line or two each.
    """

    def __init__(
        self,
        num_rows: int,
        policy: EvictionPolicy,
        *,
        quota: Quota | None = None,
        pin_limit: int | None = None,
        admission: OfferedBefore | None = None,
        keep_changes: bool = False,
    ) -> None:
        """An empty index of `num_rows` rows.

        Args:
            quota: rows of each tenant (not of blocks without one). It may change: see `trim`. None: unlimited.
            pin_limit: most entries pinned at once; default: half the rows.
            admission: remembers offers, so that `wants` refuses a block until its second one.
            keep_changes: record changes; the owner must call `drain_changes`.

        Raises ValueError: no rows.
        """
        self.rows = TierRows(num_rows)
        self.policy = policy
        self.num_evicted = 0
        self._entries: dict[BlockHash, TierEntry] = {}
        self._pins: TimedPins[BlockHash] = TimedPins(num_rows // 2 if pin_limit is None else pin_limit)
        self._quota = quota
        self._num_rows_of: Counter[str] = Counter()  # by tenant: reserved and cached ones
        self._victims = VictimQueues(self._entries, policy, is_kept=self._is_kept, has_quota=self._has_quota)
        self._admission = admission
        self._changes = ChangeLog() if keep_changes else None

    @property
    def num_rows(self) -> int:
        return self.rows.num_rows

    # ---- finding

    def __len__(self) -> int:
        return len(self._entries)

    def __contains__(self, digest: object) -> bool:
        return digest in self._entries

    def row(self, digest: BlockHash) -> int | None:
        """The row of this block; None when it is not here."""
        entry = self._entries.get(digest)
        return None if entry is None else entry.row

    def match(self, hashes: Sequence[BlockHash], start: int = 0) -> list[int]:
        """Rows of the unbroken run of entries from `hashes[start]` on; earlier blocks may be in other tiers."""
        rows: list[int] = []
        for index in range(start, len(hashes)):
            entry = self._entries.get(hashes[index])
            if entry is None:
                break
            rows.append(entry.row)
        return rows

    def use(self, hashes: Iterable[BlockHash], now_s: float, *, priority: int | None = None) -> None:
        """A request used these entries (those that are here); `priority` can raise theirs, never lower it."""
        for digest in hashes:
            entry = self._entries.get(digest)
            if entry is None:
                continue
            entry.usage.hits += 1
            entry.usage.used_s = now_s
            self.policy.used(entry.usage, now_s)
            if priority is not None and priority > entry.priority:
                entry.priority = priority
            self._victims.used(digest, entry)

    def wants(self, digest: BlockHash) -> bool:
        """Whether to store a block that is offered now. Every call counts as an offer: call once for each."""
        if digest in self._entries:
            return False
        return self._admission is None or self._admission.offer(digest)

    # ---- rows

    def reserve(self, count: int, now_s: float, *, tenant: str = _DEFAULT_TENANT) -> list[int] | None:
        """`count` rows to write, evicting by policy; None, and no change, when that is not possible.

        A tenant over its quota gets rows of its own entries only. Each row must go to `put` or `cancel`.
        """
        victims = self._choose_victims(count, now_s, tenant)
        if victims is None:
            return None
        self._evict(victims, now_s)
        self._num_rows_of[tenant] += count
        return self.rows.reserve(count, tenant)

    def _evict(self, victims: Sequence[BlockHash], now_s: float) -> None:
        for digest in victims:
            self.policy.evicted(self._entries[digest].usage, now_s)
            self._forget(digest, is_detached=True)
        self.num_evicted += len(victims)

    def trim(self, now_s: float) -> None:
        """Evict what tenants have beyond their quotas, which have changed; not what is held, pinned or reserved."""
        for tenant in list(self._num_rows_of):
            while self._num_over(tenant, 0):
                victims = self._victims.choose(0, 1, tenant, now_s, self._pins.expire(now_s))
                if victims is None:
                    break
                self._evict(victims, now_s)

    def next_victims(self, count: int, now_s: float, *, tenant: str = _DEFAULT_TENANT) -> list[BlockHash]:
        """What `reserve(count)` would evict now, first to go first; empty if it would fail."""
        victims = self._choose_victims(count, now_s, tenant)
        if victims is None:
            return []
        self._victims.restore(victims)
        return victims

    def _choose_victims(self, count: int, now_s: float, tenant: str) -> list[BlockHash] | None:
        needed = count - len(self.rows.free), self._num_over(tenant, count)
        return self._victims.choose(*needed, tenant, now_s, self._pins.expire(now_s))

    def _num_over(self, tenant: str, count: int) -> int:
        """How many rows over its quota a tenant would be with `count` more."""
        quota = self._quota(tenant) if self._quota is not None and tenant != _DEFAULT_TENANT else None
        return 0 if quota is None else max(0, self._num_rows_of[tenant] + count - quota)

    def cancel(self, rows: Iterable[int]) -> None:
        """Free reserved rows that will not be written."""
        for row in rows:
            self._remove_from_tenant(self.rows.cancel(row))

    def put(
        self, digest: BlockHash, row: int, now_s: float, *, parent: BlockHash | None, end_tokens: int, priority: int = 0
    ) -> bool:
        """This reserved row now holds `digest`'s block.

        False: the block was here already, and the row is free again.
        """
        if digest in self._entries:
            self.cancel((row,))
            return False
        tenant = self.rows.fill(row, digest)
        above = self._entries.get(parent) if parent is not None else None
        usage = EntryUsage(digest, 1, end_tokens, used_s=now_s)
        usage.above = None if above is None else above.usage
        entry = self._entries[digest] = TierEntry(usage, row, parent, priority, tenant)
        self._victims.added(digest, entry)
        self.policy.inserted(usage, now_s)
        if self._changes is not None:
            self._changes.stored(digest)
        return True

    def take(self, row: int, *, tenant: str = _DEFAULT_TENANT) -> None:
        """Reserve this very row, which is free: for a block that a store finds again after a restart."""
        self.rows.take(row, tenant)
        self._num_rows_of[tenant] += 1

    def discard(self, hashes: Iterable[BlockHash], now_s: float) -> int:
        """Forget these entries; returns how many were here. A held row is freed when its holds end."""
        here = [digest for digest in hashes if digest in self._entries]
        for digest in here:
            self.policy.evicted(self._entries[digest].usage, now_s)
            self._forget(digest)
        return len(here)

    def _forget(self, digest: BlockHash, *, is_detached: bool = False) -> None:
        entry = self._entries.pop(digest)
        self._pins.remove(digest)
        self._victims.removed(digest, entry, is_detached=is_detached)
        self._remove_from_tenant(entry.tenant)
        self.rows.clear(entry.row)
        if self._changes is not None:
            self._changes.removed(digest)

    def _remove_from_tenant(self, tenant: str) -> None:
        self._num_rows_of[tenant] -= 1
        if not self._num_rows_of[tenant]:
            del self._num_rows_of[tenant]
            self._victims.tenant_gone(tenant)

    # ---- holds and pins

    def _has_quota(self, tenant: str) -> bool:
        return self._quota is not None and tenant != _DEFAULT_TENANT

    def _is_kept(self, digest: BlockHash, entry: TierEntry) -> bool:
        return entry.row in self.rows.holds or digest in self._pins

    def hold(self, hashes: Iterable[BlockHash]) -> list[int]:
        """Keep these entries, all of which are here, while their bytes are read; returns their rows, for `unhold`."""
        entries = [self._entries[digest] for digest in hashes]
        for entry in entries:
            self._victims.must_keep(entry)
            self.rows.hold(entry.row)
        return [entry.row for entry in entries]

    def unhold(self, rows: Iterable[int]) -> None:
        """One hold less on each of these rows."""
        for row in rows:
            digest = self.rows.unhold(row)
            if digest is not None:
                self._victims.may_evict(digest)

    def pin(self, hashes: Iterable[BlockHash], until_s: float) -> int:
        """Keep these entries (those that are here) until then; returns how many are pinned, fewer at the limit."""
        count = 0
        for digest in hashes:
            entry = self._entries.get(digest)
            if entry is not None and self._pins.add(digest, until_s):
                self._victims.must_keep(entry)
                count += 1
        return count

    def unpin(self, hashes: Iterable[BlockHash]) -> None:
        """End the pins of these entries."""
        for digest in hashes:
            if self._pins.remove(digest):
                self._victims.may_evict(digest)

    # ---- changes and counts

    def drain_changes(self) -> CacheChange | None:
        """The net changes since the last call, or None. Needs `keep_changes`."""
        assert self._changes is not None, "this index keeps no changes"
        return self._changes.drain()

    @property
    def has_changes(self) -> bool:
        """Whether anything changed since the last drain."""
        return bool(self._changes)

    def hashes(self) -> list[BlockHash]:
        """All that `match` can find now."""
        return list(self._entries)

    def counts(self) -> TierCounts:
        rows = self.rows
        leaving = len(rows.leaving)
        return TierCounts(
            free=len(rows.free),
            reserved=len(rows.reserved),
            cached=len(self._entries),
            leaving=leaving,
            held=len(rows.holds) - leaving,
            pinned=len(self._pins),
        )

    def check(self) -> None:
        """Raise AssertionError unless every row is in exactly one state and all counts agree."""
        self.rows.check({digest: entry.row for digest, entry in self._entries.items()})
        assert sum(digest in self._pins for digest in self._entries) == len(self._pins), "a missing entry is pinned"
        tenants = Counter(entry.tenant for entry in self._entries.values()) + Counter(self.rows.reserved.values())
        assert tenants == self._num_rows_of, "tenants' rows are miscounted"
        self._victims.check()


_MIN_CAPACITY = 16
