"""The load to expect in the next minutes. Pure: times come with the observations.

The rate's level and trend; how far the rate stays away from its usual level, how far it goes the way of past days
(season.py), and how wrong that has been, each learned from what came of earlier forecasts; what requests are like is
averaged over some minutes. All is plain data, which outlives the process that learned it (PlannerState).
"""

import math
from dataclasses import dataclass, field
from statistics import NormalDist
from typing import NamedTuple

from kvrelay.router.planning.season import Season
from kvrelay.router.planning.types import Interval, Workload

VOLATILITY = 0.07  # standard deviation of a rate's change in a minute, as a share of the rate
DAMPING = 0.95  # of the trend, per interval ahead
SLACK_SIGMAS = 0.5  # part of each surprise that the change test ignores
CHANGE_SIGMAS = 8.0  # sum of the rest that is a change: noise alone reaches it once in some 20,000 intervals

USUAL_HORIZONS = 10.0  # over which the usual level is averaged
OUTLOOK_HALF_LIFE_S = 2 * 3600.0  # of the memory of past forecasts
CAME_S = 60.0  # over which what came is counted
MOST_RATIO = 2.0  # times the usual level: larger differences count as so much
EXCESS_BELIEF = (1.0, 0.3)  # prior: the share of an excess that stays, and its weight as a sum of squares
SEASON_BELIEF = (0.5, 0.2)  # the same of a change that past days had
ERROR_BELIEF = (0.2, 3.0)  # prior: deviation of a forecast, as a share of the usual level, and its weight in horizons

SHAPE_HALF_LIFE_S = 600.0
SHAPE_SIGMAS = 6.0  # of an interval's mean length, as a logarithm, from the remembered one: other requests have come
SHAPE_FEWEST = 10  # requests from which an interval's mean length says that
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


class Guess(NamedTuple):
    """A forecast whose time has not come yet: times the usual level then."""

    at_s: float
    usual: float
    excess: float
    season: float
    ratio: float


@dataclass(slots=True)
class Outlook:
    """How a rate goes on, a horizon later: a regression on its excess over the usual level and on the change that past
    days had, and the deviation of what came from that.

    Requests that arrive together are gone before a worker started for them serves, a step of the load stays, and a load
    that jumps again and again needs workers that are there already: which of them it is, is learned. So is whether this
    day goes as past ones.
    """

    usual: float | None = None  # the slowly averaged level
    guesses: list[Guess] = field(default_factory=list)  # of the last horizon
    came: list[tuple[float, float, float]] = field(default_factory=list)  # (end, seconds, arrivals) of CAME_S
    moments: list[float] = field(default_factory=lambda: [0.0] * 5)
    """Sums of excess², excess x season, season², excess x what came, season x what came."""
    errors: float = ERROR_BELIEF[0] ** 2 * ERROR_BELIEF[1]
    weight: float = ERROR_BELIEF[1]

    def observe(
        self, trend: RateTrend, days: tuple[float, float] | None, seen: Interval, burstiness: float, horizon_s: float
    ) -> None:
        """Learn from forecasts whose time has come, and make the next one.

        Args:
            days: the rates that past days had now and a horizon later, times their usual level; None: unknown.
        """
        if self.usual is None:
            self.usual = trend.level
        now_s, seconds = seen.end_s, seen.seconds
        self.came = [one for one in self.came if one[0] > now_s - CAME_S] + [(now_s, seconds, float(seen.arrivals))]
        keep = 0.5 ** (seconds / OUTLOOK_HALF_LIFE_S)
        self.moments = [keep * one for one in self.moments]
        self.errors, self.weight = keep * self.errors, keep * self.weight
        rate = sum(one[2] for one in self.came) / sum(one[1] for one in self.came)
        while self.guesses and self.guesses[0].at_s <= now_s - horizon_s - CAME_S:
            self._learn(self.guesses.pop(0), rate, burstiness, seconds / horizon_s)
        self.usual += (1.0 - math.exp(-seconds / max(USUAL_HORIZONS * horizon_s, seconds))) * (trend.level - self.usual)
        if self.usual > 0.0:
            now, ahead = days or (1.0, 1.0)
            excess, season = trend.ahead(horizon_s) / self.usual - now, ahead - 1.0
            stays, follows = self._shares()
            ratio = max(0.0, 1.0 + stays * excess + follows * season)
            self.guesses.append(Guess(now_s, self.usual, excess, season, ratio))

    def _learn(self, guess: Guess, rate: float, burstiness: float, horizons: float) -> None:
        came = rate / guess.usual - 1.0
        count = guess.usual * CAME_S  # few requests say little
        weight = horizons * count / (count + burstiness)
        scale = min(1.0, MOST_RATIO / max(abs(guess.excess), abs(guess.season), abs(came), 1e-9))
        excess, season, then = scale * guess.excess, scale * guess.season, scale * came
        new = (excess * excess, excess * season, season * season, excess * then, season * then)
        self.moments = [old + weight * value for old, value in zip(self.moments, new, strict=True)]
        error = min(abs(came + 1.0 - guess.ratio), MOST_RATIO)
        noise = burstiness * rate / CAME_S / guess.usual**2  # of the count alone
        self.errors += weight * (error * error - noise)
        self.weight += weight

    def _shares(self) -> tuple[float, float]:
        """Of an excess that stays, and of past days' change that comes: least squares from the priors."""
        excess2, both, season2, excess_came, season_came = self.moments
        (stays, trust), (follows, faith) = EXCESS_BELIEF, SEASON_BELIEF
        excess2, season2 = excess2 + trust, season2 + faith
        excess_came, season_came = excess_came + trust * stays, season_came + faith * follows
        size = excess2 * season2 - both * both
        found = (excess_came * season2 - season_came * both) / size, (season_came * excess2 - excess_came * both) / size
        return min(max(found[0], 0.0), 1.0), min(max(found[1], 0.0), 1.0)

    def ahead(self, level: float) -> float:
        """The latest forecast; `level` before there is one."""
        return self.guesses[-1].ratio * self.guesses[-1].usual if self.guesses else level

    @property
    def deviation(self) -> float:
        """Of what comes from what is forecast, in requests per s."""
        return (self.usual or 0.0) * math.sqrt(max(self.errors, 0.0) / self.weight)


@dataclass(slots=True)
class RequestShape:
    """What requests are like: lengths and cached share as fading stats, and their burstiness."""

    stats: list[float] = field(default_factory=lambda: [0.0] * 6)
    """Arrivals, tokens, squares, cached, ended, output tokens."""
    last: float | None = None  # rate of the previous interval
    swings: float = 0.0
    counts: float = 0.0
    burstiness: float = 1.0
    is_known: bool = False

    def observe(self, seen: Interval) -> None:
        keep: float = 0.5 ** (seen.seconds / SHAPE_HALF_LIFE_S)
        new = (seen.arrivals, seen.input_tokens, seen.input_squares, seen.cached_tokens, seen.ended, seen.output_tokens)
        if self._are_others(seen):
            self.stats = [0.0] * len(new)
        self.stats = [old * keep + value for old, value in zip(self.stats, new, strict=True)]
        self._swing(seen, keep)

    def _are_others(self, seen: Interval) -> bool:
        """Whether prompts or answers are so much longer or shorter than the remembered ones that these are other
        requests, of which the remembered lengths say nothing.
        """
        arrivals, tokens, squares, _, ended, output = self.stats
        if min(seen.arrivals, seen.ended) < SHAPE_FEWEST or min(arrivals, ended) < SHAPE_FEWEST:
            return False
        cv2 = max(1.0, squares * arrivals / max(tokens, 1.0) ** 2 - 1.0)  # lengths of answers vary at least as much
        pairs = (
            (seen.input_tokens / seen.arrivals, tokens / arrivals, seen.arrivals),
            (seen.output_tokens / seen.ended, output / ended, seen.ended),
        )
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
    outlook: Outlook = field(default_factory=Outlook)
    shape: RequestShape = field(default_factory=RequestShape)
    season: Season = field(default_factory=Season)

    def observe(self, seen: Interval) -> None:
        """Learn from one interval; one without length is ignored."""
        if seen.seconds <= 0:
            return
        self.trend.observe(seen.arrivals, seen.seconds, self.shape.burstiness)
        days = None
        if self.period_s:
            self.season.observe(seen.start_s, seen.end_s, seen.arrivals, self.period_s)
            days = self.season.course(seen.end_s, self.horizon_s, USUAL_HORIZONS * self.horizon_s, self.period_s)
        self.outlook.observe(self.trend, days, seen, self.shape.burstiness, self.horizon_s)
        self.shape.observe(seen)

    def expected(self, share: float = 0.5) -> float:
        """Requests per s to plan for, `horizon_s` from now.

        share: probability that no more arrive; above a half it makes room for what is not known of the level, and for
        what forecasts have been wrong by.
        """
        ahead = self.outlook.ahead(self.trend.level)
        return ahead + _NORMAL.inv_cdf(share) * max(self.trend.deviation(self.horizon_s), self.outlook.deviation)
