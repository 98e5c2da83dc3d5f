"""Which worker holds which prefix, in its pool or in any tier: fed by KV events, healed by snapshots.

Owns the workers' state and rows; holders.py stores which workers hold a block, indexed_worker.py decides which messages
apply. Never imports torch, Ray, sockets or a clock. Hashes are chained, so that each stands for a whole prefix; a
worker's depth is the number of leading hashes whose blocks it holds without a hole. A worker whose blocks are k hashes
long (its stride) holds every k-th hash of a chain.

Guarantee: for every worker that is not STALE, both depths follow from the plain definition applied to its snapshot and
events (`in_pool`: leading blocks that it announced and neither lowered nor removed since). So no hit is claimed beyond
an announced hole. STALE workers, and those that hold nothing, are absent.
"""

from collections.abc import Sequence
from functools import partial

import numpy as np

from kvrelay.plane.reports import KvEvents, KvSnapshot
from kvrelay.router.index.hash_array import Ints, depths_by_row
from kvrelay.router.index.holders import CHUNK, HolderIndex
from kvrelay.router.index.indexed_worker import (
    RETRY_EVERY,
    AuditCounts,
    DeferredWork,
    IndexedWorker,
    Schedule,
    SnapshotIngest,
    Sweep,
)
from kvrelay.router.types import IndexState

MAX_OUTDATED = 3
"""Outdated snapshots in a row that are answered by requesting another."""


class PrefixIndex:
    """Prefixes of many workers. A worker starts STALE and becomes EXACT with its first snapshot.

    It has more than 25 methods: events, snapshots and audits all change the one state of each worker, and with it
    whether lookups may return the worker.
    """

    def __init__(self, *, chunk: int = CHUNK, schedule: Schedule | None = None) -> None:
        """`chunk`: scattered blocks that are looked up, and moved together, at a time.

        `schedule`: runs the ingest of snapshots, and the removal of workers, in slices of 512 blocks; None: at once.
        """
        self._chunk = chunk
        self._members: dict[str, IndexedWorker] = {}
        self._num_rows = 0  # rows are below this; a removed worker's is used again
        self._free_rows: set[int] = set()
        self._holders: dict[int, HolderIndex] = {}  # by stride
        self._deferred = DeferredWork(schedule)
        self._routable: dict[int, int] = {}  # by stride: bits of the workers that are not STALE

    def __len__(self) -> int:
        """Number of distinct hashes held by any worker, per stride."""
        return sum(map(len, self._holders.values()))

    # ---- workers

    def add_worker(self, worker_id: str, *, max_blocks: int, stride: int = 1) -> int:
        """A new or restarted worker: starts empty. Returns its row. More than `max_blocks` hashes make it DEGRADED."""
        self.remove_worker(worker_id)
        if self._free_rows:
            self._free_rows.remove(row := min(self._free_rows))
        else:
            row, self._num_rows = self._num_rows, self._num_rows + 1
        holders = self._holders.setdefault(stride, HolderIndex(self._chunk))
        self._members[worker_id] = IndexedWorker(row, max_blocks, stride, holders)
        return row

    def remove_worker(self, worker_id: str) -> None:
        """Forget a worker; its blocks are dropped in slices. Unknown ids are ignored."""
        member = self._members.pop(worker_id, None)
        if member is None:
            return
        self._set_state(member, IndexState.STALE)
        if member.num_blocks:
            self._deferred.add(partial(self._remove_blocks, member, Sweep(member.holders, member.both)))
        else:
            self._free_row(member.row)

    def _remove_blocks(self, member: IndexedWorker, sweep: Sweep) -> bool:
        """Drop another stretch of its blocks; when none is left, its row is free. Whether there is more."""
        member.num_blocks -= sweep.step()
        if member.num_blocks and not sweep.is_done:
            return True
        sweep.stop()
        self._free_row(member.row)
        return False

    def _free_row(self, row: int) -> None:
        """Free a row. Trailing free rows are cut off, so that masks stay short."""
        self._free_rows.add(row)
        while self._num_rows - 1 in self._free_rows:
            self._num_rows -= 1
            self._free_rows.remove(self._num_rows)

    def mark_stale(self, worker_id: str) -> None:
        """Its event stream was interrupted (a reconnect): no hits until the next snapshot."""
        self._set_state(self._members[worker_id], IndexState.STALE)

    def row(self, worker_id: str) -> int:
        """The worker's row in answers, for as long as it is here."""
        return self._members[worker_id].row

    def state(self, worker_id: str) -> IndexState:
        return self._members[worker_id].state

    def num_blocks(self, worker_id: str) -> int:
        return self._members[worker_id].num_blocks

    # ---- events and snapshots

    def apply_events(self, worker_id: str, events: KvEvents) -> bool:
        """One event message. False: a snapshot is needed. Repeated and old events change nothing."""
        member = self._members.get(worker_id)
        if member is None:
            return True
        action = member.receive(events.seq)
        if action == "request snapshot":
            self._update_routable(member)
            return False
        if action == "ignore":
            return True
        if (ingest := member.ingest) is not None:  # without the rest of the snapshot another one is needed
            member.change(events)
            return ingest.is_received or ingest.num_events < RETRY_EVERY or self._give_up(member)
        is_complete = member.apply(events)
        if member.state is IndexState.DEGRADED:
            return not member.should_request_again()
        if not is_complete:
            self._set_state(member, IndexState.DEGRADED)
        return is_complete

    def apply_snapshot(self, worker_id: str, snapshot: KvSnapshot) -> bool:
        """All blocks cached as of `snapshot.seq`, or a part of them: heals every state once complete. False: another
        snapshot is needed.

        One older than the events applied is ignored. One older than an event that was seen and could not be applied
        leaves the worker STALE, because events in between are lost; after MAX_OUTDATED of those in a row only events
        and audits request another. Parts arrive in order, from 0, possibly with events between them; part 0 of another
        snapshot aborts this one. Until the last part is ingested the worker is STALE, unless it was EXACT or DEGRADED
        as of the same event: then it stays so.
        """
        member = self._members.get(worker_id)
        if member is None:
            return True
        if not snapshot.part:
            if member.state is not IndexState.STALE and snapshot.seq < member.seq:
                return True
            if snapshot.seq < member.newest_seq:
                member.num_outdated += 1
                return member.num_outdated > MAX_OUTDATED
            member.begin(snapshot.seq)
            self._update_routable(member)
        ingest = member.ingest
        if ingest is None:
            return True  # of an aborted snapshot
        if not ingest.take(snapshot):
            return self._give_up(member)
        if not ingest.is_queued:
            ingest.is_queued = True
            self._deferred.add(partial(self._fill, member, ingest))
        return True

    def _fill(self, member: IndexedWorker, ingest: SnapshotIngest) -> bool:
        """Ingest a slice, unless the snapshot was aborted. Whether there is more."""
        if member.ingest is not ingest:
            return False
        try:
            ingest.is_queued = member.fill()
        except Exception:
            self._give_up(member)  # an audit will request another
            raise
        if member.ingest is None:
            self._update_routable(member)
        return ingest.is_queued

    def _give_up(self, member: IndexedWorker) -> bool:
        """A part of the snapshot is missing. False: request another."""
        self._set_state(member, IndexState.STALE)
        member.ignored = 1  # requested just now
        return False

    # ---- audits

    def audit_sample(self, worker_id: str, seed: int, num_hashes: int) -> list[bytes] | None:
        """Hashes to audit a worker with: some that it should hold and some that it should not. None: it is not here.

        Empty for a STALE worker: only the event number of its answer is of use.
        """
        member = self._members.get(worker_id)
        if member is None:
            return None
        if member.state is IndexState.STALE or member.ingest is not None:
            return []
        return member.audit_sample(seed, num_hashes)

    def apply_audit(self, worker_id: str, seq: int, hashes: Sequence[bytes], tiers: Sequence[int]) -> bool:
        """A worker's answer as of its event `seq`. False: the index differs, a snapshot is needed.

        Events and answers arrive in order. A `seq` beyond the events applied means that events were lost; one before
        them, that the worker numbers them anew, which is believed the second time, because an answer may have been
        overtaken.
        """
        member = self._members.get(worker_id)
        if member is None:
            return True
        if (ingest := member.ingest) is not None:
            return self._audit_during_ingest(member, ingest)
        if seq < member.seq and member.state is not IndexState.STALE and not member.was_behind:
            member.was_behind = True
            return True
        member.was_behind = False
        if seq != member.seq or member.state is IndexState.STALE:
            member.newest_seq, member.num_outdated = seq, 0
            self._set_state(member, IndexState.STALE)
            member.ignored = 1  # requested just now
            return False
        wrong, missed = member.compare(hashes, tiers)
        if wrong:
            self._set_state(member, IndexState.STALE)
            member.ignored = 1
        elif missed and member.state is IndexState.EXACT:
            self._set_state(member, IndexState.DEGRADED)
        else:
            return True
        return False

    def _audit_during_ingest(self, member: IndexedWorker, ingest: SnapshotIngest) -> bool:
        """Nothing is compared during an ingest. A snapshot of which nothing has arrived between two audits is lost."""
        is_lost = ingest.was_audited and not ingest.is_received
        ingest.was_audited = True
        return not is_lost or self._give_up(member)

    def audit_counts(self, worker_id: str) -> AuditCounts:
        """What audits of this worker have found since it was added."""
        member = self._members.get(worker_id)
        return AuditCounts() if member is None else member.audited

    # ---- queries

    def table(self, hashes: Sequence[bytes]) -> Ints:
        """[num_rows, 2]: how deep each row's worker holds this chain, in any tier and in its pool; 0 where it holds
        nothing.
        """
        found: Ints | None = None
        for stride, alive in self._routable.items():
            chain = hashes if stride == 1 else hashes[stride - 1 :: stride]
            ends = self._holders[stride].walk(chain, alive)
            if stride != 1:
                ends = [(depth * stride, bits) for depth, bits in ends]
            found = depths_by_row(ends, self._num_rows, found)
        return np.zeros((self._num_rows, 2), np.int64) if found is None else found

    def alone_share(self, worker_id: str, *, num_samples: int = 64) -> float | None:
        """Share of a worker's blocks that no other worker holds in any tier, from a sample; None: unknown."""
        member = self._members.get(worker_id)
        if member is None or member.state is IndexState.STALE or not member.num_blocks:
            return None
        both = member.both
        return member.holders.share(lambda mask: not mask & ~both, both, member.num_blocks, num_samples)

    # ---- internal

    def _set_state(self, member: IndexedWorker, state: IndexState) -> None:
        member.set_state(state)
        self._update_routable(member)

    def _update_routable(self, member: IndexedWorker) -> None:
        others = self._routable.pop(member.stride, 0) & ~member.both
        mask = others if member.state is IndexState.STALE else others | member.both
        if mask:
            self._routable[member.stride] = mask
