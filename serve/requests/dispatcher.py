"""The ingress's engine: runs sequences on whichever workers are members.

A `RequestDriver` takes one sequence from its placement to its last token: place, reserve, prefill, commit, decode, and
again after a failure. Imports no HTTP and no sockets.
"""

import asyncio
import contextlib
import logging
import math
import time
from collections.abc import AsyncGenerator, Callable
from typing import Any, Literal

import msgspec

from kvrelay.config import Settings
from kvrelay.errors import DeadlinePassed, KvrelayError, Overloaded, RequestError
from kvrelay.hashing import block_hashes
from kvrelay.plane import messages as wire
from kvrelay.plane.messages import Prefetched, SequenceRequest, TokenOutput
from kvrelay.router.decision.router import Router
from kvrelay.router.types import Decision, Deferred, RouteRequest, RoutingRefusal
from kvrelay.serve.requests.attempt import GroupOrder, SequenceAttempt
from kvrelay.serve.requests.migration import Migrations
from kvrelay.serve.requests.retries import (
    RESERVE_TIMEOUT_S,
    RETRY_BUDGET,
    AttemptFailed,
    Retries,
    error_of_refusal,
    outcome_of,
)
from kvrelay.serve.telemetry.explain import Explain, SloRecord
from kvrelay.serve.telemetry.observer import Arrival, RequestLog, RequestObserver, ServeStats
from kvrelay.serve.workers.membership import Membership, Placer
from kvrelay.serve.workers.queries import RETRY_AFTER_FULL_S, Queries
from kvrelay.serve.workers.worker_link import Links

logger = logging.getLogger(__name__)

RETRY_AFTER_DEADLINE_S = 1.0
Force = Literal["local", "remote"] | None
"""Where the prompt is computed: on the decode worker, on a prefill worker; None: the router decides."""


class RequestDriver:
    """Runs one sequence, or one group of choices, over as many attempts as it takes.

    Iterate over `tokens` once, and close it. 17 attributes: its parts, and how far the sequence has come. While it
    decodes, migration.py may move it to another worker.
    """

    def __init__(
        self,
        request: wire.SequenceRequest,
        parts: "Dispatcher",
        observer: RequestObserver,
        force: Force,
        slo: SloRecord | None,
    ) -> None:
        """`slo` is judged with the first attempt."""
        self._request, self._settings, self._force, self._slo = request, parts.settings, force, slo
        self._placer, self._links, self.observer = parts.placer, parts.links, observer
        self._running = parts.running
        limit, group = request.sampling.max_tokens, request.group
        self.order = GroupOrder(request.request_id, limit, group.num_choices if group is not None else 1)
        self._retries, self._reserve_timeout_s = Retries(parts.retry_budget), parts.reserve_timeout_s
        self.attempt: SequenceAttempt | None = None
        self.move: asyncio.Task[None] | None = None  # to another decode worker, while the attempt goes on
        self._num_attempts = 0
        self._time_limit: asyncio.TimerHandle | None = None
        self._stopped_by: RequestError | None = None
        self._is_over = False

    async def tokens(self) -> AsyncGenerator[wire.TokenOutput, None]:
        """Every token once, in order, all that are ready in one output. Closing the generator aborts the sequence.

        Raises: Overloaded, InvalidRequest, RequestError (503, 504), WorkerLost, EngineFailed.
        """
        outcome = "client"  # if the caller leaves
        self._time_limit = asyncio.get_running_loop().call_later(
            self._settings.serve.request_timeout_s, self._on_time_limit
        )
        self._running.add(self)
        try:
            while self.order.finish_reason is None and not self._is_over:
                try:
                    attempt = self.attempt or await self._begin()  # one that it moved to has begun
                    while (output := await attempt.prefilled()) is not None:
                        self.observer.delivered(output)
                        yield output
                    while (output := await attempt.decoded()) is not None:
                        self.observer.delivered(output)
                        yield output
                except AttemptFailed as failure:
                    await self._retry(failure)
            outcome = self.order.finish_reason or outcome
        except KvrelayError as error:
            outcome = outcome_of(error)
            self.observer.failed(error)
            raise
        finally:
            self._release(outcome)

    async def _begin(self) -> SequenceAttempt:
        """An attempt whose prompt is being computed."""
        attempt = await self._place()
        ticket = await self._reserve(attempt)
        attempt.submit(self._with_time_left(attempt.request, attempt.decision), ticket)
        return attempt

    def finish(self, reason: str) -> None:
        """The caller wants no more tokens: it has found a stop string, say. Releases everything at once."""
        self._release(reason)

    def end_choice(self, choice: int) -> None:
        """The caller wants no more tokens of this choice of a group."""
        if choice not in self.order.ended:
            self.order.drop(choice)
            if self.attempt is not None:
                self.attempt.drop_choice(choice)

    def _release(self, outcome: str) -> None:
        """The one end of every sequence: every worker lets go of it. Idempotent; the first call's outcome counts."""
        if self._is_over:
            return
        self._is_over = True
        self._running.discard(self)
        if self._time_limit is not None:
            self._time_limit.cancel()
        if outcome in ("stop", "length"):
            self._learn()
        self._end_attempt(outcome)
        self.observer.ended(outcome)

    def _learn(self) -> None:
        """Report the observed times to the router's forecast, and whether the promise was met."""
        observer = self.observer
        is_one_pair = self._num_attempts == 1  # a sequence that changed workers says nothing about any one of them
        if self.attempt is not None and is_one_pair and observer.num_tokens:
            self._placer.finished(self.attempt.id, observer.num_tokens, observer.tpot_s, observer.now_s())
        verdict = self._slo.verdict if self._slo is not None else None
        if verdict is not None and (target := verdict.target) is not None:
            is_kept = observer.ttft_s <= (target.ttft_s or math.inf) and observer.tpot_s <= (target.tpot_s or math.inf)
            observer.promise_kept(target.name, is_kept=is_kept)

    # ---- place

    async def _place(self) -> SequenceAttempt:
        """Choose workers and count the sequence as theirs; may wait. Raises the error that ends it."""
        if self._stopped_by is not None:
            raise self._stopped_by
        self._num_attempts += 1
        request = self._request if self._num_attempts == 1 else self._continuation()
        observer = self.observer
        observer.placing(self._num_attempts)
        query, place, is_first = self._query(request), self._placer.place, self._num_attempts == 1
        while isinstance(decision := place(query) if is_first else self._retries.choose(query, place), Deferred):
            deferred_s = observer.deferred(decision.predicted_ttft_s)
            await self._turn(request.request_id, decision.longest_s)
            observer.resumed(deferred_s)
        observer.placed(decision, str(self._retries.last_failure or ""))
        if self._slo is not None and decision.verdict is not None:
            self._slo.verdict = decision.verdict
            observer.judged(decision.verdict)
        if isinstance(decision, RoutingRefusal):
            raise self._retries.error_of(decision, is_awaited=self._links.are_awaited)
        if self._slo is not None and self._slo.priority is not None:  # of the class under which it was admitted
            request = msgspec.structs.replace(request, priority=self._slo.priority)
        submission = self._links.open(request.request_id)
        self.attempt = SequenceAttempt(request, decision, submission, self.order, self._placer, observer)
        return self.attempt

    async def _turn(self, request_id: str, longest_s: float) -> None:
        """Wait until a deferred request may be placed, or is to be refused. Raises RequestError (504)."""
        assert self._time_limit is not None
        try:
            async with asyncio.timeout_at(self._time_limit.when()):
                await self._placer.turn(request_id, longest_s)
        except TimeoutError as error:
            raise self._time_limit_error() from error

    def _query(self, request: wire.SequenceRequest) -> RouteRequest:
        remaining = request.sampling.max_tokens - request.num_output_tokens
        if request.group is not None and any(request.group.emitted):
            remaining = max(remaining, 2)  # more than a prompt is to be continued: by a decode worker
        is_first, slo = self._num_attempts == 1, self._slo
        return RouteRequest(
            request_id=request.request_id,
            block_hashes=tuple(request.block_hashes),
            num_tokens=len(request.token_ids),
            max_tokens=remaining,
            needs_decode=remaining > 1,
            force=self._force,
            width=max(1, request.num_sequences),
            companions=max(0, slo.num_sequences - self._request.num_sequences) if slo is not None else 0,
            slo=slo.requirement if slo is not None and is_first else None,  # after that it is admitted
            session=request.hints.session,
            tenant=request.tenant,
            weight=request.weight,
            priority=request.priority,
            is_new=is_first,
            may_wait=is_first and self._force is None and request.deadline_s is None,
        )

    # ---- reserve

    async def _reserve(self, attempt: SequenceAttempt) -> bytes | None:
        """The decode worker's ticket for the KV transfer; None where there is no transfer."""
        decision = attempt.decision
        if decision.prefill is None or decision.decode is None:
            return None
        return await attempt.reserve(
            wire.Reserve(
                request=self._with_time_left(attempt.request, decision),
                timeout_s=self._reserve_timeout_s,
                prefill_tokens_per_s=self._placer.prefill_tokens_per_s(decision.prefill),
            )
        )

    def _with_time_left(self, request: wire.SequenceRequest, decision: Decision) -> wire.SequenceRequest:
        """With what is left of its deadline and of its TTFT target. Raises DeadlinePassed when nothing is."""
        passed_s = self.observer.now_s() - self.observer.started_s
        target_s = None if request.num_output_tokens else decision.ttft_target_s
        left_s = None if target_s is None else target_s - passed_s
        request = msgspec.structs.replace(request, ttft_target_s=left_s, tpot_target_s=decision.tpot_target_s)
        if request.deadline_s is None:
            return request
        left_s = request.deadline_s - passed_s
        if left_s <= 0:
            raise self._deadline_error(RETRY_AFTER_DEADLINE_S)
        return msgspec.structs.replace(request, deadline_s=left_s)

    # ---- after a failure

    async def _retry(self, failure: AttemptFailed) -> None:
        """Return when another attempt is to be made. Raises the error that ends the sequence."""
        request_id, worker_id, code, why = self._request.request_id, failure.worker_id, failure.code, failure.why
        logger.info("request %s: worker %s: %s: %s", request_id, worker_id, code, why)
        self.observer.attempt_failed(worker_id, code, why)
        self._end_attempt(f"retry: {code}")
        if code == "deadline":
            raise self._deadline_error(failure.retry_after_s)
        num_tokens = sum(map(len, self.order.emitted))
        self.observer.retried(is_fault=self._retries.failed(failure, num_tokens))
        if self._retries.pause_s:
            await asyncio.sleep(self._retries.pause_s)
            self._retries.pause_s = 0.0

    # ---- moves

    def moving_request(self) -> wire.SequenceRequest:
        """What another decode worker is to go on with. It has been admitted: it has no deadline and no TTFT target."""
        self._num_attempts += 1
        return msgspec.structs.replace(self._continuation(), deadline_s=None, ttft_target_s=None)

    def switch(self, attempt: SequenceAttempt) -> None:
        """Go on with an attempt whose decode worker has the KV; the worker that had it ends its own."""
        assert self.attempt is not None
        before, self.attempt, self.move = self.attempt, attempt, None
        before.close("moved")
        before.wake()
        for choice in self.order.ended:
            attempt.drop_choice(choice)

    def _end_attempt(self, reason: str) -> None:
        if self.move is not None:
            self.move.cancel()
            self.move = None
        if self.attempt is not None:
            self.attempt.close(reason)
            self.attempt = None

    def _continuation(self) -> wire.SequenceRequest:
        """The sequence as it now stands, prompt and emitted tokens, under an id of its own; a group from its prompt on,
        with each choice's output so far. A beam search starts again.
        """
        self.order.forget_early()
        original, group, emitted = self._request, self._request.group, self.order.emitted
        changes: dict[str, Any] = {"request_id": f"{original.request_id}~{self._num_attempts}"}
        if group is None:
            token_ids, tokens_per_hash = original.token_ids + emitted[0], self._settings.tokens_per_hash
            changes |= {
                "token_ids": token_ids,
                "block_hashes": list(block_hashes(token_ids, tokens_per_hash, original.salt)),
                "tokens_per_hash": tokens_per_hash,
                "deadline_s": None if emitted[0] else original.deadline_s,
                "num_prefill_returns": self._retries.num_prefill_returns,
            }
        elif group.beams is None:
            changes["group"] = msgspec.structs.replace(group, emitted=emitted, ended=self.order.ended)
        if any(emitted) and (group is None or group.beams is None):
            changes["sampling"] = msgspec.structs.replace(original.sampling, prompt_logprobs=None)
        return msgspec.structs.replace(original, **changes)

    # ---- time

    def stop(self, error: RequestError) -> None:
        """End the sequence with this error."""
        self._stopped_by = error
        if self.attempt is not None:
            self.attempt.interrupt(error)

    def _on_time_limit(self) -> None:
        self.stop(self._time_limit_error())

    def _time_limit_error(self) -> RequestError:
        limit_s = self._settings.serve.request_timeout_s
        return RequestError(f"the request took longer than {limit_s:g} s", None, 504, "timeout")

    def _deadline_error(self, retry_after_s: float) -> DeadlinePassed:
        limit_s = self._request.deadline_s or 0.0
        return DeadlinePassed(f"deadline_s: not started within {limit_s:g} s, every worker was busy", retry_after_s)


class Dispatcher:
    """The parts of one ingress below HTTP, put together: 15 attributes. Lives on one event loop."""

    def __init__(
        self,
        router: Router,
        secret: bytes,
        settings: Settings,
        clock: Callable[[], float] = time.monotonic,
        *,
        retry_budget: int = RETRY_BUDGET,
        reserve_timeout_s: float = RESERVE_TIMEOUT_S,
    ) -> None:
        """For `retry_budget` and `reserve_timeout_s` see retries.py."""
        self.router, self.settings, self.clock = router, settings, clock
        self.retry_budget, self.reserve_timeout_s = retry_budget, reserve_timeout_s
        self.tokens_per_hash = settings.tokens_per_hash
        self.stats, self.requests = ServeStats.with_targets(settings), RequestLog()
        self.links = Links()
        self.running: set[RequestDriver] = set()
        self.is_stopping = False  # see stopping.py
        self.queries = Queries(self.links, max_open=settings.router.max_inflight)
        self.placer = Placer(router, self.links, clock)
        self.migrations = Migrations(self.placer, self.links, self.running, self.stats.moves, clock)
        leaving = self.migrations.on_draining
        self.workers = Membership(settings, secret, router, self.links, self.placer, self.queries, clock, leaving)

    async def start(self) -> None:
        """Connect to the members, now and as they come."""
        await self.workers.start()

    async def aclose(self) -> None:
        """Drop every connection; sequences that still run fail with WorkerLost."""
        await self.migrations.aclose()
        await self.workers.aclose()

    def open(
        self,
        request: SequenceRequest,
        *,
        force: Force = None,
        explain: Explain | None = None,
        arrival: Arrival | None = None,
        slo: SloRecord | None = None,
    ) -> RequestDriver:
        """Admit one sequence, or a group; iterate over its `tokens`. Raises Overloaded when too many run."""
        limit = self.settings.router.max_inflight
        if self.stats.running + request.num_sequences > limit:
            self.stats.outcomes["overloaded"] += 1
            error = Overloaded(f"{limit} sequences are in flight already", RETRY_AFTER_FULL_S)
            record = self.requests.begin(request, self.clock(), arrival)
            self.requests.failed(record, error)
            self.requests.end(record, "overloaded", self.clock())
            raise error
        observer = RequestObserver(self.stats, self.requests, request, self.clock, explain=explain, arrival=arrival)
        return RequestDriver(request, self, observer, force, slo)

    async def generate(
        self, request: SequenceRequest, *, force: Force = None, explain: Explain | None = None
    ) -> AsyncGenerator[TokenOutput, None]:
        """One sequence's tokens, as RequestDriver.tokens."""
        async with contextlib.aclosing(self.open(request, force=force, explain=explain).tokens()) as outputs:
            async for output in outputs:
                yield output

    async def prefetch(
        self, request: SequenceRequest, hold_s: float, *, force: Force = None, timeout_s: float = 10.0
    ) -> tuple[str, Prefetched]:
        """Have the worker that would now compute this prompt load its blocks from lower tiers; (worker, its answer).

        Raises Overloaded, InvalidRequest, RequestError (503), WorkerLost.
        """
        self.queries.check_room()
        max_tokens = request.sampling.max_tokens
        size, hashes, session = len(request.token_ids), tuple(request.block_hashes), request.hints.session
        query = RouteRequest(request.request_id, hashes, size, max_tokens, max_tokens > 1, force=force, session=session)
        choice = self.placer.place(query)
        self.router.on_end(request.request_id)  # nothing is computed: it counts as no worker's load
        if isinstance(choice, RoutingRefusal):
            raise error_of_refusal(choice)
        assert isinstance(choice, Decision), "a prefetch is never deferred"
        worker_id = choice.prefill or choice.decode
        assert worker_id is not None
        return worker_id, await self.queries.prefetch(worker_id, request, hold_s, timeout_s=timeout_s)
