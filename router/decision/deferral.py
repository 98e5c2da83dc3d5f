"""The queue of deferred requests: overdue ones, which wait at the router. Pure.

Order: priorities, lower numbers first; within a priority, the tenant with the fewest tokens called; within a tenant,
first come, first served. Every `OLDEST_EVERY`-th call takes the oldest request, so that none starves. While workers are
busy, an overdue request has its turn after `OLDEST_EVERY` other requests, or proportionally more if its prompt is
longer than theirs.
"""

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Literal

import numpy as np

from kvrelay.router.decision.snapshot import MAX_RETRY_S, MIN_RETRY_S
from kvrelay.router.fleet.account import NUM_BLOCKS
from kvrelay.router.fleet.ledger import OVERDUE_EVERY, Ledger, LiveWorkers
from kvrelay.router.policies.base import Floats
from kvrelay.router.types import Decision, Deferred, RouteRequest, RoutingRefusal
from kvrelay.types import Role

MAX_DEFERRED = 256
"""Requests that may wait here at a time: minutes of work for a worker; more get 429."""
OLDEST_EVERY = OVERDUE_EVERY


class Deferral:
    """Deferred requests, and those that were called and have not come back yet."""

    def __init__(self, max_deferred: int | None = None) -> None:
        """`max_deferred`: requests that may wait at a time; None: MAX_DEFERRED."""
        self._max_deferred = MAX_DEFERRED if max_deferred is None else max_deferred
        self.waiting: dict[str, RouteRequest] = {}  # in order of arrival
        self.called: set[str] = set()  # have neither come back nor ended
        self._queues: dict[tuple[int, str], dict[str, RouteRequest]] = {}  # by priority and tenant
        self._counters: dict[str, float] = {}  # tokens called, by waiting tenant; a new tenant starts at `_level`
        self._level = 0.0  # the counter of the tenant that was called last
        self._num_calls = 0

    def defer(self, request: RouteRequest) -> bool:
        """Queue it. False: too many wait."""
        if len(self.waiting) >= self._max_deferred:
            return False
        self.waiting[request.request_id] = request
        self._queues.setdefault((request.priority, request.tenant), {})[request.request_id] = request
        self._counters.setdefault(request.tenant, self._level)
        return True

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
        self._counters[entry.tenant] += entry.num_tokens
        self.remove(entry.request_id)
        self.called.add(entry.request_id)
        return entry.request_id

    def remove(self, request_id: str) -> None:
        """It waits no longer, and is not expected back. Idempotent."""
        self.called.discard(request_id)
        entry = self.waiting.pop(request_id, None)
        if entry is None:
            return
        queue = self._queues[entry.priority, entry.tenant]
        del queue[request_id]
        if not queue:
            del self._queues[entry.priority, entry.tenant]
            if not any(tenant == entry.tenant for _, tenant in self._queues):
                del self._counters[entry.tenant]


OVERDUE_SHARE = 0.1
"""Share of all decode workers' blocks that may be reserved for overdue prompts which are not computed yet."""
OVERDUE_TOKENS = 8192
"""Tokens of overdue prompts to be computed at one worker; the last prompt may exceed it."""
IDLE_S = 0.5
"""Seconds of other prompts queued at a worker below which it takes overdue ones."""


@dataclass(frozen=True, slots=True)
class OverduePlacement:
    """Decides whether an overdue request is placed now or deferred."""

    deferral: Deferral
    choose: Callable[[RouteRequest, float], Decision | RoutingRefusal]  # the decision at a time; counts nothing
    workers: LiveWorkers
    ledger: Ledger

    def is_overdue(self, request: RouteRequest, decision: Decision) -> bool:
        """Whether a request that may wait and has a TTFT target misses it in any case.

        The predicted wait for blocks is left out: it does not know when outputs end, and is many times too long where
        blocks are scarce.
        """
        target_s = decision.ttft_target_s
        if target_s is None or not request.may_wait:
            return False
        if decision.verdict is not None:
            is_queued = decision.verdict.kind == "queued" and request.slo is not None and request.slo.on_miss == "queue"
            return is_queued and "ttft" in decision.verdict.missed
        compute = self.workers.accounts_of(decision)[0]
        speed = self.workers.prefill_tokens_per_s(compute.info.worker_id)
        overtaken_s = compute.unreported_overdue_tokens / speed
        queue_s, blocks_s = decision.terms["prefill_queue"], decision.terms["decode_wait"]
        return decision.predicted_ttft_s - min(queue_s, overtaken_s) - blocks_s > target_s

    def place(
        self, request: RouteRequest, decision: Decision, now_s: float, *, is_called: bool
    ) -> Decision | RoutingRefusal | Deferred:
        """Place an overdue request where it delays no other, or defer it.

        `is_called`: its turn has come; then it is placed.
        """
        if self._has_room() and (is_called or not self.deferral.waiting):
            return decision
        role = self._compute_role()
        queued_s = self._queued_s(role)
        rows = np.flatnonzero(queued_s < IDLE_S)
        if is_called and not len(rows):
            rows = np.flatnonzero(queued_s < np.inf)
        names = self.workers.columns(role).names
        takers = {names[row] for row in rows}
        if self.workers.accounts_of(decision)[0].info.worker_id in takers:
            return decision
        if takers:
            force: Literal["remote"] | None = "remote" if role is Role.PREFILL else None
            elsewhere = replace(request, excluded=request.excluded.union(names) - takers, force=force)
            if isinstance(choice := self.choose(elsewhere, now_s), Decision):
                return choice
        if is_called:
            return decision
        if self.deferral.defer(request):
            return Deferred(decision.predicted_ttft_s)
        overdue_s = decision.predicted_ttft_s - (decision.ttft_target_s or 0.0)
        message = f"the queue of requests that will miss their TTFT target is full ({len(self.deferral.waiting)})"
        return RoutingRefusal("full", message, min(max(overdue_s, MIN_RETRY_S), MAX_RETRY_S))

    def take_ready(self) -> str | None:
        """A deferred request whose turn has come, while any waits; None: none may be placed now."""
        role = self._compute_role()
        if len(self.workers.columns(role)):  # without workers every deferred request may come, to be refused
            queued_s = self._queued_s(role)
            has_turn = self.ledger.is_overdue_due and bool((queued_s < np.inf).any())
            num_open = np.count_nonzero(queued_s < IDLE_S) or int(has_turn or self._has_room())
            if len(self.deferral.called) >= num_open:
                return None
        return self.deferral.call()

    def _has_room(self) -> bool:
        """Whether overdue prompts hold so few of the decode workers' blocks that they may queue at the workers."""
        columns = self.workers.columns(Role.DECODE)
        return self.ledger.overdue_blocks < OVERDUE_SHARE * int(columns.ints[NUM_BLOCKS].sum())

    def _compute_role(self) -> Role:
        return Role.PREFILL if len(self.workers.columns(Role.PREFILL)) else Role.DECODE

    def _queued_s(self, role: Role) -> Floats:
        """By row: seconds of prompts that an overdue one would delay; infinite where there are enough overdue ones."""
        workers = self.workers
        seconds = workers.columns(role).queued_s(workers.prefill_rate)
        for account in self.ledger.with_overdue:
            worker_id, place = account.info.worker_id, account.places.get(role)
            if place is None or workers.accounts.get(worker_id) is not account:
                continue
            row = place[1]
            overtaken_s = account.unreported_overdue_tokens / workers.prefill_tokens_per_s(worker_id)
            has_enough = account.own.overdue_tokens >= OVERDUE_TOKENS
            seconds[row] = np.inf if has_enough else max(0.0, seconds[row] - overtaken_s)
        return seconds
