"""What the router's index says of each worker's pool, held against the worker's own word: at every decision, for every
worker.

Before a decision's own messages leave, every live worker is asked where it has the blocks of that prompt; it looks
between two steps, before the request is queued there. The answer comes behind the events that it is as of, so that
three depths of the prompt can be compared, in leading blocks:

    claimed   by the index when the decision was made
    published by the index when the answer comes: every event before the answer is in, and none after it
    held      in the worker's pool, as its caches themselves say

`published` against `held` is no matter of time: where they differ, events were lost, wrong or wrongly applied, and the
index is at fault. Where only `claimed` differs, events were on their way: late. Blocks that a worker had taken or given
up and not announced yet count as late events, too.
"""

import asyncio
import itertools
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from bench.router.hit_figures import Looked, looked
from kvrelay.errors import ConnectionLost
from kvrelay.plane import messages as wire
from kvrelay.router.index.prefix_index import PrefixIndex
from kvrelay.router.types import Decision, RouteRequest, RoutingRefusal
from kvrelay.serve.requests.dispatcher import Dispatcher
from kvrelay.serve.workers.queries import QueryAnswer
from kvrelay.serve.workers.worker_link import SequenceAnswer, WorkerLink

FIRST_QUERY = 1 << 40  # the dispatcher's own questions are counted from 1


@dataclass(frozen=True, slots=True)
class _Question:
    request_id: str
    worker_id: str
    chain: list[bytes]
    claimed: int


class IndexWatch:
    """Watches one dispatcher's decisions, as long as that lives. `found`: by attempt and worker, what was seen."""

    def __init__(
        self, dispatcher: Dispatcher, on_decision: Callable[[Decision], None], on_transferred: Callable[[str], None]
    ) -> None:
        """`on_decision` and `on_transferred` (with an attempt's id) are called in the order in which things happen."""
        self.found: dict[str, dict[str, Looked]] = {}
        self._dispatcher, self._index = dispatcher, dispatcher.router.index
        self._on_decision, self._on_transferred = on_decision, on_transferred
        placer, queries, submissions = dispatcher.placer, dispatcher.queries, dispatcher.submissions
        self._place, self._answered, self._deliver = placer.place, queries.answered, submissions.deliver
        self._questions: dict[int, _Question] = {}
        self._ids = itertools.count(FIRST_QUERY)
        vars(placer).update(place=self._watched_place)
        vars(queries).update(answered=self._watched_answered)
        vars(submissions).update(deliver=self._watched_deliver)

    async def settled(self, timeout_s: float = 60.0) -> None:
        """Every worker has answered. Raises TimeoutError."""
        async with asyncio.timeout(timeout_s):
            while self._questions:
                await asyncio.sleep(0.01)

    def _watched_place(self, request: RouteRequest) -> Decision | RoutingRefusal:
        for info, _ in self._dispatcher.workers.live_workers():
            chain = list(request.block_hashes[: (request.num_tokens - 1) // info.block_size])
            claimed, query_id = depth_in_pool(self._index, info.worker_id, chain), next(self._ids)
            try:
                self._dispatcher.links.send(info.worker_id, wire.Audit(query_id=query_id, hashes=chain))
            except ConnectionLost:
                continue
            self._questions[query_id] = _Question(request.request_id, info.worker_id, chain, claimed)
        choice = self._place(request)
        if isinstance(choice, Decision):
            self._on_decision(choice)
        return choice

    def _watched_answered(self, link: WorkerLink, answer: QueryAnswer) -> None:
        if isinstance(answer, wire.Audited) and (question := self._questions.pop(answer.query_id, None)):
            published = depth_in_pool(self._index, question.worker_id, question.chain)
            seen = self.found.setdefault(question.request_id, {})
            seen[question.worker_id] = looked(question.claimed, published, answer.tiers)
        else:
            self._answered(link, answer)

    def _watched_deliver(self, worker_id: str, answer: SequenceAnswer) -> None:
        if isinstance(answer, wire.Transferred):
            self._on_transferred(answer.request_id)
        self._deliver(worker_id, answer)


def depth_in_pool(index: PrefixIndex, worker_id: str, chain: Sequence[bytes]) -> int:
    """Leading blocks that the index says are in this worker's pool."""
    return int(index.table(chain)[index.row(worker_id), 1]) if chain else 0
