"""A worker changes its role in place: it announces the new one, takes its requests at once, and empties itself of those
that the new role does not take. Model, KV cache and connections stay.

Those that are left of the old role go on meanwhile: an ingress that learns of a role that does not decode moves what
the worker decodes to other workers with its KV, or it finishes. What is left after the drain's time is failed, and
computed again elsewhere.
"""

import asyncio
import logging
import time
from collections.abc import Callable
from typing import Any

from kvrelay.engine.worker.ingresses import EngineReports, RequestTable
from kvrelay.engine.worker.thread import EngineThread
from kvrelay.errors import WorkerError
from kvrelay.plane import messages as wire
from kvrelay.types import WORKER_ROLES

logger = logging.getLogger(__name__)


class RoleSwitch:
    """Changes the role by which a worker's RequestTable admits. Lives on the worker's loop, until close()."""

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
        self._deadline: asyncio.TimerHandle | None = None  # of what is left of an old role

    def change(self, role: str, drain_s: float) -> dict[str, Any]:
        """Take this role's requests from now on, and no others; returns the facts of the change.

        Raises WorkerError; then the role is what it was.

        Args:
            drain_s: for requests that are here and that the role does not take; an earlier change's time ends.
        """
        before, began_s = self._requests.role, time.monotonic()
        if role not in WORKER_ROLES:
            raise WorkerError(self._worker_id, f"a role is one of {', '.join(WORKER_ROLES)}, not {role}")
        if self._requests.is_draining:
            raise WorkerError(self._worker_id, "it is shutting down")
        self.close()
        self._requests.role = role
        if left := self._requests.not_of_role():
            self._thread.post(lambda engine: engine.scheduler.reject_queued())
        num_failed = 0
        if left and drain_s > 0:
            self._deadline = asyncio.get_running_loop().call_later(drain_s, self._fail_left)
        elif left:
            num_failed = self._fail_left()
        self._reports.send_to_all(wire.RoleNow(role=role))
        self._reports.announce()
        seconds = time.monotonic() - began_s
        logger.info("worker %s was %s and is %s now; %d requests of before", self._worker_id, before, role, len(left))
        return {"before": before, "role": role, "seconds": seconds, "sequences": len(left), "failed": num_failed}

    def close(self) -> None:
        """What is left of an old role is not failed any more by a deadline."""
        if self._deadline is not None:
            self._deadline.cancel()
            self._deadline = None

    def _fail_left(self) -> int:
        """Fail what the role does not take, to be computed again elsewhere. How many these were."""
        left = self._requests.not_of_role()
        for request_id in left:
            self._requests.fail(request_id, wire.DRAINED, f"{self._worker_id} has changed its role")
            self._release(request_id, "the worker has changed its role")
        if left:
            logger.info("worker %s: %d requests of an old role go on elsewhere", self._worker_id, len(left))
        return len(left)
