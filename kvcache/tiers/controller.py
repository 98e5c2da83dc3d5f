"""The tier controller of one worker: which blocks move down a tier, and which move up.

Lives on the engine's thread, which owns the pool and the host tier; I/O threads copy the bytes, between rows and blocks
that are held for them, and report through `poll`. Copies within memory and calls of the stores have threads of their
own, so a slow disk never delays a step. Imports no torch.
"""

import logging
from collections.abc import Callable, Container, Sequence
from dataclasses import asdict
from functools import partial

from kvrelay.kvcache.index.changes import CacheChange
from kvrelay.kvcache.memory.jobs import (
    MAX_JOBS,
    CopyStats,
    IoJob,
    IoThreads,
    JobQueue,
    Load,
    MakeThreads,
    Urgency,
    batch_blocks,
)
from kvrelay.kvcache.pool.block_pool import BlockPool
from kvrelay.kvcache.stores.store import BlockStore
from kvrelay.kvcache.tiers.fetches import Fetches
from kvrelay.kvcache.tiers.host_tier import HostTier, TierRules
from kvrelay.kvcache.tiers.offload import Offload
from kvrelay.plane.reports import TierLoad
from kvrelay.types import BlockHash, BlockId, IndexedBlock

logger = logging.getLogger(__name__)

_STORE_THREADS = 2  # one reads while another writes, or waits for a remote store
_SPARE_SHARE = 8  # write-back begins when less than an eighth of the pool is free
_WRITE_BACK_PAUSE = 20  # write-back looks for blocks to save for a twentieth of the time at most


class TierController:
    """All tiers below a worker's pool. All methods run on the engine's thread.

    More than 12 attributes: its parts, and the copies under way.
    """

    def __init__(
        self,
        pool: BlockPool,
        host: HostTier,
        stores: Sequence[BlockStore],
        rules: TierRules,
        *,
        wake: Callable[[], None],
        make_threads: MakeThreads = IoThreads,
    ) -> None:
        """Tiers that are not started.

        Args:
            stores: below the host tier, nearest first; not started.
            wake: called from I/O threads when `poll` has something to do.
        """
        self.rules, self.stats = rules, CopyStats()
        self._pool, self.host, self._stores = pool, host, stores
        self._copies = make_threads("kv-tier", 1, JobQueue(MAX_JOBS), wake)
        self._io = make_threads("kv-store", _STORE_THREADS, JobQueue(MAX_JOBS), wake)
        self._offload = Offload(self.host, stores, self._io, is_checked=rules.is_checked)
        self.fetches = Fetches(self.host, stores, self._offload, self._io, rules)
        self._next_write_back_s = 0.0
        self._loads: set[Load] = set()  # under way
        self._saving: dict[BlockHash, BlockId] = {}
        self._pin_when_saved: dict[BlockHash, float] = {}  # of those being saved: until when

    # ---- life

    def start(self) -> None:
        """Open the stores and start the threads. Raises StoreError; then nothing is left open."""
        opened: list[BlockStore] = []
        try:
            for store in self._stores:
                store.start()
                opened.append(store)
        except BaseException:
            for store in opened:
                store.close()
            raise
        self._copies.start()
        self._io.start()

    def close(self) -> None:
        """Stop the threads, then close the stores. Blocking."""
        self._copies.close()
        self._io.close()
        self.poll()
        self.fetches.end_all()
        for store in self._stores:
            store.close()

    def poll(self) -> None:
        """Collect what the threads have finished."""
        for threads in (self._copies, self._io):
            for job, result in threads.finished():
                job.then(result)
        self.fetches.tick()

    @property
    def is_idle(self) -> bool:
        """No job is queued, under way, or finished and not collected."""
        return self._copies.is_idle and self._io.is_idle

    # ---- down

    def used(self, hashes: Sequence[BlockHash], priority: int = 0, *, keep: bool = True) -> None:
        """A request of this priority used these from pool or host tier. `keep`: they may be used again."""
        self.host.use(hashes, self.host.now_s(), priority=priority)
        if keep and self.rules.write != "write-back":
            self._offload.put([digest for digest in hashes if digest in self.host])

    def end_step(self, candidates: Callable[[int], Sequence[IndexedBlock]], prefill_tokens_per_s: float) -> None:
        """Under write-back, save the blocks that the pool would evict next, before it runs out of free ones.

        Args:
            candidates: (count) -> up to `count` such blocks.
            prefill_tokens_per_s: measured, for the choice between fetching and computing.
        """
        self.fetches.prefill_tokens_per_s = prefill_tokens_per_s
        began_s = self.host.now_s()
        if self.rules.write != "write-back" or began_s < self._next_write_back_s:
            return
        wanted = self._pool.num_blocks // _SPARE_SHARE - self._pool.counts().free - len(self._saving)
        if wanted > 0:
            self.save([block for block in candidates(wanted) if block.digest not in self.host])
        self._offload.put_next_victims()
        now_s = self.host.now_s()
        self._next_write_back_s = now_s + _WRITE_BACK_PAUSE * (now_s - began_s)

    def save(self, blocks: Sequence[IndexedBlock]) -> None:
        """Copy the blocks that the host tier does not have into it; the pool's blocks are held meanwhile."""
        missing = [block for block in blocks if block.digest not in self.host and block.digest not in self._saving]
        step = batch_blocks(self.host.block_bytes)
        for first in range(0, len(missing), step):
            self._save_batch(missing[first : first + step])

    def pin(self, blocks: Sequence[IndexedBlock], until_s: float) -> None:
        """Keep these in the host tier and the stores until then, within each one's limit for pins; saves them first."""
        self._pin([block.digest for block in blocks if block.digest in self.host], until_s)
        self.save(blocks)
        for block in blocks:
            if block.digest in self._saving:
                self._pin_when_saved[block.digest] = max(until_s, self._pin_when_saved.get(block.digest, until_s))

    def _pin(self, hashes: Sequence[BlockHash], until_s: float) -> None:
        self.host.pin(hashes, until_s)
        self._offload.pin(hashes, until_s - self.host.now_s())

    def unpin(self, hashes: Sequence[BlockHash], shared: Container[BlockHash] = ()) -> None:
        """End the pins of these blocks. `shared`: other pins cover these, so the stores keep their pins of them."""
        self.host.unpin(hashes)
        self._offload.unpin([digest for digest in hashes if digest not in shared])
        for digest in hashes:
            self._pin_when_saved.pop(digest, None)

    def _save_batch(self, batch: Sequence[IndexedBlock]) -> None:
        rows = self.host.reserve_for([block.meta for block in batch])
        self.stats.unsaved += len(batch) - len(rows)
        batch = batch[: len(rows)]
        if not batch:
            return
        blocks = [block.block for block in batch]
        slab, clock = self.host.slab, self.host.now_s

        def work() -> tuple[list[int], float]:
            began_s = clock()
            return slab.save(blocks, rows), clock() - began_s

        job = IoJob(Urgency.SAVE, len(blocks) * slab.block_bytes, work, lambda result: self._saved(batch, rows, result))
        if not self._copies.put(job):
            self.host.cancel(rows)
            self.stats.unsaved += len(batch)
            return
        self._pool.acquire(blocks)
        self._saving.update((block.digest, block.block) for block in batch)

    def _saved(self, batch: Sequence[IndexedBlock], rows: Sequence[int], result: object) -> None:
        for block in batch:
            del self._saving[block.digest]
        self._pool.release([block.block for block in batch])
        pins = [(block.digest, self._pin_when_saved.pop(block.digest, None)) for block in batch]
        if not isinstance(result, tuple):
            self.host.cancel(rows)
            self.stats.unsaved += len(batch)
            return
        checksums, seconds = result
        for block, row, checksum in zip(batch, rows, checksums, strict=True):
            self.host.put_block(block.digest, row, checksum, block.meta)
        for until_s in {until_s for _, until_s in pins if until_s is not None}:
            self._pin([digest for digest, end_s in pins if end_s == until_s and digest in self.host], until_s)
        self.stats.saved += len(batch)
        self.stats.save_s += seconds
        if self.rules.write != "write-back":
            self._offload.put([block.digest for block in batch if block.digest in self.host])

    # ---- up

    def load(self, hashes: Sequence[BlockHash], blocks: Sequence[BlockId]) -> Load:
        """Load these blocks, all of which are in the host tier, into `blocks`, which the caller holds meanwhile."""
        rows = self.host.hold(hashes)
        load = Load(hashes, rows, blocks)
        self._loads.add(load)
        expected = self.host.checksums(rows)
        slab = self.host.slab
        work = partial(load.run, slab, expected, is_checked=self.rules.is_checked, clock=self.host.now_s)
        job = IoJob(Urgency.LOAD, len(blocks) * slab.block_bytes, work, lambda result: self._loaded(load, result))
        if not self._copies.put(job):  # the worker is shutting down
            load.over()
            self._loaded(load, None)
        return load

    def _loaded(self, load: Load, result: object) -> None:
        load.over()
        self._loads.discard(load)
        if load.corrupt:
            logger.error("%d blocks in the host tier failed their checksums; they are recomputed", len(load.corrupt))
            self.stats.corrupt += len(load.corrupt)
        if isinstance(result, float) and not load.corrupt:
            self.stats.loaded += len(load.blocks)
            self.stats.load_s += result
        else:
            self.discard_load(load)
        self.host.unhold(load.rows)

    def discard_load(self, load: Load) -> None:
        """Forget the blocks that this load, which is over, did not bring, so that no other request tries them."""
        missed = set(load.corrupt or load.hashes)
        rows = zip(load.hashes, load.rows, strict=True)
        self.host.forget([digest for digest, row in rows if digest in missed and self.host.row(digest) == row])

    # ---- reports

    def drain_changes(self) -> list[CacheChange]:
        """The net change of the host tier since the last call, if any."""
        change = self.host.drain_changes()
        if change is None:
            return []
        for store in self._stores:
            store.host_tier_changed(change.stored, change.removed)
        return [change]

    def tier_loads(self) -> list[TierLoad]:
        """One for the host tier and one for each store."""
        return [
            _host_load(self.host, self.stats),
            *(TierLoad(tier=store.name, **asdict(store.stats())) for store in self._stores),
        ]

    def held_blocks(self) -> list[BlockId]:
        """Blocks of the pool that are being copied: one reference each."""
        return list(self._saving.values())

    def reset(self) -> None:
        """Discard all entries of the host tier (not of the stores)."""
        self.host.forget(self.host.hashes())

    def check(self) -> None:
        """Raise AssertionError unless the host tier's rows and entries agree."""
        self.host.check()


def _host_load(host: HostTier, stats: CopyStats) -> TierLoad:
    num_cached = host.counts().cached
    return TierLoad(
        tier="host",
        num_blocks=num_cached,
        num_bytes=num_cached * host.block_bytes,
        capacity_bytes=host.num_rows * host.block_bytes,
        loaded_blocks=stats.loaded,
        stored_blocks=stats.saved,
        load_s=stats.load_s,
        store_s=stats.save_s,
        rejected_blocks=stats.unsaved,
        evicted_blocks=host.num_evicted,
        corrupt_blocks=stats.corrupt,
    )
