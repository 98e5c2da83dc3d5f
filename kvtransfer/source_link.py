"""The source's connection to one target: handshake, dispatch of answers, lease renewal.

One connection for all transfers between the two; idle, it costs nothing. When it is lost its
transfers fail and the next transfer connects anew.
"""

import asyncio
import logging
from collections.abc import Callable
from typing import Protocol

import msgspec

from kvrelay import plane
from kvrelay.errors import AuthenticationFailed, PeerLost, PlaneError, TransferError
from kvrelay.kvtransfer.messages import (
    Cancel,
    Hello,
    HelloReply,
    Rejected,
    Renew,
    ToSource,
    ToTarget,
    decode_to_source,
    encode,
)
from kvrelay.kvtransfer.tickets import Reason, Ticket, refusal

logger = logging.getLogger(__name__)

_HANDSHAKE_TIMEOUT_S = 30.0  # an RDMA wire-up included


class Sender(Protocol):
    """A transfer, as its link sees it."""

    ticket: Ticket

    def on_message(self, message: ToSource) -> None:
        """An answer of the target to this transfer."""

    def on_lost(self, error: TransferError) -> None:
        """The link is gone."""


class TargetLink:
    """Runs from connect() until the connection ends; `on_closed` is called then."""

    def __init__(self, ticket: Ticket, hello: Hello, secret: bytes, on_closed: Callable[["TargetLink"], None]) -> None:
        self._host, self._port = ticket.target_host, ticket.target_port
        self._worker, self._epoch = ticket.target_worker, ticket.target_epoch
        self._hello, self._secret, self._on_closed = hello, secret, on_closed
        self._connection: plane.Connection | None = None
        self._task: asyncio.Task[None] | None = None
        self._renewing: asyncio.Task[None] | None = None
        self._is_ready = asyncio.Event()
        self._farewells: list[Cancel] = []  # of transfers cancelled before there was a connection
        self._senders: dict[bytes, Sender] = {}
        self._error: Callable[[str], TransferError] | None = None
        self.transport = ""

    def start(self) -> None:
        """Connect in the background."""
        self._task = asyncio.create_task(self._run(), name=f"kv link to {self._worker}")

    def add(self, sender: Sender) -> None:
        """From now on the sender hears answers, and its lease is renewed."""
        if sender.ticket.nonce in self._senders:
            raise refusal(sender.ticket.request_id, Reason.USED, "a transfer with this ticket is open")
        self._senders[sender.ticket.nonce] = sender

    def remove(self, sender: Sender) -> None:
        if self._senders.get(sender.ticket.nonce) is sender:
            del self._senders[sender.ticket.nonce]

    async def ready(self, request_id: str) -> None:
        """Wait for the handshake. Raises what ended it."""
        await self._is_ready.wait()
        if self._error is not None:
            raise self._error(request_id)
        if self._renewing is None or self._renewing.done():
            self._renewing = asyncio.create_task(self._renew(), name="kv lease renewal")

    async def send(self, request_id: str, message: ToTarget) -> None:
        """Raises PeerLost."""
        try:
            assert self._connection is not None
            await self._connection.send(encode(message))
        except PlaneError as error:
            raise PeerLost(request_id, str(error)) from error

    def tell(self, message: Cancel | ToTarget) -> None:
        """Send without waiting; a Cancel before the connection stands is kept for it."""
        if self._connection is not None and self._is_ready.is_set():
            try:
                self._connection.send_nowait(encode(message))
            except PlaneError as error:
                logger.debug("%s was not told: %s", self._worker, error)
        elif isinstance(message, Cancel):
            self._farewells.append(message)

    async def aclose(self) -> None:
        """Send what is queued and end."""
        if self._connection is not None:
            await self._connection.aclose()
        if self._task is not None:
            self._task.cancel()
            await asyncio.gather(self._task, return_exceptions=True)

    # ---- the life of the connection

    async def _run(self) -> None:
        try:
            await self._handshake()
            await self._receive()
        except TransferError as error:
            why, kind = error.why, type(error)
            self._error = lambda request_id: kind(request_id, why)
        except AuthenticationFailed as error:
            detail = str(error)
            self._error = lambda request_id: refusal(request_id, Reason.BAD_MAC, detail)
        except (PlaneError, TimeoutError, msgspec.DecodeError) as error:
            lost = f"{self._worker}: {str(error) or 'timed out'}"
            self._error = lambda request_id: PeerLost(request_id, lost)
        finally:
            self._close()

    def _close(self) -> None:
        if self._error is None:
            self._error = lambda request_id: PeerLost(request_id, f"the link to {self._worker} was closed")
        self._on_closed(self)
        self._is_ready.set()
        if self._connection is not None:
            self._connection.abort()
        if self._renewing is not None:
            self._renewing.cancel()
        for sender in list(self._senders.values()):
            sender.on_lost(self._error(sender.ticket.request_id))
        self._senders.clear()

    async def _handshake(self) -> None:
        self._connection = await plane.connect(self._host, self._port, self._secret)
        async with asyncio.timeout(_HANDSHAKE_TIMEOUT_S):
            await self._connection.send(encode(self._hello))
            reply = decode_to_source(await self._connection.receive())
        if isinstance(reply, Rejected):
            reason = Reason(reply.reason) if reply.reason in Reason._value2member_map_ else Reason.MALFORMED
            raise refusal("?", reason, reply.detail)
        if not isinstance(reply, HelloReply):
            raise refusal("?", Reason.MALFORMED, "no reply to the hello")
        if (reply.worker_id, reply.epoch) != (self._worker, self._epoch):
            raise refusal(
                "?", Reason.STALE_EPOCH, f"{self._worker} has been replaced by {reply.worker_id} {reply.epoch}"
            )
        self.transport = reply.transport
        logger.info("KV to %s goes over %s: %s", self._worker, reply.transport, reply.why)
        self._is_ready.set()
        for farewell in self._farewells:
            self.tell(farewell)
        self._farewells.clear()

    async def _receive(self) -> None:
        assert self._connection is not None
        while True:
            message = decode_to_source(await self._connection.receive())
            if isinstance(message, Rejected):
                raise refusal("?", Reason.MALFORMED, message.detail)
            if isinstance(message, HelloReply):
                continue
            sender = self._senders.get(message.nonce)
            if sender is not None:
                sender.on_message(message)

    async def _renew(self) -> None:
        """While transfers are open, tell the target that we live: three times in a lease."""
        while self._senders:
            await asyncio.sleep(min(sender.ticket.lease_s for sender in self._senders.values()) / 3)
            if self._senders:
                self.tell(Renew(nonces=list(self._senders)))
