"""Pins: entries and blocks that stay until a time, within limits, and which session pinned which prompts. Pure.

Times are the caller's clock, in seconds.
"""

import heapq
from array import array
from collections import Counter
from collections.abc import Hashable, Iterable
from dataclasses import dataclass, replace
from itertools import takewhile
from typing import Generic, TypeVar

from kvrelay.hashing import HASH_BYTES, account_of
from kvrelay.types import BlockHash

Key = TypeVar("Key", bound=Hashable)


class TimedPins(Generic[Key]):
    """Keys that are pinned, each until a time; at most `limit` (None: any number)."""

    def __init__(self, limit: int | None = None) -> None:
        self._limit = limit
        self._until: dict[Key, float] = {}
        self._ends: list[tuple[float, Key]] = []

    def __len__(self) -> int:
        return len(self._until)

    def __contains__(self, key: Key) -> bool:
        return key in self._until

    def add(self, key: Key, until_s: float) -> bool:
        """Pin a key, or extend its pin; a pin never gets shorter. False: the limit is reached."""
        end_s = self._until.get(key)
        if end_s is None and self._limit is not None and len(self._until) >= self._limit:
            return False
        if end_s is None or until_s > end_s:
            self._until[key] = until_s
            heapq.heappush(self._ends, (until_s, key))
            if len(self._ends) > 2 * len(self._until) + 64:  # extended pins leave stale ends behind
                self._ends = [(end_s, key) for key, end_s in self._until.items()]
                heapq.heapify(self._ends)
        return True

    def remove(self, key: Key) -> bool:
        """End a pin; whether there was one."""
        return self._until.pop(key, None) is not None

    def expire(self, now_s: float) -> list[Key]:
        """End and return the pins whose time has come."""
        ended: list[Key] = []
        while self._ends and self._ends[0][0] <= now_s:
            end_s, key = heapq.heappop(self._ends)
            if self._until.get(key) == end_s:
                del self._until[key]
                ended.append(key)
        return ended

    def expire_next(self) -> list[Key]:
        """End and return the pins that expire next; empty: there are none."""
        ended: list[Key] = []
        while self._ends and not ended:
            ended = self.expire(self._ends[0][0])
        return ended


class PinLedger:
    """Pinned blocks: at most `quota` of each account (hashing.account_of), and `most` in all: where API keys have no
    namespaces, clients choose their cache salts, and so as many accounts as they like.

    A pin is one reference held by this ledger, however often a block is pinned; the block pool counts it.
    """

    def __init__(self, quota: int, most: int) -> None:
        self._quota, self._most = quota, most
        self.tenants: dict[int, bytes] = {}  # the account of each pinned block
        self._pins: TimedPins[int] = TimedPins()
        self._num_of: Counter[bytes] = Counter()

    def add(
        self, root: BlockHash, blocks: Iterable[int], until_s: float, quota: int | None = None
    ) -> tuple["array[int]", int]:
        """Pin blocks from the first on, within the quota: (newly pinned ones, number of these blocks pinned now).

        A pinned block keeps the later of the two times. quota: of this account; None: as of every one.
        """
        fresh, count, tenant = array("i"), 0, account_of(root)
        quota = self._quota if quota is None else quota
        for block in blocks:
            if block not in self.tenants:
                if self._num_of[tenant] >= quota or len(self.tenants) >= self._most:
                    break
                self.tenants[block] = tenant
                self._num_of[tenant] += 1
                fresh.append(block)
            self._pins.add(block, until_s)
            count += 1
        return fresh, count

    def remove(self, blocks: Iterable[int]) -> "array[int]":
        """End the pins of these blocks; returns those that had one."""
        return self._uncount(block for block in blocks if self._pins.remove(block))

    def expired(self, now_s: float) -> "array[int]":
        """End and return the pins whose time has come."""
        return self._uncount(self._pins.expire(now_s))

    def next_to_expire(self) -> "array[int]":
        """End and return the pins that expire next, to make room. Empty: there are none."""
        return self._uncount(self._pins.expire_next())

    def _uncount(self, blocks: Iterable[int]) -> "array[int]":
        ended = array("i", blocks)
        for block in ended:
            tenant = self.tenants.pop(block)
            self._num_of[tenant] -= 1
            if not self._num_of[tenant]:
                del self._num_of[tenant]
        return ended


@dataclass(frozen=True, slots=True)
class PinRecord:
    """The blocks of a prompt, pinned until a time. `session`: "" for pins outside sessions."""

    session: str
    root: BlockHash
    digests: bytes  # concatenated hashes of its blocks
    until_s: float
    pin_share: float | None = None  # as in KvHints

    def __len__(self) -> int:
        return len(self.digests) // HASH_BYTES

    def hashes(self) -> list[BlockHash]:
        data = self.digests
        return [BlockHash(data[i : i + HASH_BYTES]) for i in range(0, len(data), HASH_BYTES)]

    def first(self, count: int) -> "PinRecord":
        """This record for the first `count` blocks alone."""
        return replace(self, digests=self.digests[: count * HASH_BYTES])

    def num_common(self, other: "PinRecord") -> int:
        """The number of common leading blocks."""
        pairs = zip(self.hashes(), other.hashes(), strict=False) if self.root == other.root else ()
        return sum(1 for _ in takewhile(lambda pair: pair[0] == pair[1], pairs))

    def covers(self, other: "PinRecord") -> bool:
        """Whether this record makes `other` redundant."""
        is_same = (self.session, self.root) == (other.session, other.root)
        return is_same and self.until_s >= other.until_s and self.digests.startswith(other.digests)


class PinRecords:
    """The pins of one engine, in the order in which they were made, so that a session's can end while others' stay.

    A record lasts until its pin expires or `max_hashes` is exceeded; a pin whose record was dropped ends when it
    expires, not before.
    """

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
