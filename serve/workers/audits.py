"""Asking every worker, now and then, whether it holds what this ingress's index says. Imports no HTTP.

One worker at a time, each once in `period_s`; the sample's seed is drawn here. Who disagrees, or is STALE, is asked for a snapshot.
"""

import asyncio
import logging
import random
from collections.abc import Callable, Sequence
from typing import Protocol

from kvrelay.errors import WorkerLost
from kvrelay.plane import messages as wire
from kvrelay.router.index.prefix_index import PrefixIndex

logger = logging.getLogger(__name__)

NUM_AUDITED = 64
"""Hashes in one question."""


class Ask(Protocol):
    async def __call__(self, worker_id: str, hashes: list[bytes]) -> wire.Audited:
        """Raises WorkerLost."""


class AuditWatch:
    """Audits the workers in turn while it runs. Lives on the ingress's loop."""

    def __init__(
        self,
        index: PrefixIndex,
        workers: Callable[[], Sequence[str]],
        ask: Ask,
        resync: Callable[[str], object],
        period_s: float,
    ) -> None:
        """`resync` asks a worker for a snapshot. `period_s` 0: no audits."""
        self._index, self._workers, self._ask, self._resync, self._period_s = index, workers, ask, resync, period_s
        self._task: asyncio.Task[None] | None = None

    def start(self) -> None:
        if self._period_s:
            self._task = asyncio.create_task(self._run(), name="audits")

    async def aclose(self) -> None:
        if self._task is not None:
            self._task.cancel()
            await asyncio.gather(self._task, return_exceptions=True)
            self._task = None

    async def audit(self, worker_id: str, seed: int) -> None:
        """Ask one worker. Raises WorkerLost."""
        hashes = self._index.audit_sample(worker_id, seed, NUM_AUDITED)
        if hashes is None:
            return
        answer = await self._ask(worker_id, hashes)
        if not self._index.apply_audit(worker_id, answer.seq, hashes, answer.tiers):
            logger.warning("worker %s: the index is not what it holds; asking for all of it", worker_id)
            self._resync(worker_id)

    async def _run(self) -> None:
        while True:
            workers = self._workers()
            for worker_id in workers:
                await asyncio.sleep(self._period_s / len(workers))
                try:
                    await self.audit(worker_id, random.getrandbits(64))
                except WorkerLost as error:
                    logger.debug("no audit: %s", error)
            if not workers:
                await asyncio.sleep(self._period_s)
