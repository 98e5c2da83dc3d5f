"""Which worker holds which prefix, in its pool or anywhere: fed by KV events, healed by snapshots.

Owns the members and their rows; who holds a block is in index/holders.py, whose news counts in index/member.py. Never
imports torch, Ray, sockets or a clock. Hashes are chained, so that each names a whole prefix; a worker's depth is
the number of leading hashes whose blocks it holds without a hole. A worker whose blocks are k hashes long (its stride) names
them by every k-th hash of a chain.

What is guaranteed of an answer: for every worker that is not STALE, both depths are those of the plain definition applied to
what its snapshot and events add up to (`in_pool`: leading blocks that it announced, and neither lowered nor removed since). So no
hit is claimed beyond a hole that was announced. Workers that are STALE, and those that hold nothing, are absent. Of one that is APPROXIMATE
it is true of what this router saw computed there within the last while.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Literal

import numpy as np

from kvrelay.native.hash_index import distinct
from kvrelay.router.index import audits
from kvrelay.router.index.audits import AuditCounts
from kvrelay.router.index.bits import Ints, depths_by_row
from kvrelay.router.index.deferred_work import Chores
from kvrelay.router.index.holders import CHUNK, Holders
from kvrelay.router.index.learned import Learned
from kvrelay.router.index.member import REASK_EVERY, Member, Word
from kvrelay.router.index.snapshot_ingest import SLICE, Filling, Sweep
from kvrelay.router.types import IndexState

__all__ = ["REASK_EVERY", "Depths", "PrefixIndex"]

Mode = Literal["auto", "exact", "approximate"]
LEARNED_S = 120.0
SILENT_S = 5.0
"""A worker whose first snapshot takes longer is taken for one that tells nothing, until it does."""
MAX_LATE = 3
"""Snapshots in a row that came too late, each answered by asking for another."""


@dataclass(frozen=True, slots=True, eq=False)
class Depths:
    """How many leading hashes of a prompt each worker covers: those that hold any, ascending by row. Columns of equal length."""

    rows: Ints
    in_pool: Ints
    anywhere: Ints  # at least `in_pool`: lower tiers included

    def __len__(self) -> int:
        return len(self.rows)


class PrefixIndex:
    """Prefixes of many workers. A worker starts STALE and becomes EXACT with its first snapshot."""

    def __init__(self, *, chunk: int = CHUNK, mode: Mode = "exact", learned_s: float = LEARNED_S) -> None:
        """`chunk`: scattered blocks that are looked up, and moved next to each other, at a time.

        `mode`: "exact" takes workers' news alone, "approximate" none but what `learn` is told, for `learned_s`; "auto" learns of
        those that have sent neither event nor snapshot, and believes it when SILENT_S have passed since it first learned of them.
        """
        self._chunk, self._mode, self._learned_s = chunk, mode, learned_s
        self._learning: dict[str, Member] = {}  # of whom there is something to expire
        self._members: dict[str, Member] = {}
        self._names: list[str] = []  # by row; "": nobody's
        self._free_rows: set[int] = set()
        self._holders: dict[int, Holders] = {}  # by stride
        self._audits: dict[str, AuditCounts] = {}
        self._chores = Chores()
        self._routable: dict[int, int] = {}  # by stride: bits of the members that are not STALE

    def __len__(self) -> int:
        """Number of distinct hashes held by any worker; those of another stride are others."""
        return sum(map(len, self._holders.values()))

    @property
    def native_bytes(self) -> int:
        """Of its memory, what Python does not count: the compiled tables of names."""
        return sum(holders.native_bytes for holders in self._holders.values())

    # ---- members

    def add_worker(self, worker_id: str, *, max_blocks: int, stride: int = 1, max_learned: int | None = None) -> int:
        """A new or restarted worker: starts empty, in this row. More than `max_blocks` hashes make it DEGRADED.

        `max_learned`: of the hashes that are learned of it, the latest so many are kept.
        """
        self.remove_worker(worker_id)
        if self._free_rows:
            self._free_rows.remove(row := min(self._free_rows))
        else:
            row = len(self._names)
            self._names.append("")
        holders = self._holders.setdefault(stride, Holders(self._chunk))
        limit = max_blocks if max_learned is None else min(max_learned, max_blocks)
        learned = None if self._mode == "exact" else Learned(limit, self._learned_s)
        member = Member(worker_id, row, max_blocks, stride, holders, learned)
        self._members[worker_id], self._names[row] = member, worker_id
        if self._mode == "approximate":
            self._fall(member, IndexState.APPROXIMATE)
        return row

    def remove_worker(self, worker_id: str) -> None:
        """Forget a worker and every bit of it, its row's in slices. Unknown ids are ignored."""
        member = self._members.pop(worker_id, None)
        if member is None:
            return
        self._fall(member, IndexState.STALE)
        self._names[member.row] = ""
        self._audits.pop(worker_id, None)
        self._learning.pop(worker_id, None)
        if member.num_blocks:
            self._chores.add(partial(self._leave, member, member.clear()))
        else:
            self._free_row(member.row)

    def _leave(self, member: Member, sweep: Sweep) -> bool:
        """Another stretch of what is left of it; its row is the next one's when nothing is. Whether there is more."""
        member.num_blocks -= sweep.step()
        if member.num_blocks and not sweep.is_done:
            return True
        sweep.stop()
        self._free_row(member.row)
        self._tidy(member.holders)
        return False

    def _free_row(self, row: int) -> None:
        """It is the next one's. The last ones are given up, so that masks get no longer than they need be."""
        self._free_rows.add(row)
        while len(self._names) - 1 in self._free_rows:
            self._names.pop()
            self._free_rows.remove(len(self._names))

    def _tidy(self, holders: Holders) -> None:
        """Make what these take in memory smaller, where it is much more than they need."""
        if holders.begin_closing():
            self._chores.add(partial(holders.close_up, SLICE))

    def mark_stale(self, worker_id: str) -> None:
        """Its event stream was interrupted (a reconnect): no hits until the next snapshot."""
        if self._mode != "approximate":
            self._fall(self._members[worker_id], IndexState.STALE)

    @property
    def num_rows(self) -> int:
        """Rows are below this. A row of a worker that left goes to the next one that comes."""
        return len(self._names)

    def row(self, worker_id: str) -> int:
        """The worker's place in `Depths.rows`, for as long as it is here."""
        return self._members[worker_id].row

    def name(self, row: int) -> str | None:
        """Whose row it is."""
        return self._names[row] or None

    def state(self, worker_id: str) -> IndexState:
        return self._members[worker_id].state

    def num_blocks(self, worker_id: str) -> int:
        """Hashes indexed for this worker."""
        return self._members[worker_id].num_blocks

    # ---- their news

    def apply_events(
        self,
        worker_id: str,
        seq: int,
        stored: Sequence[bytes],
        removed: Sequence[bytes],
        lowered: Sequence[bytes] = (),
        raised: Sequence[bytes] = (),
    ) -> bool:
        """One event message. False: a snapshot is needed now. Repeated and old events change nothing."""
        member = self._members.get(worker_id)
        if member is None or self._mode == "approximate":
            return True
        self._unlearn(member)
        word = member.hear(seq)
        if word is Word.ASK:
            self._route(member)
            return False
        if word is Word.IGNORE:
            return True
        if member.filling is not None:
            return self._change(member, stored, removed, lowered, raised)
        complete = not stored or member.store(distinct(stored))
        complete &= not lowered or member.move(distinct(lowered), in_pool=False)
        complete &= not raised or member.move(distinct(raised), in_pool=True)
        if removed:
            complete &= member.drop(distinct(removed))
            self._tidy(member.holders)
        if member.state is IndexState.DEGRADED:
            return not member.asks_again()
        if not complete:
            self._fall(member, IndexState.DEGRADED)
        return complete

    def _change(
        self,
        member: Member,
        stored: Sequence[bytes],
        removed: Sequence[bytes],
        lowered: Sequence[bytes],
        raised: Sequence[bytes],
    ) -> bool:
        """An event while a snapshot goes in. False: the rest of that does not come, another one is needed."""
        filling = member.filling
        assert filling is not None
        member.change(distinct(stored), distinct(removed), distinct(lowered), distinct(raised))
        return filling.is_whole or filling.num_events < REASK_EVERY or self._give_up(member)

    def apply_snapshot(
        self,
        worker_id: str,
        seq: int,
        hashes: Sequence[bytes],
        lowered: Sequence[bytes] = (),
        *,
        part: int = 0,
        is_last: bool = True,
    ) -> bool:
        """Everything cached as of `seq`, or a part of it: heals every state once all is in. False: another snapshot is needed.

        One older than the events applied is ignored. One older than an event that was seen and could not be applied leaves
        the worker STALE: what lies between the two is lost. After MAX_LATE of those in a row only events and audits ask.
        Parts come in order, from 0; events may come between them. The next one's part 0 ends what has come of this one. Until
        all is in, the worker is STALE, unless it was EXACT or DEGRADED as of the same event: then it is that.
        """
        member = self._members.get(worker_id)
        if member is None or self._mode == "approximate":
            return True
        self._unlearn(member)
        if not part:
            if member.state is not IndexState.STALE and seq < member.seq:
                return True
            if seq < member.newest_seq:
                member.num_late += 1
                return member.num_late > MAX_LATE
            member.begin(seq)
            self._route(member)
        filling = member.filling
        if filling is None:
            return True  # of one that was given up
        if not filling.take(seq, part, hashes, lowered, is_last=is_last):
            return self._give_up(member)
        if not filling.is_queued:
            filling.is_queued = True
            self._chores.add(partial(self._fill, member, filling))
        return True

    def _fill(self, member: Member, filling: Filling) -> bool:
        """A slice of its snapshot, unless that was given up. Whether there is more."""
        if member.filling is not filling:
            return False
        try:
            filling.is_queued = member.fill()
        except Exception:
            self._give_up(member)  # an audit will ask for another
            raise
        if member.filling is None:
            self._route(member)
            self._tidy(member.holders)
        return filling.is_queued

    def _give_up(self, member: Member) -> bool:
        """Of this snapshot a part is missing. False: ask for another."""
        self._fall(member, IndexState.STALE)
        member.ignored = 1  # asked just now
        return False

    # ---- what takes long

    def defer(self, wake: Callable[[], object]) -> None:
        """From now on snapshots go in, and workers that left go out, by calls of `work`; `wake` is called when there is cause for them."""
        self._chores.defer(wake)

    def work(self) -> bool:
        """A slice of what was deferred, some 512 blocks. Whether there is more."""
        return self._chores.work()

    # ---- what is learned of those without news

    def learn(self, worker_id: str, hashes: Sequence[bytes], now_s: float) -> None:
        """This prompt was computed there, or has come there. Changes nothing where the worker's own news is to be had."""
        member = self._members.get(worker_id)
        if member is None or member.learned is None:
            return
        chain = distinct(hashes[member.stride - 1 :: member.stride])[: member.learned.limit]
        member.drop(member.learned.note(chain, now_s))
        member.store(chain)
        self._learning[worker_id] = member
        since_s = member.learned.since_s
        if member.state is IndexState.STALE and since_s is not None and now_s - since_s >= SILENT_S:
            self._fall(member, IndexState.APPROXIMATE)

    def expire(self, now_s: float) -> None:
        """Forget what was learned too long ago."""
        for worker_id, member in list(self._learning.items()):
            if member.learned is not None and (gone := member.learned.expired(now_s)):
                member.drop(gone)
                self._tidy(member.holders)
            if not member.learned:
                del self._learning[worker_id]

    def _unlearn(self, member: Member) -> None:
        """It does tell: from now on that alone counts."""
        if member.learned is None:
            return
        member.learned = None
        self._fall(member, IndexState.STALE)
        if not self._chores.are_deferred:  # else its snapshot sees to it, before there is a hit
            sweep = member.clear()
            while not sweep.is_done:
                member.num_blocks -= sweep.step()

    # ---- audits

    def audit_sample(self, worker_id: str, seed: int, num_hashes: int) -> list[bytes] | None:
        """What to ask this worker about: hashes that it should hold and hashes that it should not; None: nothing.

        No hashes of a STALE one: its answer's number alone is of use.
        """
        member = self._members.get(worker_id)
        if member is None or member.learned is not None:
            return None
        if member.state is IndexState.STALE or member.filling is not None:
            return []
        return audits.sample(member, seed, num_hashes)

    def apply_audit(self, worker_id: str, seq: int, hashes: Sequence[bytes], tiers: Sequence[int]) -> bool:
        """A worker's answer as of its event `seq`. False: the index is not what it says, a snapshot is needed.

        Events and answers come in order, so that `seq` beyond the events applied means that some were lost, and one before
        them that it numbers them anew; the latter is believed when it is said twice, since an answer may have been overtaken.
        """
        member = self._members.get(worker_id)
        if member is None or member.learned is not None:
            return True
        if (filling := member.filling) is not None:
            return self._audit_filling(member, filling)
        if seq < member.seq and member.state is not IndexState.STALE and not member.was_behind:
            member.was_behind = True
            return True
        member.was_behind = False
        if seq != member.seq or member.state is IndexState.STALE:
            member.newest_seq, member.num_late = seq, 0
            self._fall(member, IndexState.STALE)
            member.ignored = 1  # asked just now
            return False
        found = audits.compare(member, hashes, tiers)
        counts = self._audits.setdefault(worker_id, AuditCounts())
        counts.compared += found.compared
        counts.wrong += found.wrong
        counts.missed += found.missed
        if found.wrong:
            self._fall(member, IndexState.STALE)
            member.ignored = 1
        elif found.missed and member.state is IndexState.EXACT:
            self._fall(member, IndexState.DEGRADED)
        else:
            return True
        return False

    def _audit_filling(self, member: Member, filling: Filling) -> bool:
        """Nothing is compared while a snapshot goes in. One of which nothing has come between two audits is lost."""
        is_lost = filling.was_audited and not filling.is_whole
        filling.was_audited = True
        return not is_lost or self._give_up(member)

    def audit_counts(self, worker_id: str) -> AuditCounts:
        """What audits of this worker have found since it came."""
        return self._audits.get(worker_id) or AuditCounts()

    # ---- answers

    def table(self, hashes: Sequence[bytes]) -> Ints:
        """[num_rows, 2]: how deep each row's worker holds this chain, anywhere and in its pool; 0 where it holds nothing."""
        found: Ints | None = None
        for stride, alive in self._routable.items():
            chain = hashes if stride == 1 else hashes[stride - 1 :: stride]
            ends = self._holders[stride].walk(chain, alive)
            if stride != 1:
                ends = [(depth * stride, bits) for depth, bits in ends]
            found = depths_by_row(ends, len(self._names), found)
        return np.zeros((len(self._names), 2), np.int64) if found is None else found

    def depths(self, hashes: Sequence[bytes]) -> Depths:
        """How deep each worker holds this chain."""
        found = self.table(hashes)
        rows = np.flatnonzero(found[:, 0])
        held = found[rows]
        return Depths(rows, held[:, 1], held[:, 0])

    def match(self, hashes: Sequence[bytes]) -> dict[str, int]:
        """Leading ones of `hashes` that each worker's blocks cover, in its pool or below; workers with none are absent."""
        depths = self.depths(hashes)
        return dict(zip(map(self._names.__getitem__, depths.rows.tolist()), depths.anywhere.tolist(), strict=True))

    def alone_share(self, worker_id: str, *, num_samples: int = 64) -> float | None:
        """Share of a worker's blocks that nobody else has, in a pool or below, of a sample spread over all; None: not known."""
        member = self._members.get(worker_id)
        if member is None or member.state is IndexState.STALE or not member.num_blocks:
            return None
        both = member.both
        return member.holders.share(lambda mask: not mask & ~both, both, member.num_blocks, num_samples)

    # ---- within

    def _fall(self, member: Member, state: IndexState) -> None:
        member.fall(state)
        self._route(member)

    def _route(self, member: Member) -> None:
        """Let answers name this worker, or not."""
        others = self._routable.pop(member.stride, 0) & ~member.both
        mask = others if member.state is IndexState.STALE else others | member.both
        if mask:
            self._routable[member.stride] = mask
