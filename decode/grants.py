"""A grant: one ticket's life on the target, and the checks that admit each message to it.

Every grant ends exactly once: committed; or failed, and released as soon as no transport can write its blocks any more.
"""

import asyncio
import contextlib
import hmac
import logging
import time
from collections import Counter, OrderedDict, deque
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from kvrelay.errors import LeaseExpired, TransferError, TransferRefused
from kvrelay.kvtransfer.mover.copy_plan import Offsets
from kvrelay.kvtransfer.mover.verification import Checksums, Chosen, ReceivePlan, chosen_regions, unpack
from kvrelay.kvtransfer.protocol.messages import (
    Announce,
    Reason,
    Refusal,
    Ticket,
    ToSource,
    Transcript,
    TransferResult,
    TransferStats,
    reason_of,
    refusal,
)
from kvrelay.kvtransfer.transports.base import Reader
from kvrelay.settings.choices import ChecksMode

logger = logging.getLogger(__name__)

_REMEMBERED = 16_384  # ended grants, so that a late ticket is refused for the right reason


@dataclass(frozen=True, slots=True)
class ReadUnit:
    """What one read brings: chunks x layers, and what they must hash to."""

    source_chunks: Offsets
    target_chunks: Offsets
    layers: range
    checksums: Checksums | None  # chunk after chunk, of each layer after layer; None: nothing is checked
    is_checked: Chosen | None = None  # in the same order: which chunks are; None: all


@dataclass(slots=True, eq=False)
class Grant:
    """State of one granted transfer: its attributes are what the target knows of it. Rows of `announced` and `chosen`
    are the chunks wanted, columns the common layers.
    """

    ticket: Ticket
    transcript: Transcript
    last_sign: float  # when its source last sent something (or the grant was made)
    plan: ReceivePlan | None = None  # of the connection that opened it
    chunks: Offsets = field(default_factory=lambda: np.empty(0, dtype=np.int64))  # where each lands
    first_chunk: int = 0  # of the sequence, that this pool lacks
    announced: NDArray[np.bool_] = field(default_factory=lambda: np.zeros((0, 0), dtype=np.bool_))
    chosen: Chosen | None = None  # which are checked; None: all or none
    is_verified: bool = False  # all are
    link: object | None = None  # the connection that opened it
    reply: Callable[[ToSource], None] | None = None  # sends over that connection
    pending: deque[ReadUnit] = field(default_factory=deque)
    reading: "dict[asyncio.Future[None], Reader | None]" = field(
        default_factory=dict
    )  # reads whose bytes may still land
    num_unverified: int = 0  # units announced and not yet verified
    bytes_by_path: Counter[str] = field(default_factory=Counter)
    payload: bytes | None = None  # set by Commit
    committed_at: float = 0.0
    busy_s: float = 0.0  # with a read under way, verifying included
    busy_until: float = 0.0  # counted so far
    began: list[float] = field(default_factory=list)  # of the reads under way
    retries: int = 0  # reads that failed and were repeated over another path
    is_waiting: bool = False  # ReadDone sent, Confirmed not yet here
    is_ended: bool = False
    generations: dict[int, int] = field(init=False)  # of the target's blocks, when it was granted

    def __post_init__(self) -> None:
        self.generations = dict(zip(self.ticket.target_blocks, self.ticket.generations, strict=True))

    def begin(self, plan: ReceivePlan, checks: ChecksMode) -> None:
        """The ticket is admitted: what must come is known from now on, and which regions are checked."""
        self.plan = plan
        num_chunks, self.first_chunk = plan.pairing.wanted(self.ticket.first_block, self.ticket.num_tokens)
        self.chunks = plan.pairing.target.numbers(self.ticket.target_blocks, 0, num_chunks)
        self.announced = np.zeros((num_chunks, len(plan.layers)), dtype=np.bool_)
        if checks == "sampled":
            self.chosen = chosen_regions(self.ticket.nonce, num_chunks, len(plan.layers))
        self.is_verified = checks == "full" or (self.chosen is not None and bool(self.chosen.all()))

    @property
    def request_id(self) -> str:
        return self.ticket.request_id

    @property
    def num_blocks(self) -> int:
        """Blocks to receive."""
        return len(self.ticket.target_blocks)

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

    def blocks_of(self, unit: ReadUnit) -> list[int]:
        """The target's blocks that a read of this unit writes; one with several chunks of it more than once."""
        assert self.plan is not None
        blocks: list[int] = (unit.target_chunks // self.plan.pairing.target.chunks_per_block).tolist()
        return blocks

    def check_generations(self, generation_of: Callable[[int], int], blocks: Iterable[int] | None = None) -> None:
        """Raises TransferRefused (stale_generation) if one of these blocks, None: any, was re-used since the grant."""
        for block in self.ticket.target_blocks if blocks is None else blocks:
            if generation_of(block) != self.generations[block]:
                raise refusal(self.request_id, Reason.STALE_GENERATION, f"block {block} of the target")

    def accept(self, message: Announce, *, is_checked: bool) -> None:
        """Add what this announcement brings. Raises TransferRefused when it does not fit the grant."""
        assert self.plan is not None
        rows, columns = self._region(message)
        layers = range(columns.start, columns.stop)
        cells = self.announced[rows, columns]
        if cells.any():
            raise refusal(self.request_id, Reason.OUT_OF_RANGE, "a region was announced twice")
        chosen = None if self.chosen is None else self.chosen[rows, columns]
        checksums = self._checksums(message, len(layers), chosen) if is_checked else None
        cells[:] = True
        self._add_units(np.asarray(message.chunks, dtype=np.int64), self.chunks[rows], layers, checksums, chosen)

    def _add_units(
        self, sources: Offsets, targets: Offsets, layers: range, checksums: Checksums | None, chosen: Chosen | None
    ) -> None:
        assert self.plan is not None
        order = np.argsort(sources, kind="stable")  # neighbours in the source's pool become one copy
        for chunks, some in self.plan.units(len(sources), layers):
            these, columns = order[chunks], slice(some.start - layers.start, some.stop - layers.start)
            expected = None if checksums is None else checksums[these, columns].ravel()
            which = None if chosen is None or expected is None else chosen[these, columns].ravel()
            self.pending.append(ReadUnit(sources[these], targets[these], some, expected, which))
            self.num_unverified += 1

    def _region(self, message: Announce) -> tuple[slice, slice]:
        """Which rows and columns of `announced` it fills. Raises TransferRefused (out_of_range)."""
        assert self.plan is not None
        first, source = message.first_chunk - self.first_chunk, self.plan.pairing.source
        stop, last_layer = first + len(message.chunks), message.first_layer + message.num_layers
        if self.payload is not None or not message.chunks or first < 0 or stop > len(self.chunks):
            raise refusal(self.request_id, Reason.OUT_OF_RANGE, "blocks that were not granted")
        if min(message.chunks) < 0 or max(message.chunks) >= source.layout.num_blocks * source.chunks_per_block:
            raise refusal(self.request_id, Reason.OUT_OF_RANGE, "blocks that the source does not have")
        if message.first_layer < 0 or message.num_layers < 1 or last_layer > len(self.plan.layers):
            raise refusal(self.request_id, Reason.OUT_OF_RANGE, "layers that do not exist")
        return slice(first, stop), slice(message.first_layer, last_layer)

    def _checksums(self, message: Announce, num_layers: int, chosen: Chosen | None) -> Checksums:
        """[chunks, num_layers]; nothing of meaning where one is not chosen."""
        shape = (len(message.chunks), num_layers)
        wanted = np.ones(shape, dtype=np.bool_) if chosen is None else chosen
        if len(message.checksums) != 8 * np.count_nonzero(wanted):
            raise refusal(self.request_id, Reason.CHECKSUM, "an announcement without its checksums")
        checksums = np.zeros(shape, dtype=np.uint64)
        checksums[wanted] = unpack(message.checksums)
        return checksums

    def commit(self, payload: bytes, seal: bytes) -> None:
        """Everything is announced. Raises TransferRefused: a region never was (incomplete), or what was announced did
        not come as the source said it (checksum).
        """
        self.payload, self.committed_at = payload, time.monotonic()
        missing = int(self.announced.size - np.count_nonzero(self.announced))
        if missing:
            raise refusal(self.request_id, Reason.INCOMPLETE, f"{missing} of {self.announced.size} regions never came")
        if not hmac.compare_digest(self.transcript.seal(payload), seal):
            raise refusal(self.request_id, Reason.CHECKSUM, "what the source announced did not arrive as it was sent")

    @property
    def is_read(self) -> bool:
        """Committed by the source, and every unit is read and verified."""
        return self.payload is not None and self.num_unverified == 0


class GrantTable:
    """The grants of one target: live, in quarantine, and those that ended last. Lives on its loop.

    Args:
        on_failed: called when a grant ends badly, but not after our own revocation; on_released follows.
        on_released: called once no read can write its blocks any more.
    """

    def __init__(
        self, stats: TransferStats, on_failed: Callable[[str, TransferError], None], on_released: Callable[[str], None]
    ) -> None:
        self._stats, self._on_failed, self._on_released = stats, on_failed, on_released
        self._live: dict[bytes, Grant] = {}  # by nonce
        self._quarantined: dict[bytes, Grant] = {}  # ended badly, not yet released
        self._ended: OrderedDict[bytes, Reason] = OrderedDict()

    def __len__(self) -> int:
        return len(self._live)

    @property
    def live(self) -> list[Grant]:
        return list(self._live.values())

    @property
    def num_quarantined_blocks(self) -> int:
        """Blocks of ended grants that a transport may still write."""
        return sum(grant.num_blocks for grant in self._quarantined.values())

    def holds(self, request_id: str) -> bool:
        """Whether a grant of this request is live or in quarantine."""
        return any(grant.request_id == request_id for grant in (*self._live.values(), *self._quarantined.values()))

    def add(self, ticket: Ticket, transcript: Transcript) -> None:
        """A new grant; its lease starts now."""
        grant = self._live[ticket.nonce] = Grant(ticket, transcript, time.monotonic())
        asyncio.get_running_loop().call_later(ticket.lease_s, self._check_lease, grant)

    def get(self, nonce: bytes) -> Grant | None:
        return self._live.get(nonce)

    def renewed(self, nonce: bytes, link: object) -> Grant | None:
        """The live grant that `link` opened; its source has just shown that it lives.

        None: it ended while the message was under way, and the source has been sent a Refusal.
        """
        grant = self._live.get(nonce)
        if grant is None or grant.link is not link:
            return None
        grant.last_sign = time.monotonic()
        return grant

    def admit(self, ticket: Ticket) -> Grant:
        """The live, unused grant of this ticket. Raises TransferRefused, which harms no grant."""
        grant = self._live.get(ticket.nonce)
        if grant is not None and grant.ticket == ticket:
            if grant.link is not None:
                raise refusal(ticket.request_id, Reason.USED, "its transfer is under way")
            return grant
        ended = self._ended.get(ticket.nonce)
        raise refusal(ticket.request_id, ended or Reason.UNKNOWN, "the ticket admits nothing (any more)")

    def end(self, grant: Grant, error: TransferError, *, is_ours: bool = False) -> None:
        """End it badly, once. Its blocks stay in quarantine until every read of it has ended."""
        if grant.is_ended:
            return
        reason = reason_of(error) if isinstance(error, TransferRefused) else None
        self.close(grant, reason or (Reason.EXPIRED if isinstance(error, LeaseExpired) else Reason.CANCELLED))
        self._quarantined[grant.ticket.nonce] = grant
        if reason is not Reason.CANCELLED:
            self._stats.refuse(str(reason or type(error).__name__))
        if grant.reply is not None:
            grant.reply(Refusal(nonce=grant.ticket.nonce, kind=type(error).__name__, why=error.why))
        if not is_ours:
            call(self._on_failed, grant.request_id, error)
        for read, reader in list(grant.reading.items()):
            if reader is not None:
                reader.abandon(read)
        if not grant.reading:
            asyncio.get_running_loop().call_soon(self._release, grant)

    def commit(self, grant: Grant, next_path: str) -> TransferResult:
        """End it well. `next_path`: over which it counts where nothing had to travel."""
        self.close(grant, Reason.USED)
        exposed_s = time.monotonic() - grant.committed_at
        mostly = grant.bytes_by_path.most_common(1)
        transport = mostly[0][0] if mostly else next_path
        result = TransferResult(
            transport, grant.num_blocks, grant.bytes_by_path.total(), grant.busy_s, exposed_s, grant.retries
        )
        self._stats.count(result)
        self._stats.path(transport).exposed_s += exposed_s
        return result

    def close(self, grant: Grant, reason: Reason) -> None:
        """It is live no more; a ticket that comes again is refused for `reason`."""
        grant.is_ended = True
        grant.pending.clear()
        self._live.pop(grant.ticket.nonce, None)
        self._ended[grant.ticket.nonce] = reason
        while len(self._ended) > _REMEMBERED:
            self._ended.popitem(last=False)

    def track(self, grant: Grant, read: "asyncio.Future[None]", reader: Reader | None) -> None:
        """Until `read` has ended its bytes may land in the grant's blocks. `reader`: what can abandon it."""
        grant.reading[read] = reader
        read.add_done_callback(lambda read: self._on_read_ended(grant, read))

    def _on_read_ended(self, grant: Grant, read: "asyncio.Future[None]") -> None:
        grant.reading.pop(read, None)
        if not read.cancelled():
            read.exception()  # retrieved, though nothing may await it any more
        if grant.is_ended and not grant.reading:
            self._release(grant)

    def _release(self, grant: Grant) -> None:
        if self._quarantined.pop(grant.ticket.nonce, None) is not None:
            call(self._on_released, grant.request_id)

    def _check_lease(self, grant: Grant) -> None:
        """Timer: expire the grant, or look again when the lease would end."""
        if grant.is_ended:
            return
        left_s = grant.last_sign + grant.ticket.lease_s - time.monotonic()
        if left_s <= 0:
            self._stats.expired_leases += 1
            why = f"no sign of the source for {grant.ticket.lease_s:g} s"
            self.end(grant, LeaseExpired(grant.request_id, why))
        else:
            asyncio.get_running_loop().call_later(left_s, self._check_lease, grant)


def call(callback: Callable[..., None], *args: object) -> None:
    """Call the decode worker. Its fault must not stop the KV plane."""
    try:
        callback(*args)
    except Exception:
        logger.exception("request %s: the decode worker's callback failed", args[0])
