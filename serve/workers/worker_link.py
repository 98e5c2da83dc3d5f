"""One connection to one worker, kept up while the worker is a member.

Owns the socket, the Welcome/Subscribe exchange and the reconnecting. What messages mean is the
owner's business. Imports no HTTP and no router.
"""

import asyncio
import logging
import time
from dataclasses import dataclass
from typing import Protocol

import msgspec

from kvrelay.errors import ConnectionLost, PlaneError, ProtocolError
from kvrelay.plane import connection as plane
from kvrelay.plane import messages as wire
from kvrelay.plane.tls import ClusterTls

logger = logging.getLogger(__name__)

FIRST_BACKOFF_S = 0.05
LAST_BACKOFF_S = 2.0
CONNECT_TIMEOUT_S = 5.0
SILENCE_LIMIT_S = 5.0  # a retired worker that says nothing for so long is dead
_RETIRE_POLL_S = 0.1


@dataclass(frozen=True, slots=True)
class Member:
    """A worker as the registry lists it."""

    worker_id: str
    role: str
    host: str
    port: int


class LinkOwner(Protocol):
    """Whom a link reports to. Called on the event loop; must not block."""

    def link_up(self, link: "WorkerLink", info: wire.WorkerInfo) -> str | None:
        """Why this worker cannot be used, or None when it is taken."""

    def link_down(self, link: "WorkerLink", why: str) -> None: ...

    def deliver(self, link: "WorkerLink", message: wire.FromWorker) -> None: ...

    def holds(self, link: "WorkerLink") -> bool:
        """Whether a sequence that was sent over this link still runs there."""


class WorkerLink:
    """Connects, reads until the peer is gone, and connects again. `send` works only while up."""

    def __init__(self, member: Member, secret: bytes, owner: LinkOwner, *, tls: ClusterTls | None = None) -> None:
        self.member = member
        self.info: wire.WorkerInfo | None = None  # set while up
        self.load: wire.LoadReport | None = None
        self._secret, self._owner, self._tls = secret, owner, tls
        self._connection: plane.Connection | None = None
        self._task: asyncio.Task[None] | None = None
        self._retiring: asyncio.Task[None] | None = None
        self._last_frame_s = 0.0

    @property
    def worker_id(self) -> str:
        return self.member.worker_id

    @property
    def is_up(self) -> bool:
        return self.info is not None

    @property
    def silent_s(self) -> float:
        """Since its last frame; of no meaning while it is not up."""
        return time.monotonic() - self._last_frame_s

    def start(self) -> None:
        self._task = asyncio.create_task(self._run(), name=f"link-{self.worker_id}")

    def send(self, message: wire.ToWorker) -> None:
        """Queue one message. Raises ConnectionLost when the worker is not connected."""
        if self._connection is None or self.info is None:
            raise ConnectionLost("it is not connected")
        self._connection.send_nowait(wire.encode(message))

    def retire(self) -> None:
        """The registry no longer lists the worker: let it end what it holds, unless it falls silent."""
        if self._retiring is None:
            self._retiring = asyncio.create_task(self._retire(), name=f"retire-{self.worker_id}")

    async def aclose(self) -> None:
        """Drop the connection and stop reconnecting."""
        for task in (self._retiring, self._task):
            if task is not None and task is not asyncio.current_task():
                task.cancel()
                await asyncio.gather(task, return_exceptions=True)
        self._retiring = self._task = None

    async def _retire(self) -> None:
        while self._owner.holds(self) and self.silent_s < SILENCE_LIMIT_S:
            await asyncio.sleep(_RETIRE_POLL_S)
        if self._task is not None:
            self._task.cancel()

    async def _run(self) -> None:
        backoff_s = FIRST_BACKOFF_S
        while self._retiring is None:
            try:
                if await self._connect_and_read():
                    backoff_s = FIRST_BACKOFF_S
            except Exception:  # a process edge: one bad message must not end the link for good
                logger.exception("link to worker %s failed", self.worker_id)
            await asyncio.sleep(backoff_s)
            backoff_s = min(2 * backoff_s, LAST_BACKOFF_S)

    async def _connect_and_read(self) -> bool:
        """One connection's life. True when the worker was up during it."""
        was_up, why = False, "the connection was closed by us"
        try:
            self._connection = await plane.connect(
                self.member.host, self.member.port, self._secret, timeout_s=CONNECT_TIMEOUT_S, tls=self._tls
            )
            await self._greet(self._connection)
            was_up = True
            await self._connection.hand_out(self._take)
        except (PlaneError, msgspec.DecodeError, TimeoutError) as error:
            why = str(error) or type(error).__name__
            log = logger.debug if isinstance(error, ConnectionLost) else logger.warning
            log("worker %s: %s", self.worker_id, why)
        finally:
            if self._connection is not None:
                self._connection.abort()
            self._connection = None
            if self.info is not None:
                self.info = self.load = None
                self._owner.link_down(self, why)
        return was_up

    async def _greet(self, connection: plane.Connection) -> None:
        async with asyncio.timeout(CONNECT_TIMEOUT_S):
            message = wire.decode_from_worker(await connection.receive())
        if not isinstance(message, wire.Welcome) or message.protocol != wire.PROTOCOL_VERSION:
            raise ProtocolError(f"{connection.peer} did not welcome us in protocol {wire.PROTOCOL_VERSION}")
        if message.info.worker_id != self.worker_id:
            raise ProtocolError(f"{connection.peer} is worker {message.info.worker_id}")
        if why := self._owner.link_up(self, message.info):
            raise ProtocolError(why)
        self.info = message.info
        self._last_frame_s = time.monotonic()
        self.send(wire.Subscribe())

    def _take(self, frame: bytes) -> None:
        self._last_frame_s = time.monotonic()
        self._owner.deliver(self, wire.decode_from_worker(frame))
