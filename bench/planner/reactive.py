"""A plain reactive autoscaler in the simulator, as users of Ray Serve configure it: each deployment by its ongoing
requests.

The rule is that of Ray Serve 2.60's default policy (`autoscaling_config`): as many replicas as the mean of the ongoing
requests over `look_back_period_s` takes at `target_ongoing_requests` each, once it has been more for `upscale_delay_s`,
or fewer for `downscale_delay_s`, without a break.
"""

import math
from collections import deque
from collections.abc import Iterable
from dataclasses import dataclass

from kvrelay.cluster.autoscaling.feed import QUEUED, RUNNING, worker_report
from kvrelay.cluster.profiles.profile import SimulatorProfile
from kvrelay.cluster.simulator.operations import SimulatedFleet
from kvrelay.cluster.simulator.scenario import Scenario
from kvrelay.cluster.simulator.simulation import Simulation
from kvrelay.cluster.workloads.trace import TraceEntry
from kvrelay.types import Role

REPORT_S = 10.0  # between two reports of a replica
LOOK_BACK_S = 30.0


@dataclass(frozen=True, slots=True)
class QueueTargets:
    """`target_ongoing_requests` of each role, and the delays of both. The defaults are Ray Serve's."""

    prefill: float = 2.0
    decode: float = 2.0
    upscale_delay_s: float = 30.0
    downscale_delay_s: float = 600.0

    def __str__(self) -> str:
        return f"{self.prefill:g} and {self.decode:g} ongoing"


@dataclass(slots=True)
class DelayedCount:
    """One role's count. since_s: from when on more, or fewer, have been wanted."""

    count: int
    is_more: bool = False
    since_s: float | None = None

    def step(self, wanted: int, now_s: float, up_s: float, down_s: float) -> int:
        """The count from now on."""
        if wanted == self.count:
            self.since_s = None
            return self.count
        if self.since_s is None or self.is_more != (wanted > self.count):
            self.is_more, self.since_s = wanted > self.count, now_s
        if now_s - self.since_s >= (up_s if self.is_more else down_s):
            self.count, self.since_s = wanted, None
        return self.count


class ReactiveAutoscaler:
    """In the place of the planner."""

    def __init__(self, fleet: SimulatedFleet, targets: QueueTargets, most: int) -> None:
        self._fleet, self._targets, self._most = fleet, targets, most
        there = {role: len(fleet.serving(role)) for role in Role}
        self._counts = {role: DelayedCount(count) for role, count in there.items() if count}
        self._ongoing = {role: deque[float](maxlen=round(LOOK_BACK_S / REPORT_S)) for role in Role}

    def plan(self) -> None:
        """Decide now, and again after every report."""
        own, clock = self._targets, self._fleet.clock
        for role, count in self._counts.items():
            reports = (
                worker_report(one.reports.last_load, one.info, str(one.role)) for one in self._fleet.serving(role)
            )
            seen = self._ongoing[role]
            is_first = role is next(iter(self._counts))  # where requests wait to be placed
            waiting = sum(one.router.num_deferred for one in self._fleet.ingresses) if is_first else 0
            seen.append(waiting + sum(values[RUNNING] + values[QUEUED] for values in reports))
            wanted = math.ceil(sum(seen) / len(seen) / getattr(own, str(role)))
            wanted = min(max(wanted, 1), self._most)
            self._fleet.scale(role, count.step(wanted, clock.now_s, own.upscale_delay_s, own.downscale_delay_s))
        clock.after(REPORT_S, self.plan)


class ReactiveSimulation(Simulation):
    """A simulation whose workers are counted by a ReactiveAutoscaler."""

    def __init__(
        self,
        scenario: Scenario,
        profile: SimulatorProfile,
        entries: Iterable[TraceEntry],
        *,
        targets: QueueTargets,
        most: int,
    ) -> None:
        super().__init__(scenario, profile, entries)
        self._autoscaler = ReactiveAutoscaler(self.fleet, targets, most)  # type: ignore[assignment]
