"""The load to expect in the next minutes. Pure: times come with the observations.

The rate's level and trend (rate_trend.py); of what exceeds the usual level, as much as was left of earlier excesses
(excess.py); a daily pattern, once the history shows it: the last hours went as the same hours of the day before
(season.py); what requests are like is averaged over some minutes (request_shape.py).
"""

from dataclasses import dataclass
from statistics import NormalDist

from kvrelay.router.planning.excess import ExcessMemory, ExcessState
from kvrelay.router.planning.rate_trend import RateTrend, TrendState
from kvrelay.router.planning.request_shape import RequestShape, ShapeState
from kvrelay.router.planning.season import SeasonalPattern, SeasonState
from kvrelay.router.planning.types import Interval, Workload

_NORMAL = NormalDist()


@dataclass(frozen=True, slots=True)
class DemandState:
    """The learned state, as plain data. Times are seconds before the moment it was taken."""

    trend: TrendState
    stay: ExcessState
    shape: ShapeState
    season: SeasonState | None


class Demand:
    """Learns from intervals, one after the other."""

    def __init__(self, *, horizon_s: float, period_s: float) -> None:
        """`horizon_s`: how far ahead `expected` looks; `period_s`: period of a repeating pattern, 0: none."""
        self._horizon_s = horizon_s
        self._rate, self._stay = RateTrend(), ExcessMemory(horizon_s)
        self._shape = RequestShape()
        self._season = SeasonalPattern(period_s) if period_s > 0 else None

    def observe(self, seen: Interval) -> None:
        """Learn from one interval; one without length is ignored."""
        if seen.seconds <= 0:
            return
        self._rate.observe(seen.arrivals, seen.seconds, self._shape.burstiness)
        self._stay.observe(self._rate.level, self._rate.deviation(0.0), seen.end_s, seen.seconds)
        self._shape.observe(seen)
        if self._season is not None:
            self._season.observe(seen.end_s, seen.arrivals, seen.seconds)

    def state(self, now_s: float) -> DemandState:
        """The state, for `resume` elsewhere."""
        season = self._season.state(now_s) if self._season is not None else None
        return DemandState(self._rate.state(), self._stay.state(now_s), self._shape.state(), season)

    def resume(self, state: DemandState, now_s: float) -> None:
        """Continue from that state; its seasonal pattern is used only if the period is the same."""
        self._rate.resume(state.trend)
        self._stay.resume(state.stay, now_s)
        self._shape.resume(state.shape)
        if self._season is not None and state.season is not None:
            self._season.resume(state.season, now_s)

    def expected(self, share: float = 0.5) -> float:
        """Requests per s to plan for: the maximum of the rates until `horizon_s` from now.

        share: probability that no more arrive; above a half it makes room for the level's uncertainty and drift.
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
        """Recent requests, at this rate; None before any ended."""
        return self._shape.workload(rate)
