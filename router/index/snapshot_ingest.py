"""A worker's snapshot on its way into the index: in parts as they come, a slice at a time, while its events go on.

What an event says of a block is newer than the snapshot: the slices that follow leave such a block alone. So events apply at
once, in their order, and nothing is kept back for later. What the worker was known to hold before, and the snapshot does not
name, goes in the end. Never imports torch, Ray, sockets or a clock.
"""

from collections import deque
from collections.abc import Collection, Sequence

from kvrelay.native.hash_index import distinct
from kvrelay.router.index.holders import Holders

SLICE = 512
"""Hashes that are put in at a time, or taken off."""


class Sweep:
    """Takes a worker's bits off all blocks but some, a stretch of the row at a time. From the beginning on blocks stay where they are."""

    __slots__ = ("_holders", "_kept", "_mine", "_next", "is_done")

    def __init__(self, holders: Holders, mine: int) -> None:
        self._holders, self._mine, self._kept, self._next = holders, mine, bytearray(), 0
        self.is_done = False
        holders.begin_sweep()

    def keep(self, hashes: Sequence[bytes]) -> None:
        """These it holds: they are to stay."""
        self._holders.mark(hashes, self._kept)

    def step(self) -> int:
        """Another stretch: how many blocks it took off."""
        self._next, num_dropped = self._holders.sweep(self._next, self._mine, self._kept, SLICE)
        if not self._next:
            self.stop()
        return num_dropped

    def stop(self) -> None:
        """The rest stays as it is. Idempotent."""
        if not self.is_done:
            self.is_done = True
            self._holders.end_sweep()


class Filling:
    """One snapshot: what has come of it, and what of that is still to be put in."""

    __slots__ = (
        "_next_part", "_parts", "_place", "_room", "_seq", "_touched",
        "is_complete", "is_queued", "is_whole", "num_events", "rest", "was_audited",
    )  # fmt: skip

    def __init__(self, seq: int, most: int, rest: Sweep | None) -> None:
        """Of `most` hashes at most. `rest`: takes off in the end what it does not name; None: the worker holds nothing yet."""
        self._seq, self._room, self._next_part, self._place = seq, most, 0, 0
        self._parts: deque[tuple[tuple[bytes, ...], Collection[bytes]]] = deque()  # hashes, and those that are lowered
        self._touched: set[bytes] = set()  # by events since
        self.rest = rest
        self.is_whole = False  # all parts have come
        self.is_complete = True  # all fitted, and were hashes
        self.is_queued = self.was_audited = False
        self.num_events = 0  # since the last part came

    def take(self, seq: int, part: int, hashes: Sequence[bytes], lowered: Sequence[bytes], *, is_last: bool) -> bool:
        """A part has come. False: it is not the next one of this snapshot."""
        if seq != self._seq or part != self._next_part or self.is_whole:
            return False
        self._parts.append((tuple(hashes), frozenset(lowered)))  # a tuple of bytes is nothing to the garbage collector
        self._next_part, self.is_whole = part + 1, is_last
        self.num_events, self.was_audited = 0, False
        return True

    def touch(self, *changes: Sequence[bytes]) -> None:
        """An event names these."""
        self._touched.update(*changes)
        self.num_events += 1

    def keep(self, hashes: Sequence[bytes]) -> None:
        """These are in, of the snapshot or by an event."""
        if self.rest is not None and hashes:
            self.rest.keep(hashes)

    def slice(self) -> tuple[list[bytes], list[bytes]] | None:
        """The next hashes to be put in: (those in the pool, those below it); None: all that has come is in."""
        if not self._parts:
            return None
        hashes, lowered = self._parts[0]
        some = distinct(list(hashes[self._place : self._place + SLICE]))
        if len(some) > self._room:
            del some[self._room :]
            self.is_complete = False
        self._room -= len(some)
        self._place += SLICE
        if self._place >= len(hashes):
            self._parts.popleft()
            self._place = 0
        if self._touched:
            some = [one for one in some if one not in self._touched]
        if not lowered:
            return some, []
        return [one for one in some if one not in lowered], [one for one in some if one in lowered]

    def stop(self) -> None:
        """It is given up, or done."""
        if self.rest is not None:
            self.rest.stop()
