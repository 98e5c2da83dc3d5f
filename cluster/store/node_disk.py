"""The disk below the memory of one node of the cluster's store, and what a block's row there ends with."""

import asyncio
from collections import OrderedDict
from collections.abc import Awaitable, Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import TypeVar

import msgspec

from kvrelay.kvcache.stores.disk.tier import DiskStore
from kvrelay.kvtransfer.slabs.messages import BlockOffer
from kvrelay.types import BlockHash

TRAILER_BYTES = 256  # on disk a block is a whole row: its bytes, and a trailer with its metadata
_MAX_QUEUED = 256  # blocks that wait to be written to disk; others stay in memory only
_BATCH_BLOCKS = 16

Result = TypeVar("Result")


def write_trailer(row: memoryview, block: BlockOffer) -> None:
    """Put a block's metadata at the end of its row."""
    data = msgspec.msgpack.encode(block)
    if len(data) + 2 > TRAILER_BYTES:  # a long tenant name, which the disk does not need
        data = msgspec.msgpack.encode(msgspec.structs.replace(block, tenant=""))
    begin = len(row) - TRAILER_BYTES
    row[begin : begin + 2 + len(data)] = len(data).to_bytes(2, "little") + data


def read_trailer(row: memoryview) -> BlockOffer | None:
    """A block's metadata from the end of its row; None: not readable."""
    begin = len(row) - TRAILER_BYTES
    size = int.from_bytes(row[begin : begin + 2], "little")
    try:
        return msgspec.msgpack.decode(row[begin + 2 : begin + 2 + min(size, TRAILER_BYTES - 2)], type=BlockOffer)
    except msgspec.DecodeError:
        return None


class NodeDisk:
    """The disk below one node's memory: blocking calls on threads, and a queue of blocks to write. Used on the loop."""

    def __init__(self, store: DiskStore, write: Callable[["NodeDisk", Sequence[bytes]], Awaitable[None]]) -> None:
        """`store`: started. `write`: writes queued blocks, those that are still in memory, with `store`."""
        self.blocks, self._write = store, write
        self._threads = ThreadPoolExecutor(max_workers=2, thread_name_prefix="store-disk")
        self._queued: OrderedDict[bytes, None] = OrderedDict()
        self._writing: asyncio.Task[None] | None = None

    async def aclose(self) -> None:
        """Finish queued writes and close the disk."""
        if self._writing is not None:
            await asyncio.gather(self._writing, return_exceptions=True)
        await self.run(self.blocks.close)
        self._threads.shutdown(wait=False)

    def enqueue(self, key: bytes) -> None:
        """Write this block soon, unless too many wait."""
        if len(self._queued) >= _MAX_QUEUED:
            return
        self._queued[key] = None
        if self._writing is None or self._writing.done():
            self._writing = asyncio.create_task(self._write_queued(), name="store to disk")

    async def _write_queued(self) -> None:
        while self._queued:
            await self._write(
                self, [self._queued.popitem(last=False)[0] for _ in range(min(_BATCH_BLOCKS, len(self._queued)))]
            )

    def trim(self) -> None:
        """Soon evict what tenants have beyond their quotas."""
        self._threads.submit(self.blocks.trim)

    async def delete(self, keys: Sequence[bytes]) -> None:
        for key in keys:
            self._queued.pop(key, None)
        await self.run(self.blocks.delete, [BlockHash(key) for key in keys])

    async def run(self, call: Callable[..., Result], *arguments: object) -> Result:
        """A blocking call on a thread. A cancellation waits for its end, since it uses rows."""
        work = asyncio.get_running_loop().run_in_executor(self._threads, call, *arguments)
        try:
            return await asyncio.shield(work)
        except asyncio.CancelledError:
            await asyncio.wait({work})
            raise
