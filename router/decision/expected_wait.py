"""How long a new request would queue, by Little's law, and the refusal of one that would queue too long. Pure.

Each first token shows one wait, from the assignment on, and how many prompts were queued at the workers then: the ratio
of their sums is the rate at which the workers start requests, whatever limits it (prefill, blocks, running sequences).
Only waits behind several prompts per worker count: others show the load rather than what the workers can do.
"""

from collections.abc import Mapping

from kvrelay.router.decision.deferral_queue import DeferralQueue
from kvrelay.router.decision.snapshot import MAX_RETRY_S, MIN_RETRY_S
from kvrelay.router.fleet.ledger import Ledger, LiveWorkers
from kvrelay.router.types import RouteRequest, RoutingRefusal

QUEUED_PER_WORKER = 2
"""Prompts per worker from which on they are queued rather than being computed."""
LEAST_WAITS = 8
"""Waits that are observed before any is expected."""
FORGET_S = 60.0
"""Age of the last wait at which all are forgotten: what the workers can do may have changed."""
_KEEP = 1 - 1 / 64  # of the sums, for each further wait
_EARLY_S = 0.01  # by which a timer may be early


class ExpectedWait:
    """The measured rate of starts, and what is queued."""

    def __init__(self, queue: DeferralQueue, workers: LiveWorkers, ledger: Ledger, max_queue_s: float) -> None:
        self._queue, self._workers, self._ledger = queue, workers, ledger
        self.max_queue_s = max_queue_s
        self._prompts = self._seconds = 0.0  # sums over the last waits
        self._num_waits, self._last_s = 0, 0.0

    def observe(self, num_queued: int, wait_s: float, now_s: float) -> None:
        """A prompt was computed `wait_s` after it had been assigned as one of `num_queued` at the workers."""
        if num_queued >= self._num_busy():
            self._prompts = _KEEP * self._prompts + num_queued
            self._seconds = _KEEP * self._seconds + wait_s
            self._num_waits, self._last_s = self._num_waits + 1, now_s

    def forget(self, now_s: float) -> None:
        """Forget waits that are too long ago, unless some still wait."""
        if self._num_waits and now_s - self._last_s > FORGET_S and not self._queue.waiting:
            self._prompts = self._seconds = 0.0
            self._num_waits = 0

    def num_at_workers(self) -> int:
        """Prompts that any router has assigned and that are not computed."""
        return self._ledger.num_queued.total() + self._workers.num_foreign_prompts()

    def at_workers_s(self) -> float:
        """Seconds that a prompt which is not overdue queues at the workers; 0: not known, or hardly any are queued."""
        return self._busy_s(self.num_at_workers() - self._ledger.num_overdue)

    def backlog_s(self) -> float:
        """Seconds of prompts at the workers, as if every ingress had as many there as this one, at most what they have:
        so each has its share, even if it knows the rate of starts badly.
        """
        return self._busy_s(self._ledger.num_queued.total() * self._share())

    def _busy_s(self, num_prompts: float) -> float:
        return self._seconds_of(num_prompts) if num_prompts >= self._num_busy() else 0.0

    def all_s(self) -> float:
        """Seconds until all that is queued now, here and at the workers, has started; 0: not known."""
        return self._seconds_of(self.num_at_workers() + len(self._queue.waiting) * self._share())

    def of(self, request: RouteRequest, *, is_deferred: bool) -> float:
        """Seconds that a new request would queue, behind the deferred ones or at the workers alone; 0: not known.

        Tenants take turns: of another tenant's requests no more go first than its own tenant has queued, and one.
        """
        num_ahead: float = in_turn(self._ledger.num_queued, request.tenant) + self._workers.num_foreign_prompts()
        if is_deferred:
            num_ahead += in_turn(self._queue.num_by_tenant(request.priority), request.tenant) * self._share()
        else:
            num_ahead -= self._ledger.num_overdue
        return self._seconds_of(num_ahead)

    def refusal(self, request: RouteRequest, waited_s: float, *, is_deferred: bool) -> RoutingRefusal | None:
        """Why a new request, which has waited here for so long, may not queue; None: it may."""
        expected_s = self.of(request, is_deferred=is_deferred)
        if waited_s >= self.max_queue_s - _EARLY_S:
            why = f"it has been queued for {waited_s:.0f} s"
        elif expected_s > self.max_queue_s:
            why = f"it would be queued for about {expected_s:.0f} s"
        else:
            return None
        retry_s = min(max(expected_s, waited_s, MIN_RETRY_S), max(MAX_RETRY_S, self.max_queue_s))
        message = f"the cluster is full: {why}, at most {self.max_queue_s:g} s are allowed"
        return RoutingRefusal("full", message, retry_s)

    def _seconds_of(self, num_prompts: float) -> float:
        return max(num_prompts, 0.0) * self._seconds / self._prompts if self._num_waits >= LEAST_WAITS else 0.0

    def _share(self) -> float:
        """Requests that all routers start for each one of this router's; their deferred requests are taken to be as
        many as this one's.
        """
        num_foreign, num_own = self._workers.num_foreign_prompts(), self._ledger.num_queued.total()
        return 1.0 + min(num_foreign / max(num_own, 1), self._workers.num_other_routers())

    def _num_busy(self) -> int:
        return QUEUED_PER_WORKER * len(self._workers.accounts)


def in_turn(queued: Mapping[str, int], tenant: str) -> int:
    """Requests, of those queued by tenant, that are before a new one of this tenant when tenants take turns."""
    own = queued.get(tenant, 0)
    return sum(count if name == tenant else min(count, own + 1) for name, count in queued.items())
