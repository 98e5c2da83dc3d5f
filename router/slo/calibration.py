"""Recent errors of predictions: a bias per worker, a margin over all workers, and the error for metrics.

Pure: the caller passes the time. Memory is bounded: one bias per live worker, `WINDOW` errors per quantity.
"""

import math
from bisect import bisect_left, insort
from collections import deque

GAIN = 0.15  # weight of the newest error in a worker's bias
HALF_LIFE_S = 60.0  # of a bias, without observations
WINDOW = 128  # errors that the margin and the mean error are taken over
MIN_ERRORS = 8  # fewer give no margin
MAX_FACTOR = 16.0  # bounds of a bias: this factor and its inverse
RATIO_BOUNDS = (0.1, 0.25, 0.5, 0.67, 0.8, 0.9, 1.0, 1.1, 1.25, 1.5, 2.0, 4.0, 10.0)


class Bias:
    """One worker's factor between predicted and observed latency, forgotten exponentially.

    `floor_s` is added to both sides, so that a few milliseconds of overhead on a short prediction do not count as a
    slow worker.
    """

    __slots__ = ("_floor_s", "_log", "_observed_at_s")

    def __init__(self, floor_s: float) -> None:
        self._floor_s, self._log, self._observed_at_s = floor_s, 0.0, 0.0

    def corrected(self, raw_s: float, now_s: float) -> float:
        """`raw_s` seconds, corrected by the bias."""
        return max(0.0, (raw_s + self._floor_s) * math.exp(self._now(now_s)) - self._floor_s)

    def observe(self, raw_s: float, observed_s: float, now_s: float) -> None:
        """`raw_s` was predicted, without correction; `observed_s` was observed."""
        limit = math.log(MAX_FACTOR)
        seen = math.log((max(observed_s, 0.0) + self._floor_s) / (raw_s + self._floor_s))
        current = self._now(now_s)
        self._log = current + GAIN * (max(-limit, min(limit, seen)) - current)
        self._observed_at_s = now_s

    def _now(self, now_s: float) -> float:
        return float(self._log * 0.5 ** (max(0.0, now_s - self._observed_at_s) / HALF_LIFE_S))


class Errors:
    """Observed over predicted, of one quantity: the last `WINDOW` for the margin, all of them for the histogram."""

    __slots__ = ("_order", "_sorted", "counts", "total")

    def __init__(self) -> None:
        self._order: deque[float] = deque()
        self._sorted: list[float] = []
        self.counts = [0] * (len(RATIO_BOUNDS) + 1)
        self.total = 0.0

    def observe(self, predicted_s: float, observed_s: float) -> None:
        """Both in seconds; predictions of 0 are ignored."""
        if predicted_s <= 0 or observed_s <= 0:
            return
        ratio = observed_s / predicted_s
        self.counts[bisect_left(RATIO_BOUNDS, ratio)] += 1
        self.total += ratio
        self._order.append(ratio)
        insort(self._sorted, ratio)
        if len(self._order) > WINDOW:
            self._sorted.pop(bisect_left(self._sorted, self._order.popleft()))

    def quantile(self, share: float) -> float:
        """The ratio below which `share` of the last ones stayed; 1.0 while there are too few."""
        if len(self._sorted) < MIN_ERRORS:
            return 1.0
        return self._sorted[min(int(share * len(self._sorted)), len(self._sorted) - 1)]

    def mean_error(self) -> float:
        """Mean of |observed - predicted| / observed over the last ones; 0 before the first."""
        return sum(abs(1 - 1 / ratio) for ratio in self._sorted) / max(len(self._sorted), 1)
