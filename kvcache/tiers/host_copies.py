"""Blocks on their way between the pool and the host tier. Engine's thread; an I/O thread copies the bytes. Pure."""

import logging
from collections.abc import Sequence
from functools import partial

from kvrelay.kvcache.memory.jobs import IoJob, Threads, Urgency, batch_blocks
from kvrelay.kvcache.memory.loads import Load
from kvrelay.kvcache.pool.block_pool import BlockPool
from kvrelay.kvcache.tiers.host_tier import HostTier
from kvrelay.kvcache.tiers.offload import Offload
from kvrelay.kvcache.tiers.rules import IndexedBlock, TierRules, TierStats
from kvrelay.types import BlockHash, BlockId

logger = logging.getLogger(__name__)


class HostCopies:
    """Copies blocks into the host tier, pins them there if asked, and offers them to the stores; loads them back layer
    by layer, from rows that are held and verified first.
    """

    def __init__(
        self, pool: BlockPool, host: HostTier, offload: Offload, threads: Threads, rules: TierRules, stats: TierStats
    ) -> None:
        self._pool, self._host, self._offload, self._threads = pool, host, offload, threads
        self._rules, self._stats = rules, stats
        self._loads: set[Load] = set()  # under way
        self._saving: dict[BlockHash, BlockId] = {}
        self._pin_when_saved: dict[BlockHash, float] = {}  # of those being saved: until when

    def save(self, blocks: Sequence[IndexedBlock]) -> None:
        """Copy the blocks that the host tier does not have; the pool's blocks are held meanwhile."""
        missing = [block for block in blocks if block.digest not in self._host and block.digest not in self._saving]
        step = batch_blocks(self._host.block_bytes)
        for first in range(0, len(missing), step):
            self._save_batch(missing[first : first + step])

    def pin(self, blocks: Sequence[IndexedBlock], until_s: float) -> None:
        """Save these blocks, and keep them in the host tier and in the stores until then."""
        self._pin([block.digest for block in blocks if block.digest in self._host], until_s)
        self.save(blocks)
        for block in blocks:
            if block.digest in self._saving:
                self._pin_when_saved[block.digest] = max(until_s, self._pin_when_saved.get(block.digest, until_s))

    def _pin(self, hashes: Sequence[BlockHash], until_s: float) -> None:
        self._host.pin(hashes, until_s)
        self._offload.pin(hashes, until_s - self._host.now_s())

    def cancel_pins(self, hashes: Sequence[BlockHash]) -> None:
        """Do not pin these once they are saved."""
        for digest in hashes:
            self._pin_when_saved.pop(digest, None)

    def held_blocks(self) -> list[BlockId]:
        """Blocks of the pool that are being copied: one reference each."""
        return list(self._saving.values())

    def __len__(self) -> int:
        """Blocks being saved."""
        return len(self._saving)

    def _save_batch(self, batch: Sequence[IndexedBlock]) -> None:
        rows = self._host.reserve([block.meta for block in batch])
        self._stats.unsaved += len(batch) - len(rows)
        batch = batch[: len(rows)]
        if not batch:
            return
        blocks = [block.block for block in batch]
        slab, clock = self._host.slab, self._host.now_s

        def work() -> tuple[list[int], float]:
            began_s = clock()
            return slab.save(blocks, rows), clock() - began_s

        job = IoJob(Urgency.SAVE, len(blocks) * slab.block_bytes, work, lambda result: self._saved(batch, rows, result))
        if not self._threads.put(job):
            self._host.cancel(rows)
            self._stats.unsaved += len(batch)
            return
        self._pool.acquire(blocks)
        self._saving.update((block.digest, block.block) for block in batch)

    def _saved(self, batch: Sequence[IndexedBlock], rows: Sequence[int], result: object) -> None:
        for block in batch:
            del self._saving[block.digest]
        self._pool.release([block.block for block in batch])
        pins = [(block.digest, self._pin_when_saved.pop(block.digest, None)) for block in batch]
        if not isinstance(result, tuple):
            self._host.cancel(rows)
            self._stats.unsaved += len(batch)
            return
        checksums, seconds = result
        for block, row, checksum in zip(batch, rows, checksums, strict=True):
            self._host.put(block.digest, row, checksum, block.meta)
        for until_s in {until_s for _, until_s in pins if until_s is not None}:
            self._pin([digest for digest, end_s in pins if end_s == until_s and digest in self._host], until_s)
        self._stats.saved += len(batch)
        self._stats.save_s += seconds
        if self._rules.write != "write-back":
            self._offload.put([block.digest for block in batch if block.digest in self._host])

    def load(self, hashes: Sequence[BlockHash], blocks: Sequence[BlockId]) -> Load:
        """Load these blocks, all of which are in the host tier, into `blocks`, which the caller holds meanwhile."""
        rows = self._host.hold(hashes)
        load = Load(hashes, rows, blocks)
        self._loads.add(load)
        expected = self._host.checksums(rows)
        slab = self._host.slab
        work = partial(load.run, slab, expected, is_checked=self._rules.is_checked, clock=self._host.now_s)
        job = IoJob(Urgency.LOAD, len(blocks) * slab.block_bytes, work, lambda result: self._loaded(load, result))
        if not self._threads.put(job):  # the worker is shutting down
            load.over()
            self._loaded(load, None)
        return load

    def _loaded(self, load: Load, result: object) -> None:
        load.over()
        self._loads.discard(load)
        if load.corrupt:
            logger.error("%d blocks in the host tier failed their checksums; they are recomputed", len(load.corrupt))
            self._stats.corrupt += len(load.corrupt)
        if isinstance(result, float) and not load.corrupt:
            self._stats.loaded += len(load.blocks)
            self._stats.load_s += result
        else:
            self.discard(load)
        self._host.unhold(load.rows)

    def discard(self, load: Load) -> None:
        """Forget the blocks that this load, which is over, did not bring, so that no other request tries them."""
        missed = set(load.corrupt or load.hashes)
        rows = zip(load.hashes, load.rows, strict=True)
        self._host.forget([digest for digest, row in rows if digest in missed and self._host.row(digest) == row])
