"""How measurements of one worker are smoothed before the router compares workers by them. Pure."""

import math

from kvrelay.plane.messages import LoadReport

_BUCKET = math.log(1.25)
RECENT_STEP_WINDOW_S = 10.0
"""Time constant of the recent step time's average."""
IDLE_HALF_LIFE_S = 5.0
"""Half-life of a slow step time while a worker is idle: what made it slow (a full batch, a first step, a neighbour)
passes.
"""


def bucketed(value: float) -> float:
    """`value` rounded to a power of 1.25, so that measurement noise does not distinguish equal workers; 0 if not
    positive and finite.
    """
    if not 0 < value < math.inf:
        return 0.0
    return math.exp(_BUCKET * round(math.log(value) / _BUCKET))


class StepTime:
    """A worker's recent step time, prefill chunks included: what its sequences wait for each token."""

    __slots__ = ("_default_s", "_idle_since_s", "_seconds", "_steps")

    def __init__(self, default_s: float) -> None:
        """`default_s`: assumed of a decode step before the first measurement."""
        self._default_s = default_s
        self._seconds = self._steps = 0.0
        self._idle_since_s: float | None = None  # as reports show it

    def observe(self, before: LoadReport | None, after: LoadReport, passed_s: float, now_s: float) -> None:
        """Two reports in a row, `passed_s` apart.

        The worker was busy in between if it was at the first: it reports when it falls idle.
        """
        if before is not None and before.running and (steps := after.steps - before.steps) > 0 and passed_s > 0:
            keep = math.exp(-passed_s / RECENT_STEP_WINDOW_S)
            self._seconds = self._seconds * keep + passed_s
            self._steps = self._steps * keep + steps
        if after.running or after.waiting or after.receiving:
            self._idle_since_s = None
        elif self._idle_since_s is None:
            self._idle_since_s = now_s

    @property
    def recent_s(self) -> float:
        """Mean seconds of a step, recently; 0: unknown."""
        return self._seconds / self._steps if self._steps else 0.0

    def decayed_s(self, seconds: float, now_s: float | None) -> float:
        """A step time that falls to the default while the worker is idle: else a slow last step would keep requests
        away for good.
        """
        if self._idle_since_s is None or now_s is None or seconds <= self._default_s:
            return seconds
        left = 0.5 ** ((now_s - self._idle_since_s) / IDLE_HALF_LIFE_S)
        return max(self._default_s, bucketed(self._default_s + left * (seconds - self._default_s)))
