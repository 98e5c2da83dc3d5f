"""What became matchable and what ceased to be, since the last drain; and the numbered KV events of one worker. Pure."""

from collections.abc import Collection, Container, Iterator, Sequence
from dataclasses import dataclass

from kvrelay.kvcache.index.hash_set import HashSet, new_hash_set
from kvrelay.plane.reports import BELOW_POOL, CHANGING, IN_POOL, NOWHERE, KvEvents, KvSnapshot
from kvrelay.types import BlockHash

PART_HASHES = 2048  # hashes of a snapshot in one message: 37 KB


@dataclass(frozen=True, slots=True)
class CacheChange:
    """Net changes since the last drain: hashes that became matchable, and that ceased to be. Unordered."""

    stored: tuple[BlockHash, ...]
    removed: tuple[BlockHash, ...]


class ChangeLog:
    """Net changes of an index that adds and removes runs of hashes. A removal and an addition of one hash cancel."""

    def __init__(self) -> None:
        self._stored, self._removed = new_hash_set(), new_hash_set()

    def stored(self, run: bytes) -> None:
        """The hashes in `run` (concatenated) are matchable from now on."""
        self._stored.toggle(run, self._removed)

    def removed(self, run: bytes) -> None:
        """The hashes in `run` are no longer matchable."""
        self._removed.toggle(run, self._stored)

    def __bool__(self) -> bool:
        """Whether anything has changed since the last drain."""
        return bool(len(self._stored) or len(self._removed))

    def drain(self) -> CacheChange | None:
        """The net changes since the last call, or None."""
        if not self:
            return None
        change = CacheChange(self._stored.hashes(), self._removed.hashes())
        self._stored.clear()
        self._removed.clear()
        return change


class EventLog:
    """Numbers the cache changes of one worker. A subscriber starts from `snapshot` and applies the events that follow.

    A hash is *stored* while pool or host tier has its block, and *lowered* while only the host tier has. Hashes are
    kept in the order in which they were stored, so a snapshot keeps chains together.
    """

    def __init__(self) -> None:
        self._seq = 0
        self._pool, self._host = new_hash_set(), new_hash_set()

    def number(self, change: CacheChange | None, host_changes: Sequence[CacheChange] = ()) -> KvEvents | None:
        """The next event from what was drained, or None when nothing changed.

        Args:
            change: of the pool.
            host_changes: of the host tier, in order.
        """
        if change is None and not host_changes:
            return None
        if change is not None and not host_changes and not self._host:
            return self._in_pool_alone(change)
        touched: dict[BlockHash, tuple[bool, bool]] = {}  # before the changes: in the pool, in the host tier
        if change is not None:
            self._apply(self._pool, change, touched)
        for each in host_changes:
            self._apply(self._host, each, touched)
        return self._event(touched)

    def _in_pool_alone(self, change: CacheChange) -> KvEvents | None:
        """`_event` for an empty host tier. A net change does not store what it removes."""
        return self._numbered(self._pool.add(change.stored), self._pool.remove(change.removed), [], [])

    def _apply(self, tier: HashSet, change: CacheChange, touched: dict[BlockHash, tuple[bool, bool]]) -> None:
        for digest in (*change.stored, *change.removed):
            if digest not in touched:
                touched[digest] = digest in self._pool, digest in self._host
        tier.remove(change.removed)
        tier.add(change.stored)

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
        lowered: list[bytes] = [digest for digest in self._host.hashes() if digest not in self._pool]
        return KvSnapshot(seq=self._seq, hashes=[*self._pool.hashes(), *lowered], lowered=lowered)

    def audit(
        self,
        hashes: Sequence[bytes],
        in_pool: Collection[BlockHash],
        in_host: Container[BlockHash],
        *,
        is_changing: bool,
    ) -> tuple[int, list[int]]:
        """(the last event's number, the tier of each of these hashes), from the caches themselves, not from past
        events.

        A hash whose tier differs from the events while changes are not drained (`is_changing`) is CHANGING.
        """
        tiers, mine = [], set(hashes).intersection(in_pool)
        for digest in map(BlockHash, hashes):
            tier = IN_POOL if digest in mine else BELOW_POOL if digest in in_host else NOWHERE
            reported = IN_POOL if digest in self._pool else BELOW_POOL if digest in self._host else NOWHERE
            tiers.append(CHANGING if is_changing and tier != reported else tier)
        return self._seq, tiers


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
