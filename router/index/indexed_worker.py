"""One worker's part of the index: which of its messages apply, how many blocks it holds, and its snapshot, which
arrives in parts and is ingested in slices while events continue to apply.

What an event changes is newer than the snapshot: later slices leave such a block alone. So events apply at once, in
order, and none is buffered. Blocks that the worker was known to hold before, and that the snapshot lacks, are dropped
at the end. Owns no masks. Never imports torch, Ray, sockets or a clock.
"""

from collections import deque
from collections.abc import Callable, Collection, Iterable, Sequence
from dataclasses import dataclass
from itertools import islice
from typing import Literal

import numpy as np

from kvrelay.hashing import HASH_BYTES, distinct
from kvrelay.plane.reports import BELOW_POOL, CHANGING, IN_POOL, NOWHERE, KvEvents, KvSnapshot
from kvrelay.router.index.hash_array import anywhere_bit, both_bits
from kvrelay.router.index.holders import HolderIndex
from kvrelay.router.types import IndexState

RETRY_EVERY = 256
"""While a snapshot is awaited, it is requested again every so many events."""
_REMEMBERED = 32  # removed hashes that an audit may sample
_LENGTHS = frozenset([HASH_BYTES])


EventAction = Literal["apply", "ignore", "request snapshot"]


@dataclass(slots=True)
class AuditCounts:
    """Hashes of one worker that were compared: `wrong` are claimed and not held, `missed` are held and not claimed."""

    compared: int = 0
    wrong: int = 0
    missed: int = 0


SLICE = 512
"""Hashes that are ingested, or dropped, at a time."""


class Sweep:
    """Drops a worker's blocks except marked ones, a stretch of the array at a time.

    Meanwhile blocks stay where they are.
    """

    def __init__(self, holders: HolderIndex, own_bits: int) -> None:
        self._holders, self._mine, self._kept, self._next = holders, own_bits, bytearray(), 0
        self.is_done = False
        holders.num_sweeps += 1

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
            self._holders.num_sweeps -= 1


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

    def take(self, part: KvSnapshot) -> bool:
        """A part has arrived. False: it is not the next one of this snapshot."""
        if part.seq != self._seq or part.part != self._next_part or self.is_received:
            return False
        # the garbage collector does not visit a tuple of bytes
        self._parts.append((tuple(part.hashes), frozenset(part.lowered)))
        self._next_part, self.is_received = part.part + 1, part.is_last
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


class IndexedWorker:
    """One worker, in one of the index's rows.

    Written only by PrefixIndex. Its attributes are the state of one event stream.
    """

    def __init__(self, row: int, max_blocks: int, stride: int, holders: HolderIndex) -> None:
        self.row, self.max_blocks, self.stride, self.holders = row, max_blocks, stride, holders
        self.anywhere, self.both = anywhere_bit(row), both_bits(row)
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
            return "request snapshot" if self.ignored % RETRY_EVERY == 1 else "ignore"
        if seq <= self.seq:
            return "ignore"
        if seq != self.seq + 1:
            self.set_state(IndexState.STALE)
            self.ignored = 1  # requested just now
            return "request snapshot"
        self.seq = seq
        return "apply"

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

    def apply(self, events: KvEvents) -> bool:
        """Apply an event. False: it has blocks that do not fit, or that the worker was not known to hold."""
        is_complete = not events.stored or self.store(distinct(events.stored))
        is_complete &= not events.lowered or self.move(distinct(events.lowered), in_pool=False)
        is_complete &= not events.raised or self.move(distinct(events.raised), in_pool=True)
        return is_complete & (not events.removed or self.drop(distinct(events.removed)))

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

    # ---- a snapshot, and the events during its ingest

    def begin(self, seq: int) -> None:
        """A snapshot as of `seq` begins."""
        if self.state is IndexState.STALE or seq != self.seq:
            self.set_state(IndexState.STALE)
        self._end_ingest()
        self.ingest = SnapshotIngest(seq, self.max_blocks, Sweep(self.holders, self.both) if self.num_blocks else None)
        self.seq, self.newest_seq, self.num_outdated = seq, seq, 0

    def change(self, events: KvEvents) -> None:
        """An event during the ingest.

        Moves between tiers are applied without a check: the block may be in a later slice.
        """
        assert self.ingest is not None
        self.ingest.touch(events.stored, events.removed, events.lowered, events.raised)
        for hashes, in_pool in ((events.stored, True), (events.lowered, False), (events.raised, True)):
            if some := distinct(hashes):
                self.ingest.is_complete &= self.store(some, in_pool=in_pool)
                self.ingest.keep(some)
        if events.removed:
            self.drop(distinct(events.removed))

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
        if self.ingest is not None and self.ingest.rest is not None:
            self.ingest.rest.stop()
        self.ingest = None

    # ---- audits

    def audit_sample(self, seed: int, num_hashes: int) -> list[bytes]:
        """Up to `num_hashes`: half that it is known to hold, half that it is not (other workers hold them, or it
        removed them recently).
        """
        rng, holders, own_bits = np.random.default_rng(seed), self.holders, self.both
        num_claimed = num_hashes - num_hashes // 2
        claimed = holders.sample(lambda mask: mask & own_bits != 0, self.num_blocks, num_claimed, rng)
        others = holders.sample(lambda mask: mask & own_bits == 0, len(holders), num_hashes, rng)
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
