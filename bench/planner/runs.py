"""A day of load, the workers that meet it, and what comes of a way to choose their numbers. For
bench/planner/planner.py.

All run production's router, schedulers, pools and planner in virtual time (docs/simulator.md). Profiles are of whole
machines; so that a day has few enough requests to simulate, and still needs several workers, each step takes `slow`
times as long as the profile says.
"""

import json
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, replace
from functools import partial
from itertools import pairwise
from pathlib import Path
from typing import Any
from unittest import mock

import numpy as np

from bench.planner.loads import made_days, stretched_days
from bench.planner.reactive import QueueTargets, ReactiveSimulation
from kvrelay.cluster.autoscaling.history import COLUMNS
from kvrelay.cluster.autoscaling.worker_model import rules_of
from kvrelay.cluster.profiles.profile import SimulatorProfile, find_profile
from kvrelay.cluster.simulator import operations
from kvrelay.cluster.simulator import worker as simulated_worker
from kvrelay.cluster.simulator.requests import SimulatedRequest
from kvrelay.cluster.simulator.results import Tally
from kvrelay.cluster.simulator.scenario import Scenario, scenario_from
from kvrelay.cluster.simulator.simulation import Simulation
from kvrelay.cluster.workloads.trace import TraceEntry
from kvrelay.router.planning.demand import BIN_S
from kvrelay.router.planning.types import WorkerCounts

WINDOW_S = 600.0
KEPT = 0.9
PAST_DAYS = 7


@dataclass(frozen=True, slots=True)
class Kind:
    """A load and the targets that it is to keep, at `slow` times the profile's steps."""

    ttft_s: float
    tpot_s: float = 0.4


KINDS = {"made": Kind(25.0), "agents": Kind(25.0), "azure": Kind(50.0)}


@dataclass(frozen=True, slots=True)
class Setting:
    """What all runs of a day share."""

    load: str
    seed: int
    profile: str
    slow: float
    hours: float
    start_s: float
    drain_s: float
    most: int  # workers of a role
    traces: Path | None
    hold_s: float = 300.0  # planner.scale_down_delay_s
    is_slo: bool = True  # the targets are the cluster's slo.ttft_s and slo.tpot_s as well

    @property
    def kind(self) -> Kind:
        return KINDS[self.load]

    @property
    def day_s(self) -> float:
        return self.hours * 3600

    def most_of(self, first: WorkerCounts) -> int:
        """Decode workers at most: aggregated ones may be as many as both roles together."""
        return self.most if first.prefill else 2 * self.most

    @property
    def num_windows(self) -> int:
        return round(self.day_s / WINDOW_S)


def entries_of(setting: Setting, num_days: int) -> list[TraceEntry]:
    """The days' requests."""
    many: dict[str, Any] = {"num_days": num_days, "seed": setting.seed, "day_s": setting.day_s}
    if setting.load == "made":
        return made_days(chat_per_s=0.9, agents_per_s=0.4, **many)
    if setting.load == "agents":
        return made_days(chat_per_s=0.0, agents_per_s=0.8, **many)
    if setting.traces is None:
        raise SystemExit("--traces: the folder of conversation_trace.jsonl and the AzureLLMInferenceTrace files")
    rates = [setting.traces / f"AzureLLMInferenceTrace_{name}.csv" for name in ("conv", "code")]
    per_day = round(20_000 * setting.hours / 24)
    return stretched_days(setting.traces / "conversation_trace.jsonl", rates, per_day=per_day, **many)


def slowed(profile: SimulatorProfile, factor: float) -> SimulatorProfile:
    """Each step takes so many times as long; memory and network are as they are."""
    curves = {"prefill": profile.prefill.scaled(factor), "decode": profile.decode.scaled(factor)}
    return profile.model_copy(update={**curves, "name": f"{profile.name}, {factor:g} times slower"})


@dataclass(frozen=True, slots=True)
class Outcome:
    """One run from `from_s` on. By window of WINDOW_S: requests that came, and those within both targets, TTFT's,
    TPOT's.
    """

    requests: int
    good: int
    worker_hours: float
    hit_ratio: float
    changes: tuple[int, int]
    turns: tuple[int, int]
    most: tuple[int, int]
    came: tuple[int, ...]
    kept: tuple[int, ...]
    kept_ttft: tuple[int, ...]
    kept_tpot: tuple[int, ...]

    @property
    def kept_share(self) -> float:
        return self.good / max(self.requests, 1)

    @property
    def per_hour(self) -> float:
        """Good requests per worker-hour."""
        return self.good / self.worker_hours


class WindowTally(Tally):
    """Also when those arrived that kept one of the targets."""

    def __init__(self, like: Tally) -> None:
        super().__init__(like.from_s, like.ttft_slo_s, like.tpot_slo_s)
        self.ttft_kept_at_s: list[float] = []
        self.tpot_kept_at_s: list[float] = []

    def add(self, job: SimulatedRequest) -> None:
        super().add(job)
        if job.arrival_s >= self.from_s and job.outcome == "done":
            if job.ttft_s <= self.ttft_slo_s:
                self.ttft_kept_at_s.append(job.arrival_s)
            if job.tpot_s <= self.tpot_slo_s:
                self.tpot_kept_at_s.append(job.arrival_s)


def outcome(sim: Simulation, from_s: float, until_s: float) -> Outcome:
    """Worker-hours are paid from a worker's beginning to its end, as far as they are within the span."""
    paid_s = sum(
        max(0.0, min(one.stopped_s, until_s) - max(one.paid_from_s, from_s))
        for one in sim.workers
        if one.paid_from_s < until_s
    )
    tally = sim.tally
    assert isinstance(tally, WindowTally)
    counts = [[count for _, count in course_of(sim, role, from_s)] for role in ("prefill", "decode")]
    by_window = (
        _by_window(times, from_s, until_s)
        for times in (tally.arrival_s, tally.kept_at_s, tally.ttft_kept_at_s, tally.tpot_kept_at_s)
    )
    return Outcome(
        len(tally.arrival_s),
        tally.num_kept,
        paid_s / 3600,
        sim.summary()["hit_ratio"],
        _both(sum(a != b for a, b in pairwise(each)) for each in counts),
        _both(map(num_turns, counts)),
        _both(map(max, counts)),
        *by_window,
    )


def _both(values: Any) -> tuple[int, int]:
    prefill, decode = values
    return prefill, decode


def course_of(sim: Simulation, role: str, from_s: float = 0.0) -> list[tuple[float, int]]:
    """(time, count) of each change from then on, behind the count at that time."""
    first = getattr(sim.scenario, role)
    changes = [(at_s, wanted) for at_s, name, wanted in sim.fleet.changes if name == role]
    before = [first, *(wanted for at_s, wanted in changes if at_s < from_s)][-1]
    return [(from_s, before), *((at_s, wanted) for at_s, wanted in changes if at_s >= from_s)]


def num_turns(counts: Sequence[int]) -> int:
    """Changes that go the other way than the one before."""
    steps = [b - a for a, b in pairwise(counts) if a != b]
    return sum((a > 0) != (b > 0) for a, b in pairwise(steps))


def _by_window(times: Sequence[float], from_s: float, until_s: float) -> tuple[int, ...]:
    edges = np.arange(from_s, until_s + WINDOW_S / 2, WINDOW_S)
    return tuple(int(count) for count in np.histogram(np.asarray(times), edges)[0])


class Runs:
    """Outcomes by name, kept in a file: what was run once is not run again."""

    def __init__(self, path: Path) -> None:
        self._path = path
        found = json.loads(path.read_text()) if path.exists() else {}
        self.outcomes = {name: Outcome(**{k: _frozen(v) for k, v in one.items()}) for name, one in found.items()}

    def __setitem__(self, name: str, one: Outcome) -> None:
        self.outcomes[name] = one
        self._path.write_text(json.dumps({key: asdict(value) for key, value in self.outcomes.items()}) + "\n")


def _frozen(value: Any) -> Any:
    return tuple(value) if isinstance(value, list) else value


class Day:
    """One day of one load; ways to choose the workers' numbers are run on it."""

    def __init__(self, setting: Setting, runs: Runs) -> None:
        self.setting, self._runs = setting, runs
        self.profile = slowed(find_profile(setting.profile), setting.slow)
        self._entries: dict[int, list[TraceEntry]] = {}

    def entries(self, num_days: int) -> list[TraceEntry]:
        """The last of them is always the same one, shifted."""
        if not self._entries:
            both, day_s = entries_of(self.setting, 2), self.setting.day_s
            last = [replace(one, arrival_s=one.arrival_s - day_s) for one in both if one.arrival_s >= day_s]
            self._entries = {1: last, 2: both}
        return self._entries[num_days]

    def scenario(self, counts: WorkerCounts, **fields: Any) -> Scenario:
        own, kind = self.setting, self.setting.kind
        settings = {"router": {"max_inflight": 10_000}, "serve": {"request_timeout_s": 600 * own.slow}}
        if own.is_slo:
            settings["slo"] = {"ttft_s": kind.ttft_s, "tpot_s": kind.tpot_s}
        settings |= fields.pop("settings", {})
        return scenario_from(
            {
                "prefill": counts.prefill,
                "decode": counts.decode,
                "ttft_s": kind.ttft_s,
                "tpot_s": kind.tpot_s,
                "start_s": own.start_s,
                "drain_s": own.drain_s,
                "seed": own.seed,
                "report_s": 0.5,
                "settings": settings,
                **fields,
            }
        )

    def run(
        self, name: str, scenario: Scenario, num_days: int = 1, simulation: Callable[..., Simulation] = Simulation
    ) -> Outcome:
        name = f"{self.setting.load} {self.setting.seed}: {name}"
        if name not in self._runs.outcomes:
            began_s, from_s = time.process_time(), (num_days - 1) * self.setting.day_s
            entries = self.entries(num_days)
            profile = self.profile
            if entries[0].hash_ids and entries[0].block_tokens != profile.block_size:
                profile = profile.with_block_size(entries[0].block_tokens)
            sim = simulation(scenario.model_copy(update={"warm_up_s": from_s}), profile, entries)
            sim.tally = WindowTally(sim.tally)
            simulated_worker.RESERVE_TIMEOUT_S = 2 * self.setting.kind.ttft_s
            found = outcome(sim.run(), from_s, num_days * self.setting.day_s)
            self._runs[name] = found
            summary = (
                f"{100 * found.kept_share:.1f} %, {found.per_hour:.1f} good per worker-hour, {found.worker_hours:.0f} h"
            )
            print(f"{name}: {summary}; {time.process_time() - began_s:.0f} s", file=sys.stderr, flush=True)
        return self._runs.outcomes[name]

    # ---- ways to choose counts

    def planner(
        self, name: str, num_days: int, first: WorkerCounts, *, period_s: float = 0.0, history: Path | None = None
    ) -> Outcome:
        """first: workers at the start. period_s: of the pattern that the planner may learn, since a bench's day may be
        short; 0: none. history: of past days.
        """
        own, kind = self.setting, self.setting.kind
        settings = {
            "mode": "auto", "max_prefill": own.most, "max_decode": own.most_of(first),
            "ttft_s": kind.ttft_s, "tpot_s": kind.tpot_s, "scale_down_delay_s": own.hold_s,
            "history": history and str(history),
        }  # fmt: skip
        scenario = self.scenario(first, settings={"planner": settings})
        with mock.patch.object(operations, "rules_of", lambda *given: replace(rules_of(*given), period_s=period_s)):
            return self.run(name, scenario, num_days)

    def with_history(self, name: str, first: WorkerCounts) -> Outcome:
        """The planner, with a file of the PAST_DAYS before, which other seeds made."""
        day_s = self.setting.day_s
        past = entries_of(replace(self.setting, seed=1000 + self.setting.seed), PAST_DAYS)
        counts = Counter(int(one.arrival_s // BIN_S) for one in past)
        num_bins = round(PAST_DAYS * day_s / BIN_S)
        rows = [f"{(place - num_bins) * BIN_S},{counts[place]}" for place in range(num_bins)]
        with tempfile.NamedTemporaryFile("w", suffix=".csv") as file:
            file.write("\n".join([",".join(COLUMNS), *rows]))
            file.flush()
            return self.planner(name, 1, first, period_s=day_s, history=Path(file.name))

    def reactive(self, targets: QueueTargets, first: WorkerCounts) -> Outcome:
        simulation = partial(ReactiveSimulation, targets=targets, most=self.setting.most_of(first))
        name = f"reactive {targets}" if first.prefill else f"reactive aggregated {targets.decode:g} ongoing"
        return self.run(name, self.scenario(first), simulation=simulation)

    def static(self, counts: WorkerCounts) -> Outcome:
        return self.run(f"static {counts.prefill} + {counts.decode}", self.scenario(counts))
