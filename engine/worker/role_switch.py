"""A worker changes its role in place: drain, switch, announce. Model, KV cache and connections stay.

What the new role does not take ends first: ingresses learn that the worker drains, and move what it decodes to other
workers with its KV, or it finishes. What is left after the drain's time is failed, and computed again elsewhere.
"""

import asyncio
import logging
import time
from collections.abc import Callable, Collection
from typing import Any

from kvrelay.engine.worker.ingresses import EngineReports, RequestTable
from kvrelay.engine.worker.thread import EngineThread
from kvrelay.errors import WorkerError
from kvrelay.plane import messages as wire
from kvrelay.types import CHANGING, WORKER_ROLES, Role, sides

logger = logging.getLogger(__name__)

_POLL_S = 0.01


class RoleSwitch:
    """Changes the role by which a worker's RequestTable admits, one change at a time. Lives on the worker's loop."""

    def __init__(
        self,
        worker_id: str,
        requests: RequestTable,
        reports: EngineReports,
        thread: EngineThread,
        release: Callable[[str, str], None],
    ) -> None:
        """`release`: frees what a request holds here and in the engine."""
        self._worker_id, self._requests, self._reports, self._thread = worker_id, requests, reports, thread
        self._release = release

    async def change(self, role: str, drain_s: float) -> dict[str, Any]:
        """The facts of the change. Raises WorkerError; then, and when it is cancelled, the role is what it was."""
        before, began_s = self._requests.role, time.monotonic()
        if role not in WORKER_ROLES:
            raise WorkerError(self._worker_id, f"a role is one of {', '.join(WORKER_ROLES)}, not {role}")
        if before == CHANGING:
            raise WorkerError(self._worker_id, "it is changing its role already")
        self._check_running()
        leaving = [side for side in sides(before) if side not in sides(role)]
        num_there = len(self._requests.of_sides(leaving))
        try:
            num_failed = await self._drain(leaving, drain_s) if leaving else 0
            drained_s = time.monotonic() - began_s
            self._check_running()
        except BaseException:
            self._announce(before)
            raise
        self._announce(role)
        seconds = time.monotonic() - began_s
        logger.info("worker %s was %s and is %s now, after %.3f s", self._worker_id, before, role, seconds)
        facts = {"before": before, "role": role, "seconds": seconds, "drain_s": drained_s}
        return facts | {"sequences": num_there, "failed": num_failed}

    def _check_running(self) -> None:
        if self._requests.is_draining:
            raise WorkerError(self._worker_id, "it is shutting down")

    async def _drain(self, leaving: Collection[Role], drain_s: float) -> int:
        """Take nothing new until what is here for these sides has ended. The number of those that were failed."""
        self._announce(CHANGING)
        self._thread.post(lambda engine: engine.scheduler.reject_queued())
        end_s = time.monotonic() + drain_s
        while (left := self._requests.of_sides(leaving)) and time.monotonic() < end_s:
            await asyncio.sleep(_POLL_S)
        for request_id in left:
            self._requests.fail(request_id, wire.DRAINED, f"{self._worker_id} changes its role")
            self._release(request_id, "the worker changes its role")
        return len(left)

    def _announce(self, role: str) -> None:
        """Admit by this role from now on, and let every ingress know."""
        self._requests.role = role
        self._reports.send_to_all(wire.RoleNow(role=role))
        self._reports.announce()
