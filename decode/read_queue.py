"""A lane: the reads from one source, fairly taken in turns by its transfers.

A transfer with a hundred thousand tokens gets one unit per turn like everyone else. The lane
sleeps while nothing is announced.
"""

import asyncio
from collections import deque
from collections.abc import Awaitable, Callable

from kvrelay.kvtransfer.protocol.grants import Grant, Unit
from kvrelay.kvtransfer.reads.route import Route


class Lane:
    """Hands units to `carry` one by one, at most `route.max_in_flight` at once."""

    def __init__(self, route: Route, carry: Callable[[Grant, Unit], Awaitable[None]]) -> None:
        self._route = route
        self._carry = carry
        self._turns: deque[Grant] = deque()  # grants with pending units, each once
        self._tasks: set[asyncio.Task[None]] = set()

    def add(self, grant: Grant) -> None:
        """The grant has pending units."""
        if grant.pending and grant not in self._turns:
            self._turns.append(grant)
        self._pump()

    def _pump(self) -> None:
        while self._turns and len(self._tasks) < self._route.max_in_flight:
            grant = self._turns.popleft()
            if grant.is_ended or not grant.pending:
                continue
            unit = grant.pending.popleft()
            if grant.pending:
                self._turns.append(grant)
            task = asyncio.create_task(self._run(grant, unit), name=f"kv read for {grant.request_id}")
            self._tasks.add(task)
            task.add_done_callback(self._on_done)

    async def _run(self, grant: Grant, unit: Unit) -> None:
        await self._carry(grant, unit)

    def _on_done(self, task: "asyncio.Task[None]") -> None:
        self._tasks.discard(task)
        self._pump()

    async def aclose(self) -> None:
        """Drop what is pending; wait for the readers to let go as far as they can."""
        self._turns.clear()
        await self._route.aclose()
        for task in list(self._tasks):
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
