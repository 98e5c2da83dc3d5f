"""Counters and histograms of the ingress, cheap enough to be touched for every token.

Plain numbers, read by metrics.py when Prometheus asks. Pure.
"""

import math
from bisect import bisect_left
from collections import Counter
from dataclasses import dataclass, field

_TTFT_BOUNDS_S = (
    0.01, 0.025, 0.05, 0.1, 0.15, 0.2, 0.25, 0.3, 0.4, 0.5, 0.75, 1.0, 1.5, 2.0, 2.5, 3.0, 4.0, 5.0, 7.5, 10.0, 15.0, 20.0, 25.0, 30.0, 60.0,
)  # fmt: skip
_TPOT_BOUNDS_S = (
    0.001, 0.0025, 0.005, 0.0075, 0.01, 0.015, 0.02, 0.025, 0.03, 0.04, 0.05, 0.06, 0.075, 0.1, 0.125, 0.15, 0.2, 0.25, 0.3, 0.4, 0.5, 1.0, 2.5,
)  # fmt: skip
"""Both close together where targets are: the planner asks which share kept one (cluster/autoscaling/feed.py)."""
_GAP_BOUNDS_S = (0.001, 0.0025, 0.005, 0.01, 0.02, 0.03, 0.05, 0.075, 0.1, 0.2, 0.5, 1.0, 2.5)
_TOTAL_BOUNDS_S = (0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0, 120.0, 300.0, 600.0)


class Histogram:
    """Counts per bucket and their sum. A value equal to a bound belongs to that bound's bucket."""

    __slots__ = ("bounds", "counts", "total")

    def __init__(self, bounds: tuple[float, ...]) -> None:
        self.bounds = bounds
        self.counts = [0] * (len(bounds) + 1)
        self.total = 0.0

    def observe(self, value: float, count: int = 1) -> None:
        """Record `value`, `count` times."""
        self.counts[bisect_left(self.bounds, value)] += count
        self.total += value * count

    def cumulative(self) -> list[tuple[float, int]]:
        """(upper bound, observations at or below it), the last bound infinite."""
        running, pairs = 0, []
        for bound, count in zip((*self.bounds, math.inf), self.counts, strict=True):
            running += count
            pairs.append((bound, running))
        return pairs


@dataclass(slots=True)
class ServeStats:
    """What one ingress counted since it started."""

    ttft_s: Histogram = field(default_factory=lambda: Histogram(_TTFT_BOUNDS_S))
    itl_s: Histogram = field(default_factory=lambda: Histogram(_GAP_BOUNDS_S))
    tpot_s: Histogram = field(default_factory=lambda: Histogram(_TPOT_BOUNDS_S))
    total_s: Histogram = field(default_factory=lambda: Histogram(_TOTAL_BOUNDS_S))
    transfer_s: Histogram = field(default_factory=lambda: Histogram(_GAP_BOUNDS_S))
    outcomes: Counter[str] = field(default_factory=Counter)  # of sequences
    decisions: Counter[str] = field(default_factory=Counter)  # by path
    slo_verdicts: Counter[tuple[str, str]] = field(default_factory=Counter)  # of requests, by class and verdict
    slo_outcomes: Counter[tuple[str, bool]] = field(
        default_factory=Counter
    )  # by promised class, and whether it was kept
    running: int = 0
    deferred: int = 0  # sequences that had to wait at the ingress since their first token would be late in any case
    retries: int = 0
    prompt_tokens: int = 0
    prompt_squares: int = 0  # of each sequence's prompt tokens, squared, summed: how much lengths vary
    output_tokens: int = 0
    cached_prefix_tokens: int = 0
