"""Level and trend of an arrival rate. Pure.

Level and damped trend (Holt; Gardner and McKenzie's damping). The gain of a surprise follows from how large the noise
of so few arrivals is (Kalman's gain for a level that drifts; Benedict and Bordner's for the trend): a rate of a few a
minute is averaged over minutes, one of hundreds is followed at once. Where surprises add up beyond what noise explains
(Page's test), in one interval or several, the level restarts there.

Sources: C. C. Holt (1957); E. S. Gardner and E. McKenzie, "Forecasting trends in time series" (1985); R. E. Kalman
(1960); T. R. Benedict and G. W. Bordner, "Synthesis of an optimal set of radar track-while-scan smoothing equations"
(1962); E. S. Page, "Continuous inspection schemes" (1954); F. J. Anscombe, "The transformation of Poisson, binomial and
negative-binomial data" (1948).
"""

import math
from dataclasses import dataclass

VOLATILITY = 0.07  # standard deviation of a rate's change in a minute, as a share of the rate
DAMPING = 0.95  # of the trend, per interval ahead
SLACK_SIGMAS = 0.5  # part of each surprise that the change test ignores
CHANGE_SIGMAS = 8.0  # sum of the rest that is a change: noise alone reaches it once in some 20,000 intervals


@dataclass(frozen=True, slots=True)
class TrendState:
    """The state of a rate's level and trend, and the length of an interval."""

    level: float
    slope: float
    seconds: float
    variance: float
    runs: tuple[tuple[float, float, int], ...]
    is_new: bool


class RateTrend:
    """Level and trend of a rate; the less likely a surprise is noise, the more it moves them."""

    def __init__(self) -> None:
        self.level = 0.0
        self._slope = 0.0  # per interval
        self._seconds = 0.0
        self._variance = 0.0  # of the level
        self._runs = (CumulativeSum(1.0), CumulativeSum(-1.0))
        self._is_new = True

    def observe(self, arrivals: int, seconds: float, burstiness: float) -> None:
        rate, self._seconds = arrivals / seconds, seconds
        if self._is_new:
            self._is_new = False
            self._begin(rate, max(rate, 1.0 / seconds) * burstiness / seconds)
            return
        foreseen = max(0.0, self.level + DAMPING * self._slope)
        noise = max(foreseen, 1.0 / seconds) * burstiness / seconds  # variance of a Poisson count, scaled by burstiness
        surprise = rate - foreseen
        sigmas = _sigmas(arrivals, foreseen * seconds) / math.sqrt(burstiness)
        for run in self._runs:
            if (found := run.observe(sigmas, rate)) is not None:
                mean, number = found
                self._begin(mean, max(mean, 1.0 / seconds) * burstiness / seconds / number)
                return
        drift = (VOLATILITY * max(foreseen, 1.0 / seconds)) ** 2 * seconds / 60.0
        wide = self._variance + drift
        gain = wide / (wide + noise)
        self._variance = (1.0 - gain) * wide
        self.level = max(0.0, foreseen + gain * surprise)
        settled = _settled_gain(drift / noise)  # an uncertain level makes a surprise uninformative about the trend
        self._slope = DAMPING * self._slope + settled**2 / (2.0 - settled) * surprise

    def _begin(self, level: float, variance: float) -> None:
        self.level, self._slope, self._variance = level, 0.0, variance
        for run in self._runs:
            run.clear()

    def state(self) -> TrendState:
        runs = tuple((run.sum, run.rates, run.number) for run in self._runs)
        return TrendState(self.level, self._slope, self._seconds, self._variance, runs, self._is_new)

    def resume(self, state: TrendState) -> None:
        self.level, self._slope, self._seconds = state.level, state.slope, state.seconds
        self._variance, self._is_new = state.variance, state.is_new
        for run, (total, rates, number) in zip(self._runs, state.runs, strict=True):
            run.sum, run.rates, run.number = total, rates, number

    def deviation(self, seconds: float) -> float:
        """Standard deviation of the level in so many seconds."""
        return math.sqrt(self._variance + (VOLATILITY * self.level) ** 2 * seconds / 60.0)

    def ahead(self, seconds: float) -> float:
        if self._seconds <= 0:
            return self.level
        steps = seconds / self._seconds
        reach = DAMPING * (1.0 - math.pow(DAMPING, steps)) / (1.0 - DAMPING)
        return max(0.0, self.level + self._slope * reach)


class CumulativeSum:
    """Surprises of one sign, summed: detects changes that no single interval shows (Page)."""

    __slots__ = ("_sign", "number", "rates", "sum")

    def __init__(self, sign: float) -> None:
        self._sign = sign
        self.clear()

    def clear(self) -> None:
        self.sum = self.rates = 0.0
        self.number = 0

    def observe(self, sigmas: float, rate: float) -> tuple[float, int] | None:
        """(mean rate since the change, number of intervals) once the sum is beyond noise; else None."""
        self.sum += self._sign * sigmas - SLACK_SIGMAS
        if self.sum <= 0.0:
            self.clear()
            return None
        self.rates += rate
        self.number += 1
        return (self.rates / self.number, self.number) if self.sum > CHANGE_SIGMAS else None


def _settled_gain(ratio: float) -> float:
    """Steady-state gain of the level, where its drift per interval has this ratio to the noise's variance."""
    return (math.sqrt(ratio * ratio + 4.0 * ratio) - ratio) / 2.0


def _sigmas(count: int, expected: float) -> float:
    """Deviation of a Poisson count from its expectation, in standard deviations; also for small counts (Anscombe)."""
    return 2.0 * (math.sqrt(count + 0.375) - math.sqrt(expected + 0.375))
