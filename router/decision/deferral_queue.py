"""The queue of deferred requests, which wait at the router. Pure.

Order: priorities, lower numbers first; within a priority, the tenant with the fewest weighted tokens called; within a
tenant, first come, first served. Every `OLDEST_EVERY`-th call takes the oldest request, so that none starves.
"""

from collections import Counter

from kvrelay.router.fleet.ledger import OVERDUE_EVERY
from kvrelay.router.types import RouteRequest

OLDEST_EVERY = OVERDUE_EVERY


class DeferralQueue:
    """Deferred requests, and those that were called and have not come back yet."""

    def __init__(self) -> None:
        self.waiting: dict[str, RouteRequest] = {}  # in order of arrival
        self.called: set[str] = set()  # have neither come back nor ended
        self._since_s: dict[str, float] = {}  # when the waiting and the called ones came
        self._queues: dict[tuple[int, str], dict[str, RouteRequest]] = {}  # by priority and tenant
        self._counters: dict[str, float] = {}  # tokens called / weight, by waiting tenant; a new one starts at `_level`
        self._level = 0.0  # the counter of the tenant that was called last
        self._num_calls = 0

    def defer(self, request: RouteRequest, since_s: float) -> None:
        """Queue it, as one that came at `since_s`."""
        self.waiting[request.request_id] = request
        self._since_s[request.request_id] = since_s
        self._queues.setdefault((request.priority, request.tenant), {})[request.request_id] = request
        self._counters.setdefault(request.tenant, self._level)

    def call(self) -> str | None:
        """The next request, which counts as called until it is removed. None: none waits."""
        if not self.waiting:
            return None
        self._num_calls += 1
        if self._num_calls % OLDEST_EVERY:
            queue = self._queues[min(self._queues, key=lambda key: (key[0], self._counters[key[1]]))]
            entry = next(iter(queue.values()))
        else:
            entry = next(iter(self.waiting.values()))
        self._level = self._counters[entry.tenant]
        self._counters[entry.tenant] += entry.num_tokens / entry.weight
        self._leave(entry.request_id)
        self.called.add(entry.request_id)
        return entry.request_id

    def waited_s(self, request_id: str, now_s: float) -> float | None:
        """How long a request has waited here, or had when it was called and since; None: it is not here."""
        since_s = self._since_s.get(request_id)
        return None if since_s is None else now_s - since_s

    def oldest_s(self, now_s: float) -> float:
        """How long the first of the waiting ones has waited; 0: none waits."""
        return now_s - self._since_s[next(iter(self.waiting))] if self.waiting else 0.0

    def num_by_tenant(self, priority: int) -> Counter[str]:
        """Waiting requests of this priority and those before it, by tenant."""
        counts = Counter[str]()
        for (other, tenant), queue in self._queues.items():
            if other <= priority:
                counts[tenant] += len(queue)
        return counts

    def remove(self, request_id: str) -> None:
        """It waits no longer, and is not expected back. Idempotent."""
        self.called.discard(request_id)
        self._since_s.pop(request_id, None)
        self._leave(request_id)

    def _leave(self, request_id: str) -> None:
        entry = self.waiting.pop(request_id, None)
        if entry is None:
            return
        queue = self._queues[entry.priority, entry.tenant]
        del queue[request_id]
        if not queue:
            del self._queues[entry.priority, entry.tenant]
            if not any(tenant == entry.tenant for _, tenant in self._queues):
                del self._counters[entry.tenant]
