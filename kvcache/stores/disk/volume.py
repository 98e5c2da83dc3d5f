"""The blocks of one claimed folder: which row holds which, what is evicted, and what was found after a restart.

Owns the index and the records' headers. Every row that is read is held, every row that is written is reserved, so no
two threads use one row's bytes at once. Methods are thread-safe, except open() and close(). Disk errors are returned
in the outcome, not raised.
"""

import errno
import threading
from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field

from kvrelay.kvcache.index.tier_index import TierIndex
from kvrelay.kvcache.stores.disk.format import Geometry, RecordHeader
from kvrelay.kvcache.stores.disk.records import ReadItem, RecordIo, Segments, WriteItem
from kvrelay.types import BlockHash, BlockMeta

_RETRY_S = 60.0  # before segments that the disk had no room for are tried again


@dataclass(slots=True)
class Outcome:
    """The result of a call."""

    done: set[BlockHash] = field(default_factory=set)
    num_written: int = 0  # of those, others were written by another thread meanwhile
    num_corrupt: int = 0
    num_unfit: int = 0  # too large once encoded
    errors: list[OSError] = field(default_factory=list)


class Volume:
    """Blocks of one namespace in one folder.

    More than 12 attributes: its files, and what one lock protects.
    """

    def __init__(
        self, segments: Segments, rows: RecordIo, geometry: Geometry, index: TierIndex, clock: Callable[[], float]
    ) -> None:
        self.geometry = geometry
        self._segments, self._records, self._index, self._clock = segments, rows, index, clock
        self._lock = threading.Lock()
        self._write_ended = threading.Condition(self._lock)  # a write ended
        self._headers: dict[BlockHash, RecordHeader] = {}  # of the index's entries
        self._stale: dict[int, BlockHash] = {}  # row -> the evicted block whose header is still there
        self._writing: dict[BlockHash, int] = {}  # -> its row
        self._blocked: list[int] = []  # rows of segments that the disk had no room for
        self._retry_at_s = 0.0
        self._sequence = 0

    # ---- life

    def open(self) -> None:
        """Find the blocks of an earlier process. Raises OSError."""
        newest: dict[BlockHash, RecordHeader] = {}
        for header in sorted(self._records.scan(self._segments.open_all()), key=lambda header: header.sequence):
            older = newest.pop(header.digest, None)
            if older is not None:
                self._stale[older.row] = older.digest
            newest[header.digest] = header
        now_s = self._clock()
        for header in newest.values():
            self._index.take(header.row, tenant=header.meta.tenant)
            self._put(header, now_s)
            self._sequence = header.sequence
        self._index.drain_changes()
        self.trim()

    def _put(self, header: RecordHeader, now_s: float) -> None:
        meta = header.meta
        is_new = self._index.put(
            header.digest, header.row, now_s, parent=meta.parent, end_tokens=meta.end_tokens, priority=meta.priority
        )
        if is_new:
            self._headers[header.digest] = header

    def close(self) -> None:
        """Flush and close; no other call may be under way. Raises OSError."""
        try:
            self._segments.sync()
        finally:
            self._segments.close()

    # ---- lookups

    def contains(self, hashes: Sequence[BlockHash]) -> list[bool]:
        with self._lock:
            return [digest in self._index for digest in hashes]

    def tenants(self, hashes: Sequence[BlockHash]) -> list[str | None]:
        """Whose each of these blocks is; None: it is not stored."""
        with self._lock:
            return [self._headers[digest].meta.tenant if digest in self._index else None for digest in hashes]

    def usage(self) -> tuple[int, int, int]:
        """(blocks, blocks evicted since open(), bytes of the rows in use)."""
        with self._lock:
            return len(self._index), self._index.num_evicted, len(self._index) * self.geometry.record_bytes

    def pin(self, hashes: Sequence[BlockHash], ttl_s: float) -> int:
        """Pin the stored ones of these for `ttl_s` seconds (0: end their pins); returns how many."""
        with self._lock:
            if ttl_s <= 0:
                self._index.unpin(hashes)
                return 0
            return self._index.pin(hashes, self._clock() + ttl_s)

    def trim(self) -> None:
        """Evict what tenants have beyond their quotas."""
        with self._lock:
            self._index.trim(self._clock())
            self._note_evicted()

    # ---- loading

    def load(self, hashes: Sequence[BlockHash], into: Sequence[memoryview], metas: Sequence[BlockMeta]) -> Outcome:
        """Read and verify the blocks that are here."""
        with self._lock:
            entries = [entry for entry in zip(hashes, into, metas, strict=True) if entry[0] in self._index]
            items = [ReadItem(self._headers[digest], view, meta) for digest, view, meta in entries]
            held = self._index.hold([item.header.digest for item in items])
        try:
            self._records.read(items)
            bad = {item.header.digest: item.header.row for item in items if not item.is_done}
            self._discard(bad)
        finally:
            with self._lock:
                self._index.use([item.header.digest for item in items if item.is_done], self._clock())
                self._index.unhold(held)
        failed = {item.header.digest: item.error for item in items if item.error is not None}
        done = {item.header.digest for item in items if item.is_done} - bad.keys()
        return Outcome(done, num_corrupt=len(bad) - len(failed), errors=list(failed.values()))

    def _discard(self, rows: dict[BlockHash, int]) -> None:
        """Forget these entries, whose rows are held, here and for later processes."""
        if not rows:
            return
        with self._lock:
            self._forget([digest for digest, row in rows.items() if self._index.row(digest) == row])
        self._erase(rows.values())

    def _forget(self, hashes: Iterable[BlockHash]) -> None:
        self._index.discard(hashes, self._clock())
        for digest in hashes:
            del self._headers[digest]
        self._index.drain_changes()

    def _erase(self, rows: Iterable[int]) -> OSError | None:
        try:
            self._records.erase(list(rows))
        except OSError as error:
            return error
        return None

    def delete(self, hashes: Sequence[BlockHash]) -> Outcome:
        """Delete these blocks, here and for later processes."""
        with self._lock:
            unwanted = set(hashes)
            self._wait_for_writes(lambda: unwanted & {*self._writing, *map(self._stale.get, self._writing.values())})
            here = [digest for digest in unwanted if digest in self._index]
            held = self._index.hold(here)
            self._forget(here)
            stale = [row for row, digest in self._stale.items() if digest in unwanted]
            for row in stale:
                self._index.take(row)
                del self._stale[row]
        error = self._erase([*held, *stale])
        with self._lock:
            self._index.unhold(held)
            self._index.cancel(stale)
        return Outcome(errors=[error] if error is not None else [])

    def _wait_for_writes(self, concern: Callable[[], object]) -> None:
        """Wait until `concern()` is empty: other threads' writes, which always end."""
        while concern():
            self._write_ended.wait()

    # ---- storing

    def store(self, new: Mapping[BlockHash, tuple[memoryview, BlockMeta]]) -> Outcome:
        """Store the blocks that are admitted and find room."""
        outcome = Outcome()
        with self._lock:
            parents = {
                meta.parent for _, meta in new.values() if meta.parent is not None and meta.parent in self._index
            }
            held = self._index.hold(parents)  # do not evict what these continue
            items = self._items(new, outcome)
            self._index.unhold(held)
            self._writing.update((item.digest, item.row) for item in items)
        try:
            self._records.write(items)
        finally:
            with self._lock:
                self._settle(items, outcome)
                self._wait_for_writes(lambda: self._writing.keys() & new.keys())
                outcome.done = {digest for digest in new if digest in self._index}
        return outcome

    def _items(self, new: Mapping[BlockHash, tuple[memoryview, BlockMeta]], outcome: Outcome) -> list[WriteItem]:
        """Reserve rows for the admitted blocks, as many as find room, from the start of the prompt on."""
        admitted: defaultdict[str, list[BlockHash]] = defaultdict(list)  # by tenant
        for digest, (_, meta) in new.items():  # each offer is counted once by the admission filter
            if digest in self._index or digest in self._writing:
                continue
            if self._index.wants(digest) or meta.priority > 0 or meta.pin_s > 0:
                admitted[meta.tenant].append(digest)
        items: list[WriteItem] = []
        for tenant, mine in admitted.items():
            rows = self._reserve(len(mine), tenant, outcome)
            for digest, row in zip(mine, sorted(rows), strict=False):
                self._sequence += 1
                block, meta = new[digest]
                items.append(WriteItem(row, self._sequence, digest, meta, block))
        return items

    def _reserve(self, count: int, tenant: str, outcome: Outcome) -> list[int]:
        """Up to `count` rows of existing segments."""
        now_s = self._clock()
        if self._blocked and now_s >= self._retry_at_s:
            self._index.cancel(self._blocked)
            self._blocked = []
        while count:
            rows = self._index.reserve(count, now_s, tenant=tenant)
            if rows is None:
                count //= 2
                continue
            self._note_evicted()
            try:
                for segment in sorted({self.geometry.place(row)[0] for row in rows}):
                    self._segments.ensure(segment)
            except OSError as error:
                outcome.errors.append(error)
                self._index.cancel(rows)
                self._block_missing(now_s)
            else:
                return rows
        return []

    def _block_missing(self, now_s: float) -> None:
        """Reserve all rows of missing segments, none of which was ever used, for a while."""
        per_segment, num_rows = self.geometry.rows_per_segment, self.geometry.num_rows
        for segment in range(self.geometry.num_segments):
            if not self._segments.has(segment):
                self._blocked += range(segment * per_segment, min((segment + 1) * per_segment, num_rows))
        for row in self._blocked:
            self._index.take(row)
        self._retry_at_s = now_s + _RETRY_S

    def _note_evicted(self) -> None:
        """Remember that the evicted blocks' headers stay on disk until their rows are overwritten."""
        change = self._index.drain_changes()
        for digest in change.removed if change is not None else ():
            header = self._headers.pop(digest)
            self._stale[header.row] = digest

    def _settle(self, items: Sequence[WriteItem], outcome: Outcome) -> None:
        """Index what was written, and free the other rows."""
        now_s = self._clock()
        for item in items:
            del self._writing[item.digest]
            if item.header is not None:
                self._stale.pop(item.row, None)
                self._put(item.header, now_s)
                outcome.num_written += 1
                continue
            self._index.cancel((item.row,))
            outcome.num_unfit += item.is_unfit
            if item.error is not None and item.error not in outcome.errors:
                outcome.errors.append(item.error)
        self._write_ended.notify_all()


def is_disk_full(error: OSError) -> bool:
    return error.errno in (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)
