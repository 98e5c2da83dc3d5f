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
        self.lately_removed: deque[bytes] = deque(maxlen=_REMEMBERED)

    # ---- which messages count

    def hear(self, seq: int) -> Word:
        """An event with this number came."""
        self.newest_seq = max(self.newest_seq, seq)
        if self.state is IndexState.STALE:
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
        """From EXACT, or further."""
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
        room = self.max_blocks - self.num_blocks
        fitting = hashes if len(hashes) <= room else hashes[: max(room, 0)]
        if not _LENGTHS.issuperset(map(len, fitting)):
            fitting = [one for one in fitting if len(one) == HASH_BYTES]
        self.num_blocks += self.holders.put(fitting, self.both, self.both if in_pool else self.anywhere)
        return len(fitting) == len(hashes)

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

    def replace(self, hashes: Iterable[bytes], lowered: Iterable[bytes]) -> bool:
        """It holds exactly these now, `lowered` of them only below its pool. False when not all fit, or some are no hashes."""
        unique = list(dict.fromkeys(hashes))
        fitting = dict.fromkeys([one for one in unique if len(one) == HASH_BYTES][: self.max_blocks])
        if self.num_blocks:
            self.holders.keep(list(fitting), self.both)
        below = fitting.keys() & set(lowered)
        in_pool, low = list(fitting), []
        if below:
            in_pool, low = [one for one in fitting if one not in below], [one for one in fitting if one in below]
        self.holders.put(in_pool, self.both, self.both)
        self.holders.put(low, self.both, self.anywhere)
        self.num_blocks = len(fitting)
        return len(fitting) == len(unique)

    def clear(self) -> None:
        """It holds nothing."""
        if self.num_blocks:
            self.holders.keep((), self.both)
        self.num_blocks = 0
