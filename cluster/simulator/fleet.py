"""Workers that come and go while a simulation runs: starts take their time, and who is given up retires.

Who retires is chosen by what would be lost (cluster/autoscaling/retirement.py), gets nothing new, finishes what it has, and goes; after
`drain_s` it goes all the same, and its sequences go on elsewhere.
"""

from typing import Protocol

from kvrelay.cluster.autoscaling.retirement import RetirementCandidate, victims
from kvrelay.cluster.simulator.ingress import SimulatedIngress
from kvrelay.cluster.simulator.resources.clock import Clock, Event
from kvrelay.cluster.simulator.scenario import Scenario
from kvrelay.cluster.simulator.worker import SimulatedWorker
from kvrelay.types import Role

LOOK_S = 1.0  # between two looks whether a retiring worker has finished


class Cluster(Protocol):
    """The simulation, as far as its workers' number changes."""

    scenario: Scenario
    clock: Clock
    ingresses: list[SimulatedIngress]

    def live_workers(self) -> list[SimulatedWorker]: ...
    def start_worker(
        self, worker_id: str, role: Role, node_id: str, *, paid_from_s: float | None = None
    ) -> SimulatedWorker: ...
    def node_of(self, number: int) -> str: ...


class SimulatedFleet:
    """`changes`: (time, role, how many are wanted from then on)."""

    def __init__(self, cluster: Cluster, *, drain_s: float) -> None:
        self._cluster, self._drain_s = cluster, drain_s
        self._starting: dict[Role, list[Event]] = {role: [] for role in Role}
        self._numbers = {Role.PREFILL: cluster.scenario.prefill, Role.DECODE: cluster.scenario.decode}
        self._num_machines = cluster.scenario.prefill + cluster.scenario.decode
        self.changes: list[tuple[float, str, int]] = []

    def start(self) -> None:
        """What the scenario says of its own accord."""
        for step in self._cluster.scenario.scale:
            for role, wanted in ((Role.PREFILL, step.prefill), (Role.DECODE, step.decode)):
                if wanted is not None:
                    self._cluster.clock.at(step.at_s, self.scale, role, wanted)

    @property
    def is_changing(self) -> bool:
        """Whether some start or retire."""
        return any(self._starting.values()) or any(worker.is_draining for worker in self._cluster.live_workers())

    def serving(self, role: Role) -> list[SimulatedWorker]:
        """Those that take requests."""
        return [one for one in self._cluster.live_workers() if one.role is role and not one.is_draining]

    def scale(self, role: Role, wanted: int) -> None:
        """From now on there are to be so many that take requests, or will."""
        serving, starting = self.serving(role), self._starting[role]
        have = len(serving) + len(starting)
        if wanted != have:
            self.changes.append((self._cluster.clock.now_s, str(role), wanted))
        for _ in range(wanted - have):
            self._begin(role)
        while starting and have > wanted:
            starting.pop().cancel()
            have -= 1
        gone = victims(map(candidate, serving), have - wanted)
        for worker in serving:
            if worker.worker_id in gone:
                self._retire(worker)

    def _begin(self, role: Role) -> None:
        clock, number = self._cluster.clock, self._numbers[role]
        node_id = self._cluster.node_of(self._num_machines)
        self._numbers[role] += 1
        self._num_machines += 1
        name = f"{role[0]}{number}"
        self._starting[role].append(clock.after(self._cluster.scenario.start_s, self._started, name, role, node_id))

    def _started(self, name: str, role: Role, node_id: str) -> None:
        del self._starting[role][0]  # all take as long: it is whoever was begun first
        paid_from_s = self._cluster.clock.now_s - self._cluster.scenario.start_s
        self._cluster.start_worker(name, role, node_id, paid_from_s=paid_from_s)

    def _retire(self, worker: SimulatedWorker) -> None:
        worker.is_draining = True
        for ingress in self._cluster.ingresses:
            ingress.retire(worker)
        self._look(worker, self._cluster.clock.now_s + self._drain_s)

    def _look(self, worker: SimulatedWorker, until_s: float) -> None:
        """It goes when it has finished, or when its time is up."""
        if not worker.is_alive:
            return
        now_s = self._cluster.clock.now_s
        if worker.is_idle or now_s >= until_s:
            worker.stop()
            for ingress in self._cluster.ingresses:
                ingress.stop_flows(worker)
                ingress.worker_gone(worker)
        else:
            self._cluster.clock.after(LOOK_S, self._look, worker, until_s)


def candidate(worker: SimulatedWorker) -> RetirementCandidate:
    """What would be lost with it."""
    scheduler, pool = worker.engine.scheduler, worker.engine.pool
    counts = pool.counts()
    return RetirementCandidate(
        worker.worker_id,
        sequences=float(len(scheduler.sequences)),
        context_tokens=float(counts.used * pool.block_size),
        cached_tokens=float(counts.cached * pool.block_size),
        hit_share=scheduler.hit_tokens / scheduler.query_tokens if scheduler.query_tokens else 0.0,
    )
