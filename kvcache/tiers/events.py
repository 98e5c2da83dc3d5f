"""Sequence-numbered KV events: what a worker has cached, and whether in its pool or only in its host tier. Pure."""

from collections import deque
from collections.abc import Iterable, Iterator, Sequence
from itertools import repeat

from kvrelay.kvcache.index.changes import CacheChange
from kvrelay.kvcache.index.tier_index import TierIndex
from kvrelay.kvcache.pool.block_pool import BlockPool
from kvrelay.plane.messages import BELOW_POOL, CHANGING, IN_POOL, NOWHERE, KvEvents, KvSnapshot
from kvrelay.types import BlockHash

PART_HASHES = 2048
"""Hashes of a snapshot in one message: 37 KB."""
Hashes = dict[BlockHash, None]
"""An ordered set."""


class EventLog:
    """Numbers the cache changes of one worker. A subscriber starts from `snapshot` and applies the events that follow.

    A hash is *stored* while pool or host tier has its block, and *lowered* while only the host tier has. Hashes are
    kept in the order in which they were stored, so a snapshot keeps chains together.
    """

    def __init__(self) -> None:
        self._seq = 0
        self._pool: Hashes = {}
        self._host: Hashes = {}

    def drain(self, pool: BlockPool, host_changes: Iterable[CacheChange] = ()) -> KvEvents | None:
        """The next event, or None when nothing changed. `host_changes`: of the host tier, in order."""
        change = pool.drain_changes()
        changes = list(host_changes)
        if change is None and not changes:
            return None
        if change is not None and not changes and not self._host:
            return self._in_pool_alone(change)
        touched: dict[BlockHash, tuple[bool, bool]] = {}  # before the changes: in the pool, in the host tier
        if change is not None:
            self._apply(self._pool, change, touched)
        for each in changes:
            self._apply(self._host, each, touched)
        return self._event(touched)

    def _in_pool_alone(self, change: CacheChange) -> KvEvents | None:
        """`_event` for an empty host tier. A net change does not store what it removes."""
        pool = self._pool
        stored: list[bytes] = [digest for digest in change.stored if digest not in pool]
        removed: list[bytes] = [digest for digest in change.removed if digest in pool]
        _change(pool, change)
        return self._numbered(stored, removed, [], [])

    def _apply(self, tier: Hashes, change: CacheChange, touched: dict[BlockHash, tuple[bool, bool]]) -> None:
        for digest in (*change.stored, *change.removed):
            if digest not in touched:
                touched[digest] = digest in self._pool, digest in self._host
        _change(tier, change)

    def _event(self, touched: dict[BlockHash, tuple[bool, bool]]) -> KvEvents | None:
        stored: list[bytes] = []
        removed: list[bytes] = []
        lowered: list[bytes] = []
        raised: list[bytes] = []
        for digest, (was_in_pool, was_in_host) in touched.items():
            is_in_pool, is_in_host = digest in self._pool, digest in self._host
            was_here, is_here = was_in_pool or was_in_host, is_in_pool or is_in_host
            if is_here and not was_here:
                stored.append(digest)
            if was_here and not is_here:
                removed.append(digest)
            elif is_here and not is_in_pool and (was_in_pool or not was_here):
                lowered.append(digest)
            elif is_in_pool and was_here and not was_in_pool:
                raised.append(digest)
        return self._numbered(stored, removed, lowered, raised)

    def _numbered(
        self, stored: list[bytes], removed: list[bytes], lowered: list[bytes], raised: list[bytes]
    ) -> KvEvents | None:
        if not (stored or removed or lowered or raised):
            return None
        self._seq += 1
        return KvEvents(seq=self._seq, stored=stored, removed=removed, lowered=lowered, raised=raised)

    def snapshot(self) -> KvSnapshot:
        """The state after all events so far; lowered hashes come last."""
        lowered: list[bytes] = [digest for digest in self._host if digest not in self._pool]
        return KvSnapshot(seq=self._seq, hashes=[*self._pool, *lowered], lowered=lowered)

    def audit(self, hashes: Sequence[bytes], pool: BlockPool, host: TierIndex | None) -> tuple[int, list[int]]:
        """(the last event's number, the tier of each of these hashes), from the caches themselves, not from past
        events.

        A hash whose tier differs from the events while changes are not drained is CHANGING. Scans all of the pool's
        hashes.
        """
        in_pool = set(hashes).intersection(pool.cached_hashes())
        is_changing = pool.has_changes or (host is not None and host.has_changes)
        tiers = []
        for digest in map(BlockHash, hashes):
            is_in_host = host is not None and digest in host
            tier = IN_POOL if digest in in_pool else BELOW_POOL if is_in_host else NOWHERE
            reported = IN_POOL if digest in self._pool else BELOW_POOL if digest in self._host else NOWHERE
            tiers.append(CHANGING if is_changing and tier != reported else tier)
        return self._seq, tiers


def _change(tier: Hashes, change: CacheChange) -> None:
    deque(map(tier.pop, change.removed, repeat(None)), maxlen=0)
    tier.update(dict.fromkeys(change.stored))


def parts_of(snapshot: KvSnapshot, max_hashes: int = PART_HASHES) -> Iterator[KvSnapshot]:
    """A snapshot as messages of at most `max_hashes` hashes; at least one message."""
    num_hashes = len(snapshot.hashes)
    first_lowered = num_hashes - len(snapshot.lowered)
    for part, start in enumerate(range(0, max(num_hashes, 1), max_hashes)):
        end = start + max_hashes
        yield KvSnapshot(
            seq=snapshot.seq,
            hashes=snapshot.hashes[start:end],
            lowered=snapshot.hashes[max(start, first_lowered) : end],
            part=part,
            is_last=end >= num_hashes,
        )
