"""How long a worker's start takes, from when Serve wanted it until it ran. Pure.

Serve names no replica that is still to come: the earliest that is missing is taken for the first that runs.
"""

from collections.abc import Collection
from dataclasses import dataclass, field

GAIN = 0.3  # of each start after the first


@dataclass(slots=True)
class StartTimes:
    """Learned from observations in Serve's time. Plain data."""

    mean_s: float | None = None  # None: no start has been seen
    since_s: list[float] = field(default_factory=list)  # since when each missing worker has been wanted
    running: set[str] = field(default_factory=set)

    def observe(self, wanted: int, running: Collection[str], now_s: float) -> None:
        """wanted: Serve's target, of all roles; running: by id."""
        for _ in self.since_s[: len(set(running) - self.running)]:
            took_s = now_s - self.since_s.pop(0)
            self.mean_s = took_s if self.mean_s is None else self.mean_s + GAIN * (took_s - self.mean_s)
        self.running, missing = set(running), max(0, wanted - len(running))
        del self.since_s[missing:]  # those that are no longer wanted
        self.since_s += [now_s] * (missing - len(self.since_s))
