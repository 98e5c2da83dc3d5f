"""All errors, in one tree. They cross Ray and the wire, so each survives pickle.

KvrelayError
├── ConfigError            an invalid setting
├── ModelError             a checkpoint that cannot be loaded
│   ├── ModelNotFound
│   ├── CheckpointCorrupt
│   └── UnsupportedModel
├── RequestError           the client's fault; carries an HTTP status and the field
│   ├── InvalidRequest     400 / 404 / 413 / 422
│   ├── Overloaded         429, with Retry-After
│   └── DeadlinePassed     429, with Retry-After: it was still queued
├── WorkerError            a fault of a worker
│   ├── WorkerLost
│   └── EngineFailed
├── PlaneError             a fault of the request plane
│   ├── AuthenticationFailed
│   ├── ProtocolError
│   │   └── TlsMismatch
│   └── ConnectionLost
├── BackendUnavailable     an explicitly chosen kernel backend or transport is missing
├── LayoutMismatch         two pools between which no block can travel
├── TransportError         one path or read failed; transfers try the next path
│   └── CorruptRead
├── StoreError             a place for KV blocks (disk, remote) that cannot be used
└── TransferError          a fault of the KV plane
    ├── TransferRefused    stale, foreign, used, expired, incompatible: carries the reason
    ├── TransferTimeout
    ├── LeaseExpired
    ├── ChecksumMismatch
    └── PeerLost
"""


class KvrelayError(Exception):
    """Root of every error that kvrelay raises on purpose."""


class ConfigError(KvrelayError):
    """An invalid setting; the message names it and the remedy."""


class BackendUnavailable(KvrelayError):
    """An explicitly chosen kernel backend or transport cannot run here."""

    def __init__(self, name: str, why: str) -> None:
        super().__init__(name, why)
        self.name, self.why = name, why

    def __str__(self) -> str:
        return f"{self.name} is not available here: {self.why}"


class LayoutMismatch(KvrelayError):
    """No block can travel between two pools; names the field in which their layouts differ."""

    def __init__(self, field: str, why: str) -> None:
        super().__init__(field, why)
        self.field, self.why = field, why

    def __str__(self) -> str:
        return f"{self.field}: {self.why}"


class StoreError(KvrelayError):
    """A disk, Redis or object store for KV cannot be used; names the store, the reason and the remedy."""

    def __init__(self, store: str, why: str) -> None:
        super().__init__(store, why)
        self.store, self.why = store, why

    def __str__(self) -> str:
        return f"KV store {self.store}: {self.why}"


class ModelError(KvrelayError):
    """A checkpoint that cannot be used."""

    def __init__(self, source: str, why: str) -> None:
        super().__init__(source, why)
        self.source, self.why = source, why

    def __str__(self) -> str:
        return f"{self.source}: {self.why}"


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


class Overloaded(RequestError):
    """The cluster is full; try again after `retry_after_s` seconds."""

    def __init__(self, message: str, retry_after_s: float) -> None:
        super(RequestError, self).__init__(message, retry_after_s)
        self.message, self.param, self.status, self.code = message, None, 429, "overloaded"
        self.retry_after_s = retry_after_s


class DeadlinePassed(RequestError):
    """The request's own deadline for its first token passed before any of it was computed."""

    def __init__(self, message: str, retry_after_s: float) -> None:
        super(RequestError, self).__init__(message, retry_after_s)
        self.message, self.param, self.status, self.code = message, "deadline_s", 429, "deadline_passed"
        self.retry_after_s = retry_after_s


class WorkerError(KvrelayError):
    """A fault of a worker; the request may be retried on another."""

    def __init__(self, worker_id: str, why: str) -> None:
        super().__init__(worker_id, why)
        self.worker_id, self.why = worker_id, why

    def __str__(self) -> str:
        return f"worker {self.worker_id}: {self.why}"


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


class TransferError(KvrelayError):
    """A fault of the KV plane. The transfer ends; the request is retried or its prompt recomputed."""

    def __init__(self, request_id: str, why: str) -> None:
        super().__init__(request_id, why)
        self.request_id, self.why = request_id, why

    def __str__(self) -> str:
        return f"transfer of {self.request_id}: {self.why}"


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
