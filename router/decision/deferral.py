"""Which requests wait at the router, and when their turn comes. Pure.

An overdue request, which will miss its TTFT target in any case, waits while workers are busy: it has its turn after
`OVERDUE_EVERY` other requests, or proportionally more if its prompt is longer than theirs. Once the oldest has waited
for half of `max_queue_s`, or so much is queued that the last would, every new request waits behind those that are here,
and one that is called has no TTFT target any more: it yields to none at its worker.
While many prompts are queued at the workers, whatever they wait for there, no deferred request is called.

How long a new request would queue follows from Little's law: each first token shows one wait, from the assignment on,
and how many prompts were queued at the workers then, and the ratio of their sums is the rate at which the workers start
requests, whatever limits it (prefill, blocks, running sequences). Only waits behind several prompts per worker count:
others show the load rather than what the workers can do. One that would queue too long is refused.

In a full cluster a few long overdue prompts keep many others from being in time. So each overdue first token shows how
long a token of such prompts waits at a worker, and a new request with a long prompt is refused whose first token would
take too long by that, and longer than its own prompt explains.

An overload that lasts would leave `max_queue_s` of requests queued, and each of them late. More requests come then than
are started, for longer than a burst lasts; a fixed number of clients that wait for their answers never does that.
Meanwhile, and until none was refused for `max_queue_s`, a new request that is overdue, or nearly, may queue for
`FULL_SHARE` of its TTFT target only; the others are placed. And from the first refusal for
`max_queue_s` of a tenant's on, until there was none for as long, that holds for all its new requests of that priority:
those that are admitted are in time, and the workers still have enough to do.
"""

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Literal

import numpy as np

from kvrelay.router.decision.deferral_queue import DeferralQueue
from kvrelay.router.decision.snapshot import MAX_RETRY_S, MIN_RETRY_S
from kvrelay.router.fleet.account import NUM_BLOCKS
from kvrelay.router.fleet.ledger import Ledger, LiveWorkers
from kvrelay.router.policies.base import Floats
from kvrelay.router.types import LONG_PROMPT, Decision, Deferred, RouteRequest, RoutingRefusal
from kvrelay.types import Role

OVERDUE_SHARE = 0.1
"""Share of all decode workers' blocks that may be reserved for overdue prompts which are not computed yet."""
OVERDUE_TOKENS = 8192
"""Tokens of overdue prompts to be computed at one worker; the last prompt may exceed it."""
IDLE_S = 0.5
"""Seconds of other prompts queued at a worker below which it takes overdue ones."""
BACKLOG_S = 5.0
"""Seconds of prompts queued at the workers beyond which they get no overdue ones."""
FULL_SHARE = 0.6
"""Share of its TTFT target that a new request may queue while the cluster is full."""
QUEUED_PER_WORKER = 2
"""Prompts per worker from which on they are queued rather than being computed."""
LEAST_WAITS = 8
"""Waits that are observed before any is expected."""
SURPLUS, LEAST_SURPLUS, SURPLUS_SPANS = 0.1, 6, 2
"""An overload lasts once more requests came than were started, by this share and by so many, in so many spans."""
SPAN, SPAN_REQUESTS, LONGEST_SPAN = 1 / 6, 24, 3
"""A span's share of `max_queue_s`; it is up to so many times as long while fewer requests come, or start, in it."""
LASTING_SHARE = 0.9
"""Share of its TTFT target within which a new request's first token is to be expected while an overload lasts."""
PESSIMISM = 1.15
"""Times that a predicted TTFT counts: a request is better deferred a little too early than a little too late."""
FORGET_S = 60.0
"""Age of the last wait at which all are forgotten: what the workers can do may have changed."""
OVERDUE_WAIT, OVERDUE_TIMES = 1 / 4, 2.0
"""A full cluster is to compute it within this share of `max_queue_s`, or so many times what it takes while idle."""
_KEEP = 1 - 1 / 64  # of the sums, for each further wait
_EARLY_S = 0.01  # by which a timer may be early


@dataclass(slots=True)
class MeasuredWaits:
    """The ratio of two sums over the last waits: their seconds, and the units queued then, each one's own included."""

    units: float = 0.0
    seconds: float = 0.0
    number: int = 0

    def observe(self, units: float, wait_s: float) -> None:
        self.units, self.seconds = _KEEP * self.units + units, _KEEP * self.seconds + wait_s
        self.number += 1

    def seconds_of(self, units: float) -> float:
        """Seconds that so many units take; 0: not known."""
        return max(units, 0.0) * self.seconds / max(self.units, 1.0) if self.number >= LEAST_WAITS else 0.0


@dataclass(slots=True)
class Surplus:
    """How many more new requests come, refused ones included, than are started: in spans of time, one after the other.

    num_spans: that had a surplus, up to the current one.
    """

    span_s: float
    begun_s: float = -math.inf
    num_come: int = 0
    num_started: int = 0
    num_spans: int = 0

    def observe(self, now_s: float, *, come: int = 0, started: int = 0) -> None:
        age = (now_s - self.begun_s) / self.span_s
        if age >= 1 and (max(self.num_come, self.num_started) >= SPAN_REQUESTS or age >= LONGEST_SPAN):
            has_surplus = self.num_come - self.num_started >= max(LEAST_SURPLUS, SURPLUS * self.num_started)
            is_next = age < LONGEST_SPAN + 1
            self.num_spans = self.num_spans + 1 if has_surplus and is_next else 0
            self.begun_s, self.num_come, self.num_started = now_s, 0, 0
        self.num_come += come
        self.num_started += started


class ExpectedWait:
    """The measured rate of starts, and what is queued."""

    def __init__(self, queue: DeferralQueue, workers: LiveWorkers, ledger: Ledger, max_queue_s: float) -> None:
        self._queue, self._workers, self._ledger = queue, workers, ledger
        self.max_queue_s = max_queue_s
        self._waits, self._last_s = MeasuredWaits(), 0.0  # by prompts at all workers
        self.surplus, self._lasting_s = Surplus(SPAN * max_queue_s), -math.inf  # when an overload was last seen to last
        self.overdue = MeasuredWaits()  # of overdue requests, by tokens of such prompts at one's worker
        self._refused_s: dict[tuple[int, str], float] = {}  # when one of a priority and tenant was last; oldest first

    def observe(self, num_queued: int, wait_s: float, now_s: float) -> None:
        """A prompt was computed `wait_s` after it had been assigned as one of `num_queued` at the workers."""
        self.surplus.observe(now_s, started=1)
        if num_queued >= self._num_busy():
            self._waits.observe(num_queued, wait_s)
            self._last_s = now_s

    def forget(self, now_s: float) -> None:
        """Forget waits that are too long ago, unless some still wait."""
        if self._waits.number and now_s - self._last_s > FORGET_S and not self._queue.waiting:
            self._waits, self.overdue = MeasuredWaits(), MeasuredWaits()

    def num_at_workers(self) -> int:
        """Prompts that any router has assigned and that are not computed."""
        return self._ledger.num_queued.total() + self._workers.num_foreign_prompts

    def at_workers_s(self) -> float:
        """Seconds that a prompt which is not overdue queues at the workers; 0: not known, or hardly any are queued."""
        return self._busy_s(self.num_at_workers() - self._ledger.num_overdue)

    def backlog_s(self) -> float:
        """Seconds of prompts at the workers, as if every ingress had as many there as this one, at most what they have:
        so each has its share, even if it knows the rate of starts badly.
        """
        return self._busy_s(self._ledger.num_queued.total() * self._share())

    def _busy_s(self, num_prompts: float) -> float:
        return self._waits.seconds_of(num_prompts) if num_prompts >= self._num_busy() else 0.0

    def all_s(self) -> float:
        """Seconds until all that is queued now, here and at the workers, has started; 0: not known."""
        return self._waits.seconds_of(self.num_at_workers() + len(self._queue.waiting) * self._share())

    def of(self, request: RouteRequest, *, is_deferred: bool) -> float:
        """Seconds that a new request would queue, behind the deferred ones or at the workers alone; 0: not known.

        Tenants take turns: of another tenant's requests no more go first than its own tenant has queued, and one.
        """
        num_sent, num_deferred = self._own_ahead(request, is_deferred=is_deferred)
        return self._waits.seconds_of(num_sent + self._workers.num_foreign_prompts + num_deferred * self._share())

    def _of_own(self, request: RouteRequest, *, is_deferred: bool) -> float:
        """The same, as if every router had as many as this one, at most what they have: so each has its share."""
        return self._waits.seconds_of(sum(self._own_ahead(request, is_deferred=is_deferred)) * self._share())

    def _own_ahead(self, request: RouteRequest, *, is_deferred: bool) -> tuple[int, int]:
        """This router's requests that a new one would queue behind: at the workers, and deferred ones."""
        num_sent = in_turn(self._ledger.num_queued, request.tenant)
        if not is_deferred:
            return num_sent - self._ledger.num_overdue, 0
        return num_sent, in_turn(self._queue.num_by_tenant(request.priority), request.tenant)

    def refusal(
        self, request: RouteRequest, target_s: float | None, now_s: float, waited_s: float, *, is_deferred: bool
    ) -> RoutingRefusal | None:
        """Why a new request, which has waited here for so long, may not queue; None: it may.

        target_s: its TTFT target.
        """
        self.surplus.observe(now_s, come=1)
        expected_s, limit_s = self.of(request, is_deferred=is_deferred), self.max_queue_s
        is_long = expected_s > limit_s
        if target_s is not None and not is_long and self._is_full_for(request, now_s):
            limit_s = min(limit_s, FULL_SHARE * target_s)
            is_long = self._of_own(request, is_deferred=is_deferred) > limit_s
        if waited_s >= self.max_queue_s - _EARLY_S:
            why = f"it has been queued for {waited_s:.0f} s, at most {self.max_queue_s:g} s are allowed"
        elif is_long:
            why = f"it would be queued for about {expected_s:.0f} s, at most {limit_s:g} s are allowed"
            self._note_refusal(request, now_s)
        else:
            return None
        retry_s = min(max(expected_s, waited_s, MIN_RETRY_S), max(MAX_RETRY_S, self.max_queue_s))
        return RoutingRefusal("full", f"the cluster is full: {why}", retry_s)

    def is_lasting(self, now_s: float) -> bool:
        """Whether an overload lasts, or a request was refused for that within `max_queue_s`."""
        if self.surplus.num_spans >= SURPLUS_SPANS:
            self._lasting_s = now_s
        return now_s - self._lasting_s < self.max_queue_s and self._is_busy()

    def lasting_refusal(self, request: RouteRequest, target_s: float, now_s: float) -> RoutingRefusal | None:
        """Why a new request may not be deferred while an overload lasts; None: it may."""
        expected_s, limit_s = self._of_own(request, is_deferred=True), min(self.max_queue_s, FULL_SHARE * target_s)
        if request.priority < 0 or expected_s <= limit_s:
            return None
        self._lasting_s = now_s
        why = f"it would be queued for about {expected_s:.0f} s, and more come than can be started"
        return RoutingRefusal("full", f"the cluster is full: {why}", max(expected_s - limit_s, MIN_RETRY_S))

    def overdue_refusal(self, request: RouteRequest, decision: Decision, waited_s: float) -> RoutingRefusal | None:
        """Why a new overdue request may not queue; None: it may."""
        compute, own = self._workers.accounts_of(decision)[0], compute_tokens(request, decision)
        is_long = own >= LONG_PROMPT * self._ledger.mean_tokens > 0
        if not is_long or request.priority < 0 or not self._is_busy():
            return None
        queued = self._ledger.num_queued
        ahead = compute.overdue_tokens * in_turn(queued, request.tenant) / max(queued.total(), 1)
        expected_s = waited_s + self.overdue.seconds_of(ahead + own)
        alone_s = own / self._workers.prefill_tokens_per_s(compute.info.worker_id)
        limit_s = max(OVERDUE_WAIT * self.max_queue_s, OVERDUE_TIMES * alone_s)
        if expected_s <= limit_s:
            return None
        why = f"its first token would take about {expected_s:.0f} s, at most {limit_s:.0f} s are allowed"
        return RoutingRefusal("full", f"the cluster is full: {why}", max(expected_s - limit_s, MIN_RETRY_S))

    def _is_full_for(self, request: RouteRequest, now_s: float) -> bool:
        refused_s = self._refused_s.get((request.priority, request.tenant), -math.inf)
        return now_s - refused_s < self.max_queue_s and self._is_busy()

    def _note_refusal(self, request: RouteRequest, now_s: float) -> None:
        key = request.priority, request.tenant
        self._refused_s.pop(key, None)
        self._refused_s[key] = now_s
        while now_s - self._refused_s[oldest := next(iter(self._refused_s))] >= self.max_queue_s:
            del self._refused_s[oldest]

    def _share(self) -> float:
        """Requests that all routers start for each one of this router's; their deferred requests are taken to be as
        many as this one's.
        """
        num_foreign, num_own = self._workers.num_foreign_prompts, self._ledger.num_queued.total()
        return 1.0 + min(num_foreign / max(num_own, 1), self._workers.num_other_routers())

    def _is_busy(self) -> bool:
        return self.num_at_workers() >= self._num_busy()

    def _num_busy(self) -> int:
        return QUEUED_PER_WORKER * len(self._workers.accounts)


def compute_tokens(request: RouteRequest, decision: Decision) -> int:
    """Prompt tokens that are neither cached nor loaded."""
    return request.num_tokens - decision.cached_tokens_prefill - decision.loaded_tokens_prefill


def in_turn(queued: Mapping[str, int], tenant: str) -> int:
    """Requests, of those queued by tenant, that are before a new one of this tenant when tenants take turns."""
    own = queued.get(tenant, 0)
    return sum(count if name == tenant else min(count, own + 1) for name, count in queued.items())


@dataclass(frozen=True, slots=True)
class Deferral:
    """Decides whether a request is placed now, deferred or refused."""

    queue: DeferralQueue
    choose: Callable[[RouteRequest, float], Decision | RoutingRefusal]  # the decision at a time; counts nothing
    workers: LiveWorkers
    ledger: Ledger
    wait: ExpectedWait

    def without_target(self, decision: Decision, now_s: float, waited_s: float) -> Decision:
        """The decision for a request that was called: while all come in order, it has no TTFT target."""
        is_in_order = waited_s >= self.wait.max_queue_s / 2 or self._is_in_order(now_s)
        return replace(decision, ttft_target_s=None) if is_in_order and decision.verdict is None else decision

    def is_overdue(
        self, request: RouteRequest, decision: Decision, waited_s: float, share_of_target: float = 1.0
    ) -> bool:
        """Whether a request that may wait, and has waited here for so long, misses this share of its TTFT target in any
        case.

        The predicted wait for blocks is left out: it does not know when outputs end, and is many times too long where
        blocks are scarce.
        """
        target_s = decision.ttft_target_s
        if target_s is None or not request.may_wait:
            return False
        if decision.verdict is not None:
            is_queued = decision.verdict.kind == "queued" and request.slo is not None and request.slo.on_miss == "queue"
            return is_queued and "ttft" in decision.verdict.missed
        target_s *= share_of_target
        if waited_s + self.wait.at_workers_s() > target_s:
            return True
        if waited_s + PESSIMISM * decision.predicted_ttft_s <= target_s:  # so it is in a cluster that keeps up
            return False
        compute = self.workers.accounts_of(decision)[0]
        speed = self.workers.prefill_tokens_per_s(compute.info.worker_id)
        overtaken_s = compute.unreported_overdue_tokens / speed
        queue_s, blocks_s = decision.terms["prefill_queue"], decision.terms["decode_wait"]
        predicted_s = decision.predicted_ttft_s - min(queue_s, overtaken_s) - blocks_s
        return waited_s + PESSIMISM * predicted_s > target_s

    def place(
        self,
        request: RouteRequest,
        decision: Decision,
        now_s: float,
        waited_s: float,
        *,
        is_overdue: bool,
        is_called: bool,
    ) -> Decision | RoutingRefusal | Deferred:
        """Place a request, an overdue one where it delays no other; or defer it, or refuse it.

        `is_called`: its turn has come; then it is placed.
        """
        if is_called:
            placed = self._place_overdue(request, decision, now_s, is_called=True) if is_overdue else None
            return placed or decision
        is_behind = request.may_wait and decision.verdict is None and self._is_in_order(now_s)
        if request.is_new:
            target_s, is_deferred = decision.ttft_target_s, is_overdue or is_behind
            refusal = self.wait.refusal(request, target_s, now_s, waited_s, is_deferred=is_deferred)
            if refusal is None and target_s is not None and decision.verdict is None:
                is_lasting = self.wait.is_lasting(now_s)
                if is_lasting and (is_deferred or self.is_overdue(request, decision, waited_s, LASTING_SHARE)):
                    refusal = self.wait.lasting_refusal(request, target_s, now_s)
                if refusal is None and is_overdue:
                    refusal = self.wait.overdue_refusal(request, decision, waited_s)
            if refusal is not None:
                return refusal
        if not is_overdue and not is_behind:
            return decision
        if not is_behind and not self._is_backlogged():
            if self._has_room() and not self.queue.waiting:
                return decision
            if (placed := self._place_overdue(request, decision, now_s, is_called=False)) is not None:
                return placed
        self.queue.defer(request, now_s - waited_s)
        return Deferred(decision.predicted_ttft_s, self.wait.max_queue_s - waited_s)

    def _is_in_order(self, now_s: float) -> bool:
        """Whether some wait, and no new request may pass them any more."""
        half_s = self.wait.max_queue_s / 2
        return bool(self.queue.waiting) and (self.queue.oldest_s(now_s) >= half_s or self.wait.all_s() >= half_s)

    def _is_backlogged(self) -> bool:
        return self.wait.backlog_s() > BACKLOG_S

    def _place_overdue(
        self, request: RouteRequest, decision: Decision, now_s: float, *, is_called: bool
    ) -> Decision | None:
        """The decision for a worker on which an overdue request delays no other; None: there is none."""
        if is_called and self._has_room():
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
            force: Literal["remote"] | None = "remote" if role is Role.PREFILL and not self.workers.all_both else None
            elsewhere = replace(request, excluded=request.excluded.union(names) - takers, force=force)
            if isinstance(choice := self.choose(elsewhere, now_s), Decision):
                return choice
        return None

    def take_ready(self) -> str | None:
        """A deferred request whose turn has come, while any waits; None: none may be placed now."""
        role = self._compute_role()
        if len(self.workers.columns(role)):  # without workers every deferred request may come, to be refused
            if self._is_backlogged():
                return None
            queued_s = self._queued_s(role)
            has_turn = self.ledger.is_overdue_due and bool((queued_s < np.inf).any())
            num_open = np.count_nonzero(queued_s < IDLE_S) or int(has_turn or self._has_room())
            if len(self.queue.called) >= num_open:
                return None
        return self.queue.call()

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
