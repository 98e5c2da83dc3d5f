"""One try at computing a sequence on chosen workers: what came in for it, and who holds something.

Owns the inbox and the list of holders. Every holder that has not said that it ended gets an
Abort when the attempt closes. Imports no HTTP.
"""

import asyncio
from typing import Generic, TypeVar

from kvrelay.plane.messages import SequenceRequest
from kvrelay.router.types import Decision
from kvrelay.serve.workers.worker_link import WorkerLink

T = TypeVar("T")


class Inbox(Generic[T]):
    """Items for one waiting reader. Writers never wait; whoever writes bounds what is written."""

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
        """Everything that came since the last call; waits while there is nothing."""
        while not self._items:
            self._waiter = asyncio.get_running_loop().create_future()
            try:
                await self._waiter
            finally:
                self._waiter = None
        items, self._items = self._items, []
        return items


class WorkerGone:
    """In an inbox: the connection to a worker ended."""

    __slots__ = ("why",)

    def __init__(self, why: str) -> None:
        self.why = why


class TimeIsUp:
    """In an inbox: the sequence's deadline, or the wait for a reservation, has passed."""

    __slots__ = ("what",)

    def __init__(self, what: str) -> None:
        self.what = what


class AttemptFailed(Exception):
    """This attempt came to nothing; whether another is made is for Retries to say. Never reaches a client."""

    def __init__(
        self, worker_id: str, code: str, why: str, *, retryable: bool = True, retry_after_s: float = 1.0
    ) -> None:
        super().__init__(worker_id, code, why)
        self.worker_id, self.code, self.why = worker_id, code, why
        self.retryable, self.retry_after_s = retryable, retry_after_s

    def __str__(self) -> str:
        return f"{self.worker_id}: {self.code}"


class Attempt:
    """`id` is unique per attempt, so that a message of an earlier one cannot be taken for this one's."""

    __slots__ = ("decision", "has_first_token", "holders", "id", "inbox", "is_transferred", "request", "ticket")

    def __init__(self, request: SequenceRequest, decision: Decision) -> None:
        self.id = request.request_id
        self.request, self.decision = request, decision
        self.inbox: Inbox[tuple[str, object]] = Inbox()
        self.holders: dict[str, WorkerLink] = {}  # by worker, the link that it was asked over
        self.has_first_token = self.is_transferred = False
        self.ticket: bytes | None = None
