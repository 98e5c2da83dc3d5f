"""The rate at which entries are reused, by kind and time since the last use, learned from observed reuses. Pure."""

import math
from collections.abc import Iterable
from itertools import pairwise

_NUM_AGES = 32
_FIRST_S, _GROWTH = 1.0, 1.35  # age steps: below 1 s, then each a third longer; 3 hours in all
_EDGES = [0.0, *(_FIRST_S * _GROWTH**index for index in range(_NUM_AGES))]
_WIDTHS = [after - before for before, after in pairwise(_EDGES)]
_LOG_GROWTH = math.log(_GROWTH)
_PRIOR_SHARE, _PRIOR_DELAY_S = 0.3, 30.0  # prior: the rate falls with age, which orders entries as LRU does
_PRIOR_WEIGHT = 4.0  # of that prior, in requests
_KIND_WEIGHT = 8.0  # of the prior that kinds do not differ, in reuses

_MAX_RATIO = 0.95  # of the value at one age to the one before, past the peak
_BAND = 4  # ages that share a kind's factor
_NUM_BANDS = _NUM_AGES // _BAND

Kind = tuple[int, int]
_Rows = dict[Kind, list[float]]
_Factors = tuple[dict[int, list[float]], ...]


def _age(seconds: float) -> int:
    return 0 if seconds < _FIRST_S else min(int(math.log(seconds / _FIRST_S) / _LOG_GROWTH) + 1, _NUM_AGES - 1)


class ReuseRates:
    """Rate of reuse of kind (x, y) at age a: base[a] * factor_x * factor_y, by maximum likelihood with shrinkage.

    An interval that has not ended counts for as long as it has lasted (a Poisson likelihood with exposures), so entries
    that are never reused lower the rates from the start.
    """

    def __init__(self) -> None:
        self.num_reused = 0
        self._reuses: dict[Kind, list[float]] = {}
        self._exposure: dict[Kind, list[float]] = {}  # seconds spent at each age
        self._values: dict[Kind | None, list[float]] = {None: _values([_prior(age) for age in range(_NUM_AGES)])}

    def reused(self, kind: Kind, age_s: float) -> None:
        """An entry of this kind was reused at this age."""
        self.num_reused += 1
        self._reuses.setdefault(kind, [0.0] * _NUM_AGES)[_age(age_s)] += 1
        self.lost(kind, age_s)

    def lost(self, kind: Kind, age_s: float) -> None:
        """An entry of this kind was not reused up to this age, and is no longer watched."""
        _expose(self._exposure.setdefault(kind, [0.0] * _NUM_AGES), age_s)

    def fit(self, waiting: Iterable[tuple[Kind, float]]) -> None:
        """Fit the rates to all reports and to the entries still `waiting` for reuse: (kind, age in seconds)."""
        exposure = {kind: list(row) for kind, row in self._exposure.items()}
        for kind, age_s in waiting:
            row = exposure.get(kind)
            if row is None:
                row = exposure[kind] = [0.0] * _NUM_AGES
            _expose(row, age_s)
        none = [0.0] * _NUM_AGES
        reuses = {kind: self._reuses.get(kind, none) for kind in exposure}
        factors: _Factors = tuple({kind[axis]: [1.0] * _NUM_AGES for kind in exposure} for axis in (0, 1))
        base: list[float] = []
        for _ in range(3):
            base = _base(reuses, exposure, factors)
            for axis in (0, 1):
                _fit_axis(axis, factors, base, reuses, exposure)
        self._values = {None: _values(base)}
        for kind in exposure:
            rows = zip(base, factors[0][kind[0]], factors[1][kind[1]], strict=True)
            self._values[kind] = _values([rate * first * second for rate, first, second in rows])

    def value(self, kind: Kind | None, age_s: float) -> float:
        """Expected reuses per second of keeping an entry of this kind and age for as long as that is best."""
        values = self._values.get(kind) or self._values[None]
        age = _age(age_s)
        if age == _NUM_AGES - 1:
            return values[age] * _EDGES[-2] / max(age_s, _EDGES[-2])  # beyond the last step: older is worse
        share = (age_s - _EDGES[age]) / _WIDTHS[age]
        return values[age] + share * (values[age + 1] - values[age])


def _prior(age: int) -> float:
    return _PRIOR_SHARE / (_EDGES[age] + _WIDTHS[age] / 2 + _PRIOR_DELAY_S)


def _expose(row: list[float], age_s: float) -> None:
    last = _age(age_s)
    for age in range(last):
        row[age] += _WIDTHS[age]
    row[last] += min(age_s - _EDGES[last], _WIDTHS[last])


def _base(reuses: _Rows, exposure: _Rows, factors: _Factors) -> list[float]:
    """Rate at each age over all kinds, smoothed over neighbouring ages."""
    spent = [_PRIOR_WEIGHT * width for width in _WIDTHS]
    seen = [belief * _prior(age) for age, belief in enumerate(spent)]
    for kind, row in exposure.items():
        first, second = factors[0][kind[0]], factors[1][kind[1]]
        for age, seconds in enumerate(row):
            if seconds:
                spent[age] += seconds * first[age] * second[age]
                seen[age] += reuses[kind][age]
    rates = [math.log(one / other) for one, other in zip(seen, spent, strict=True)]
    padded = [rates[0], *rates, rates[-1]]
    return [math.exp((padded[age] + 2 * padded[age + 1] + padded[age + 2]) / 4) for age in range(_NUM_AGES)]


def _fit_axis(axis: int, factors: _Factors, base: list[float], reuses: _Rows, exposure: _Rows) -> None:
    """This axis' factors, given the base and the other's: reuses seen over reuses expected, in each band of ages."""
    seen = {level: [_KIND_WEIGHT] * _NUM_BANDS for level in factors[axis]}
    expected = {level: [_KIND_WEIGHT] * _NUM_BANDS for level in factors[axis]}
    for kind, row in exposure.items():
        other = factors[1 - axis][kind[1 - axis]]
        seen_here, expected_here = seen[kind[axis]], expected[kind[axis]]
        for age, seconds in enumerate(row):
            if seconds:
                seen_here[age // _BAND] += reuses[kind][age]
                expected_here[age // _BAND] += base[age] * other[age] * seconds
    for level in factors[axis]:
        ratios = [one / other for one, other in zip(seen[level], expected[level], strict=True)]
        factors[axis][level] = [ratios[age // _BAND] for age in range(_NUM_AGES)]


def _values(rates: list[float]) -> list[float]:
    """For each age a: max over later ages t of P(reuse before t) / E[min(time until reuse, t)]."""
    ends = [1 - math.exp(-rate * width) for rate, width in zip(rates, _WIDTHS, strict=True)]
    values = []
    for first in range(_NUM_AGES):
        alive, reused, spent, best = 1.0, 0.0, 0.0, 0.0
        for age in range(first, _NUM_AGES):
            ending = alive * ends[age]
            reused += ending
            spent += ending / rates[age]
            alive -= ending
            best = max(best, reused / spent)
        values.append(best)
    peak = values.index(max(values))
    for age in range(peak + 1, _NUM_AGES):  # a rise after the peak is noise from few reuses: fall back to LRU's order
        values[age] = min(values[age], values[age - 1] * _MAX_RATIO)
    return values
