"""What happens to a simulated cluster while it runs: faults, starts and retirements of workers, the planner.

A crashed worker's connections end, and ingresses know after `detect_s`. A frozen worker keeps its connections and sends
nothing; ingresses drop it after `freeze_limit_s`. A worker that returns after a crash has an empty cache and a new
epoch. Workers that retire are chosen by what would be lost (cluster/autoscaling/retirement.py). They get nothing new
and stop when they have finished, after `drain_s` in any case; what they had then is retried on other workers.
"""

from dataclasses import replace
from typing import Protocol

from kvrelay.cluster.autoscaling import worker_model
from kvrelay.cluster.autoscaling.feed import Feed, Observation, ingress_report, worker_report
from kvrelay.cluster.autoscaling.retirement import RetirementCandidate, victims
from kvrelay.cluster.autoscaling.worker_model import model_of, planner_settings, rules_of, target_of
from kvrelay.cluster.profiles.profile import SimulatorProfile
from kvrelay.cluster.simulator.clock import Clock, Event
from kvrelay.cluster.simulator.ingress import SimulatedIngress
from kvrelay.cluster.simulator.network import Network
from kvrelay.cluster.simulator.scenario import Fault, Scenario
from kvrelay.cluster.simulator.worker import SimulatedWorker
from kvrelay.config import Settings
from kvrelay.router.planning.planner import Planner, ScalingPlan
from kvrelay.router.planning.types import CountLimits, WorkerCounts
from kvrelay.types import Role

DRAIN_CHECK_S = 1.0  # between checks whether a retiring worker has finished


class SimulatedCluster(Protocol):
    """The simulation, as faults, the fleet and the autoscaler act on it; keeps them free of what makes them."""

    scenario: Scenario
    clock: Clock
    network: Network
    ingresses: list[SimulatedIngress]

    def live_workers(self) -> list[SimulatedWorker]: ...
    def start_worker(
        self, worker_id: str, role: Role, node_id: str, *, paid_from_s: float | None = None
    ) -> SimulatedWorker: ...
    def node_of(self, number: int) -> str: ...


class SimulatedFleet:
    """Starts and retires workers. changes: (time, role, number of workers from then on)."""

    def __init__(self, cluster: SimulatedCluster, *, drain_s: float) -> None:
        self._cluster, self._drain_s = cluster, drain_s
        self._starting: dict[Role, list[Event]] = {role: [] for role in Role}
        self._numbers = {Role.PREFILL: cluster.scenario.prefill, Role.DECODE: cluster.scenario.decode}
        self._num_machines = cluster.scenario.prefill + cluster.scenario.decode
        self.changes: list[tuple[float, str, int]] = []

    def start(self) -> None:
        for step in self._cluster.scenario.scale:
            for role, wanted in ((Role.PREFILL, step.prefill), (Role.DECODE, step.decode)):
                if wanted is not None:
                    self._cluster.clock.at(step.at_s, self.scale, role, wanted)

    @property
    def is_changing(self) -> bool:
        return any(self._starting.values()) or any(worker.is_draining for worker in self._cluster.live_workers())

    def serving(self, role: Role) -> list[SimulatedWorker]:
        return [one for one in self._cluster.live_workers() if one.role is role and not one.is_draining]

    def scale(self, role: Role, wanted: int) -> None:
        """Start or retire workers until `wanted` of a role take requests, or will when they have started."""
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
        del self._starting[role][0]  # all take as long: it is the first that was begun
        paid_from_s = self._cluster.clock.now_s - self._cluster.scenario.start_s
        self._cluster.start_worker(name, role, node_id, paid_from_s=paid_from_s)

    def _retire(self, worker: SimulatedWorker) -> None:
        worker.is_draining = True
        for ingress in self._cluster.ingresses:
            ingress.retire(worker)
        self._check_drained(worker, self._cluster.clock.now_s + self._drain_s)

    def _check_drained(self, worker: SimulatedWorker, until_s: float) -> None:
        """Stop it when it has finished, or when its time is up."""
        if not worker.is_alive:
            return
        now_s = self._cluster.clock.now_s
        if worker.is_idle or now_s >= until_s:
            worker.stop()
            for ingress in self._cluster.ingresses:
                ingress.stop_flows(worker)
                ingress.worker_gone(worker)
        else:
            self._cluster.clock.after(DRAIN_CHECK_S, self._check_drained, worker, until_s)


def candidate(worker: SimulatedWorker) -> RetirementCandidate:
    """A worker and what would be lost with it."""
    scheduler, pool = worker.engine.scheduler, worker.engine.pool
    counts = pool.counts()
    return RetirementCandidate(
        worker.worker_id,
        sequences=float(len(scheduler.sequences)),
        context_tokens=float(counts.used * pool.block_size),
        cached_tokens=float(counts.cached * pool.block_size),
        hit_share=scheduler.admission.hit_tokens / scheduler.admission.query_tokens
        if scheduler.admission.query_tokens
        else 0.0,
    )


class Autoscaler:
    """Plans every `INTERVAL_S` and scales the fleet."""

    def __init__(
        self, cluster: SimulatedCluster, fleet: SimulatedFleet, settings: Settings, profile: SimulatorProfile
    ) -> None:
        own = planner_settings(settings)
        self._cluster, self._fleet, self._model = cluster, fleet, model_of(profile)
        limits = CountLimits(
            own.min_prefill, own.max_prefill, own.min_decode, own.max_decode, own.max_workers or 1 << 20
        )
        counts = WorkerCounts(cluster.scenario.prefill, cluster.scenario.decode)
        rules = replace(rules_of(own), horizon_s=cluster.scenario.start_s)
        self._planner = Planner(self._model, target_of(own), limits, rules, counts)
        self._feed = Feed(target_of(own))
        self._plan: ScalingPlan | None = None

    def start(self) -> None:
        self._plan_interval()

    def _plan_interval(self) -> None:
        clock = self._cluster.clock
        observation = Observation(
            clock.now_s,
            {f"i{number}": ingress_report(ingress.stats) for number, ingress in enumerate(self._cluster.ingresses)},
            self._reports(Role.PREFILL),
            self._reports(Role.DECODE),
            self._fleet.is_changing,
        )
        load = self._plan.load if self._plan is not None else None
        interval = self._feed.interval(observation, self._model, load)
        if interval is not None:
            self._plan = self._planner.observe(interval)
            self._fleet.scale(Role.PREFILL, self._planner.counts.prefill)
            self._fleet.scale(Role.DECODE, self._planner.counts.decode)
        clock.after(worker_model.INTERVAL_S, self._plan_interval)

    def _reports(self, role: Role) -> dict[str, dict[str, float]]:
        return {
            worker.worker_id: worker_report(worker.reports.last_load, worker.info)
            for worker in self._fleet.serving(role)
        }


class FaultInjector:
    """Applies the scenario's faults. `happened` counts them by kind."""

    def __init__(self, cluster: SimulatedCluster) -> None:
        self._cluster = cluster
        self.happened: dict[str, int] = {}

    def start(self) -> None:
        for fault in self._cluster.scenario.faults:
            self._cluster.clock.at(fault.at_s, self._begin, fault)

    def _begin(self, fault: Fault) -> None:
        if fault.kind == "ingress_restart":
            self._cluster.ingresses[int(fault.target[1:])].restart()
            self._count(fault)
            return
        worker = next((one for one in self._cluster.live_workers() if one.worker_id == fault.target), None)
        if worker is None:
            return  # it is already down
        self._count(fault)
        if fault.kind == "crash":
            self._crash(worker, fault)
        elif fault.kind == "freeze":
            self._freeze(worker, fault)
        elif fault.kind == "slow":
            worker.steps.slowness = 1 / fault.share
            self._later(fault, worker.steps.recover_speed)
        else:
            self._cluster.network.set_speed(worker.node_id, fault.share)
            self._later(fault, self._cluster.network.set_speed, worker.node_id, 1.0)

    def _count(self, fault: Fault) -> None:
        self.happened[fault.kind] = self.happened.get(fault.kind, 0) + 1

    def _later(self, fault: Fault, call: object, *args: object) -> None:
        if fault.for_s is not None:
            assert callable(call)
            self._cluster.clock.after(fault.for_s, call, *args)

    def _crash(self, worker: SimulatedWorker, fault: Fault) -> None:
        worker.stop()
        for ingress in self._cluster.ingresses:
            ingress.stop_flows(worker)
            self._cluster.clock.after(self._cluster.scenario.detect_s, ingress.worker_gone, worker)
        self._later(fault, self._cluster.start_worker, worker.worker_id, worker.role, worker.node_id)

    def _freeze(self, worker: SimulatedWorker, fault: Fault) -> None:
        worker.freeze()
        self._later(fault, self._thaw, worker)
        self._cluster.clock.after(self._cluster.scenario.freeze_limit_s, self._drop, worker, worker.num_freezes)

    def _drop(self, worker: SimulatedWorker, freeze: int) -> None:
        """It has sent nothing for too long."""
        if worker.is_frozen and worker.num_freezes == freeze:
            for ingress in self._cluster.ingresses:
                ingress.stop_flows(worker)
                ingress.worker_gone(worker)

    def _thaw(self, worker: SimulatedWorker) -> None:
        """It resumes; ingresses that had dropped it connect to it again, and what they had sent is aborted."""
        if not worker.is_alive:
            return
        for ingress in self._cluster.ingresses:
            if not ingress.links.is_connected(worker):
                worker.unsubscribe(ingress.links)
                worker.abort_all(ingress.links)
                ingress.worker_up(worker)
        worker.thaw()
