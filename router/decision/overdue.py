"""Where overdue requests go: those that will miss their TTFT target in any case. Pure.

On a worker an overdue prompt yields to all others, during an overload for minutes, and the decode worker keeps blocks
reserved for it all that time: new requests find none, become overdue in turn, and in the end no request meets its
target. At the router it holds nothing, and its workers are chosen by what is cached when its turn comes. While overdue
prompts hold less than `OVERDUE_SHARE` of the decode workers' blocks, they may queue at the workers, because the assumed
target may be stricter than the client's. Beyond that an overdue request is placed
- when a worker is about to be idle (`IDLE_S`) and has at most `OVERDUE_TOKENS` tokens of overdue prompts, or one
  prompt;
- when enough other requests were placed since the last overdue one (see Deferral).
"""

from dataclasses import replace
from typing import Literal

import numpy as np

from kvrelay.router.decision.chooser import Chooser
from kvrelay.router.decision.deferral import Deferral
from kvrelay.router.decision.snapshot import MAX_RETRY_S, MIN_RETRY_S
from kvrelay.router.fleet.columns import NUM_BLOCKS
from kvrelay.router.fleet.ledger import Ledger
from kvrelay.router.fleet.live_workers import LiveWorkers
from kvrelay.router.policies.base import Floats
from kvrelay.router.types import Decision, Deferred, RouteRequest, RoutingRefusal
from kvrelay.types import Role

OVERDUE_SHARE = 0.1
"""Share of all decode workers' blocks that may be reserved for overdue prompts which are not computed yet."""
OVERDUE_TOKENS = 8192
"""Tokens of overdue prompts to be computed at one worker; the last prompt may exceed it."""
IDLE_S = 0.5
"""Seconds of other prompts queued at a worker below which it takes overdue ones."""


class OverduePlacement:
    """Decides whether an overdue request is placed now or deferred."""

    def __init__(self, deferral: Deferral, chooser: Chooser, workers: LiveWorkers, ledger: Ledger) -> None:
        self._deferral, self._chooser, self._workers, self._ledger = deferral, chooser, workers, ledger

    def is_overdue(self, request: RouteRequest, decision: Decision) -> bool:
        """Whether the request misses its TTFT target in any case. Only policies that set latency targets have overdue
        requests.

        The predicted wait for blocks is left out: it does not know when outputs end, and is many times too long where
        blocks are scarce.
        """
        if decision.ttft_target_s is None or not request.may_wait or not self._deferral.is_enabled:
            return False
        if decision.verdict is not None:
            is_queued = decision.verdict.kind == "queued" and request.slo is not None and request.slo.on_miss == "queue"
            return is_queued and "ttft" in decision.verdict.missed
        compute = self._chooser.accounts_of(decision)[0]
        speed = self._workers.prefill_tokens_per_s(compute.info.worker_id)
        overtaken_s = compute.unreported_overdue_tokens / speed
        queue_s, blocks_s = decision.terms["prefill_queue"], decision.terms["decode_wait"]
        return decision.predicted_ttft_s - min(queue_s, overtaken_s) - blocks_s > decision.ttft_target_s

    def place(
        self, request: RouteRequest, decision: Decision, now_s: float, *, is_called: bool
    ) -> Decision | RoutingRefusal | Deferred:
        """Place an overdue request where it delays no other, or defer it.

        `is_called`: its turn has come; then it is placed.
        """
        if self._has_room() and (is_called or not self._deferral):
            return decision
        role = self._compute_role()
        queued_s = self._queued_s(role)
        rows = np.flatnonzero(queued_s < IDLE_S)
        if is_called and not len(rows):
            rows = np.flatnonzero(queued_s < np.inf)
        names = self._workers.columns(role).names
        takers = {names[row] for row in rows}
        if self._chooser.accounts_of(decision)[0].info.worker_id in takers:
            return decision
        if takers:
            force: Literal["remote"] | None = "remote" if role is Role.PREFILL else None
            elsewhere = replace(request, excluded=request.excluded.union(names) - takers, force=force)
            if isinstance(choice := self._chooser.choose(elsewhere, now_s), Decision):
                return choice
        if is_called:
            return decision
        if self._deferral.defer(request):
            return Deferred(decision.predicted_ttft_s)
        overdue_s = decision.predicted_ttft_s - (decision.ttft_target_s or 0.0)
        message = f"the queue of requests that will miss their TTFT target is full ({len(self._deferral)})"
        return RoutingRefusal("full", message, min(max(overdue_s, MIN_RETRY_S), MAX_RETRY_S))

    def take_ready(self) -> str | None:
        """A deferred request whose turn has come; None: none may be placed now."""
        if not self._deferral:
            return None
        role = self._compute_role()
        if len(self._workers.columns(role)):  # without workers every deferred request may come, to be refused
            queued_s = self._queued_s(role)
            has_turn = self._deferral.has_turn and bool((queued_s < np.inf).any())
            num_open = np.count_nonzero(queued_s < IDLE_S) or int(has_turn or self._has_room())
            if self._deferral.num_called >= num_open:
                return None
        return self._deferral.call()

    def _has_room(self) -> bool:
        """Whether overdue prompts hold so few of the decode workers' blocks that they may queue at the workers."""
        columns = self._workers.columns(Role.DECODE)
        return self._ledger.overdue_blocks < OVERDUE_SHARE * int(columns.ints[NUM_BLOCKS].sum())

    def _compute_role(self) -> Role:
        """The role that computes overdue prompts."""
        return Role.PREFILL if len(self._workers.columns(Role.PREFILL)) else Role.DECODE

    def _queued_s(self, role: Role) -> Floats:
        """By row: seconds of prompts that an overdue one would delay; infinite where there are enough overdue ones."""
        workers = self._workers
        seconds = workers.columns(role).queued_s(workers.prefill_rate)
        for account in self._ledger.with_overdue:
            worker_id, row = account.info.worker_id, account.row
            if account.role is not role or workers.accounts.get(worker_id) is not account:
                continue
            overtaken_s = account.unreported_overdue_tokens / workers.prefill_tokens_per_s(worker_id)
            has_enough = account.own.overdue_tokens >= OVERDUE_TOKENS
            seconds[row] = np.inf if has_enough else max(0.0, seconds[row] - overtaken_s)
        return seconds
