"""What load is to be expected in the next minutes. Pure: times come with what was seen.

Level and damped trend (Holt; Gardner and McKenzie's damping), jumping where an interval is out of all proportion to the noise;
a daily pattern is used once the history shows it (the last hours went as the same hours of the day before); what requests are
like is remembered over some minutes.

Sources: C. C. Holt (1957), E. S. Gardner and E. McKenzie, "Forecasting trends in time series" (1985).
"""

import math
from collections import deque

from kvrelay.router.planning.types import Interval, Workload

LEVEL_GAIN = 0.4
TREND_GAIN = 0.2
DAMPING = 0.95  # of the trend, for each interval ahead
JUMP_SIGMAS = 4.0  # a count so far from the level is no noise: the level follows at once
SHAPE_HALF_LIFE_S = 600.0
BIN_S = 300.0  # of the seasonal history
MATCH_BINS = 24  # that must have gone as a period ago
MATCH_CORRELATION = 0.7
MOST_GROWTH = 2.0  # of a period over the one before, and its inverse
BURST_LIMITS = (0.5, 32.0)


class Demand:
    """Learns from intervals; told one after the other."""

    def __init__(self, *, horizon_s: float, period_s: float) -> None:
        """`horizon_s`: how far ahead `expected` looks; `period_s`: of a pattern that may repeat, 0: none is looked for."""
        self._horizon_s = horizon_s
        self._rate = _Trend()
        self._shape = _Shape()
        self._season = _Season(period_s) if period_s > 0 else None

    def observe(self, seen: Interval) -> None:
        """One interval. Nothing is learnt from one without length."""
        if seen.seconds <= 0:
            return
        self._rate.observe(seen.arrivals, seen.seconds, self._shape.burstiness)
        self._shape.observe(seen)
        if self._season is not None:
            self._season.observe(seen.end_s, seen.arrivals, seen.seconds)

    def expected(self) -> float:
        """Requests per s, `horizon_s` from now or on the way there, whichever is more."""
        ahead = self._rate.ahead(self._horizon_s)
        seasonal = self._season.ahead(self._horizon_s) if self._season is not None else None
        return max(self._rate.level, ahead, seasonal or 0.0)

    @property
    def is_seasonal(self) -> bool:
        """Whether the history shows the period."""
        return self._season is not None and self._season.is_shown

    def workload(self, rate: float) -> Workload | None:
        """Requests as they have been lately; None before the first."""
        return self._shape.workload(rate)


class _Trend:
    """Level and trend of a rate."""

    def __init__(self) -> None:
        self.level = 0.0
        self._slope = 0.0  # per interval
        self._seconds = 0.0
        self._is_new = True

    def observe(self, arrivals: int, seconds: float, burstiness: float) -> None:
        rate, self._seconds = arrivals / seconds, seconds
        if self._is_new:
            self.level, self._is_new = rate, False
            return
        foreseen = max(0.0, self.level + DAMPING * self._slope)
        noise = math.sqrt(max(foreseen * seconds, 1.0) * burstiness) / seconds
        if abs(rate - foreseen) > JUMP_SIGMAS * noise:
            self.level, self._slope = rate, 0.0
            return
        level = max(0.0, foreseen + LEVEL_GAIN * (rate - foreseen))
        self._slope = DAMPING * self._slope + TREND_GAIN * LEVEL_GAIN * (rate - foreseen)
        self.level = level

    def ahead(self, seconds: float) -> float:
        if self._seconds <= 0:
            return self.level
        steps = seconds / self._seconds
        reach = DAMPING * (1.0 - math.pow(DAMPING, steps)) / (1.0 - DAMPING)
        return max(0.0, self.level + self._slope * reach)


class _Shape:
    """What requests are like: sums that fade, and how bursty they come."""

    def __init__(self) -> None:
        self._sums = [0.0] * 6  # arrivals, tokens, squares, cached, ended, output tokens
        self._last: float | None = None  # rate of the interval before
        self._swings = self._counts = 0.0
        self.burstiness = 1.0

    def observe(self, seen: Interval) -> None:
        keep: float = 0.5 ** (seen.seconds / SHAPE_HALF_LIFE_S)
        new = (seen.arrivals, seen.input_tokens, seen.input_squares, seen.cached_tokens, seen.ended, seen.output_tokens)
        self._sums = [old * keep + value for old, value in zip(self._sums, new, strict=True)]
        rate = seen.arrivals / seen.seconds
        if (
            self._last is not None
        ):  # differences of neighbours: a slow change of the rate is no burst, and a jump one at most
            swing = ((rate - self._last) * seen.seconds) ** 2 / 2.0
            most = JUMP_SIGMAS**2 * max(seen.arrivals, 1) * self.burstiness / 2.0
            self._swings = self._swings * keep + min(swing, most)
            self._counts = self._counts * keep + seen.arrivals
        self._last = rate
        if self._counts >= 1.0:
            low, high = BURST_LIMITS
            weight = self._counts / (self._counts + 100.0)  # a few counts say little
            self.burstiness = min(max(1.0 + weight * (self._swings / self._counts - 1.0), low), high)

    def workload(self, rate: float) -> Workload | None:
        arrivals, tokens, squares, cached, ended, output = self._sums
        if arrivals < 1e-9 or tokens <= 0:
            return None
        mean = tokens / arrivals
        cv2 = max(0.0, squares / arrivals / mean**2 - 1.0) if squares > 0 else 1.0
        return Workload(
            rate=rate, input_tokens=max(1.0, mean), output_tokens=max(1.0, output / ended if ended > 1e-9 else mean),
            cached_share=min(max(cached / tokens, 0.0), 0.99), input_cv2=min(cv2, 100.0), burstiness=self.burstiness,
        )  # fmt: skip


class _Season:
    """Mean rates in bins of BIN_S, over two periods at most."""

    def __init__(self, period_s: float) -> None:
        self._length = max(2, round(period_s / BIN_S))
        self._bins: deque[float] = deque(maxlen=2 * self._length)
        self._start_s: float | None = None  # of the bin that fills
        self._sum = self._seconds = 0.0

    def observe(self, end_s: float, arrivals: int, seconds: float) -> None:
        if self._start_s is None:
            self._start_s = end_s - seconds
        self._sum += arrivals
        self._seconds += seconds
        if end_s - self._start_s >= BIN_S:
            passed = max(1, min(int((end_s - self._start_s) / BIN_S), 2 * self._length))
            self._bins.extend(
                [self._sum / self._seconds] * passed
            )  # a long silence is filled with what was seen over it
            self._start_s += passed * BIN_S
            self._sum = self._seconds = 0.0

    @property
    def is_shown(self) -> bool:
        pair = self._pair()
        return pair is not None and _correlation(*pair) >= MATCH_CORRELATION

    def ahead(self, seconds: float) -> float | None:
        """The rate a period ago at that time, grown as the last bins have; None: no period shows."""
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
    """0 where either does not vary, or is nothing at all."""
    mean_left, mean_right = sum(left) / len(left), sum(right) / len(right)
    product = sum((a - mean_left) * (b - mean_right) for a, b in zip(left, right, strict=True))
    size = sum((a - mean_left) ** 2 for a in left) * sum((b - mean_right) ** 2 for b in right)
    if size <= 1e-12 or mean_right <= 0:
        return 0.0
    return product / math.sqrt(size)
