"""KvTarget: the decode worker's end of the KV plane. Grants tickets, reads, verifies, commits.

It alone writes this worker's pool, and only into blocks of a live grant. Every grant ends
exactly once: on_commit; or on_failed (not after our own revoke) and then on_released, as soon
as no transport can write those blocks any more. All callbacks run on the loop.
"""

import asyncio
import dataclasses
import logging
import secrets
import time
from collections import OrderedDict
from collections.abc import Awaitable, Callable, Mapping, Sequence

import numpy as np

from kvrelay import plane
from kvrelay.config import TransferSettings
from kvrelay.errors import (
    BackendUnavailable,
    ChecksumMismatch,
    LeaseExpired,
    PeerLost,
    TransferError,
    TransferRefused,
    TransferTimeout,
)
from kvrelay.kvtransfer.arrivals import Arrival, Tamper
from kvrelay.kvtransfer.checksums import kind_of
from kvrelay.kvtransfer.grants import Grant, Unit, check_grantable, check_ticket
from kvrelay.kvtransfer.messages import Announce, Cancel, Commit, Committed, Confirmed, Open, ReadDone, Refusal, Renew
from kvrelay.kvtransfer.plans import plan_copies, region_offsets
from kvrelay.kvtransfer.selection import TRANSPORTS, offered
from kvrelay.kvtransfer.target_link import SourceLink, TargetIdentity
from kvrelay.kvtransfer.tickets import NONCE_BYTES, Reason, Ticket, open_ticket, reason_of, refusal, seal
from kvrelay.kvtransfer.transports.base import CorruptRead, Reader, Transport, TransportError
from kvrelay.kvtransfer.types import TransferResult, TransferStats
from kvrelay.types import Fingerprint, KvMemory

logger = logging.getLogger(__name__)

_REMEMBERED = 16_384  # ended grants, so that a late ticket is refused by its right name


class KvTarget:
    """Receives into one pool. One for each decode worker.

    `tamper`, when set, is called with (pool, offset, num_bytes) for every region after it was
    read and before it is verified: fault injection for tests and `kvrelay verify`.
    """

    tamper: Tamper | None = None

    def __init__(
        self,
        memory: KvMemory,
        worker_id: str,
        epoch: str,
        fingerprint: Fingerprint,
        secret: bytes,
        settings: TransferSettings,
        *,
        host: str,
        generation_of: Callable[[int], int],
        on_commit: Callable[[str, bytes, TransferResult], None],
        on_failed: Callable[[str, TransferError], None],
        on_released: Callable[[str], None],
        transports: Mapping[str, Transport] = TRANSPORTS,
    ) -> None:
        self.memory, self.settings = memory, settings
        checksums = kind_of(memory, settings.checks)
        self.identity = TargetIdentity(worker_id, epoch, fingerprint, memory.device, checksums)
        self._secret, self._host, self._transports = secret, host, transports
        self._generation_of = generation_of
        self._on_commit, self._on_failed, self._on_released = on_commit, on_failed, on_released
        self._offers: list[str] = []
        self._server = plane.Server(self._serve, secret)
        self._port = 0
        self._grants: dict[bytes, Grant] = {}  # live, by nonce
        self._letting_go: dict[bytes, Grant] = {}  # ended badly, not yet released
        self._ended: OrderedDict[bytes, Reason] = OrderedDict()
        self._stats = TransferStats()

    # ---- for the worker

    async def start(self) -> None:
        """Listen for sources. Raises BackendUnavailable when a forced transport cannot be used."""
        self._offers = offered(self.settings.transport, self.memory, self._transports)
        try:
            self._port = await self._server.start(self._host)
        except OSError as error:
            raise BackendUnavailable("KV plane", f"cannot listen on {self._host}: {error}") from error

    async def aclose(self) -> None:
        """End every grant (each is released as far as its transport allows), stop listening."""
        for grant in list(self._grants.values()):
            self._end(grant, refusal(grant.request_id, Reason.CANCELLED, "the target is shutting down"), is_ours=True)
        await self._server.aclose()

    @property
    def port(self) -> int:
        """Where sources connect; 0 before start()."""
        return self._port

    @property
    def transports(self) -> list[str]:
        """Names of the transports that this pool can be read into over, best first."""
        return list(self._offers)

    def stats(self) -> TransferStats:
        """Counts so far, as a copy."""
        return dataclasses.replace(
            self._stats, open_transfers=len(self._grants), quarantined_blocks=self.quarantined_blocks(),
            refusals_by_reason=self._stats.refusals_by_reason.copy(),
        )  # fmt: skip

    def quarantined_blocks(self) -> int:
        """Blocks of ended transfers that a transport may still write."""
        return sum(grant.num_blocks for grant in self._letting_go.values())

    def grant(self, request_id: str, first_block: int, block_ids: Sequence[int], num_blocks: int) -> bytes:
        """A sealed ticket that admits one transfer into `block_ids`; its lease starts now.

        Args:
            block_ids: where blocks first_block..num_blocks-1 of the sequence must land.

        Raises ValueError: blocks that do not fit, or a grant of this request that is not yet released.
        """
        check_grantable(request_id, first_block, block_ids, num_blocks, self.memory.layout.num_blocks)
        for other in (*self._grants.values(), *self._letting_go.values()):
            if other.request_id == request_id:
                raise ValueError(f"{request_id} still holds the blocks of an earlier grant")
        ticket = Ticket(
            request_id=request_id, target_worker=self.identity.worker_id, target_epoch=self.identity.epoch,
            target_host=self._host, target_port=self._port, first_block=first_block, num_blocks=num_blocks,
            target_blocks=list(block_ids), generations=[self._generation_of(block) for block in block_ids],
            fingerprint=self.identity.fingerprint, lease_s=self.settings.lease_s, nonce=secrets.token_bytes(NONCE_BYTES),
        )  # fmt: skip
        announced = np.zeros((self.memory.layout.num_layers, len(block_ids)), dtype=np.bool_)
        grant = Grant(ticket, seal(ticket, self._secret), announced, time.monotonic())
        self._grants[ticket.nonce] = grant
        asyncio.get_running_loop().call_later(ticket.lease_s, self._check_lease, grant)
        return grant.data

    def revoke(self, request_id: str, reason: str = "cancelled") -> None:
        """End this request's grant from our side: no on_failed; on_released follows. Idempotent."""
        for grant in [grant for grant in self._grants.values() if grant.request_id == request_id]:
            self._end(grant, refusal(request_id, Reason.CANCELLED, reason), is_ours=True)

    # ---- the end of a grant

    def _end(self, grant: Grant, error: TransferError, *, is_ours: bool = False) -> None:
        """End it badly, once. Its blocks stay in quarantine until every read of it has settled."""
        if grant.is_ended:
            return
        reason = reason_of(error) if isinstance(error, TransferRefused) else None
        self._close(grant, reason or (Reason.EXPIRED if isinstance(error, LeaseExpired) else Reason.CANCELLED))
        self._letting_go[grant.ticket.nonce] = grant
        if reason is not Reason.CANCELLED:
            self._stats.refuse(str(reason or type(error).__name__))
        self._refuse(grant.link, grant.ticket.nonce, error)
        if not is_ours:
            self._call(self._on_failed, grant.request_id, error)
        for read in list(grant.reading):
            self._abandon(grant, read)
        if not grant.reading:
            asyncio.get_running_loop().call_soon(self._release, grant)

    def _close(self, grant: Grant, reason: Reason) -> None:
        grant.is_ended = True
        grant.pending.clear()
        self._grants.pop(grant.ticket.nonce, None)
        self._ended[grant.ticket.nonce] = reason
        while len(self._ended) > _REMEMBERED:
            self._ended.popitem(last=False)

    def _abandon(self, grant: Grant, read: "asyncio.Future[None]") -> None:
        link = grant.link
        if isinstance(link, SourceLink) and link.lane is not None:
            link.lane.reader.abandon(read)

    def _on_read_settled(self, grant: Grant, read: "asyncio.Future[None]") -> None:
        """No byte of this read can land any more."""
        grant.reading.discard(read)
        if not read.cancelled():
            read.exception()  # seen, though nobody may wait for it any more
        if grant.is_ended and not grant.reading:
            self._release(grant)

    def _release(self, grant: Grant) -> None:
        if self._letting_go.pop(grant.ticket.nonce, None) is not None:
            self._call(self._on_released, grant.request_id)

    def _refuse(self, link: object, nonce: bytes, error: TransferError) -> None:
        if isinstance(link, SourceLink):
            link.send(Refusal(nonce=nonce, kind=type(error).__name__, why=error.why))

    def _call(self, callback: Callable[..., None], *args: object) -> None:
        try:
            callback(*args)
        except Exception:  # the worker's fault must not stop the plane
            logger.exception("the decode worker's callback failed for %s", args[0])

    def _check_lease(self, grant: Grant) -> None:
        """Timer: expire the grant, or look again when the lease would end."""
        if grant.is_ended:
            return
        left_s = grant.last_sign + grant.ticket.lease_s - time.monotonic()
        if left_s <= 0:
            why = f"no sign of the source for {grant.ticket.lease_s:g} s"
            self._end(grant, LeaseExpired(grant.request_id, why))
        else:
            asyncio.get_running_loop().call_later(left_s, self._check_lease, grant)

    # ---- messages of the sources (see target_link.Owner)

    async def _serve(self, connection: plane.Connection) -> None:
        await SourceLink(self, connection).serve()

    def offers(self) -> list[str]:
        return self._offers

    def make_reader(self, name: str) -> Reader:
        return self._transports[name].make_reader(self.memory, self._secret, self._host)

    def on_open(self, link: SourceLink, message: Open) -> None:
        grant: Grant | None = None
        try:
            grant = self._admit(message)
            grant.check_generations(self._generation_of)
        except TransferRefused as error:
            if grant is not None:
                grant.link = link
                self._end(grant, error)
            else:
                self._stats.refuse(str(reason_of(error)))
                logger.warning("refused a transfer of %s: %s", message.request_id, error.why)
                self._refuse(link, message.nonce, error)
            return
        grant.link, grant.last_sign = link, time.monotonic()

    def _admit(self, message: Open) -> Grant:
        """The live, unused grant that this ticket stands for. A refusal here harms no grant."""
        ticket = open_ticket(message.ticket, self._secret)
        if (ticket.nonce, ticket.request_id) != (message.nonce, message.request_id):
            raise refusal(message.request_id, Reason.UNKNOWN, "the ticket is another request's")
        difference = self.identity.fingerprint.first_difference(ticket.fingerprint)
        check_ticket(ticket, difference, self.identity.epoch, self.memory.layout.num_blocks)
        grant = self._grants.get(ticket.nonce)
        if grant is not None and grant.ticket == ticket:
            if grant.link is not None:
                raise refusal(ticket.request_id, Reason.USED, "its transfer is under way")
            return grant
        ended = self._ended.get(ticket.nonce)
        raise refusal(ticket.request_id, ended or Reason.UNKNOWN, "the ticket admits nothing (any more)")

    def _mine(self, link: SourceLink, nonce: bytes) -> Grant | None:
        """The live grant that this very connection opened; its source has just given a sign of life."""
        grant = self._grants.get(nonce)
        if grant is None or grant.link is not link:
            return None  # it ended while the message was under way: the source has been or is being told
        grant.last_sign = time.monotonic()
        return grant

    def on_renew(self, link: SourceLink, message: Renew) -> None:
        for nonce in message.nonces:
            self._mine(link, nonce)

    def on_announce(self, link: SourceLink, message: Announce) -> None:
        grant = self._mine(link, message.nonce)
        if grant is None:
            return
        try:
            is_checked = self.settings.checks != "off"
            grant.accept(message, self.memory.layout, link.source_num_blocks, is_checked=is_checked)
        except TransferRefused as error:
            self._end(grant, error)
            return
        assert link.lane is not None
        link.lane.add(grant)

    def on_commit_message(self, link: SourceLink, message: Commit) -> None:
        grant = self._mine(link, message.nonce)
        if grant is None or grant.payload is not None:
            return
        grant.payload, grant.committed_at = message.payload, time.monotonic()
        try:
            grant.check_complete()
        except TransferRefused as error:
            self._end(grant, error)
            return
        self._advance(grant)

    def on_cancel(self, link: SourceLink, message: Cancel) -> None:
        grant = self._grants.get(message.nonce)
        if grant is not None and grant.link in (None, link):
            self._end(grant, refusal(grant.request_id, Reason.CANCELLED, message.reason))

    def on_confirmed(self, link: SourceLink, message: Confirmed) -> None:
        grant = self._mine(link, message.nonce)
        if grant is None or not grant.is_waiting or grant.payload is None:
            return
        try:
            grant.check_generations(self._generation_of)
        except TransferRefused as error:
            self._end(grant, error)
            return
        self._commit(grant, link, grant.payload)

    def on_link_lost(self, link: SourceLink, why: str) -> None:
        for grant in [grant for grant in self._grants.values() if grant.link is link]:
            self._end(grant, PeerLost(grant.request_id, why))

    # ---- reading

    def carry(self, link: SourceLink) -> Callable[[Grant, Unit], Awaitable[None]]:
        async def carry(grant: Grant, unit: Unit) -> None:
            try:
                await self._carry(link, grant, unit)
            except TransferError as error:
                self._end(grant, error)
            except TransportError as error:
                self._end(grant, PeerLost(grant.request_id, f"{link.transport}: {error}"))
            except Exception as error:  # a process edge: the request fails, the worker lives
                logger.exception("reading for %s failed", grant.request_id)
                self._end(grant, refusal(grant.request_id, Reason.CANCELLED, f"the target failed: {error}"))

        return carry

    async def _carry(self, link: SourceLink, grant: Grant, unit: Unit) -> None:
        """Read one unit, verify it, and see whether it was the last."""
        if grant.is_ended:  # while this task waited to run; its blocks may be released by now
            return
        assert link.lane is not None and link.hello is not None
        grant.check_generations(self._generation_of)  # before a byte is written
        source = dataclasses.replace(self.memory.layout, num_blocks=link.hello.num_blocks)
        copies = plan_copies(source, self.memory.layout, unit.source_blocks, unit.target_blocks, unit.layers)
        arrival = self._arrival(unit)
        if not grant.reading:
            grant.busy_since = time.monotonic()
        try:
            await self._read(link.lane.reader, grant, copies.total_bytes, link.lane.reader.read(copies, arrival))
        except CorruptRead as error:
            layer, index = divmod(error.region, len(unit.target_blocks))
            where = f"layer {unit.layers[layer]} of block {unit.target_blocks[index]}"
            raise ChecksumMismatch(grant.request_id, f"{error}, first {where}") from error
        if grant.is_ended:
            return
        grant.num_unverified -= 1
        if not grant.reading:
            grant.busy_s += time.monotonic() - grant.busy_since
        self._stats.check_s += arrival.check_s
        self._advance(grant)

    async def _read(self, reader: Reader, grant: Grant, num_bytes: int, read: "asyncio.Future[None]") -> None:
        grant.reading.add(read)
        read.add_done_callback(lambda read: self._on_read_settled(grant, read))
        if not read.done():
            await asyncio.wait({read}, timeout=self.settings.deadline_s)
        if not read.done():
            reader.abandon(read)
            why = f"a read did not end within {self.settings.deadline_s:g} s"
            raise TransferTimeout(grant.request_id, why)
        grant.reading.discard(read)
        read.result()
        grant.num_bytes += num_bytes

    def _arrival(self, unit: Unit) -> Arrival:
        layout = self.memory.layout
        offsets = region_offsets(layout, unit.target_blocks, unit.layers)
        return Arrival(self.memory, offsets, layout.region_bytes, unit.checksums, tamper=self.tamper)

    def _advance(self, grant: Grant) -> None:
        """Once all is read and verified, ask the source whether it held on until now."""
        if grant.is_ended or grant.is_waiting or not grant.is_read:
            return
        grant.is_waiting = True
        if isinstance(grant.link, SourceLink):
            grant.link.send(ReadDone(nonce=grant.ticket.nonce))

    def _commit(self, grant: Grant, link: SourceLink, payload: bytes) -> None:
        self._close(grant, Reason.USED)
        exposed_s = time.monotonic() - grant.committed_at
        result = TransferResult(link.transport, grant.num_blocks, grant.num_bytes, grant.busy_s, exposed_s)
        self._stats.count(result)
        self._call(self._on_commit, grant.request_id, payload, result)
        link.send(Committed(nonce=grant.ticket.nonce, num_bytes=result.num_bytes, seconds=result.seconds))
