"""KvTarget: the decode worker's end of the KV plane. Grants tickets, reads, verifies, commits.

It alone writes this worker's pool, and only into blocks of a live grant. The worker survives whatever a peer sends: a
frame that is no message of this protocol ends that connection and fails its transfers, nothing else.
"""

import asyncio
import copy
import logging
import secrets
import time
from collections.abc import Callable, Mapping, Sequence

import msgspec

from kvrelay import errors
from kvrelay.decode.grants import Grant, GrantTable, call
from kvrelay.decode.read_queue import ReadQueue
from kvrelay.errors import BackendUnavailable, LayoutMismatch, TransferError, TransferRefused, TransportError
from kvrelay.kvtransfer.mover.mover import library
from kvrelay.kvtransfer.mover.verification import ReceivePlan, kind_of
from kvrelay.kvtransfer.paths.probes import PathProbe, ProbeBuffers
from kvrelay.kvtransfer.paths.selection import TRANSPORTS, Route, offered
from kvrelay.kvtransfer.protocol import messages as wire
from kvrelay.kvtransfer.protocol.messages import Reason, TransferResult, TransferStats, reason_of, refusal
from kvrelay.kvtransfer.transports.base import Transport
from kvrelay.kvtransfer.transports.topology import this_machine
from kvrelay.plane import connection as plane
from kvrelay.plane.framing import Connection
from kvrelay.plane.reports import PairReport
from kvrelay.plane.tls import ClusterTls
from kvrelay.settings.cache import TransferSettings
from kvrelay.types import Fingerprint, KvMemory

logger = logging.getLogger(__name__)

STALL_S = 2.0  # a read without progress for so long continues over another path, or fails
_HELLO_TIMEOUT_S = 10.0


class SourceLink:
    """One accepted connection."""

    def __init__(self, target: "KvTarget", connection: Connection) -> None:
        self._target, self._connection = target, connection
        self.hello: wire.Hello | None = None
        self.route: Route | None = None
        self.plan: ReceivePlan | None = None
        self._staging_lock = asyncio.Lock()
        self._reads: ReadQueue | None = None
        self._probing: asyncio.Task[None] | None = None

    async def serve(self) -> None:
        """Run until the connection ends; then fail its transfers and close the readers."""
        why = "the source closed the connection"
        try:
            async with asyncio.timeout(_HELLO_TIMEOUT_S):
                first = wire.decode_to_target(await self._connection.receive())
            if await self._welcome(first):
                await self._connection.read_all(lambda frame: self._dispatch(wire.decode_to_target(frame)))
        except msgspec.DecodeError as error:
            why = f"the source sent a malformed message: {error}"
            await self._reject(Reason.MALFORMED, str(error))
            raise errors.ProtocolError(why) from error
        except errors.ConnectionLost as error:
            why = str(error)
            raise
        finally:
            for grant in self._target.grants.live:
                if grant.link is self:
                    self._target.grants.end(grant, errors.PeerLost(grant.request_id, why))
            if self._probing is not None:
                self._probing.cancel()
                await asyncio.gather(self._probing, return_exceptions=True)
            if self._reads is not None:
                await self._reads.aclose()

    def send(self, message: wire.ToSource) -> None:
        """Queue one message; a lost connection shows elsewhere."""
        try:
            self._connection.send_nowait(wire.encode(message))
        except errors.PlaneError as error:
            logger.debug("not sent: %s", error)

    # ---- handshake

    async def _reject(self, reason: Reason, detail: str, remedy: str = "") -> bool:
        logger.warning("refused the KV source at %s: %s: %s", self._connection.peer, reason, detail)
        remedy = remedy or wire.REMEDIES.get(reason, "")
        self.send(wire.Rejected(reason=str(reason), detail=detail, remedy=remedy))
        await self._connection.aclose()
        return False

    async def _welcome(self, hello: object) -> bool:
        """Whether this source is served; its best path is connected then."""
        target = self._target
        if not isinstance(hello, wire.Hello):
            return await self._reject(Reason.MALFORMED, "the first message must be a hello")
        if misfit := self._incompatibility(hello):
            return await self._reject(*misfit)
        try:
            plan = ReceivePlan(hello.layout, target.memory)
        except LayoutMismatch as error:
            return await self._reject(Reason.FINGERPRINT, str(error))
        route = Route.between(
            hello.topology,
            hello.device,
            hello.offers,
            target.memory.device,
            target.transports,
            lambda name: target.all_transports[name].make_reader(plan.memory, target.secret, target.host),
        )
        waiting = asyncio.create_task(self._keep_alive(), name="kv handshake")
        try:
            path = await route.open()
        except BaseException as error:
            await route.aclose()
            if not isinstance(error, TransportError):
                raise
            offers = [offer.name for offer in hello.offers]
            nothing = f"the source offers {offers}, this worker {target.transports}"
            return await self._reject(Reason.TRANSPORT, str(error) if route.table.names else nothing)
        finally:
            waiting.cancel()
        logger.info("KV from %s is read over %s: %s", hello.worker_id, path.name, path.why)
        plan.turn_bytes = target.all_transports[path.name].turn_bytes
        self.hello, self.route, self.plan = hello, route, plan
        self._reads = ReadQueue(
            target.grants,
            target.counters,
            route,
            plan,
            self._staging_lock,
            generation_of=target.generation_of,
            stall_s=target.stall_s,
            send=self.send,
            commit=self._commit,
            abort=self._connection.abort,
        )
        self.send(
            wire.HelloReply(
                worker_id=target.worker_id,
                epoch=target.epoch,
                transport=path.name,
                why=path.why,
                layout=target.memory.layout,
                checks=target.settings.checks,
            )
        )
        return True

    def _incompatibility(self, hello: wire.Hello) -> tuple[Reason, str, str] | None:
        target, me = self._target, self._target.worker_id
        if hello.protocol != wire.TRANSFER_PROTOCOL:
            return Reason.FINGERPRINT, f"transfer protocol: {me} has {wire.TRANSFER_PROTOCOL}, not {hello.protocol}", ""
        convert_dtype = target.settings.convert_dtype
        if difference := target.fingerprint.incompatibility(hello.fingerprint, convert_dtype=convert_dtype):
            return Reason.FINGERPRINT, str(difference), difference.remedy
        checksums = kind_of(target.memory, target.settings.checks)
        if checksums not in ("off", hello.checksums):
            why = f"transfer.checks: {me} verifies {checksums}, the source sends {hello.checksums}"
            return Reason.CHECKSUM, why, ""
        return None

    async def _keep_alive(self) -> None:
        """Wiring up a path may take seconds, and a source gives up a silent target."""
        while True:
            self.send(wire.Alive())
            await asyncio.sleep(self._target.lease_s / 4)

    async def _probe(self, message: wire.Probe) -> None:
        """Measure the paths with the source's probe blocks, and send it the figures."""
        target, route, plan = self._target, self.route, self.plan
        assert route is not None and plan is not None
        try:
            async with self._staging_lock:
                await PathProbe(route, plan, message.block_ids, message.checksums).run(target.probe_buffers)
        except Exception:  # a process edge: without a probe the paths keep their ranks
            logger.exception("the probe of %s failed", self._connection.peer)
        self.send(wire.Probed(probe_id=message.probe_id, paths=route.table.reports(time.monotonic())))

    # ---- messages of the source

    def _dispatch(self, message: wire.ToTarget) -> None:
        grants = self._target.grants
        match message:
            case wire.Announce() | wire.Commit() | wire.Confirmed():
                grant = grants.renewed(message.nonce, self)
                if grant is not None:
                    self._continue(grant, message)
            case wire.Open():
                self._on_open(message)
            case wire.Renew(nonces=nonces):
                for nonce in nonces:
                    grants.renewed(nonce, self)
                self.send(wire.Alive())
            case wire.Cancel(nonce=nonce, reason=reason):
                grant = grants.get(nonce)
                if grant is not None and grant.link in (None, self):
                    grants.end(grant, refusal(grant.request_id, Reason.CANCELLED, reason))
            case wire.Probe():
                if self._probing is None or self._probing.done():
                    self._probing = asyncio.create_task(self._probe(message), name="kv probe")
            case _:
                logger.warning("%s sent a second hello; ignored", self._connection.peer)

    def _on_open(self, message: wire.Open) -> None:
        target, grant = self._target, None
        try:
            grant = self._admit(message)
            grant.link, grant.reply = self, self.send
            grant.check_generations(target.generation_of)
        except TransferRefused as error:
            if grant is not None:
                target.grants.end(grant, error)
            else:
                target.counters.refuse(str(reason_of(error)))
                logger.warning("request %s: refused its transfer: %s", message.request_id, error.why)
                self.send(wire.Refusal(nonce=message.nonce, kind=type(error).__name__, why=error.why))
            return
        assert self.plan is not None
        grant.begin(self.plan, target.settings.checks)
        grant.last_sign = time.monotonic()

    def _admit(self, message: wire.Open) -> Grant:
        """The live, unused grant that this ticket stands for. Raises TransferRefused, which harms no grant."""
        target, name = self._target, message.request_id
        ticket = wire.open_ticket(message.ticket, target.secret)
        if (ticket.nonce, ticket.request_id) != (message.nonce, name):
            raise refusal(name, Reason.UNKNOWN, "the ticket is another request's")
        if ticket.target_epoch != target.epoch:
            raise refusal(name, Reason.STALE_EPOCH, f"granted by {ticket.target_epoch}, this is {target.epoch}")
        if difference := target.fingerprint.first_difference(ticket.fingerprint):  # it was ours
            raise refusal(name, Reason.FINGERPRINT, difference)
        if ticket.target_blocks and max(ticket.target_blocks) >= target.memory.layout.num_blocks:
            raise refusal(name, Reason.OUT_OF_RANGE, "blocks that the target does not have")
        return target.grants.admit(ticket)

    def _continue(self, grant: Grant, message: wire.Announce | wire.Commit | wire.Confirmed) -> None:
        """The next message of a transfer under way; one that does not fit ends it."""
        assert self._reads is not None
        try:
            match message:
                case wire.Announce():
                    grant.transcript.add(wire.encode(message))
                    grant.accept(message, is_checked=self._target.settings.checks != "off")
                    self._reads.add(grant)
                case wire.Commit(payload=payload, seal=seal) if grant.payload is None:
                    grant.commit(payload, seal)
                    self._reads.advance(grant)
                case wire.Confirmed() if grant.is_waiting and grant.payload is not None:
                    self._commit(grant)
        except TransferRefused as error:
            self._target.grants.end(grant, error)

    def _commit(self, grant: Grant) -> None:
        """The sequence may decode from the blocks: every byte was verified, or the source held them until the last read
        had ended. Raises TransferRefused.
        """
        assert self.route is not None and grant.payload is not None
        grant.check_generations(self._target.generation_of)
        result = self._target.grants.commit(grant, self.route.next_path)
        call(self._target.on_commit, grant.request_id, grant.payload, result)
        self.send(
            wire.Committed(
                nonce=grant.ticket.nonce, transport=result.transport, num_bytes=result.num_bytes, seconds=result.seconds
            )
        )


class KvTarget:
    """Receives into one pool. One for each decode worker; lives on its loop, as do its callbacks.

    Every grant ends exactly once: on_commit; or on_failed (not after our own revoke) and then on_released, as soon as
    no transport can write those blocks any more. `lease_s`: blocks of a silent source are freed after this time.
    17 attributes: its identity, its limits, and what all of its links share.
    """

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
        probe_buffers: ProbeBuffers | None = None,
        transports: Mapping[str, Transport] = TRANSPORTS,
        tls: ClusterTls | None = None,
        lease_s: float = wire.LEASE_S,
        stall_s: float = STALL_S,
    ) -> None:
        self.worker_id, self.epoch, self.fingerprint = worker_id, epoch, fingerprint
        self.memory, self.secret, self.settings, self.host = memory, secret, settings, host
        self.generation_of, self.on_commit, self.probe_buffers = generation_of, on_commit, probe_buffers
        self.lease_s, self.stall_s = lease_s, stall_s
        self.counters = TransferStats()
        self.grants = GrantTable(self.counters, on_failed, on_released)
        self.all_transports = transports
        self.transports: list[str] = []  # those that this pool can be read into over, best first; from start() on
        self.links: set[SourceLink] = set()
        self._server = plane.Server(self._serve, secret, tls=tls)
        self.port = 0  # where sources connect, from start() on

    async def start(self) -> None:
        """Listen for sources. Raises BackendUnavailable when a forced transport cannot be used."""
        await asyncio.to_thread(library)  # compiled now, not in the first read
        await asyncio.to_thread(this_machine)  # known from then on
        self.transports += offered(self.settings.transport, self.memory, self.all_transports)
        try:
            self.port = await self._server.start(self.host)
        except OSError as error:
            raise BackendUnavailable("KV plane", f"cannot listen on {self.host}: {error}") from error

    async def aclose(self) -> None:
        """End every grant (each is released as far as its transport allows), stop listening."""
        for grant in self.grants.live:
            error = refusal(grant.request_id, Reason.CANCELLED, "the target is shutting down")
            self.grants.end(grant, error, is_ours=True)
        await self._server.aclose()

    def stats(self) -> TransferStats:
        """Counts so far, as a copy."""
        stats = copy.deepcopy(self.counters)
        stats.open_transfers, stats.quarantined_blocks = len(self.grants), self.grants.num_quarantined_blocks
        return stats

    def pairs(self) -> list[PairReport]:
        """The prefill workers that are connected, with what is known of the paths from each now."""
        return [
            PairReport(
                source=link.hello.worker_id,
                target=self.worker_id,
                target_epoch=self.epoch,
                ok=True,
                paths=link.route.table.reports(time.monotonic()),
            )
            for link in self.links
            if link.hello is not None and link.route is not None
        ]

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
        if any(block >= layout.num_blocks for block in block_ids):
            raise ValueError(f"{request_id}: granted blocks must be inside the pool")
        if self.grants.holds(request_id):
            raise ValueError(f"{request_id} still holds the blocks of an earlier grant")
        ticket = wire.Ticket(
            request_id=request_id,
            target_worker=self.worker_id,
            target_epoch=self.epoch,
            target_host=self.host,
            target_port=self.port,
            first_block=first_block,
            num_blocks=num_blocks,
            num_tokens=num_blocks * layout.block_size if num_tokens is None else num_tokens,
            layout=layout,
            target_blocks=list(block_ids),
            generations=[self.generation_of(block) for block in block_ids],
            fingerprint=self.fingerprint,
            lease_s=self.lease_s,
            nonce=secrets.token_bytes(wire.NONCE_BYTES),
        )
        if why := wire.incompatibility(ticket):
            raise ValueError(f"{request_id}: {why}")
        self.grants.add(ticket, wire.Transcript(self.secret, ticket.nonce))
        return wire.seal(ticket, self.secret)

    def revoke(self, request_id: str, reason: str = "cancelled") -> None:
        """End this request's grant from our side: no on_failed; on_released follows. Idempotent."""
        for grant in self.grants.live:
            if grant.request_id == request_id:
                self.grants.end(grant, refusal(request_id, Reason.CANCELLED, reason), is_ours=True)

    async def _serve(self, connection: Connection) -> None:
        link = SourceLink(self, connection)
        self.links.add(link)
        try:
            await link.serve()
        finally:
            self.links.discard(link)
