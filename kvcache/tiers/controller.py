"""The cache controller of one worker: which blocks go down a tier, which come up, and who may touch them meanwhile.

Lives on the engine's thread, which owns the pool and the host tier's index; bytes are moved by I/O threads
(jobs.py), which get slots and blocks that are held for them and report back through `poll`. Two sets of threads, so that a
slow disk never keeps a step waiting for a copy within memory. Imports no torch.
"""

import logging
from collections.abc import Callable, Container, Iterable, Sequence
from dataclasses import dataclass
from typing import Protocol

from kvrelay.kvcache.index.changes import CacheChange
from kvrelay.kvcache.index.tier_index import TierIndex
from kvrelay.kvcache.memory.jobs import IoJob, IoThreads, JobQueue, Threads, Urgency
from kvrelay.kvcache.memory.loads import Load
from kvrelay.kvcache.pool.block_pool import BlockPool
from kvrelay.kvcache.stores.store import BlockMeta, BlockStore
from kvrelay.kvcache.tiers.fetch_cost import StoreSpeed, worth_fetching
from kvrelay.kvcache.tiers.fetches import Fetches
from kvrelay.kvcache.tiers.offload import Offload
from kvrelay.kvcache.tiers.offload import Slab as SinkSlab
from kvrelay.plane.messages import TierLoad
from kvrelay.types import BlockHash, BlockId

logger = logging.getLogger(__name__)

_BATCH_BYTES = 8 << 20  # of one job: what is more urgent waits no longer than this takes
_MAX_JOBS = 1024
_SPARE_SHARE = 8  # write-back begins when less than an eighth of a tier is free
_PACE = 20  # write-back looks for what to save for a twentieth of the time at most
WAIT_LIMIT_S = 60.0  # of a request that waits for "all": a store that hangs does not stop it for ever


class Slab(SinkSlab, Protocol):
    """The host tier's memory (host.py). Its methods block."""

    num_layers: int
    num_slots: int

    def save(self, blocks: Sequence[int], slots: Sequence[int]) -> list[int]: ...

    def checksums(self, slots: Sequence[int]) -> list[int]: ...

    def load(self, slots: Sequence[int], blocks: Sequence[int], layers: range) -> None: ...


@dataclass(frozen=True, slots=True)
class TierRules:
    """The settings that decide (see CacheSettings)."""

    write: str = "write-through"
    write_after_hits: int = 1
    prefetch: str = "timeout"
    prefetch_timeout_s: float = 2.0
    is_checked: bool = True
    block_tokens: int = 16

    @property
    def longest_wait_s(self) -> float:
        """Of a request for its blocks."""
        return {"best-effort": 0.0, "wait": WAIT_LIMIT_S}.get(self.prefetch, self.prefetch_timeout_s)


@dataclass(frozen=True, slots=True)
class IndexedBlock:
    """A full block of the pool and what it is called."""

    digest: BlockHash
    block: BlockId
    meta: BlockMeta


@dataclass(slots=True)
class TierStats:
    """Since the start. Counts are blocks unless the name says otherwise."""

    saved: int = 0  # pool to host
    unsaved: int = 0  # no room in line or in the host tier
    loaded: int = 0  # host to pool
    corrupt: int = 0  # in the host tier
    save_s: float = 0.0
    load_s: float = 0.0


class TierController:
    """What a worker keeps below its pool. Every method is the engine thread's, but for the jobs' insides."""

    def __init__(
        self,
        pool: BlockPool,
        slab: Slab,
        index: TierIndex,
        stores: Sequence[BlockStore],
        rules: TierRules,
        *,
        num_threads: int,
        max_bytes: int,
        wake: Callable[[], None],
        clock: Callable[[], float],
        make_threads: Callable[[str, int, JobQueue, Callable[[], None]], Threads] = IoThreads,
    ) -> None:
        self.pool, self.slab, self.index, self.stores, self.rules = pool, slab, index, stores, rules
        self.sums = TierStats()
        self._clock = clock
        self._copies = make_threads("kv-tier", 1, JobQueue(max_jobs=_MAX_JOBS, max_bytes=max_bytes), wake)
        self._io = make_threads("kv-store", num_threads, JobQueue(max_jobs=_MAX_JOBS, max_bytes=max_bytes), wake)
        self._checksums = [0] * index.num_slots
        self._metas: list[BlockMeta | None] = [None] * index.num_slots
        self._saving: dict[BlockHash, BlockId] = {}
        self._pin_when_saved: dict[BlockHash, float] = {}  # of those being saved: until when
        self._loads: set[Load] = set()
        self._speeds = {store.name: StoreSpeed() for store in stores}
        self.prefill_tokens_per_s = 0.0  # measured; the engine tells
        self.on_change: Callable[[CacheChange], None] | None = None  # called with each change of the host tier
        self._look_again_s = 0.0  # for what to write back
        self.sinks = Offload(slab, index, stores, self._entry, self._io, is_checked=rules.is_checked)
        self.fetches = Fetches(self, wait_s=lambda: rules.longest_wait_s)

    def start(self) -> None:
        """Open the stores and start the threads. Raises StoreError; then nothing is left open."""
        opened: list[BlockStore] = []
        try:
            for store in self.stores:
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
        for store in self.stores:
            store.close()

    def poll(self) -> None:
        """Take note of what the threads have done."""
        for threads in (self._copies, self._io):
            for job, result in threads.finished():
                job.then(result)
        self.fetches.tick()

    def drain_changes(self) -> list[CacheChange]:
        """What became and ceased to be in the host tier since the last call."""
        change = self.index.drain_changes()
        if change is None:
            return []
        if self.on_change is not None:
            self.on_change(change)
        return [change]

    @property
    def is_idle(self) -> bool:
        return self._copies.is_idle and self._io.is_idle

    # ---- down: pool to host

    def named(self, entries: Sequence[IndexedBlock]) -> None:
        """These blocks are full from now on: what the write policy wants at once is saved."""
        if self.rules.write == "write-through":
            self.save(entries)

    def used(self, hashes: Sequence[BlockHash], priority: int = 0, *, keep: bool = True) -> None:
        """A request of this priority was served these from the pool or the host tier. `keep`: such will come again."""
        self.index.use(hashes, self._clock(), priority=priority)
        if keep and self.rules.write != "write-back":
            self.sinks.put([digest for digest in hashes if digest in self.index])

    def write_back(self, coldest: Callable[[int], Sequence[IndexedBlock]]) -> None:
        """Under write-back, save what the pool would evict next, while there is still room to wait for it."""
        began_s = self._clock()
        if self.rules.write != "write-back" or began_s < self._look_again_s:
            return
        wanted = self.pool.num_blocks // _SPARE_SHARE - self.pool.counts().free - len(self._saving)
        if wanted > 0:
            self.save([entry for entry in coldest(wanted) if entry.digest not in self.index])
        self.sinks.put_coldest(began_s)
        now_s = self._clock()
        self._look_again_s = now_s + _PACE * (now_s - began_s)

    def save(self, entries: Sequence[IndexedBlock]) -> None:
        """Copy these blocks into the host tier, those that are not there; the pool's blocks are held meanwhile."""
        fresh = [entry for entry in entries if entry.digest not in self.index and entry.digest not in self._saving]
        step = max(1, _BATCH_BYTES // self.slab.block_bytes)
        for begin in range(0, len(fresh), step):
            self._save_batch(fresh[begin : begin + step])

    def pin(self, entries: Sequence[IndexedBlock], until_s: float) -> None:
        """Keep these in the host tier and in the stores until then, as far as the limit of each for pins goes.

        They are saved now, whatever the write policy.
        """
        self._pin([entry.digest for entry in entries if entry.digest in self.index], until_s)
        self.save(entries)
        for entry in entries:
            if entry.digest in self._saving:
                self._pin_when_saved[entry.digest] = max(until_s, self._pin_when_saved.get(entry.digest, until_s))

    def _pin(self, hashes: Sequence[BlockHash], until_s: float) -> None:
        self.index.pin(hashes, until_s)
        self.sinks.pin(hashes, until_s - self._clock())

    def unpin(self, hashes: Sequence[BlockHash], shared: Container[BlockHash] = ()) -> None:
        """They may be evicted again. `shared`: others want these, and pin them again: the stores' pins stay."""
        self.index.unpin(hashes)
        self.sinks.unpin([digest for digest in hashes if digest not in shared])
        for digest in hashes:
            self._pin_when_saved.pop(digest, None)

    def _save_batch(self, batch: Sequence[IndexedBlock]) -> None:
        slots = self.slots_for([entry.meta for entry in batch])
        self.sums.unsaved += len(batch) - len(slots)
        batch = batch[: len(slots)]
        if not batch:
            return
        blocks = [entry.block for entry in batch]
        slab, clock = self.slab, self._clock

        def work() -> tuple[list[int], float]:
            began = clock()
            return slab.save(blocks, slots), clock() - began

        job = IoJob(
            Urgency.SAVE, len(blocks) * slab.block_bytes, work, lambda result: self._saved(batch, slots, result)
        )
        if not self._copies.put(job):
            self.index.cancel(slots)
            self.sums.unsaved += len(batch)
            return
        self.pool.acquire(blocks)
        self._saving.update((entry.digest, entry.block) for entry in batch)

    def _saved(self, batch: Sequence[IndexedBlock], slots: Sequence[int], result: object) -> None:
        for entry in batch:
            del self._saving[entry.digest]
        self.pool.release([entry.block for entry in batch])
        pins = [(entry.digest, self._pin_when_saved.pop(entry.digest, None)) for entry in batch]
        if not isinstance(result, tuple):
            self.index.cancel(slots)
            self.sums.unsaved += len(batch)
            return
        checksums, seconds = result
        for entry, slot, checksum in zip(batch, slots, checksums, strict=True):
            self._put(entry.digest, slot, checksum, entry.meta)
        for until_s in {until_s for _, until_s in pins if until_s is not None}:
            self._pin([digest for digest, end_s in pins if end_s == until_s and digest in self.index], until_s)
        self.sums.saved += len(batch)
        self.sums.save_s += seconds
        if self.rules.write != "write-back":
            self.sinks.put([entry.digest for entry in batch if entry.digest in self.index])

    def _entry(self, slot: int) -> tuple[BlockMeta, int]:
        """What is known of the block in a slot: for those who send it further down."""
        meta = self._metas[slot]
        assert meta is not None, f"slot {slot} holds nothing"
        return meta, self._checksums[slot]

    def _put(self, digest: BlockHash, slot: int, checksum: int, meta: BlockMeta) -> None:
        is_new = self.index.put(
            digest, slot, self._clock(), parent=meta.parent, end_tokens=meta.end_tokens, priority=meta.priority
        )
        if is_new:
            self._checksums[slot] = checksum
            self._metas[slot] = meta

    # ---- up: host to pool

    def match(self, hashes: Sequence[BlockHash], start: int) -> int:
        """How many blocks from `hashes[start]` on the host tier holds in a row."""
        return len(self.index.match(hashes, start))

    def load(self, hashes: Sequence[BlockHash], blocks: Sequence[BlockId]) -> Load:
        """Bring these, all of which are in the host tier, into blocks that the caller holds until it is over."""
        slots = self.index.hold(hashes)
        load = Load(hashes, slots, blocks)
        self._loads.add(load)
        sums = [self._checksums[slot] for slot in slots]
        slab, clock, is_checked = self.slab, self._clock, self.rules.is_checked

        def work() -> float:
            began = clock()
            try:
                found = slab.checksums(slots) if is_checked else sums
                good = [now == then for now, then in zip(found, sums, strict=True)]
                load.verified([digest for digest, is_good in zip(hashes, good, strict=True) if not is_good])
                for layer in range(slab.num_layers if all(good) else 0):
                    slab.load(slots, blocks, range(layer, layer + 1))
                    load.arrived(layer + 1)
            finally:
                load.over()
            return clock() - began

        job = IoJob(Urgency.LOAD, len(blocks) * slab.block_bytes, work, lambda result: self._loaded(load, result))
        if not self._copies.put(job):  # the worker is shutting down
            load.over()
            self._loaded(load, None)
        return load

    def _loaded(self, load: Load, result: object) -> None:
        load.over()
        self._loads.discard(load)
        if load.corrupt:
            logger.error(
                "%d blocks in the host tier were not what was put there; they are computed anew", len(load.corrupt)
            )
            self.sums.corrupt += len(load.corrupt)
        if isinstance(result, float) and not load.corrupt:
            self.sums.loaded += len(load.blocks)
            self.sums.load_s += result
        else:
            self.give_up(load)
        self.index.unhold(load.slots)

    def give_up(self, load: Load) -> None:
        """What this load, which is over, did not bring is not to be found any more: nobody tries it again and again."""
        missed = set(load.corrupt or load.hashes)
        places = zip(load.hashes, load.slots, strict=True)
        self.forget([digest for digest, slot in places if digest in missed and self.index.slot(digest) == slot])

    def forget(self, hashes: Iterable[BlockHash]) -> None:
        """They are not to be found in the host tier any more."""
        self.index.discard(hashes, self._clock())

    # ---- up: stores to host, for fetches.py

    @property
    def block_bytes(self) -> int:
        return self.slab.block_bytes

    def now_s(self) -> float:
        return self._clock()

    def submit(self, job: IoJob) -> bool:
        return self._io.put(job)

    @property
    def is_fetching(self) -> bool:
        """Whether `want` may bring anything about."""
        return bool(self.stores) and self.rules.prefetch != "off"

    def want(self, request_id: str, hashes: Sequence[BlockHash], metas: Sequence[BlockMeta], start: int) -> None:
        """A request has come in line whose blocks before `start` are in the pool: have the stores bring the rest."""
        first = start + self.match(hashes, start)
        if self.is_fetching and first < len(hashes):
            held = self.index.hold(hashes[start:first])  # of no use without these
            self.fetches.begin(request_id, hashes[first:], metas[first:], held)

    def prefetch(
        self, name: str, hashes: Sequence[BlockHash], metas: Sequence[BlockMeta], pin_until_s: float,
        told: Callable[[int], None],
    ) -> bool:  # fmt: skip
        """Have the stores bring these for a request that is yet to come; see Fetches.prefetch."""
        return self.fetches.prefetch(name, hashes if self.is_fetching else [], metas, pin_until_s, told)

    def hold_first(self, hashes: Sequence[BlockHash]) -> list[int]:
        """Hold those of the beginning that are in the host tier; their slots."""
        return self.index.hold(hashes[: self.match(hashes, 0)])

    def pin_here(self, hashes: Sequence[BlockHash], until_s: float) -> None:
        """Keep these, those that are in the host tier, until then, as far as its limit for pins goes."""
        self.index.pin(hashes, until_s)

    def slots_for(self, metas: Sequence[BlockMeta]) -> list[int]:
        slots: list[int] = []
        for meta in metas:
            got = self.index.reserve(1, self._clock(), tenant=meta.tenant)
            if got is None:
                break
            slots += got
        return slots

    def read_into(self, store: BlockStore, hashes: Sequence[BlockHash], slots: Sequence[int]) -> list[int | None]:
        began = self._clock()
        came = store.load(hashes, [self.slab.slot(slot) for slot in slots])
        now_s = self._clock()
        self._speeds[store.name].observe(sum(came) * self.block_bytes, now_s - began, now_s)
        return [self.slab.checksum(slot) if is_here else None for slot, is_here in zip(slots, came, strict=True)]

    def arrived(
        self, store: BlockStore, hashes: Sequence[BlockHash], metas: Sequence[BlockMeta], slots: Sequence[int],
        checksums: Sequence[int | None],
    ) -> list[int]:  # fmt: skip
        held: list[int] = []
        for digest, meta, slot, checksum in zip(hashes, metas, slots, checksums, strict=True):
            if checksum is None:
                self.index.cancel((slot,))
                continue
            self._put(digest, slot, checksum, meta)
            held += self.index.hold((digest,))
        self.sinks.knows(
            store, [digest for digest, checksum in zip(hashes, checksums, strict=True) if checksum is not None]
        )
        return held

    def unhold(self, slots: Sequence[int]) -> None:
        self.index.unhold(slots)

    def worth(self, store: BlockStore, num_blocks: int) -> int:
        if self.rules.prefetch == "wait":
            return num_blocks
        speed = self._speeds[store.name].bytes_per_s(self._clock())
        return worth_fetching(
            num_blocks, self.block_bytes, self.rules.block_tokens, speed, 0.0, self.prefill_tokens_per_s
        )

    # ---- what others may know

    def tier_loads(self) -> list[TierLoad]:
        """One for the host tier and one for each store."""
        counts, sums = self.index.counts(), self.sums
        host = TierLoad(
            tier="host", num_blocks=counts.cached, num_bytes=counts.cached * self.block_bytes,
            capacity_bytes=self.index.num_slots * self.block_bytes, loaded_blocks=sums.loaded, stored_blocks=sums.saved,
            load_s=sums.load_s, store_s=sums.save_s, rejected_blocks=sums.unsaved, evicted_blocks=self.index.num_evicted,
            corrupt_blocks=sums.corrupt,
        )  # fmt: skip
        return [host, *(_store_load(store) for store in self.stores)]

    def checksum(self, slot: int) -> int:
        """Of what was put into this slot of the host tier."""
        return self._checksums[slot]

    # ---- the ledger

    def reset(self) -> None:
        """Forget what is in the host tier (not in the stores)."""
        self.forget(self.index.hashes())

    def held_blocks(self) -> list[BlockId]:
        """Blocks of the pool that are held for a copy: each once for every copy."""
        return list(self._saving.values())

    def check(self) -> None:
        """Raise AssertionError unless slots and what is said of them agree."""
        self.index.check()


def _store_load(store: BlockStore) -> TierLoad:
    stats = store.stats()
    return TierLoad(
        tier=store.name, num_blocks=stats.num_blocks, num_bytes=stats.num_bytes, capacity_bytes=stats.capacity_bytes,
        loaded_blocks=stats.loaded_blocks, stored_blocks=stats.stored_blocks, load_s=stats.load_s, store_s=stats.store_s,
        rejected_blocks=stats.rejected_blocks, evicted_blocks=stats.evicted_blocks, corrupt_blocks=stats.corrupt_blocks,
        failures=stats.failures,
    )  # fmt: skip
