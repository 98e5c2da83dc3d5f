"""The asynchronous side of a client of the cluster's store: lookups, reads and writes over all nodes.

Knows the nodes and which of them keep which block (placement), reads from them, and lets them read. When a node does
not answer, the next replica is tried. Must not import Ray.
"""

import asyncio
import logging
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial

import msgspec
import numpy as np

from kvrelay.cluster.store.links import NodeLink, StoreLinks
from kvrelay.cluster.store.peer_blocks import PeerBlocks, SharedKeys
from kvrelay.errors import PeerLost
from kvrelay.kvcache.stores.codecs import Codec, CodecError
from kvrelay.kvcache.stores.placement import StoreAddress
from kvrelay.kvcache.stores.store import BlockMeta
from kvrelay.kvtransfer.mover.mover import xxh3_regions
from kvrelay.kvtransfer.paths.selection import TRANSPORTS
from kvrelay.kvtransfer.slabs.client import BlockRequest, SlabPeer
from kvrelay.kvtransfer.slabs.messages import BlockOffer
from kvrelay.kvtransfer.slabs.server import SlabServer
from kvrelay.kvtransfer.slabs.slabs import SharedSlab, StagingSlab, StuckRead
from kvrelay.kvtransfer.transports.base import Transport
from kvrelay.plane.tls import ClusterTls
from kvrelay.types import KvMemory

logger = logging.getLogger(__name__)

STAGING_BYTES = 32 << 20
_MIN_CELLS, _MAX_CELLS = 4, 64
_BATCH_BYTES = 64 << 20  # of one request to one node
_PUT_BYTES, _MAX_PUTS = 8 << 20, 3  # of one write; writes at once
PUT_TIMEOUT_S = 10.0


STAGED, IN_PLACE = 0, 1  # a client's slabs: its own staging, and the caller's


@dataclass(frozen=True, slots=True)
class BlockBuffer:
    """One block of a call: its key in the store and its local bytes."""

    key: bytes
    view: memoryview
    offset: int | None  # in the caller's slab; None: it is staged
    meta: BlockMeta | None = None
    parent: bytes = b""  # the key of the block before it


def offset_in(memory: KvMemory, view: memoryview) -> int | None:
    """Byte offset of the view in this memory; None when it is not entirely inside."""
    address = np.frombuffer(view, dtype=np.uint8).ctypes.data
    offset = int(address - memory.address)
    return offset if offset >= 0 and offset + view.nbytes <= memory.layout.num_bytes else None


def cut_in_batches(buffers: Sequence[BlockBuffer], max_bytes: int, max_staged: int) -> Iterator[list[int]]:
    """Batches of indices, in order: each at most `max_bytes` (or one block) and `max_staged` staged blocks."""
    batch: list[int] = []
    num_bytes = num_staged = 0
    for index, buffer in enumerate(buffers):
        is_staged = buffer.offset is None
        if batch and (num_bytes + buffer.view.nbytes > max_bytes or num_staged + is_staged > max_staged):
            yield batch
            batch, num_bytes, num_staged = [], 0, 0
        batch.append(index)
        num_bytes += buffer.view.nbytes
        num_staged += is_staged
    if batch:
        yield batch


class BlockStager:
    """Encodes and checksums blocks for others to read, and decodes received ones. Methods block."""

    def __init__(self, staging: KvMemory, memory: KvMemory | None, codec: Codec) -> None:
        assert staging.view is not None
        self._staging, self._memory, self._codec = staging.view, memory, codec
        self._keeps_checksums = codec.name == "none"

    def offers(self, buffers: Sequence[BlockBuffer], cells: Mapping[int, int]) -> list[BlockOffer | None]:
        """Offers of these blocks, checksums included; None: cannot be encoded. `cells`: staging offsets, by index."""
        bare = [self._offer(buffer, cells.get(i, 0)) for i, buffer in enumerate(buffers)]
        groups: defaultdict[tuple[bool, int], list[int]] = defaultdict(list)
        for i, offer in enumerate(bare):
            if offer is not None and not offer.checksum:
                groups[buffers[i].offset is None, offer.num_bytes].append(i)
        for (is_staged, num_bytes), chosen in groups.items():
            view = self._staging if is_staged or self._memory is None else self._memory.view
            assert view is not None
            offsets = np.array([offer.offset for i in chosen if (offer := bare[i])], dtype=np.int64)
            for i, found in zip(chosen, xxh3_regions(view, offsets, num_bytes).tolist(), strict=True):
                if (offer := bare[i]) is not None:
                    bare[i] = msgspec.structs.replace(offer, checksum=found)
        return bare

    def _offer(self, buffer: BlockBuffer, cell: int) -> BlockOffer | None:
        offset, num_bytes, meta = cell, buffer.view.nbytes, buffer.meta or BlockMeta(None, 0)
        checksum = meta.checksum if self._keeps_checksums else None
        if buffer.offset is not None:
            offset = buffer.offset
        else:
            try:
                data = self._codec.encode(buffer.view.cast("B"))
            except CodecError as error:
                logger.warning("a block is not stored in the cluster: %s", error)
                return None
            num_bytes = data.nbytes
            self._staging[cell : cell + num_bytes] = data
        return BlockOffer(
            key=buffer.key,
            offset=offset,
            num_bytes=num_bytes,
            checksum=checksum or 0,
            parent=buffer.parent,
            end_tokens=meta.end_tokens,
            priority=meta.priority,
            tenant=meta.tenant,
        )

    def arrived(self, buffer: BlockBuffer, cell: int, num_bytes: int) -> bool:
        """Decode a staged block into the caller's buffer."""
        try:
            self._codec.decode(self._staging[cell : cell + num_bytes], buffer.view.cast("B"))
        except CodecError as error:
            logger.warning("a block of the cluster's store cannot be decoded: %s", error)
            return False
        return True


@dataclass(frozen=True, slots=True)
class ClientOptions:
    """How a worker process reaches the store's nodes, and how they reach it."""

    secret: bytes  # the cluster's
    worker_id: str
    host: str
    num_replicas: int = 2
    answer_s: float = 1.0  # timeout of requests that move no block data
    stall_s: float = 1.0  # timeout of a read without progress
    transport: str = "auto"
    transports: Mapping[str, Transport] = field(default_factory=lambda: TRANSPORTS)
    tls: ClusterTls | None = None


class StoreClient:
    """Blocks by key in the cluster's store. Used on one loop."""

    def __init__(
        self,
        options: ClientOptions,
        *,
        codec: Codec,
        transit_bytes: int,
        memory: KvMemory | None,
        shared_keys: SharedKeys,
    ) -> None:
        """A client that is not started.

        Args:
            transit_bytes: the largest encoded block.
            memory: the caller's slab, if blocks are read from and into it directly.
            shared_keys: of the blocks in `memory`, for other workers.
        """
        self._options, self._transit_bytes, self._shared_keys = options, transit_bytes, shared_keys
        self.links = StoreLinks(self._make_peer, num_replicas=options.num_replicas, on_connected=self._announce_all)
        num_cells = min(max(STAGING_BYTES // transit_bytes, _MIN_CELLS), _MAX_CELLS)
        self._staging = StagingSlab(transit_bytes, num_cells)
        self._stager = BlockStager(self._staging.memory, memory, codec)
        self._slabs = [
            SharedSlab(each, options.secret, options.host, transport=options.transport, transports=options.transports)
            for each in (self._staging.memory, memory)
            if each is not None
        ]
        self.peer_blocks: PeerBlocks | None = None
        self._peer_server: SlabServer | None = None

    # ---- life

    async def start(self, nodes: Sequence[StoreAddress]) -> None:
        """Raises BackendUnavailable."""
        for slab in self._slabs:
            await slab.start()
        self.links.set_nodes(nodes)

    async def aclose(self) -> None:
        """Close every connection. Blocks stay in the store."""
        if self._peer_server is not None and self.peer_blocks is not None:
            self.peer_blocks.is_closed = True
            await self._peer_server.aclose()
        await self.links.aclose()
        for slab in self._slabs:
            await slab.aclose()
        self._staging.free()

    async def share(self, blocks: PeerBlocks) -> int:
        """Let other workers read the caller's slab; returns the port. Raises BackendUnavailable."""
        options = self._options
        server = SlabServer(
            self._slabs[IN_PLACE], blocks, options.secret, options.host, stall_s=options.stall_s, tls=options.tls
        )
        await server.start()
        self.peer_blocks, self._peer_server = blocks, server
        await asyncio.gather(*(self._announce_all(node) for node in self.links.nodes))
        return server.port

    # ---- blocks

    async def contains(self, keys: Sequence[bytes]) -> list[bool]:
        """Which blocks are in the store, or at a worker that shares them."""
        found = await self.exist(keys)
        missing = [i for i, here in enumerate(found) if not here]
        for i, address in zip(missing, await self._find_holders([keys[i] for i in missing]), strict=True):
            found[i] = bool(address)
        return found

    async def exist(self, keys: Sequence[bytes]) -> list[bool]:
        found = [False] * len(keys)
        order = self.links.order(keys)

        async def call(node: NodeLink, chosen: list[int]) -> None:
            answers = await self.links.ask(node, lambda peer: peer.exists([keys[i] for i in chosen]))
            for i, here in zip(chosen, answers or (), strict=False):
                found[i] |= here

        await self.links.by_rank(order, found, call)
        return found

    async def load(self, buffers: Sequence[BlockBuffer]) -> list[bool]:
        loaded = [False] * len(buffers)
        order = self.links.order([buffer.key for buffer in buffers])

        async def call(node: NodeLink, chosen: list[int]) -> None:
            for batch in cut_in_batches([buffers[i] for i in chosen], _BATCH_BYTES, self._staging.num_cells):
                await self._get(node, [buffers[chosen[i]] for i in batch], loaded, [chosen[i] for i in batch])

        await self.links.by_rank(order, loaded, call)
        missing = [i for i, here in enumerate(loaded) if not here]
        if missing:
            at = await self._find_holders([buffers[i].key for i in missing])
            workers = [[self.links.worker(address)] if address else [] for address in at]
            found = [False] * len(missing)

            async def load_from_worker(node: NodeLink, chosen: list[int]) -> None:
                await call(node, [missing[i] for i in chosen])

            await self.links.by_rank(workers, found, load_from_worker)
        return loaded

    async def _get(
        self, node: NodeLink, buffers: Sequence[BlockBuffer], loaded: list[bool], index: Sequence[int]
    ) -> None:
        """Read one batch from one node, as far as it has the blocks."""
        staged = [i for i, buffer in enumerate(buffers) if buffer.offset is None]
        try:
            async with self._staging.reserve(len(staged)) as free:
                peer = await self.links.peer_of(node)
                if peer is None:
                    return
                cells = dict(zip(staged, free, strict=True))
                sizes = await peer.get([self._wanted(buffer, cells.get(i)) for i, buffer in enumerate(buffers)])
                good = [size == buffer.view.nbytes for size, buffer in zip(sizes, buffers, strict=True)]
                if staged:
                    good = await asyncio.to_thread(self._arrived, buffers, cells, sizes)
        except PeerLost as error:
            self.links.failed(node, error.why)
        except StuckRead as error:
            if len(staged) < len(buffers):
                await asyncio.wait({error.read})  # the caller must not get its own memory back before
            self.links.failed(node, error.why)
        else:
            for i, is_good in zip(index, good, strict=True):
                loaded[i] = is_good

    def _wanted(self, buffer: BlockBuffer, cell: int | None) -> BlockRequest:
        if cell is None:
            return BlockRequest(buffer.key, IN_PLACE, buffer.offset or 0, buffer.view.nbytes)
        return BlockRequest(buffer.key, STAGED, cell, self._transit_bytes)

    def _arrived(self, buffers: Sequence[BlockBuffer], cells: Mapping[int, int], sizes: Sequence[int]) -> list[bool]:
        stager = self._stager
        return [
            stager.arrived(buffer, cells[i], sizes[i]) if i in cells and sizes[i] else sizes[i] == buffer.view.nbytes
            for i, buffer in enumerate(buffers)
        ]

    async def store(self, buffers: Sequence[BlockBuffer]) -> list[bool]:
        """Let every replica read these blocks; returns which are stored by at least one."""
        kept = [False] * len(buffers)
        few = asyncio.Semaphore(_MAX_PUTS)  # one is checksummed while another is read

        async def put(batch: list[int]) -> None:
            async with few:
                for i in await self._store_batch([buffers[i] for i in batch]):
                    kept[batch[i]] = True

        async with asyncio.TaskGroup() as group:
            for batch in cut_in_batches(buffers, _PUT_BYTES, self._staging.num_cells):
                group.create_task(put(batch))
        return kept

    async def _store_batch(self, buffers: Sequence[BlockBuffer]) -> set[int]:
        staged = [i for i, buffer in enumerate(buffers) if buffer.offset is None]
        async with self._staging.reserve(len(staged)) as free:
            offers = await asyncio.to_thread(self._stager.offers, buffers, dict(zip(staged, free, strict=True)))
            groups: defaultdict[NodeLink, list[int]] = defaultdict(list)
            for i, nodes in enumerate(self.links.order([buffer.key for buffer in buffers])):
                for node in nodes[: self._options.num_replicas] if offers[i] is not None else ():
                    groups[node].append(i)
            putting = [self._put(node, chosen, buffers, offers) for node, chosen in groups.items()]
            return {i for answers in await asyncio.gather(*putting) for i in answers}

    async def _put(
        self, node: NodeLink, chosen: Sequence[int], buffers: Sequence[BlockBuffer], offers: Sequence[BlockOffer | None]
    ) -> list[int]:
        """Indices of the blocks that this node stored."""
        kept: list[int] = []
        for slab in (STAGED, IN_PLACE):
            some = [i for i in chosen if (buffers[i].offset is None) == (slab == STAGED)]
            if some:
                wanted = [offer for i in some if (offer := offers[i])]
                put = partial(SlabPeer.put, slab=slab, blocks=wanted, within_s=PUT_TIMEOUT_S)
                answers = await self.links.ask(node, put)
                kept += [i for i, is_kept in zip(some, answers or (), strict=False) if is_kept]
        return kept

    async def _find_holders(self, keys: Sequence[bytes]) -> list[str]:
        """For each key the "host:port" of another worker that announced it to the key's first node, or ""."""
        addresses = [""] * len(keys)

        async def call(node: NodeLink, chosen: list[int]) -> None:
            answers = await self.links.ask(node, lambda peer: peer.find_holders([keys[i] for i in chosen]))
            for i, address in zip(chosen, answers or (), strict=False):
                addresses[i] = address

        await self.links.by_rank([nodes[:1] for nodes in self.links.order(keys)], [False] * len(keys), call)
        own = "" if self._peer_server is None else f"{self._options.host}:{self._peer_server.port}"
        return ["" if address == own else address for address in addresses]

    async def announce(self, added: Sequence[bytes], removed: Sequence[bytes]) -> None:
        """Announce changes of the caller's slab to each key's first node."""
        changes: defaultdict[NodeLink, tuple[list[bytes], list[bytes]]] = defaultdict(lambda: ([], []))
        for which, keys in enumerate((added, removed)):
            for key, (node, *_) in zip(keys, self.links.order(keys) if self.links.nodes else (), strict=False):
                changes[node][which].append(key)
        for node, (some, gone) in changes.items():
            peer = await self.links.peer_of(node)
            if peer is not None and self._peer_server is not None:
                peer.announce(self._options.host, self._peer_server.port, some, gone)

    async def _announce_all(self, node: NodeLink) -> None:
        """Announce all shared blocks to a node that has just been connected."""
        if self.peer_blocks is None or self._peer_server is None or node not in self.links.nodes:
            return
        keys = self._shared_keys.keys()
        mine = [key for key, (first, *_) in zip(keys, self.links.order(keys), strict=True) if first is node]
        peer = await self.links.peer_of(node)
        if peer is not None and mine:
            peer.announce(self._options.host, self._peer_server.port, mine, [])

    def _make_peer(self, address: StoreAddress) -> SlabPeer:
        options = self._options
        return SlabPeer(
            address.host,
            address.port,
            options.secret,
            self._slabs,
            peer_id=options.worker_id,
            block_bytes=self._transit_bytes,
            answer_s=options.answer_s,
            stall_s=options.stall_s,
            tls=options.tls,
        )
