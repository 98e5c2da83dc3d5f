"""The queue of deferred requests: overdue ones, which wait at the router. Pure.

Order: priorities, lower numbers first; within a priority, the tenant with the fewest tokens called; within a tenant,
first come, first served. Every `OLDEST_EVERY`-th call takes the oldest request, so that none starves. While workers are
busy, an overdue request has its turn after `OLDEST_EVERY` other requests, or proportionally more if its prompt is
longer than theirs.
"""

from collections.abc import Iterator
from dataclasses import dataclass

from kvrelay.router.types import RouteRequest

OLDEST_EVERY = 16
MAX_PENALTY = 16.0
"""Upper bound of an overdue prompt's length, in average prompts, by which its successor's turn is delayed."""
_SMOOTHING = 0.05


@dataclass(frozen=True, slots=True)
class _Entry:
    request_id: str
    priority: int
    tenant: str
    num_tokens: int


class Deferral:
    """Deferred requests, and those that were called and have not come back yet."""

    def __init__(self, max_deferred: int) -> None:
        """`max_deferred`: requests that may wait at a time; 0: none is deferred."""
        self._max_deferred = max_deferred
        self._entries: dict[str, _Entry] = {}  # in order of arrival
        self._queues: dict[tuple[int, str], dict[str, _Entry]] = {}  # by priority and tenant
        self._counters: dict[str, float] = {}  # tokens called, by waiting tenant; a new tenant starts at `_level`
        self._level = 0.0  # the counter of the tenant that was called last
        self._called: set[str] = set()
        self._num_calls = 0
        self._num_placed = 0  # requests placed in time since the last overdue one
        self._num_required = 0.0  # of those, before the next overdue one has its turn
        self._mean_tokens = 0.0  # uncached prompt tokens of requests placed in time

    def __len__(self) -> int:
        return len(self._entries)

    def __iter__(self) -> Iterator[str]:
        return iter(self._entries)

    @property
    def is_enabled(self) -> bool:
        return self._max_deferred > 0

    @property
    def num_called(self) -> int:
        """Requests that were called and have neither come back nor ended."""
        return len(self._called)

    @property
    def has_turn(self) -> bool:
        """Whether a deferred request is to be placed although workers are busy."""
        return self._num_placed >= self._num_required

    def placed(self, num_tokens: int, *, is_overdue: bool) -> None:
        """A request with so many prompt tokens to compute was placed on workers."""
        if not is_overdue:
            self._num_placed += 1
            self._mean_tokens += _SMOOTHING * (num_tokens - self._mean_tokens)
            return
        length = num_tokens / self._mean_tokens if self._mean_tokens else 1.0
        self._num_placed, self._num_required = 0, OLDEST_EVERY * min(max(length, 1.0), MAX_PENALTY)

    def defer(self, request: RouteRequest) -> bool:
        """Queue it. False: too many wait."""
        if len(self._entries) >= self._max_deferred:
            return False
        entry = _Entry(request.request_id, request.priority, request.tenant, request.num_tokens)
        self._entries[entry.request_id] = entry
        self._queues.setdefault((entry.priority, entry.tenant), {})[entry.request_id] = entry
        self._counters.setdefault(entry.tenant, self._level)
        return True

    def call(self) -> str | None:
        """The next request; it must come back (`take_called`) or be removed. None: none waits."""
        if not self._entries:
            return None
        self._num_calls += 1
        if self._num_calls % OLDEST_EVERY:
            queue = self._queues[min(self._queues, key=self._rank)]
            entry = next(iter(queue.values()))
        else:
            entry = next(iter(self._entries.values()))
        self._level = self._counters[entry.tenant]
        self._counters[entry.tenant] += entry.num_tokens
        self.remove(entry.request_id)
        self._called.add(entry.request_id)
        return entry.request_id

    def _rank(self, key: tuple[int, str]) -> tuple[int, float]:
        priority, tenant = key
        return priority, self._counters[tenant]

    def take_called(self, request_id: str) -> bool:
        """The request is back; whether it had been called."""
        if request_id not in self._called:
            return False
        self._called.remove(request_id)
        return True

    def remove(self, request_id: str) -> None:
        """It waits no longer, and is not expected back. Idempotent."""
        self._called.discard(request_id)
        entry = self._entries.pop(request_id, None)
        if entry is None:
            return
        queue = self._queues[entry.priority, entry.tenant]
        del queue[request_id]
        if not queue:
            del self._queues[entry.priority, entry.tenant]
            if not any(tenant == entry.tenant for _, tenant in self._queues):
                del self._counters[entry.tenant]
