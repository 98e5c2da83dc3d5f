"""What load is to be expected in the next minutes. Pure: times come with what was seen.

Level and damped trend (Holt; Gardner and McKenzie's damping). How much of a surprise they take up follows from how large the noise
of so few arrivals is (Kalman's gain for a level that wanders; Benedict and Bordner's for the trend): a rate of a few a minute is
averaged over minutes, one of hundreds followed at once. Where surprises add up to what is out of all proportion to the noise (Page's
test), in one interval or several, the level begins anew there. Of what is above the usual level, so much is planned for as was left of
such excesses before. A daily pattern is used once the history shows it (the last hours went as the same hours of the day before);
what requests are like is remembered over some minutes.

Sources: C. C. Holt (1957); E. S. Gardner and E. McKenzie, "Forecasting trends in time series" (1985); R. E. Kalman (1960); T. R.
Benedict and G. W. Bordner, "Synthesis of an optimal set of radar track-while-scan smoothing equations" (1962); E. S. Page,
"Continuous inspection schemes" (1954); F. J. Anscombe, "The transformation of Poisson, binomial and negative-binomial data" (1948).
"""

import math
from collections import deque
from dataclasses import dataclass
from statistics import NormalDist

from kvrelay.router.planning.types import Interval, Workload

VOLATILITY = 0.07  # deviation of what a rate changes by in a minute, as a share of it
DAMPING = 0.95  # of the trend, for each interval ahead
SLACK_SIGMAS = 0.5  # of each surprise, that is forgiven;
CHANGE_SIGMAS = 8.0  # what is not may add up to this: noise alone does so once in some 20,000 intervals
SWING_SIGMAS = 4.0  # of a look's count against the one before it: more tells of a jump, not of burstiness
SHAPE_HALF_LIFE_S = 600.0
FEWEST_ENDED = 5  # answers, before anything is said of what requests are like
BIN_S = 300.0  # of the seasonal history
MATCH_BINS = 24  # that must have gone as a period ago
MATCH_CORRELATION = 0.7
STAY_HALF_LIFE_S = 4 * 3600.0  # of what is remembered of how excesses went on
STAY_SIGMAS = 2.0  # a level so far above the usual one is an excess
STAY_MOST = 2.0  # times the usual level: more counts as so much
STAY_BELIEF = 300.0  # an excess of the usual level's size that stayed for so many seconds: believed before any was seen
MOST_GROWTH = 2.0  # of a period over the one before, and its inverse
BURST_LIMITS = (0.5, 32.0)
_NORMAL = NormalDist()


@dataclass(frozen=True, slots=True)
class TrendState:
    """A rate's level and slope, and the length of an interval."""

    level: float
    slope: float
    seconds: float
    variance: float
    runs: tuple[tuple[float, float, int], ...]
    is_new: bool


@dataclass(frozen=True, slots=True)
class StayState:
    """The usual level, (time, usual level, excess) of late, and sums over excesses that have been seen to their end."""

    usual: float | None
    recent: tuple[tuple[float, float, float], ...]
    then: float
    later: float


@dataclass(frozen=True, slots=True)
class ShapeState:
    """Sums that fade, and the swings of the rate."""

    sums: tuple[float, ...]
    last: float | None
    swings: float
    counts: float
    burstiness: float
    is_known: bool


@dataclass(frozen=True, slots=True)
class SeasonState:
    """Bins of the history, and the one that fills: when it began, and what is in it."""

    bins: tuple[float, ...]
    began_ago_s: float | None
    sum: float
    seconds: float


@dataclass(frozen=True, slots=True)
class DemandState:
    """What has been learnt, as plain data. Times are seconds before the moment it was taken."""

    trend: TrendState
    stay: StayState
    shape: ShapeState
    season: SeasonState | None


class Demand:
    """Learns from intervals; told one after the other."""

    def __init__(self, *, horizon_s: float, period_s: float) -> None:
        """`horizon_s`: how far ahead `expected` looks; `period_s`: of a pattern that may repeat, 0: none is looked for."""
        self._horizon_s = horizon_s
        self._rate, self._stay = _Trend(), _Stay(horizon_s)
        self._shape = _Shape()
        self._season = _Season(period_s) if period_s > 0 else None

    def observe(self, seen: Interval) -> None:
        """One interval. Nothing is learnt from one without length."""
        if seen.seconds <= 0:
            return
        self._rate.observe(seen.arrivals, seen.seconds, self._shape.burstiness)
        self._stay.observe(self._rate.level, self._rate.deviation(0.0), seen.end_s, seen.seconds)
        self._shape.observe(seen)
        if self._season is not None:
            self._season.observe(seen.end_s, seen.arrivals, seen.seconds)

    def state(self, now_s: float) -> DemandState:
        """To go on from elsewhere."""
        season = self._season.state(now_s) if self._season is not None else None
        return DemandState(self._rate.state(), self._stay.state(now_s), self._shape.state(), season)

    def resume(self, state: DemandState, now_s: float) -> None:
        """Go on from there; a season only where the period is the same."""
        self._rate.resume(state.trend)
        self._stay.resume(state.stay, now_s)
        self._shape.resume(state.shape)
        if self._season is not None and state.season is not None:
            self._season.resume(state.season, now_s)

    def expected(self, share: float = 0.5) -> float:
        """Requests per s, `horizon_s` from now or on the way there, whichever is more.

        share: chance that no more come; more than a half makes room for what is not known of the level, and for its wandering
        until then.
        """
        ahead = self._stay.left(max(self._rate.level, self._rate.ahead(self._horizon_s)))
        ahead += _NORMAL.inv_cdf(share) * self._rate.deviation(self._horizon_s)
        seasonal = self._season.ahead(self._horizon_s) if self._season is not None else None
        return max(ahead, seasonal or 0.0)

    @property
    def is_seasonal(self) -> bool:
        """Whether the history shows the period."""
        return self._season is not None and self._season.is_shown

    def workload(self, rate: float) -> Workload | None:
        """Requests as they have been lately; None before the first."""
        return self._shape.workload(rate)


class _Trend:
    """Level and trend of a rate, each moved by so much of a surprise as it is unlikely to be noise."""

    def __init__(self) -> None:
        self.level = 0.0
        self._slope = 0.0  # per interval
        self._seconds = 0.0
        self._variance = 0.0  # of the level
        self._runs = (_Run(1.0), _Run(-1.0))
        self._is_new = True

    def observe(self, arrivals: int, seconds: float, burstiness: float) -> None:
        rate, self._seconds = arrivals / seconds, seconds
        if self._is_new:
            self._is_new = False
            self._begin(rate, max(rate, 1.0 / seconds) * burstiness / seconds)
            return
        foreseen = max(0.0, self.level + DAMPING * self._slope)
        noise = max(foreseen, 1.0 / seconds) * burstiness / seconds  # variance of a Poisson number, widened
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
        settled = _settled_gain(drift / noise)  # while the level is uncertain, a surprise says nothing of the trend
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
        """Of the level so long from now."""
        return math.sqrt(self._variance + (VOLATILITY * self.level) ** 2 * seconds / 60.0)

    def ahead(self, seconds: float) -> float:
        if self._seconds <= 0:
            return self.level
        steps = seconds / self._seconds
        reach = DAMPING * (1.0 - math.pow(DAMPING, steps)) / (1.0 - DAMPING)
        return max(0.0, self.level + self._slope * reach)


class _Stay:
    """What is left of a sudden excess a horizon later: learnt from those that were (the slope of a regression through 0).

    Siblings that come together are gone before a worker that is started for them serves; a step of the load stays.
    """

    def __init__(self, horizon_s: float) -> None:
        self._horizon_s = horizon_s
        self._usual: float | None = None  # the level, slowly: what an excess is over
        self._recent: deque[tuple[float, float, float]] = deque()  # (time, usual level, excess), a horizon of them
        self._then = self._later = 0.0  # excess squared; excess times what was left of it; over the usual level, s

    @property
    def share(self) -> float:
        """Of an excess, a horizon later."""
        return min(max((self._later + STAY_BELIEF) / (self._then + STAY_BELIEF), 0.0), 1.0)

    def left(self, level: float) -> float:
        """Of this level, a horizon later."""
        if self._usual is None or level <= self._usual:
            return level
        return self._usual + self.share * (level - self._usual)

    def observe(self, level: float, deviation: float, now_s: float, seconds: float) -> None:
        if self._usual is None:
            self._usual = level
        while self._recent and self._recent[0][0] <= now_s - self._horizon_s:
            _, usual, excess = self._recent.popleft()
            most = STAY_MOST * usual
            then = min(excess, most) / usual
            later = min(max(level - usual, 0.0), excess, most) / usual
            self._then += then * then * seconds
            self._later += then * later * seconds
        keep = 0.5 ** (seconds / STAY_HALF_LIFE_S)
        self._then, self._later = keep * self._then, keep * self._later
        self._usual += (1.0 - 0.5 ** (seconds / max(self._horizon_s, seconds))) * (level - self._usual)
        excess = level - self._usual
        if self._usual > 0.0 and excess > STAY_SIGMAS * deviation:
            self._recent.append((now_s, self._usual, excess))

    def state(self, now_s: float) -> StayState:
        recent = tuple((now_s - at_s, usual, excess) for at_s, usual, excess in self._recent)
        return StayState(self._usual, recent, self._then, self._later)

    def resume(self, state: StayState, now_s: float) -> None:
        self._usual, self._then, self._later = state.usual, state.then, state.later
        self._recent = deque((now_s - ago_s, usual, excess) for ago_s, usual, excess in state.recent)


def _settled_gain(ratio: float) -> float:
    """Of the level, in the long run, where it wanders by so much of the noise's variance in each interval."""
    return (math.sqrt(ratio * ratio + 4.0 * ratio) - ratio) / 2.0


def _sigmas(count: int, expected: float) -> float:
    """How far a Poisson number is from what was expected, in deviations; also of small ones, whose tails are long (Anscombe)."""
    return 2.0 * (math.sqrt(count + 0.375) - math.sqrt(expected + 0.375))


class _Run:
    """Surprises to one side that add up: a change that no single interval shows (Page's cumulative sum)."""

    __slots__ = ("_sign", "number", "rates", "sum")

    def __init__(self, sign: float) -> None:
        self._sign = sign
        self.clear()

    def clear(self) -> None:
        self.sum = self.rates = 0.0
        self.number = 0

    def observe(self, sigmas: float, rate: float) -> tuple[float, int] | None:
        """The mean rate since the change and over how many intervals, once it is out of all proportion to noise."""
        self.sum += self._sign * sigmas - SLACK_SIGMAS
        if self.sum <= 0.0:
            self.clear()
            return None
        self.rates += rate
        self.number += 1
        return (self.rates / self.number, self.number) if self.sum > CHANGE_SIGMAS else None


class _Shape:
    """What requests are like: sums that fade, and how bursty they come."""

    def __init__(self) -> None:
        self._sums = [0.0] * 6  # arrivals, tokens, squares, cached, ended, output tokens
        self._last: float | None = None  # rate of the interval before
        self._swings = self._counts = 0.0
        self.burstiness = 1.0
        self._is_known = False

    def state(self) -> ShapeState:
        return ShapeState(
            tuple(self._sums), self._last, self._swings, self._counts, self.burstiness, self._is_known,
        )  # fmt: skip

    def resume(self, state: ShapeState) -> None:
        self._sums, self._last = list(state.sums), state.last
        self._swings, self._counts, self.burstiness = state.swings, state.counts, state.burstiness
        self._is_known = state.is_known

    def observe(self, seen: Interval) -> None:
        keep: float = 0.5 ** (seen.seconds / SHAPE_HALF_LIFE_S)
        new = (seen.arrivals, seen.input_tokens, seen.input_squares, seen.cached_tokens, seen.ended, seen.output_tokens)
        self._sums = [old * keep + value for old, value in zip(self._sums, new, strict=True)]
        self._swing(seen, keep)

    def _swing(self, seen: Interval, keep: float) -> None:
        """Differences of neighbours: a slow change of the rate is no burst, and a jump one at most."""
        rate = seen.arrivals / seen.seconds
        if self._last is not None:
            swing = ((rate - self._last) * seen.seconds) ** 2 / 2.0
            most = SWING_SIGMAS**2 * max(seen.arrivals, 1) * self.burstiness / 2.0
            self._swings = self._swings * keep + min(swing, most)
            self._counts = self._counts * keep + seen.arrivals
        self._last = rate
        if self._counts >= 1.0:
            low, high = BURST_LIMITS
            weight = self._counts / (self._counts + 100.0)  # a few counts say little
            self.burstiness = min(max(1.0 + weight * (self._swings / self._counts - 1.0), low), high)

    def workload(self, rate: float) -> Workload | None:
        arrivals, tokens, squares, cached, ended, output = self._sums
        self._is_known = self._is_known or ended >= FEWEST_ENDED
        if not self._is_known or arrivals < 1e-9 or tokens <= 0:
            return None
        mean = tokens / arrivals
        hits = cached / max(ended, 1e-9)  # of a request: those who wait have not said theirs yet
        cv2 = max(0.0, squares / arrivals / mean**2 - 1.0) if squares > 0 else 1.0
        return Workload(
            rate=rate, input_tokens=max(1.0, mean), output_tokens=max(1.0, output / max(ended, 1e-9)),
            cached_share=min(max(hits / mean, 0.0), 0.99), input_cv2=min(cv2, 100.0), burstiness=self.burstiness,
        )  # fmt: skip


class _Season:
    """Mean rates in bins of BIN_S, over two periods at most."""

    def __init__(self, period_s: float) -> None:
        self._length = max(2, round(period_s / BIN_S))
        self._bins: deque[float] = deque(maxlen=2 * self._length)
        self._start_s: float | None = None  # of the bin that fills
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
