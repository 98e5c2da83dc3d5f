"""Simulations of a load, each run once, and searches over them: capacities, and the best split."""

import json
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from kvrelay.cluster.profiles.profile import SimulatorProfile
from kvrelay.cluster.simulator.requests import SimulatedRequest
from kvrelay.cluster.simulator.results import Tally, quantiles
from kvrelay.cluster.simulator.scenario import Scenario
from kvrelay.cluster.simulator.simulation import Simulation
from kvrelay.cluster.workloads.trace import TraceEntry

SHARE = 0.9
"""Share of the requests that must be in time; refused ones are not."""


class LengthTally(Tally):
    """Notes each request's prompt length too; calls `stop`, if any, once too many have missed for the load to hold."""

    def __init__(self, scenario: Scenario, num_requests: int, stop: Callable[[], object] | None) -> None:
        super().__init__(0.0, scenario.ttft_s, scenario.tpot_s)
        self._most_missed, self._stop = num_requests - SHARE * num_requests + 1e-9, stop
        self.lengths: list[int] = []
        self.in_time: list[bool] = []

    def add(self, job: SimulatedRequest) -> None:
        before = self.num_kept
        super().add(job)
        self.lengths.append(job.num_tokens)
        self.in_time.append(self.num_kept > before)
        if self._stop is not None and not self.holds:
            self._stop()

    @property
    def holds(self) -> bool:
        return len(self.lengths) - self.num_kept <= self._most_missed

    def figures(self) -> dict[str, Any]:
        """Times in seconds, of answered requests; shares of all, refused ones included. Of a load that does not hold:
        as far as it was run.
        """
        lengths, in_time = np.array(self.lengths), np.array(self.in_time)
        tenths = np.array_split(in_time[np.argsort(lengths, kind="stable")], 10)
        return {
            "holds": self.holds,
            "in_time": float(in_time.mean()),
            "hit_ratio": self.cached_tokens / max(self.prompt_tokens, 1),
            "ttft_s": quantiles(np.asarray(self.ttft_s)),
            "tpot_s": quantiles(np.asarray(self.tpot_s)),
            "tokens_in_time": float(lengths[in_time].sum() / lengths.sum()),
            "in_time_by_length": [float(tenth.mean()) for tenth in tenths if len(tenth)],  # from short to long prompts
            "outcomes": dict(self.outcomes),
        }


def simulated(
    scenario: Scenario, profile: SimulatorProfile, entries: list[TraceEntry], *, is_whole: bool
) -> tuple[Simulation, LengthTally]:
    """A simulation that was run, unless `is_whole` only as far as it takes to know whether the load holds."""
    if entries[0].hash_ids and entries[0].block_tokens != profile.block_size:
        profile = profile.with_block_size(entries[0].block_tokens)
    simulation = Simulation(scenario, profile, entries)
    tally = simulation.tally = LengthTally(scenario, len(entries), None if is_whole else simulation.clock.stop)
    return simulation.run(), tally


class Results:
    """What was found, by name; in a file of JSON lines, too, where the next run finds it. Several processes may share
    the file.
    """

    def __init__(self, path: Path | None) -> None:
        self._path = path
        lines = path.read_text().splitlines() if path is not None and path.exists() else []
        self._found: dict[str, Any] = dict(map(json.loads, lines))

    def get(self, name: Any, find: Callable[[], Any]) -> Any:
        """What was found under a name, or is found now. name: what JSON can hold."""
        key = json.dumps(name, sort_keys=True)
        if key not in self._found:
            self._found[key] = find()
            if self._path is not None:
                with self._path.open("a") as file:
                    file.write(json.dumps([key, self._found[key]]) + "\n")
        return self._found[key]


# ---- searches; loads are counted in steps of a factor each, so that all contenders are tried at the same ones

STRIDE, MOST = 8, 96
"""Steps by which a load is first raised or lowered, and the most from the first load, up or down."""

Holds = Callable[[int], bool]


def highest(holds: Holds, begin: int) -> int | None:
    """The highest step that holds, if all below it do, at most about MOST; None: not even about -MOST does."""
    low, stride = begin, STRIDE
    while not holds(low):
        low -= STRIDE
        if low < -MOST:
            return None
    while low < MOST and holds(low + stride):
        low += stride
    while stride := stride // 2:
        if holds(low + stride):
            low += stride
    return low


class Point(NamedTuple):
    """A split (its prefill workers) with options, and the highest step that it holds."""

    split: int
    variant: int
    step: int


@dataclass(slots=True)
class Search:
    """For the split and the options with the highest capacity.

    A further one is tried at the step above the best so far: most are dismissed by one simulation.
    """

    holds: Callable[[int, int, int], bool]  # split, number of the options, step
    best: Point | None = None
    _failed: dict[tuple[int, int], int] = field(default_factory=dict)  # the lowest step that failed

    def improves(self, split: int, variant: int) -> bool:
        begin = 0 if self.best is None else self.best.step + 1

        def at(step: int) -> bool:
            if step < self._failed.get((split, variant), step + 1) and self.holds(split, variant, step):
                return True
            self._failed[split, variant] = min(step, self._failed.get((split, variant), step))
            return False

        step = highest(at, begin) if self.best is None or at(begin) else None
        if step is not None:
            self.best = Point(split, variant, step)
        return step is not None

    def over_splits(self, variants: Iterable[int], middle: int, workers: int, splits: list[int] | None) -> None:
        """`splits`, or else from the middle, or the best so far, by 4, 2 and 1 prefill workers, and none."""
        for variant in variants:
            for split in splits or [middle if self.best is None else self.best.split, 0]:
                self.improves(split, variant)
            for stride in () if splits else (4, 2, 1):
                while self._moves(stride, variant, workers):
                    pass

    def _moves(self, stride: int, variant: int, workers: int) -> bool:
        middle = 0 if self.best is None else self.best.split
        return any(self.improves(split, variant) for split in (middle - stride, middle + stride) if 0 < split < workers)
