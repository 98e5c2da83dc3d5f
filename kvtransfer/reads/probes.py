"""A probe: how fast is each path between two workers, measured with blocks that both lend for the purpose.

It uses the readers, checks and blocks of real transfers. Blocks that a stuck read may still write
go back only when it has ended.
"""

import asyncio
import contextlib
import logging
import time
from collections.abc import Sequence

import numpy as np

from kvrelay.kvtransfer.plans.copy_plan import Offsets
from kvrelay.kvtransfer.protocol.checksums import Checksums, unpack
from kvrelay.kvtransfer.protocol.types import Lender
from kvrelay.kvtransfer.reads.arrivals import Arrival
from kvrelay.kvtransfer.reads.receive_plan import Landing
from kvrelay.kvtransfer.reads.route import Route
from kvrelay.kvtransfer.transports.base import Reader, TransportError
from kvrelay.types import KvMemory

logger = logging.getLogger(__name__)

PROBE_BYTES = 8 << 20
_LATENCY_ROUNDS = 3
_BANDWIDTH_ROUNDS = 2  # the first touches fresh mappings and buffers: 0.65x as fast
_PATIENCE_S = 2.0  # for one read
_GRACE_S = 1.0  # for an abandoned one


def num_probe_blocks(memory: KvMemory) -> int:
    """How many blocks to lend: about PROBE_BYTES, at most a sixteenth of the pool, at least one."""
    layout = memory.layout
    return max(1, min(PROBE_BYTES // layout.block_bytes, layout.num_blocks // 16))


class Probe:
    """Measures every path of one route. Raises ValueError when the source's blocks or checksums cannot be."""

    def __init__(self, route: Route, landing: Landing, source_blocks: Sequence[int], checksums: bytes) -> None:
        self._route, self._landing = route, landing
        self._sources = landing.pairing.source.numbers(source_blocks)
        num_atoms = landing.source.num_blocks * landing.pairing.source.atoms_per_block
        if len(self._sources) and not (self._sources.min() >= 0 and self._sources.max() < num_atoms):
            raise ValueError("blocks that the source does not have")
        self._checksums: Checksums | None = None
        if checksums:
            self._checksums = unpack(checksums).reshape(len(landing.layers), len(self._sources))
        self._reads: set[asyncio.Future[None]] = set()

    async def run(self, lender: Lender | None) -> None:
        """Fill the route's table, as far as blocks can be had; a path that fails rests.

        Pools of unlike dtypes: into the staging buffer, which needs no blocks.
        """
        landing, blocks = self._landing, []
        if landing.staging is not None:
            room = landing.max_atoms
        elif lender is not None:
            wanted = -(-len(self._sources) // landing.pairing.target.atoms_per_block)
            blocks = await lender.borrow(wanted)
            room = len(blocks) * landing.pairing.target.atoms_per_block
        else:
            return
        targets = np.arange(room) if landing.staging is not None else landing.pairing.target.numbers(blocks)
        count = min(room, len(self._sources))
        try:
            if count:
                for name in self._route.table.names:
                    await self._measure(name, targets[:count])
                self._route.table.reorder()
        finally:
            if lender is not None:
                self._give_back(lender, blocks)

    async def _measure(self, name: str, targets: Offsets) -> None:
        layers = self._landing.layers if self._landing.staging is None else self._landing.layers[:1]
        reader = None
        try:
            reader = await self._route.reader(name)
            one = [await self._read(reader, targets[:1], layers[:1]) for _ in range(_LATENCY_ROUNDS)]
            many = [await self._read(reader, targets, layers) for _ in range(_BANDWIDTH_ROUNDS)]
        except TransportError as error:
            self._route.failed(name, f"probe: {error}", reader)
            return
        num_bytes = len(targets) * len(layers) * self._landing.pairing.atom_bytes
        self._route.table.probed(name, num_bytes / min(many), min(one))

    async def _read(self, reader: Reader, targets: Offsets, layers: range) -> float:
        """Seconds. Raises TransportError, CorruptRead included."""
        landing, sums = self._landing, self._checksums
        plan = landing.plan(self._sources[: len(targets)], targets, layers)
        expected = None if sums is None else sums[: len(layers), : len(targets)].ravel()
        arrival = Arrival(landing.memory, plan.pieces, landing.pairing.piece_bytes, expected)
        began = time.perf_counter()
        read = reader.read(plan.copies, arrival)
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
