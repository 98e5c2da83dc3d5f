"""Slabs: memory that holds many blocks and that other processes read, and reads of blocks out of another's slab.

A slab is one allocation of any kind of memory that the transports support. Blocks are runs of bytes in it, of any size.
"""

import asyncio
import contextlib
import logging
import mmap
import os
import time
from collections import defaultdict
from collections.abc import AsyncIterator, Mapping, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from kvrelay.errors import TransportError
from kvrelay.kvtransfer.mover.copy_plan import CopyList, Offsets
from kvrelay.kvtransfer.mover.mover import library
from kvrelay.kvtransfer.mover.verification import ArrivingRead, Checksums
from kvrelay.kvtransfer.paths.selection import TRANSPORTS, PoolExports, Route, untried
from kvrelay.kvtransfer.slabs.messages import SlabOffer
from kvrelay.kvtransfer.transports.base import Reader, Transport
from kvrelay.kvtransfer.transports.topology import Topology, this_machine
from kvrelay.types import KvLayout, KvMemory

logger = logging.getLogger(__name__)

UNIT_BYTES = 4096  # the size of a slab is a multiple of this
_ABANDON_GRACE_S = 0.5  # for an abandoned read to end before it counts as stuck


def allocate_slab(num_bytes: int) -> KvMemory:
    """Zeroed host memory that other processes can map (memfd), rounded up to whole units; freed with its last user."""
    layout = KvLayout(1, -(-num_bytes // UNIT_BYTES), 1, 1, UNIT_BYTES, "uint8", is_latent=True)
    fd = os.memfd_create("kvrelay-slab", os.MFD_CLOEXEC)
    try:
        os.ftruncate(fd, layout.num_bytes)
        mapping = mmap.mmap(fd, layout.num_bytes)
    except BaseException:
        os.close(fd)
        raise
    array = np.frombuffer(mapping, dtype=np.uint8)
    return KvMemory(layout, array.ctypes.data, "cpu", fd, memoryview(mapping), array)


def free_slab(memory: KvMemory) -> None:
    """Close the descriptor of `allocate_slab`; the mapping is freed with its last reference."""
    if memory.memfd is not None:
        os.close(memory.memfd)


class SharedSlab:
    """This process's memory, readable by others between start() and aclose()."""

    def __init__(
        self,
        memory: KvMemory,
        secret: bytes,
        host: str,
        *,
        transport: str = "auto",
        transports: Mapping[str, Transport] = TRANSPORTS,
    ) -> None:
        self.memory = memory
        self._secret, self._host, self._transport, self._transports = secret, host, transport, transports
        self._exports = PoolExports(memory, secret, host, transports)

    async def start(self) -> None:
        """Export the memory. Raises BackendUnavailable: the configured transport cannot be used."""
        await asyncio.to_thread(library)  # compiled now, not in the first read
        await asyncio.to_thread(this_machine)  # discovered now, not in the first request
        await self._exports.start(self._transport)
        self._exports.add_busy(1)

    async def aclose(self) -> None:
        """Stop exporting. The memory stays."""
        await self._exports.aclose()

    def offer(self) -> SlabOffer:
        """What other processes need to read this slab. After start()."""
        return SlabOffer(self.memory.layout.num_bytes, self._exports.offers())

    def reader_of(self, theirs: SlabOffer, topology: Topology, *, stall_s: float) -> "SlabReader":
        """Reads another process's slab into this memory. `topology`: of the other's machine."""
        route = Route.between(
            topology,
            "cpu",
            theirs.offers,
            self.memory.device,
            list(self._exports.exporters),
            lambda name: self._transports[name].make_reader(self.memory, self._secret, self._host),
        )
        return SlabReader(self.memory, route, stall_s=stall_s)


@dataclass(frozen=True, slots=True)
class BlockRead:
    """One block to read. Offsets and sizes are bytes in the source's and the target's slab."""

    source: int
    target: int
    num_bytes: int
    checksum: int  # XXH3-64


class StuckRead(TransportError):
    """A read neither ends nor can be cancelled: its target must not be reused until `read` is done."""

    def __init__(self, why: str, read: "asyncio.Future[None]") -> None:
        super().__init__(why, read)
        self.why, self.read = why, read

    def __str__(self) -> str:
        return self.why


class BlockArrival(ArrivingRead):
    """Notes which blocks are wrong, so that one corrupt block does not fail the others."""

    def __init__(self, memory: KvMemory, pieces: Offsets, piece_bytes: int, expected: Checksums) -> None:
        super().__init__(memory, pieces, piece_bytes, expected)
        self.is_wrong: NDArray[np.bool_] = np.zeros(len(pieces), dtype=np.bool_)

    def refuse(self, wrong: NDArray[np.intp]) -> None:
        self.is_wrong[wrong] = True


class SlabReader:
    """Reads blocks from one slab into another over the best path that works."""

    def __init__(self, memory: KvMemory, route: Route, *, stall_s: float) -> None:
        self._memory, self.route, self._stall_s = memory, route, stall_s

    async def read(self, blocks: Sequence[BlockRead]) -> list[bool]:
        """Read blocks; returns which are in place and verified. No writes follow its return.

        Raises TransportError: no path works; StuckRead: writes may follow.
        """
        by_size: defaultdict[int, list[int]] = defaultdict(list)
        for index, block in enumerate(blocks):
            by_size[block.num_bytes].append(index)
        is_good = [False] * len(blocks)
        for num_bytes, indices in by_size.items():
            indices.sort(key=lambda index: blocks[index].source)
            for index, good in zip(
                indices, await self._read_equal_sizes([blocks[i] for i in indices], num_bytes), strict=True
            ):
                is_good[index] = good
        return is_good

    async def _read_equal_sizes(self, blocks: Sequence[BlockRead], num_bytes: int) -> list[bool]:
        sources = np.array([block.source for block in blocks], dtype=np.int64)
        targets = np.array([block.target for block in blocks], dtype=np.int64)
        expected = np.array([block.checksum for block in blocks], dtype=np.uint64)
        copies = CopyList(sources, targets, np.full(len(blocks), num_bytes, dtype=np.int64))
        for name in untried(self.route.table, time.monotonic):
            reader: Reader | None = None
            try:
                async with asyncio.timeout(self._stall_s):
                    reader = await self.route.reader(name)
                arrival = BlockArrival(self._memory, targets[:, None], num_bytes, expected)
                await self._run(name, reader, copies, arrival)
                return [not wrong for wrong in arrival.is_wrong.tolist()]
            except StuckRead as error:
                self.route.table.failed(name, str(error), time.monotonic())  # its reader stays: the read is not over
                raise
            except (TransportError, TimeoutError) as error:
                self.route.failed(name, str(error) or "connecting timed out", reader)
        raise TransportError(self.route.problems() or "no transport that both sides have")

    async def _run(self, name: str, reader: Reader, copies: CopyList, arrival: BlockArrival) -> None:
        """Wait for one read while it makes progress, even when cancelled: it writes memory that the caller frees."""
        began = time.monotonic()
        read = reader.read(copies, arrival)
        try:
            seen = -1
            while not read.done() and arrival.num_landed > seen:
                seen = arrival.num_landed
                await asyncio.wait({read}, timeout=self._stall_s)
        finally:
            if not read.done():
                reader.abandon(read)
                await asyncio.wait({read}, timeout=_ABANDON_GRACE_S)
            if not read.done():
                raise StuckRead(f"{name}: a read got stuck for {self._stall_s:g} s and cannot be stopped", read)
        read.result()
        self.route.ended(name, copies.total_bytes, began, time.monotonic())

    async def aclose(self) -> None:
        """Detach from the source."""
        await self.route.aclose()


class StagingSlab:
    """A small slab of equal cells, one for each block in transit. Used on one loop."""

    def __init__(self, cell_bytes: int, num_cells: int) -> None:
        self.memory = allocate_slab(cell_bytes * num_cells)
        self._free = [index * cell_bytes for index in range(num_cells)]
        self._returned = asyncio.Condition()
        self.num_cells = num_cells

    @contextlib.asynccontextmanager
    async def reserve(self, count: int) -> AsyncIterator[list[int]]:
        """Reserve `count` cells, waiting for them; yields their byte offsets.

        After a StuckRead they return when it ends.
        """
        async with self._returned:
            await self._returned.wait_for(lambda: len(self._free) >= count)
            taken, self._free = self._free[:count], self._free[count:]
        try:
            yield taken
        except StuckRead as error:
            stuck, taken = taken, []
            error.read.add_done_callback(lambda _: self._free.extend(stuck))
            raise
        finally:
            async with self._returned:
                self._free.extend(taken)
                self._returned.notify_all()

    def free(self) -> None:
        """Free the memory, which nothing may read or write any more."""
        free_slab(self.memory)
