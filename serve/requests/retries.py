"""After a failed attempt: whether there is another, what it asks of the router, and which error the client gets
otherwise.

The rules of one sequence, for the ingress and for the simulator. Knows no clock, HTTP or socket.
"""

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

from kvrelay.errors import DeadlinePassed, EngineFailed, InvalidRequest, KvrelayError, Overloaded, TryLater, WorkerLost
from kvrelay.plane import messages as wire
from kvrelay.router.slo.admission import verdict_fields
from kvrelay.router.types import Decision, Deferred, RouteRequest, RoutingRefusal

RETRY_BUDGET = 2
"""Retries of a request after faults that workers report. Workers that die are the cluster's fault: twice as many, one
after the other, and the count begins again with each new token, so that none but a request that kills them is ended.
"""
RESERVE_TIMEOUT_S = 10.0
"""Longest wait for one decode worker's blocks; then another is tried, or the client gets 429."""
MAX_REFUSALS = 4
LONGEST_PAUSE_S = 2.0  # between attempts of a stream for which there was no room, or of a request without a worker
AWAITED = "awaited"  # AttemptFailed.code: a worker has left or died, and its successor is not connected yet
MAX_WAITS = 13  # for a successor: 19 s in all


class AttemptFailed(Exception):
    """One attempt failed; `Retries` decides whether another follows. Never reaches a client."""

    def __init__(
        self, worker_id: str, code: str, why: str, *, retryable: bool = True, retry_after_s: float = 1.0
    ) -> None:
        super().__init__(worker_id, code, why)
        self.worker_id, self.code, self.why = worker_id, code, why
        self.retryable, self.retry_after_s = retryable, retry_after_s

    def __str__(self) -> str:
        return f"{self.worker_id}: {self.code}"


@dataclass(slots=True)
class Retries:
    """What has failed so far."""

    budget: int = RETRY_BUDGET
    num_faults: int = 0
    num_lost: int = 0  # workers that died since the last new token
    num_tokens: int = 0  # of the output, when the last one died
    num_refusals: int = 0
    num_transfer_faults: int = 0
    num_prefill_returns: int = 0
    num_waits: int = 0
    pause_s: float = 0.0  # before the next attempt
    excluded: frozenset[str] = frozenset()
    last_failure: AttemptFailed | None = None

    def choose(
        self, query: RouteRequest, place: Callable[[RouteRequest], Decision | RoutingRefusal | Deferred]
    ) -> Decision | RoutingRefusal | Deferred:
        """The router's answer to a query that takes the failures into account."""
        force = query.force or ("local" if self.num_transfer_faults > 1 else None)
        query = replace(query, excluded=self.excluded, force=force)
        if self.last_failure is not None and self.last_failure.code == wire.PREEMPTED and query.force is None:
            choice = place(replace(query, force="remote"))
            if not isinstance(choice, RoutingRefusal):
                return choice
        choice = place(query)
        if isinstance(choice, RoutingRefusal) and self.excluded and not self.num_refusals:
            return place(replace(query, excluded=frozenset()))  # better a worker that failed once than none
        return choice

    def error_of(self, refusal: RoutingRefusal, *, is_awaited: bool) -> KvrelayError | AttemptFailed:
        """The client's error when the router refuses; AttemptFailed where a stream that has begun waits on, or a
        request for the successor of a worker that leaves or died. is_awaited: there is such a worker.
        """
        lacks_worker = refusal.reason in ("no_prefill_worker", "no_decode_worker")
        is_sent_away = self.last_failure is not None and self.last_failure.code in ("draining", wire.DRAINED)
        if self.num_waits < MAX_WAITS and (
            (lacks_worker and (is_awaited or is_sent_away)) or (refusal.reason == "full" and is_sent_away)
        ):
            return AttemptFailed("", AWAITED, refusal.message)
        if refusal.reason == "full" and self.num_prefill_returns:
            return AttemptFailed("", "full", refusal.message, retry_after_s=refusal.retry_after_s)
        if refusal.reason not in ("incompatible", "too_long", "full", "slo"):
            if self.num_refusals:
                return Overloaded("the cluster is full", refusal.retry_after_s)
            if self.last_failure is not None:
                return error_of_failure(self.last_failure)
        return error_of_refusal(refusal)

    def failed(self, failure: AttemptFailed, num_tokens: int = 0) -> bool:
        """Count a failure. num_tokens: of the output so far.

        Returns when another attempt follows: True after a worker's fault. Raises the error that ends the sequence.
        """
        if failure.code == AWAITED:
            self.pause_s, self.num_waits = min(0.1 * 2**self.num_waits, LONGEST_PAUSE_S), self.num_waits + 1
            return False
        self.last_failure = failure
        if failure.code in (wire.PREEMPTED, wire.DRAINED):  # no fault: that worker may be chosen again
            self.num_prefill_returns += failure.code == wire.PREEMPTED
            return False
        if failure.code == "full" and self.num_prefill_returns:  # the stream has begun: it waits for room
            self.pause_s = min(failure.retry_after_s, LONGEST_PAUSE_S)
            return False
        self.excluded |= {failure.worker_id}
        if failure.code == "too_long":
            raise InvalidRequest(failure.why or "too long for the cluster", None, 400, "context_length_exceeded")
        if failure.code == "grammar":
            raise InvalidRequest(failure.why, None, 400, "invalid_grammar")
        if failure.code in ("full", "draining", "duplicate"):
            self.num_refusals += 1
            if self.num_refusals > (1 if failure.code == "full" else MAX_REFUSALS):
                raise Overloaded("the cluster is full", failure.retry_after_s)
            return False
        if failure.code == "lost":
            if num_tokens > self.num_tokens:  # it went on since: what failed before then says nothing of today
                self.num_lost = self.num_refusals = self.num_waits = 0
                self.excluded = frozenset({failure.worker_id})
            self.num_lost, self.num_tokens = self.num_lost + 1, num_tokens
        else:
            self.num_faults += 1
        self.num_transfer_faults += failure.code in ("transfer", "lease", "invalid")
        if not failure.retryable or self.num_faults > self.budget or self.num_lost > 2 * self.budget:
            raise error_of_failure(failure)
        return True


# ---- the client's errors


class Unavailable(TryLater):
    """No worker can serve now; one may soon."""

    own_status = 503

    def __init__(self, message: str, retry_after_s: float, code: str = "no_workers") -> None:
        super().__init__(message, retry_after_s)
        self.code = code


class SloUnreachable(TryLater):
    """The requested SLO would be missed; nothing was computed."""

    own_param, own_code = "slo", "slo_unreachable"

    def __init__(self, message: str, retry_after_s: float, slo: dict[str, Any] | None = None) -> None:
        super().__init__(message, retry_after_s)
        self.slo = slo


def error_of_refusal(refusal: RoutingRefusal) -> KvrelayError:
    """The client's error when the router refuses the first attempt."""
    if refusal.reason == "slo":
        assert refusal.verdict is not None
        return SloUnreachable(refusal.message, refusal.retry_after_s, verdict_fields(refusal.verdict))
    if refusal.reason == "incompatible":
        message = f"no two workers can exchange KV: {refusal.message}"
        return Unavailable(message, refusal.retry_after_s, "kv_incompatible")
    if refusal.reason == "too_long":
        return InvalidRequest(refusal.message, None, 400, "context_length_exceeded")
    if refusal.reason == "full":
        return Overloaded(refusal.message, refusal.retry_after_s)
    return Unavailable(refusal.message, refusal.retry_after_s)


def error_of_failure(failure: AttemptFailed) -> KvrelayError:
    """The client's error after the last attempt failed."""
    kind = WorkerLost if failure.code == "lost" else EngineFailed
    return kind(failure.worker_id, failure.why)


def outcome_of(error: KvrelayError) -> str:
    """The outcome under which a request that ended with this error is counted."""
    if isinstance(error, SloUnreachable):
        return "slo"
    if isinstance(error, DeadlinePassed):
        return "deadline"
    return "overloaded" if isinstance(error, Overloaded) else "error"
