"""The source's connection to one target: handshake, dispatch of answers, lease renewal.

One connection for all transfers between the two; idle, it costs nothing. When it is lost its
transfers fail and the next transfer connects anew.
"""

import asyncio
import itertools
import logging
import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Protocol

import msgspec

from kvrelay.errors import AuthenticationFailed, LeaseExpired, PeerLost, PlaneError, TransferError
from kvrelay.kvtransfer.protocol.messages import (
    Alive,
    Cancel,
    Hello,
    HelloReply,
    Probe,
    Probed,
    Rejected,
    Renew,
    ToSource,
    ToTarget,
    decode_to_source,
    encode,
)
from kvrelay.kvtransfer.protocol.tickets import PathReport, Reason, Ticket, refusal
from kvrelay.plane import connection as plane
from kvrelay.plane.framing import Connection
from kvrelay.plane.tls import ClusterTls
from kvrelay.settings.transfer import TransferSettings

logger = logging.getLogger(__name__)

_CONNECT_TIMEOUT_S = 5.0
_HANDSHAKE_TIMEOUT_S = 30.0  # an RDMA wire-up included


class Sender(Protocol):
    """A transfer, as its link sees it."""

    ticket: Ticket

    def on_message(self, message: ToSource) -> None:
        """An answer of the target to this transfer."""

    def on_lost(self, error: TransferError) -> None:
        """The link is gone."""


@dataclass(frozen=True, slots=True)
class TargetAddress:
    """One incarnation of a decode worker, and where it listens for sources. Never from a client."""

    worker: str
    epoch: str
    host: str
    port: int


class Window:
    """How many bytes may be announced ahead of the reader: a weighted semaphore, first come, first served.

    Lives on one event loop.
    """

    def __init__(self, num_bytes: int) -> None:
        self._size = self._free = num_bytes
        self._waiting: deque[tuple[int, asyncio.Future[None]]] = deque()

    async def take(self, num_bytes: int) -> int:
        """Wait for room; returns what was taken and must be given back (at most the whole window)."""
        wanted = min(num_bytes, self._size)
        if not self._waiting and wanted <= self._free:
            self._free -= wanted
            return wanted
        turn: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._waiting.append((wanted, turn))
        try:
            await turn
        except asyncio.CancelledError:
            if turn.done() and not turn.cancelled():
                self.give(wanted)  # it was our turn in the very moment in which we left
            else:
                self._waiting.remove((wanted, turn))
                self._serve()
            raise
        return wanted

    def give(self, num_bytes: int) -> None:
        """Room again."""
        self._free += num_bytes
        self._serve()

    def _serve(self) -> None:
        while self._waiting and self._waiting[0][0] <= self._free:
            wanted, turn = self._waiting.popleft()
            self._free -= wanted
            turn.set_result(None)

    @property
    def num_taken(self) -> int:
        """Bytes announced and not yet read."""
        return self._size - self._free


class TargetLink:
    """Runs from connect() until the connection ends; `on_closed` is called then.
    23 attributes: the address, the connection's state, and the limits that the constructor takes."""

    def __init__(
        self,
        address: TargetAddress,
        hello: Hello,
        secret: bytes,
        settings: TransferSettings,
        on_closed: Callable[["TargetLink"], None],
        *,
        tls: ClusterTls | None = None,
    ) -> None:
        self._host, self._port = address.host, address.port
        self._worker, self._epoch = address.worker, address.epoch
        self._hello, self._secret, self._on_closed = hello, secret, on_closed
        self.window = Window(settings.window_bytes)
        self.reply: HelloReply | None = None  # set by the handshake
        self.paths: list[PathReport] = []  # of the last probe
        self.remedy = ""  # the target's advice, when it has rejected us
        self._lease_s = settings.lease_s
        self._last_heard = 0.0
        self._probes: dict[int, asyncio.Future[list[PathReport]]] = {}
        self._probe_ids = itertools.count(1)
        self._tls = tls
        self._connection: Connection | None = None
        self._task: asyncio.Task[None] | None = None
        self._renewing: asyncio.Task[None] | None = None
        self._is_ready = asyncio.Event()
        self._early_cancels: list[Cancel] = []  # of transfers cancelled before there was a connection
        self._senders: dict[bytes, Sender] = {}
        self._error: Callable[[str], TransferError] | None = None

    def start(self) -> None:
        """Connect in the background."""
        self._task = asyncio.create_task(self._run(), name=f"kv link to {self._worker}")

    def add(self, sender: Sender) -> None:
        """From now on the sender receives answers, and its lease is renewed."""
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
        if self._senders and (self._renewing is None or self._renewing.done()):
            self._last_heard = time.monotonic()
            self._renewing = asyncio.create_task(self._renew(), name="kv lease renewal")

    async def probe(self, block_ids: list[int], checksums: bytes) -> list[PathReport]:
        """Have the target measure the paths with these blocks of ours, which must not be re-used meanwhile. Raises
        TransferError.
        """
        probe_id = next(self._probe_ids)
        answer: asyncio.Future[list[PathReport]] = asyncio.get_running_loop().create_future()
        self._probes[probe_id] = answer
        try:
            await self.send("probe", Probe(probe_id=probe_id, block_ids=block_ids, checksums=checksums))
            self.paths = await answer
            return self.paths
        finally:
            del self._probes[probe_id]

    async def send(self, request_id: str, message: ToTarget) -> None:
        """Raises PeerLost."""
        try:
            assert self._connection is not None
            await self._connection.send(encode(message))
        except PlaneError as error:
            raise PeerLost(request_id, str(error)) from error

    def notify(self, message: Cancel | ToTarget) -> None:
        """Send without waiting; a Cancel before the connection stands is kept for it."""
        if self._connection is not None and self._is_ready.is_set():
            try:
                self._connection.send_nowait(encode(message))
            except PlaneError as error:
                logger.debug("%s was not notified: %s", self._worker, error)
        elif isinstance(message, Cancel):
            self._early_cancels.append(message)

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
        for answer in self._probes.values():
            if not answer.done():
                answer.set_exception(self._error("probe"))

    async def _handshake(self) -> None:
        patience_s = min(self._lease_s, _CONNECT_TIMEOUT_S)
        self._connection = await plane.connect(
            self._host, self._port, self._secret, tls=self._tls, timeout_s=patience_s
        )
        await self._connection.send(encode(self._hello))
        async with asyncio.timeout(_HANDSHAKE_TIMEOUT_S):
            reply: ToSource = Alive()
            while isinstance(reply, Alive):  # it lives, and is still wiring up a path
                async with asyncio.timeout(self._lease_s):
                    reply = decode_to_source(await self._connection.receive())
        if isinstance(reply, Rejected):
            reason = Reason(reply.reason) if reply.reason in Reason._value2member_map_ else Reason.MALFORMED
            self.remedy = reply.remedy
            raise refusal("?", reason, f"{reply.detail}; {reply.remedy}" if reply.remedy else reply.detail)
        if not isinstance(reply, HelloReply):
            raise refusal("?", Reason.MALFORMED, "no reply to the hello")
        if (reply.worker_id, reply.epoch) != (self._worker, self._epoch):
            raise refusal(
                "?", Reason.STALE_EPOCH, f"{self._worker} has been replaced by {reply.worker_id} {reply.epoch}"
            )
        self.reply = reply
        logger.info("KV to %s goes over %s: %s", self._worker, reply.transport, reply.why)
        self._is_ready.set()
        for cancel in self._early_cancels:
            self.notify(cancel)
        self._early_cancels.clear()

    async def _receive(self) -> None:
        assert self._connection is not None
        while True:
            message = decode_to_source(await self._connection.receive())
            self._last_heard = time.monotonic()
            if isinstance(message, Rejected):
                raise refusal("?", Reason.MALFORMED, message.detail)
            if isinstance(message, Probed):
                answer = self._probes.get(message.probe_id)
                if answer is not None and not answer.done():
                    answer.set_result(message.paths)
            elif not isinstance(message, HelloReply | Alive):
                sender = self._senders.get(message.nonce)
                if sender is not None:
                    sender.on_message(message)

    async def _renew(self) -> None:
        """While transfers are open, renew their leases three times in a lease; give up a silent target."""
        while self._senders:
            await asyncio.sleep(min(self._lease_s, *(sender.ticket.lease_s for sender in self._senders.values())) / 3)
            silent_s = time.monotonic() - self._last_heard
            if silent_s > self._lease_s:
                why = f"no sign of {self._worker} for {silent_s:.1f} s"
                self._error = partial(LeaseExpired, why=why)
                assert self._task is not None
                self._task.cancel()
                return
            if self._senders:
                self.notify(Renew(nonces=list(self._senders)))
