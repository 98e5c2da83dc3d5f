"""The source's connections to decode workers: handshake, dispatch of answers, lease renewal, probes.

One connection for all transfers between the two, made when it is first needed; idle, it costs nothing. When it is lost
its transfers fail and the next transfer connects anew.
"""

import asyncio
import itertools
import logging
import time
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from functools import partial
from typing import Protocol

import msgspec

from kvrelay.errors import (
    AuthenticationFailed,
    BackendUnavailable,
    LeaseExpired,
    PeerLost,
    PlaneError,
    TransferError,
    TransferRefused,
)
from kvrelay.kvtransfer.mover.copy_plan import LARGE_TURN_BYTES
from kvrelay.kvtransfer.protocol import messages as wire
from kvrelay.kvtransfer.protocol.messages import Reason, reason_of, refusal
from kvrelay.plane import connection as plane
from kvrelay.plane.framing import Connection
from kvrelay.plane.reports import PairReport, PathReport
from kvrelay.plane.tls import ClusterTls

logger = logging.getLogger(__name__)

WINDOW_BYTES = 2 * LARGE_TURN_BYTES  # announced ahead of one decode worker's reads
PAIR_TIMEOUT_S = 60.0
_LOST_REMEDY = "see whether the decode worker runs, and whether its KV port can be reached from here"
_CONNECT_TIMEOUT_S = 5.0
_HANDSHAKE_TIMEOUT_S = 30.0  # an RDMA wire-up included


class Sender(Protocol):
    """A transfer, as its link sees it: the link knows nothing of how KV is announced and committed."""

    ticket: wire.Ticket

    def on_message(self, message: wire.ToSource) -> None:
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
        self._turn, self._has_more = asyncio.Lock(), asyncio.Event()

    async def take(self, num_bytes: int) -> int:
        """Wait for room; returns what was taken and must be given back (at most the whole window)."""
        wanted = min(num_bytes, self._size)
        async with self._turn:
            while wanted > self._free:
                self._has_more.clear()
                await self._has_more.wait()
            self._free -= wanted
        return wanted

    def give(self, num_bytes: int) -> None:
        """Room again."""
        self._free += num_bytes
        self._has_more.set()


class TargetLink:
    """Runs from connect() until the connection ends; `on_closed` is called then.
    20 attributes: the address, the connection's state, and the limits that the constructor takes."""

    def __init__(
        self,
        address: TargetAddress,
        hello: Callable[[], Awaitable[wire.Hello]],
        secret: bytes,
        on_closed: Callable[[TargetAddress], None],
        *,
        tls: ClusterTls | None,
        lease_s: float,
        window_bytes: int,
    ) -> None:
        self._address, self._hello, self._secret, self._on_closed = address, hello, secret, on_closed
        self.window = Window(window_bytes)
        self.reply: wire.HelloReply | None = None  # set by the handshake
        self.paths: list[PathReport] = []  # of the last probe
        self.remedy = ""  # the target's advice, when it has rejected us
        self._tls, self._lease_s = tls, lease_s
        self._last_heard = 0.0
        self._probes: dict[int, asyncio.Future[list[PathReport]]] = {}
        self._probe_ids = itertools.count(1)
        self._connection: Connection | None = None
        self._task: asyncio.Task[None] | None = None
        self._renewing: asyncio.Task[None] | None = None
        self._is_ready = asyncio.Event()
        self._early_cancels: list[wire.Cancel] = []  # of transfers cancelled before there was a connection
        self._senders: dict[bytes, Sender] = {}
        self._lost: tuple[type[TransferError], str] | None = None  # what ended it

    def start(self) -> None:
        """Connect in the background."""
        self._task = asyncio.create_task(self._run(), name=f"kv link to {self._address.worker}")

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
        if self._lost is not None:
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
            await self.send("probe", wire.Probe(probe_id=probe_id, block_ids=block_ids, checksums=checksums))
            self.paths = await answer
            return self.paths
        finally:
            del self._probes[probe_id]

    def report(self, source: str, error: TransferError | TimeoutError | None = None) -> PairReport:
        """What is known of the pair that `source` and this target are; `error` is why they are none."""
        there, remedy = self._address, self.remedy
        report = partial(PairReport, source=source, target=there.worker, target_epoch=there.epoch)
        if error is None:
            return report(ok=self.reply is not None, paths=self.paths)
        reason = reason_of(error) if isinstance(error, TransferRefused) else None
        detail = error.why if isinstance(error, TransferError) else f"it did not answer within {PAIR_TIMEOUT_S:g} s"
        return report(
            ok=False,
            reason=str(reason or type(error).__name__),
            detail=detail.removeprefix(f"{reason}: ").removesuffix(f"; {remedy}"),
            remedy=remedy or (wire.REMEDIES.get(reason, "see the logs of both workers") if reason else _LOST_REMEDY),
        )

    async def send(self, request_id: str, message: wire.ToTarget) -> None:
        """Raises PeerLost."""
        try:
            assert self._connection is not None
            await self._connection.send(wire.encode(message))
        except PlaneError as error:
            raise PeerLost(request_id, str(error)) from error

    def notify(self, message: wire.ToTarget) -> None:
        """Send without waiting; a Cancel before the connection stands is kept for it."""
        if self._connection is not None and self._is_ready.is_set():
            try:
                self._connection.send_nowait(wire.encode(message))
            except PlaneError as error:
                logger.debug("%s was not notified: %s", self._address.worker, error)
        elif isinstance(message, wire.Cancel):
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
            assert self._connection is not None
            await self._connection.read_all(self._take)
        except TransferError as error:
            self._lost = type(error), error.why
        except AuthenticationFailed as error:
            self._lost = TransferRefused, f"{Reason.BAD_MAC}: {error}"
        except BackendUnavailable as error:
            self._lost = TransferRefused, f"{Reason.TRANSPORT}: {error}"
        except (PlaneError, TimeoutError, msgspec.DecodeError) as error:
            self._lost = PeerLost, f"{self._address.worker}: {str(error) or 'timed out'}"
        finally:
            self._close()

    def _error(self, request_id: str) -> TransferError:
        assert self._lost is not None
        kind, why = self._lost
        return kind(request_id, why)

    def _close(self) -> None:
        self._lost = self._lost or (PeerLost, f"the link to {self._address.worker} was closed")
        self._on_closed(self._address)
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
        there, patience_s = self._address, min(self._lease_s, _CONNECT_TIMEOUT_S)
        hello = await self._hello()
        self._connection = await plane.connect(
            there.host, there.port, self._secret, tls=self._tls, timeout_s=patience_s
        )
        await self._connection.send(wire.encode(hello))
        async with asyncio.timeout(_HANDSHAKE_TIMEOUT_S):
            reply: wire.ToSource = wire.Alive()
            while isinstance(reply, wire.Alive):  # it lives, and is still wiring up a path
                async with asyncio.timeout(self._lease_s):
                    reply = wire.decode_to_source(await self._connection.receive())
        if isinstance(reply, wire.Rejected):
            reason = Reason(reply.reason) if reply.reason in Reason._value2member_map_ else Reason.MALFORMED
            self.remedy = reply.remedy
            raise refusal("?", reason, f"{reply.detail}; {reply.remedy}" if reply.remedy else reply.detail)
        if not isinstance(reply, wire.HelloReply):
            raise refusal("?", Reason.MALFORMED, "no reply to the hello")
        if (reply.worker_id, reply.epoch) != (there.worker, there.epoch):
            replaced = f"{there.worker} has been replaced by {reply.worker_id} {reply.epoch}"
            raise refusal("?", Reason.STALE_EPOCH, replaced)
        self.reply = reply
        logger.info("KV to %s goes over %s: %s", there.worker, reply.transport, reply.why)
        self._is_ready.set()
        for cancel in self._early_cancels:
            self.notify(cancel)
        self._early_cancels.clear()

    def _take(self, frame: bytes) -> None:
        """One frame of the target after the handshake. Raises what ends the link."""
        message = wire.decode_to_source(frame)
        self._last_heard = time.monotonic()
        if isinstance(message, wire.Rejected):
            raise refusal("?", Reason.MALFORMED, message.detail)
        if isinstance(message, wire.Probed):
            answer = self._probes.get(message.probe_id)
            if answer is not None and not answer.done():
                answer.set_result(message.paths)
        elif not isinstance(message, wire.HelloReply | wire.Alive):
            sender = self._senders.get(message.nonce)
            if sender is not None:
                sender.on_message(message)

    async def _renew(self) -> None:
        """While transfers are open, renew their leases three times in a lease; give up a silent target."""
        while self._senders:
            await asyncio.sleep(min(self._lease_s, *(sender.ticket.lease_s for sender in self._senders.values())) / 3)
            silent_s = time.monotonic() - self._last_heard
            if silent_s > self._lease_s:
                self._lost = LeaseExpired, f"no sign of {self._address.worker} for {silent_s:.1f} s"
                assert self._task is not None
                self._task.cancel()
                return
            if self._senders:
                self.notify(wire.Renew(nonces=list(self._senders)))
