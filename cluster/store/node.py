"""One node of the cluster's store: blocks in a slab of this machine's memory, and on its disk below that.

Knows what lies where (kvcache's TierIndex) and tells the slab server; moves no bytes between processes itself. Used on
one event loop; the disk's calls run on threads. Must not import Ray: the actor around it is store_actor.py.
"""

import asyncio
import json
import logging
import time
import uuid
from collections import OrderedDict
from collections.abc import Awaitable, Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass

import msgspec

from kvrelay.errors import StoreError
from kvrelay.kvcache.eviction.registry import EvictionPolicy
from kvrelay.kvcache.index.tier_index import TierCounts, TierIndex
from kvrelay.kvcache.stores.store import BlockMeta, BlockStore
from kvrelay.kvtransfer.slabs.messages import Offered
from kvrelay.kvtransfer.slabs.server import Loan, Room
from kvrelay.types import BlockHash, KvMemory

logger = logging.getLogger(__name__)

SLOT_ALIGN = 4096
_TRAILER_BYTES = 256  # behind each block: what is known of it, so that the disk gives it back with it
_SPILL_BLOCKS = 256  # that wait for the disk; more are left in memory only
_SPILL_BATCH = 16
_LENT_SHARE = 0.5  # of the slots may be on loan at once
_MAX_HINTS = 500_000
_KEY_BYTES = 16


@dataclass(slots=True)
class NodeStats:
    """Since start."""

    lent: int = 0
    missed: int = 0
    kept: int = 0
    dropped: int = 0  # did not arrive, or not as they left
    refused: int = 0  # no room, over quota, too large, or being taken from someone else already
    from_disk: int = 0
    to_disk: int = 0


class StoreNode:
    """What one node of the store holds. An Owner of slab_server.py."""

    def __init__(
        self,
        node_id: str,
        memory: KvMemory,
        make_policy: Callable[[int], EvictionPolicy],
        *,
        tenant_quota_bytes: int | None = None,
        make_disk: Callable[[int], BlockStore] | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """`make_policy(num_slots)`; `make_disk(slot_bytes)`: the store below the memory, not started.

        How large blocks are, its first client tells.
        """
        assert memory.view is not None
        self.node_id, self.epoch = node_id, uuid.uuid4().hex
        self.memory, self._view = memory, memory.view
        self._make_policy, self._quota_bytes, self._make_disk = make_policy, tenant_quota_bytes, make_disk
        self._clock = clock
        self.block_bytes = 0  # the largest that fits; 0: nobody has said yet
        self._stride = 0
        self._index: TierIndex | None = None
        self._blocks: dict[int, Offered] = {}  # what a slot holds, or held last; `offset` is of no meaning
        self._writing: set[bytes] = set()
        self._hints: OrderedDict[bytes, tuple[object, str]] = OrderedDict()
        self._hint_keys: dict[object, set[bytes]] = {}
        self._disk: BlockStore | None = None
        self.disk_problem = ""
        self._threads = ThreadPoolExecutor(max_workers=2, thread_name_prefix="store-disk")
        self._spill: OrderedDict[bytes, None] = OrderedDict()
        self._spilling: asyncio.Task[None] | None = None
        self.spread: Callable[[Sequence[bytes]], Awaitable[int]] | None = None  # set by who repairs
        self.sums = NodeStats()

    async def aclose(self) -> None:
        """Finish what is being written to disk, and close that."""
        if self._spilling is not None:
            await asyncio.gather(self._spilling, return_exceptions=True)
        if self._disk is not None:
            await self._off_loop(self._disk.close)
        self._threads.shutdown(wait=False)

    # ---- size of blocks

    def welcome(self, block_bytes: int) -> str | None:
        if self._index is None and block_bytes:  # 0: it only asks
            self._carve(block_bytes)
        if block_bytes > self.block_bytes:
            return (
                f"this store is laid out for blocks of {self.block_bytes} bytes, not {block_bytes}: "
                "restart the cluster, so that it is laid out anew"
            )
        return None

    def _carve(self, block_bytes: int) -> None:
        stride = -(-(block_bytes + _TRAILER_BYTES) // SLOT_ALIGN) * SLOT_ALIGN
        num_slots = self.memory.layout.num_bytes // stride
        if num_slots < 1:
            logger.warning("store.memory holds not one block of %d bytes", block_bytes)
            return
        quota = None if self._quota_bytes is None else max(self._quota_bytes // stride, 1)
        self._index = TierIndex(num_slots, self._make_policy(num_slots), default_quota=quota)
        self._stride, self.block_bytes = stride, stride - _TRAILER_BYTES
        if self._make_disk is not None:
            disk = self._make_disk(stride)
            try:
                disk.start()
            except StoreError as error:  # the memory serves on
                logger.error("the store has no disk: %s", error)
                self.disk_problem = str(error)
            else:
                self._disk = disk

    def _slot_view(self, slot: int) -> memoryview:
        return self._view[slot * self._stride : (slot + 1) * self._stride]

    # ---- lending

    async def lend(self, keys: Sequence[bytes]) -> list[Loan | None]:
        if self._index is None:
            return [None] * len(keys)
        missing = [key for key in keys if BlockHash(key) not in self._index]
        if missing and self._disk is not None:
            await self._load(missing)
        loans = [self._lend_one(BlockHash(key)) for key in keys]
        self.sums.lent += sum(loan is not None for loan in loans)
        self.sums.missed += sum(loan is None for loan in loans)
        return loans

    def _lend_one(self, key: BlockHash) -> Loan | None:
        index = self._index
        assert index is not None
        if key not in index or index.counts().held >= _LENT_SHARE * index.num_rows + 1:
            return None
        index.use((key,), self._clock())
        slot = index.hold((key,))[0]
        block = self._blocks[slot]
        return Loan(slot, slot * self._stride, block.num_bytes, block.checksum, index.generation(slot))

    def give_back(self, loans: Sequence[Loan]) -> None:
        assert self._index is not None
        self._index.unhold([loan.slot for loan in loans])

    # ---- taking

    def make_room(self, blocks: Sequence[Offered]) -> list[Room | bool]:
        index = self._index
        if index is None:
            return [False] * len(blocks)
        held = index.hold({BlockHash(block.parent) for block in blocks if BlockHash(block.parent) in index})
        try:  # not at the cost of what they continue
            return [self._make_room(block) for block in blocks]
        finally:
            index.unhold(held)

    def _make_room(self, block: Offered) -> Room | bool:
        index, key = self._index, BlockHash(block.key)
        if index is not None and key in index:
            index.use((key,), self._clock(), priority=block.priority)
            return True
        fits = 0 < block.num_bytes <= self.block_bytes and len(key) == _KEY_BYTES
        if index is None or not fits or block.key in self._writing:
            self.sums.refused += 1
            return False
        slots = index.reserve(1, self._clock(), tenant=block.tenant)
        if slots is None:
            self.sums.refused += 1
            return False
        self._writing.add(block.key)
        self._blocks[slots[0]] = block
        return Room(slots[0], slots[0] * self._stride)

    def keep(self, block: Offered, room: Room) -> bool:
        assert self._index is not None
        self._writing.discard(block.key)
        self._put(block, room.slot)
        self._write_trailer(block, room.slot)
        self.sums.kept += 1
        if self._disk is not None and len(self._spill) < _SPILL_BLOCKS:
            self._spill[block.key] = None
            if self._spilling is None or self._spilling.done():
                self._spilling = asyncio.create_task(self._write_to_disk(), name="store to disk")
        return True

    def _put(self, block: Offered, slot: int) -> None:
        assert self._index is not None
        self._blocks[slot] = block
        self._index.put(
            BlockHash(block.key), slot, self._clock(), parent=BlockHash(block.parent) if block.parent else None,
            end_tokens=block.end_tokens, priority=block.priority,
        )  # fmt: skip

    def drop(self, room: Room, *, read: "asyncio.Future[None] | None" = None) -> None:
        assert self._index is not None
        self.sums.dropped += 1
        self._writing.discard(self._blocks[room.slot].key)
        if read is None or read.done():
            self._index.cancel((room.slot,))
        else:
            read.add_done_callback(lambda _: self.drop_late(room))

    def drop_late(self, room: Room) -> None:
        """What might have landed in it no longer can."""
        assert self._index is not None
        self._index.cancel((room.slot,))

    # ---- the other requests

    async def exists(self, keys: Sequence[bytes]) -> list[bool]:
        found = [self._index is not None and BlockHash(key) in self._index for key in keys]
        missing = [i for i, here in enumerate(found) if not here]
        if missing and self._disk is not None:
            asked = [BlockHash(keys[i]) for i in missing]
            for i, here in zip(missing, await self._off_loop(self._disk.contains, asked), strict=True):
                found[i] = here
        return found

    async def forget(self, keys: Sequence[bytes]) -> int:
        hashes = [BlockHash(key) for key in keys]
        count = 0 if self._index is None else self._index.discard(hashes, self._clock())
        for key in keys:
            self._spill.pop(key, None)
        if self._disk is not None:
            await self._off_loop(self._disk.delete, hashes)
        return count

    def pin(self, keys: Sequence[bytes], ttl_s: float) -> int:
        if self._index is None:
            return 0
        hashes = [BlockHash(key) for key in keys]
        if ttl_s <= 0:
            self._index.unpin(hashes)
            return 0
        return self._index.pin(hashes, self._clock() + ttl_s)

    async def replicate(self, keys: Sequence[bytes]) -> int:
        return await self.spread(keys) if self.spread is not None else 0

    # ---- who else has what

    def on_holding(self, client: object, address: str, added: Sequence[bytes], removed: Sequence[bytes]) -> None:
        mine = self._hint_keys.setdefault(client, set())
        for key in added:
            self._hints[key] = client, address
            mine.add(key)
        for key in removed:
            mine.discard(key)
            if self._hints.get(key, (None, ""))[0] is client:
                del self._hints[key]
        while len(self._hints) > _MAX_HINTS:
            key, (whose, _) = self._hints.popitem(last=False)
            self._hint_keys[whose].discard(key)

    def on_gone(self, client: object) -> None:
        for key in self._hint_keys.pop(client, ()):
            if self._hints.get(key, (None, ""))[0] is client:
                del self._hints[key]

    def whereabouts(self, keys: Sequence[bytes]) -> list[str]:
        return [self._hints.get(key, (None, ""))[1] for key in keys]

    # ---- for repair and for people

    def keys(self) -> list[bytes]:
        """Every block in memory."""
        return [] if self._index is None else [bytes(key) for key in self._index.hashes()]

    def block(self, slot: int) -> Offered:
        """What is known of a lent slot's block."""
        return self._blocks[slot]

    def counts(self) -> TierCounts | None:
        """Of its slots; None while nobody has said how large blocks are."""
        return None if self._index is None else self._index.counts()

    def check(self) -> None:
        """Raises AssertionError unless every slot is accounted for."""
        if self._index is not None:
            self._index.check()

    def describe(self) -> bytes:
        index = self._index
        counts = None if index is None else index.counts()
        return json.dumps(
            {
                "node_id": self.node_id, "epoch": self.epoch, "capacity_bytes": self.memory.layout.num_bytes,
                "block_bytes": self.block_bytes, "slots": 0 if index is None else index.num_rows,
                "blocks": 0 if counts is None else counts.cached, "held": 0 if counts is None else counts.held,
                "reserved": 0 if counts is None else counts.reserved, "pinned": 0 if counts is None else counts.pinned,
                "used_bytes": sum(self._blocks[slot].num_bytes for slot in self._cached_slots()),
                "evicted": 0 if index is None else index.num_evicted, "hints": len(self._hints),
                "disk": None if self._disk is None else asdict(self._disk.stats()), "disk_problem": self.disk_problem,
                "sums": {name: getattr(self.sums, name) for name in NodeStats.__slots__},
            }
        ).encode()  # fmt: skip

    def _cached_slots(self) -> list[int]:
        index = self._index
        return [] if index is None else [slot for key in index.hashes() if (slot := index.row(key)) is not None]

    # ---- the disk below

    def _write_trailer(self, block: Offered, slot: int) -> None:
        data = msgspec.msgpack.encode(block)
        if len(data) + 2 > _TRAILER_BYTES:  # a long tenant's name: of no use on disk
            data = msgspec.msgpack.encode(msgspec.structs.replace(block, tenant=""))
        end = (slot + 1) * self._stride
        begin = end - _TRAILER_BYTES
        self._view[begin : begin + 2 + len(data)] = len(data).to_bytes(2, "little") + data

    def _read_trailer(self, slot: int) -> Offered | None:
        end = (slot + 1) * self._stride
        begin = end - _TRAILER_BYTES
        size = int.from_bytes(self._view[begin : begin + 2], "little")
        try:
            return msgspec.msgpack.decode(
                self._view[begin + 2 : begin + 2 + min(size, _TRAILER_BYTES - 2)], type=Offered
            )
        except msgspec.DecodeError:
            return None

    async def _write_to_disk(self) -> None:
        index, disk = self._index, self._disk
        assert index is not None and disk is not None
        while self._spill:
            keys = [self._spill.popitem(last=False)[0] for _ in range(min(_SPILL_BATCH, len(self._spill)))]
            hashes = [BlockHash(key) for key in keys if BlockHash(key) in index]
            if not hashes:
                continue
            slots = index.hold(hashes)
            try:
                metas = [_meta(self._blocks[slot]) for slot in slots]
                kept = await self._off_loop(disk.store, hashes, [self._slot_view(slot) for slot in slots], metas)
                self.sums.to_disk += sum(kept)
            finally:
                index.unhold(slots)

    async def _load(self, keys: Sequence[bytes]) -> None:
        """Bring up from disk what is there, as far as there is room."""
        index, disk = self._index, self._disk
        assert index is not None and disk is not None
        asked = [BlockHash(key) for key in keys if key not in self._writing]
        there = await self._off_loop(disk.contains, asked)
        loading: list[tuple[BlockHash, int]] = []
        for key, here in zip(asked, there, strict=True):
            if here and key not in index and key not in self._writing and (slots := index.reserve(1, self._clock())):
                loading.append((key, slots[0]))
                self._writing.add(key)
        if not loading:
            return
        is_good = [False] * len(loading)
        try:
            views = [self._slot_view(slot) for _, slot in loading]
            is_good = await self._off_loop(disk.load, [key for key, _ in loading], views)
        finally:
            for (key, slot), good in zip(loading, is_good, strict=True):
                self._writing.discard(key)
                block = self._read_trailer(slot) if good else None
                if block is None or block.key != key or not 0 < block.num_bytes <= self.block_bytes:
                    index.cancel((slot,))
                else:
                    self._put(block, slot)
                    self.sums.from_disk += 1

    async def _off_loop(self, call, *arguments):  # type: ignore[no-untyped-def]
        """A blocking call on a thread; not cut short by a cancellation, since it uses slots."""
        work = asyncio.get_running_loop().run_in_executor(self._threads, call, *arguments)
        try:
            return await asyncio.shield(work)
        except asyncio.CancelledError:
            await asyncio.wait({work})
            raise


def _meta(block: Offered) -> BlockMeta:
    return BlockMeta(BlockHash(block.parent) if block.parent else None, block.end_tokens, block.priority, block.tenant)
