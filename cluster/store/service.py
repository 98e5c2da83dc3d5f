"""A node of the cluster's store: its memory, blocks, server and repair. Must not import Ray.

Hosted by an actor (actor.py), or by a plain process (process.py).
"""

import logging
import time
from collections.abc import Callable, Mapping, Sequence

from kvrelay.cluster.store.node import StoreNode
from kvrelay.cluster.store.repair import Repairer
from kvrelay.kvcache.eviction.policies import EvictionPolicy, Lru
from kvrelay.kvcache.stores.placement import StoreAddress
from kvrelay.kvcache.stores.store import BlockStore
from kvrelay.kvtransfer.paths.selection import TRANSPORTS
from kvrelay.kvtransfer.slabs.client import SlabPeer
from kvrelay.kvtransfer.slabs.server import SlabServer
from kvrelay.kvtransfer.slabs.slabs import SharedSlab, allocate_slab, free_slab
from kvrelay.kvtransfer.transports.base import Transport
from kvrelay.plane.tls import ClusterTls
from kvrelay.settings.cache import StoreSettings

logger = logging.getLogger(__name__)


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
