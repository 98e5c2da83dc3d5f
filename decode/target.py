"""KvTarget: the decode worker's end of the KV plane. Grants tickets, reads, verifies, commits.

It alone writes this worker's pool, and only into blocks of a live grant. Every grant ends
exactly once: on_commit; or on_failed (not after our own revoke) and then on_released, as soon
as no transport can write those blocks any more. All callbacks run on the loop.
"""

import asyncio
import contextlib
import copy
import logging
import secrets
import time
from collections import OrderedDict
from collections.abc import Awaitable, Callable, Mapping, Sequence

from kvrelay.decode.target_link import SourceLink, TargetIdentity
from kvrelay.errors import (
    BackendUnavailable,
    ChecksumMismatch,
    LeaseExpired,
    PeerLost,
    TransferError,
    TransferRefused,
    TransferTimeout,
)
from kvrelay.kvtransfer.mover.mover import library
from kvrelay.kvtransfer.paths.discovery import this_machine
from kvrelay.kvtransfer.paths.path_ranking import untried
from kvrelay.kvtransfer.paths.selection import TRANSPORTS, offered
from kvrelay.kvtransfer.protocol.checksums import kind_of
from kvrelay.kvtransfer.protocol.grants import Grant, Unit, check_grantable, check_ticket
from kvrelay.kvtransfer.protocol.messages import (
    Alive,
    Announce,
    Cancel,
    Commit,
    Committed,
    Confirmed,
    Open,
    Progress,
    ReadDone,
    Refusal,
    Renew,
    encode,
)
from kvrelay.kvtransfer.protocol.tickets import (
    NONCE_BYTES,
    Reason,
    Ticket,
    Transcript,
    open_ticket,
    reason_of,
    refusal,
    seal,
)
from kvrelay.kvtransfer.protocol.types import Lender, PairReport, TransferResult, TransferStats
from kvrelay.kvtransfer.reads.arrivals import Arrival, Tamper
from kvrelay.kvtransfer.reads.receive_plan import Landing
from kvrelay.kvtransfer.transports.base import CorruptRead, Reader, Transport, TransportError
from kvrelay.plane import connection as plane
from kvrelay.plane.framing import Connection
from kvrelay.plane.tls import ClusterTls
from kvrelay.settings.transfer import TransferSettings
from kvrelay.types import Fingerprint, KvMemory

logger = logging.getLogger(__name__)

_ABANDON_GRACE_S = 1.0  # for an abandoned read to end, before its path is called stuck
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
        lender: Lender | None = None,
        transports: Mapping[str, Transport] = TRANSPORTS,
        tls: ClusterTls | None = None,
    ) -> None:
        self.memory, self.settings, self.lender = memory, settings, lender
        checksums = kind_of(memory, settings.checks)
        self.identity = TargetIdentity(worker_id, epoch, fingerprint, memory.device, checksums)
        self._secret, self._host, self._transports = secret, host, transports
        self._generation_of = generation_of
        self._on_commit, self._on_failed, self._on_released = on_commit, on_failed, on_released
        self._offers: list[str] = []
        self._links: set[SourceLink] = set()
        self._server = plane.Server(self._serve, secret, tls=tls)
        self._port = 0
        self._grants: dict[bytes, Grant] = {}  # live, by nonce
        self._letting_go: dict[bytes, Grant] = {}  # ended badly, not yet released
        self._ended: OrderedDict[bytes, Reason] = OrderedDict()
        self._stats = TransferStats()

    # ---- for the worker

    async def start(self) -> None:
        """Listen for sources. Raises BackendUnavailable when a forced transport cannot be used."""
        await asyncio.to_thread(library)  # compiled now, not in the first read
        await asyncio.to_thread(this_machine)  # known from then on
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
        stats = copy.deepcopy(self._stats)
        stats.open_transfers, stats.quarantined_blocks = len(self._grants), self.quarantined_blocks()
        return stats

    def links(self) -> list[SourceLink]:
        """The connected sources."""
        return list(self._links)

    def pairs(self) -> list[PairReport]:
        """The prefill workers that are connected, with what is known of the paths from each now."""
        me, now_s = self.identity, time.monotonic()
        return [
            PairReport(
                source=link.hello.worker_id, target=me.worker_id, target_epoch=me.epoch, ok=True,
                paths=link.route.table.reports(now_s),
            )
            for link in self._links
            if link.hello is not None and link.route is not None
        ]  # fmt: skip

    def quarantined_blocks(self) -> int:
        """Blocks of ended transfers that a transport may still write."""
        return sum(grant.num_blocks for grant in self._letting_go.values())

    def grant(
        self,
        request_id: str,
        first_block: int,
        block_ids: Sequence[int],
        num_blocks: int,
        *,
        num_tokens: int | None = None,
    ) -> bytes:
        """A sealed ticket that admits one transfer into `block_ids`; its lease starts now.

        Args:
            block_ids: where blocks first_block..num_blocks-1 of the sequence must land.
            num_tokens: of the sequence, where its last block is not full.

        Raises ValueError: blocks that do not fit, or a grant of this request that is not yet released.
        """
        layout = self.memory.layout
        check_grantable(request_id, first_block, block_ids, num_blocks, layout.num_blocks)
        for other in (*self._grants.values(), *self._letting_go.values()):
            if other.request_id == request_id:
                raise ValueError(f"{request_id} still holds the blocks of an earlier grant")
        ticket = Ticket(
            request_id=request_id, target_worker=self.identity.worker_id, target_epoch=self.identity.epoch,
            target_host=self._host, target_port=self._port, first_block=first_block, num_blocks=num_blocks,
            num_tokens=num_blocks * layout.block_size if num_tokens is None else num_tokens, layout=layout,
            target_blocks=list(block_ids), generations=[self._generation_of(block) for block in block_ids],
            fingerprint=self.identity.fingerprint, lease_s=self.settings.lease_s, nonce=secrets.token_bytes(NONCE_BYTES),
        )  # fmt: skip
        transcript = Transcript(self._secret, ticket.nonce)
        grant = Grant(ticket, seal(ticket, self._secret), transcript, time.monotonic())
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
        for read, reader in list(grant.reading.items()):
            if reader is not None:
                reader.abandon(read)
        if not grant.reading:
            asyncio.get_running_loop().call_soon(self._release, grant)

    def _close(self, grant: Grant, reason: Reason) -> None:
        grant.is_ended = True
        grant.pending.clear()
        self._grants.pop(grant.ticket.nonce, None)
        self._ended[grant.ticket.nonce] = reason
        while len(self._ended) > _REMEMBERED:
            self._ended.popitem(last=False)

    def _on_read_settled(self, grant: Grant, read: "asyncio.Future[None]") -> None:
        """No byte of this read can land any more."""
        grant.reading.pop(read, None)
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
            self._stats.expired_leases += 1
            why = f"no sign of the source for {grant.ticket.lease_s:g} s"
            self._end(grant, LeaseExpired(grant.request_id, why))
        else:
            asyncio.get_running_loop().call_later(left_s, self._check_lease, grant)

    # ---- messages of the sources (see target_link.Owner)

    async def _serve(self, connection: Connection) -> None:
        link = SourceLink(self, connection)
        self._links.add(link)
        try:
            await link.serve()
        finally:
            self._links.discard(link)

    def offers(self) -> list[str]:
        return self._offers

    def make_reader(self, name: str, memory: KvMemory) -> Reader:
        return self._transports[name].make_reader(memory, self._secret, self._host)

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
        assert link.landing is not None
        settings = self.settings
        grant.begin(link, link.landing, settings.sampled_share if settings.checks == "sampled" else None)
        grant.last_sign = time.monotonic()

    def _admit(self, message: Open) -> Grant:
        """The live, unused grant that this ticket stands for. A refusal here harms no grant."""
        ticket = open_ticket(message.ticket, self._secret)
        if (ticket.nonce, ticket.request_id) != (message.nonce, message.request_id):
            raise refusal(message.request_id, Reason.UNKNOWN, "the ticket is another request's")
        difference = self.identity.fingerprint.first_difference(ticket.fingerprint)  # it was ours
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
        link.send(Alive())

    def on_announce(self, link: SourceLink, message: Announce) -> None:
        grant = self._mine(link, message.nonce)
        if grant is None:
            return
        try:
            grant.transcript.add(encode(message))
            is_checked = self.settings.checks != "off"
            grant.accept(message, is_checked=is_checked)
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
            grant.check_seal(message.payload, message.seal)
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
        """Read one unit over the best path that works, verify it, and see whether it was the last."""
        assert link.route is not None
        for name in untried(link.route.table, time.monotonic):
            if grant.is_ended:  # while this task waited; its blocks may be released by now
                return
            reader = None
            try:
                reader = await link.route.reader(name)
                await self._read_over(link, name, reader, grant, unit)
                return
            except CorruptRead as error:
                link.route.failed(name, str(error), reader)
                layer, index = divmod(error.region, len(unit.target_atoms))
                each = link.landing.pairing.target.atoms_per_block if link.landing is not None else 1
                where = f"layer {unit.layers[layer]} of block {unit.target_atoms[index] // each}"
                raise ChecksumMismatch(grant.request_id, f"{name}: {error}, first {where}") from error
            except TransportError as error:
                if grant.is_ended:  # then it was us who stopped the read
                    return
                link.route.failed(name, str(error), reader)
                grant.retries += 1
                self._stats.retries += 1
                self._stats.path(name).retries += 1
        raise PeerLost(grant.request_id, f"no path to the source is left: {link.route.problems()}")

    async def _read_over(self, link: SourceLink, name: str, reader: Reader, grant: Grant, unit: Unit) -> None:
        """Raises TransportError once nothing of the read can land any more."""
        landing = link.landing
        assert link.route is not None and landing is not None
        async with link.staging_lock if landing.staging is not None else contextlib.nullcontext():
            if grant.is_ended:
                return
            grant.check_generations(self._generation_of, grant.blocks_of(unit))  # before a byte is written
            plan = landing.plan(unit.source_atoms, unit.target_atoms, unit.layers)
            arrival = Arrival(
                landing.memory, plan.pieces, landing.pairing.piece_bytes, unit.checksums, unit.is_checked, self.tamper
            )
            began = time.monotonic()
            try:
                with grant.busy(time.monotonic):
                    await self._read(reader, grant, reader.read(plan.copies, arrival), arrival)
            except TransferTimeout as error:
                link.route.table.failed(name, error.why, time.monotonic())  # the reader stays: its read is not over
                if landing.staging is not None:
                    link.abort()  # the staging buffer may still be written: begin anew with another
                raise
            if landing.staging is not None:
                with grant.busy(time.monotonic):
                    await self._settle(grant, landing, unit)
        if grant.is_ended:
            return
        num_bytes = plan.copies.total_bytes
        self._count(link, name, grant, num_bytes, began, arrival.check_s)
        link.send(Progress(nonce=grant.ticket.nonce, num_bytes=num_bytes))
        self._advance(grant)

    async def _settle(self, grant: Grant, landing: Landing, unit: Unit) -> None:
        """Cast a verified unit from the staging buffer into the pool; the blocks are not free until that has ended."""
        if grant.is_ended:
            return
        loop = asyncio.get_running_loop()
        work = loop.run_in_executor(None, landing.settle, unit.target_atoms, unit.layers)
        grant.reading[work] = None
        work.add_done_callback(lambda work: self._on_read_settled(grant, work))
        await asyncio.wait({work})
        work.result()

    def _count(self, link: SourceLink, name: str, grant: Grant, num_bytes: int, began: float, check_s: float) -> None:
        assert link.route is not None
        seconds = link.route.ended(name, num_bytes, began, time.monotonic())
        grant.num_unverified -= 1
        grant.bytes_by_path[name] += num_bytes
        sums = self._stats.path(name)
        sums.num_bytes += num_bytes
        sums.seconds += seconds
        sums.check_s += check_s
        self._stats.check_s += check_s

    async def _read(self, reader: Reader, grant: Grant, read: "asyncio.Future[None]", arrival: Arrival) -> None:
        """Wait for a read, as long as it gets on. Raises TransferTimeout where it cannot be stopped either."""
        grant.reading[read] = reader
        read.add_done_callback(lambda read: self._on_read_settled(grant, read))
        seen, stall_s = -1, self.settings.stall_s
        while not read.done() and arrival.num_landed > seen:
            seen = arrival.num_landed
            await asyncio.wait({read}, timeout=stall_s)
        if not read.done():
            reader.abandon(read)
            await asyncio.wait({read}, timeout=_ABANDON_GRACE_S)
        if not read.done():
            raise TransferTimeout(grant.request_id, f"a read got stuck for {stall_s:g} s and cannot be stopped")
        read.result()

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
        mostly = grant.bytes_by_path.most_common(1)
        transport = mostly[0][0] if mostly else link.transport
        result = TransferResult(transport, grant.num_blocks, grant.num_bytes, grant.busy_s, exposed_s, grant.retries)
        self._stats.count(result)
        self._stats.path(transport).exposed_s += exposed_s
        self._call(self._on_commit, grant.request_id, payload, result)
        link.send(
            Committed(nonce=grant.ticket.nonce, transport=transport, num_bytes=result.num_bytes, seconds=result.seconds)
        )
