"""Busy shares of workers and open requests over time. Pure.

At most MOST_SAMPLES are kept: when there are more, every second one is dropped and the interval doubles.
"""

from collections.abc import Callable, Sequence
from typing import Any

from kvrelay.cluster.simulator.resources.clock import Clock
from kvrelay.cluster.simulator.worker import SimulatedWorker
from kvrelay.types import Role

FIRST_INTERVAL_S = 1.0
MOST_SAMPLES = 240


class RunTimeline:
    """Samples the workers as long as the clock runs."""

    def __init__(self, clock: Clock, workers: Sequence[SimulatedWorker], num_open: Callable[[], int]) -> None:
        self._clock, self._workers, self._num_open = clock, workers, num_open
        self._interval_s = FIRST_INTERVAL_S
        self._times = [0.0]
        self._open = [0]
        self._busy_s = {role: [0.0] for role in Role}  # of all workers until now
        self._alive_s = {role: [0.0] for role in Role}

    def begin(self) -> None:
        self._clock.at(self._interval_s, self._sample)

    def _sample(self) -> None:
        now_s = self._clock.now_s
        self._times.append(now_s)
        self._open.append(self._num_open())
        for role in Role:
            workers = [worker for worker in self._workers if worker.role is role]
            self._busy_s[role].append(sum(worker.engine.busy_s for worker in workers))
            alive_s = sum(max(0.0, min(worker.stopped_s, now_s) - worker.started_s) for worker in workers)
            self._alive_s[role].append(alive_s)
        if len(self._times) > MOST_SAMPLES:
            self._thin()
        self._clock.after(self._interval_s, self._sample)

    def _thin(self) -> None:
        self._interval_s *= 2
        keep = slice(0, None, 2)
        self._times, self._open = self._times[keep], self._open[keep]
        for role in Role:
            self._busy_s[role], self._alive_s[role] = self._busy_s[role][keep], self._alive_s[role][keep]

    def data(self) -> dict[str, Any]:
        """Columns: time_s (of a sample's end), open requests, and each role's busy share since the sample before."""
        shares = {role.value: _shares(self._busy_s[role], self._alive_s[role]) for role in Role}
        return {"time_s": self._times[1:], "open": self._open[1:], **shares}


def _shares(busy_s: list[float], alive_s: list[float]) -> list[float]:
    """A step counts when it ends, so that shares above 1 occur; they are cut to 1."""
    shares: list[float] = []
    for index in range(1, len(busy_s)):
        alive = alive_s[index] - alive_s[index - 1]
        shares.append(round(min(1.0, (busy_s[index] - busy_s[index - 1]) / alive), 4) if alive > 0 else 0.0)
    return shares
