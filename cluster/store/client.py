"""The asynchronous side of a client of the cluster's store: lookups, reads and writes over all nodes.

Knows the nodes and which of them keep which block (placement), reads from them, and lets them read. When a node does
not answer, the next replica is tried. Must not import Ray.
"""

import asyncio
import contextlib
import logging
from collections import defaultdict
from collections.abc import AsyncIterator, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from itertools import starmap

import msgspec
import numpy as np

from kvrelay.cluster.store.links import NodeLink, StoreLinks
from kvrelay.cluster.store.peer_blocks import PeerBlocks
from kvrelay.errors import PeerLost
from kvrelay.kvcache.stores.codecs import Codec, CodecError, NoCodec
from kvrelay.kvcache.stores.placement import StoreAddress
from kvrelay.kvtransfer.mover.mover import xxh3_regions
from kvrelay.kvtransfer.paths.selection import TRANSPORTS
from kvrelay.kvtransfer.slabs.client import BlockRequest, SlabPeer
from kvrelay.kvtransfer.slabs.messages import BlockOffer
from kvrelay.kvtransfer.slabs.server import SlabServer
from kvrelay.kvtransfer.slabs.slabs import SharedSlab, StagingSlab, StuckRead
from kvrelay.kvtransfer.transports.base import Transport
from kvrelay.plane.tls import ClusterTls
from kvrelay.types import BlockHash, BlockMeta, KvMemory

logger = logging.getLogger(__name__)

STAGING_BYTES = 32 << 20
_MIN_CELLS, _MAX_CELLS = 4, 64
_BATCH_BYTES = 64 << 20  # of one request to one node
_PUT_BYTES, _MAX_PUTS = 8 << 20, 3  # of one write; writes at once
PUT_TIMEOUT_S = 10.0


@dataclass(frozen=True, slots=True)
class BlockBuffer:
    """One block of a call: its key in the store and its local bytes."""

    key: bytes
    view: memoryview
    meta: BlockMeta | None = None
    parent: bytes = b""  # the key of the block before it


def offset_in(memory: KvMemory, view: memoryview) -> int:
    """Byte offset of the view in this memory. Raises ValueError: it is not entirely inside."""
    offset = int(np.frombuffer(view, dtype=np.uint8).ctypes.data - memory.address)
    if offset < 0 or offset + view.nbytes > memory.layout.num_bytes:
        raise ValueError("a block outside the memory that the store was given")
    return offset


class BlockStager:
    """Encodes and checksums blocks in a slab for others to read, and decodes received ones. Methods block."""

    def __init__(self, slab: KvMemory, codec: Codec, *, is_in_place: bool) -> None:
        """`is_in_place`: blocks are in the slab already, as others read them."""
        assert slab.view is not None
        self._view, self._codec, self._is_in_place = slab.view, codec, is_in_place
        self._keeps_checksums = codec.name == "none"

    def offers(self, buffers: Sequence[BlockBuffer], offsets: Sequence[int]) -> dict[int, BlockOffer]:
        """Offers of these blocks by index, checksums included, without those that cannot be encoded."""
        offers: dict[int, BlockOffer] = {}
        unknown: defaultdict[int, list[int]] = defaultdict(list)  # by size
        for i, (buffer, offset) in enumerate(zip(buffers, offsets, strict=True)):
            if (offer := self._offer(buffer, offset)) is not None:
                offers[i] = offer
                if not offer.checksum:
                    unknown[offer.num_bytes].append(i)
        for num_bytes, chosen in unknown.items():
            found = xxh3_regions(self._view, np.array([offsets[i] for i in chosen], dtype=np.int64), num_bytes)
            for i, checksum in zip(chosen, found.tolist(), strict=True):
                offers[i] = msgspec.structs.replace(offers[i], checksum=checksum)
        return offers

    def _offer(self, buffer: BlockBuffer, offset: int) -> BlockOffer | None:
        num_bytes, meta = buffer.view.nbytes, buffer.meta or BlockMeta(None, 0)
        if not self._is_in_place:
            try:
                data = self._codec.of(buffer.key, meta).encode(buffer.view.cast("B"))
            except CodecError as error:
                logger.warning("a block is not stored in the cluster: %s", error)
                return None
            num_bytes = data.nbytes
            self._view[offset : offset + num_bytes] = data
        return BlockOffer(
            key=buffer.key,
            offset=offset,
            num_bytes=num_bytes,
            checksum=meta.checksum or 0 if self._keeps_checksums else 0,
            parent=buffer.parent,
            end_tokens=meta.end_tokens,
            priority=meta.priority,
            tenant=meta.tenant,
        )

    def arrived(
        self, buffers: Sequence[BlockBuffer], offsets: Sequence[int], sizes: Sequence[int], *, is_plain: bool
    ) -> list[bool]:
        """Decode received blocks into the caller's buffers; returns which are in place.

        Size 0: it did not arrive. `is_plain`: they come from another worker's memory.
        """
        codec = NoCodec() if is_plain else self._codec
        return [
            size > 0 and self._decode(codec, buffer, self._view[offset : offset + size])
            for buffer, offset, size in zip(buffers, offsets, sizes, strict=True)
        ]

    def _decode(self, codec: Codec, buffer: BlockBuffer, data: memoryview) -> bool:
        if self._is_in_place:
            return data.nbytes == buffer.view.nbytes
        try:
            codec.of(buffer.key, buffer.meta or BlockMeta(None, 0)).decode(data, buffer.view.cast("B"))
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
        shared: Mapping[bytes, BlockHash],
    ) -> None:
        """A client that is not started.

        Args:
            transit_bytes: the largest encoded block.
            memory: the slab that holds all blocks of its calls, for others to read, too. Blocks are read from and into
                it directly, except sealed ones, and over NIXL, whose reads cannot be cancelled. None: all are staged.
            shared: the blocks in `memory`, by key.
        """
        self._options, self._transit_bytes, self._shared = options, transit_bytes, shared
        self.links = StoreLinks(self._make_peer, num_replicas=options.num_replicas, on_connected=self._announce_all)
        num_cells = min(max(STAGING_BYTES // transit_bytes, _MIN_CELLS), _MAX_CELLS)
        is_in_place = memory is not None and options.transport != "nixl" and not codec.is_sealed
        self._memory, self._staging = memory, None if is_in_place else StagingSlab(transit_bytes, num_cells)
        self._max_blocks = num_cells if self._staging is not None else _BATCH_BYTES
        own = None if memory is None else self._export(memory)
        slab = own if self._staging is None else self._export(self._staging.memory)
        assert slab is not None
        self._slab, self._own_slab = slab, own
        self._stager = BlockStager(slab.memory, codec, is_in_place=is_in_place)
        self.peer_blocks: PeerBlocks | None = None
        self._peer_server: SlabServer | None = None

    def _export(self, memory: KvMemory) -> SharedSlab:
        options = self._options
        return SharedSlab(
            memory, options.secret, options.host, transport=options.transport, transports=options.transports
        )

    # ---- life

    async def start(self, nodes: Sequence[StoreAddress]) -> None:
        """Raises BackendUnavailable."""
        for slab in self._slabs():
            await slab.start()
        self.links.set_nodes(nodes)

    def _slabs(self) -> set[SharedSlab]:
        return {self._slab} | ({self._own_slab} if self._own_slab is not None else set())

    async def aclose(self) -> None:
        """Close every connection. Blocks stay in the store."""
        if self._peer_server is not None and self.peer_blocks is not None:
            self.peer_blocks.is_closed = True
            await self._peer_server.aclose()
        await self.links.aclose()
        for slab in self._slabs():
            await slab.aclose()
        if self._staging is not None:
            self._staging.free()

    async def share(self, blocks: PeerBlocks) -> int:
        """Let other workers read the caller's slab; returns the port. Raises BackendUnavailable."""
        options = self._options
        assert self._own_slab is not None
        server = SlabServer(
            self._own_slab, blocks, options.secret, options.host, stall_s=options.stall_s, tls=options.tls
        )
        await server.start()
        self.peer_blocks, self._peer_server = blocks, server
        await self.announce(list(self._shared), [])
        return server.port

    # ---- blocks

    async def contains(self, keys: Sequence[bytes]) -> list[bool]:
        """Which blocks are in the store, or at a worker that shares them."""
        found = await self.exist(keys)
        holders = await self._find_holders(keys, found)
        return [here or bool(address) for here, address in zip(found, holders, strict=True)]

    async def exist(self, keys: Sequence[bytes]) -> list[bool]:
        found = [False] * len(keys)

        async def call(node: NodeLink, chosen: list[int]) -> None:
            answers = await self.links.ask(node, lambda peer: peer.exists([keys[i] for i in chosen]))
            for i, here in zip(chosen, answers or (), strict=False):
                found[i] |= here

        await self.links.by_rank(self.links.order(keys), found, call)
        return found

    async def load(self, buffers: Sequence[BlockBuffer]) -> list[bool]:
        loaded, keys = [False] * len(buffers), [buffer.key for buffer in buffers]

        async def call(node: NodeLink, chosen: list[int], *, is_plain: bool = False) -> None:
            for batch in self._batches(chosen, _BATCH_BYTES):
                some = await self._get(node, [buffers[i] for i in batch], is_plain=is_plain)
                for i, is_good in zip(batch, some, strict=True):
                    loaded[i] = is_good

        await self.links.by_rank(self.links.order(keys), loaded, call)
        holders = await self._find_holders(keys, loaded)
        workers = [[self.links.worker(at)] if at else [] for at in holders]
        await self.links.by_rank(workers, loaded, partial(call, is_plain=True))
        return loaded

    def _batches(self, chosen: Sequence[int], max_bytes: int) -> Iterator[Sequence[int]]:
        step = max(1, min(max_bytes // self._transit_bytes, self._max_blocks))
        return (chosen[first : first + step] for first in range(0, len(chosen), step))

    @contextlib.asynccontextmanager
    async def _places(self, buffers: Sequence[BlockBuffer]) -> AsyncIterator[list[int]]:
        """Byte offsets for these blocks in the slab that others read and this client writes."""
        if self._staging is not None:
            async with self._staging.reserve(len(buffers)) as cells:
                yield cells
        else:
            yield [offset_in(self._slab.memory, buffer.view) for buffer in buffers]

    async def _get(self, node: NodeLink, buffers: Sequence[BlockBuffer], *, is_plain: bool) -> list[bool]:
        """Read one batch from one node, as far as it has the blocks."""
        try:
            async with self._places(buffers) as offsets:
                if (peer := await self.links.peer_of(node)) is not None:
                    entries = zip(buffers, offsets, strict=True)
                    wanted = [BlockRequest(buffer.key, offset, self._room(buffer)) for buffer, offset in entries]
                    sizes = await peer.get(wanted)
                    arrived = partial(self._stager.arrived, buffers, offsets, sizes, is_plain=is_plain)
                    are_good = await asyncio.to_thread(arrived)
                    arrivals = zip(buffers, sizes, are_good, strict=True)
                    if unreadable := [buffer.key for buffer, size, is_good in arrivals if size and not is_good]:
                        peer.num_corrupt += len(unreadable)
                        await self.links.ask(node, lambda peer: peer.forget(unreadable))
                    return are_good
        except PeerLost as error:
            self.links.failed(node, error.why)
        except StuckRead as error:
            if self._staging is None:
                await asyncio.wait({error.read})  # the caller must not get its own memory back before
            self.links.failed(node, error.why)
        return [False] * len(buffers)

    def _room(self, buffer: BlockBuffer) -> int:
        return buffer.view.nbytes if self._staging is None else self._transit_bytes

    async def store(self, buffers: Sequence[BlockBuffer]) -> list[bool]:
        """Let every replica read these blocks; returns which are stored by at least one."""
        kept = [False] * len(buffers)
        few = asyncio.Semaphore(_MAX_PUTS)  # one is checksummed while another is read

        async def put(batch: Sequence[int]) -> None:
            async with few:
                for i in await self._store_batch([buffers[i] for i in batch]):
                    kept[batch[i]] = True

        async with asyncio.TaskGroup() as group:
            for batch in self._batches(range(len(buffers)), _PUT_BYTES):
                group.create_task(put(batch))
        return kept

    async def _store_batch(self, buffers: Sequence[BlockBuffer]) -> set[int]:
        async with self._places(buffers) as offsets:
            offers = await asyncio.to_thread(self._stager.offers, buffers, offsets)
            groups: defaultdict[NodeLink, list[int]] = defaultdict(list)
            for i, nodes in enumerate(self.links.order([buffer.key for buffer in buffers])):
                for node in nodes[: self._options.num_replicas] if i in offers else ():
                    groups[node].append(i)

            async def put(node: NodeLink, chosen: list[int]) -> list[int]:
                wanted = [offers[i] for i in chosen]
                answers = await self.links.ask(node, lambda peer: peer.put(wanted, within_s=PUT_TIMEOUT_S))
                return [i for i, is_kept in zip(chosen, answers or (), strict=False) if is_kept]

            return {i for kept in await asyncio.gather(*starmap(put, groups.items())) for i in kept}

    async def _find_holders(self, keys: Sequence[bytes], found: list[bool]) -> list[str]:
        """For each key that is not `found`, the "host:port" of another worker that announced it to the key's first
        node, or "".
        """
        addresses = [""] * len(keys)

        async def call(node: NodeLink, chosen: list[int]) -> None:
            answers = await self.links.ask(node, lambda peer: peer.find_holders([keys[i] for i in chosen]))
            for i, address in zip(chosen, answers or (), strict=False):
                addresses[i] = address

        await self.links.by_rank([nodes[:1] for nodes in self.links.order(keys)], found, call)
        own = "" if self._peer_server is None else f"{self._options.host}:{self._peer_server.port}"
        return ["" if address == own else address for address in addresses]

    async def announce(self, added: Sequence[bytes], removed: Sequence[bytes], *, to: NodeLink | None = None) -> None:
        """Announce changes of the caller's slab to each key's first node. `to`: only to this one."""
        changes: defaultdict[NodeLink, tuple[list[bytes], list[bytes]]] = defaultdict(lambda: ([], []))
        for which, keys in enumerate((added, removed)):
            for key, (node, *_) in zip(keys, self.links.order(keys) if self.links.nodes else (), strict=False):
                changes[node][which].append(key)
        for node, (some, gone) in changes.items():
            peer = await self.links.peer_of(node) if to in (None, node) else None
            if peer is not None and self._peer_server is not None:
                peer.announce(self._options.host, self._peer_server.port, some, gone)

    async def _announce_all(self, node: NodeLink) -> None:
        """Announce all shared blocks to a node that has just been connected."""
        if self._peer_server is not None:
            await self.announce(list(self._shared), [], to=node)

    def _make_peer(self, address: StoreAddress) -> SlabPeer:
        options = self._options
        return SlabPeer(
            address.host,
            address.port,
            options.secret,
            self._slab,
            peer_id=options.worker_id,
            block_bytes=self._transit_bytes,
            answer_s=options.answer_s,
            stall_s=options.stall_s,
            tls=options.tls,
        )
