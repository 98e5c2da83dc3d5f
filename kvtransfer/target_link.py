"""The target's connection from one source: handshake, choice of the transport, dispatch.

Whatever a peer sends, the worker lives: a frame that is no message of this protocol ends that
connection and fails its transfers, nothing else.
"""

import asyncio
import logging
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from typing import Protocol

import msgspec

from kvrelay import plane
from kvrelay.errors import ConnectionLost, PlaneError, ProtocolError
from kvrelay.kvtransfer.grants import Grant, Unit
from kvrelay.kvtransfer.lanes import Lane
from kvrelay.kvtransfer.messages import (
    Announce,
    Cancel,
    Commit,
    Confirmed,
    Hello,
    HelloReply,
    Open,
    Rejected,
    Renew,
    ToSource,
    decode_to_target,
    encode,
)
from kvrelay.kvtransfer.selection import rank
from kvrelay.kvtransfer.tickets import TRANSFER_PROTOCOL, Reason
from kvrelay.kvtransfer.transports.base import Reader, TransportError, host_id
from kvrelay.types import Fingerprint

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

    def offers(self) -> list[str]:
        """Transports that the target can read over, best first."""

    def make_reader(self, name: str) -> Reader: ...

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

    def __init__(self, owner: Owner, connection: plane.Connection) -> None:
        self._owner, self._connection = owner, connection
        self.hello: Hello | None = None
        self.lane: Lane | None = None
        self.transport = ""

    @property
    def source_num_blocks(self) -> int:
        return self.hello.num_blocks if self.hello is not None else 0

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
            if self.lane is not None:
                await self.lane.aclose()

    def send(self, message: ToSource) -> None:
        """Queue one message; a lost connection shows elsewhere."""
        try:
            self._connection.send_nowait(encode(message))
        except PlaneError as error:
            logger.debug("not sent: %s", error)

    async def _reject(self, reason: Reason, detail: str) -> None:
        logger.warning("refused the KV source at %s: %s: %s", self._connection.peer, reason, detail)
        self.send(Rejected(reason=str(reason), detail=detail))
        await self._connection.aclose()

    async def _welcome(self, hello: object) -> bool:
        if not isinstance(hello, Hello):
            await self._reject(Reason.MALFORMED, "the first message must be a hello")
            return False
        if misfit := self._misfit(hello):
            await self._reject(*misfit)
            return False
        reader, name, why = await self._connect_reader(hello)
        if reader is None:
            await self._reject(Reason.TRANSPORT, why)
            return False
        logger.info("KV from %s comes over %s: %s", hello.worker_id, name, why)
        self.hello, self.transport = hello, name
        self.lane = Lane(reader, self._owner.carry(self))
        me = self._owner.identity
        self.send(HelloReply(worker_id=me.worker_id, epoch=me.epoch, transport=name, why=why))
        return True

    def _misfit(self, hello: Hello) -> tuple[Reason, str] | None:
        me = self._owner.identity
        if hello.protocol != TRANSFER_PROTOCOL:
            return (
                Reason.FINGERPRINT,
                f"transfer protocol: {me.worker_id} has {TRANSFER_PROTOCOL}, not {hello.protocol}",
            )
        if difference := me.fingerprint.first_difference(hello.fingerprint):
            return Reason.FINGERPRINT, difference
        if me.checksums not in ("off", hello.checksums):
            detail = (
                f"this worker verifies {me.checksums}, the source sends {hello.checksums}: set transfer.checks alike"
            )
            return Reason.CHECKSUM, detail
        return None

    async def _connect_reader(self, hello: Hello) -> tuple[Reader | None, str, str]:
        """(connected reader or None, transport, why). Tries the ranked transports in order."""
        offers = {offer.name: offer.descriptor for offer in hello.offers}
        is_same_host = bool(hello.host_id) and hello.host_id == host_id()
        mine = self._owner.offers()
        ranked = rank(
            list(offers), mine, is_same_host=is_same_host,
            source_device=hello.device, target_device=self._owner.identity.device,
        )  # fmt: skip
        problems = []
        for name, why in ranked:
            reader = self._owner.make_reader(name)
            try:
                await reader.connect(offers[name])
            except BaseException as error:
                await reader.aclose()
                if not isinstance(error, TransportError):
                    raise
                problems.append(f"{name}: {error}")
                continue
            return reader, name, why if not problems else f"{why} (after {'; '.join(problems)})"
        return None, "", "; ".join(problems) or f"the source offers {list(offers)}, this worker {mine}"

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
            case _:
                logger.warning("%s sent a second hello; ignored", self._connection.peer)
