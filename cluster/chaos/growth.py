"""Whether memory grows in a run: for each kind of process, its resident memory and how fast it rises. Pure."""

import re
from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

import numpy as np

from kvrelay.cluster.chaos.run import ProcessSample

WARM_S = 120.0  # of a process's life that do not count: until then pools and caches fill
STEADY_S = 60.0  # a process is judged by at least so much of the run's second half
MOST_POINTS = 512  # of one process; of more, every second, third, ... counts
_MIB = 1 << 20
_NUMBERS = re.compile(r"( \d+)+$")


@dataclass(frozen=True, slots=True)
class MemoryTrend:
    """Processes of one kind, MiB. `first`, `last`: of the largest one, where the kind was first and last seen.

    `per_hour`: of the process that grows fastest over the run's second half; None: no process is old enough.
    `private_per_hour`: the same without memory that other processes may map, too.
    """

    kind: str
    num_processes: int
    first: float
    last: float
    peak: float
    per_hour: float | None
    private_per_hour: float | None


def memory_trends(samples: Sequence[ProcessSample]) -> list[MemoryTrend]:
    """Of every kind, those that grow fastest first."""
    half_s = max((one.at_s for one in samples), default=0.0) / 2
    kinds: defaultdict[str, defaultdict[int, list[ProcessSample]]] = defaultdict(lambda: defaultdict(list))
    for one in sorted(samples, key=lambda one: one.at_s):
        kinds[kind_of(one.name)][one.pid].append(one)
    found = [_trend(kind, list(lives.values()), half_s) for kind, lives in kinds.items()]
    return sorted(found, key=lambda one: (one.per_hour is None, -(one.per_hour or 0.0), one.kind))


def kind_of(name: str) -> str:
    """A process's kind: its name, without the call or the replica that an actor's title may show, and without numbers
    behind a program's name.
    """
    if not name.startswith("ray::"):
        return _NUMBERS.sub("", name)
    _, _, replica = name.rpartition("#")
    title = f"ray::{replica.partition(':')[2]}" if replica != name else name
    return title.partition(".")[0]


def _trend(kind: str, lives: Sequence[Sequence[ProcessSample]], half_s: float) -> MemoryTrend:
    points = [one for life in lives for one in life]
    first_s, last_s = min(one.at_s for one in points), max(one.at_s for one in points)
    return MemoryTrend(
        kind,
        len(lives),
        first=max(one.rss_bytes for one in points if one.at_s == first_s) / _MIB,
        last=max(one.rss_bytes for one in points if one.at_s == last_s) / _MIB,
        peak=max(one.rss_bytes for one in points) / _MIB,
        per_hour=max(_slopes(lives, half_s, lambda one: one.rss_bytes), default=None),
        private_per_hour=max(_slopes(lives, half_s, lambda one: one.rss_bytes - one.shared_bytes), default=None),
    )


def _slopes(
    lives: Sequence[Sequence[ProcessSample]], half_s: float, bytes_of: Callable[[ProcessSample], int]
) -> Iterator[float]:
    """MiB per hour of each process that is old enough."""
    for life in lives:
        since_s = max(half_s, life[0].at_s + WARM_S)
        steady = [one for one in life if one.at_s >= since_s]
        if steady and steady[-1].at_s - steady[0].at_s >= STEADY_S:
            some = steady[:: -(-len(steady) // MOST_POINTS)]
            yield theil_sen([one.at_s for one in some], [bytes_of(one) for one in some]) * 3600 / _MIB


def theil_sen(xs: Sequence[float], ys: Sequence[float]) -> float:
    """The median slope of all pairs of points: a few that lie far off, or one step, do not change it. `xs` ascend."""
    x, y = np.asarray(xs, float), np.asarray(ys, float)
    left, right = np.triu_indices(len(x), 1)
    return float(np.median((y[right] - y[left]) / (x[right] - x[left])))
