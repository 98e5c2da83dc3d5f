"""A node of the cluster's store: its memory, blocks, server and repair. Must not import Ray.

Hosted by an actor (actor.py), or by a plain process (process.py).
"""

import time
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path

from kvrelay.cluster.registry.members import STORE_ROLE
from kvrelay.cluster.store.node import StoreNode
from kvrelay.cluster.store.repair import Repairer
from kvrelay.config import Settings
from kvrelay.kvcache.eviction.policies import EvictionPolicy, Lru, make_policy
from kvrelay.kvcache.stores.disk.tier import DiskOptions, DiskStore
from kvrelay.kvcache.stores.namespace import Namespace
from kvrelay.kvcache.stores.placement import StoreAddress
from kvrelay.kvcache.stores.store import BlockStore
from kvrelay.kvtransfer.paths.selection import TRANSPORTS, transports_for
from kvrelay.kvtransfer.slabs.client import SlabPeer
from kvrelay.kvtransfer.slabs.server import SlabServer
from kvrelay.kvtransfer.slabs.slabs import SharedSlab, allocate_slab, free_slab
from kvrelay.kvtransfer.transports.base import Transport
from kvrelay.plane.tls import ClusterTls, cluster_tls
from kvrelay.settings.cache import StoreSettings


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
        make_disk: Callable[[int], BlockStore] | None = None,
        transport: str = "auto",
        transports: Mapping[str, Transport] = TRANSPORTS,
        tls: ClusterTls | None = None,
        lease_s: float = 10.0,
        stall_s: float = 1.0,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._settings, self._secret, self._host, self._tls, self._stall_s = settings, secret, host, tls, stall_s
        self._memory = allocate_slab(settings.memory_bytes)
        self.node = StoreNode(
            node_id,
            self._memory,
            make_policy,
            tenant_quota_bytes=settings.tenant_quota_bytes,
            make_disk=make_disk,
            clock=clock,
        )
        self._slab = SharedSlab(self._memory, secret, host, transport=transport, transports=transports)
        self.repair = Repairer(self.node, self._peer, num_replicas=settings.replicas)
        self.server = SlabServer(self._slab, self.node, secret, host, lease_s=lease_s, stall_s=stall_s, tls=tls)

    def _peer(self, address: StoreAddress) -> SlabPeer:
        return SlabPeer(
            address.host,
            address.port,
            self._secret,
            [self._slab],
            peer_id=self.node.node_id,
            block_bytes=self.node.block_bytes,
            answer_s=self._stall_s,
            stall_s=self._stall_s,
            tls=self._tls,
        )

    async def start(self, port: int = 0) -> StoreAddress:
        """Start everything; returns where it listens. Raises BackendUnavailable."""
        await self._slab.start()
        await self.server.start(port)
        self.repair.start()
        return StoreAddress(
            self.node.node_id, self._host, self.server.port, self._settings.memory_bytes, self.node.epoch
        )

    def set_nodes(self, nodes: Sequence[StoreAddress]) -> None:
        """All live nodes, whenever they change; this one counts whether listed or not."""
        self.repair.set_nodes(nodes)

    async def aclose(self) -> None:
        """Stop repair, close every connection, and finish writes to disk."""
        await self.repair.aclose()
        await self.server.aclose()
        await self._slab.aclose()
        await self.node.aclose()
        free_slab(self._memory)


def make_service(node_id: str, settings: Settings, secret: bytes, host: str) -> StoreService:
    """A node; not started."""
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


def _disk(settings: Settings, node_id: str) -> Callable[[int], BlockStore] | None:
    """Makes the disk below the node's memory, from the bytes of a row; None: no disk."""
    path = settings.store.disk_path
    if path is None:
        return None
    folder, limit_bytes = Path(path).expanduser() / node_id, settings.store.disk_bytes
    policy = partial(make_policy, settings.cache.eviction_policy)
    options = DiskOptions(
        is_admission_on=False,
        policy=policy,
        quota_bytes=settings.store.tenant_quota_bytes,
    )

    def make(row_bytes: int) -> BlockStore:
        namespace = Namespace.of({"store": STORE_ROLE, "block_bytes": row_bytes})
        return DiskStore(folder, limit_bytes, row_bytes, namespace, options=options)

    return make
