"""Blocks on their way from the host tier down to the stores: disk, the cluster's store, Redis, object stores.

Slots are held while a store reads them. A fresh checksum over bytes that have changed would make them right for ever: a
store either keeps the checksum that the block had when it was saved, or is given only what still has it.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Protocol

from kvrelay.kvcache.index.tier_index import TierIndex
from kvrelay.kvcache.memory.jobs import IoJob, Threads, Urgency
from kvrelay.kvcache.stores.store import BlockMeta, BlockStore, PinningStore
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
    metas: tuple[BlockMeta, ...]  # with their checksums
    pin_s: float


class Offload:
    """Lives on the engine's thread; the batches themselves are written by I/O threads."""

    def __init__(
        self,
        slab: Slab,
        index: TierIndex,
        stores: Sequence[BlockStore],
        entry_of: Callable[[int], tuple[BlockMeta, int]],
        threads: Threads,
        *,
        is_checked: bool,
    ) -> None:
        self._slab, self._index, self._stores, self._entry_of = slab, index, stores, entry_of
        self._threads, self._is_checked = threads, is_checked
        self._known: dict[str, dict[BlockHash, None]] = {store.name: {} for store in stores}  # see `knows`
        self._under_way: dict[str, set[BlockHash]] = {store.name: set() for store in stores}
        self._most_held = max(1, index.num_slots // 2)
        self._num_held = 0
        self.num_kept = {store.name: 0 for store in stores}
        self.num_dropped = 0  # no room in line

    def put(self, hashes: Sequence[BlockHash]) -> None:
        """Offer these, all of which are in the host tier, to every store that is not known to have them.

        Once more at every use: a store may want to see a block twice before it writes it. While others are under way, half of
        the host tier may be held for them at most: a slow store does not keep the rest from making room for what is new.
        """
        step = max(1, _BATCH_BYTES // self._slab.block_bytes)
        for store in self._stores:
            known, under_way = self._known[store.name], self._under_way[store.name]
            fresh = [digest for digest in hashes if digest not in known and digest not in under_way]
            room = max(0, self._most_held - self._num_held) if self._num_held else len(fresh)
            self.num_dropped += max(0, len(fresh) - room)
            for begin in range(0, min(room, len(fresh)), step):
                self._submit(self._batch(store, fresh[begin : min(begin + step, room)]))

    def pin(self, hashes: Sequence[BlockHash], ttl_s: float) -> None:
        """Have the stores keep these, all of which are in the host tier, for so many seconds, where that can be asked of them."""
        step = max(1, _BATCH_BYTES // self._slab.block_bytes)
        for store in self._stores:
            if isinstance(store, PinningStore):
                some = hashes[: self._most_held]
                for begin in range(0, len(some), step):
                    self._submit(self._batch(store, some[begin : begin + step], ttl_s))

    def unpin(self, hashes: Sequence[BlockHash]) -> None:
        """End their pins in the stores."""
        for store in self._stores:
            if hashes and isinstance(store, PinningStore):
                self._threads.put(IoJob(Urgency.SINK, 0, partial(store.pin, tuple(hashes), 0.0), lambda result: None))

    def knows(self, store: BlockStore, hashes: Sequence[BlockHash]) -> None:
        """The store has these. A hint, which may be out of date: what is sent twice does no harm, nor what is not sent."""
        known = self._known[store.name]
        known.update(dict.fromkeys(hashes))
        while len(known) > 4 * self._index.num_slots:
            del known[next(iter(known))]

    def put_coldest(self, now_s: float) -> None:
        """Offer what the host tier would evict next, unless enough of it is free."""
        counts = self._index.counts()
        wanted = min(self._index.num_slots // _SPARE_SHARE - counts.free, counts.cached)
        if not self._stores or wanted <= 0:
            return
        self.put(self._index.next_victims(wanted, now_s))

    def _batch(self, store: BlockStore, hashes: Sequence[BlockHash], pin_s: float = 0.0) -> _Batch:
        slots = self._index.hold(hashes)
        entries = [self._entry_of(slot) for slot in slots]
        metas = tuple(replace(meta, checksum=checksum, pin_s=pin_s) for meta, checksum in entries)
        return _Batch(store, tuple(hashes), tuple(slots), metas, pin_s)

    def _submit(self, batch: _Batch) -> None:
        num_bytes = len(batch.slots) * self._slab.block_bytes
        job = IoJob(Urgency.SINK, num_bytes, lambda: self._write(batch), lambda result: self._written(batch, result))
        if not self._threads.put(job):
            self._index.unhold(batch.slots)
            self.num_dropped += len(batch.slots)
            return
        self._under_way[batch.store.name].update(batch.hashes)
        self._num_held += len(batch.slots)

    def _write(self, batch: _Batch) -> list[BlockHash]:
        """On an I/O thread; what the store kept."""
        slab, is_trusted = self._slab, batch.store.keeps_checksums or not self._is_checked
        good = [
            index
            for index, (slot, meta) in enumerate(zip(batch.slots, batch.metas, strict=True))
            if is_trusted or slab.checksum(slot) == meta.checksum
        ]
        views = [slab.slot(batch.slots[index]) for index in good]
        offered = [batch.hashes[i] for i in good]
        kept = batch.store.store(offered, views, [batch.metas[i] for i in good])
        there = [digest for digest, is_kept in zip(offered, kept, strict=True) if is_kept]
        if batch.pin_s and isinstance(batch.store, PinningStore):
            batch.store.pin(there, batch.pin_s)
        return there

    def _written(self, batch: _Batch, result: object) -> None:
        self._index.unhold(batch.slots)
        self._under_way[batch.store.name].difference_update(batch.hashes)
        self._num_held -= len(batch.slots)
        if isinstance(result, list):
            self.knows(batch.store, result)
            self.num_kept[batch.store.name] += len(result)
