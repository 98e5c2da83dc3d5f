"""The target's connection from one source: handshake, choice of the transport, the messages of its transfers.

The worker survives whatever a peer sends: a frame that is no message of this protocol ends that
connection and fails its transfers, nothing else.
"""

import asyncio
import logging
import time

import msgspec

from kvrelay.decode.grants import Grant, call, check_ticket
from kvrelay.decode.read_queue import ReadQueue
from kvrelay.decode.receiving_end import ReceivingEnd
from kvrelay.errors import ConnectionLost, LayoutMismatch, PeerLost, PlaneError, ProtocolError, TransferRefused
from kvrelay.kvtransfer.paths.discovery import this_machine
from kvrelay.kvtransfer.paths.path_ranking import PathTable, Route
from kvrelay.kvtransfer.paths.topology import rank_paths
from kvrelay.kvtransfer.protocol.messages import (
    Alive,
    Announce,
    Cancel,
    Commit,
    Committed,
    Confirmed,
    Hello,
    HelloReply,
    Open,
    Probed,
    Refusal,
    Rejected,
    Renew,
    ToSource,
    decode_to_target,
    encode,
)
from kvrelay.kvtransfer.protocol.messages import Probe as ProbeRequest
from kvrelay.kvtransfer.protocol.tickets import (
    REMEDIES,
    TRANSFER_PROTOCOL,
    Reason,
    TransferResult,
    open_ticket,
    reason_of,
    refusal,
)
from kvrelay.kvtransfer.reads.probes import PathProbe
from kvrelay.kvtransfer.reads.receive_plan import ReceivePlan
from kvrelay.kvtransfer.transports.base import TransportError
from kvrelay.plane.framing import Connection

logger = logging.getLogger(__name__)

_HELLO_TIMEOUT_S = 10.0


class SourceLink:
    """One accepted connection."""

    def __init__(self, end: ReceivingEnd, connection: Connection) -> None:
        self._end, self._connection = end, connection
        self.hello: Hello | None = None
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
                first = decode_to_target(await self._connection.receive())
            if await self._welcome(first):
                await self._connection.read_all(lambda frame: self._dispatch(decode_to_target(frame)))
        except msgspec.DecodeError as error:
            why = f"the source sent a malformed message: {error}"
            await self._reject(Reason.MALFORMED, str(error))
            raise ProtocolError(why) from error
        except ConnectionLost as error:
            why = str(error)
            raise
        finally:
            self._on_lost(why)
            if self._probing is not None:
                self._probing.cancel()
                await asyncio.gather(self._probing, return_exceptions=True)
            if self._reads is not None:
                await self._reads.aclose()

    def send(self, message: ToSource) -> None:
        """Queue one message; a lost connection shows elsewhere."""
        try:
            self._connection.send_nowait(encode(message))
        except PlaneError as error:
            logger.debug("not sent: %s", error)

    async def _reject(self, reason: Reason, detail: str, remedy: str = "") -> None:
        logger.warning("refused the KV source at %s: %s: %s", self._connection.peer, reason, detail)
        self.send(Rejected(reason=str(reason), detail=detail, remedy=remedy or REMEDIES.get(reason, "")))
        await self._connection.aclose()

    async def _welcome(self, hello: object) -> bool:
        if not isinstance(hello, Hello):
            await self._reject(Reason.MALFORMED, "the first message must be a hello")
            return False
        if misfit := self._incompatibility(hello):
            await self._reject(*misfit)
            return False
        try:
            plan = ReceivePlan(hello.layout, self._end.memory)
        except LayoutMismatch as error:
            await self._reject(Reason.FINGERPRINT, str(error))
            return False
        route = self._make_route(hello, plan)
        waiting = asyncio.create_task(self._keep_alive(), name="kv handshake")
        try:
            path = await route.open()
        except BaseException as error:
            await route.aclose()
            if not isinstance(error, TransportError):
                raise
            await self._reject(Reason.TRANSPORT, str(error) if route.table.names else self._nothing_in_common(hello))
            return False
        finally:
            waiting.cancel()
        logger.info("KV from %s is read over %s: %s", hello.worker_id, path.name, path.why)
        self.hello, self.route, self.plan = hello, route, plan
        self._reads = ReadQueue(
            self._end, route, plan, self._staging_lock, send=self.send, abort=self._connection.abort
        )
        me, settings = self._end.identity, self._end.settings
        self.send(
            HelloReply(
                worker_id=me.worker_id,
                epoch=me.epoch,
                transport=path.name,
                why=path.why,
                layout=self._end.memory.layout,
                checks=settings.checks,
                sampled_share=settings.sampled_share,
            )
        )
        return True

    def _incompatibility(self, hello: Hello) -> tuple[Reason, str, str] | tuple[Reason, str] | None:
        me = self._end.identity
        if hello.protocol != TRANSFER_PROTOCOL:
            return (
                Reason.FINGERPRINT,
                f"transfer protocol: {me.worker_id} has {TRANSFER_PROTOCOL}, not {hello.protocol}",
            )
        convert_dtype = self._end.settings.convert_dtype
        if difference := me.fingerprint.incompatibility(hello.fingerprint, convert_dtype=convert_dtype):
            return Reason.FINGERPRINT, str(difference), difference.remedy
        if me.checksums not in ("off", hello.checksums):
            return (
                Reason.CHECKSUM,
                f"transfer.checks: {me.worker_id} verifies {me.checksums}, the source sends {hello.checksums}",
            )
        return None

    async def _keep_alive(self) -> None:
        """Wiring up a path may take seconds, and a source gives up a silent target."""
        while True:
            self.send(Alive())
            await asyncio.sleep(self._end.settings.lease_s / 4)

    def _make_route(self, hello: Hello, plan: ReceivePlan) -> Route:
        offers = {offer.name: offer.descriptor for offer in hello.offers}
        common = [name for name in self._end.offers if name in offers]
        device = self._end.identity.device
        ranked = rank_paths(hello.topology, this_machine(), hello.device, device, common)
        return Route(PathTable(ranked), offers, lambda name: self._end.make_reader(name, plan.memory))

    def _nothing_in_common(self, hello: Hello) -> str:
        return f"the source offers {[offer.name for offer in hello.offers]}, this worker {self._end.offers}"

    def _begin_probe(self, message: ProbeRequest) -> None:
        if self._probing is None or self._probing.done():
            self._probing = asyncio.create_task(self._probe(message), name="kv probe")

    async def _probe(self, message: ProbeRequest) -> None:
        """Measure the paths with the source's probe blocks, and send it the figures."""
        end, route, plan = self._end, self.route, self.plan
        assert route is not None and plan is not None
        try:
            async with self._staging_lock:
                await PathProbe(route, plan, message.block_ids, message.checksums).run(end.probe_buffers)
        except Exception:  # a process edge: without a probe the paths keep their ranks
            logger.exception("the probe of %s failed", self._connection.peer)
        self.send(Probed(probe_id=message.probe_id, paths=route.table.reports(time.monotonic())))

    # ---- messages of the source

    def _dispatch(self, message: object) -> None:
        match message:
            case Announce():
                self._on_announce(message)
            case Open():
                self._on_open(message)
            case Commit():
                self._on_commit(message)
            case Confirmed():
                self._on_confirmed(message)
            case Renew(nonces=nonces):
                for nonce in nonces:
                    self._end.grants.renewed(nonce, self)
                self.send(Alive())
            case Cancel():
                self._on_cancel(message)
            case ProbeRequest():
                self._begin_probe(message)
            case _:
                logger.warning("%s sent a second hello; ignored", self._connection.peer)

    def _on_open(self, message: Open) -> None:
        end, grant = self._end, None
        try:
            grant = self._admit(message)
            grant.check_generations(end.generation_of)
        except TransferRefused as error:
            if grant is not None:
                grant.open(self, self.send)
                end.grants.end(grant, error)
            else:
                end.stats.refuse(str(reason_of(error)))
                logger.warning("refused a transfer of %s: %s", message.request_id, error.why)
                self.send(Refusal(nonce=message.nonce, kind=type(error).__name__, why=error.why))
            return
        assert self.plan is not None
        grant.open(self, self.send)
        grant.begin(self.plan, end.settings.sampled_share if end.settings.checks == "sampled" else None)
        grant.last_sign = time.monotonic()

    def _admit(self, message: Open) -> Grant:
        """The live, unused grant that this ticket stands for. Raises TransferRefused, which harms no grant."""
        me, memory = self._end.identity, self._end.memory
        ticket = open_ticket(message.ticket, self._end.secret)
        if (ticket.nonce, ticket.request_id) != (message.nonce, message.request_id):
            raise refusal(message.request_id, Reason.UNKNOWN, "the ticket is another request's")
        difference = me.fingerprint.first_difference(ticket.fingerprint)  # it was ours
        check_ticket(ticket, difference, me.epoch, memory.layout.num_blocks)
        return self._end.grants.admit(ticket)

    def _on_announce(self, message: Announce) -> None:
        grant = self._end.grants.renewed(message.nonce, self)
        if grant is None:
            return
        try:
            grant.transcript.add(encode(message))
            grant.accept(message, is_checked=self._end.settings.checks != "off")
        except TransferRefused as error:
            self._end.grants.end(grant, error)
            return
        assert self._reads is not None
        self._reads.add(grant)

    def _on_commit(self, message: Commit) -> None:
        grant = self._end.grants.renewed(message.nonce, self)
        if grant is None or grant.payload is not None:
            return
        grant.payload, grant.committed_at = message.payload, time.monotonic()
        try:
            grant.check_complete()
            grant.check_seal(message.payload, message.seal)
        except TransferRefused as error:
            self._end.grants.end(grant, error)
            return
        assert self._reads is not None
        self._reads.advance(grant)

    def _on_confirmed(self, message: Confirmed) -> None:
        """The source held every block until the last read had ended: the sequence may decode from them."""
        grants = self._end.grants
        grant = grants.renewed(message.nonce, self)
        if grant is None or not grant.is_waiting or grant.payload is None:
            return
        try:
            grant.check_generations(self._end.generation_of)
        except TransferRefused as error:
            grants.end(grant, error)
            return
        grants.close(grant, Reason.USED)
        result = self._count(grant)
        call(self._end.on_commit, grant.request_id, grant.payload, result)
        self.send(
            Committed(
                nonce=message.nonce, transport=result.transport, num_bytes=result.num_bytes, seconds=result.seconds
            )
        )

    def _count(self, grant: Grant) -> TransferResult:
        exposed_s = time.monotonic() - grant.committed_at
        mostly = grant.bytes_by_path.most_common(1)
        assert self.route is not None
        transport = mostly[0][0] if mostly else self.route.next_path
        result = TransferResult(transport, grant.num_blocks, grant.num_bytes, grant.busy_s, exposed_s, grant.retries)
        self._end.stats.count(result)
        self._end.stats.path(transport).exposed_s += exposed_s
        return result

    def _on_cancel(self, message: Cancel) -> None:
        grant = self._end.grants.get(message.nonce)
        if grant is not None and grant.link in (None, self):
            self._end.grants.end(grant, refusal(grant.request_id, Reason.CANCELLED, message.reason))

    def _on_lost(self, why: str) -> None:
        for grant in self._end.grants.live:
            if grant.link is self:
                self._end.grants.end(grant, PeerLost(grant.request_id, why))
