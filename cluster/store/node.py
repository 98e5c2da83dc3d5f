"""One node of the cluster's store: blocks in a slab of this machine's memory, and on its disk below that.

Knows which block is where (TierIndex) and answers the slab server; copies no bytes between processes. Used on one event
loop. Must not import Ray: the actor around it is actor.py.
"""

import asyncio
import json
import logging
import time
import uuid
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from functools import partial

from kvrelay.cluster.store.node_disk import TRAILER_BYTES, NodeDisk, read_trailer, write_trailer
from kvrelay.cluster.store.peer_blocks import HolderDirectory
from kvrelay.errors import StoreError
from kvrelay.kvcache.eviction.policies import EvictionPolicy
from kvrelay.kvcache.index.tier_index import Quota, TierCounts, TierIndex, in_rows
from kvrelay.kvcache.stores.disk.tier import DiskStore
from kvrelay.kvtransfer.slabs.messages import BlockOffer
from kvrelay.kvtransfer.slabs.server import ReadLease, ReservedRange, SlabDelegate
from kvrelay.types import BlockHash, BlockMeta, KvMemory

logger = logging.getLogger(__name__)

ROW_ALIGN = 4096
_MAX_HELD_SHARE = 0.5  # of the rows may be leased at once
_KEY_BYTES = 16


@dataclass(slots=True)
class NodeStats:
    """Totals since the start. Counts are blocks."""

    leased: int = 0
    missed: int = 0
    kept: int = 0
    dropped: int = 0  # did not arrive, or failed their checksums
    refused: int = 0  # no room, over quota, too large, or already being written for another client
    from_disk: int = 0
    to_disk: int = 0


class StoreNode(SlabDelegate):
    """The blocks of one node.

    More than 25 methods and 12 attributes: twelve methods are a SlabDelegate's, and the size of blocks, with
    everything that follows from it, is known only when the first client connects.
    """

    def __init__(
        self,
        node_id: str,
        memory: KvMemory,
        make_policy: Callable[[int], EvictionPolicy],
        *,
        quota: Quota = lambda tenant: None,
        make_disk: Callable[[int, Quota], DiskStore] | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """An empty node. The first client determines the size of blocks, and thereby of rows.

        Args:
            make_policy: from the number of rows.
            quota: bytes, in memory and as much again on disk. It may change: see `trim`.
            make_disk: from the bytes of a row, and `quota`: the store below the memory, not started.
        """
        assert memory.view is not None
        self.node_id, self.epoch = node_id, uuid.uuid4().hex
        self.memory, self._view = memory, memory.view
        self._make_policy, self._quota, self._make_disk = make_policy, quota, make_disk
        self._clock = clock
        self.block_bytes = 0  # the largest that fits; 0: not known yet
        self._stride = 0
        self._index: TierIndex | None = None
        self._blocks: dict[int, BlockOffer] = {}  # the block of each row, or its last one; `offset` is unused
        self._writing: set[bytes] = set()
        self._holders = HolderDirectory()
        self._disk: NodeDisk | None = None
        self.disk_problem = ""
        self.stats = NodeStats()

    async def aclose(self) -> None:
        """Finish what is being written to disk, and close that."""
        if self._disk is not None:
            await self._disk.aclose()

    # ---- size of blocks

    def welcome(self, block_bytes: int) -> str | None:
        if self._index is None and block_bytes:  # 0: it stores nothing
            self._lay_out(block_bytes)
        if block_bytes > self.block_bytes:
            return (
                f"this store is laid out for blocks of {self.block_bytes} bytes, not {block_bytes}: restart the cluster"
            )
        return None

    def _lay_out(self, block_bytes: int) -> None:
        stride = -(-(block_bytes + TRAILER_BYTES) // ROW_ALIGN) * ROW_ALIGN
        num_rows = self.memory.layout.num_bytes // stride
        if num_rows < 1:
            logger.warning("store.memory does not hold a single block of %d bytes", block_bytes)
            return
        self._index = TierIndex(num_rows, self._make_policy(num_rows), quota=in_rows(self._quota, stride))
        self._stride, self.block_bytes = stride, stride - TRAILER_BYTES
        if self._make_disk is not None:
            disk = self._make_disk(stride, self._quota)
            try:
                disk.start()
            except StoreError as error:  # the memory is used without it
                logger.error("the store runs without its disk: %s", error)
                self.disk_problem = str(error)
            else:
                self._disk = NodeDisk(disk, self._write_to_disk)

    def trim(self) -> None:
        """Evict what tenants have beyond their quotas, which have changed; on the disk soon."""
        if self._index is not None:
            self._index.trim(self._clock())
        if self._disk is not None:
            self._disk.trim()

    def _row_view(self, row: int) -> memoryview:
        return self._view[row * self._stride : (row + 1) * self._stride]

    # ---- leases

    async def lease(self, keys: Sequence[bytes]) -> list[ReadLease | None]:
        if self._index is None:
            return [None] * len(keys)
        missing = [key for key in keys if BlockHash(key) not in self._index]
        if missing and self._disk is not None:
            await self._load(missing)
        leases = [self._lease(BlockHash(key)) for key in keys]
        self.stats.leased += sum(lease is not None for lease in leases)
        self.stats.missed += sum(lease is None for lease in leases)
        return leases

    def _lease(self, key: BlockHash) -> ReadLease | None:
        index = self._index
        assert index is not None
        if key not in index or index.counts().held >= _MAX_HELD_SHARE * index.num_rows + 1:
            return None
        index.use((key,), self._clock())
        row = index.hold((key,))[0]
        block = self._blocks[row]
        return ReadLease(row, row * self._stride, block.num_bytes, block.checksum)

    def release(self, leases: Sequence[ReadLease]) -> None:
        assert self._index is not None
        self._index.unhold([lease.row for lease in leases])

    # ---- puts

    def reserve(self, blocks: Sequence[BlockOffer]) -> list[ReservedRange | bool]:
        index = self._index
        if index is None:
            return [False] * len(blocks)
        held = index.hold({BlockHash(block.parent) for block in blocks if BlockHash(block.parent) in index})
        try:  # do not evict the blocks that these continue
            return [self._reserve(block) for block in blocks]
        finally:
            index.unhold(held)

    def _reserve(self, block: BlockOffer) -> ReservedRange | bool:
        index, key = self._index, BlockHash(block.key)
        if index is not None and key in index:
            index.use((key,), self._clock(), priority=block.priority)
            return True
        fits = 0 < block.num_bytes <= self.block_bytes and len(key) == _KEY_BYTES
        if index is None or not fits or block.key in self._writing:
            self.stats.refused += 1
            return False
        rows = index.reserve(1, self._clock(), tenant=block.tenant)
        if rows is None:
            self.stats.refused += 1
            return False
        self._writing.add(block.key)
        self._blocks[rows[0]] = block
        return ReservedRange(rows[0], rows[0] * self._stride)

    def keep(self, block: BlockOffer, room: ReservedRange) -> None:
        assert self._index is not None
        self._writing.discard(block.key)
        self._put(block, room.row)
        write_trailer(self._row_view(room.row), block)
        self.stats.kept += 1
        if self._disk is not None:
            self._disk.enqueue(block.key)

    def _put(self, block: BlockOffer, row: int) -> None:
        assert self._index is not None
        self._blocks[row] = block
        self._index.put(
            BlockHash(block.key),
            row,
            self._clock(),
            parent=BlockHash(block.parent) if block.parent else None,
            end_tokens=block.end_tokens,
            priority=block.priority,
        )

    def drop(self, room: ReservedRange, *, read: "asyncio.Future[None] | None" = None) -> None:
        assert self._index is not None
        self.stats.dropped += 1
        self._writing.discard(self._blocks[room.row].key)
        free = partial(self._index.cancel, (room.row,))
        if read is None or read.done():
            free()
        else:
            read.add_done_callback(lambda _: free())

    # ---- the other requests

    async def exists(self, keys: Sequence[bytes]) -> list[bool]:
        found = [self._index is not None and BlockHash(key) in self._index for key in keys]
        missing = [i for i, here in enumerate(found) if not here]
        if missing and self._disk is not None:
            asked = [BlockHash(keys[i]) for i in missing]
            for i, here in zip(missing, await self._disk.run(self._disk.blocks.contains, asked), strict=True):
                found[i] = here
        return found

    async def forget(self, keys: Sequence[bytes]) -> None:
        if self._index is not None:
            self._index.discard(map(BlockHash, keys), self._clock())
        if self._disk is not None:
            await self._disk.delete(keys)

    def pin(self, keys: Sequence[bytes], ttl_s: float) -> None:
        if self._index is not None and ttl_s > 0:
            self._index.pin(map(BlockHash, keys), self._clock() + ttl_s)
        elif self._index is not None:
            self._index.unpin(map(BlockHash, keys))

    def on_announced(self, client: object, address: str, added: Sequence[bytes], removed: Sequence[bytes]) -> None:
        self._holders.announced(client, address, added, removed)

    def on_disconnected(self, client: object) -> None:
        self._holders.disconnected(client)

    def find_holders(self, keys: Sequence[bytes]) -> list[str]:
        return self._holders.find(keys)

    # ---- for repair and reports

    def keys(self) -> list[bytes]:
        """Every block in memory."""
        return [] if self._index is None else [bytes(key) for key in self._index.hashes()]

    def block(self, row: int) -> BlockOffer:
        """The block of a leased row."""
        return self._blocks[row]

    def counts(self) -> TierCounts | None:
        """Of its rows; None before the size of blocks is known."""
        return None if self._index is None else self._index.counts()

    def describe(self) -> bytes:
        index, counts = self._index, self.counts()
        cached = [] if index is None else [row for key in index.hashes() if (row := index.row(key)) is not None]
        return json.dumps(
            {
                "node_id": self.node_id,
                "epoch": self.epoch,
                "capacity_bytes": self.memory.layout.num_bytes,
                "block_bytes": self.block_bytes,
                "blocks": len(cached),
                "rows": {} if counts is None else asdict(counts),
                "used_bytes": sum(self._blocks[row].num_bytes for row in cached),
                "evicted": 0 if index is None else index.num_evicted,
                "holder_keys": len(self._holders),
                "disk": None if self._disk is None else asdict(self._disk.blocks.stats()),
                "disk_problem": self.disk_problem,
                "stats": asdict(self.stats),
            }
        ).encode()

    # ---- the disk below

    async def _write_to_disk(self, disk: NodeDisk, keys: Sequence[bytes]) -> None:
        index = self._index
        assert index is not None
        hashes = [BlockHash(key) for key in keys if BlockHash(key) in index]
        if not hashes:
            return
        rows = index.hold(hashes)
        try:
            metas = [_meta(self._blocks[row]) for row in rows]
            kept = await disk.run(disk.blocks.store, hashes, [self._row_view(row) for row in rows], metas)
            self.stats.to_disk += sum(kept)
        finally:
            index.unhold(rows)

    async def _load(self, keys: Sequence[bytes]) -> None:
        """Read blocks from disk into memory, as far as there is room."""
        index, disk = self._index, self._disk
        assert index is not None and disk is not None
        wanted = [BlockHash(key) for key in keys if key not in self._writing]
        tenants = await disk.run(disk.blocks.tenants, wanted)
        loading: list[tuple[BlockHash, int]] = []
        for key, tenant in zip(wanted, tenants, strict=True):
            if tenant is None or key in index or key in self._writing:
                continue
            if free := index.reserve(1, self._clock(), tenant=tenant):
                loading.append((key, free[0]))
                self._writing.add(key)
        if not loading:
            return
        is_good = [False] * len(loading)
        try:
            rows = [self._row_view(row) for _, row in loading]
            is_good = await disk.run(disk.blocks.load, [key for key, _ in loading], rows)
        finally:
            for (key, row), good in zip(loading, is_good, strict=True):
                self._writing.discard(key)
                block = read_trailer(self._row_view(row)) if good else None
                if block is None or block.key != key or not 0 < block.num_bytes <= self.block_bytes:
                    index.cancel((row,))
                else:
                    self._put(block, row)
                    self.stats.from_disk += 1


def _meta(block: BlockOffer) -> BlockMeta:
    return BlockMeta(BlockHash(block.parent) if block.parent else None, block.end_tokens, block.priority, block.tenant)
