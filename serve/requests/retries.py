"""After an attempt that came to nothing: whether there is another, and what it asks of the router.

The rules of one sequence, for the ingress and for the simulator. Knows no clock, HTTP or socket.
"""

from collections.abc import Callable
from dataclasses import dataclass, replace

from kvrelay.errors import InvalidRequest, KvrelayError, Overloaded
from kvrelay.plane import messages as wire
from kvrelay.router.types import Decision, Deferred, Refusal, RouteRequest
from kvrelay.serve.requests.attempt import AttemptFailed
from kvrelay.serve.requests.refusals import error_of_failure, error_of_refusal

MAX_REFUSALS = 4
LONGEST_PAUSE_S = 2.0  # between attempts of a stream for which there was no room


@dataclass(slots=True)
class Retries:
    """What has gone wrong so far. budget: times a sequence is tried again after a worker's fault."""

    budget: int
    num_faults: int = 0
    num_refusals: int = 0
    num_transfer_faults: int = 0
    num_prefill_returns: int = 0
    pause_s: float = 0.0  # before the next attempt
    excluded: frozenset[str] = frozenset()
    last_failure: AttemptFailed | None = None

    def choose(
        self, query: RouteRequest, route: Callable[[RouteRequest], Decision | Refusal | Deferred]
    ) -> Decision | Refusal | Deferred:
        """The router's answer, asked as what has gone wrong demands."""
        force = query.force or ("local" if self.num_transfer_faults > 1 else None)
        if force != query.force or self.excluded != query.excluded:
            query = replace(query, excluded=self.excluded, force=force)
        if self.last_failure is not None and self.last_failure.code == wire.PREEMPTED and query.force is None:
            choice = route(replace(query, force="remote"))
            if not isinstance(choice, Refusal):
                return choice
        choice = route(query)
        if isinstance(choice, Refusal) and self.excluded and not self.num_refusals:
            return route(replace(query, excluded=frozenset()))  # better a worker that failed once than none
        return choice

    def error_of(self, refusal: Refusal) -> KvrelayError | AttemptFailed:
        """What the client is told when the router has no worker for it; AttemptFailed: nothing yet, for its stream has begun."""
        if refusal.reason == "full" and self.num_prefill_returns:
            return AttemptFailed("", "full", refusal.message, retry_after_s=refusal.retry_after_s)
        if refusal.reason not in ("incompatible", "too_long", "full", "slo"):
            if self.num_refusals:
                return Overloaded("the cluster is full", refusal.retry_after_s)
            if self.last_failure is not None:
                return error_of_failure(self.last_failure)
        return error_of_refusal(refusal)

    def failed(self, failure: AttemptFailed) -> bool:
        """Another attempt is to be made; true: after a worker's fault. Raises the error that ends the sequence."""
        self.last_failure = failure
        if failure.code == wire.PREEMPTED:  # no fault: that worker may well be the next one, too
            self.num_prefill_returns += 1
            return False
        if failure.code == "full" and self.num_prefill_returns:  # the stream has begun: its turn comes again
            self.pause_s = min(failure.retry_after_s, LONGEST_PAUSE_S)
            return False
        self.excluded |= {failure.worker_id}
        if failure.code == "too_long":
            raise InvalidRequest(failure.why or "too long for the cluster", None, 400, "context_length_exceeded")
        if failure.code in ("full", "draining", "duplicate"):
            self.num_refusals += 1
            if self.num_refusals > (1 if failure.code == "full" else MAX_REFUSALS):
                raise Overloaded("the cluster is full", failure.retry_after_s)
            return False
        self.num_faults += 1
        self.num_transfer_faults += failure.code in ("transfer", "lease", "invalid")
        if not failure.retryable or self.num_faults > self.budget:
            raise error_of_failure(failure)
        return True
