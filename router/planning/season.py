"""The course of a day, learned from past ones: rates in bins of BIN_S, of the planner's own days and of a file's. Pure.

Times are seconds since the epoch; a period begins at 0, so that days begin at midnight UTC.
"""

import math
import operator
from dataclasses import dataclass, field
from statistics import median

BIN_S = 300.0
DAYS = 28  # that are remembered
WEEK = 7
FEWEST_ALIKE = 2  # past days of this weekday from which the others no longer count


@dataclass(slots=True)
class Season:
    """Requests per s in consecutive bins, the last one still filling; NaN: not observed."""

    first: int = 0  # number of the first bin; bin 0 begins at time 0
    rates: list[float] = field(default_factory=list)
    filled_s: float = 0.0  # of the last bin

    def observe(self, start_s: float, end_s: float, requests: float, period_s: float) -> None:
        """Requests that arrived in a span behind those observed, evenly; what lies between is unknown."""
        if not self.rates:
            self.first = math.floor(start_s / BIN_S)
            self.rates, self.filled_s = [0.0], start_s - self.first * BIN_S
        rate, length = requests / (end_s - start_s), num_bins(period_s)
        self._fill(start_s, math.nan, DAYS * length)
        self._fill(end_s, rate, DAYS * length)

    @property
    def _end_s(self) -> float:
        return (self.first + len(self.rates) - 1) * BIN_S + self.filled_s

    def _fill(self, until_s: float, rate: float, most: int) -> None:
        if until_s - self._end_s > most * BIN_S:  # nothing of before is of use
            self.first, self.rates, self.filled_s = math.floor(until_s / BIN_S), [0.0], 0.0
        while (left_s := until_s - self._end_s) > 0.0:
            if self.filled_s >= BIN_S:
                self.rates.append(0.0)
                self.filled_s = 0.0
            step_s = min(left_s, BIN_S - self.filled_s)
            self.rates[-1] += rate * step_s / BIN_S
            self.filled_s += step_s
            if BIN_S - self.filled_s < 1e-6:
                self.filled_s = BIN_S
        extra = max(0, len(self.rates) - most)
        del self.rates[:extra]
        self.first += extra

    def after(self, older: "Season") -> "Season":
        """This one, with what the other one knows of the time before."""
        missing = self.first - older.first
        if not self.rates or not older.rates or missing <= 0:
            return self if self.rates else older
        before = older.rates[:missing]
        gap = [math.nan] * (missing - len(before))
        return Season(older.first, before + gap + self.rates, self.filled_s)

    def usual(self, at_s: float, period_s: float) -> float | None:
        """The rate that earlier periods had then: the median, of this weekday once there are enough; None: unknown."""
        place = at_s / BIN_S - 0.5
        number = math.floor(place)
        before, after = self._usual_in(number, period_s), self._usual_in(number + 1, period_s)
        return None if before is None or after is None else before + (place - number) * (after - before)

    def course(self, now_s: float, horizon_s: float, memory_s: float, period_s: float) -> tuple[float, float] | None:
        """What past periods had now and a horizon later, over their mean of the time before (fading over `memory_s`).

        None: they are unknown, or were without requests.
        """
        weights = [math.exp(-step * BIN_S / memory_s) for step in range(math.ceil(3 * memory_s / BIN_S))]
        before = [self.usual(now_s - step * BIN_S, period_s) for step in range(len(weights))]
        ahead = self.usual(now_s + horizon_s, period_s)
        known = [rate for rate in before if rate is not None]
        if ahead is None or len(known) < len(before) or sum(known) <= 0.0:
            return None
        mean = sum(map(operator.mul, weights, known)) / sum(weights)
        return known[0] / mean, ahead / mean

    def _usual_in(self, number: int, period_s: float) -> float | None:
        length, known = num_bins(period_s), len(self.rates) - 1
        found = {
            ago: self.rates[place]
            for ago in range(1, DAYS + 1)
            if 0 <= (place := number - ago * length - self.first) < known and math.isfinite(self.rates[place])
        }
        alike = [rate for ago, rate in found.items() if ago % WEEK == 0]
        return median(alike if len(alike) >= FEWEST_ALIKE else found.values()) if found else None


def num_bins(period_s: float) -> int:
    return max(2, round(period_s / BIN_S))
