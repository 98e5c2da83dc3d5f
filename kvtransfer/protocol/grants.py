"""A grant: one ticket's life on the target, and the checks that admit each message to it.

No sockets, no clock (times are arguments), no callbacks: target.py drives it.
"""

import asyncio
import contextlib
import hmac
from collections import Counter, deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from kvrelay.kvtransfer.plans.copy_plan import Offsets, Pairing
from kvrelay.kvtransfer.protocol.check_sampling import Chosen, chosen_regions
from kvrelay.kvtransfer.protocol.checksums import Checksums, unpack
from kvrelay.kvtransfer.protocol.messages import Announce
from kvrelay.kvtransfer.protocol.tickets import Reason, Ticket, Transcript, refusal
from kvrelay.kvtransfer.reads.receive_plan import Landing
from kvrelay.kvtransfer.transports.base import Reader


@dataclass(frozen=True, slots=True)
class Unit:
    """What one read brings: atoms x layers, and what they must hash to."""

    source_atoms: Offsets
    target_atoms: Offsets
    layers: range
    checksums: Checksums | None  # layer-major; None: nothing is checked
    is_checked: Chosen | None = None  # layer-major: which atoms are; None: all


@dataclass(slots=True, eq=False)
class Grant:
    """State of one granted transfer. Rows of `announced` and `chosen` are the common layers, columns the atoms wanted."""

    ticket: Ticket
    data: bytes  # sealed
    transcript: Transcript
    last_sign: float  # when its source was last heard of (or the grant made)
    landing: Landing | None = None  # of the connection that opened it
    atoms: Offsets = field(default_factory=lambda: np.empty(0, dtype=np.int64))  # where each lands
    first_atom: int = 0  # of the sequence, that this pool lacks
    announced: NDArray[np.bool_] = field(default_factory=lambda: np.zeros((0, 0), dtype=np.bool_))
    chosen: Chosen | None = None  # which are checked; None: all or none
    link: object | None = None  # the connection that opened it
    pending: deque[Unit] = field(default_factory=deque)
    reading: "dict[asyncio.Future[None], Reader | None]" = field(default_factory=dict)  # whose bytes may still land
    num_unverified: int = 0  # units announced and not yet verified
    bytes_by_path: Counter[str] = field(default_factory=Counter)
    payload: bytes | None = None  # set by Commit
    committed_at: float = 0.0
    busy_s: float = 0.0  # with a read under way, verifying included
    busy_until: float = 0.0  # counted so far
    began: list[float] = field(default_factory=list)  # of the reads under way
    retries: int = 0  # reads that failed and went on over another path
    is_waiting: bool = False  # ReadDone sent, Confirmed not yet here
    is_ended: bool = False
    generations: dict[int, int] = field(init=False)  # of the target's blocks, when it was granted

    def __post_init__(self) -> None:
        self.generations = dict(zip(self.ticket.target_blocks, self.ticket.generations, strict=True))

    def begin(self, link: object, landing: Landing, sampled_share: float | None) -> None:
        """Its source has opened it: from now on it is known what must come. `sampled_share`: None unless sampled."""
        self.link, self.landing = link, landing
        num_atoms, self.first_atom = atoms_wanted(landing.pairing, self.ticket)
        self.atoms = landing.pairing.target.numbers(self.ticket.target_blocks, 0, num_atoms)
        self.announced = np.zeros((len(landing.layers), num_atoms), dtype=np.bool_)
        if sampled_share is not None:
            self.chosen = chosen_regions(self.ticket.nonce, len(landing.layers), num_atoms, sampled_share)

    @property
    def request_id(self) -> str:
        return self.ticket.request_id

    @property
    def num_blocks(self) -> int:
        """Blocks to receive."""
        return len(self.ticket.target_blocks)

    @property
    def num_bytes(self) -> int:
        """Read so far."""
        return self.bytes_by_path.total()

    @contextlib.contextmanager
    def busy(self, clock: Callable[[], float]) -> Iterator[None]:
        """A read is under way; what passes counts once, however many there are."""
        began = clock()
        self.began.append(began)
        try:
            yield
        finally:
            now = clock()
            self.busy_s += now - max(min(self.began), self.busy_until)
            self.busy_until = now
            self.began.remove(began)

    def blocks_of(self, unit: Unit) -> list[int]:
        """The target's blocks that a read of this unit writes; one with several atoms of it more than once."""
        assert self.landing is not None
        blocks: list[int] = (unit.target_atoms // self.landing.pairing.target.atoms_per_block).tolist()
        return blocks

    def check_generations(self, generation_of: Callable[[int], int], blocks: Iterable[int] | None = None) -> None:
        """Raises TransferRefused (stale_generation) if one of these blocks, None: any, was re-used since the grant."""
        for block in self.ticket.target_blocks if blocks is None else blocks:
            if generation_of(block) != self.generations[block]:
                raise refusal(self.request_id, Reason.STALE_GENERATION, f"block {block} of the target")

    def accept(self, message: Announce, *, is_checked: bool) -> None:
        """Add what this announcement brings. Raises TransferRefused when it does not fit the grant."""
        assert self.landing is not None
        columns, layers = self._columns(message), self._layers(message)
        rows = slice(layers.start - self.landing.layers.start, layers.stop - self.landing.layers.start)
        cells = self.announced[rows, columns]
        if cells.any():
            raise refusal(self.request_id, Reason.OUT_OF_RANGE, "a region was announced twice")
        chosen = None if self.chosen is None else self.chosen[rows, columns]
        checksums = self._checksums(message, len(layers), chosen) if is_checked else None
        cells[:] = True
        self._add_units(np.asarray(message.atoms, dtype=np.int64), self.atoms[columns], layers, checksums, chosen)

    def _add_units(
        self, sources: Offsets, targets: Offsets, layers: range, checksums: Checksums | None, chosen: Chosen | None
    ) -> None:
        assert self.landing is not None
        order = np.argsort(sources, kind="stable")  # neighbours in the source's pool become one copy
        for atoms, some in self.landing.units(len(sources), layers):
            rows, these = slice(some.start - layers.start, some.stop - layers.start), order[atoms]
            sums = None if checksums is None else checksums[rows][:, these].ravel()
            which = None if chosen is None or sums is None else chosen[rows][:, these].ravel()
            self.pending.append(Unit(sources[these], targets[these], some, sums, which))
            self.num_unverified += 1

    def check_seal(self, payload: bytes, seal: bytes) -> None:
        """Raises TransferRefused (checksum) unless all that was announced came as the source said it."""
        if not hmac.compare_digest(self.transcript.seal(payload), seal):
            raise refusal(self.request_id, Reason.CHECKSUM, "what the source announced did not arrive as it was sent")

    def _columns(self, message: Announce) -> slice:
        assert self.landing is not None
        first, source = message.first_atom - self.first_atom, self.landing.pairing.source
        stop = first + len(message.atoms)
        if self.payload is not None or not message.atoms or first < 0 or stop > len(self.atoms):
            raise refusal(self.request_id, Reason.OUT_OF_RANGE, "blocks that were not granted")
        if min(message.atoms) < 0 or max(message.atoms) >= source.layout.num_blocks * source.atoms_per_block:
            raise refusal(self.request_id, Reason.OUT_OF_RANGE, "blocks that the source does not have")
        return slice(first, stop)

    def _layers(self, message: Announce) -> range:
        assert self.landing is not None
        layers, stop = self.landing.layers, message.first_layer + message.num_layers
        if message.first_layer < layers.start or message.num_layers < 1 or stop > layers.stop:
            raise refusal(self.request_id, Reason.OUT_OF_RANGE, "layers that do not exist")
        return range(message.first_layer, stop)

    def _checksums(self, message: Announce, num_layers: int, chosen: Chosen | None) -> Checksums:
        """[num_layers, atoms]; nothing of meaning where one is not chosen."""
        shape = (num_layers, len(message.atoms))
        wanted = np.ones(shape, dtype=np.bool_) if chosen is None else chosen
        if len(message.checksums) != 8 * np.count_nonzero(wanted):
            raise refusal(self.request_id, Reason.CHECKSUM, "an announcement without its checksums")
        checksums = np.zeros(shape, dtype=np.uint64)
        checksums[wanted] = unpack(message.checksums)
        return checksums

    def check_complete(self) -> None:
        """Raises TransferRefused (incomplete) unless every region has been announced."""
        missing = int(self.announced.size - np.count_nonzero(self.announced))
        if missing:
            raise refusal(self.request_id, Reason.INCOMPLETE, f"{missing} of {self.announced.size} regions never came")

    @property
    def is_read(self) -> bool:
        """Committed by the source, and every unit is read and verified."""
        return self.payload is not None and self.num_unverified == 0


def atoms_wanted(pairing: Pairing, ticket: Ticket) -> tuple[int, int]:
    """(how many atoms must travel, the first of them in the sequence)."""
    first = ticket.first_block * pairing.target.atoms_per_block
    return max(pairing.num_atoms(ticket.num_tokens) - first, 0), first


def check_ticket(ticket: Ticket, fingerprint_difference: str | None, epoch: str, num_blocks: int) -> None:
    """Raises TransferRefused for another incarnation's, an incompatible or an impossible ticket."""
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
