"""All errors, in one tree below KvrelayError. They cross Ray and the wire, so each survives pickle."""


class KvrelayError(Exception):
    """Root of every error that kvrelay raises on purpose."""


class ConfigError(KvrelayError):
    """An invalid setting; the message names it and the remedy."""


class FaultOf(KvrelayError):
    """Names what is at fault (`subject`) and the reason (`why`); `text` puts them into a sentence."""

    text = "{}: {}"

    def __init__(self, subject: str, why: str) -> None:
        super().__init__(subject, why)
        self.subject, self.why = subject, why

    def __str__(self) -> str:
        return self.text.format(self.subject, self.why)


class BackendUnavailable(FaultOf):
    """An explicitly chosen kernel backend or transport cannot run here."""

    text = "{} is not available here: {}"


class LayoutMismatch(FaultOf):
    """No block can travel between two pools; names the field in which their layouts differ."""


class StoreError(FaultOf):
    """A disk, Redis or object store for KV cannot be used; names the store, the reason and the remedy."""

    text = "KV store {}: {}"


class ModelError(FaultOf):
    """A checkpoint that cannot be used."""


class ModelNotFound(ModelError):
    """No such folder, file or hub id (or the hub cannot be reached)."""


class CheckpointCorrupt(ModelError):
    """A file is missing, truncated, or of the wrong shape."""


class UnsupportedModel(ModelError):
    """A valid checkpoint of an architecture that kvrelay does not implement."""


class RequestError(KvrelayError):
    """A fault of the client. `status` is the HTTP status, `param` the field at fault."""

    def __init__(self, message: str, param: str | None = None, status: int = 400, code: str | None = None) -> None:
        super().__init__(message, param, status, code)
        self.message, self.param, self.status, self.code = message, param, status, code

    def __str__(self) -> str:
        return self.message


class InvalidRequest(RequestError):
    """A request that can never succeed as sent."""


class TryLater(RequestError):
    """A 429 (or `own_status`): try again after `retry_after_s` seconds."""

    own_param: str | None = None
    own_code, own_status = "overloaded", 429

    def __init__(self, message: str, retry_after_s: float) -> None:
        super(RequestError, self).__init__(message, retry_after_s)
        self.message, self.param, self.status, self.code = message, self.own_param, self.own_status, self.own_code
        self.retry_after_s = retry_after_s


class Overloaded(TryLater):
    """The cluster is full."""


class DeadlinePassed(TryLater):
    """The request's own deadline for its first token passed before any of it was computed."""

    own_param, own_code = "deadline_s", "deadline_passed"


class WorkerError(FaultOf):
    """A fault of a worker; the request may be retried on another."""

    text = "worker {}: {}"


class WorkerLost(WorkerError):
    """The worker's connection ended while it held a request."""


class EngineFailed(WorkerError):
    """The worker's engine raised; its log has the traceback."""


class PlaneError(KvrelayError):
    """A fault of the request plane."""


class AuthenticationFailed(PlaneError):
    """The peer does not know the cluster's secret."""


class ProtocolError(PlaneError):
    """A frame that is too large, malformed, or of another protocol version."""


class TlsMismatch(ProtocolError):
    """One end has cluster.tls on, the other off."""


class ConnectionLost(PlaneError):
    """The peer closed the connection, or the network did."""


class TransferError(FaultOf):
    """A fault of the KV plane. The transfer ends; the request is retried or its prompt recomputed."""

    text = "transfer of {}: {}"


class TransferRefused(TransferError):
    """The target refused: unknown, stale, foreign, used, expired or incompatible ticket."""


class TransferTimeout(TransferError):
    """Our own deadline passed; the blocks stay in quarantine until the transport releases them."""


class LeaseExpired(TransferError):
    """The lease ended before the transfer did."""


class ChecksumMismatch(TransferError):
    """A block did not arrive as it left."""


class PeerLost(TransferError):
    """The other side of the transfer died or closed."""


class TransportError(KvrelayError):
    """A path could not be opened, or a read failed. The layer above makes a typed TransferError of it."""


class CorruptRead(TransportError):
    """The bytes are in place, but they are not those that the source had. `region`: the first wrong one's index."""

    def __init__(self, num_regions: int, region: int) -> None:
        super().__init__(num_regions, region)
        self.num_regions, self.region = num_regions, region

    def __str__(self) -> str:
        return f"{self.num_regions} regions did not arrive as they left"
