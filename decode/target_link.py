"""The target's connection from one source: handshake, choice of the transport, the messages of its transfers.

The worker survives whatever a peer sends: a frame that is no message of this protocol ends that
connection and fails its transfers, nothing else.
"""

import asyncio
import logging
import time

import msgspec

from kvrelay import errors
from kvrelay.decode.grants import Grant, ReceivingEnd, call
from kvrelay.decode.read_queue import ReadQueue
from kvrelay.errors import LayoutMismatch, PeerLost, PlaneError, TransferRefused, TransportError
from kvrelay.kvtransfer.mover.verification import ReceivePlan, kind_of
from kvrelay.kvtransfer.paths.path_ranking import PathTable, Route
from kvrelay.kvtransfer.paths.probes import PathProbe
from kvrelay.kvtransfer.protocol import messages as wire
from kvrelay.kvtransfer.protocol.messages import Reason, reason_of, refusal
from kvrelay.kvtransfer.transports.discovery import this_machine
from kvrelay.kvtransfer.transports.topology import rank_paths
from kvrelay.plane.framing import Connection

logger = logging.getLogger(__name__)

_HELLO_TIMEOUT_S = 10.0


class SourceLink:
    """One accepted connection."""

    def __init__(self, end: ReceivingEnd, connection: Connection) -> None:
        self._end, self._connection = end, connection
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
            self._on_lost(why)
            if self._probing is not None:
                self._probing.cancel()
                await asyncio.gather(self._probing, return_exceptions=True)
            if self._reads is not None:
                await self._reads.aclose()

    def send(self, message: wire.ToSource) -> None:
        """Queue one message; a lost connection shows elsewhere."""
        try:
            self._connection.send_nowait(wire.encode(message))
        except PlaneError as error:
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
        end = self._end
        if not isinstance(hello, wire.Hello):
            return await self._reject(Reason.MALFORMED, "the first message must be a hello")
        if misfit := self._incompatibility(hello):
            return await self._reject(*misfit)
        try:
            plan = ReceivePlan(hello.layout, end.memory)
        except LayoutMismatch as error:
            return await self._reject(Reason.FINGERPRINT, str(error))
        route = self._make_route(hello, plan)
        waiting = asyncio.create_task(self._keep_alive(), name="kv handshake")
        try:
            path = await route.open()
        except BaseException as error:
            await route.aclose()
            if not isinstance(error, TransportError):
                raise
            offers = [offer.name for offer in hello.offers]
            nothing = f"the source offers {offers}, this worker {end.offers}"
            return await self._reject(Reason.TRANSPORT, str(error) if route.table.names else nothing)
        finally:
            waiting.cancel()
        logger.info("KV from %s is read over %s: %s", hello.worker_id, path.name, path.why)
        self.hello, self.route, self.plan = hello, route, plan
        self._reads = ReadQueue(end, route, plan, self._staging_lock, send=self.send, abort=self._connection.abort)
        self.send(
            wire.HelloReply(
                worker_id=end.worker_id, epoch=end.epoch, transport=path.name, why=path.why, layout=end.memory.layout,
                checks=end.settings.checks,
            )
        )  # fmt: skip
        return True

    def _incompatibility(self, hello: wire.Hello) -> tuple[Reason, str, str] | tuple[Reason, str] | None:
        end, me = self._end, self._end.worker_id
        if hello.protocol != wire.TRANSFER_PROTOCOL:
            theirs = f"{me} has {wire.TRANSFER_PROTOCOL}, not {hello.protocol}"
            return Reason.FINGERPRINT, f"transfer protocol: {theirs}"
        convert_dtype = end.settings.convert_dtype
        if difference := end.fingerprint.incompatibility(hello.fingerprint, convert_dtype=convert_dtype):
            return Reason.FINGERPRINT, str(difference), difference.remedy
        checksums = kind_of(end.memory, end.settings.checks)
        if checksums not in ("off", hello.checksums):
            theirs = f"{me} verifies {checksums}, the source sends {hello.checksums}"
            return Reason.CHECKSUM, f"transfer.checks: {theirs}"
        return None

    async def _keep_alive(self) -> None:
        """Wiring up a path may take seconds, and a source gives up a silent target."""
        while True:
            self.send(wire.Alive())
            await asyncio.sleep(self._end.lease_s / 4)

    def _make_route(self, hello: wire.Hello, plan: ReceivePlan) -> Route:
        offers = {offer.name: offer.descriptor for offer in hello.offers}
        common = [name for name in self._end.offers if name in offers]
        ranked = rank_paths(hello.topology, this_machine(), hello.device, self._end.memory.device, common)
        return Route(PathTable(ranked), offers, lambda name: self._end.make_reader(name, plan.memory))

    def _begin_probe(self, message: wire.Probe) -> None:
        if self._probing is None or self._probing.done():
            self._probing = asyncio.create_task(self._probe(message), name="kv probe")

    async def _probe(self, message: wire.Probe) -> None:
        """Measure the paths with the source's probe blocks, and send it the figures."""
        end, route, plan = self._end, self.route, self.plan
        assert route is not None and plan is not None
        try:
            async with self._staging_lock:
                await PathProbe(route, plan, message.block_ids, message.checksums).run(end.probe_buffers)
        except Exception:  # a process edge: without a probe the paths keep their ranks
            logger.exception("the probe of %s failed", self._connection.peer)
        self.send(wire.Probed(probe_id=message.probe_id, paths=route.table.reports(time.monotonic())))

    # ---- messages of the source

    def _dispatch(self, message: wire.ToTarget) -> None:
        match message:
            case wire.Announce() | wire.Commit() | wire.Confirmed():
                grant = self._end.grants.renewed(message.nonce, self)
                if grant is not None:
                    self._continue(grant, message)
            case wire.Open():
                self._on_open(message)
            case wire.Renew(nonces=nonces):
                for nonce in nonces:
                    self._end.grants.renewed(nonce, self)
                self.send(wire.Alive())
            case wire.Cancel():
                self._on_cancel(message)
            case wire.Probe():
                self._begin_probe(message)
            case _:
                logger.warning("%s sent a second hello; ignored", self._connection.peer)

    def _on_open(self, message: wire.Open) -> None:
        end, grant = self._end, None
        try:
            grant = self._admit(message)
            grant.link, grant.reply = self, self.send
            grant.check_generations(end.generation_of)
        except TransferRefused as error:
            if grant is not None:
                end.grants.end(grant, error)
            else:
                end.stats.refuse(str(reason_of(error)))
                logger.warning("refused a transfer of %s: %s", message.request_id, error.why)
                self.send(wire.Refusal(nonce=message.nonce, kind=type(error).__name__, why=error.why))
            return
        assert self.plan is not None
        grant.begin(self.plan, is_sampled=end.settings.checks == "sampled")
        grant.last_sign = time.monotonic()

    def _admit(self, message: wire.Open) -> Grant:
        """The live, unused grant that this ticket stands for. Raises TransferRefused, which harms no grant."""
        end, name = self._end, message.request_id
        ticket = wire.open_ticket(message.ticket, end.secret)
        if (ticket.nonce, ticket.request_id) != (message.nonce, name):
            raise refusal(name, Reason.UNKNOWN, "the ticket is another request's")
        if ticket.target_epoch != end.epoch:
            raise refusal(name, Reason.STALE_EPOCH, f"granted by {ticket.target_epoch}, this is {end.epoch}")
        if difference := end.fingerprint.first_difference(ticket.fingerprint):  # it was ours
            raise refusal(name, Reason.FINGERPRINT, difference)
        if ticket.target_blocks and max(ticket.target_blocks) >= end.memory.layout.num_blocks:
            raise refusal(name, Reason.OUT_OF_RANGE, "blocks that the target does not have")
        return end.grants.admit(ticket)

    def _continue(self, grant: Grant, message: wire.Announce | wire.Commit | wire.Confirmed) -> None:
        """The next message of a transfer under way; one that does not fit ends it."""
        try:
            match message:
                case wire.Announce():
                    self._on_announce(grant, message)
                case wire.Commit():
                    self._on_commit(grant, message)
                case wire.Confirmed():
                    self._on_confirmed(grant)
        except TransferRefused as error:
            self._end.grants.end(grant, error)

    def _on_announce(self, grant: Grant, message: wire.Announce) -> None:
        grant.transcript.add(wire.encode(message))
        grant.accept(message, is_checked=self._end.settings.checks != "off")
        assert self._reads is not None
        self._reads.add(grant)

    def _on_commit(self, grant: Grant, message: wire.Commit) -> None:
        if grant.payload is not None:
            return
        grant.payload, grant.committed_at = message.payload, time.monotonic()
        grant.check_complete()
        grant.check_seal(message.payload, message.seal)
        assert self._reads is not None
        self._reads.advance(grant)

    def _on_confirmed(self, grant: Grant) -> None:
        """The source held every block until the last read had ended: the sequence may decode from them."""
        if not grant.is_waiting or grant.payload is None:
            return
        grant.check_generations(self._end.generation_of)
        self._end.grants.close(grant, Reason.USED)
        result = self._count(grant)
        call(self._end.on_commit, grant.request_id, grant.payload, result)
        self.send(
            wire.Committed(
                nonce=grant.ticket.nonce, transport=result.transport, num_bytes=result.num_bytes, seconds=result.seconds
            )
        )

    def _count(self, grant: Grant) -> wire.TransferResult:
        exposed_s = time.monotonic() - grant.committed_at
        mostly = grant.bytes_by_path.most_common(1)
        assert self.route is not None
        transport = mostly[0][0] if mostly else self.route.next_path
        result = wire.TransferResult(
            transport, grant.num_blocks, grant.bytes_by_path.total(), grant.busy_s, exposed_s, grant.retries
        )
        self._end.stats.count(result)
        self._end.stats.path(transport).exposed_s += exposed_s
        return result

    def _on_cancel(self, message: wire.Cancel) -> None:
        grant = self._end.grants.get(message.nonce)
        if grant is not None and grant.link in (None, self):
            self._end.grants.end(grant, refusal(grant.request_id, Reason.CANCELLED, message.reason))

    def _on_lost(self, why: str) -> None:
        for grant in self._end.grants.live:
            if grant.link is self:
                self._end.grants.end(grant, PeerLost(grant.request_id, why))
