"""Sequences on workers: where each is placed, what was submitted for it, and which answers belong to it.

`Placer` asks the router, keeps deferred requests waiting, and shares what it assigned with other ingresses.
`Submissions` routes workers' messages to the sequence that waits for them. Imports no HTTP.
"""

import asyncio
import contextlib
import logging
from collections.abc import Callable
from typing import Generic, TypeVar

from kvrelay.errors import ConnectionLost, RequestError
from kvrelay.pacing import Paced
from kvrelay.plane import messages as wire
from kvrelay.router.decision.router import Router
from kvrelay.router.types import Decision, Deferred, RouteRequest, RoutingRefusal
from kvrelay.serve.workers.worker_link import Links, WorkerLink

logger = logging.getLogger(__name__)

RETRY_AFTER_BLOCKED_S = 1.0
SequenceAnswer = wire.TokenOutput | wire.Reserved | wire.Refused | wire.Failed | wire.Transferred
Received = SequenceAnswer | ConnectionLost | RequestError
"""What a submission receives: a worker's message, the loss of its connection, or the end of the request's time."""

T = TypeVar("T")


def _call_later(delay_s: float, call: Callable[[], None]) -> None:
    asyncio.get_running_loop().call_later(delay_s, call)


class Placer:
    """Asks the router for workers, and wakes deferred requests when their turn comes."""

    def __init__(self, router: Router, links: Links, clock: Callable[[], float], *, share_load_s: float) -> None:
        """share_load_s: shortest time between two reports to other ingresses of what is assigned; 0: no reports."""
        self._router, self._links, self._clock, self._share_load_s = router, links, clock, share_load_s
        self._turns: dict[str, asyncio.Future[None]] = {}  # of deferred requests
        self._sharing = Paced(self._share_assigned, share_load_s, now=clock, after=_call_later)
        self._has_other_ingresses = False
        self._blocked: str | None = None

    @property
    def is_blocked(self) -> bool:
        return self._blocked is not None

    def set_blocked(self, why: str | None) -> None:
        """Why KV can travel between no two workers: then nothing is placed. None: it can."""
        self._blocked = why

    def place(self, request: RouteRequest) -> Decision | RoutingRefusal | Deferred:
        """Choose workers and count the request as theirs. After Deferred: `turn`, then ask again."""
        if self._blocked is not None:
            self.give_up(request.request_id)
            return RoutingRefusal("incompatible", self._blocked, RETRY_AFTER_BLOCKED_S)
        self._turns.pop(request.request_id, None)
        choice = self._router.select_and_reserve(request, self._clock())
        if isinstance(choice, Deferred):
            self._turns[request.request_id] = asyncio.get_running_loop().create_future()
        self.load_changed()
        return choice

    async def turn(self, request_id: str) -> None:
        """Wait until a deferred request may be placed; a caller that is cancelled meanwhile loses its turn."""
        turn = self._turns[request_id]
        try:
            await turn
        except BaseException:
            self.give_up(request_id)
            raise

    def give_up(self, request_id: str) -> None:
        """The request is deferred no more, and nothing is counted for it."""
        self._turns.pop(request_id, None)
        self._router.on_end(request_id)
        self.wake_deferred()

    # ---- placed requests

    def prefill_tokens_per_s(self, worker_id: str) -> float:
        """Measured prefill speed of a worker; 0: not known."""
        return self._router.prefill_tokens_per_s(worker_id)

    def first_token(self, request_id: str, output: wire.TokenOutput, now_s: float) -> None:
        """The prompt is computed: its tokens no longer queue anywhere."""
        self._router.on_first_token(request_id, now_s, timings=output.timings, cached_tokens=output.cached_tokens or 0)
        self.load_changed()

    def narrowed(self, request_id: str, num_sequences: int) -> None:
        """Only so many sequences of a group still run."""
        self._router.on_narrowed(request_id, num_sequences)
        self.load_changed()

    def finished(self, request_id: str, num_tokens: int, tpot_s: float, now_s: float) -> None:
        """The request ran to its own end on these workers; the forecast learns from it. `ended` must follow."""
        self._router.on_finished(request_id, num_tokens, tpot_s, now_s)

    def ended(self, request_id: str) -> None:
        """Nothing is counted for the request any more. Idempotent."""
        self._router.on_end(request_id)
        self.load_changed()

    # ---- deferral and load sharing

    def wake_deferred(self) -> None:
        """Call after anything that may let a deferred request go: load, a first token, an end, a worker that comes
        or goes.
        """
        while (request_id := self._router.take_ready()) is not None:
            turn = self._turns[request_id]
            if not turn.done():
                turn.set_result(None)

    def load_changed(self) -> None:
        """What the router counts at some worker has changed."""
        self.wake_deferred()
        if self._share_load_s and self._has_other_ingresses:
            self._sharing.request()

    def apply_others(self, worker_id: str, others: wire.AssignedByOthers) -> None:
        """What other ingresses have assigned to a worker."""
        if self._share_load_s:
            self._has_other_ingresses |= others.num_others > 0
            self._router.apply_others(worker_id, others)
            self.load_changed()

    def _share_assigned(self) -> None:
        for worker_id, assigned in self._router.take_assigned():
            with contextlib.suppress(ConnectionLost):
                self._links.send(worker_id, assigned)


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


class Submissions:
    """Every sequence that was submitted to workers, by its id there."""

    def __init__(self, links: Links) -> None:
        self._links = links
        self._open: dict[str, Submission] = {}

    def open(self, request_id: str) -> "Submission":
        """From now on messages under this id are received; `close` it."""
        submission = self._open[request_id] = Submission(request_id, self._links, self._open)
        return submission

    def deliver(self, worker_id: str, answer: SequenceAnswer) -> None:
        """Pass a worker's message to the sequence that waits for it; without one, drop it."""
        submission = self._open.get(answer.request_id)
        if submission is not None:
            submission.inbox.put((worker_id, answer))

    def holds(self, link: WorkerLink) -> bool:
        """Whether a sequence that was sent over this link still runs there."""
        return any(submission.is_held_by(link) for submission in self._open.values())

    def link_lost(self, link: WorkerLink, why: str) -> None:
        for submission in list(self._open.values()):
            if submission.is_held_by(link):
                submission.inbox.put((link.worker_id, ConnectionLost(why)))


class Submission:
    """One sequence under one id: which workers hold something for it, and what came back.

    The id is unique per attempt, so that a message of an earlier attempt is never taken for this one's.
    """

    __slots__ = ("_holders", "_links", "_open", "id", "inbox")

    def __init__(self, request_id: str, links: Links, submissions: "dict[str, Submission]") -> None:
        self.id = request_id
        self._links, self._open = links, submissions
        self._holders: dict[str, WorkerLink] = {}  # by worker, the link that the sequence was sent over
        self.inbox: Mailbox[tuple[str, Received]] = Mailbox()  # with the worker that each item is from

    @property
    def is_closed(self) -> bool:
        return self.id not in self._open

    def send(self, worker_id: str, message: wire.ToWorker) -> None:
        """From now on the worker holds something. Raises ConnectionLost: then it holds nothing."""
        self._holders.pop(worker_id, None)
        self._holders[worker_id] = self._links.send(worker_id, message)

    def released(self, worker_id: str) -> bool:
        """The worker holds nothing any more. Whether it did."""
        return self._holders.pop(worker_id, None) is not None

    def is_held_by(self, link: WorkerLink) -> bool:
        return self._holders.get(link.worker_id) is link

    def abort_choice(self, choice: int) -> None:
        """Have workers stop computing one choice of a group."""
        for link in self._holders.values():
            with contextlib.suppress(ConnectionLost):
                link.send(wire.Abort(request_id=self.id, choice=choice))

    def close(self, reason: str) -> None:
        """Every worker that still holds something gets an Abort. Idempotent."""
        if self._open.get(self.id) is not self:
            return
        del self._open[self.id]
        for link in self._holders.values():
            try:
                link.send(wire.Abort(request_id=self.id, reason=reason))
            except ConnectionLost:
                logger.debug("request %s: worker %s is gone, nothing to abort", self.id, link.worker_id)
