"""Keeps the ingress's prefix index true: takes snapshots in a slice at a time, and audits what the index claims.

Imports no HTTP.
"""

import asyncio
import contextlib
import logging
import random
import time
from collections.abc import Callable

from kvrelay.errors import ConnectionLost, WorkerLost
from kvrelay.plane import messages as wire
from kvrelay.router.index.prefix_index import PrefixIndex
from kvrelay.serve.workers.queries import Queries
from kvrelay.serve.workers.worker_link import Links

logger = logging.getLogger(__name__)

NUM_AUDITED = 64
"""Hashes in one audit."""
SLICE_S = 0.001
"""Longest work on snapshots between two polls of the sockets."""


class SnapshotSlices:
    """Runs the index's deferred work on the event loop, in slices of SLICE_S, so that no stream waits for it."""

    def __init__(self, index: PrefixIndex, clock: Callable[[], float] = time.perf_counter) -> None:
        self._index, self._clock = index, clock
        index.defer(self._schedule)

    def _schedule(self) -> None:
        asyncio.get_running_loop().call_soon(self._run_slice)

    def _run_slice(self) -> None:
        until_s, has_more = self._clock() + SLICE_S, True
        try:
            while (has_more := self._index.work()) and self._clock() < until_s:
                continue
        finally:
            if has_more:
                self._schedule()


class IndexAudits:
    """Asks one worker at a time, each once in `period_s`, whether it holds what the index claims. Lives on the
    ingress's loop.

    A worker whose answer differs, or whose index is STALE, is asked for a snapshot.
    """

    def __init__(self, index: PrefixIndex, links: Links, queries: Queries, period_s: float) -> None:
        """`period_s` 0: no audits."""
        self._index, self._links, self._queries, self._period_s = index, links, queries, period_s
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
        """Audit one worker. Raises WorkerLost."""
        hashes = self._index.audit_sample(worker_id, seed, NUM_AUDITED)
        if hashes is None:
            return
        answer = await self._queries.audit(worker_id, hashes)
        if not self._index.apply_audit(worker_id, answer.seq, hashes, answer.tiers):
            logger.warning("worker %s: the index differs from its cache; asking for a snapshot", worker_id)
            with contextlib.suppress(ConnectionLost):  # it sends a snapshot when it connects again
                self._links.send(worker_id, wire.Subscribe())

    async def _run(self) -> None:
        while True:
            workers = [link.worker_id for link in self._links.members()]
            for worker_id in workers:
                await asyncio.sleep(self._period_s / len(workers))
                try:
                    await self.audit(worker_id, random.getrandbits(64))
                except WorkerLost as error:
                    logger.debug("no audit: %s", error)
            if not workers:
                await asyncio.sleep(self._period_s)
