"""A worker's lower tiers in virtual time: production's TierController over jobs without bytes.

Copies between pool and host tier run one after the other at the profile's speed; blocks from or to another machine are
flows that share the links with all others. Sources are those of the cluster's store: other workers' host tiers, and the
store's nodes, one on each machine. Left out: local disk, Redis and object stores, repair of replicas.
"""

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field

from kvrelay.cluster.profiles.profile import SimulatorProfile
from kvrelay.cluster.simulator.clock import Clock
from kvrelay.cluster.simulator.network import Flow, Network
from kvrelay.config import Settings
from kvrelay.engine.scheduling.tier_requests import LowerTiers
from kvrelay.kvcache.eviction.policies import make_policy
from kvrelay.kvcache.index.changes import CacheChange
from kvrelay.kvcache.index.tier_index import TierIndex
from kvrelay.kvcache.memory.jobs import IoJob, JobQueue, Urgency, run
from kvrelay.kvcache.pool.block_pool import BlockPool
from kvrelay.kvcache.stores.placement import StoreAddress, places
from kvrelay.kvcache.stores.store import BlockStore
from kvrelay.kvcache.tiers.controller import TierController
from kvrelay.kvcache.tiers.host_tier import TierRules, make_host_tier
from kvrelay.types import BlockHash, BlockMeta

NOTHING = memoryview(b"")
MOST_REMEMBERED = 1_000_000  # blocks' homes


class SimulatedSlab:
    """A host tier's memory of `num_rows` rows without content."""

    num_layers = 1

    def __init__(self, num_rows: int, block_bytes: int) -> None:
        self.num_rows, self.block_bytes = num_rows, block_bytes

    def save(self, blocks: Sequence[int], rows: Sequence[int]) -> list[int]:
        return [0] * len(rows)

    def load(self, rows: Sequence[int], blocks: Sequence[int], layers: range) -> None:
        """Takes no time here: `TierCopies` accounts for it."""

    def checksums(self, rows: Sequence[int]) -> list[int]:
        return [0] * len(rows)

    def checksum(self, row: int) -> int:
        return 0

    def row(self, row: int) -> memoryview:
        return NOTHING


class JobTime:
    """The controller's clock: a job that reads it twice gets its beginning and its end."""

    def __init__(self, clock: Clock) -> None:
        self._clock = clock
        self._times: list[float] = []

    def now_s(self) -> float:
        return self._times.pop() if self._times else self._clock.now_s

    def run(self, job: IoJob, began_s: float) -> object:
        self._times = [began_s]
        try:
            return run(job)
        finally:
            self._times = []


class _VirtualThreads:
    """A pool of threads in virtual time. Subclasses define how long a job takes."""

    def __init__(
        self, clock: Clock, time: JobTime, num_threads: int, queue: JobQueue, wake: Callable[[], None]
    ) -> None:
        self.clock, self._time, self._free, self._queue, self._wake = clock, time, num_threads, queue, wake
        self._num_threads = num_threads
        self._finished: list[tuple[IoJob, object]] = []

    def start(self) -> None:
        """Nothing to start."""

    def close(self) -> None:
        self._queue.drop_all()

    def put(self, job: IoJob) -> bool:
        if not self._queue.put(job):
            return False
        self._look()
        return True

    def finished(self) -> list[tuple[IoJob, object]]:
        ended, self._finished = self._finished, []
        return ended

    @property
    def is_idle(self) -> bool:
        return not (len(self._queue) or self._free < self._num_threads or self._finished)

    def _look(self) -> None:
        while self._free and (job := self._queue.take()) is not None:
            self._free -= 1
            self.begin(job, self.clock.now_s)

    def begin(self, job: IoJob, now_s: float) -> None:
        raise NotImplementedError

    def end(self, job: IoJob, began_s: float) -> None:
        """The job is over. Only fetches wake the worker; saves are noticed at its next step."""
        self._free += 1
        self._finished.append((job, self._time.run(job, began_s)))
        if job.urgency is Urgency.FETCH:
            self._wake()
        self._look()


class TierCopies(_VirtualThreads):
    """Copies between pool and host tier. A load begins immediately, and its step waits for it (`loaded_s`)."""

    bytes_per_s = 1.0
    loaded_s = 0.0  # when all loads so far have ended

    def put(self, job: IoJob) -> bool:
        if job.urgency is not Urgency.LOAD:
            return super().put(job)
        began_s = max(self.clock.now_s, self.loaded_s)
        seconds = job.num_bytes / self.bytes_per_s
        self.loaded_s = began_s + seconds
        self._finished.append((job, self._time.run(job, self.clock.now_s - seconds)))
        return True

    def begin(self, job: IoJob, now_s: float) -> None:
        self.clock.at(max(now_s, self.loaded_s) + job.num_bytes / self.bytes_per_s, self.end, job, now_s)


class StoreTransfers(_VirtualThreads):
    """Transfers to and from stores: a job runs once to find what it moves (`SimulatedStore.planned`), then as flows."""

    store: "SimulatedStore"
    lookup_s = 0.0

    def begin(self, job: IoJob, now_s: float) -> None:
        store = self.store
        store.planned = {}
        run(job)
        planned, store.planned = store.planned, None
        if not planned:
            self.clock.after(self.lookup_s, self.end, job, now_s)
            return
        pending = len(planned)

        def arrived() -> None:
            nonlocal pending
            pending -= 1
            if not pending:
                self.end(job, now_s)

        for (source, target), num_bytes in planned.items():
            store.begin_flow(source, target, num_bytes, arrived)


@dataclass(slots=True)
class BlockSources:
    """Where blocks are below the pools: host tiers of workers, which serve reads, and nodes of the store."""

    workers: dict[BlockHash, dict[str, str]] = field(default_factory=dict)  # worker -> machine
    nodes: dict[str, TierIndex] = field(default_factory=dict)  # by machine
    addresses: list[StoreAddress] = field(default_factory=list)
    _homes: dict[BlockHash, tuple[str, ...]] = field(default_factory=dict)

    def changed(self, worker_id: str, node_id: str, change: CacheChange) -> None:
        for digest in change.removed:
            holders = self.workers.get(digest)
            if holders is not None and holders.pop(worker_id, None) is not None and not holders:
                del self.workers[digest]
        for digest in change.stored:
            self.workers.setdefault(digest, {})[worker_id] = node_id

    def remove_worker(self, worker_id: str) -> None:
        for digest in [digest for digest, holders in self.workers.items() if worker_id in holders]:
            del self.workers[digest][worker_id]
            if not self.workers[digest]:
                del self.workers[digest]

    def add_node(self, node_id: str, num_rows: int, policy: str) -> None:
        if num_rows and node_id not in self.nodes:
            self.nodes[node_id] = TierIndex(num_rows, make_policy(policy, num_rows))
            self.addresses.append(StoreAddress(node_id, node_id, 1, num_rows))
            self._homes.clear()

    def homes(self, hashes: Sequence[BlockHash], num_replicas: int) -> list[tuple[str, ...]]:
        """The machines whose nodes should hold each block, best first. Cached, since lookups repeat."""
        if len(self._homes) >= MOST_REMEMBERED:
            self._homes.clear()
        known = self._homes
        if fresh := [digest for digest in hashes if digest not in known]:
            for digest, found in zip(fresh, places(fresh, self.addresses, num_replicas), strict=True):
                known[digest] = tuple(home.node_id for home in found)
        return [known[digest] for digest in hashes]

    def source(self, digest: BlockHash, reader: str) -> str | None:
        """The machine to read a block from: a worker's before a node's, and not `reader`'s own."""
        for worker_id, node_id in self.workers.get(digest, {}).items():
            if worker_id != reader:
                return node_id
        return next((node_id for node_id, index in self.nodes.items() if digest in index), None)


class SimulatedStore(BlockStore):
    """The cluster's store as one worker's tier. While `planned` is a dict, jobs only add to it: machines -> bytes."""

    name = "cluster"
    keeps_checksums = True

    def __init__(
        self,
        worker_id: str,
        node_id: str,
        holders: BlockSources,
        network: Network,
        clock: Clock,
        *,
        block_bytes: int,
        num_replicas: int,
    ) -> None:
        super().__init__(lambda: clock.now_s)
        self._worker_id, self._node_id, self._holders = worker_id, node_id, holders
        self._network, self._block_bytes, self._num_replicas = network, block_bytes, num_replicas
        self.planned: dict[tuple[str, str], int] | None = None
        self.flows: dict[Flow, None] = {}

    def begin_flow(self, source: str, target: str, num_bytes: int, arrived: Callable[[], None]) -> None:
        def done() -> None:
            del self.flows[flow]
            arrived()

        flow = self._network.open(source, target, done)
        self.flows[flow] = None
        flow.close(num_bytes)

    def start(self) -> None:
        """Nothing to open."""

    def close(self) -> None:
        for flow in self.flows:
            flow.cancel()
        self.flows.clear()

    def host_tier_changed(self, stored: Sequence[BlockHash], removed: Sequence[BlockHash]) -> None:
        self._holders.changed(self._worker_id, self._node_id, CacheChange(tuple(stored), tuple(removed)))

    def delete(self, hashes: Sequence[BlockHash]) -> None:
        """Ignored: other workers may read the blocks."""

    def contains(self, hashes: Sequence[BlockHash]) -> list[bool]:
        return [self._holders.source(digest, self._worker_id) is not None for digest in hashes]

    def load(
        self, hashes: Sequence[BlockHash], into: Sequence[memoryview], metas: Sequence[BlockMeta] = ()
    ) -> list[bool]:
        sources = [self._holders.source(digest, self._worker_id) for digest in hashes]
        if self.planned is not None:
            self._note((source, self._node_id) for source in sources if source is not None)
            return [False] * len(hashes)
        came = [source is not None for source in sources]
        self.count(loaded_blocks=sum(came))
        return came

    def store(
        self, hashes: Sequence[BlockHash], blocks: Sequence[memoryview], metas: Sequence[BlockMeta]
    ) -> list[bool]:
        homes = self._holders.homes(hashes, self._num_replicas)
        if self.planned is not None:
            missing = [
                (self._node_id, home)
                for digest, own in zip(hashes, homes, strict=True)
                for home in own
                if digest not in self._holders.nodes[home]
            ]
            self._note(missing)
            return [False] * len(hashes)
        for digest, own, meta in zip(hashes, homes, metas, strict=True):
            self.count(stored_blocks=any(digest not in self._holders.nodes[home] for home in own))
            for home in own:
                self._keep(self._holders.nodes[home], digest, meta)
        return [True] * len(hashes)

    def _keep(self, index: TierIndex, digest: BlockHash, meta: BlockMeta) -> None:
        now_s = self._clock()
        if digest in index:
            index.use((digest,), now_s)
        elif (rows := index.reserve(1, now_s)) is not None:
            index.put(digest, rows[0], now_s, parent=meta.parent, end_tokens=meta.end_tokens, priority=meta.priority)

    def _note(self, ways: Iterable[tuple[str, str]]) -> None:
        assert self.planned is not None
        for way in ways:
            self.planned[way] = self.planned.get(way, 0) + self._block_bytes


@dataclass(slots=True)
class SimulatedTiers:
    lower: LowerTiers
    copies: TierCopies
    store: SimulatedStore | None

    def close(self) -> None:
        if self.store is not None:
            self.store.close()


def make_tiers(
    pool: BlockPool,
    profile: SimulatorProfile,
    settings: Settings,
    holders: BlockSources,
    network: Network,
    clock: Clock,
    *,
    worker_id: str,
    node_id: str,
    wake: Callable[[], None],
    message_s: float,
) -> SimulatedTiers | None:
    """As engine/worker/build.py does; None where the settings give a worker no host memory."""
    cache, block_bytes = settings.cache, profile.block_size * profile.kv_bytes_per_token
    num_rows = (cache.host_memory or 0) // block_bytes
    if not num_rows:
        return None
    store = None
    if cache.remote is not None:
        store = SimulatedStore(
            worker_id, node_id, holders, network, clock, block_bytes=block_bytes, num_replicas=settings.store.replicas
        )
        holders.add_node(node_id, settings.store.memory // block_bytes, cache.eviction_policy)
    time, made = JobTime(clock), {}

    def make_threads(name: str, num_threads: int, queue: JobQueue, woken: Callable[[], None]) -> _VirtualThreads:
        kind = TierCopies if name == "kv-tier" else StoreTransfers
        made[name] = kind(clock, time, num_threads, queue, woken)
        return made[name]

    rules = TierRules(cache.write_policy, cache.prefetch, is_checked=False, block_tokens=profile.block_size)
    tiers = TierController(
        pool,
        make_host_tier(cache, SimulatedSlab(num_rows, block_bytes), time.now_s),
        [store] if store is not None else [],
        rules,
        wake=wake,
        make_threads=make_threads,
    )
    copies, transfers = made["kv-tier"], made["kv-store"]
    assert isinstance(copies, TierCopies) and isinstance(transfers, StoreTransfers)
    copies.bytes_per_s = profile.load_bytes_per_s.get("host", profile.local_bytes_per_s)
    if store is not None:
        transfers.store, transfers.lookup_s = store, 2 * message_s
    tiers.start()
    return SimulatedTiers(LowerTiers(tiers, profile.block_size), copies, store)
