"""The planner in virtual time: production's `Planner`, fed as cluster/autoscaling/policies.py feeds it."""

from kvrelay.cluster.autoscaling import worker_model
from kvrelay.cluster.autoscaling.feed import Feed, Observation, ingress_report, worker_report
from kvrelay.cluster.autoscaling.worker_model import model_of, planner_settings, rules_of, target_of
from kvrelay.cluster.profiles.profile import SimulatorProfile
from kvrelay.cluster.simulator.operations.fleet import SimulatedCluster, SimulatedFleet
from kvrelay.config import Settings
from kvrelay.router.planning.planner import Planner, ScalingPlan
from kvrelay.router.planning.types import CountLimits, WorkerCounts
from kvrelay.types import Role


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
        self._planner = Planner(self._model, target_of(own), limits, rules_of(own), counts)
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
