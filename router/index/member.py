"""One worker's part of the index: which of its messages count, and how many blocks it holds.

Owns no masks. Never imports torch, Ray, sockets or a clock.
"""

import enum
from collections import deque
from collections.abc import Iterable, Sequence

from kvrelay.hashing import HASH_BYTES
from kvrelay.router.index.bits import anywhere_bit, both_bits
from kvrelay.router.index.holders import Holders
from kvrelay.router.index.learned import Learned
from kvrelay.router.index.snapshot_ingest import Filling, Sweep
from kvrelay.router.types import IndexState

REASK_EVERY = 256
"""While a snapshot is awaited, every so many further events it is asked for again."""
_REMEMBERED = 32  # removed hashes that an audit may ask about
_LENGTHS = frozenset([HASH_BYTES])


class Word(enum.Enum):
    """What becomes of an event."""

    APPLY = "apply"
    IGNORE = "ignore"
    ASK = "ask"  # ignore it, and ask for a snapshot


class Member:
    """One worker, in one of the index's rows. Mutable; written only by PrefixIndex."""

    __slots__ = (
        "anywhere",
        "both",
        "filling",
        "holders",
        "ignored",
        "lately_removed",
        "learned",
        "max_blocks",
        "name",
        "newest_seq",
        "num_blocks",
        "num_late",
        "row",
        "seq",
        "state",
        "stride",
        "until_asked",
        "was_behind",
    )

    def __init__(
        self, name: str, row: int, max_blocks: int, stride: int, holders: Holders, learned: Learned | None = None
    ) -> None:
        self.name, self.row, self.max_blocks, self.stride, self.holders = name, row, max_blocks, stride, holders
        self.anywhere, self.both = anywhere_bit(row), both_bits(row)
        self.learned = learned  # while it has told nothing
        self.state = IndexState.STALE
        self.seq = 0  # of the last event applied, or of the snapshot
        self.newest_seq = 0  # seen in any event
        self.ignored = 0  # events since STALE began, or since DEGRADED did
        self.until_asked = REASK_EVERY
        self.num_late = 0  # snapshots in a row that healed nothing
        self.was_behind = False  # its last answer to an audit was older than the events applied
        self.num_blocks = 0
        self.filling: Filling | None = None  # while a snapshot goes in
        self.lately_removed: deque[bytes] = deque(maxlen=_REMEMBERED)

    # ---- which messages count

    def hear(self, seq: int) -> Word:
        """An event with this number came."""
        self.newest_seq = max(self.newest_seq, seq)
        if self.state is IndexState.STALE and self.filling is None:
            self.ignored += 1
            return Word.ASK if self.ignored % REASK_EVERY == 1 else Word.IGNORE
        if seq <= self.seq:
            return Word.IGNORE
        if seq != self.seq + 1:
            self.fall(IndexState.STALE)
            self.ignored = 1  # asked just now
            return Word.ASK
        self.seq = seq
        return Word.APPLY

    def fall(self, state: IndexState) -> None:
        """From EXACT, or further. One that is STALE gives its snapshot up, should one be going in."""
        if state is IndexState.STALE:
            self._end_filling()
        self.state, self.ignored, self.until_asked = state, 0, REASK_EVERY

    def asks_again(self) -> bool:
        """Another event while DEGRADED: whether to ask once more, after 256, 512, 1,024... of them."""
        self.ignored += 1
        if self.ignored < self.until_asked:
            return False
        self.ignored, self.until_asked = 0, 2 * self.until_asked
        return True

    # ---- what it holds

    def store(self, hashes: Sequence[bytes], *, in_pool: bool = True) -> bool:
        """It holds these now. False when some did not fit, or are no hashes."""
        most = self.max_blocks if self.filling is None else 2 * self.max_blocks  # with what goes in the end
        room = most - self.num_blocks
        fitting = hashes if len(hashes) <= room else hashes[: max(room, 0)]
        return self._put(fitting, in_pool=in_pool) and len(fitting) == len(hashes)

    def _put(self, hashes: Sequence[bytes], *, in_pool: bool) -> bool:
        """It holds these. False when some are no hashes."""
        right = hashes
        if not _LENGTHS.issuperset(map(len, hashes)):
            right = [one for one in hashes if len(one) == HASH_BYTES]
        self.num_blocks += self.holders.put(right, self.both, self.both if in_pool else self.anywhere)
        return len(right) == len(hashes)

    def move(self, hashes: Iterable[bytes], *, in_pool: bool) -> bool:
        """Between its pool and below. False when it was not known to hold all of them: those stay unknown."""
        wanted = list(hashes)
        known = self.holders.known(wanted, self.both)
        self.holders.put(known, self.both, self.both if in_pool else self.anywhere)
        return len(known) == len(wanted)

    def drop(self, hashes: Sequence[bytes]) -> bool:
        """It holds none of these any more. False when it was not known to hold all of them."""
        num_dropped = self.holders.drop(hashes, self.both)
        self.lately_removed.extend(hashes[-_REMEMBERED:])
        self.num_blocks -= num_dropped
        return num_dropped == len(hashes)

    def clear(self) -> Sweep:
        """What makes it hold nothing, step by step."""
        return Sweep(self.holders, self.both)

    # ---- a snapshot, and the events meanwhile

    def begin(self, seq: int) -> None:
        """All that it held as of `seq` is about to come."""
        if self.state is IndexState.STALE or seq != self.seq:
            self.fall(IndexState.STALE)
        self._end_filling()
        self.filling = Filling(seq, self.max_blocks, self.clear() if self.num_blocks else None)
        self.seq, self.newest_seq, self.num_late = seq, seq, 0

    def change(
        self, stored: Sequence[bytes], removed: Sequence[bytes], lowered: Sequence[bytes], raised: Sequence[bytes]
    ) -> None:
        """An event while a snapshot goes in. It is believed what it moves: that may be still to come."""
        assert self.filling is not None
        self.filling.touch(stored, removed, lowered, raised)
        for hashes, in_pool in ((stored, True), (lowered, False), (raised, True)):
            if hashes:
                self.filling.is_complete &= self.store(hashes, in_pool=in_pool)
                self.filling.keep(hashes)
        if removed:
            self.drop(removed)

    def fill(self) -> bool:
        """A slice of what has come of the snapshot. Whether there is more; if not, and all has come, it is EXACT or DEGRADED."""
        filling = self.filling
        assert filling is not None
        if (some := filling.slice()) is not None:
            for hashes, in_pool in zip(some, (True, False), strict=True):
                if hashes:
                    filling.is_complete &= self._put(hashes, in_pool=in_pool)
                    filling.keep(hashes)
            return True
        if not filling.is_whole:
            return False
        if filling.rest is not None and not filling.rest.is_done:
            self.num_blocks -= filling.rest.step()
            return True
        self._end_filling()
        is_complete = filling.is_complete and self.num_blocks <= self.max_blocks
        self.fall(IndexState.EXACT if is_complete else IndexState.DEGRADED)
        return False

    def _end_filling(self) -> None:
        if self.filling is not None:
            self.filling.stop()
            self.filling = None
