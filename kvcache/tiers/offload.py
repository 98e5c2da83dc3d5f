"""Blocks on their way from the host tier down to the stores: disk, the cluster's store, Redis, object stores.

Rows are held while a store reads them. A new checksum over bytes that have changed would hide the change, so a store
either keeps the checksum that the block had when it was saved, or is given only blocks that still match it.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import partial

from kvrelay.kvcache.memory.jobs import IoJob, Threads, Urgency, batch_blocks
from kvrelay.kvcache.stores.store import BlockStore
from kvrelay.kvcache.tiers.host_tier import HostTier
from kvrelay.types import BlockHash, BlockMeta

_SPARE_SHARE = 8  # write-back keeps an eighth of the host tier free or already stored further down


@dataclass(frozen=True, slots=True)
class _Batch:
    """Blocks for one store. Their rows are held."""

    store: BlockStore
    hashes: tuple[BlockHash, ...]
    rows: tuple[int, ...]
    metas: tuple[BlockMeta, ...]  # with their checksums
    pin_s: float


class Offload:
    """Offers blocks to the stores. Engine's thread; I/O threads write the batches."""

    def __init__(self, host: HostTier, stores: Sequence[BlockStore], threads: Threads, *, is_checked: bool) -> None:
        self._host, self._stores, self._threads, self._is_checked = host, stores, threads, is_checked
        self._pinning_stores = [store for store in stores if store.supports_pins]
        self._known: dict[str, dict[BlockHash, None]] = {store.name: {} for store in stores}  # see `mark_stored`
        self._under_way: dict[str, set[BlockHash]] = {store.name: set() for store in stores}
        self._max_held = max(1, host.num_rows // 2)
        self._num_held = 0

    def put(self, hashes: Sequence[BlockHash]) -> None:
        """Offer these blocks, all of which are in the host tier, to every store that is not known to have them.

        To be called at every use, since a store may want to see a block twice before it writes it. While batches are
        under way at most half of the host tier is held for them, so a slow store does not keep new blocks out.
        """
        step = batch_blocks(self._host.block_bytes)
        for store in self._stores:
            known, under_way = self._known[store.name], self._under_way[store.name]
            missing = [digest for digest in hashes if digest not in known and digest not in under_way]
            room = max(0, self._max_held - self._num_held) if self._num_held else len(missing)
            for first in range(0, min(room, len(missing)), step):
                self._submit(self._batch(store, missing[first : min(first + step, room)]))

    def pin(self, hashes: Sequence[BlockHash], ttl_s: float) -> None:
        """Pin these blocks, all of which are in the host tier, for `ttl_s` seconds in the stores that support pins."""
        step = batch_blocks(self._host.block_bytes)
        for store in self._pinning_stores:
            chosen = hashes[: self._max_held]
            for first in range(0, len(chosen), step):
                self._submit(self._batch(store, chosen[first : first + step], ttl_s))

    def unpin(self, hashes: Sequence[BlockHash]) -> None:
        """End the pins of these blocks in the stores."""
        for store in self._pinning_stores:
            if hashes:
                self._threads.put(
                    IoJob(Urgency.OFFLOAD, 0, partial(store.pin, tuple(hashes), 0.0), lambda result: None)
                )

    def mark_stored(self, store: BlockStore, hashes: Sequence[BlockHash]) -> None:
        """The store has these blocks. A hint that may be out of date: a block sent twice, or not sent, does no harm."""
        known = self._known[store.name]
        known.update(dict.fromkeys(hashes))
        while len(known) > 4 * self._host.num_rows:
            del known[next(iter(known))]

    def put_next_victims(self) -> None:
        """Offer what the host tier would evict next, unless enough of it is free."""
        counts = self._host.counts()
        wanted = min(self._host.num_rows // _SPARE_SHARE - counts.free, counts.cached)
        if self._stores and wanted > 0:
            self.put(self._host.next_victims(wanted, self._host.now_s()))

    def _batch(self, store: BlockStore, hashes: Sequence[BlockHash], pin_s: float = 0.0) -> _Batch:
        rows = self._host.hold(hashes)
        entries = [self._host.entry(row) for row in rows]
        metas = tuple(replace(meta, checksum=checksum, pin_s=pin_s) for meta, checksum in entries)
        return _Batch(store, tuple(hashes), tuple(rows), metas, pin_s)

    def _submit(self, batch: _Batch) -> None:
        num_bytes = len(batch.rows) * self._host.block_bytes
        job = IoJob(Urgency.OFFLOAD, num_bytes, lambda: self._write(batch), lambda result: self._written(batch, result))
        if not self._threads.put(job):
            self._host.unhold(batch.rows)
            return
        self._under_way[batch.store.name].update(batch.hashes)
        self._num_held += len(batch.rows)

    def _write(self, batch: _Batch) -> list[BlockHash]:
        """Runs on an I/O thread; returns the blocks that the store has now."""
        slab, is_trusted = self._host.slab, batch.store.keeps_checksums or not self._is_checked
        good = [
            index
            for index, (row, meta) in enumerate(zip(batch.rows, batch.metas, strict=True))
            if is_trusted or slab.checksum(row) == meta.checksum
        ]
        views = [slab.row(batch.rows[index]) for index in good]
        offered = [batch.hashes[index] for index in good]
        kept = batch.store.store(offered, views, [batch.metas[index] for index in good])
        stored = [digest for digest, is_kept in zip(offered, kept, strict=True) if is_kept]
        if batch.pin_s:
            batch.store.pin(stored, batch.pin_s)
        return stored

    def _written(self, batch: _Batch, result: object) -> None:
        self._host.unhold(batch.rows)
        self._under_way[batch.store.name].difference_update(batch.hashes)
        self._num_held -= len(batch.rows)
        if isinstance(result, list):
            self.mark_stored(batch.store, result)
