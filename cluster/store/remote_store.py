"""RemoteStore: the cluster's own store, as a worker's tier. A BlockStore.

Knows the nodes and which of them keep which block (kvcache's placement), reads from them and lets them read (slab_client).
A node that is dead or does not answer costs one wait; then it rests, and its replicas serve. Its methods block; the
network is a loop's on a thread of its own. Must not import Ray.
"""

import asyncio
import hashlib
import logging
import threading
import time
from collections import defaultdict
from collections.abc import Coroutine, Mapping, Sequence
from dataclasses import replace
from typing import Any, TypeVar

from kvrelay.cluster.store.links import NodeLink, StoreLinks
from kvrelay.cluster.store.peer_blocks import PeerBlocks, SharedKeys
from kvrelay.cluster.store.remote_blocks import IN_PLACE, STAGED, BlockBuffer, BlockStager, cut_in_batches, offset_in
from kvrelay.errors import BackendUnavailable, PeerLost, StoreError
from kvrelay.kvcache.stores.codecs import Codec, NoCodec
from kvrelay.kvcache.stores.counters import StoreCounters
from kvrelay.kvcache.stores.placement import StoreAddress
from kvrelay.kvcache.stores.store import BlockMeta, StoreStats
from kvrelay.kvtransfer.paths.selection import TRANSPORTS
from kvrelay.kvtransfer.slabs.client import BlockRequest, SlabPeer
from kvrelay.kvtransfer.slabs.messages import BlockOffer
from kvrelay.kvtransfer.slabs.server import SlabServer
from kvrelay.kvtransfer.slabs.slabs import SharedSlab, StuckRead
from kvrelay.kvtransfer.slabs.staging import StagingSlab
from kvrelay.kvtransfer.transports.base import Transport
from kvrelay.plane.tls import ClusterTls
from kvrelay.types import BlockHash, KvMemory

logger = logging.getLogger(__name__)

Result = TypeVar("Result")

STAGING_BYTES = 32 << 20
_LEAST_PLACES, _MOST_PLACES = 4, 64
_BATCH_BYTES = 64 << 20  # of one request to one node
_PUT_BYTES, _PUTS_AT_ONCE = 8 << 20, 3
_PUT_S = 10.0


class RemoteStore:
    """Blocks of one namespace in the cluster's store."""

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
        """`memory`: the slab in which the caller's blocks usually lie (the host tier): read and written without a copy."""
        self._block_bytes, self._namespace, self._secret = block_bytes, namespace, secret
        self._codec = codec or NoCodec()
        self.keeps_checksums = self._codec.name == "none"
        self._travel_bytes = self._codec.encoded_bytes(block_bytes) or self._codec.most_bytes(block_bytes)
        self._worker_id, self._host, self._memory = worker_id, host, memory
        self._num_replicas, self._answer_s, self._stall_s = num_replicas, answer_s, stall_s
        self._transport, self._transports, self._tls, self._tamper = transport, transports, tls, tamper
        self._wanted_nodes = tuple(nodes)
        self._links = StoreLinks(self._make_peer, num_replicas=num_replicas, on_connected=self._announce_all)
        self._slabs: list[SharedSlab] = []
        self._staging: StagingSlab | None = None
        self._stager: BlockStager | None = None
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, name="kv-remote", daemon=True)
        self._counters = StoreCounters()
        self._is_open = False
        self.shared_keys = SharedKeys(self.key)
        self._peer_blocks: PeerBlocks | None = None
        self._peer_server: SlabServer | None = None

    # ---- life

    def start(self) -> None:
        """Raises StoreError."""
        self._thread.start()
        self._is_open = True
        try:
            self._wait(self._open())
        except BackendUnavailable as error:
            self.close()
            raise StoreError(self.name, str(error)) from error

    async def _open(self) -> None:
        places = min(max(STAGING_BYTES // self._travel_bytes, _LEAST_PLACES), _MOST_PLACES)
        self._staging = StagingSlab(self._travel_bytes, places)
        self._stager = BlockStager(self._staging.memory, self._memory, self._codec)
        for memory in (self._staging.memory, *([self._memory] if self._memory is not None else [])):
            slab = SharedSlab(memory, self._secret, self._host, transport=self._transport, transports=self._transports)
            self._slabs.append(slab)
            await slab.start()
        self._links.set_nodes(self._wanted_nodes)

    def close(self) -> None:
        """Let go of every node. Blocks stay in the store."""
        if not self._is_open:
            return
        self._is_open = False
        self._wait(self._shut())
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join()
        self._loop.close()

    async def _shut(self) -> None:
        if self._peer_server is not None and self._peer_blocks is not None:
            self._peer_blocks.is_closed = True
            await self._peer_server.aclose()
        await self._links.aclose()
        for slab in self._slabs:
            await slab.aclose()
        if self._staging is not None:
            self._staging.free()

    def set_nodes(self, nodes: Sequence[StoreAddress]) -> None:
        """The live nodes of the store, whenever they change. From any thread; before start() too."""
        self._wanted_nodes = tuple(nodes)
        if self._is_open:
            self._loop.call_soon_threadsafe(self._links.set_nodes, self._wanted_nodes)

    def _wait(self, work: Coroutine[Any, Any, Result]) -> Result:
        return asyncio.run_coroutine_threadsafe(work, self._loop).result()

    # ---- BlockStore

    def key(self, digest: BlockHash) -> bytes:
        """A block's name in the store: blocks of other models, types and codecs have other names."""
        return hashlib.blake2b(self._namespace + digest, digest_size=16).digest()

    def contains(self, hashes: Sequence[BlockHash]) -> list[bool]:
        if not hashes or not self._is_open:
            return [False] * len(hashes)
        return self._wait(self._contains([self.key(digest) for digest in hashes]))

    def load(self, hashes: Sequence[BlockHash], into: Sequence[memoryview]) -> list[bool]:
        if not hashes or not self._is_open:
            return [False] * len(hashes)
        began = time.monotonic()
        buffers = [
            BlockBuffer(self.key(digest), view, self._offset(view)) for digest, view in zip(hashes, into, strict=True)
        ]
        loaded = self._wait(self._load(buffers))
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
        there = self._wait(self._exist(keys))
        kept = {key for key, here in zip(keys, there, strict=True) if here}
        new = {
            key: BlockBuffer(key, view, self._offset(view), meta, self.key(meta.parent) if meta.parent else b"")
            for key, view, meta in zip(keys, blocks, metas, strict=True)
            if key not in kept
        }
        taken = self._wait(self._store(list(new.values())))
        stored = {key for key, is_kept in zip(new, taken, strict=True) if is_kept}
        self._counters.add(
            stored_blocks=len(stored), stored_bytes=sum(new[key].view.nbytes for key in stored),
            store_s=time.monotonic() - began, rejected_blocks=len(new) - len(stored),
        )  # fmt: skip
        return [key in kept or key in stored for key in keys]

    def delete(self, hashes: Sequence[BlockHash]) -> None:
        keys = [self.key(digest) for digest in hashes]
        if self._is_open:
            self._wait(self._links.everywhere(lambda peer: peer.forget(keys)))

    def pin(self, hashes: Sequence[BlockHash], ttl_s: float) -> None:
        """Keep these for so long, within the nodes' limits; 0 ends it."""
        keys = [self.key(digest) for digest in hashes]
        self._wait(self._links.everywhere(lambda peer: peer.pin(keys, ttl_s)))

    def replicate(self, hashes: Sequence[BlockHash]) -> int:
        """Have every node that holds some of these bring them to where placement wants them; how many copies that took."""
        keys = [self.key(digest) for digest in hashes]
        return sum(self._wait(self._links.everywhere(lambda peer: peer.replicate(keys, within_s=_PUT_S))))

    def stats(self) -> StoreStats:
        return replace(self._counters.read(), corrupt_blocks=self._links.num_corrupt)

    def speed(self) -> tuple[float, float]:
        """(bytes per second of loads so far, seconds until the first byte); (0, 0): not measured. For the cost model."""
        stats = self.stats()
        return (stats.loaded_bytes / stats.load_s, self._answer_s / 1000) if stats.loaded_bytes else (0.0, 0.0)

    def describe(self) -> list[bytes]:
        """What every node that answers says of itself, as JSON."""
        return self._wait(self._links.everywhere(lambda peer: peer.describe()))

    @property
    def is_shareable(self) -> bool:
        """Whether other workers can read the caller's blocks as they are."""
        return self._memory is not None and self._codec.name == "none"

    def share(self, blocks: PeerBlocks) -> int:
        """Let other workers read the caller's slab; returns the port. Raises BackendUnavailable."""
        return self._wait(self._start_sharing(blocks))

    async def _start_sharing(self, blocks: PeerBlocks) -> int:
        assert self._memory is not None
        server = SlabServer(
            self._slabs[IN_PLACE], blocks, self._secret, self._host, stall_s=self._stall_s, tls=self._tls
        )
        await server.start()
        self._peer_blocks, self._peer_server = blocks, server
        await asyncio.gather(*(self._announce_all(node) for node in self._links.nodes))
        return server.port

    def host_tier_changed(self, stored: Sequence[BlockHash], removed: Sequence[BlockHash]) -> None:
        """Announce a change of the caller's host tier. Does not wait; called on the engine's thread."""
        if not self.is_shareable:
            return
        added, gone = self.shared_keys.changed(stored, removed)
        if self._is_open and self._peer_server is not None:
            asyncio.run_coroutine_threadsafe(self._announce(added, gone), self._loop)

    # ---- on the loop

    def _offset(self, view: memoryview) -> int | None:
        """Where a block lies in the caller's slab; None: it is staged. Always so: encoded; over NIXL, whose reads cannot
        be stopped."""
        if view.nbytes > self._block_bytes:
            raise ValueError(f"a block of {view.nbytes} bytes, not {self._block_bytes}")
        if self._memory is None or self._transport == "nixl" or self._codec.name != "none":
            return None
        return offset_in(self._memory, view)

    async def _contains(self, keys: Sequence[bytes]) -> list[bool]:
        """In the store, or at a worker that lends it."""
        found = await self._exist(keys)
        missing = [i for i, here in enumerate(found) if not here]
        for i, address in zip(missing, await self._find_holders([keys[i] for i in missing]), strict=True):
            found[i] = bool(address)
        return found

    async def _exist(self, keys: Sequence[bytes]) -> list[bool]:
        found = [False] * len(keys)
        order = self._links.order(keys)

        async def ask(node: NodeLink, chosen: list[int]) -> None:
            peer = await self._links.peer_of(node)
            if peer is not None:
                try:
                    for i, here in zip(chosen, await peer.exists([keys[i] for i in chosen]), strict=True):
                        found[i] |= here
                except PeerLost as error:
                    self._links.failed(node, error.why)

        await self._links.by_rank(order, found, ask)
        return found

    async def _load(self, buffers: Sequence[BlockBuffer]) -> list[bool]:
        loaded = [False] * len(buffers)
        staging = self._staging
        assert staging is not None
        order = self._links.order([buffer.key for buffer in buffers])

        async def ask(node: NodeLink, chosen: list[int]) -> None:
            for batch in cut_in_batches([buffers[i] for i in chosen], _BATCH_BYTES, staging.num_cells):
                await self._get(node, [buffers[chosen[i]] for i in batch], loaded, [chosen[i] for i in batch])

        await self._links.by_rank(order, loaded, ask)
        missing = [i for i, here in enumerate(loaded) if not here]
        if missing:
            at = await self._find_holders([buffers[i].key for i in missing])
            workers = [[self._links.worker(address)] if address else [] for address in at]
            found = [False] * len(missing)

            async def ask_worker(node: NodeLink, chosen: list[int]) -> None:
                await ask(node, [missing[i] for i in chosen])

            await self._links.by_rank(workers, found, ask_worker)
        return loaded

    async def _get(
        self, node: NodeLink, buffers: Sequence[BlockBuffer], loaded: list[bool], index: Sequence[int]
    ) -> None:
        """Bring one batch from one node, as far as it has it."""
        assert self._staging is not None and self._stager is not None
        staged = [i for i, buffer in enumerate(buffers) if buffer.offset is None]
        try:
            async with self._staging.reserve(len(staged)) as free:
                peer = await self._links.peer_of(node)
                if peer is None:
                    return
                places = dict(zip(staged, free, strict=True))
                sizes = await peer.get([self._wanted(buffer, places.get(i)) for i, buffer in enumerate(buffers)])
                good = [size == buffer.view.nbytes for size, buffer in zip(sizes, buffers, strict=True)]
                if staged:
                    good = await asyncio.to_thread(self._arrived, buffers, places, sizes)
        except PeerLost as error:
            self._links.failed(node, error.why)
        except StuckRead as error:
            if len(staged) < len(buffers):
                await asyncio.wait({error.read})  # the caller's own memory: it must not have it back before
            self._links.failed(node, error.why)
        else:
            for i, is_good in zip(index, good, strict=True):
                loaded[i] = is_good

    def _wanted(self, buffer: BlockBuffer, place: int | None) -> BlockRequest:
        if place is None:
            return BlockRequest(buffer.key, IN_PLACE, buffer.offset or 0, buffer.view.nbytes)
        return BlockRequest(buffer.key, STAGED, place, self._travel_bytes)

    def _arrived(self, buffers: Sequence[BlockBuffer], places: Mapping[int, int], sizes: Sequence[int]) -> list[bool]:
        stager = self._stager
        assert stager is not None
        return [
            stager.arrived(buffer, places[i], sizes[i]) if i in places and sizes[i] else sizes[i] == buffer.view.nbytes
            for i, buffer in enumerate(buffers)
        ]

    async def _store(self, buffers: Sequence[BlockBuffer]) -> list[bool]:
        """Every replica reads from us. Kept, where one of them keeps it."""
        kept = [False] * len(buffers)
        assert self._staging is not None
        few = asyncio.Semaphore(_PUTS_AT_ONCE)  # one is hashed while another is read

        async def put(batch: list[int]) -> None:
            async with few:
                for i in await self._store_batch([buffers[i] for i in batch]):
                    kept[batch[i]] = True

        async with asyncio.TaskGroup() as group:
            for batch in cut_in_batches(buffers, _PUT_BYTES, self._staging.num_cells):
                group.create_task(put(batch))
        return kept

    async def _store_batch(self, buffers: Sequence[BlockBuffer]) -> set[int]:
        assert self._staging is not None and self._stager is not None
        staged = [i for i, buffer in enumerate(buffers) if buffer.offset is None]
        async with self._staging.reserve(len(staged)) as free:
            offers = await asyncio.to_thread(self._stager.offers, buffers, dict(zip(staged, free, strict=True)))
            groups: dict[int, tuple[NodeLink, list[int]]] = {}
            for i, nodes in enumerate(self._links.order([buffer.key for buffer in buffers])):
                for node in nodes[: self._num_replicas] if offers[i] is not None else ():
                    groups.setdefault(id(node), (node, []))[1].append(i)
            putting = [self._put(node, chosen, buffers, offers) for node, chosen in groups.values()]
            return {i for answers in await asyncio.gather(*putting) for i in answers}

    async def _put(
        self, node: NodeLink, chosen: Sequence[int], buffers: Sequence[BlockBuffer], offers: Sequence[BlockOffer | None]
    ) -> list[int]:
        """Which of these the node keeps."""
        kept: list[int] = []
        peer = await self._links.peer_of(node)
        if peer is None:
            return kept
        try:
            for slab in (STAGED, IN_PLACE):
                some = [i for i in chosen if (buffers[i].offset is None) == (slab == STAGED)]
                if some:
                    answers = await peer.put(slab, [offer for i in some if (offer := offers[i])], within_s=_PUT_S)
                    kept += [i for i, is_kept in zip(some, answers, strict=True) if is_kept]
        except PeerLost as error:
            self._links.failed(node, error.why)
        return kept

    async def _find_holders(self, keys: Sequence[bytes]) -> list[str]:
        """ "host:port" of a worker that says it holds each of these, not this one; told by each key's first node."""
        places = [""] * len(keys)

        async def ask(node: NodeLink, chosen: list[int]) -> None:
            peer = await self._links.peer_of(node)
            if peer is not None:
                try:
                    answers = await peer.find_holders([keys[i] for i in chosen])
                except PeerLost as error:
                    self._links.failed(node, error.why)
                    return
                for i, address in zip(chosen, answers, strict=True):
                    places[i] = address

        await self._links.by_rank([nodes[:1] for nodes in self._links.order(keys)], [False] * len(keys), ask)
        me = "" if self._peer_server is None else f"{self._host}:{self._peer_server.port}"
        return ["" if place == me else place for place in places]

    async def _announce(self, added: Sequence[bytes], removed: Sequence[bytes]) -> None:
        """Tell each key's first node."""
        news: defaultdict[int, tuple[list[bytes], list[bytes]]] = defaultdict(lambda: ([], []))
        nodes: dict[int, NodeLink] = {}
        for which, keys in enumerate((added, removed)):
            for key, (node, *_) in zip(keys, self._links.order(keys) if self._links.nodes else (), strict=False):
                nodes[id(node)] = node
                news[id(node)][which].append(key)
        for name, (some, gone) in news.items():
            peer = await self._links.peer_of(nodes[name])
            if peer is not None and self._peer_server is not None:
                peer.announce(self._host, self._peer_server.port, some, gone)

    async def _announce_all(self, node: NodeLink) -> None:
        """A node that has just been connected, again or for the first time, knows nothing yet."""
        if self._peer_blocks is None or self._peer_server is None or node not in self._links.nodes:
            return
        keys = self.shared_keys.keys()
        mine = [key for key, (first, *_) in zip(keys, self._links.order(keys), strict=True) if first is node]
        peer = await self._links.peer_of(node)
        if peer is not None and mine:
            peer.announce(self._host, self._peer_server.port, mine, [])

    def _make_peer(self, address: StoreAddress) -> SlabPeer:
        return SlabPeer(
            address.host, address.port, self._secret, self._slabs, peer_id=self._worker_id,
            block_bytes=self._travel_bytes, answer_s=self._answer_s, stall_s=self._stall_s, tls=self._tls,
            tamper=self._tamper,
        )  # fmt: skip
