"""What a client is told when no worker takes its request, and how that is counted. Imports no HTTP and no sockets."""

from kvrelay.errors import (
    DeadlinePassed,
    EngineFailed,
    InvalidRequest,
    KvrelayError,
    Overloaded,
    RequestError,
    WorkerLost,
)
from kvrelay.router.types import Refusal
from kvrelay.serve.requests.attempt import AttemptFailed
from kvrelay.serve.requests.slo import SloUnreachable, slo_refusal


class Unavailable(RequestError):
    """No worker can serve now; one may soon. HTTP 503."""

    def __init__(self, message: str, retry_after_s: float, code: str = "no_workers") -> None:
        super(RequestError, self).__init__(message, retry_after_s, code)
        self.message, self.param, self.status, self.code = message, None, 503, code
        self.retry_after_s = retry_after_s


def error_of_refusal(refusal: Refusal) -> KvrelayError:
    """What the client is told when the router has no worker for it."""
    if refusal.reason == "slo":
        return slo_refusal(refusal)
    if refusal.reason == "incompatible":
        return Unavailable(f"no KV can travel here: {refusal.message}", refusal.retry_after_s, "kv_incompatible")
    if refusal.reason == "too_long":
        return InvalidRequest(refusal.message, None, 400, "context_length_exceeded")
    if refusal.reason == "full":
        return Overloaded(refusal.message, refusal.retry_after_s)
    return Unavailable(refusal.message, refusal.retry_after_s)


def outcome_of(error: KvrelayError) -> str:
    """As requests are counted."""
    if isinstance(error, SloUnreachable):
        return "slo"
    if isinstance(error, DeadlinePassed):
        return "deadline"
    return "overloaded" if isinstance(error, Overloaded) else "error"


def error_of_failure(failure: AttemptFailed) -> KvrelayError:
    """The error that ends a sequence whose last attempt came to this."""
    kind = WorkerLost if failure.code == "lost" else EngineFailed
    return kind(failure.worker_id, failure.why)
