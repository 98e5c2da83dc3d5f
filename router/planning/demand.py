"""The load to expect in the next minutes. Pure: times come with the observations.

The rate's level and trend; of what exceeds the usual level, as much as was left of earlier excesses; a daily pattern,
once the history shows it: the last hours went as the same hours of earlier days; what requests are like is averaged
over some minutes. All is plain data, which outlives the process that learned it (PlannerState).
"""

import math
from dataclasses import dataclass, field
from statistics import NormalDist, fmean, pstdev

from kvrelay.router.planning.types import Interval, Workload

VOLATILITY = 0.07  # standard deviation of a rate's change in a minute, as a share of the rate
DAMPING = 0.95  # of the trend, per interval ahead
SLACK_SIGMAS = 0.5  # part of each surprise that the change test ignores
CHANGE_SIGMAS = 8.0  # sum of the rest that is a change: noise alone reaches it once in some 20,000 intervals

STAY_HALF_LIFE_S = 4 * 3600.0  # of the memory of past excesses
STAY_SIGMAS = 2.0  # deviations above the usual level from which a level is an excess
STAY_MOST = 2.0  # times the usual level: a larger excess counts as so much
STAY_BELIEF = 300.0  # prior: an excess of the usual level's size that stayed for so many seconds

BIN_S = 300.0  # of the history
MOST_PERIODS = 14  # that it holds
MATCH_BINS = 24  # that must correlate with those a period ago
MATCH_CORRELATION = 0.7
MOST_GROWTH = 2.0  # of a period over the one before, and its inverse

SHAPE_HALF_LIFE_S = 600.0
SHAPE_SIGMAS = 6.0  # of the latest mean length, as a logarithm, from the remembered one: other requests have come
SHAPE_FEWEST = 10  # requests from which the latest mean length says that
SWING_SIGMAS = 4.0  # bound of a count's difference to the one before: a larger one is a jump, not burstiness
FEWEST_ENDED = 5  # answers before anything is known of requests
BURST_LIMITS = (0.5, 32.0)
_NORMAL = NormalDist()


@dataclass(slots=True)
class CumulativeSum:
    """Surprises of one sign, summed: detects changes that no single interval shows (Page)."""

    sign: float
    sum: float = 0.0
    rates: float = 0.0
    number: int = 0

    def clear(self) -> None:
        self.sum, self.rates, self.number = 0.0, 0.0, 0

    def observe(self, sigmas: float, rate: float) -> tuple[float, int] | None:
        """(mean rate since the change, number of intervals) once the sum is beyond noise; else None."""
        self.sum += self.sign * sigmas - SLACK_SIGMAS
        if self.sum <= 0.0:
            self.clear()
            return None
        self.rates += rate
        self.number += 1
        return (self.rates / self.number, self.number) if self.sum > CHANGE_SIGMAS else None


@dataclass(slots=True)
class RateTrend:
    """Level and damped trend of a rate (Holt; Gardner and McKenzie's damping).

    The gain of a surprise follows from how large the noise of so few arrivals is (Kalman's gain for a level that
    drifts; Benedict and Bordner's for the trend): a rate of a few a minute is averaged over minutes, one of hundreds is
    followed at once. Where surprises add up beyond what noise explains (Page's test), in one interval or several, the
    level restarts there.

    Sources: C. C. Holt (1957); E. S. Gardner and E. McKenzie, "Forecasting trends in time series" (1985); R. E. Kalman
    (1960); T. R. Benedict and G. W. Bordner, "Synthesis of an optimal set of radar track-while-scan smoothing
    equations" (1962); E. S. Page, "Continuous inspection schemes" (1954); F. J. Anscombe, "The transformation of
    Poisson, binomial and negative-binomial data" (1948).
    """

    level: float = 0.0
    slope: float = 0.0  # per interval
    seconds: float = 0.0  # of an interval
    variance: float = 0.0  # of the level
    rise: CumulativeSum = field(default_factory=lambda: CumulativeSum(1.0))
    fall: CumulativeSum = field(default_factory=lambda: CumulativeSum(-1.0))
    is_new: bool = True

    def observe(self, arrivals: int, seconds: float, burstiness: float) -> None:
        rate, self.seconds = arrivals / seconds, seconds
        if self.is_new:
            self.is_new = False
            self._begin(rate, max(rate, 1.0 / seconds) * burstiness / seconds)
            return
        foreseen = max(0.0, self.level + DAMPING * self.slope)
        noise = max(foreseen, 1.0 / seconds) * burstiness / seconds  # variance of a Poisson count, scaled by burstiness
        surprise = rate - foreseen
        sigmas = _sigmas(arrivals, foreseen * seconds) / math.sqrt(burstiness)
        for run in (self.rise, self.fall):
            if (found := run.observe(sigmas, rate)) is not None:
                mean, number = found
                self._begin(mean, max(mean, 1.0 / seconds) * burstiness / seconds / number)
                return
        drift = (VOLATILITY * max(foreseen, 1.0 / seconds)) ** 2 * seconds / 60.0
        wide = self.variance + drift
        gain = wide / (wide + noise)
        self.variance = (1.0 - gain) * wide
        self.level = max(0.0, foreseen + gain * surprise)
        settled = _settled_gain(drift / noise)  # an uncertain level makes a surprise uninformative about the trend
        self.slope = DAMPING * self.slope + settled**2 / (2.0 - settled) * surprise

    def _begin(self, level: float, variance: float) -> None:
        self.level, self.slope, self.variance = level, 0.0, variance
        self.rise.clear()
        self.fall.clear()

    def deviation(self, seconds: float) -> float:
        return math.sqrt(self.variance + (VOLATILITY * self.level) ** 2 * seconds / 60.0)

    def ahead(self, seconds: float) -> float:
        if self.seconds <= 0:
            return self.level
        steps = seconds / self.seconds
        reach = DAMPING * (1.0 - math.pow(DAMPING, steps)) / (1.0 - DAMPING)
        return max(0.0, self.level + self.slope * reach)


def _settled_gain(ratio: float) -> float:
    """Steady-state gain of the level, where its drift per interval has this ratio to the noise's variance."""
    return (math.sqrt(ratio * ratio + 4.0 * ratio) - ratio) / 2.0


def _sigmas(count: int, expected: float) -> float:
    """Deviation of a Poisson count from its expectation, in standard deviations; also for small counts (Anscombe)."""
    return 2.0 * (math.sqrt(count + 0.375) - math.sqrt(expected + 0.375))


@dataclass(slots=True)
class ExcessMemory:
    """The share of a sudden excess that is left a horizon later, learned from past ones (the slope of a regression
    through 0).

    Requests that arrive together are gone before a worker started for them serves; a step of the load stays.
    """

    usual: float | None = None  # the slowly averaged level
    recent: list[tuple[float, float, float]] = field(default_factory=list)  # (time, usual level, excess), of a horizon
    then: float = 0.0  # regression sums over finished excesses, relative to the usual level, in seconds
    later: float = 0.0

    def left(self, level: float) -> float:
        """The part of this level that is left a horizon later."""
        if self.usual is None or level <= self.usual:
            return level
        share = min(max((self.later + STAY_BELIEF) / (self.then + STAY_BELIEF), 0.0), 1.0)
        return self.usual + share * (level - self.usual)

    def observe(self, level: float, deviation: float, now_s: float, seconds: float, horizon_s: float) -> None:
        if self.usual is None:
            self.usual = level
        while self.recent and self.recent[0][0] <= now_s - horizon_s:
            _, usual, excess = self.recent.pop(0)
            most = STAY_MOST * usual
            then = min(excess, most) / usual
            later = min(max(level - usual, 0.0), excess, most) / usual
            self.then += then * then * seconds
            self.later += then * later * seconds
        keep = 0.5 ** (seconds / STAY_HALF_LIFE_S)
        self.then, self.later = keep * self.then, keep * self.later
        self.usual += (1.0 - 0.5 ** (seconds / max(horizon_s, seconds))) * (level - self.usual)
        excess = level - self.usual
        if self.usual > 0.0 and excess > STAY_SIGMAS * deviation:
            self.recent.append((now_s, self.usual, excess))


@dataclass(slots=True)
class SeasonalPattern:
    """A daily pattern of the arrival rate, used once the history shows it: mean rates in bins of BIN_S, over at most
    MOST_PERIODS periods.
    """

    bins: list[float] = field(default_factory=list)
    start_s: float | None = None  # of the current bin
    sum: float = 0.0
    seconds: float = 0.0

    @classmethod
    def learned(cls, rates: list[float], end_s: float, period_s: float, now_s: float) -> "SeasonalPattern":
        """From mean rates in bins of BIN_S up to `end_s`, of a period at least, as if they were the periods before
        `now_s`: what lacks up to then is as it was a period earlier.
        """
        length = _num_bins(period_s)
        lacking = int((now_s - end_s) % period_s / BIN_S)
        bins = [*rates, *rates[-length:][:lacking]]
        return cls(bins[-MOST_PERIODS * length :], now_s)

    def observe(self, end_s: float, arrivals: int, seconds: float, period_s: float) -> None:
        if self.start_s is None:
            self.start_s = end_s - seconds
        self.sum += arrivals
        self.seconds += seconds
        if end_s - self.start_s >= BIN_S:
            most = MOST_PERIODS * _num_bins(period_s)
            passed = max(1, min(int((end_s - self.start_s) / BIN_S), most))
            self.bins += [self.sum / self.seconds] * passed  # a gap is filled with the rate over it
            del self.bins[:-most]
            self.start_s += passed * BIN_S
            self.sum = self.seconds = 0.0

    def ahead(self, seconds: float, period_s: float, share: float = 0.5) -> float | None:
        """The rate of earlier periods before that time, scaled by the growth since: the mean over the periods that
        went like the last hours, and above it so many of their deviations as `share` asks for. None: none did.
        """
        bins, length = self.bins, _num_bins(period_s)
        now, reach = bins[-MATCH_BINS:], max(1, math.ceil(seconds / BIN_S))
        found = list[float]()
        for first in range(len(bins) - length, MATCH_BINS - 1, -length):  # the same time of earlier periods
            before = bins[first - MATCH_BINS : first]
            if _correlation(now, before) >= MATCH_CORRELATION:
                growth = min(max(sum(now) / sum(before), 1.0 / MOST_GROWTH), MOST_GROWTH)
                found.append(growth * max(bins[first : first + min(reach + 1, length)]))
        return fmean(found) + _NORMAL.inv_cdf(share) * pstdev(found) if found else None


def _num_bins(period_s: float) -> int:
    return max(2, round(period_s / BIN_S))


def _correlation(left: list[float], right: list[float]) -> float:
    """0 if either series is constant, or is all zero."""
    mean_left, mean_right = sum(left) / len(left), sum(right) / len(right)
    product = sum((a - mean_left) * (b - mean_right) for a, b in zip(left, right, strict=True))
    size = sum((a - mean_left) ** 2 for a in left) * sum((b - mean_right) ** 2 for b in right)
    if size <= 1e-12 or mean_right <= 0:
        return 0.0
    return product / math.sqrt(size)


@dataclass(slots=True)
class RequestShape:
    """What requests are like: lengths and cached share as fading stats, and their burstiness."""

    stats: list[float] = field(default_factory=lambda: [0.0] * 6)
    """Arrivals, tokens, squares, cached, ended, output tokens."""
    latest: list[float] = field(default_factory=lambda: [0.0] * 6)
    """The same of the last intervals, unfaded, until they have SHAPE_FEWEST requests."""
    last: float | None = None  # rate of the previous interval
    swings: float = 0.0
    counts: float = 0.0
    burstiness: float = 1.0
    is_known: bool = False

    def observe(self, seen: Interval) -> None:
        keep: float = 0.5 ** (seen.seconds / SHAPE_HALF_LIFE_S)
        new = (seen.arrivals, seen.input_tokens, seen.input_squares, seen.cached_tokens, seen.ended, seen.output_tokens)
        before, self.stats = self.stats, [old * keep + value for old, value in zip(self.stats, new, strict=True)]
        self.latest = [old + value for old, value in zip(self.latest, new, strict=True)]
        if min(self.latest[0], self.latest[4]) >= SHAPE_FEWEST:
            if self._are_others(before):
                self.stats = self.latest
            self.latest = [0.0] * len(new)
        self._swing(seen, keep)

    def _are_others(self, remembered: list[float]) -> bool:
        """Whether the latest prompts or answers are so much longer or shorter than the remembered ones that these are
        other requests, of which the remembered lengths say nothing.
        """
        arrivals, tokens, squares, _, ended, output = remembered
        if min(arrivals, ended) < SHAPE_FEWEST:
            return False
        cv2 = max(1.0, squares * arrivals / max(tokens, 1.0) ** 2 - 1.0)  # lengths of answers vary at least as much
        came, prompts, _, _, answered, answers = self.latest
        pairs = ((prompts / came, tokens / arrivals, came), (answers / answered, output / ended, answered))
        return any(
            abs(math.log(max(now, 1.0) / max(before, 1.0))) > SHAPE_SIGMAS * math.sqrt(cv2 / count)
            for now, before, count in pairs
        )

    def _swing(self, seen: Interval, keep: float) -> None:
        """Differences of neighbouring intervals: a slow change of the rate is no burst, and a jump counts as one at
        most.
        """
        rate = seen.arrivals / seen.seconds
        if self.last is not None:
            swing = ((rate - self.last) * seen.seconds) ** 2 / 2.0
            most = SWING_SIGMAS**2 * max(seen.arrivals, 1) * self.burstiness / 2.0
            self.swings = self.swings * keep + min(swing, most)
            self.counts = self.counts * keep + seen.arrivals
        self.last = rate
        if self.counts >= 1.0:
            low, high = BURST_LIMITS
            weight = self.counts / (self.counts + 100.0)  # small counts say little
            self.burstiness = min(max(1.0 + weight * (self.swings / self.counts - 1.0), low), high)

    def workload(self, rate: float) -> Workload | None:
        """Recent requests, at this rate; None before any ended."""
        arrivals, tokens, squares, cached, ended, output = self.stats
        self.is_known = self.is_known or ended >= FEWEST_ENDED
        if not self.is_known or arrivals < 1e-9 or tokens <= 0:
            return None
        mean = tokens / arrivals
        hits = cached / max(ended, 1e-9)  # per request: running requests have not reported theirs
        cv2 = max(0.0, squares / arrivals / mean**2 - 1.0) if squares > 0 else 1.0
        return Workload(
            rate=rate,
            input_tokens=max(1.0, mean),
            output_tokens=max(1.0, output / max(ended, 1e-9)),
            cached_share=min(max(hits / mean, 0.0), 0.99),
            input_cv2=min(cv2, 100.0),
            burstiness=self.burstiness,
        )


@dataclass(slots=True)
class Demand:
    """Learns from intervals, one after the other."""

    horizon_s: float  # how far ahead `expected` looks
    period_s: float  # of a repeating pattern; 0: none
    trend: RateTrend = field(default_factory=RateTrend)
    excess: ExcessMemory = field(default_factory=ExcessMemory)
    shape: RequestShape = field(default_factory=RequestShape)
    season: SeasonalPattern = field(default_factory=SeasonalPattern)

    def observe(self, seen: Interval) -> None:
        """Learn from one interval; one without length is ignored."""
        if seen.seconds <= 0:
            return
        trend = self.trend
        trend.observe(seen.arrivals, seen.seconds, self.shape.burstiness)
        self.excess.observe(trend.level, trend.deviation(0.0), seen.end_s, seen.seconds, self.horizon_s)
        self.shape.observe(seen)
        if self.period_s:
            self.season.observe(seen.end_s, seen.arrivals, seen.seconds, self.period_s)

    def expected(self, share: float = 0.5) -> float:
        """Requests per s to plan for: the maximum of the rates until `horizon_s` from now.

        share: probability that no more arrive; above a half it makes room for the level's uncertainty and drift.
        """
        ahead = self.excess.left(max(self.trend.level, self.trend.ahead(self.horizon_s)))
        ahead += _NORMAL.inv_cdf(share) * self.trend.deviation(self.horizon_s)
        seasonal = self.season.ahead(self.horizon_s, self.period_s, share) if self.period_s else None
        return max(ahead, seasonal or 0.0)
