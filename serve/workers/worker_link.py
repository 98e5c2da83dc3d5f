"""The ingress's connections to workers, and which of their messages belong to which sequence.

One link to each member reconnects while the worker is a member; `Links` passes what comes over them to the sequence
that waits for it. Imports no HTTP and no router.
"""

import asyncio
import contextlib
import logging
import time
from collections import Counter
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from typing import Generic, TypeVar

import msgspec

from kvrelay.errors import ConnectionLost, PlaneError, ProtocolError
from kvrelay.plane import connection as plane
from kvrelay.plane import messages as wire
from kvrelay.plane.framing import Connection
from kvrelay.plane.reports import LoadReport, WorkerInfo
from kvrelay.plane.tls import ClusterTls

logger = logging.getLogger(__name__)

FIRST_BACKOFF_S = 0.05
LAST_BACKOFF_S = 2.0
CONNECT_TIMEOUT_S = 5.0
SILENCE_LIMIT_S = 5.0  # a retired worker that sends nothing for this long is dead
_RETIRE_POLL_S = 0.1

SequenceAnswer = wire.TokenOutput | wire.Reserved | wire.Refused | wire.Failed | wire.Transferred
Received = SequenceAnswer | ConnectionLost | Exception | None
"""What a submission receives: a worker's message, the loss of its connection, or from the ingress itself an error that
ends the attempt, or None: something has changed.
"""

T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class Member:
    """A worker as the registry lists it."""

    worker_id: str
    role: str = field(compare=False)  # when it was listed; now: WorkerLink.info's
    host: str
    port: int


@dataclass(frozen=True, slots=True)
class LinkEvents:
    """What links call, on the event loop; none of these may block."""

    accept: Callable[["WorkerLink", WorkerInfo], str | None]  # why the worker cannot be used; None: it is up
    lost: Callable[["WorkerLink", str], None]  # with the reason
    deliver: Callable[["WorkerLink", wire.FromWorker], None]
    holds: Callable[["WorkerLink"], bool]  # whether a sequence that was sent over the link still runs there


class WorkerLink:
    """Connects, reads until the peer is gone, and connects again. `send` works only while up."""

    def __init__(self, member: Member, secret: bytes, events: LinkEvents, *, tls: ClusterTls | None = None) -> None:
        self.member = member
        self.info: WorkerInfo | None = None  # set while up
        self.load: LoadReport | None = None
        self._secret, self._events, self._tls = secret, events, tls
        self._connection: Connection | None = None
        self._task: asyncio.Task[None] | None = None
        self._retiring: asyncio.Task[None] | None = None
        self._dropped = ""  # why this ingress dropped the connection

    @property
    def worker_id(self) -> str:
        return self.member.worker_id

    @property
    def is_up(self) -> bool:
        return self.info is not None

    @property
    def heard_s(self) -> float:
        """When its last bytes came; 0 while there is no connection."""
        return self._connection.heard_s if self._connection is not None else 0.0

    @property
    def silent_s(self) -> float:
        """Seconds since then."""
        return time.monotonic() - self.heard_s

    def start(self) -> None:
        self._task = asyncio.create_task(self._run(), name=f"link-{self.worker_id}")

    def send(self, message: wire.ToWorker) -> None:
        """Queue one message. Raises ConnectionLost when the worker is not connected."""
        if self._connection is None or self.info is None:
            raise ConnectionLost("the worker is not connected")
        self._connection.send_nowait(wire.encode(message))

    def drop(self, why: str) -> None:
        """End the connection, as if the worker had: what it still sends is never read, and once it notices it frees
        what it holds for this ingress. Then connect again.
        """
        self._dropped = why
        if self._connection is not None:
            self._connection.abort()

    def retire(self) -> None:
        """The registry no longer lists the worker: keep the link until its sequences end, or it falls silent."""
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
        while self._events.holds(self) and self.silent_s < SILENCE_LIMIT_S:
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
        """Serve one connection until it ends. True when the worker was up."""
        was_up, why, self._dropped = False, "this ingress closed the connection", ""
        try:
            self._connection = await plane.connect(
                self.member.host, self.member.port, self._secret, timeout_s=CONNECT_TIMEOUT_S, tls=self._tls
            )
            await self._greet(self._connection)
            was_up = True
            await self._connection.read_all(self._take)
        except (PlaneError, msgspec.DecodeError, TimeoutError) as error:
            why = self._dropped or str(error) or type(error).__name__
            level = logging.DEBUG if isinstance(error, ConnectionLost) else logging.WARNING
            logger.log(level, "worker %s: %s", self.worker_id, why)
        finally:
            if self._connection is not None:
                self._connection.abort()
            self._connection = None
            if self.info is not None:
                self.info = self.load = None
                self._events.lost(self, why)
        return was_up

    async def _greet(self, connection: Connection) -> None:
        async with asyncio.timeout(CONNECT_TIMEOUT_S):
            message = wire.decode_from_worker(await connection.receive())
        if not isinstance(message, wire.Welcome) or message.protocol != wire.PROTOCOL_VERSION:
            raise ProtocolError(f"{connection.peer} did not answer in protocol {wire.PROTOCOL_VERSION}")
        if message.info.worker_id != self.worker_id:
            raise ProtocolError(f"{connection.peer} is worker {message.info.worker_id}")
        if why := self._events.accept(self, message.info):
            raise ProtocolError(why)
        self.info = message.info
        self.send(wire.Subscribe())

    def _take(self, frame: bytes) -> None:
        self._events.deliver(self, wire.decode_from_worker(frame))


class Links:
    """The links to all members, and to former members whose sequences still run; and these sequences."""

    def __init__(self) -> None:
        self._members: dict[str, WorkerLink] = {}
        self._retired: set[WorkerLink] = set()
        self.losses: Counter[str] = Counter()  # of members' connections, by role
        self.submissions: dict[str, Submission] = {}  # every sequence that was submitted to workers, by its id there
        self.has_opened = asyncio.Event()  # a submission, since it was cleared

    def get(self, worker_id: str) -> WorkerLink | None:
        """The member's link, connected or not."""
        return self._members.get(worker_id)

    def members(self) -> list[WorkerLink]:
        return list(self._members.values())

    def retired(self) -> list[WorkerLink]:
        """Former members that are still connected."""
        return [link for link in self._retired if link.is_up]

    @property
    def are_awaited(self) -> bool:
        """Whether workers leave, or are listed and not connected: others may soon take their place."""
        return bool(self.retired()) or not all(link.is_up for link in self._members.values())

    def is_member(self, link: WorkerLink) -> bool:
        return self._members.get(link.worker_id) is link

    def add(self, link: WorkerLink) -> None:
        self._members[link.worker_id] = link

    def retire(self, link: WorkerLink) -> None:
        """It is no member any more; its sequences go on while it is connected."""
        del self._members[link.worker_id]
        self._retired = {known for known in self._retired if known.is_up} | {link}

    def take_all(self) -> list[WorkerLink]:
        """Every link, to be closed; none is left here."""
        links = [*self._members.values(), *self._retired]
        self._members, self._retired = {}, set()
        return links

    def find(self, worker_id: str) -> WorkerLink | None:
        """The worker's link, a former member's too while it is connected."""
        link = self._members.get(worker_id)
        if link is None or not link.is_up:
            link = next((old for old in self._retired if old.worker_id == worker_id and old.is_up), link)
        return link

    def send(self, worker_id: str, message: wire.ToWorker) -> WorkerLink:
        """Returns the link that the message went over. Raises ConnectionLost when the worker is not connected."""
        link = self.find(worker_id)
        if link is None:
            raise ConnectionLost("the worker is not a member")
        link.send(message)
        return link

    def send_to_all(self, message: wire.ToWorker) -> None:
        """Send to every connected worker."""
        for link in [*self._members.values(), *self._retired]:
            with contextlib.suppress(ConnectionLost):
                link.send(message)

    # ---- sequences

    def open(self, request_id: str) -> "Submission":
        """From now on messages under this id are received; `close` it."""
        submission = self.submissions[request_id] = Submission(request_id, self)
        self.has_opened.set()
        return submission

    def deliver(self, worker_id: str, answer: SequenceAnswer) -> None:
        """Pass a worker's message to the sequence that waits for it; without one, drop it."""
        submission = self.submissions.get(answer.request_id)
        if submission is not None:
            submission.inbox.put((worker_id, answer))

    def holds(self, link: WorkerLink) -> bool:
        """Whether a sequence that was sent over this link still runs there."""
        return any(submission.is_held_by(link) for submission in self.submissions.values())

    def holders(self) -> set[WorkerLink]:
        """The links over which a sequence was sent that still runs there."""
        return {link for submission in self.submissions.values() for link in submission.holders()}

    def link_lost(self, link: WorkerLink, why: str) -> None:
        self.losses[link.member.role] += self.is_member(link)
        for submission in list(self.submissions.values()):
            if submission.is_held_by(link):
                submission.inbox.put((link.worker_id, ConnectionLost(why)))


class Mailbox(Generic[T]):
    """Items for one waiting reader. Writers never wait; they bound what they write."""

    __slots__ = ("_items", "_waiter")

    def __init__(self) -> None:
        self._items: list[T] = []
        self._waiter: asyncio.Future[None] | None = None

    def put(self, item: T) -> None:
        self._items.append(item)
        waiter = self._waiter
        if waiter is not None and not waiter.done():
            waiter.set_result(None)

    async def get_all(self) -> list[T]:
        """Everything since the last call; waits while there is nothing."""
        while not self._items:
            self._waiter = asyncio.get_running_loop().create_future()
            try:
                await self._waiter
            finally:
                self._waiter = None
        items, self._items = self._items, []
        return items


class Submission:
    """One sequence under one id: which workers hold something for it, and what came back.

    The id is unique per attempt, so that a message of an earlier attempt is never taken for this one's.
    """

    __slots__ = ("_holders", "_links", "id", "inbox")

    def __init__(self, request_id: str, links: Links) -> None:
        self.id, self._links = request_id, links
        self._holders: dict[str, WorkerLink] = {}  # by worker, the link that the sequence was sent over
        self.inbox: Mailbox[tuple[str, Received]] = Mailbox()  # with the worker that each item is from

    @property
    def is_closed(self) -> bool:
        return self.id not in self._links.submissions

    def send(self, worker_id: str, message: wire.ToWorker) -> None:
        """From now on the worker holds something. Raises ConnectionLost: then it holds nothing."""
        self._holders.pop(worker_id, None)
        self._holders[worker_id] = self._links.send(worker_id, message)

    def released(self, worker_id: str) -> bool:
        """The worker holds nothing any more. Whether it did."""
        return self._holders.pop(worker_id, None) is not None

    def has(self, worker_id: str) -> bool:
        """Whether the worker holds something."""
        return worker_id in self._holders

    def holders(self) -> Iterable[WorkerLink]:
        return self._holders.values()

    def is_held_by(self, link: WorkerLink) -> bool:
        return self._holders.get(link.worker_id) is link

    def abort_choice(self, choice: int) -> None:
        """Have workers stop computing one choice of a group."""
        for link in self._holders.values():
            with contextlib.suppress(ConnectionLost):
                link.send(wire.Abort(request_id=self.id, choice=choice))

    def abort_at(self, worker_id: str) -> None:
        """This worker frees what it holds; the others go on."""
        if (link := self._holders.pop(worker_id, None)) is not None:
            with contextlib.suppress(ConnectionLost):
                link.send(wire.Abort(request_id=self.id, reason="moved"))

    def close(self, reason: str) -> None:
        """Every worker that still holds something gets an Abort. Idempotent."""
        if self._links.submissions.get(self.id) is not self:
            return
        del self._links.submissions[self.id]
        for link in self._holders.values():
            with contextlib.suppress(ConnectionLost):
                link.send(wire.Abort(request_id=self.id, reason=reason))
