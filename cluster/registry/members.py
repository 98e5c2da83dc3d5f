"""The cluster's members: workers and KV-store nodes, as long as their heartbeats arrive.

Pure; actor.py is the Ray actor.

Times are seconds of the registry's own clock, passed in.
"""

from collections.abc import Iterable
from dataclasses import dataclass

HEARTBEAT_S = 5.0
TIMEOUT_S = 20.0
STORE_ROLE = "store"  # a node of the KV store; every other member is a worker


@dataclass(frozen=True, slots=True)
class WorkerRecord:
    """Where a worker listens for ingresses, or a KV-store node for workers. `epoch` is new at every start; `role` is
    what a worker was started as: its role now is in its WorkerInfo. `port` 0: the worker is warming, its model is not
    loaded yet. A record of another shape would need another protocol (versions.py).
    """

    worker_id: str
    role: str
    epoch: str
    host: str
    port: int
    node_id: str
    pid: int
    capacity_bytes: int = 0  # of a node of the KV store


@dataclass(frozen=True, slots=True)
class Roster:
    """The members as of `version`. Until `is_settled`, a missing worker may not have sent its first heartbeat yet."""

    version: str
    members: tuple[WorkerRecord, ...]
    is_settled: bool


class Registry:
    """Membership by heartbeat. `incarnation` distinguishes restarts of the registry."""

    def __init__(self, incarnation: str, now_s: float, *, timeout_s: float = TIMEOUT_S) -> None:
        self._incarnation, self._started_s, self._timeout_s = incarnation, now_s, timeout_s
        self._changes = 0
        self._records: dict[str, WorkerRecord] = {}
        self._seen_s: dict[str, float] = {}

    def heartbeat(self, record: WorkerRecord, now_s: float) -> bool:
        """Record that the worker is alive; it joins if it was no member. Returns whether the roster changed."""
        self._seen_s[record.worker_id] = now_s
        if self._records.get(record.worker_id) == record:
            return False
        self._records[record.worker_id] = record
        self._changes += 1
        return True

    def leave(self, worker_id: str, epoch: str) -> bool:
        """Remove the worker, unless it has restarted since. Returns whether the roster changed."""
        record = self._records.get(worker_id)
        if record is None or record.epoch != epoch:
            return False
        self._forget((worker_id,))
        return True

    def expire(self, now_s: float) -> tuple[str, ...]:
        """Remove and return the workers without a heartbeat for longer than the timeout."""
        silent = tuple(name for name, seen_s in self._seen_s.items() if now_s - seen_s > self._timeout_s)
        self._forget(silent)
        return silent

    def roster(self, now_s: float) -> Roster:
        """The members now, by id."""
        members = tuple(self._records[name] for name in sorted(self._records))
        return Roster(self.version, members, now_s - self._started_s >= self._timeout_s)

    @property
    def version(self) -> str:
        """Changes whenever the roster does, and with every restart of the registry."""
        return f"{self._incarnation}.{self._changes}"

    def _forget(self, names: Iterable[str]) -> None:
        for name in names:
            del self._records[name], self._seen_s[name]
            self._changes += 1


class Retirements:
    """Workers that the planner asks to retire. A request that is not repeated expires."""

    def __init__(self) -> None:
        self._requests: dict[str, tuple[float, float]] = {}  # worker -> its drain_s, time of the last request

    def request(self, worker_ids: Iterable[str], drain_s: float, now_s: float) -> None:
        """`drain_s`: how long each may take to finish."""
        self._requests = {name: one for name, one in self._requests.items() if now_s - one[1] < TIMEOUT_S}
        self._requests.update((name, (drain_s, now_s)) for name in worker_ids)

    def drain_s(self, worker_id: str, now_s: float) -> float | None:
        """None: the worker is not to retire."""
        drain_s, requested_s = self._requests.get(worker_id, (0.0, -TIMEOUT_S))
        return drain_s if now_s - requested_s < TIMEOUT_S else None


def merged(known: tuple[WorkerRecord, ...], roster: Roster) -> tuple[WorkerRecord, ...]:
    """The members that an ingress should use: the roster, and after a restart of the registry those known before as
    well.
    """
    if roster.is_settled:
        return roster.members
    listed = {record.worker_id for record in roster.members}
    return roster.members + tuple(record for record in known if record.worker_id not in listed)
