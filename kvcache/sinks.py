"""Blocks on their way from the host tier down to the stores: disk, the cluster's store, Redis, object stores.

Slots are held while a store reads them. What is no longer what was put there goes nowhere: a fresh checksum over wrong
bytes would make them right for ever.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Protocol

from kvrelay.kvcache.jobs import Job, Threads, Urgency
from kvrelay.kvcache.store import BlockMeta, BlockStore
from kvrelay.kvcache.tier_index import TierIndex
from kvrelay.types import BlockHash

_BATCH_BYTES = 8 << 20
_SPARE_SHARE = 8  # write-back keeps an eighth of the host tier free or already further down


class Slab(Protocol):
    """The host tier's memory, as far as stores read it."""

    block_bytes: int

    def slot(self, slot: int) -> memoryview: ...

    def checksum(self, slot: int) -> int: ...


@dataclass(frozen=True, slots=True)
class _Batch:
    """Blocks for one store. Their slots are held."""

    store: BlockStore
    hashes: tuple[BlockHash, ...]
    slots: tuple[int, ...]
    metas: tuple[BlockMeta, ...]
    checksums: tuple[int, ...]


class Sinks:
    """Lives on the engine's thread; the batches themselves are written by I/O threads."""

    def __init__(
        self,
        slab: Slab,
        index: TierIndex,
        stores: Sequence[BlockStore],
        entry_of: Callable[[BlockHash, int], tuple[BlockMeta, int]],
        threads: Threads,
        *,
        is_checked: bool,
    ) -> None:
        self._slab, self._index, self._stores, self._entry_of = slab, index, stores, entry_of
        self._threads, self._is_checked = threads, is_checked
        self._known: dict[BlockHash, None] = {}  # sent down before: a hint, what is sent twice does no harm
        self.num_kept = {store.name: 0 for store in stores}
        self.num_dropped = 0  # no room in line

    def put(self, hashes: Sequence[BlockHash]) -> None:
        """Offer these, all of which are in the host tier, to every store."""
        step = max(1, _BATCH_BYTES // self._slab.block_bytes)
        for store in self._stores:
            for begin in range(0, len(hashes), step):
                self._submit(self._batch(store, hashes[begin : begin + step]))

    def put_coldest(self, now_s: float) -> None:
        """Offer what the host tier would evict next, unless enough of it is free."""
        counts = self._index.counts()
        wanted = min(self._index.num_slots // _SPARE_SHARE - counts.free, counts.cached)
        if not self._stores or wanted <= 0:
            return
        fresh = [digest for digest in self._index.next_victims(wanted, now_s) if digest not in self._known]
        self._known.update(dict.fromkeys(fresh))
        while len(self._known) > 4 * self._index.num_slots:
            del self._known[next(iter(self._known))]
        self.put(fresh)

    def _batch(self, store: BlockStore, hashes: Sequence[BlockHash]) -> _Batch:
        slots = self._index.hold(hashes)
        entries = [self._entry_of(digest, slot) for digest, slot in zip(hashes, slots, strict=True)]
        metas, checksums = tuple(meta for meta, _ in entries), tuple(checksum for _, checksum in entries)
        return _Batch(store, tuple(hashes), tuple(slots), metas, checksums)

    def _submit(self, batch: _Batch) -> None:
        num_bytes = len(batch.slots) * self._slab.block_bytes
        job = Job(Urgency.SINK, num_bytes, lambda: self._write(batch), lambda result: self._written(batch, result))
        if not self._threads.put(job):
            self._index.unhold(batch.slots)
            self.num_dropped += len(batch.slots)

    def _write(self, batch: _Batch) -> int:
        """On an I/O thread; how many the store kept."""
        slab = self._slab
        good = [
            index
            for index, (slot, checksum) in enumerate(zip(batch.slots, batch.checksums, strict=True))
            if not self._is_checked or slab.checksum(slot) == checksum
        ]
        views = [slab.slot(batch.slots[index]) for index in good]
        kept = batch.store.store([batch.hashes[i] for i in good], views, [batch.metas[i] for i in good])
        return sum(kept)

    def _written(self, batch: _Batch, result: object) -> None:
        self._index.unhold(batch.slots)
        if isinstance(result, int):
            self.num_kept[batch.store.name] += result
