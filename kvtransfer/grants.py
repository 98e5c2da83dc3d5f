"""A grant: one ticket's life on the target, and the checks that admit each message to it.

No sockets, no clock (times are arguments), no callbacks: target.py drives it.
"""

import asyncio
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from kvrelay.kvtransfer.checksums import Checksums, unpack
from kvrelay.kvtransfer.messages import Announce
from kvrelay.kvtransfer.plans import cut
from kvrelay.kvtransfer.tickets import Reason, Ticket, refusal
from kvrelay.types import KvLayout

MAX_UNIT_BYTES = 8 << 20  # one turn of a transfer on the wire


@dataclass(frozen=True, slots=True)
class Unit:
    """What one read brings: blocks x layers, and what they must hash to."""

    source_blocks: list[int]
    target_blocks: list[int]
    layers: range
    checksums: Checksums | None  # layer-major; None: unchecked


@dataclass(slots=True, eq=False)
class Grant:
    """State of one granted transfer. `announced`: [num_layers, blocks that the target lacks]."""

    ticket: Ticket
    data: bytes  # sealed
    announced: NDArray[np.bool_]
    last_sign: float  # when its source was last heard of (or the grant made)
    link: object | None = None  # the connection that opened it
    pending: deque[Unit] = field(default_factory=deque)
    reading: "set[asyncio.Future[None]]" = field(default_factory=set)  # reads whose bytes may still land
    num_unverified: int = 0  # units announced and not yet verified
    num_bytes: int = 0
    payload: bytes | None = None  # set by Commit
    committed_at: float = 0.0
    busy_s: float = 0.0  # with a read under way, verifying included
    busy_since: float = 0.0  # when the first of the reads under way began
    is_waiting: bool = False  # ReadDone sent, Confirmed not yet here
    is_ended: bool = False

    @property
    def request_id(self) -> str:
        return self.ticket.request_id

    @property
    def num_blocks(self) -> int:
        """Blocks to receive."""
        return len(self.ticket.target_blocks)

    def check_generations(self, generation_of: Callable[[int], int]) -> None:
        """Raises TransferRefused (stale_generation) if a block has been re-used since the grant."""
        for block, generation in zip(self.ticket.target_blocks, self.ticket.generations, strict=True):
            if generation_of(block) != generation:
                raise refusal(self.request_id, Reason.STALE_GENERATION, f"block {block} of the target")

    def accept(self, message: Announce, target: KvLayout, source_num_blocks: int, *, is_checked: bool) -> list[Unit]:
        """The units that this announcement adds. Raises TransferRefused when it does not fit the grant."""
        columns = self._columns(message, source_num_blocks)
        layers = self._layers(message)
        cells = self.announced[layers.start : layers.stop, columns]
        if cells.any():
            raise refusal(self.request_id, Reason.OUT_OF_RANGE, "a region was announced twice")
        checksums = self._checksums(message, len(layers)) if is_checked else None
        cells[:] = True
        order = np.argsort(message.block_ids, kind="stable")  # neighbours in the source's pool become one copy
        sources = [message.block_ids[i] for i in order]
        targets = [self.ticket.target_blocks[columns.start + i] for i in order]
        units = []
        for blocks, some in cut(len(message.block_ids), layers, target.region_bytes, MAX_UNIT_BYTES):
            rows = slice(some.start - layers.start, some.stop - layers.start)
            sums = None if checksums is None else checksums[rows][:, order[blocks]].ravel()
            units.append(Unit(sources[blocks], targets[blocks], some, sums))
        self.pending.extend(units)
        self.num_unverified += len(units)
        return units

    def _columns(self, message: Announce, source_num_blocks: int) -> slice:
        first = message.first_index - self.ticket.first_block
        stop = first + len(message.block_ids)
        if self.payload is not None or not message.block_ids or first < 0 or stop > self.num_blocks:
            raise refusal(self.request_id, Reason.OUT_OF_RANGE, "blocks that were not granted")
        if min(message.block_ids) < 0 or max(message.block_ids) >= source_num_blocks:
            raise refusal(self.request_id, Reason.OUT_OF_RANGE, "blocks that the source does not have")
        return slice(first, stop)

    def _layers(self, message: Announce) -> range:
        stop = message.first_layer + message.num_layers
        if message.first_layer < 0 or message.num_layers < 1 or stop > len(self.announced):
            raise refusal(self.request_id, Reason.OUT_OF_RANGE, "layers that do not exist")
        return range(message.first_layer, stop)

    def _checksums(self, message: Announce, num_layers: int) -> Checksums:
        wanted = num_layers * len(message.block_ids)
        if len(message.checksums) != 8 * wanted:
            raise refusal(self.request_id, Reason.CHECKSUM, "an announcement without its checksums")
        return unpack(message.checksums).reshape(num_layers, -1)

    def check_complete(self) -> None:
        """Raises TransferRefused (incomplete) unless every region has been announced."""
        missing = int(self.announced.size - np.count_nonzero(self.announced))
        if missing:
            raise refusal(self.request_id, Reason.INCOMPLETE, f"{missing} of {self.announced.size} regions never came")

    @property
    def is_read(self) -> bool:
        """Committed by the source, and every unit is read and verified."""
        return self.payload is not None and self.num_unverified == 0


def check_ticket(ticket: Ticket, fingerprint_difference: str | None, epoch: str, num_blocks: int) -> None:
    """Raises TransferRefused for another incarnation's, a misfitting or an impossible ticket."""
    if ticket.target_epoch != epoch:
        raise refusal(ticket.request_id, Reason.STALE_EPOCH, f"granted by {ticket.target_epoch}, this is {epoch}")
    if fingerprint_difference:
        raise refusal(ticket.request_id, Reason.FINGERPRINT, fingerprint_difference)
    if ticket.target_blocks and max(ticket.target_blocks) >= num_blocks:
        raise refusal(ticket.request_id, Reason.OUT_OF_RANGE, "blocks that the target does not have")


def check_grantable(
    request_id: str, first_block: int, block_ids: Sequence[int], num_blocks: int, pool_blocks: int
) -> None:
    """Raises ValueError on our own worker's mistake."""
    if not 0 <= first_block <= num_blocks or len(block_ids) != num_blocks - first_block:
        raise ValueError(f"{request_id}: {len(block_ids)} blocks granted for {first_block}..{num_blocks}")
    if len(set(block_ids)) != len(block_ids) or any(not 0 <= block < pool_blocks for block in block_ids):
        raise ValueError(f"{request_id}: granted blocks must be distinct and inside the pool")
