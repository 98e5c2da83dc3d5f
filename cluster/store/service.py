"""A node of the cluster's store: its memory, blocks, server and repair, in an actor or a process. Never imports Ray.

Repair keeps as many copies of each block as placement wants when nodes join or leave, at a limited rate: every node
offers a block to each node that should have a copy, and deletes blocks that belong elsewhere once all of those have
them. An evicted block is not copied back, or full nodes would evict each other's blocks for ever.
"""

import asyncio
import logging
import time
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path

import msgspec

from kvrelay.cluster.registry.members import STORE_ROLE
from kvrelay.cluster.store.node import StoreNode
from kvrelay.cluster.store.node_quotas import NodeQuotas
from kvrelay.config import Settings
from kvrelay.errors import PeerLost
from kvrelay.kvcache.eviction.policies import EvictionPolicy, Lru, make_policy
from kvrelay.kvcache.index.tier_index import Quota
from kvrelay.kvcache.stores.disk.tier import DiskOptions, DiskStore
from kvrelay.kvcache.stores.namespace import Namespace
from kvrelay.kvcache.stores.placement import StoreAddress, places
from kvrelay.kvtransfer.paths.selection import TRANSPORTS, transports_for
from kvrelay.kvtransfer.slabs.client import SlabPeer
from kvrelay.kvtransfer.slabs.server import SlabServer
from kvrelay.kvtransfer.slabs.slabs import SharedSlab, allocate_slab, free_slab
from kvrelay.kvtransfer.transports.base import Transport
from kvrelay.plane.ports import use_ports
from kvrelay.plane.tls import ClusterTls, cluster_tls
from kvrelay.settings.cache import StoreSettings

logger = logging.getLogger(__name__)

BATCH_BLOCKS = 64
BYTES_PER_S = 256 << 20  # of copies when nodes join or leave: a fifth of a 10 Gbit/s link
_PUT_S = 20.0
_PAUSE_S = 2.0  # between two sweeps, in which clients learn of the change, too: until then they put single copies
_LEAST_SWEEPS, _MOST_SWEEPS = 2, 6  # after a change of the nodes; more than the least until every block is in place


class Repairer:
    """Copies one node's blocks to others. Used on the node's loop."""

    def __init__(self, node: StoreNode, make_peer: Callable[[StoreAddress], SlabPeer], *, num_replicas: int) -> None:
        self._node, self._make_peer, self._num_replicas = node, make_peer, num_replicas
        self._nodes: tuple[StoreAddress, ...] = ()
        self._peers: dict[StoreAddress, SlabPeer] = {}
        self._changed = asyncio.Event()
        self._task: asyncio.Task[None] | None = None
        self._lock = asyncio.Lock()
        self.is_settled = True  # nothing is left to do since the last change

    def start(self) -> None:
        self._task = asyncio.create_task(self._run(), name="store repair")

    async def aclose(self) -> None:
        if self._task is not None:
            self._task.cancel()
            await asyncio.gather(self._task, return_exceptions=True)
        for peer in self._peers.values():
            await peer.aclose()
        self._peers.clear()

    def set_nodes(self, nodes: Sequence[StoreAddress]) -> None:
        """All live nodes, this one included."""
        ordered = tuple(sorted(nodes, key=lambda node: node.node_id))
        if ordered != self._nodes:
            self._nodes = ordered
            self.is_settled = False
            self._changed.set()

    async def _run(self) -> None:
        nodes, num_sweeps = self._nodes, 0
        while True:
            await self._changed.wait()
            self._changed.clear()
            if nodes is not self._nodes:
                nodes, num_sweeps = self._nodes, 0
            try:
                for address in [address for address in self._peers if address not in nodes]:
                    await self._peers.pop(address).aclose()
                is_complete = await self.sweep()
            except Exception:  # a process edge: repair must survive any failure of a sweep
                logger.exception("repair of %s failed", self._node.node_id)
                is_complete = False
            num_sweeps += 1
            if num_sweeps >= (_LEAST_SWEEPS if is_complete else _MOST_SWEEPS):
                self.is_settled = not self._changed.is_set()
            else:
                asyncio.get_running_loop().call_later(_PAUSE_S, self._changed.set)

    async def sweep(self) -> bool:
        """Go through all blocks, until done or the nodes change; returns whether each is where placement wants it."""
        nodes, is_complete = self._nodes, True
        keys = self._node.keys()
        for first in range(0, len(keys), BATCH_BLOCKS):
            if nodes is not self._nodes:
                return False
            is_complete &= await self._spread(keys[first : first + BATCH_BLOCKS])
        return is_complete

    async def _spread(self, keys: Sequence[bytes]) -> bool:
        """Copy these blocks to where placement wants them; returns whether all are there now."""
        wanted_at: defaultdict[StoreAddress, list[bytes]] = defaultdict(list)
        foreign: dict[bytes, int] = {}  # key -> copies elsewhere that are still to be confirmed
        for key, nodes in zip(keys, places(keys, self._nodes, self._num_replicas), strict=True):
            others = [node for node in nodes if node.node_id != self._node.node_id]
            for node in others:
                wanted_at[node].append(key)
            if len(others) == len(nodes) and nodes:
                foreign[key] = len(nodes)
        is_complete = True
        for address, some in wanted_at.items():
            try:
                there = await self._copy(address, some)
                is_complete &= len(there) == len(some)
                for key in foreign.keys() & there:
                    foreign[key] -= 1
            except PeerLost as error:
                logger.info("repair: %s", error.why)
                is_complete = False
        gone = [key for key, missing in foreign.items() if missing == 0]
        if gone:
            await self._node.forget(gone)
        return is_complete

    async def _copy(self, address: StoreAddress, keys: Sequence[bytes]) -> list[bytes]:
        """Copy the blocks that this node lacks; returns the keys that it has then. Raises PeerLost."""
        async with self._lock:  # one batch at a time, since the rate is the node's
            peer = await self._peer(address)
            found = await peer.exists(keys)
            there = [key for key, here in zip(keys, found, strict=True) if here]
            missing = [key for key, here in zip(keys, found, strict=True) if not here]
            if not missing:
                return there
            leases = [lease for lease in await self._node.lease(missing) if lease is not None]
            try:
                offers = [msgspec.structs.replace(self._node.block(lease.row), offset=lease.offset) for lease in leases]
                began = time.monotonic()
                kept = await peer.put(offers, within_s=_PUT_S) if offers else []
            finally:
                self._node.release(leases)
            num_bytes = sum(offer.num_bytes for offer in offers)
            await asyncio.sleep(max(num_bytes / BYTES_PER_S - (time.monotonic() - began), 0.0))
            return there + [offer.key for offer, is_kept in zip(offers, kept, strict=True) if is_kept]

    async def _peer(self, address: StoreAddress) -> SlabPeer:
        peer = self._peers.get(address)
        if peer is not None and peer.is_up:
            return peer
        if peer is not None:
            await peer.aclose()
        peer = self._peers[address] = self._make_peer(address)
        await peer.connect()
        return peer


class StoreService:
    """One node. Used on one loop."""

    def __init__(
        self,
        node_id: str,
        settings: StoreSettings,
        secret: bytes,
        *,
        host: str,
        make_policy: Callable[[int], EvictionPolicy] = lambda num_rows: Lru(),
        make_disk: Callable[[int, Quota], DiskStore] | None = None,
        transport: str = "auto",
        transports: Mapping[str, Transport] = TRANSPORTS,
        tls: ClusterTls | None = None,
        lease_s: float = 10.0,
        stall_s: float = 1.0,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.tls = tls
        self._settings, self._secret, self._host, self._stall_s = settings, secret, host, stall_s
        self._memory, self._quotas = allocate_slab(settings.memory), NodeQuotas(settings.tenant_quota)
        self.node = StoreNode(
            node_id, self._memory, make_policy, quota=self._quotas.bytes_here, make_disk=make_disk, clock=clock
        )
        self._slab = SharedSlab(self._memory, secret, host, transport=transport, transports=transports)
        self.repair = Repairer(self.node, self._peer, num_replicas=settings.replicas)
        self.server = SlabServer(self._slab, self.node, secret, host, lease_s=lease_s, stall_s=stall_s, tls=tls)

    def _peer(self, address: StoreAddress) -> SlabPeer:
        return SlabPeer(
            address.host,
            address.port,
            self._secret,
            self._slab,
            peer_id=self.node.node_id,
            block_bytes=self.node.block_bytes,
            answer_s=self._stall_s,
            stall_s=self._stall_s,
            tls=self.tls,
        )

    async def start(self, port: int = 0) -> StoreAddress:
        """Start everything; returns where it listens. Raises BackendUnavailable."""
        await self._slab.start()
        await self.server.start(port)
        self.repair.start()
        return self._address()

    def _address(self) -> StoreAddress:
        return StoreAddress(self.node.node_id, self._host, self.server.port, self._settings.memory, self.node.epoch)

    def set_nodes(self, nodes: Sequence[StoreAddress]) -> None:
        """All live nodes, whenever they change; this one counts whether listed or not."""
        self._quotas.set_nodes(self._address(), nodes, self._settings.replicas)
        self.node.trim()
        self.repair.set_nodes(nodes)

    def set_quotas(self, by_tenant: Mapping[str, int]) -> None:
        """Tenants' quotas, in bytes over all nodes, whenever they change; others have `store.tenant_quota`."""
        self._quotas.set_quotas(by_tenant)
        self.node.trim()

    async def aclose(self) -> None:
        """Stop repair, close every connection, and finish writes to disk."""
        await self.repair.aclose()
        await self.server.aclose()
        await self._slab.aclose()
        await self.node.aclose()
        free_slab(self._memory)


def make_service(node_id: str, settings: Settings, secret: bytes, host: str) -> StoreService:
    """A node; not started."""
    use_ports(settings.cluster.ports)
    tls = cluster_tls(settings.cluster, secret)
    return StoreService(
        node_id,
        settings.store,
        secret,
        host=host,
        make_policy=partial(make_policy, settings.cache.eviction_policy),
        make_disk=_disk(settings, node_id),
        transport=settings.transfer.transport,
        transports=transports_for(tls),
        tls=tls,
    )


def _disk(settings: Settings, node_id: str) -> Callable[[int, Quota], DiskStore] | None:
    """Makes the disk below the node's memory, from the bytes of a row and tenants' quotas; None: no disk."""
    path = settings.store.disk_path
    if path is None:
        return None
    folder, limit_bytes = Path(path).expanduser() / node_id, settings.store.disk_size
    policy = partial(make_policy, settings.cache.eviction_policy)

    kind = {"sealed": True} if settings.cache.sealed else {}  # what was stored plain is not served any more

    def make(row_bytes: int, quota: Quota) -> DiskStore:
        options = DiskOptions(is_admission_on=False, policy=policy, quota=quota)
        namespace = Namespace.of({"store": STORE_ROLE, "block_bytes": row_bytes, **kind})
        return DiskStore(folder, limit_bytes, row_bytes, namespace, options=options)

    return make
