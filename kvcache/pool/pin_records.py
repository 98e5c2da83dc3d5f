"""Which prompts are pinned for which session, so that a session's pins can end while those of others stay. Pure.

A record lasts until its pin expires or `max_hashes` is exceeded; a pin whose record was dropped ends when it expires,
not before. Times are the caller's clock, in seconds.
"""

from dataclasses import dataclass, replace

from kvrelay.hashing import HASH_BYTES
from kvrelay.types import BlockHash


@dataclass(frozen=True, slots=True)
class PinRecord:
    """The blocks of a prompt, pinned until a time. `session`: "" for pins outside sessions."""

    session: str
    root: BlockHash
    digests: bytes  # concatenated hashes of its blocks
    until_s: float

    def __len__(self) -> int:
        return len(self.digests) // HASH_BYTES

    def hashes(self) -> list[BlockHash]:
        data = self.digests
        return [BlockHash(data[i : i + HASH_BYTES]) for i in range(0, len(data), HASH_BYTES)]

    def first(self, count: int) -> "PinRecord":
        """This record for the first `count` blocks alone."""
        return replace(self, digests=self.digests[: count * HASH_BYTES])

    def num_common(self, other: "PinRecord") -> int:
        """The number of common leading blocks. Hashes are chained, so equal hashes have equal prefixes."""
        if self.root != other.root:
            return 0
        low, high = 0, min(len(self), len(other))
        while low < high:
            middle = (low + high + 1) // 2
            end = middle * HASH_BYTES
            if self.digests[end - HASH_BYTES : end] == other.digests[end - HASH_BYTES : end]:
                low = middle
            else:
                high = middle - 1
        return low

    def covers(self, other: "PinRecord") -> bool:
        """Whether this record makes `other` redundant."""
        is_same = (self.session, self.root) == (other.session, other.root)
        return is_same and self.until_s >= other.until_s and self.digests.startswith(other.digests)


class PinRecords:
    """The pins of one engine, in the order in which they were made."""

    def __init__(self, max_hashes: int) -> None:
        self._max_hashes = max_hashes
        self._records: list[PinRecord] = []
        self.num_hashes = 0

    def __len__(self) -> int:
        return len(self._records)

    def add(self, record: PinRecord, now_s: float) -> None:
        """Add a pin, and forget those that it covers or that have expired."""
        self._keep([old for old in self._records if old.until_s > now_s and not record.covers(old)] + [record])
        while self.num_hashes > self._max_hashes:
            self.num_hashes -= len(self._records.pop(0))

    def end(self, session: str, now_s: float) -> tuple[list[PinRecord], list[PinRecord]]:
        """Forget a session's pins: (its records, the parts of other records that cover the same blocks)."""
        ended = [record for record in self._records if record.session == session]
        self._keep([record for record in self._records if record.session != session and record.until_s > now_s])
        shared = [record.first(max((record.num_common(one) for one in ended), default=0)) for record in self._records]
        return ended, [record for record in shared if record.digests]

    def _keep(self, records: list[PinRecord]) -> None:
        self._records = records
        self.num_hashes = sum(map(len, records))
