"""Questions to workers, outside of any sequence: status, cache reset, prefetch, audit. And what keeps the ingress's
prefix index true: audits of what it claims, and snapshots that it takes in a slice at a time. Imports no HTTP.
"""

import asyncio
import contextlib
import itertools
import logging
import random
import time
from collections.abc import Callable
from typing import TypeVar

from kvrelay.config import Settings
from kvrelay.errors import ConnectionLost, Overloaded, WorkerLost
from kvrelay.plane import messages as wire
from kvrelay.plane.reports import Audited, Status
from kvrelay.router.decision.router import Router
from kvrelay.router.index.prefix_index import PrefixIndex
from kvrelay.serve.workers.worker_link import Links, WorkerLink

logger = logging.getLogger(__name__)

Query = wire.StatusQuery | wire.CacheReset | wire.Prefetch | wire.Audit | wire.SetRole
QueryAnswer = Status | wire.Prefetched | Audited
RETRY_AFTER_FULL_S = 1.0

A = TypeVar("A", Status, wire.Prefetched, Audited)


class Queries:
    """Sends questions over the links and waits for their answers; each raises WorkerLost without one."""

    def __init__(self, links: Links, *, max_open: int) -> None:
        """max_open: of prefetches; more raise Overloaded."""
        self._links, self._max_open = links, max_open
        self._open: dict[int, tuple[WorkerLink, asyncio.Future[QueryAnswer]]] = {}  # with the link it went over
        self._ids = itertools.count(1)

    async def status(self, worker_id: str, *, timeout_s: float = 5.0) -> bytes:
        """A worker's report of its state, JSON."""
        return (await self._ask(worker_id, wire.StatusQuery(query_id=next(self._ids)), Status, timeout_s)).json

    async def reset_cache(self, worker_id: str, *, timeout_s: float = 5.0) -> bytes:
        """Make a worker drop its unused cached blocks; returns its status, JSON."""
        return (await self._ask(worker_id, wire.CacheReset(query_id=next(self._ids)), Status, timeout_s)).json

    async def prefetch(
        self, worker_id: str, request: wire.SequenceRequest, hold_s: float, *, timeout_s: float = 10.0
    ) -> wire.Prefetched:
        """Have a worker load the prompt's blocks from its stores and keep them for `hold_s`."""
        query = wire.Prefetch(query_id=next(self._ids), request=request, hold_s=hold_s)
        return await self._ask(worker_id, query, wire.Prefetched, timeout_s)

    async def audit(self, worker_id: str, hashes: list[bytes], *, timeout_s: float = 5.0) -> Audited:
        """The tiers in which a worker has these blocks."""
        query = wire.Audit(query_id=next(self._ids), hashes=hashes)
        return await self._ask(worker_id, query, Audited, timeout_s)

    async def set_role(self, worker_id: str, role: str, drain_s: float, *, timeout_s: float = 5.0) -> bytes:
        """Have a worker change its role; the facts, JSON."""
        query = wire.SetRole(query_id=next(self._ids), role=role, drain_s=drain_s)
        return (await self._ask(worker_id, query, Status, timeout_s)).json

    def check_room(self) -> None:
        """Raises Overloaded when as many questions are open as may be."""
        if len(self._open) >= self._max_open:
            raise Overloaded("too many queries to workers are open", RETRY_AFTER_FULL_S)

    async def _ask(self, worker_id: str, query: Query, kind: type[A], timeout_s: float) -> A:
        future: asyncio.Future[QueryAnswer] = asyncio.get_running_loop().create_future()
        try:
            self._open[query.query_id] = self._links.send(worker_id, query), future
            async with asyncio.timeout(timeout_s):
                answer = await future
        except (ConnectionLost, TimeoutError) as error:
            raise WorkerLost(worker_id, str(error) or "no answer") from error
        finally:
            self._open.pop(query.query_id, None)
        if not isinstance(answer, kind):
            raise WorkerLost(worker_id, "the answer is of another kind")
        return answer

    # ---- what the links deliver

    def answered(self, link: WorkerLink, answer: QueryAnswer) -> None:
        asked, future = self._open.get(answer.query_id, (None, None))
        if asked is link and future is not None and not future.done():
            future.set_result(answer)

    def link_lost(self, link: WorkerLink, why: str) -> None:
        for asked, future in self._open.values():
            if asked is link and not future.done():
                future.set_exception(ConnectionLost(why))


# ---- the prefix index

NUM_AUDITED = 64  # hashes in one audit
SLICE_S = 0.001  # longest work on snapshots between two polls of the sockets


def run_in_slices(work: Callable[[], bool], clock: Callable[[], float] = time.perf_counter) -> None:
    """Run the index's long work on the event loop, in slices of SLICE_S, so that no stream waits for it. `work` returns
    whether there is more.
    """

    def run_slice() -> None:
        until_s, has_more = clock() + SLICE_S, True
        try:
            while (has_more := work()) and clock() < until_s:
                continue
        finally:
            if has_more:
                run_in_slices(work, clock)

    asyncio.get_running_loop().call_soon(run_slice)


def make_router(settings: Settings) -> Router:
    """The router of an ingress with these settings."""
    return Router(
        settings.router,
        tokens_per_hash=settings.tokens_per_hash,
        slo=settings.slo,
        has_store=settings.cache.is_shared,
        schedule=run_in_slices,
    )


AUDIT_S = 60.0
"""Time in which each worker is audited once: an error of the index costs hits for a minute at most."""


class IndexAudits:
    """Asks one worker at a time, each once in AUDIT_S, whether it holds what the index claims. Lives on the
    ingress's loop.

    A worker whose answer differs, or whose index is STALE, is asked for a snapshot.
    """

    def __init__(self, index: PrefixIndex, links: Links, queries: Queries) -> None:
        self._index, self._links, self._queries = index, links, queries

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

    async def run(self) -> None:
        """Audit every worker in turn until it is cancelled."""
        while True:
            workers = [link.worker_id for link in self._links.members()]
            for worker_id in workers:
                await asyncio.sleep(AUDIT_S / len(workers))
                try:
                    await self.audit(worker_id, random.getrandbits(64))
                except WorkerLost as error:
                    logger.debug("no audit: %s", error)
            if not workers:
                await asyncio.sleep(AUDIT_S)
