"""Small linear models of durations, learned online and forgotten over time. Pure.

Never imports torch, Ray, sockets, a clock or a random source: the caller passes the time.
"""

from collections.abc import Sequence
from dataclasses import dataclass

KEEP = 0.97  # about thirty observations count
HALF_LIFE_S = 600.0  # of evidence
PULL = 0.05  # weight of the prior, in observations


@dataclass(frozen=True, slots=True)
class FitState:
    """The state of a fit, as plain data."""

    products: tuple[tuple[float, ...], ...]
    targets: tuple[float, ...]
    weight: float
    observed_ago_s: float


class DurationFit:
    """Seconds as a sum of non-negative coefficients times features; least relative squares, newest first.

    `scales` are typical values of the features: they set how strongly a prior holds. `prior` may change between calls:
    it is what the worker itself reports, and the whole estimate before the first observation. `keep` is the share of
    the old evidence that each observation leaves, `pull` how many observations the prior is worth.
    """

    __slots__ = ("_keep", "_observed_at_s", "_products", "_pull", "_scales", "_targets", "weight")

    def __init__(self, scales: Sequence[float], *, keep: float = KEEP, pull: float = PULL) -> None:
        size = len(scales)
        self._keep, self._pull = keep, pull
        self._scales = tuple(scales)
        self._products = [[0.0] * size for _ in range(size)]
        self._targets = [0.0] * size
        self._observed_at_s = 0.0
        self.weight = 0.0  # number of recent observations that count

    def observe(self, features: Sequence[float], seconds: float, prior: Sequence[float], now_s: float) -> None:
        """Learn one duration, in seconds and above 0.

        Its error counts relative to the expected duration, not the observed one: otherwise the short durations of a
        worker that gets slower would outweigh all the long ones since.
        """
        if not 0 < seconds < float("inf"):
            return
        keep = self._keep * self._left(now_s)
        costs = self.coefficients(prior, now_s)
        expected = sum(cost * feature for cost, feature in zip(costs, features, strict=True))
        unit = max(expected, seconds / 1000)
        scaled = [feature / unit for feature in features]
        for row, left in zip(self._products, scaled, strict=True):
            row[:] = [old * keep + left * right for old, right in zip(row, scaled, strict=True)]
        share = seconds / unit
        self._targets = [old * keep + share * value for old, value in zip(self._targets, scaled, strict=True)]
        self.weight = self.weight * keep + 1.0
        self._observed_at_s = now_s

    def coefficients(self, prior: Sequence[float], now_s: float) -> tuple[float, ...]:
        """Seconds per unit of each feature, as estimated now."""
        left = self._left(now_s)
        expected = sum(p * scale for p, scale in zip(prior, self._scales, strict=True)) or 1.0
        active = list(range(len(self._scales)))
        while active:
            pull = {i: self._pull * (self._scales[i] / expected) ** 2 for i in active}
            matrix = [[left * self._products[i][j] + (pull[i] if i == j else 0.0) for j in active] for i in active]
            values = [left * self._targets[i] + pull[i] * prior[i] for i in active]
            solved = dict(zip(active, _solve(matrix, values), strict=True))
            negative = [i for i in active if solved[i] < 0]
            if not negative:
                return tuple(solved.get(i, 0.0) for i in range(len(self._scales)))
            active = [i for i in active if i not in negative]
        return tuple(prior)

    def state(self, now_s: float) -> FitState:
        """For `resume` elsewhere."""
        rows = tuple(map(tuple, self._products))
        return FitState(rows, tuple(self._targets), self.weight, now_s - self._observed_at_s)

    def resume(self, state: FitState, now_s: float) -> None:
        """Continue from the state of another fit with the same features."""
        assert len(state.targets) == len(self._scales)
        self._products, self._targets = [list(row) for row in state.products], list(state.targets)
        self.weight, self._observed_at_s = state.weight, now_s - state.observed_ago_s

    def _left(self, now_s: float) -> float:
        """The share of the evidence that has not faded."""
        return float(0.5 ** (max(0.0, now_s - self._observed_at_s) / HALF_LIFE_S))


def _solve(matrix: list[list[float]], values: list[float]) -> list[float]:
    """Gaussian elimination of a small, symmetric, positive definite system."""
    size = len(values)
    rows = [[*row, value] for row, value in zip(matrix, values, strict=True)]
    for column in range(size):
        pivot = max(range(column, size), key=lambda r: abs(rows[r][column]))
        rows[column], rows[pivot] = rows[pivot], rows[column]
        for lower in range(column + 1, size):
            share = rows[lower][column] / rows[column][column]
            rows[lower] = [x - share * y for x, y in zip(rows[lower], rows[column], strict=True)]
    solved = [0.0] * size
    for column in reversed(range(size)):
        known = sum(rows[column][right] * solved[right] for right in range(column + 1, size))
        solved[column] = (rows[column][size] - known) / rows[column][column]
    return solved
