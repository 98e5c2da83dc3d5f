"""Requests whose first token will be late in any case: they wait here, so that they keep nobody else from being in time. Pure.

On a worker such a prompt gives way to all others, in a long overload for minutes, and the decode worker keeps blocks for it all that
time: newcomers find none, are late in their turn, and in the end nobody is in time. Here it keeps nothing, and workers are chosen
by what is cached when its turn comes. That is only when it has to: while late prompts keep less than `OVERDUE_SHARE` of the decode
workers' blocks they may wait in the lines, for nobody may have said how soon tokens are wanted. Beyond that one goes
- when a worker will soon have nothing else to do (`IDLE_S`), and has not more of late prompts than `OVERDUE_TOKENS` or one prompt;
- when the others have had `OLDEST_EVERY` turns since one of them went, or as many times more as it was longer than theirs.

The order: priorities, lower numbers first; within one, the tenant that had the fewest tokens called; within a tenant, first come first
served. Every `OLDEST_EVERY`-th is whoever came first. So nobody is starved.
"""

from collections.abc import Iterator
from dataclasses import dataclass

from kvrelay.router.types import RouteRequest

OVERDUE_SHARE = 0.1
"""Of all decode workers' blocks, that may be kept for late prompts which are not computed yet."""
OVERDUE_TOKENS = 8192
"""Of late prompts, to be computed at one worker; the last of them may exceed it."""
IDLE_S = 0.5
"""Of prompts that are in time, to be computed at a worker: with less than that it takes late ones."""
OLDEST_EVERY = 16
MOST_AMENDS = 16.0
"""Of an average prompt's tokens, that a late one makes amends for at most."""
_SMOOTHING = 0.05


@dataclass(frozen=True, slots=True)
class _Place:
    request_id: str
    priority: int
    tenant: str
    num_tokens: int


class Deferral:
    """Who waits, and who was called and has not come yet."""

    def __init__(self, most: int) -> None:
        """most: that may wait at once."""
        self._most = most
        self._places: dict[str, _Place] = {}  # in order of arrival
        self._queues: dict[tuple[int, str], dict[str, _Place]] = {}  # by priority and tenant
        self._counters: dict[str, float] = {}  # tokens called of tenants that wait, or what they were lifted to
        self._level = 0.0  # the counter of whoever was called last
        self._called: set[str] = set()
        self._num_calls = 0
        self._num_passed = 0  # that went in time since one that was late
        self._num_owed = 0.0  # that are to, before the next one
        self._mean_tokens = 0.0  # to compute, of those that were in time

    def __len__(self) -> int:
        return len(self._places)

    def __iter__(self) -> Iterator[str]:
        return iter(self._places)

    @property
    def num_called(self) -> int:
        """Who was called and has neither come nor gone."""
        return len(self._called)

    @property
    def is_owed(self) -> bool:
        """Whether one of them goes now even though workers are busy."""
        return self._num_passed >= self._num_owed

    def went(self, num_tokens: int, *, is_overdue: bool) -> None:
        """A request with so many prompt tokens to compute was sent to workers."""
        if not is_overdue:
            self._num_passed += 1
            self._mean_tokens += _SMOOTHING * (num_tokens - self._mean_tokens)
            return
        times = num_tokens / self._mean_tokens if self._mean_tokens else 1.0
        self._num_passed, self._num_owed = 0, OLDEST_EVERY * min(max(times, 1.0), MOST_AMENDS)

    def defer(self, request: RouteRequest) -> bool:
        """It waits from now on. False: too many wait."""
        if len(self._places) >= self._most:
            return False
        place = _Place(request.request_id, request.priority, request.tenant, request.num_tokens)
        self._places[place.request_id] = place
        self._queues.setdefault((place.priority, place.tenant), {})[place.request_id] = place
        self._counters.setdefault(place.tenant, self._level)
        return True

    def call(self) -> str | None:
        """Whose turn it is; it is to come, or to `forget`. None: nobody waits."""
        if not self._places:
            return None
        self._num_calls += 1
        if self._num_calls % OLDEST_EVERY:
            queue = self._queues[min(self._queues, key=self._rank)]
            place = next(iter(queue.values()))
        else:
            place = next(iter(self._places.values()))
        self._level = self._counters[place.tenant]
        self._counters[place.tenant] += place.num_tokens
        self.forget(place.request_id)
        self._called.add(place.request_id)
        return place.request_id

    def _rank(self, key: tuple[int, str]) -> tuple[int, float]:
        priority, tenant = key
        return priority, self._counters[tenant]

    def came(self, request_id: str) -> bool:
        """It asks again; whether it was called."""
        if request_id not in self._called:
            return False
        self._called.remove(request_id)
        return True

    def forget(self, request_id: str) -> None:
        """It waits no more, and is not expected. Idempotent."""
        self._called.discard(request_id)
        place = self._places.pop(request_id, None)
        if place is None:
            return
        queue = self._queues[place.priority, place.tenant]
        del queue[request_id]
        if not queue:
            del self._queues[place.priority, place.tenant]
            if not any(tenant == place.tenant for _, tenant in self._queues):
                del self._counters[place.tenant]
