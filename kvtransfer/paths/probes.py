"""A probe measures how fast each path between two workers is, with probe buffers of both pools.

It uses the readers, checks and blocks of real transfers. Blocks that a stuck read may still write
go back only when it has ended.
"""

import asyncio
import logging
import time
from collections.abc import Sequence
from typing import Protocol

import numpy as np

from kvrelay.errors import TransportError
from kvrelay.kvtransfer.mover.copy_plan import Offsets
from kvrelay.kvtransfer.mover.verification import ArrivingRead, Checksums, ReceivePlan, unpack
from kvrelay.kvtransfer.paths.selection import Route
from kvrelay.kvtransfer.transports.base import Reader

logger = logging.getLogger(__name__)

_LATENCY_ROUNDS = 3
_BANDWIDTH_ROUNDS = 2  # the first touches fresh mappings and buffers: 0.65x as fast
_PATIENCE_S = 2.0  # for one read
_GRACE_S = 1.0  # for an abandoned one


class ProbeBuffers(Protocol):
    """The worker's source of pool blocks for probe transfers."""

    async def take(self, count: int) -> list[int]:
        """Up to `count` blocks that nothing else holds; none while the pool is busy."""

    def put_back(self, blocks: Sequence[int]) -> None:
        """These may be re-used."""


class PathProbe:
    """Measures every path of one route. Raises ValueError when the source's blocks or checksums cannot be."""

    def __init__(self, route: Route, plan: ReceivePlan, source_blocks: Sequence[int], checksums: bytes) -> None:
        self._route, self._plan = route, plan
        self._sources = plan.pairing.source.numbers(source_blocks)
        num_chunks = plan.source.num_blocks * plan.pairing.source.chunks_per_block
        if len(self._sources) and not (self._sources.min() >= 0 and self._sources.max() < num_chunks):
            raise ValueError("blocks that the source does not have")
        self._checksums: Checksums | None = None
        if checksums:
            self._checksums = unpack(checksums).reshape(len(self._sources), len(plan.layers))
        self._reads: set[asyncio.Future[None]] = set()

    async def run(self, probe_buffers: ProbeBuffers | None) -> None:
        """Fill the route's table, as far as blocks can be had; a path that fails rests.

        Pools of unlike dtypes: into the staging buffer, which needs no blocks.
        """
        plan, blocks = self._plan, []
        if plan.staging is not None:
            room = plan.max_chunks
        elif probe_buffers is not None:
            wanted = -(-len(self._sources) // plan.pairing.target.chunks_per_block)
            blocks = await probe_buffers.take(wanted)
            room = len(blocks) * plan.pairing.target.chunks_per_block
        else:
            return
        targets = np.arange(room) if plan.staging is not None else plan.pairing.target.numbers(blocks)
        count = min(room, len(self._sources))
        try:
            if count:
                for name in self._route.table.names:
                    await self._measure(name, targets[:count])
                self._route.table.reorder()
        finally:
            if probe_buffers is not None:
                self._give_back(probe_buffers, blocks)

    async def _measure(self, name: str, targets: Offsets) -> None:
        layers, reader = self._plan.layers, None
        try:
            reader = await self._route.reader(name)
            one = [await self._read(reader, targets[:1], layers[:1]) for _ in range(_LATENCY_ROUNDS)]
            many = [await self._read(reader, targets, layers) for _ in range(_BANDWIDTH_ROUNDS)]
        except TransportError as error:
            self._route.failed(name, f"probe: {error}", reader)
            return
        num_bytes = len(targets) * len(layers) * self._plan.pairing.chunk_bytes
        self._route.table.probed(name, num_bytes / min(many), min(one))

    async def _read(self, reader: Reader, targets: Offsets, layers: range) -> float:
        """Seconds. Raises TransportError, CorruptRead included."""
        plan, checksums = self._plan, self._checksums
        copies, pieces = plan.read(self._sources[: len(targets)], targets, layers)
        expected = None if checksums is None else checksums[: len(targets), : len(layers)].ravel()
        arrival = ArrivingRead(plan.memory, pieces, plan.pairing.piece_bytes, expected)
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

    def _give_back(self, probe_buffers: ProbeBuffers, blocks: Sequence[int]) -> None:
        if not self._reads:
            probe_buffers.put_back(blocks)
            return
        logger.warning("%d blocks stay taken until a stuck probe ends", len(blocks))
        ended = asyncio.gather(*self._reads, return_exceptions=True)
        ended.add_done_callback(lambda _: probe_buffers.put_back(blocks))
