"""A worker's snapshot on its way into the index: it arrives in parts and is ingested in slices, while events continue
to apply.

What an event changes is newer than the snapshot: later slices leave such a block alone. So events apply at once, in
order, and none is buffered. Blocks that the worker was known to hold before, and that the snapshot lacks, are dropped
at the end. Never imports torch, Ray, sockets or a clock.
"""

from collections import deque
from collections.abc import Callable, Collection, Sequence

from kvrelay.hashing import distinct
from kvrelay.router.index.holders import HolderIndex

SLICE = 512
"""Hashes that are ingested, or dropped, at a time."""


class Sweep:
    """Drops a worker's blocks except marked ones, a stretch of the array at a time.

    Meanwhile blocks stay where they are.
    """

    def __init__(self, holders: HolderIndex, own_bits: int) -> None:
        self._holders, self._mine, self._kept, self._next = holders, own_bits, bytearray(), 0
        self.is_done = False
        holders.begin_sweep()

    def keep(self, hashes: Sequence[bytes]) -> None:
        """Mark blocks that the worker holds: they stay."""
        self._holders.mark(hashes, self._kept)

    def step(self) -> int:
        """Another stretch. Returns how many blocks it dropped."""
        self._next, num_dropped = self._holders.sweep(self._next, self._mine, self._kept, SLICE)
        if not self._next:
            self.stop()
        return num_dropped

    def stop(self) -> None:
        """The rest stays as it is. Idempotent."""
        if not self.is_done:
            self.is_done = True
            self._holders.end_sweep()


class SnapshotIngest:
    """One snapshot: the parts received, and what of them is still to be ingested."""

    def __init__(self, seq: int, most: int, rest: Sweep | None) -> None:
        """At most `most` hashes.

        `rest` drops, at the end, what the snapshot lacks; None: the worker holds nothing yet.
        """
        self._seq, self._free_run, self._next_part, self._place = seq, most, 0, 0
        self._parts: deque[tuple[tuple[bytes, ...], Collection[bytes]]] = deque()  # hashes, and those in lower tiers
        self._touched: set[bytes] = set()  # hashes changed by events since
        self.rest = rest
        self.is_received = False  # all parts have arrived
        self.is_complete = True  # all hashes fitted and were valid
        self.is_queued = self.was_audited = False
        self.num_events = 0  # since the last part

    def take(self, seq: int, part: int, hashes: Sequence[bytes], lowered: Sequence[bytes], *, is_last: bool) -> bool:
        """A part has arrived. False: it is not the next one of this snapshot."""
        if seq != self._seq or part != self._next_part or self.is_received:
            return False
        self._parts.append((tuple(hashes), frozenset(lowered)))  # the garbage collector does not visit a tuple of bytes
        self._next_part, self.is_received = part + 1, is_last
        self.num_events, self.was_audited = 0, False
        return True

    def touch(self, *changes: Sequence[bytes]) -> None:
        self._touched.update(*changes)
        self.num_events += 1

    def keep(self, hashes: Sequence[bytes]) -> None:
        """These are held, by the snapshot or an event."""
        if self.rest is not None and hashes:
            self.rest.keep(hashes)

    def slice(self) -> tuple[list[bytes], list[bytes]] | None:
        """The next hashes: (those in the pool, those in lower tiers); None: all that has arrived is ingested."""
        if not self._parts:
            return None
        hashes, lowered = self._parts[0]
        some = distinct(list(hashes[self._place : self._place + SLICE]))
        if len(some) > self._free_run:
            del some[self._free_run :]
            self.is_complete = False
        self._free_run -= len(some)
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
        """Aborted, or done."""
        if self.rest is not None:
            self.rest.stop()


Step = Callable[[], bool]
Schedule = Callable[[Step], object]
"""Does a slice of work; returns whether there is more."""


class DeferredWork:
    """Work that would block its caller for long: done in slices, round robin, or at once where nothing schedules it.

    `schedule` is given `work` when there is work and there was none; it calls `work` until that returns False.
    """

    def __init__(self, schedule: Schedule | None = None) -> None:
        self._steps: deque[Step] = deque()
        self._schedule = schedule

    def __len__(self) -> int:
        return len(self._steps)

    @property
    def are_deferred(self) -> bool:
        return self._schedule is not None

    def add(self, step: Step) -> None:
        """Add work; `step` is called until it returns False."""
        if self._schedule is None:
            while step():
                continue
            return
        self._steps.append(step)
        if len(self._steps) == 1:
            self._schedule(self.work)

    def work(self) -> bool:
        """A slice of the oldest work. Whether there is more."""
        if self._steps:
            step = self._steps.popleft()
            if step():
                self._steps.append(step)
        return bool(self._steps)
