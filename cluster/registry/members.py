"""The cluster's members: workers and KV-store nodes, as long as their heartbeats arrive.

Pure; actor.py is the Ray actor.

Times are seconds of the registry's own clock, passed in.
"""

from collections.abc import Iterable, Mapping
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


@dataclass(frozen=True, slots=True)
class Order:
    """What a worker is to do: retire (""), or take this role; what that does not take ends within `drain_s`."""

    drain_s: float
    role: str = ""


class Orders:
    """The planner's orders to workers, at most one for each. An order that is not repeated expires."""

    def __init__(self) -> None:
        self._orders: dict[str, tuple[Order, float]] = {}  # by worker, with the time when it was given last

    def give(self, orders: Mapping[str, Order], now_s: float) -> None:
        self._orders = {name: one for name, one in self._orders.items() if now_s - one[1] < TIMEOUT_S}
        self._orders.update((name, (order, now_s)) for name, order in orders.items())

    def of(self, worker_id: str, now_s: float) -> Order | None:
        order, given_s = self._orders.get(worker_id, (None, now_s))
        return order if now_s - given_s < TIMEOUT_S else None


def merged(known: tuple[WorkerRecord, ...], roster: Roster) -> tuple[WorkerRecord, ...]:
    """The members that an ingress should use: the roster, and after a restart of the registry those known before as
    well.
    """
    if roster.is_settled:
        return roster.members
    listed = {record.worker_id for record in roster.members}
    return roster.members + tuple(record for record in known if record.worker_id not in listed)
