"""A daily pattern of the arrival rate, used once the history shows it. Pure."""

import math
from collections import deque
from dataclasses import dataclass

BIN_S = 300.0  # of the history
MATCH_BINS = 24  # that must correlate with those a period ago
MATCH_CORRELATION = 0.7
MOST_GROWTH = 2.0  # of a period over the one before, and its inverse


@dataclass(frozen=True, slots=True)
class SeasonState:
    """Bins of the history, and the current bin: when it began, and its sums."""

    bins: tuple[float, ...]
    began_ago_s: float | None
    sum: float
    seconds: float


class SeasonalPattern:
    """Mean rates in bins of BIN_S, over at most two periods."""

    def __init__(self, period_s: float) -> None:
        self._length = max(2, round(period_s / BIN_S))
        self._bins: deque[float] = deque(maxlen=2 * self._length)
        self._start_s: float | None = None  # of the current bin
        self._sum = self._seconds = 0.0

    def state(self, now_s: float) -> SeasonState:
        began_ago_s = None if self._start_s is None else now_s - self._start_s
        return SeasonState(tuple(self._bins), began_ago_s, self._sum, self._seconds)

    def resume(self, state: SeasonState, now_s: float) -> None:
        self._bins.clear()
        self._bins.extend(state.bins)
        self._start_s = None if state.began_ago_s is None else now_s - state.began_ago_s
        self._sum, self._seconds = state.sum, state.seconds

    def observe(self, end_s: float, arrivals: int, seconds: float) -> None:
        if self._start_s is None:
            self._start_s = end_s - seconds
        self._sum += arrivals
        self._seconds += seconds
        if end_s - self._start_s >= BIN_S:
            passed = max(1, min(int((end_s - self._start_s) / BIN_S), 2 * self._length))
            self._bins.extend([self._sum / self._seconds] * passed)  # a gap is filled with the rate over it
            self._start_s += passed * BIN_S
            self._sum = self._seconds = 0.0

    @property
    def is_shown(self) -> bool:
        pair = self._pair()
        return pair is not None and _correlation(*pair) >= MATCH_CORRELATION

    def ahead(self, seconds: float) -> float | None:
        """The rate a period before that time, scaled by the growth since; None: the history shows no period."""
        pair = self._pair()
        if pair is None or _correlation(*pair) < MATCH_CORRELATION:
            return None
        now, before = (sum(part) for part in pair)
        growth = min(max(now / before, 1.0 / MOST_GROWTH), MOST_GROWTH)
        reach = max(1, math.ceil(seconds / BIN_S))
        first = len(self._bins) - self._length
        return growth * max(self._bins[first + step] for step in range(min(reach + 1, self._length)))

    def _pair(self) -> tuple[list[float], list[float]] | None:
        """The last bins, and those a period before."""
        if len(self._bins) < self._length + MATCH_BINS:
            return None
        end = len(self._bins)
        now = [self._bins[index] for index in range(end - MATCH_BINS, end)]
        before = [self._bins[index - self._length] for index in range(end - MATCH_BINS, end)]
        return now, before


def _correlation(left: list[float], right: list[float]) -> float:
    """0 if either series is constant, or is all zero."""
    mean_left, mean_right = sum(left) / len(left), sum(right) / len(right)
    product = sum((a - mean_left) * (b - mean_right) for a, b in zip(left, right, strict=True))
    size = sum((a - mean_left) ** 2 for a in left) * sum((b - mean_right) ** 2 for b in right)
    if size <= 1e-12 or mean_right <= 0:
        return 0.0
    return product / math.sqrt(size)
