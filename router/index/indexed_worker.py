"""One worker's part of the index: which of its messages apply, and how many blocks it holds.

Owns no masks. Never imports torch, Ray, sockets or a clock.
"""

import enum
from collections import deque
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import islice, takewhile

from kvrelay.hashing import HASH_BYTES
from kvrelay.plane.messages import BELOW_POOL, CHANGING, IN_POOL, NOWHERE
from kvrelay.router.index.hash_array import anywhere_bit, both_bits
from kvrelay.router.index.holders import HolderIndex
from kvrelay.router.index.snapshot_ingest import SnapshotIngest, Sweep
from kvrelay.router.types import IndexState

RETRY_EVERY = 256
"""While a snapshot is awaited, it is requested again every so many events."""
_REMEMBERED = 32  # removed hashes that an audit may sample
_LENGTHS = frozenset([HASH_BYTES])
_GOLDEN, _WORD = 0x9E3779B97F4A7C15, (1 << 64) - 1


class LearnedPrefixes:
    """What a worker without KV events probably holds: hashes of the prompts that this router has sent there, and when
    each expires, soonest first. Bounded in number and time.
    """

    def __init__(self, limit: int, ttl_s: float) -> None:
        self.limit, self._ttl_s = limit, ttl_s
        self._expiry: dict[bytes, float] = {}
        self.since_s: float | None = None  # when the first prompt was sent

    def __len__(self) -> int:
        return len(self._expiry)

    def note(self, chain: Sequence[bytes], now_s: float) -> list[bytes]:
        """This prompt, of at most `limit` hashes, was computed there now. Returns the hashes that exceed the limit.

        Those are the least recently used. The end of a chain goes before its beginning, as in a worker's pool.
        """
        if self.since_s is None:
            self.since_s = now_s
        for block_hash in reversed(chain):
            self._expiry.pop(block_hash, None)
            self._expiry[block_hash] = now_s + self._ttl_s
        return self._forget(list(islice(self._expiry, max(0, len(self._expiry) - self.limit))))

    def expired(self, now_s: float) -> list[bytes]:
        return self._forget(list(takewhile(lambda one: self._expiry[one] <= now_s, self._expiry)))

    def _forget(self, hashes: list[bytes]) -> list[bytes]:
        for block_hash in hashes:
            del self._expiry[block_hash]
        return hashes


class EventAction(enum.Enum):
    """How to treat an event."""

    APPLY = "apply"
    IGNORE = "ignore"
    REQUEST_SNAPSHOT = "ask"  # ignore it, and request a snapshot


@dataclass(slots=True)
class AuditCounts:
    """Hashes of one worker that were compared: `wrong` are claimed and not held, `missed` are held and not claimed."""

    compared: int = 0
    wrong: int = 0
    missed: int = 0


def draws(seed: int) -> Iterator[int]:
    """Endless 64-bit random numbers, the same for the same seed.

    Source: SplitMix64 (Steele, Lea and Flood, OOPSLA 2014).
    """
    state = seed & _WORD
    while True:
        state = (state + _GOLDEN) & _WORD
        mixed = ((state ^ (state >> 30)) * 0xBF58476D1CE4E5B9) & _WORD
        mixed = ((mixed ^ (mixed >> 27)) * 0x94D049BB133111EB) & _WORD
        yield mixed ^ (mixed >> 31)


class IndexedWorker:
    """One worker, in one of the index's rows.

    Written only by PrefixIndex. Its attributes are the state of one event stream.
    """

    def __init__(self, row: int, max_blocks: int, stride: int, holders: HolderIndex, learned: LearnedPrefixes) -> None:
        self.row, self.max_blocks, self.stride, self.holders = row, max_blocks, stride, holders
        self.anywhere, self.both = anywhere_bit(row), both_bits(row)
        self.learned: LearnedPrefixes | None = learned  # while it has sent no event or snapshot
        self.state = IndexState.STALE
        self.seq = 0  # of the last event applied, or of the snapshot
        self.newest_seq = 0  # of any event seen
        self.ignored = 0  # events since it became STALE, or DEGRADED
        self.until_next_request = RETRY_EVERY
        self.num_outdated = 0  # snapshots in a row that were outdated
        self.was_behind = False  # whether its last audit answer was older than the events applied
        self.num_blocks = 0
        self.audited = AuditCounts()
        self.ingest: SnapshotIngest | None = None  # while a snapshot is being ingested
        self.recently_removed: deque[bytes] = deque(maxlen=_REMEMBERED)

    # ---- which messages apply

    def receive(self, seq: int) -> EventAction:
        self.newest_seq = max(self.newest_seq, seq)
        if self.state is IndexState.STALE and self.ingest is None:
            self.ignored += 1
            return EventAction.REQUEST_SNAPSHOT if self.ignored % RETRY_EVERY == 1 else EventAction.IGNORE
        if seq <= self.seq:
            return EventAction.IGNORE
        if seq != self.seq + 1:
            self.set_state(IndexState.STALE)
            self.ignored = 1  # requested just now
            return EventAction.REQUEST_SNAPSHOT
        self.seq = seq
        return EventAction.APPLY

    def set_state(self, state: IndexState) -> None:
        """Change the state. STALE aborts the ingest of a snapshot."""
        if state is IndexState.STALE:
            self._end_ingest()
        self.state, self.ignored, self.until_next_request = state, 0, RETRY_EVERY

    def should_request_again(self) -> bool:
        """Another event while DEGRADED: whether to request a snapshot again, after 256, 512, 1,024... of them."""
        self.ignored += 1
        if self.ignored < self.until_next_request:
            return False
        self.ignored, self.until_next_request = 0, 2 * self.until_next_request
        return True

    # ---- what it holds

    def store(self, hashes: Sequence[bytes], *, in_pool: bool = True) -> bool:
        """It holds these now. False: some exceed max_blocks, or are no hashes."""
        most = (
            self.max_blocks if self.ingest is None else 2 * self.max_blocks
        )  # with those that go at the end of the ingest
        room = most - self.num_blocks
        fitting = hashes if len(hashes) <= room else hashes[: max(room, 0)]
        return self._put(fitting, in_pool=in_pool) and len(fitting) == len(hashes)

    def _put(self, hashes: Sequence[bytes], *, in_pool: bool) -> bool:
        """It holds these. False: some are no hashes."""
        right = hashes
        if not _LENGTHS.issuperset(map(len, hashes)):
            right = [one for one in hashes if len(one) == HASH_BYTES]
        self.num_blocks += self.holders.put(right, self.both, self.both if in_pool else self.anywhere)
        return len(right) == len(hashes)

    def move(self, hashes: Iterable[bytes], *, in_pool: bool) -> bool:
        """Between its pool and its lower tiers. False: it was not known to hold all of them; those stay unknown."""
        matches = list(hashes)
        known = self.holders.known(matches, self.both)
        self.holders.put(known, self.both, self.both if in_pool else self.anywhere)
        return len(known) == len(matches)

    def drop(self, hashes: Sequence[bytes]) -> bool:
        """It holds none of these any more. False: it was not known to hold all of them."""
        num_dropped = self.holders.drop(hashes, self.both)
        self.recently_removed.extend(hashes[-_REMEMBERED:])
        self.num_blocks -= num_dropped
        return num_dropped == len(hashes)

    def clear(self) -> Sweep:
        """A sweep that makes it hold nothing, step by step."""
        return Sweep(self.holders, self.both)

    # ---- a snapshot, and the events during its ingest

    def begin(self, seq: int) -> None:
        """A snapshot as of `seq` begins."""
        if self.state is IndexState.STALE or seq != self.seq:
            self.set_state(IndexState.STALE)
        self._end_ingest()
        self.ingest = SnapshotIngest(seq, self.max_blocks, self.clear() if self.num_blocks else None)
        self.seq, self.newest_seq, self.num_outdated = seq, seq, 0

    def change(
        self, stored: Sequence[bytes], removed: Sequence[bytes], lowered: Sequence[bytes], raised: Sequence[bytes]
    ) -> None:
        """An event during the ingest.

        Moves between tiers are applied without a check: the block may be in a later slice.
        """
        assert self.ingest is not None
        self.ingest.touch(stored, removed, lowered, raised)
        for hashes, in_pool in ((stored, True), (lowered, False), (raised, True)):
            if hashes:
                self.ingest.is_complete &= self.store(hashes, in_pool=in_pool)
                self.ingest.keep(hashes)
        if removed:
            self.drop(removed)

    def fill(self) -> bool:
        """Ingest a slice. Whether there is more; if not, the worker of a complete snapshot is EXACT or DEGRADED."""
        ingest = self.ingest
        assert ingest is not None
        if (some := ingest.slice()) is not None:
            for hashes, in_pool in zip(some, (True, False), strict=True):
                if hashes:
                    ingest.is_complete &= self._put(hashes, in_pool=in_pool)
                    ingest.keep(hashes)
            return True
        if not ingest.is_received:
            return False
        if ingest.rest is not None and not ingest.rest.is_done:
            self.num_blocks -= ingest.rest.step()
            return True
        self._end_ingest()
        is_complete = ingest.is_complete and self.num_blocks <= self.max_blocks
        self.set_state(IndexState.EXACT if is_complete else IndexState.DEGRADED)
        return False

    def _end_ingest(self) -> None:
        if self.ingest is not None:
            self.ingest.stop()
            self.ingest = None

    # ---- audits

    def audit_sample(self, seed: int, num_hashes: int) -> list[bytes]:
        """Up to `num_hashes`: half that it is known to hold, half that it is not (other workers hold them, or it
        removed them recently).
        """
        numbers, holders, own_bits = draws(seed), self.holders, self.both
        num_claimed = num_hashes - num_hashes // 2
        claimed = holders.sample(lambda mask: mask & own_bits != 0, self.num_blocks, num_claimed, numbers)
        others = holders.sample(lambda mask: mask & own_bits == 0, len(holders), num_hashes, numbers)
        unclaimed = (one for one in (*reversed(self.recently_removed), *others) if not holders.mask(one) & own_bits)
        return [*dict.fromkeys(claimed), *islice(dict.fromkeys(unclaimed), num_hashes // 2)]

    def compare(self, hashes: Sequence[bytes], tiers: Sequence[int]) -> tuple[int, int]:
        """(wrong, missed): the index compared with the worker's answer, hash by hash; counted in `audited`."""
        wrong = missed = 0
        for block_hash, tier in zip(hashes, tiers, strict=False):
            if tier == CHANGING:
                continue
            own_bits = self.holders.mask(block_hash) & self.both
            claimed = IN_POOL if own_bits == self.both else BELOW_POOL if own_bits else NOWHERE
            self.audited.compared += 1
            wrong += claimed > tier
            missed += claimed < tier
        self.audited.wrong += wrong
        self.audited.missed += missed
        return wrong, missed
