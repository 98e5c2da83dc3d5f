"""The target's connection from one source: handshake, choice of the transport, dispatch.

Whatever a peer sends, the worker lives: a frame that is no message of this protocol ends that
connection and fails its transfers, nothing else.
"""

import asyncio
import logging
import time
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from typing import Protocol

import msgspec

from kvrelay.decode.read_queue import Lane
from kvrelay.errors import ConnectionLost, LayoutMismatch, PlaneError, ProtocolError
from kvrelay.kvtransfer.paths.discovery import this_machine
from kvrelay.kvtransfer.paths.path_ranking import PathTable
from kvrelay.kvtransfer.paths.topology import rank_paths
from kvrelay.kvtransfer.protocol.grants import Grant, Unit
from kvrelay.kvtransfer.protocol.messages import (
    Alive,
    Announce,
    Cancel,
    Commit,
    Confirmed,
    Hello,
    HelloReply,
    Open,
    Probed,
    Rejected,
    Renew,
    ToSource,
    decode_to_target,
    encode,
)
from kvrelay.kvtransfer.protocol.messages import Probe as ProbeRequest
from kvrelay.kvtransfer.protocol.tickets import REMEDIES, TRANSFER_PROTOCOL, Reason
from kvrelay.kvtransfer.protocol.types import Lender
from kvrelay.kvtransfer.reads.probes import Probe
from kvrelay.kvtransfer.reads.receive_plan import Landing
from kvrelay.kvtransfer.reads.route import Route
from kvrelay.kvtransfer.transports.base import Reader, TransportError
from kvrelay.plane.framing import Connection
from kvrelay.settings.transfer import TransferSettings
from kvrelay.types import Fingerprint, KvMemory

logger = logging.getLogger(__name__)

_HELLO_TIMEOUT_S = 10.0


@dataclass(frozen=True, slots=True)
class TargetIdentity:
    """What the target compares a source's Hello with."""

    worker_id: str
    epoch: str
    fingerprint: Fingerprint
    device: str
    checksums: str  # as Hello.checksums


class Owner(Protocol):
    """The target, as its links see it."""

    identity: TargetIdentity
    settings: TransferSettings
    memory: KvMemory
    lender: Lender | None

    def offers(self) -> list[str]:
        """Transports that the target can read over, best first."""

    def make_reader(self, name: str, memory: KvMemory) -> Reader: ...

    def carry(self, link: "SourceLink") -> Callable[[Grant, Unit], Awaitable[None]]:
        """What the link's lane does with a unit."""

    def on_open(self, link: "SourceLink", message: Open) -> None: ...

    def on_announce(self, link: "SourceLink", message: Announce) -> None: ...

    def on_commit_message(self, link: "SourceLink", message: Commit) -> None: ...

    def on_confirmed(self, link: "SourceLink", message: Confirmed) -> None: ...

    def on_cancel(self, link: "SourceLink", message: Cancel) -> None: ...

    def on_renew(self, link: "SourceLink", message: Renew) -> None: ...

    def on_link_lost(self, link: "SourceLink", why: str) -> None: ...


class SourceLink:
    """One accepted connection."""

    def __init__(self, owner: Owner, connection: Connection) -> None:
        self._owner, self._connection = owner, connection
        self.hello: Hello | None = None
        self.route: Route | None = None
        self.landing: Landing | None = None
        self.staging_lock = asyncio.Lock()
        self.lane: Lane | None = None
        self._probing: asyncio.Task[None] | None = None

    @property
    def transport(self) -> str:
        """The path that the next read takes."""
        path = self.route.table.best(time.monotonic()) if self.route is not None else None
        return path.name if path is not None else ""

    async def serve(self) -> None:
        """Run until the connection ends; then fail its transfers and let go of the source."""
        why = "the source closed the connection"
        try:
            async with asyncio.timeout(_HELLO_TIMEOUT_S):
                first = decode_to_target(await self._connection.receive())
            if await self._welcome(first):
                while True:
                    self._dispatch(decode_to_target(await self._connection.receive()))
        except msgspec.DecodeError as error:
            why = f"the source sent a malformed message: {error}"
            await self._reject(Reason.MALFORMED, str(error))
            raise ProtocolError(why) from error
        except ConnectionLost as error:
            why = str(error)
            raise
        finally:
            self._owner.on_link_lost(self, why)
            if self._probing is not None:
                self._probing.cancel()
                await asyncio.gather(self._probing, return_exceptions=True)
            if self.lane is not None:
                await self.lane.aclose()

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
            landing = Landing(hello.layout, self._owner.memory)
        except LayoutMismatch as error:
            await self._reject(Reason.FINGERPRINT, str(error))
            return False
        route = self._make_route(hello, landing)
        waiting = asyncio.create_task(self._show_life(), name="kv handshake")
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
        logger.info("KV from %s comes over %s: %s", hello.worker_id, path.name, path.why)
        self.hello, self.route, self.landing = hello, route, landing
        self.lane = Lane(route, self._owner.carry(self))
        me, settings = self._owner.identity, self._owner.settings
        self.send(
            HelloReply(
                worker_id=me.worker_id, epoch=me.epoch, transport=path.name, why=path.why, layout=self._owner.memory.layout,
                checks=settings.checks, sampled_share=settings.sampled_share,
            )
        )  # fmt: skip
        return True

    def abort(self) -> None:
        """Drop the connection: its transfers fail, and the source connects anew."""
        self._connection.abort()

    def _incompatibility(self, hello: Hello) -> tuple[Reason, str, str] | tuple[Reason, str] | None:
        me = self._owner.identity
        if hello.protocol != TRANSFER_PROTOCOL:
            return (
                Reason.FINGERPRINT,
                f"transfer protocol: {me.worker_id} has {TRANSFER_PROTOCOL}, not {hello.protocol}",
            )
        convert_dtype = self._owner.settings.convert_dtype
        if difference := me.fingerprint.incompatibility(hello.fingerprint, convert_dtype=convert_dtype):
            return Reason.FINGERPRINT, str(difference), difference.remedy
        if me.checksums not in ("off", hello.checksums):
            return (
                Reason.CHECKSUM,
                f"transfer.checks: {me.worker_id} verifies {me.checksums}, the source sends {hello.checksums}",
            )
        return None

    async def _show_life(self) -> None:
        """A path may take seconds to wire up; the source would take a silent target for a dead one."""
        while True:
            self.send(Alive())
            await asyncio.sleep(self._owner.settings.lease_s / 4)

    def _make_route(self, hello: Hello, landing: Landing) -> Route:
        offers = {offer.name: offer.descriptor for offer in hello.offers}
        common = [name for name in self._owner.offers() if name in offers]
        device = self._owner.identity.device
        ranked = rank_paths(hello.topology, this_machine(), hello.device, device, common)
        return Route(PathTable(ranked), offers, lambda name: self._owner.make_reader(name, landing.memory))

    def _nothing_in_common(self, hello: Hello) -> str:
        return f"the source offers {[offer.name for offer in hello.offers]}, this worker {self._owner.offers()}"

    def _begin_probe(self, message: ProbeRequest) -> None:
        if self._probing is None or self._probing.done():
            self._probing = asyncio.create_task(self._probe(message), name="kv probe")

    async def _probe(self, message: ProbeRequest) -> None:
        """Measure the paths with the blocks that the source lends, and tell it."""
        owner, route, landing = self._owner, self.route, self.landing
        assert route is not None and landing is not None
        try:
            async with self.staging_lock:
                await Probe(route, landing, message.block_ids, message.checksums).run(owner.lender)
        except Exception:  # a process edge: without a probe the paths keep their ranks
            logger.exception("the probe of %s failed", self._connection.peer)
        self.send(Probed(probe_id=message.probe_id, paths=route.table.reports(time.monotonic())))

    def _dispatch(self, message: object) -> None:
        owner = self._owner
        match message:
            case Announce():
                owner.on_announce(self, message)
            case Open():
                owner.on_open(self, message)
            case Commit():
                owner.on_commit_message(self, message)
            case Confirmed():
                owner.on_confirmed(self, message)
            case Renew():
                owner.on_renew(self, message)
            case Cancel():
                owner.on_cancel(self, message)
            case ProbeRequest():
                self._begin_probe(message)
            case _:
                logger.warning("%s sent a second hello; ignored", self._connection.peer)
