"""RemoteStore: the cluster's own store as a worker's tier. A BlockStore.

Blocking calls over a StoreClient, whose event loop runs on a thread of its own. Must not import Ray.
"""

import asyncio
import hashlib
import threading
import time
from collections.abc import Coroutine, Mapping, Sequence
from dataclasses import replace
from typing import Any, TypeVar

from kvrelay.cluster.store.client import PUT_TIMEOUT_S, BlockBuffer, StoreClient, offset_in
from kvrelay.cluster.store.peer_blocks import PeerBlocks, SharedKeys
from kvrelay.errors import BackendUnavailable, StoreError
from kvrelay.kvcache.stores.codecs import Codec, NoCodec
from kvrelay.kvcache.stores.placement import StoreAddress
from kvrelay.kvcache.stores.store import BlockMeta, StoreCounters, StoreStats
from kvrelay.kvtransfer.paths.selection import TRANSPORTS
from kvrelay.kvtransfer.transports.base import Transport
from kvrelay.plane.tls import ClusterTls
from kvrelay.types import BlockHash, KvMemory

Result = TypeVar("Result")


class RemoteStore:
    """Blocks of one namespace in the cluster's store.

    14 attributes: what it knows of the caller's blocks, and its thread.
    """

    name = "cluster"

    def __init__(
        self,
        block_bytes: int,
        namespace: bytes,
        secret: bytes,
        *,
        worker_id: str,
        host: str,
        codec: Codec | None = None,
        memory: KvMemory | None = None,
        nodes: Sequence[StoreAddress] = (),
        num_replicas: int = 2,
        answer_s: float = 1.0,
        stall_s: float = 1.0,
        transport: str = "auto",
        transports: Mapping[str, Transport] = TRANSPORTS,
        tls: ClusterTls | None = None,
        tamper: Any = None,
    ) -> None:
        """A store that is not started.

        Args:
            namespace: part of every key: blocks of other models, dtypes and codecs have other keys.
            secret: the cluster's.
            memory: the slab that usually holds the caller's blocks (the host tier): read and written without a copy.
            answer_s: timeout of requests that move no block data.
            stall_s: timeout of a read without progress.
            tamper: fault injection for tests.
        """
        self._block_bytes, self._namespace, self._memory = block_bytes, namespace, memory
        codec = codec or NoCodec()
        self.keeps_checksums = codec.name == "none"
        self._is_in_place = memory is not None and codec.name == "none" and transport != "nixl"
        self.is_shareable = memory is not None and codec.name == "none"
        self.shared_keys = SharedKeys(self.key)
        self._wanted_nodes = tuple(nodes)
        self._client = StoreClient(
            secret,
            worker_id=worker_id,
            host=host,
            codec=codec,
            transit_bytes=codec.encoded_bytes(block_bytes) or codec.most_bytes(block_bytes),
            memory=memory,
            num_replicas=num_replicas,
            answer_s=answer_s,
            stall_s=stall_s,
            transport=transport,
            transports=transports,
            tls=tls,
            tamper=tamper,
            shared_keys=self.shared_keys,
        )
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, name="kv-remote", daemon=True)
        self._counters = StoreCounters()
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

    def load(self, hashes: Sequence[BlockHash], into: Sequence[memoryview]) -> list[bool]:
        if not hashes or not self._is_open:
            return [False] * len(hashes)
        began = time.monotonic()
        buffers = [
            BlockBuffer(self.key(digest), view, self._offset(view)) for digest, view in zip(hashes, into, strict=True)
        ]
        loaded = self._wait(self._client.load(buffers))
        num_bytes = sum(view.nbytes for view, good in zip(into, loaded, strict=True) if good)
        self._counters.add(loaded_blocks=sum(loaded), loaded_bytes=num_bytes, load_s=time.monotonic() - began)
        return loaded

    def store(
        self, hashes: Sequence[BlockHash], blocks: Sequence[memoryview], metas: Sequence[BlockMeta]
    ) -> list[bool]:
        if not hashes or not self._is_open:
            return [False] * len(hashes)
        began = time.monotonic()
        keys = [self.key(digest) for digest in hashes]
        there = self._wait(self._client.exist(keys))
        kept = {key for key, here in zip(keys, there, strict=True) if here}
        new = {
            key: BlockBuffer(key, view, self._offset(view), meta, self.key(meta.parent) if meta.parent else b"")
            for key, view, meta in zip(keys, blocks, metas, strict=True)
            if key not in kept
        }
        taken = self._wait(self._client.store(list(new.values())))
        stored = {key for key, is_kept in zip(new, taken, strict=True) if is_kept}
        self._counters.add(
            stored_blocks=len(stored),
            stored_bytes=sum(new[key].view.nbytes for key in stored),
            store_s=time.monotonic() - began,
            rejected_blocks=len(new) - len(stored),
        )
        return [key in kept or key in stored for key in keys]

    def delete(self, hashes: Sequence[BlockHash]) -> None:
        keys = [self.key(digest) for digest in hashes]
        if self._is_open:
            self._wait(self._client.links.everywhere(lambda peer: peer.forget(keys)))

    def pin(self, hashes: Sequence[BlockHash], ttl_s: float) -> None:
        """Pin these blocks for `ttl_s` seconds, within the nodes' limits; 0 ends their pins."""
        keys = [self.key(digest) for digest in hashes]
        self._wait(self._client.links.everywhere(lambda peer: peer.pin(keys, ttl_s)))

    def replicate(self, hashes: Sequence[BlockHash]) -> int:
        """Have every node copy its blocks of these to where placement wants them; returns the number of copies."""
        keys = [self.key(digest) for digest in hashes]
        return sum(self._wait(self._client.links.everywhere(lambda peer: peer.replicate(keys, within_s=PUT_TIMEOUT_S))))

    def stats(self) -> StoreStats:
        return replace(self._counters.read(), corrupt_blocks=self._client.links.num_corrupt)

    def describe(self) -> list[bytes]:
        """The state of every node that answers, as JSON."""
        return self._wait(self._client.links.everywhere(lambda peer: peer.describe()))

    def share(self, blocks: PeerBlocks) -> int:
        """Let other workers read the caller's slab; returns the port. Raises BackendUnavailable."""
        port = self._wait(self._client.share(blocks))
        self._is_sharing = True
        return port

    def host_tier_changed(self, stored: Sequence[BlockHash], removed: Sequence[BlockHash]) -> None:
        """Announce a change of the caller's host tier. Does not wait; called on the engine's thread."""
        if not self.is_shareable:
            return
        added, gone = self.shared_keys.changed(stored, removed)
        if self._is_open and self._is_sharing:
            asyncio.run_coroutine_threadsafe(self._client.announce(added, gone), self._loop)

    # ---- internals

    def _offset(self, view: memoryview) -> int | None:
        """The block's offset in the caller's slab.

        None: staged (encoded, elsewhere, or over NIXL, whose reads cannot be cancelled).
        """
        if view.nbytes > self._block_bytes:
            raise ValueError(f"a block of {view.nbytes} bytes, not {self._block_bytes}")
        if self._memory is None or not self._is_in_place:
            return None
        return offset_in(self._memory, view)
