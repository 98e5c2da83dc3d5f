"""Makes both ends of the cluster's store from the settings: a node, and a worker's clients. Must not import Ray."""

import asyncio
import logging
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from kvrelay.cluster.registry.members import STORE_ROLE
from kvrelay.cluster.store.client import ClientOptions
from kvrelay.cluster.store.peer_blocks import PeerBlocks
from kvrelay.cluster.store.remote_store import RemoteStore
from kvrelay.cluster.store.service import StoreService
from kvrelay.config import Settings
from kvrelay.kvcache.eviction.policies import EvictionPolicy, make_policy
from kvrelay.kvcache.stores.codecs import Codec
from kvrelay.kvcache.stores.disk.tier import DiskOptions, DiskStore
from kvrelay.kvcache.stores.namespace import Namespace
from kvrelay.kvcache.stores.placement import StoreAddress
from kvrelay.kvcache.stores.store import BlockStore
from kvrelay.kvtransfer.paths.selection import transports_for
from kvrelay.plane.tls import cluster_tls
from kvrelay.types import KvMemory

if TYPE_CHECKING:
    from kvrelay.engine.worker.service import WorkerService

logger = logging.getLogger(__name__)


def make_service(node_id: str, settings: Settings, secret: bytes, host: str) -> StoreService:
    """A node; not started."""
    tls = cluster_tls(settings.cluster, secret)
    return StoreService(
        node_id,
        settings.store,
        secret,
        host=host,
        make_policy=_policy(settings),
        make_disk=_disk(settings, node_id),
        transport=settings.transfer.transport,
        transports=transports_for(tls),
        tls=tls,
    )


def _policy(settings: Settings) -> Callable[[int], EvictionPolicy]:
    return lambda num_rows: make_policy(settings.cache.eviction_policy, num_rows)


def _disk(settings: Settings, node_id: str) -> Callable[[int], BlockStore] | None:
    """Makes the disk below the node's memory, from the bytes of a row; None: no disk."""
    path = settings.store.disk_path
    if path is None:
        return None
    folder, limit_bytes = Path(path).expanduser() / node_id, settings.store.disk_bytes
    options = DiskOptions(
        is_admission_on=False, policy=_policy(settings), quota_bytes=settings.store.tenant_quota_bytes
    )

    def make(row_bytes: int) -> BlockStore:
        namespace = Namespace.of({"store": STORE_ROLE, "block_bytes": row_bytes})
        return DiskStore(folder, limit_bytes, row_bytes, namespace, options=options)

    return make


class ClusterStores:
    """A worker process's clients of the store: made on demand, updated when nodes change. A ClusterStore."""

    def __init__(self, settings: Settings, secret: bytes, *, worker_id: str, host: str) -> None:
        self._settings, self._secret, self._worker_id, self._host = settings, secret, worker_id, host
        self._nodes: tuple[StoreAddress, ...] = ()
        self._made: list[RemoteStore] = []

    def __call__(self, block_bytes: int, namespace: bytes, codec: Codec, memory: KvMemory | None) -> RemoteStore:
        transfer, tls = self._settings.transfer, cluster_tls(self._settings.cluster, self._secret)
        store = RemoteStore(
            block_bytes,
            namespace,
            ClientOptions(
                self._secret,
                self._worker_id,
                self._host,
                num_replicas=self._settings.store.replicas,
                transport=transfer.transport,
                transports=transports_for(tls),
                tls=tls,
            ),
            codec=codec,
            memory=memory,
            nodes=self._nodes,
        )
        self._made.append(store)
        return store

    async def share_host_tier(self, worker: "WorkerService") -> None:
        """Let other workers read this one's host tier; not where blocks are compressed in transit."""
        engine = worker.thread.engine
        if engine is None or engine.tiers is None or not self._made or not self._made[0].is_shareable:
            return
        store = self._made[0]
        blocks = PeerBlocks(
            worker.worker_id,
            worker.epoch,
            engine.tiers.controller.host,
            store.shared_keys,
            call=lambda work: worker.thread.call(lambda engine: work()),
            post=lambda work: worker.thread.post(lambda engine: work()),
            is_alive=worker.healthy,
        )
        await asyncio.to_thread(store.share, blocks)

    def set_nodes(self, nodes: Sequence[StoreAddress]) -> None:
        """All live nodes, whenever they change. Any thread."""
        if tuple(nodes) != self._nodes:
            logger.info("nodes of the KV store: %s", ", ".join(node.node_id for node in nodes) or "none")
        self._nodes = tuple(nodes)
        for store in self._made:
            store.set_nodes(self._nodes)
