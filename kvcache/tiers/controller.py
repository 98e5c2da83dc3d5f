"""The tier controller of one worker: which blocks move down a tier, and which move up.

Lives on the engine's thread, which owns the pool and the host tier; I/O threads copy the bytes, between rows and blocks
that are held for them, and report through `poll`. Copies within memory and calls of the stores have threads of their
own, so a slow disk never delays a step. Imports no torch.
"""

from collections.abc import Callable, Container, Sequence
from dataclasses import asdict

from kvrelay.kvcache.index.changes import CacheChange
from kvrelay.kvcache.index.tier_index import TierIndex
from kvrelay.kvcache.memory.jobs import IoThreads, JobQueue, MakeThreads
from kvrelay.kvcache.memory.loads import BlockSlab, Load
from kvrelay.kvcache.pool.block_pool import BlockPool
from kvrelay.kvcache.stores.store import BlockMeta, BlockStore, SharingStore
from kvrelay.kvcache.tiers.fetches import Fetches
from kvrelay.kvcache.tiers.host_copies import HostCopies
from kvrelay.kvcache.tiers.host_tier import HostTier
from kvrelay.kvcache.tiers.offload import Offload
from kvrelay.kvcache.tiers.rules import IndexedBlock, TierRules, TierStats
from kvrelay.plane.reports import TierLoad
from kvrelay.types import BlockHash, BlockId

_MAX_JOBS = 1024
MAX_BYTES = 256 << 20  # under way: keeps a fast disk busy, and is little beside a host tier
_STORE_THREADS = 2  # one reads while another writes, or waits for a remote store
_SPARE_SHARE = 8  # write-back begins when less than an eighth of the pool is free
_WRITE_BACK_PAUSE = 20  # write-back looks for blocks to save for a twentieth of the time at most


class TierController:
    """All tiers below a worker's pool. All methods run on the engine's thread."""

    def __init__(
        self,
        pool: BlockPool,
        slab: BlockSlab,
        index: TierIndex,
        stores: Sequence[BlockStore],
        rules: TierRules,
        *,
        max_bytes: int = MAX_BYTES,
        wake: Callable[[], None],
        clock: Callable[[], float],
        make_threads: MakeThreads = IoThreads,
    ) -> None:
        """Tiers that are not started.

        Args:
            slab, index: the host tier's memory, and its empty index of as many rows.
            stores: below the host tier, nearest first; not started.
            max_bytes: under way at once, of copies within memory and of calls of the stores each.
            wake: called from I/O threads when `poll` has something to do.
            clock: seconds, monotonic.
        """
        self.rules, self.stats = rules, TierStats()
        self.host = HostTier(slab, index, clock)
        self._pool, self._stores = pool, stores
        self._sharing_stores = [store for store in stores if isinstance(store, SharingStore)]
        self._copies = make_threads("kv-tier", 1, JobQueue(max_jobs=_MAX_JOBS, max_bytes=max_bytes), wake)
        self._io = make_threads("kv-store", _STORE_THREADS, JobQueue(max_jobs=_MAX_JOBS, max_bytes=max_bytes), wake)
        self._offload = Offload(self.host, stores, self._io, is_checked=rules.is_checked)
        self._between = HostCopies(pool, self.host, self._offload, self._copies, rules, self.stats)
        self._fetches = Fetches(self.host, stores, self._offload, self._io, rules)
        self._next_write_back_s = 0.0

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
        self._fetches.end_all()
        for store in self._stores:
            store.close()

    def poll(self) -> None:
        """Collect what the threads have finished."""
        for threads in (self._copies, self._io):
            for job, result in threads.finished():
                job.then(result)
        self._fetches.tick()

    @property
    def is_idle(self) -> bool:
        """No job is queued, under way, or finished and not collected."""
        return self._copies.is_idle and self._io.is_idle

    # ---- down

    def used(self, hashes: Sequence[BlockHash], priority: int = 0, *, keep: bool = True) -> None:
        """A request of this priority used these from pool or host tier. `keep`: they may be used again."""
        self.host.use(hashes, priority)
        if keep and self.rules.write != "write-back":
            self._offload.put([digest for digest in hashes if digest in self.host])

    def end_step(self, candidates: Callable[[int], Sequence[IndexedBlock]], prefill_tokens_per_s: float) -> None:
        """Under write-back, save the blocks that the pool would evict next, before it runs out of free ones.

        Args:
            candidates: (count) -> up to `count` such blocks.
            prefill_tokens_per_s: measured, for the choice between fetching and computing.
        """
        self._fetches.prefill_tokens_per_s = prefill_tokens_per_s
        began_s = self.host.now_s()
        if self.rules.write != "write-back" or began_s < self._next_write_back_s:
            return
        wanted = self._pool.num_blocks // _SPARE_SHARE - self._pool.counts().free - len(self._between)
        if wanted > 0:
            self._between.save([block for block in candidates(wanted) if block.digest not in self.host])
        self._offload.put_next_victims()
        now_s = self.host.now_s()
        self._next_write_back_s = now_s + _WRITE_BACK_PAUSE * (now_s - began_s)

    def save(self, blocks: Sequence[IndexedBlock]) -> None:
        """Copy the blocks that the host tier does not have into it; the pool's blocks are held meanwhile."""
        self._between.save(blocks)

    def pin(self, blocks: Sequence[IndexedBlock], until_s: float) -> None:
        """Keep these in the host tier and the stores until then, within each one's limit for pins; saves them first."""
        self._between.pin(blocks, until_s)

    def unpin(self, hashes: Sequence[BlockHash], shared: Container[BlockHash] = ()) -> None:
        """End the pins of these blocks. `shared`: other pins cover these, so the stores keep their pins of them."""
        self.host.unpin(hashes)
        self._offload.unpin([digest for digest in hashes if digest not in shared])
        self._between.cancel_pins(hashes)

    # ---- up

    def load(self, hashes: Sequence[BlockHash], blocks: Sequence[BlockId]) -> Load:
        """Load these blocks of the host tier, all of which are there, into `blocks`, which the caller holds
        meanwhile.
        """
        return self._between.load(hashes, blocks)

    def discard_load(self, load: Load) -> None:
        """Forget the blocks that this load, which is over, did not bring."""
        self._between.discard(load)

    @property
    def is_fetching(self) -> bool:
        """Whether `fetch` may bring anything."""
        return bool(self._stores) and self.rules.prefetch != "off"

    def fetch(self, request_id: str, hashes: Sequence[BlockHash], metas: Sequence[BlockMeta], start: int) -> None:
        """Fetch a queued request's blocks from the stores; those before `start` are in the pool."""
        first = start + self.host.match(hashes, start)
        if self.is_fetching and first < len(hashes):
            held = self.host.hold(hashes[start:first])  # of no use without these
            self._fetches.fetch(request_id, hashes[first:], metas[first:], held)

    def prefetch(
        self,
        request_id: str,
        hashes: Sequence[BlockHash],
        metas: Sequence[BlockMeta],
        pin_until_s: float,
        on_found: Callable[[int], None],
    ) -> bool:
        """Fetch blocks from the stores ahead of their request: see Fetches.prefetch."""
        wanted = hashes if self.is_fetching else []
        return self._fetches.prefetch(request_id, wanted, metas, pin_until_s, on_found)

    def is_waiting(self, request_id: str) -> bool:
        """Whether this request waits for its fetch and should not be admitted yet."""
        return self._fetches.is_waiting(request_id)

    def next_deadline_s(self) -> float | None:
        """When the next request stops waiting for its fetch; None: no request waits."""
        return self._fetches.next_deadline_s()

    def end_fetch(self, request_id: str) -> None:
        """This request was admitted, or is gone."""
        self._fetches.end(request_id)

    # ---- reports

    def drain_changes(self) -> list[CacheChange]:
        """The net change of the host tier since the last call, if any."""
        change = self.host.drain_changes()
        if change is None:
            return []
        for store in self._sharing_stores:
            store.host_tier_changed(change.stored, change.removed)
        return [change]

    @property
    def num_fetching(self) -> int:
        """Queued requests with a fetch."""
        return len(self._fetches)

    def tier_loads(self) -> list[TierLoad]:
        """One for the host tier and one for each store."""
        return [
            _host_load(self.host, self.stats),
            *(TierLoad(tier=store.name, **asdict(store.stats())) for store in self._stores),
        ]

    def held_blocks(self) -> list[BlockId]:
        """Blocks of the pool that are being copied: one reference each."""
        return self._between.held_blocks()

    def reset(self) -> None:
        """Discard all entries of the host tier (not of the stores)."""
        self.host.forget(self.host.index.hashes())

    def check(self) -> None:
        """Raise AssertionError unless the host tier's rows and entries agree."""
        self.host.index.check()


def _host_load(host: HostTier, stats: TierStats) -> TierLoad:
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
        evicted_blocks=host.index.num_evicted,
        corrupt_blocks=stats.corrupt,
    )
