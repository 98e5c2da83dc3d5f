"""One sequence from routing to its last token: route, reserve, prefill, transfer, decode, and again on a fault.

Owns the sequence's order of tokens and its attempts. Whatever ends it, `close` releases it.
Imports no HTTP and no sockets.
"""

import asyncio
import logging
import math
from typing import Literal, Protocol

import msgspec

from kvrelay.config import Settings
from kvrelay.errors import (
    ConnectionLost,
    DeadlinePassed,
    KvrelayError,
    ProtocolError,
    RequestError,
)
from kvrelay.hashing import block_hashes
from kvrelay.plane import messages as wire
from kvrelay.router.decision.router import Router
from kvrelay.router.objectives import SloVerdict
from kvrelay.router.types import Decision, Deferred, Refusal, RouteRequest
from kvrelay.serve.requests.attempt import Attempt, AttemptFailed, TimeIsUp, WorkerGone
from kvrelay.serve.requests.refusals import outcome_of
from kvrelay.serve.requests.retries import Retries
from kvrelay.serve.requests.slo import SloRecord
from kvrelay.serve.requests.token_order import GroupOrder, TokenOrder
from kvrelay.serve.telemetry.explain import Explain, span_attributes
from kvrelay.serve.telemetry.request_log import Arrival, RequestLog
from kvrelay.serve.telemetry.stats import ServeStats
from kvrelay.serve.workers.worker_link import WorkerLink
from kvrelay.tracing import spans_of

logger = logging.getLogger(__name__)

RESERVE_GRACE_S = 5.0  # beyond the wait that the decode worker itself allows
RETRY_AFTER_LATE_S = 1.0


class Carrier(Protocol):
    """What a sequence needs of the dispatcher."""

    settings: Settings
    stats: ServeStats
    requests: RequestLog
    router: Router

    def clock(self) -> float: ...
    def route(self, request: RouteRequest) -> Decision | Refusal | Deferred: ...
    def turn_of(self, request_id: str) -> asyncio.Future[None]: ...
    def give_up(self, request_id: str) -> None: ...
    def attach(self, attempt: Attempt) -> None: ...
    def detach(self, attempt: Attempt, reason: str) -> None: ...
    def abort_choice(self, attempt: Attempt, choice: int) -> None: ...
    def load_changed(self) -> None: ...
    def send(self, worker_id: str, message: wire.ToWorker) -> WorkerLink: ...


class SequenceLife:
    """`next` gives tokens until None; `close` must be called, and may be called at any time."""

    def __init__(
        self,
        carrier: Carrier,
        request: wire.SequenceRequest,
        *,
        force: Literal["local", "remote"] | None,
        explain: Explain | None,
        arrival: Arrival | None = None,
        slo: SloRecord | None = None,
    ) -> None:
        self._carrier, self._request, self._force, self._explain = carrier, request, force, explain
        self._slo = slo
        limit, group = request.sampling.max_tokens, request.group
        self._group_order = None if group is None else GroupOrder(request.request_id, limit, group.num_choices)
        self._order: TokenOrder | GroupOrder = self._group_order or TokenOrder(request.request_id, limit)
        self._num_sequences = num_sequences(request)
        self._attempt: Attempt | None = None
        self._waiting: asyncio.Future[None] | None = None  # for its turn, while the router has deferred it
        self._attempts_made = 0
        self._retries = Retries(carrier.settings.router.retry_budget)
        self._outcome: str | None = None
        self._started_s = carrier.clock()
        self._record = carrier.requests.begin(request, self._started_s, arrival)
        self._first_s = self._last_s = 0.0
        self._last_of: dict[int, float] = {}  # when each choice's last tokens came
        self._time_is_up = False
        self._spans = spans_of(request.traceparent, request_id=request.request_id)
        self._deadline = asyncio.get_running_loop().call_later(
            carrier.settings.serve.request_timeout_s, self._on_deadline
        )
        carrier.stats.running += self._num_sequences
        carrier.stats.prompt_tokens += request.num_prompt_tokens
        carrier.stats.prompt_squares += request.num_prompt_tokens**2

    async def next(self) -> wire.TokenOutput | None:
        """All tokens that are ready, waiting for the first of them; None after the last.

        Raises: Overloaded, InvalidRequest, RequestError (503, 504), WorkerLost, EngineFailed.
        """
        try:
            while True:
                if (output := self._order.take()) is not None:
                    self._count(output)
                    return output
                if self._order.finish_reason is not None:
                    self.close(self._order.finish_reason)
                    return None
                await self._advance()
        except KvrelayError as error:
            self._carrier.requests.failed(self._record, error)
            self.close(outcome_of(error))
            raise

    def end_choice(self, choice: int) -> None:
        """Nobody waits for this choice of a group any more; whoever computes it may stop."""
        if self._group_order is not None and choice not in self._group_order.ended:
            self._group_order.drop(choice)
            if self._attempt is not None:
                self._carrier.abort_choice(self._attempt, choice)
                self._narrow(self._attempt, self._group_order)

    def close(self, outcome: str) -> None:
        """Release everything on every worker. The first call's outcome counts. Never waits."""
        if self._outcome is not None:
            return
        self._outcome = outcome
        self._deadline.cancel()
        if self._waiting is not None:
            self._waiting.cancel()  # whoever waits for it gives its turn up
        if outcome in ("stop", "length"):
            self._learn()
        self._end_attempt("client" if outcome == "client" else outcome)
        stats, now_s = self._carrier.stats, self._carrier.clock()
        num_tokens = len(self._order.tokens) if self._group_order is None else 0  # choices come side by side: no TPOT
        if self._spans is not None:
            self._spans.close(outcome)
        self._carrier.requests.end(self._record, outcome, now_s)
        stats.running -= self._num_sequences
        stats.outcomes[outcome] += self._num_sequences
        stats.total_s.observe(now_s - self._started_s)
        if num_tokens > 1 and outcome in ("stop", "length"):
            stats.tpot_s.observe((self._last_s - self._first_s) / (num_tokens - 1))

    def _learn(self) -> None:
        """What it saw, for the forecast and for its own promise. Not of a sequence that moved: its gaps are not one worker's."""
        now_s = self._carrier.clock()
        num_tokens = len(self._order.tokens) if self._group_order is None else 0  # choices come side by side
        tpot_s = (self._last_s - self._first_s) / (num_tokens - 1) if num_tokens > 1 else 0.0
        if self._attempt is not None and self._attempts_made == 1 and num_tokens:
            self._carrier.router.on_finished(self._attempt.id, num_tokens, tpot_s, now_s)
        verdict = self._slo.verdict if self._slo is not None else None
        if verdict is not None and (target := verdict.target) is not None:
            is_kept = self._first_s - self._started_s <= (target.ttft_s or math.inf)
            is_kept &= tpot_s <= (target.tpot_s or math.inf)
            self._carrier.stats.slo_outcomes[target.name, is_kept] += 1

    # ---- one step

    async def _advance(self) -> None:
        try:
            if self._attempt is None:
                await self._begin()
            else:
                await self._pump(self._attempt)
        except AttemptFailed as failure:
            if self._spans is not None:
                self._spans.close(failure.code)
            self._end_attempt(f"retry: {failure.code}")
            self._consider_retry(failure)

    async def _begin(self) -> None:
        if self._retries.pause_s:
            await asyncio.sleep(self._retries.pause_s)
            self._retries.pause_s = 0.0
            if self._time_is_up:
                self._raise_deadline()
        attempt = self._attempt = await self._route()
        decision, request = attempt.decision, attempt.request
        if decision.path == "disaggregated":
            assert decision.prefill is not None and decision.decode is not None
            ticket = await self._reserve(attempt, decision.decode)
            self._submit(attempt, decision.prefill, wire.Prefill(request=self._in_time(request), ticket=ticket))
        elif decision.path == "local":
            assert decision.decode is not None
            self._submit(attempt, decision.decode, wire.Generate(request=self._in_time(request)))
        else:
            assert decision.prefill is not None
            self._submit(attempt, decision.prefill, wire.Prefill(request=self._in_time(request)))

    async def _route(self) -> Attempt:
        """Choose workers and count the sequence as theirs. Raises the error that ends it when none is left."""
        began_s = self._carrier.clock()
        request = self._continuation()
        if self._spans is not None:
            self._spans.begin("route", attempt=self._attempts_made)
        while isinstance(decision := self._select(request), Deferred):
            began_s += await self._turn(request.request_id, decision)
        if self._spans is not None:
            self._spans.end("route", **span_attributes(decision, str(self._retries.last_failure or "")))
        if isinstance(decision, Refusal):
            self._note_verdict(decision.verdict)
            raise self._retries.error_of(decision)
        self._note_verdict(decision.verdict)
        attempt = Attempt(self._in_class(request), decision)
        self._carrier.attach(attempt)
        self._carrier.stats.decisions[decision.path] += 1
        self._record.routed(decision, self._carrier.clock())
        if self._explain is not None:
            self._explain.route_s += self._carrier.clock() - began_s
            self._explain.decisions.append(decision)
        return attempt

    async def _turn(self, request_id: str, deferred: Deferred) -> float:
        """Wait until it may go to workers; seconds that it took. Raises RequestError (504)."""
        began_s = self._carrier.clock()
        self._carrier.stats.deferred += 1
        self._record.note("deferred", began_s, predicted_ttft_s=deferred.predicted_ttft_s)
        if self._spans is not None:
            self._spans.begin("deferred", predicted_ttft_s=deferred.predicted_ttft_s)
        has_come = False
        self._waiting = self._carrier.turn_of(request_id)
        try:
            await self._waiting
            if self._time_is_up:
                self._raise_deadline()
            has_come = True
        finally:
            if not has_come:
                self._carrier.give_up(request_id)
            self._waiting = None
        passed_s = self._carrier.clock() - began_s
        if self._spans is not None:
            self._spans.end("deferred")
        if self._explain is not None:
            self._explain.deferred_s += passed_s
        return passed_s

    def _note_verdict(self, verdict: SloVerdict | None) -> None:
        if self._slo is not None and verdict is not None:
            self._slo.verdict = verdict
            self._carrier.stats.slo_verdicts[verdict.wanted.name, verdict.kind] += 1

    def _in_class(self, request: wire.SequenceRequest) -> wire.SequenceRequest:
        """In line as the class of service says under which it is let in."""
        priority = self._slo.priority if self._slo is not None else None
        return request if priority is None else msgspec.structs.replace(request, priority=priority)

    def _select(self, request: wire.SequenceRequest) -> Decision | Refusal | Deferred:
        remaining = request.sampling.max_tokens - request.num_output_tokens
        if request.group is not None and any(request.group.emitted):
            remaining = max(remaining, 2)  # it goes on from more than a prompt: by a decode worker
        query = RouteRequest(
            request_id=request.request_id,
            block_hashes=tuple(request.block_hashes),
            num_tokens=len(request.token_ids),
            max_tokens=remaining,
            needs_decode=remaining > 1,
            force=self._force,
            width=max(1, num_sequences(request)),
            companions=max(0, self._slo.num_sequences - self._num_sequences) if self._slo is not None else 0,
            slo=self._slo.ask if self._slo is not None and self._attempts_made == 1 else None,  # then it is let in
            tenant=request.tenant,
            priority=request.priority,
            may_wait=self._attempts_made == 1 and self._force is None and request.deadline_s is None,
        )
        return self._retries.choose(query, self._carrier.route)

    def _continuation(self) -> wire.SequenceRequest:
        """The sequence as it now stands: the prompt, then what was emitted, under an id of its own."""
        self._attempts_made += 1
        if self._attempts_made == 1:
            return self._request
        self._order.forget_early()
        if self._group_order is not None:
            return self._group_continuation(self._group_order)
        original, emitted = self._request, self._order.tokens
        token_ids, tokens_per_hash = original.token_ids + emitted, self._carrier.settings.tokens_per_hash
        sampling = original.sampling
        if emitted and sampling.prompt_logprobs is not None:
            sampling = msgspec.structs.replace(sampling, prompt_logprobs=None)
        return wire.SequenceRequest(
            request_id=f"{original.request_id}~{self._attempts_made}",
            token_ids=token_ids,
            num_prompt_tokens=original.num_prompt_tokens,
            block_hashes=list(block_hashes(token_ids, tokens_per_hash, original.salt)),
            sampling=sampling,
            salt=original.salt,
            traceparent=original.traceparent,
            tokens_per_hash=tokens_per_hash,
            hints=original.hints,
            priority=original.priority,
            deadline_s=None if emitted else original.deadline_s,
            tenant=original.tenant,
            num_prefill_returns=self._retries.num_prefill_returns,
        )

    def _group_continuation(self, order: GroupOrder) -> wire.SequenceRequest:
        """The group from its prompt on, with what each choice has said; a beam search begins anew."""
        original, group = self._request, self._request.group
        assert group is not None
        sampling = original.sampling
        if group.beams is None:
            group = msgspec.structs.replace(group, emitted=order.emitted, ended=order.ended)
            if any(order.emitted):
                sampling = msgspec.structs.replace(sampling, prompt_logprobs=None)
        request_id = f"{original.request_id}~{self._attempts_made}"
        return msgspec.structs.replace(original, request_id=request_id, group=group, sampling=sampling)

    async def _reserve(self, attempt: Attempt, worker_id: str) -> bytes:
        """Blocks on the decode worker, before any compute is spent."""
        wait_s = self._carrier.settings.router.reserve_timeout_s
        began_s = self._carrier.clock()
        if self._spans is not None:
            self._spans.begin("reserve", worker=worker_id)
        speed = self._carrier.router.prefill_tokens_per_s(attempt.decision.prefill)
        message = wire.Reserve(request=self._in_time(attempt.request), timeout_s=wait_s, prefill_tokens_per_s=speed)
        self._submit(attempt, worker_id, message)
        too_late = (worker_id, TimeIsUp("reservation"))
        timer = asyncio.get_running_loop().call_later(wait_s + RESERVE_GRACE_S, attempt.inbox.put, too_late)
        try:
            while attempt.ticket is None:
                await self._pump(attempt)
        finally:
            timer.cancel()
        if self._spans is not None:
            self._spans.end("reserve")
        if self._explain is not None:
            self._explain.reserve_s += self._carrier.clock() - began_s
        return attempt.ticket

    def _in_time(self, request: wire.SequenceRequest) -> wire.SequenceRequest:
        """With what is left of its deadline, and of the time in which it is wanted. Raises DeadlinePassed: nothing is."""
        passed_s = self._carrier.clock() - self._started_s
        decision = self._attempt.decision if self._attempt is not None else None
        if decision is not None and decision.ttft_target_s is not None:
            left_s = None if request.num_output_tokens else decision.ttft_target_s - passed_s
            request = msgspec.structs.replace(request, ttft_target_s=left_s, tpot_target_s=decision.tpot_target_s)
        if request.deadline_s is None:
            return request
        left_s = request.deadline_s - passed_s
        if left_s <= 0:
            raise self._too_late(RETRY_AFTER_LATE_S)
        return msgspec.structs.replace(request, deadline_s=left_s)

    def _too_late(self, retry_after_s: float) -> DeadlinePassed:
        limit_s = self._request.deadline_s or 0.0
        return DeadlinePassed(f"deadline_s: not begun within {limit_s:g} s, every worker was busy", retry_after_s)

    def _submit(self, attempt: Attempt, worker_id: str, message: wire.ToWorker) -> None:
        if self._explain is not None and self._explain.first_token_s is None:
            self._explain.dispatched_s = self._carrier.clock()
        self._record.asked(worker_id, message, self._carrier.clock())
        try:
            attempt.holders[worker_id] = self._carrier.send(worker_id, message)
        except ConnectionLost as error:
            attempt.holders.pop(worker_id, None)
            raise AttemptFailed(worker_id, "lost", str(error)) from error

    # ---- what comes back

    async def _pump(self, attempt: Attempt) -> None:
        if self._time_is_up:
            self._raise_deadline()
        for worker_id, message in await attempt.inbox.get_all():
            self._handle(attempt, worker_id, message)
            if self._order.finish_reason is not None:
                return

    def _handle(self, attempt: Attempt, worker_id: str, message: object) -> None:
        if isinstance(message, wire.TokenOutput):
            self._on_tokens(attempt, worker_id, message)
        elif isinstance(message, wire.Reserved):
            attempt.ticket = message.ticket
            self._record.reserved(message, self._carrier.clock())
            if self._explain is not None:
                self._explain.held_tokens = message.held_tokens
        elif isinstance(message, wire.Transferred):
            self._on_transferred(attempt, message)
        elif isinstance(message, wire.Refused):
            attempt.holders.pop(worker_id, None)
            raise AttemptFailed(worker_id, message.reason, message.message, retry_after_s=message.retry_after_s)
        elif isinstance(message, wire.Failed):
            attempt.holders.pop(worker_id, None)
            raise AttemptFailed(worker_id, message.code, message.message, retryable=message.retryable)
        elif isinstance(message, WorkerGone):
            if worker_id in attempt.holders:
                attempt.holders.pop(worker_id, None)
                raise AttemptFailed(worker_id, "lost", message.why)
        elif isinstance(message, TimeIsUp):
            self._on_time_is_up(attempt, worker_id, message)

    def _on_tokens(self, attempt: Attempt, worker_id: str, output: wire.TokenOutput) -> None:
        try:
            self._order.add(output)
        except ProtocolError as error:
            raise AttemptFailed(worker_id, "engine", str(error), retryable=False) from error
        if not attempt.has_first_token and worker_id == (attempt.decision.prefill or attempt.decision.decode):
            attempt.has_first_token = True
            self._on_first_token(attempt, output)
        if worker_id == attempt.decision.decode:
            attempt.is_transferred = True  # decoding means that the blocks have arrived
        self._let_go_of_prefill(attempt)
        if output.ends_request:
            attempt.holders.pop(worker_id, None)
        if self._group_order is not None and output.finish_reason is not None:
            self._narrow(attempt, self._group_order)

    def _narrow(self, attempt: Attempt, order: GroupOrder) -> None:
        """Choices that have ended have no seat any more. Of a beam search, results come when all is over."""
        group = self._request.group
        if group is not None and group.beams is None:
            self._carrier.router.on_narrowed(attempt.id, group.num_choices - len(order.ended))
            self._carrier.load_changed()

    def _on_first_token(self, attempt: Attempt, output: wire.TokenOutput) -> None:
        now_s = self._carrier.clock()
        self._carrier.router.on_first_token(
            attempt.id, now_s, timings=output.timings, cached_tokens=output.cached_tokens or 0
        )
        self._carrier.load_changed()
        self._carrier.stats.cached_prefix_tokens += output.cached_tokens or 0
        self._record.first_token(output, now_s)
        if self._explain is not None:
            self._explain.on_first_token(output, now_s)

    def _on_transferred(self, attempt: Attempt, message: wire.Transferred) -> None:
        attempt.is_transferred = True
        self._let_go_of_prefill(attempt)
        self._carrier.stats.transfer_s.observe(message.seconds)
        self._record.transferred(message, self._carrier.clock())
        if self._explain is not None:
            self._explain.transfer = message

    def _let_go_of_prefill(self, attempt: Attempt) -> None:
        """The prefill worker owes nothing more: its blocks and its token are both where they belong."""
        if attempt.decision.prefill is not None and attempt.is_transferred and attempt.has_first_token:
            attempt.holders.pop(attempt.decision.prefill, None)

    def _count(self, output: wire.TokenOutput) -> None:
        stats, now_s, count = self._carrier.stats, self._carrier.clock(), len(output.token_ids)
        stats.output_tokens += count
        self._record.tokens(count, now_s)
        last_s = self._last_of.get(output.choice)
        if self._last_s == 0.0:
            self._first_s = now_s
            stats.ttft_s.observe(now_s - self._started_s)
        elif count and last_s is not None:
            stats.itl_s.observe((now_s - last_s) / count, count)
        self._last_s = self._last_of[output.choice] = now_s

    # ---- time and faults

    def _on_deadline(self) -> None:
        self._time_is_up = True
        if self._waiting is not None and not self._waiting.done():
            self._waiting.set_result(None)
        if self._attempt is not None:
            self._attempt.inbox.put(("", TimeIsUp("request")))

    def _on_time_is_up(self, attempt: Attempt, worker_id: str, message: TimeIsUp) -> None:
        if message.what == "request":
            self._raise_deadline()
        if attempt.ticket is None:
            raise AttemptFailed(worker_id, "full", "no answer to the reservation")

    def _raise_deadline(self) -> None:
        limit_s = self._carrier.settings.serve.request_timeout_s
        raise RequestError(f"the request took longer than {limit_s:g} s", None, 504, "timeout")

    def _end_attempt(self, reason: str) -> None:
        if self._attempt is not None:
            self._carrier.detach(self._attempt, reason)
            self._attempt = None

    def _consider_retry(self, failure: AttemptFailed) -> None:
        """Return when another attempt is to be made. Raises the error that ends the sequence."""
        logger.info(
            "request %s: worker %s: %s: %s", self._request.request_id, failure.worker_id, failure.code, failure.why
        )
        self._record.attempt_failed(failure.worker_id, failure.code, failure.why, self._carrier.clock())
        if failure.code == "deadline":
            raise self._too_late(failure.retry_after_s)
        self._carrier.stats.retries += self._retries.failed(failure)


def num_sequences(request: wire.SequenceRequest) -> int:
    """How many sequences of a worker's batch it will be."""
    return 1 if request.group is None else request.group.num_sequences
