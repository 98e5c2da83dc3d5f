"""RemoteStore: the cluster's own store as a worker's tier. A BlockStore.

Blocking calls over a StoreClient, whose event loop runs on a thread of its own. Must not import Ray.
"""

import asyncio
import hashlib
import logging
import threading
import time
from collections.abc import Coroutine, Mapping, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any, TypeVar

from kvrelay.cluster.store.client import BlockBuffer, ClientOptions, StoreClient
from kvrelay.cluster.store.peer_blocks import PeerBlocks
from kvrelay.config import Settings
from kvrelay.errors import BackendUnavailable, StoreError
from kvrelay.kvcache.stores.codecs import Codec, NoCodec
from kvrelay.kvcache.stores.placement import StoreAddress
from kvrelay.kvcache.stores.store import BlockStore, StoreStats
from kvrelay.kvtransfer.paths.selection import transports_for
from kvrelay.plane.tls import cluster_tls
from kvrelay.types import BlockHash, BlockMeta, KvMemory

if TYPE_CHECKING:
    from kvrelay.engine.worker.service import WorkerService

logger = logging.getLogger(__name__)

Result = TypeVar("Result")


class RemoteStore(BlockStore):
    """Blocks of one namespace in the cluster's store.

    More than 12 attributes: what it knows of the caller's blocks, its counters, and its thread.
    """

    name, supports_pins = "cluster", True

    def __init__(
        self,
        block_bytes: int,
        namespace: bytes,
        options: ClientOptions,
        *,
        codec: Codec | None = None,
        memory: KvMemory | None = None,
        nodes: Sequence[StoreAddress] = (),
    ) -> None:
        """A store that is not started.

        Args:
            namespace: part of every key: blocks of other models, dtypes and codecs have other keys.
            memory: the slab that holds the caller's blocks (the host tier), to read and write them without a copy.
        """
        super().__init__(time.monotonic)
        self._block_bytes, self._namespace = block_bytes, namespace
        codec = codec or NoCodec()
        self.keeps_checksums = codec.name == "none"
        self.is_shareable = memory is not None and codec.keeps_bytes
        self.shared: dict[bytes, BlockHash] = {}  # the host tier's blocks by key; the engine's thread writes
        self._wanted_nodes = tuple(nodes)
        self._client = StoreClient(
            options,
            codec=codec,
            transit_bytes=codec.most_bytes(block_bytes),
            memory=memory if self.is_shareable else None,
            shared=self.shared,
        )
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, name="kv-remote", daemon=True)
        self._is_open = self._is_sharing = False

    # ---- life

    def start(self) -> None:
        """Start the loop and export the slabs. Raises StoreError."""
        self._thread.start()
        self._is_open = True
        try:
            self._wait(self._client.start(self._wanted_nodes))
        except BackendUnavailable as error:
            self.close()
            raise StoreError(self.name, str(error)) from error

    def close(self) -> None:
        """Close every connection and the loop. Blocks stay in the store."""
        if not self._is_open:
            return
        self._is_open = False
        self._wait(self._client.aclose())
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join()
        self._loop.close()

    def set_nodes(self, nodes: Sequence[StoreAddress]) -> None:
        """The live nodes of the store, whenever they change. Any thread, also before start()."""
        self._wanted_nodes = tuple(nodes)
        if self._is_open:
            self._loop.call_soon_threadsafe(self._client.links.set_nodes, self._wanted_nodes)

    def _wait(self, work: Coroutine[Any, Any, Result]) -> Result:
        return asyncio.run_coroutine_threadsafe(work, self._loop).result()

    # ---- BlockStore

    def key(self, digest: BlockHash) -> bytes:
        """[16] bytes: a block's key in the store, different in every namespace."""
        return hashlib.blake2b(self._namespace + digest, digest_size=16).digest()

    def contains(self, hashes: Sequence[BlockHash]) -> list[bool]:
        if not hashes or not self._is_open:
            return [False] * len(hashes)
        return self._wait(self._client.contains([self.key(digest) for digest in hashes]))

    def _find(self, hashes: Sequence[BlockHash]) -> list[bool]:
        if not hashes or not self._is_open:
            return [False] * len(hashes)
        return self._wait(self._client.exist([self.key(digest) for digest in hashes]))

    def _load(self, hashes: Sequence[BlockHash], into: Sequence[memoryview], metas: Sequence[BlockMeta]) -> list[bool]:
        if not hashes or not self._is_open:
            return [False] * len(hashes)
        views = map(self._fitting, into)
        return self._wait(self._client.load([*map(BlockBuffer, map(self.key, hashes), views, metas)]))

    def _store(self, new: Mapping[BlockHash, tuple[memoryview, BlockMeta]]) -> set[BlockHash]:
        buffers = [
            BlockBuffer(self.key(digest), self._fitting(view), meta, self.key(meta.parent) if meta.parent else b"")
            for digest, (view, meta) in new.items()
        ]
        stored = self._wait(self._client.store(buffers)) if self._is_open else [False] * len(new)
        return {digest for digest, is_stored in zip(new, stored, strict=True) if is_stored}

    def delete(self, hashes: Sequence[BlockHash]) -> None:
        keys = [self.key(digest) for digest in hashes]
        if self._is_open:
            self._wait(self._client.links.everywhere(lambda peer: peer.forget(keys)))

    def pin(self, hashes: Sequence[BlockHash], ttl_s: float) -> None:
        keys = [self.key(digest) for digest in hashes]
        self._wait(self._client.links.everywhere(lambda peer: peer.pin(keys, ttl_s)))

    def stats(self) -> StoreStats:
        return replace(super().stats(), corrupt_blocks=self._client.links.num_corrupt)

    def share(self, blocks: PeerBlocks) -> int:
        """Let other workers read the caller's slab; returns the port. Raises BackendUnavailable."""
        port = self._wait(self._client.share(blocks))
        self._is_sharing = True
        return port

    def host_tier_changed(self, stored: Sequence[BlockHash], removed: Sequence[BlockHash]) -> None:
        """Announce a change of the caller's host tier. Does not wait; called on the engine's thread."""
        if not self.is_shareable:
            return
        added, gone = {self.key(digest): digest for digest in stored}, [self.key(digest) for digest in removed]
        for key in gone:
            self.shared.pop(key, None)
        self.shared.update(added)
        if self._is_open and self._is_sharing:
            asyncio.run_coroutine_threadsafe(self._client.announce(list(added), gone), self._loop)

    def _fitting(self, view: memoryview) -> memoryview:
        if view.nbytes > self._block_bytes:
            raise ValueError(f"a block of {view.nbytes} bytes, not {self._block_bytes}")
        return view


class ClusterStores:
    """A worker process's clients of the store: made on demand, updated when nodes change. A ClusterStore."""

    def __init__(self, settings: Settings, secret: bytes, *, worker_id: str, host: str) -> None:
        transfer, tls = settings.transfer, cluster_tls(settings.cluster, secret)
        self._options = ClientOptions(
            secret,
            worker_id,
            host,
            num_replicas=settings.store.replicas,
            transport=transfer.transport,
            transports=transports_for(tls),
            tls=tls,
        )
        self._nodes: tuple[StoreAddress, ...] = ()
        self._made: list[RemoteStore] = []

    def __call__(self, block_bytes: int, namespace: bytes, codec: Codec, memory: KvMemory | None) -> RemoteStore:
        store = RemoteStore(block_bytes, namespace, self._options, codec=codec, memory=memory, nodes=self._nodes)
        self._made.append(store)
        return store

    async def share_host_tier(self, worker: "WorkerService") -> None:
        """Let other workers read this one's host tier; not where blocks are compressed in transit."""
        host = worker.host_tier
        if host is None or not self._made or not self._made[0].is_shareable:
            return
        store = self._made[0]
        blocks = PeerBlocks(
            worker.worker_id,
            worker.epoch,
            host,
            store.shared,
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
