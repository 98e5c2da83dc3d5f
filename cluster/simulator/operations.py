"""What happens to a simulated cluster while it runs: faults, starts and retirements of workers, the planner.

A crashed worker's connections end, and ingresses know after `detect_s`. A frozen worker keeps its connections and sends
nothing; ingresses drop it after `freeze_limit_s`. A worker that returns after a crash has an empty cache and a new
epoch. Workers that retire are chosen by what would be lost (cluster/autoscaling/retirement.py). They get nothing new
and stop when they have finished, after `drain_s` in any case; what they had then is retried on other workers. Workers
that change their role take its requests at once and finish what they have, likewise: in a real cluster it would move.
"""

from collections import defaultdict
from collections.abc import Mapping

from kvrelay.cluster.autoscaling.feed import Feed, Observation, ingress_report, worker_report
from kvrelay.cluster.autoscaling.history import season_of
from kvrelay.cluster.autoscaling.retirement import RetirementCandidate, victims
from kvrelay.cluster.autoscaling.worker_model import interval_of, model_of, planner_settings, rules_of, target_of
from kvrelay.cluster.simulator.clock import Event
from kvrelay.cluster.simulator.ingress import SimulatedIngress
from kvrelay.cluster.simulator.scenario import Fault, World
from kvrelay.cluster.simulator.steps import Machine
from kvrelay.cluster.simulator.worker import SimulatedWorker
from kvrelay.router.planning.planner import Planner, ScalingPlan
from kvrelay.router.planning.roles import PlacedWorker, role_plan
from kvrelay.router.planning.types import CountLimits, WorkerCounts
from kvrelay.types import Role

DRAIN_CHECK_S = 1.0  # between checks whether a retiring worker has finished


class SimulatedFleet:
    """The workers, and how more start and some retire. changes: (time, role, number of workers from then on).

    More than 12 attributes: the parts of the world that faults and the autoscaler read, too.
    """

    def __init__(self, world: World, ingresses: list[SimulatedIngress]) -> None:
        self.world, self.scenario, self.clock, self.ingresses = world, world.scenario, world.clock, ingresses
        self.workers: list[SimulatedWorker] = []  # stopped ones, too
        self.changes: list[tuple[float, str, int]] = []
        self._machines: defaultdict[str, Machine] = defaultdict(Machine)  # by node
        self._starting: dict[Role, list[Event]] = {role: [] for role in Role}
        self._numbers = {Role.PREFILL: self.scenario.prefill, Role.DECODE: self.scenario.decode}
        self._num_machines = self.num_switches = 0
        for worker_id, role in self.scenario.worker_ids():
            self.start_worker(worker_id, role, self._next_node())

    def start(self) -> None:
        for step in self.scenario.scale:
            for role, wanted in ((Role.PREFILL, step.prefill), (Role.DECODE, step.decode)):
                if wanted is not None:
                    self.clock.at(step.at_s, self.scale, role, wanted)

    def _next_node(self) -> str:
        self._num_machines += 1
        return f"n{(self._num_machines - 1) // self.world.profile.workers_per_node}"

    def start_worker(self, worker_id: str, role: Role, node_id: str, *, paid_from_s: float | None = None) -> None:
        """Add a worker that takes requests from now on. paid_from_s: when its start began; default: now."""
        worker = SimulatedWorker(
            self.world,
            worker_id,
            role,
            node_id,
            epoch=len(self.workers),
            machine=self._machines[node_id],
            paid_from_s=paid_from_s,
        )
        self.workers.append(worker)
        for ingress in self.ingresses:
            ingress.worker_up(worker)

    def live_workers(self) -> list[SimulatedWorker]:
        return [worker for worker in self.workers if worker.is_alive]

    @property
    def is_changing(self) -> bool:
        return any(self._starting.values()) or any(worker.is_draining for worker in self.live_workers())

    def serving(self, role: Role) -> list[SimulatedWorker]:
        return [one for one in self.live_workers() if one.role is role and not one.is_draining]

    def num_coming(self, role: Role) -> int:
        """Workers that start in this role."""
        return len(self._starting[role])

    def switch(self, switches: Mapping[str, Role]) -> None:
        """Have workers take these roles."""
        for role in set(switches.values()):
            found = [one for one in self.live_workers() if switches.get(one.worker_id) is role and not one.is_draining]
            for worker in found:
                worker.take_role(role, self.scenario.drain_s)
                for ingress in self.ingresses:
                    ingress.role_changed(worker)
            self.num_switches += len(found)
            self.changes += [
                (self.clock.now_s, str(one), len(self.serving(one)) + self.num_coming(one)) for one in Role if found
            ]

    def scale(self, role: Role, wanted: int) -> None:
        """Start or retire workers until `wanted` of a role take requests, or will when they have started."""
        serving, starting = self.serving(role), self._starting[role]
        have = len(serving) + self.num_coming(role)
        if wanted != have:
            self.changes.append((self.clock.now_s, str(role), wanted))
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
        name, node_id = f"{role[0]}{self._numbers[role]}", self._next_node()
        self._numbers[role] += 1
        self._starting[role].append(self.clock.after(self.scenario.start_s, self._started, name, role, node_id))

    def _started(self, name: str, role: Role, node_id: str) -> None:
        del self._starting[role][0]  # all take as long: it is the first that was begun
        self.start_worker(name, role, node_id, paid_from_s=self.clock.now_s - self.scenario.start_s)

    def _retire(self, worker: SimulatedWorker) -> None:
        worker.is_draining = True
        for ingress in self.ingresses:
            ingress.retire(worker)
        self._check_drained(worker, self.clock.now_s + self.scenario.drain_s)

    def _check_drained(self, worker: SimulatedWorker, until_s: float) -> None:
        """Stop it when it has finished, or when its time is up."""
        if not worker.is_alive:
            return
        if worker.is_idle or self.clock.now_s >= until_s:
            worker.stop()
            self.drop(worker)
        else:
            self.clock.after(DRAIN_CHECK_S, self._check_drained, worker, until_s)

    def drop(self, worker: SimulatedWorker) -> None:
        """Have all ingresses learn that it is gone."""
        for ingress in self.ingresses:
            ingress.stop_flows(worker)
            ingress.worker_gone(worker)


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
    """Plans at every interval of the planner's and scales the fleet."""

    def __init__(self, fleet: SimulatedFleet) -> None:
        own, scenario = planner_settings(fleet.world.settings), fleet.scenario
        self._fleet, self._model = fleet, model_of(fleet.world.profile)
        prefills = (own.min_prefill, own.max_prefill) if scenario.prefill else (0, 0)
        limits = CountLimits(*prefills, own.min_decode, own.max_decode, own.max_workers or 1 << 20)
        counts = WorkerCounts(scenario.prefill, scenario.decode)
        rules = rules_of(own, scenario.start_s)
        season = season_of(own.history, rules.period_s, fleet.clock.now_s)
        self._planner = Planner(self._model, target_of(own), limits, rules, counts, season=season)
        self._feed = Feed(target_of(own))
        self._plan: ScalingPlan | None = None
        self._interval_s = interval_of(own)

    def plan(self) -> None:
        """Plan now, and again after every interval."""
        clock = self._fleet.clock
        observation = Observation(
            clock.now_s,
            {f"i{number}": ingress_report(ingress.stats) for number, ingress in enumerate(self._fleet.ingresses)},
            self._reports(Role.PREFILL),
            self._reports(Role.DECODE),
            self._fleet.is_changing,
        )
        load = self._plan.load if self._plan is not None else None
        interval = self._feed.interval(observation, self._model, load)
        if interval is not None:
            self._plan = self._planner.observe(interval)
            self._switch()
            self._fleet.scale(Role.PREFILL, self._planner.counts.prefill)
            self._fleet.scale(Role.DECODE, self._planner.counts.decode)
        clock.after(self._interval_s, self.plan)

    def _switch(self) -> None:
        """Before workers are started and stopped. There are no deployments here: a worker's home is its role."""
        serving = {role: [candidate(worker) for worker in self._fleet.serving(role)] for role in Role}
        workers = [
            PlacedWorker(one.worker_id, role, role, (one.cost_bytes, one.sequences))
            for role, found in serving.items()
            for one in found
        ]
        there = WorkerCounts(*(len(serving[role]) + self._fleet.num_coming(role) for role in Role))
        rules, limits = self._planner.rules, self._planner.limits
        self._fleet.switch(
            role_plan(self._planner.counts, there, workers, limits, may_switch=rules.switch_roles).switches
        )

    def _reports(self, role: Role) -> dict[str, dict[str, float]]:
        return {
            worker.worker_id: worker_report(worker.reports.last_load, worker.info, str(worker.role))
            for worker in self._fleet.serving(role)
        }


class FaultInjector:
    """Applies the scenario's faults. `happened` counts them by kind."""

    def __init__(self, fleet: SimulatedFleet) -> None:
        self._fleet = fleet
        self.happened: dict[str, int] = {}

    def start(self) -> None:
        for fault in self._fleet.scenario.faults:
            self._fleet.clock.at(fault.at_s, self._begin, fault)

    def _begin(self, fault: Fault) -> None:
        if fault.kind == "ingress_restart":
            self._fleet.ingresses[int(fault.target[1:])].restart()
            self._count(fault)
            return
        worker = next((one for one in self._fleet.live_workers() if one.worker_id == fault.target), None)
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
            self._fleet.world.network.set_speed(worker.node_id, fault.share)
            self._later(fault, self._fleet.world.network.set_speed, worker.node_id, 1.0)

    def _count(self, fault: Fault) -> None:
        self.happened[fault.kind] = self.happened.get(fault.kind, 0) + 1

    def _later(self, fault: Fault, call: object, *args: object) -> None:
        if fault.for_s is not None:
            assert callable(call)
            self._fleet.clock.after(fault.for_s, call, *args)

    def _crash(self, worker: SimulatedWorker, fault: Fault) -> None:
        worker.stop()
        for ingress in self._fleet.ingresses:
            ingress.stop_flows(worker)
            self._fleet.clock.after(self._fleet.scenario.detect_s, ingress.worker_gone, worker)
        self._later(fault, self._fleet.start_worker, worker.worker_id, worker.role, worker.node_id)

    def _freeze(self, worker: SimulatedWorker, fault: Fault) -> None:
        worker.freeze()
        self._later(fault, self._thaw, worker)
        self._fleet.clock.after(self._fleet.scenario.freeze_limit_s, self._drop, worker, worker.num_freezes)

    def _drop(self, worker: SimulatedWorker, freeze: int) -> None:
        """It has sent nothing for too long."""
        if worker.is_frozen and worker.num_freezes == freeze:
            self._fleet.drop(worker)

    def _thaw(self, worker: SimulatedWorker) -> None:
        """It resumes; ingresses that had dropped it connect to it again, and what they had sent is aborted."""
        if not worker.is_alive:
            return
        for ingress in self._fleet.ingresses:
            if not ingress.links.is_connected(worker):
                worker.reports.unsubscribe(ingress.links)
                worker.abort_all(ingress.links)
                ingress.worker_up(worker)
        worker.thaw()
