"""A probe: how fast is each path between two workers, measured with blocks that both lend for the purpose.

It uses the readers, checks and blocks of real transfers. Blocks that a stuck read may still write
go back only when it has ended.
"""

import asyncio
import contextlib
import dataclasses
import logging
import time
from collections.abc import Sequence

from kvrelay.kvtransfer.arrivals import Arrival
from kvrelay.kvtransfer.checksums import Checksums
from kvrelay.kvtransfer.plans import plan_copies, region_offsets
from kvrelay.kvtransfer.route import Route
from kvrelay.kvtransfer.transports.base import Reader, TransportError
from kvrelay.kvtransfer.types import Lender
from kvrelay.types import KvMemory

logger = logging.getLogger(__name__)

PROBE_BYTES = 8 << 20
_LATENCY_ROUNDS = 3
_PATIENCE_S = 2.0  # for one read
_GRACE_S = 1.0  # for an abandoned one


def num_probe_blocks(memory: KvMemory) -> int:
    """How many blocks to lend: about PROBE_BYTES, at most a sixteenth of the pool, at least one."""
    layout = memory.layout
    return max(1, min(PROBE_BYTES // layout.block_bytes, layout.num_blocks // 16))


class Probe:
    """Measures every path of one route."""

    def __init__(self, route: Route, memory: KvMemory, source_num_blocks: int, checksums: Checksums | None) -> None:
        self._route, self._memory, self._checksums = route, memory, checksums
        self._source = dataclasses.replace(memory.layout, num_blocks=source_num_blocks)
        self._reads: set[asyncio.Future[None]] = set()

    async def run(self, lender: Lender, source_blocks: Sequence[int]) -> None:
        """Fill the route's table, as far as blocks can be had; a path that fails rests."""
        blocks = await lender.borrow(len(source_blocks))
        try:
            if blocks:
                for name in self._route.table.names:
                    await self._measure(name, list(source_blocks[: len(blocks)]), blocks)
                self._route.table.reorder()
        finally:
            self._give_back(lender, blocks)

    async def _measure(self, name: str, source_blocks: list[int], target_blocks: list[int]) -> None:
        try:
            reader = await self._route.reader(name)
            one = [await self._read(reader, source_blocks[:1], target_blocks[:1], range(1), None) for _ in range(3)]
            layers = range(self._memory.layout.num_layers)
            many = await self._read(reader, source_blocks, target_blocks, layers, self._checksums)
        except TransportError as error:
            self._route.failed(name, f"probe: {error}")
            return
        num_bytes = len(target_blocks) * self._memory.layout.block_bytes
        self._route.table.probed(name, num_bytes / many, min(one))

    async def _read(
        self, reader: Reader, source_blocks: list[int], target_blocks: list[int], layers: range, sums: Checksums | None
    ) -> float:
        """Seconds. Raises TransportError, CorruptRead included."""
        layout = self._memory.layout
        copies = plan_copies(self._source, layout, source_blocks, target_blocks, layers)
        if sums is not None:
            sums = sums[:, : len(target_blocks)].ravel()
        arrival = Arrival(self._memory, region_offsets(layout, target_blocks, layers), layout.region_bytes, sums)
        began = time.perf_counter()
        read = reader.read(copies, arrival)
        self._reads.add(read)
        read.add_done_callback(self._reads.discard)
        await asyncio.wait({read}, timeout=_PATIENCE_S)
        if not read.done():
            reader.abandon(read)
            await asyncio.wait({read}, timeout=_GRACE_S)
        if not read.done():
            raise TransportError(f"a read did not end within {_PATIENCE_S:g} s")
        read.result()
        return time.perf_counter() - began

    def _give_back(self, lender: Lender, blocks: Sequence[int]) -> None:
        if not self._reads:
            lender.give_back(blocks)
            return
        logger.warning("%d blocks stay lent until a stuck probe ends", len(blocks))
        left = set(self._reads)

        def on_done(read: "asyncio.Future[None]") -> None:
            with contextlib.suppress(Exception):
                read.result()
            left.discard(read)
            if not left:
                lender.give_back(blocks)

        for read in list(left):
            read.add_done_callback(on_done)
