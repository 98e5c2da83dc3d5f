"""One simulation: builds the cluster of a scenario, plays the load, and summarises."""

import contextlib
import gc
import itertools
import math
from collections.abc import Iterable, Iterator
from typing import Any

from kvrelay.cluster.profiles.profile import SimulatorProfile
from kvrelay.cluster.simulator.clock import Clock
from kvrelay.cluster.simulator.ingress import SimulatedIngress
from kvrelay.cluster.simulator.network import Network
from kvrelay.cluster.simulator.operations import Autoscaler, FaultInjector, SimulatedFleet
from kvrelay.cluster.simulator.requests import SimulatedRequest, jobs_of
from kvrelay.cluster.simulator.results import Tally
from kvrelay.cluster.simulator.scenario import Scenario, World
from kvrelay.cluster.simulator.tiers import BlockSources
from kvrelay.cluster.simulator.worker import SimulatedWorker
from kvrelay.cluster.workloads.trace import TraceEntry
from kvrelay.serve.api.parameters import slo_of
from kvrelay.types import Role


@contextlib.contextmanager
def rare_collections() -> Iterator[None]:
    """Collect garbage cycles less often: there are next to none, and many objects to traverse."""
    before = gc.get_threshold()
    gc.set_threshold(200_000, 50, 100)
    try:
        yield
    finally:
        gc.set_threshold(*before)


class Simulation:
    """Is built, run once, and summarised.

    More than 12 attributes: the parts of the cluster, and counts.
    """

    def __init__(self, scenario: Scenario, profile: SimulatorProfile, entries: Iterable[TraceEntry]) -> None:
        """entries: in order of arrival; each is taken when it is due."""
        self.scenario, self.profile = scenario, profile
        self.settings = scenario.product_settings()
        promised = slo_of(None, self.settings.slo, 1) if self.settings.slo.is_on else None
        self._slo = promised.requirement if promised is not None else None
        self.clock = Clock()
        self.network = Network(
            self.clock,
            link_bytes_per_s=profile.link_bytes_per_s * profile.workers_per_node,
            local_bytes_per_s=profile.local_bytes_per_s,
        )
        self.world = World(scenario, profile, self.settings, self.clock, self.network, BlockSources())
        self.tally = Tally(scenario.warm_up_s, scenario.ttft_s, scenario.tpot_s)
        weights = self.settings.scheduler.tenant_weights
        self._jobs: Iterator[SimulatedRequest] = jobs_of(entries, profile.block_size, weights)
        self.num_open = 0
        self.is_all_arrived = False
        self.ended_s = 0.0
        self.ingresses = [SimulatedIngress(self.world, self._slo, self._ended) for _ in range(scenario.ingress)]
        self._turns = itertools.cycle(self.ingresses)
        self.fleet = SimulatedFleet(self.world, self.ingresses)
        self.workers = self.fleet.workers
        self.faults = FaultInjector(self.fleet)
        self._autoscaler = Autoscaler(self.fleet) if self.settings.planner.mode != "off" else None

    # ---- the load

    def _next(self) -> None:
        job = next(self._jobs, None)
        if job is None:
            self.is_all_arrived = True
            self._stop_if_done()
        else:
            self.clock.at(job.arrival_s, self._arrive, job)

    def _arrive(self, job: SimulatedRequest) -> None:
        self.num_open += 1
        next(self._turns).arrive(job)
        self._next()

    def _ended(self, job: SimulatedRequest) -> None:
        self.num_open -= 1
        self.tally.add(job)
        self._stop_if_done()

    def _stop_if_done(self) -> None:
        """Stop the clock when no request is left to arrive or to end."""
        if self.is_all_arrived and not self.num_open:
            self.ended_s = self.clock.now_s
            self.clock.stop()

    def run(self) -> "Simulation":
        with rare_collections():
            self.faults.start()
            self.fleet.start()
            if self._autoscaler is not None:
                self._autoscaler.plan()
            self.clock.at(1e-9, self._next)
            self.clock.run()
        return self

    # ---- results

    def summary(self) -> dict[str, Any]:
        """All figures as plain data; bit-identical for the same scenario, profile and load."""
        return {
            "scenario": self.scenario.model_dump(mode="json", exclude_defaults=True),
            "profile": self.profile.name,
            **self.tally.summary(),
            "ended_s": self.ended_s,
            "workers": {role.value: self._of_role(role) for role in Role},
            "moved_bytes": self.network.moved_bytes,
            "tiers": self._tiers(),
            **self._cost(),
            "scaling": [list(change) for change in self.fleet.changes],
            "switches": self.fleet.num_switches,
            "faults": dict(sorted(self.faults.happened.items())),
            "retries": sum(ingress.stats.retries for ingress in self.ingresses),
            "deferred": sum(ingress.stats.deferred for ingress in self.ingresses),
        }

    def _tiers(self) -> dict[str, int]:
        """Blocks moved between pools, host tiers and the store; empty without host tiers."""
        found = [worker.engine.tiers for worker in self.workers if worker.engine.tiers is not None]
        if not found:
            return {}
        return {
            "loaded_blocks": sum(one.lower.controller.stats.loaded for one in found),
            "saved_blocks": sum(one.lower.controller.stats.saved for one in found),
            "fetched_blocks": sum(one.store.stats().loaded_blocks for one in found if one.store is not None),
            "stored_blocks": sum(one.store.stats().stored_blocks for one in found if one.store is not None),
        }

    def _alive_s(self, worker: SimulatedWorker) -> float:
        return max(0.0, min(worker.stopped_s, self.ended_s) - worker.started_s)

    def _of_role(self, role: Role) -> dict[str, float]:
        workers = [worker for worker in self.workers if worker.role is role]
        alive_s = sum(map(self._alive_s, workers))
        busy = [worker.engine.busy_s / max(self._alive_s(worker), 1e-9) for worker in workers]
        return {
            "started": len(workers),
            "alive_s": alive_s,
            "utilisation": sum(worker.engine.busy_s for worker in workers) / max(alive_s, 1e-9),
            "least_utilisation": min(busy, default=0.0),
            "most_utilisation": max(busy, default=0.0),
            "steps": sum(worker.engine.num_steps for worker in workers),
            "preemptions": sum(worker.engine.scheduler.preemption.num_preemptions for worker in workers),
        }

    def _cost(self) -> dict[str, float]:
        hours = sum(min(one.stopped_s, self.ended_s) - one.paid_from_s for one in self.workers) / 3600
        per_kept = hours / self.tally.num_kept if self.tally.num_kept else math.inf
        return {
            "worker_hours": hours,
            "cost": hours * self.profile.cost_per_hour,
            "kept_per_worker_hour": 1 / per_kept if per_kept else 0.0,
        }
