"""What predictions learn from outcomes: a bias per worker, a margin over all workers and the error for metrics; the
lengths of outputs; and small linear models of durations, learned online and forgotten over time.

Pure: never imports torch, Ray, sockets, a clock or a random source; the caller passes the time. Memory is bounded,
whatever the load.
"""

import math
from bisect import bisect_left, insort
from collections import defaultdict, deque
from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import accumulate

GAIN = 0.15  # weight of the newest error in a worker's bias
BIAS_HALF_LIFE_S = 60.0  # of a bias, without observations
WINDOW = 128  # errors that the margin and the mean error are taken over
MIN_ERRORS = 8  # fewer give no margin
MAX_FACTOR = 16.0  # bounds of a bias: this factor and its inverse
RATIO_BOUNDS = (0.1, 0.25, 0.5, 0.67, 0.8, 0.9, 1.0, 1.1, 1.25, 1.5, 2.0, 4.0, 10.0)


class Bias:
    """One worker's factor between predicted and observed latency, forgotten exponentially.

    `floor_s` is added to both sides, so that a few milliseconds of overhead on a short prediction do not count as a
    slow worker.
    """

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
        return float(self._log * 0.5 ** (max(0.0, now_s - self._observed_at_s) / BIAS_HALF_LIFE_S))


class Errors:
    """Observed over predicted, of one quantity: the last `WINDOW`, of all sizes and of each, for margins; all of them
    for the histogram.

    Sizes are powers of two: what is over or under by a few percent for short prompts says little of long ones.
    """

    def __init__(self) -> None:
        self._windows: defaultdict[int | None, tuple[deque[float], list[float]]] = defaultdict(lambda: (deque(), []))
        self.counts = [0] * (len(RATIO_BOUNDS) + 1)
        self.total = 0.0

    def observe(self, predicted_s: float, observed_s: float) -> None:
        """Both in seconds; predictions of 0 are ignored."""
        if predicted_s <= 0 or observed_s <= 0:
            return
        ratio = observed_s / predicted_s
        self.counts[bisect_left(RATIO_BOUNDS, ratio)] += 1
        self.total += ratio
        for order, ranked in (self._windows[None], self._windows[round(math.log2(predicted_s))]):
            order.append(ratio)
            insort(ranked, ratio)
            if len(order) > WINDOW:
                ranked.pop(bisect_left(ranked, order.popleft()))

    def quantile(self, share: float, predicted_s: float = 0.0) -> float:
        """The ratio below which `share` of the last ones stayed: of those of about this size, if any is given and there
        are enough, else of all; 1.0 while there are too few.
        """
        size = round(math.log2(predicted_s)) if predicted_s > 0 else None
        for ranked in (self._windows[size][1], self._windows[None][1]):
            if len(ranked) >= MIN_ERRORS:
                return ranked[min(int(share * len(ranked)), len(ranked) - 1)]
        return 1.0

    def mean_error(self) -> float:
        """Mean of |observed - predicted| / observed over the last ones; 0 before the first."""
        ranked = self._windows[None][1]
        return sum(abs(1 - 1 / ratio) for ratio in ranked) / max(len(ranked), 1)


_WIDTH, _NUM_BUCKETS = 32, 256  # tokens; outputs of 8,192 and more share the last bucket
_KEEP = 0.995  # of the counts, per finished output: about two hundred count
PRIOR_TOKENS = 256  # mean output before any evidence
_PRIOR = [2.0 * math.exp(-bucket * _WIDTH / PRIOR_TOKENS) for bucket in range(_NUM_BUCKETS + 1)]


class LengthDistribution:
    """Lengths of finished outputs, in tokens. An output cut at `max_tokens` counts with that length."""

    def __init__(self) -> None:
        self._counts = [0.0] * _NUM_BUCKETS
        self._longer = list(_PRIOR)  # weight of the outputs longer than so many buckets
        self.mean_tokens = float(PRIOR_TOKENS)

    def observe(self, num_tokens: int) -> None:
        self._counts = [count * _KEEP for count in self._counts]
        self._counts[min(num_tokens // _WIDTH, _NUM_BUCKETS - 1)] += 1.0
        self.mean_tokens += 0.02 * (num_tokens - self.mean_tokens)
        longer = [0.0, *accumulate(reversed(self._counts))]
        longer.reverse()
        self._longer = [seen + prior for seen, prior in zip(longer, _PRIOR, strict=True)]

    def survival(self, have_tokens: float, more_tokens: float) -> float:
        """Probability in [0, 1] that an output with `have_tokens` continues for more than `more_tokens`."""
        return self._share_above(have_tokens + more_tokens) / self._share_above(have_tokens)

    def _share_above(self, tokens: float) -> float:
        place = tokens / _WIDTH
        bucket = int(place)
        if bucket >= _NUM_BUCKETS - 1:
            return self._longer[_NUM_BUCKETS - 1]
        low = self._longer[bucket]
        return low + (self._longer[bucket + 1] - low) * (place - bucket)


KEEP = 0.97  # about thirty observations count
EVIDENCE_HALF_LIFE_S = 600.0  # of evidence
PULL = 0.05  # weight of the prior, in observations


@dataclass(slots=True)
class DurationFit:
    """Seconds as a sum of non-negative coefficients times features; least relative squares, newest first.

    `scales` are typical values of the features: they set how strongly a prior holds. `prior` may change between calls:
    it is what the worker itself reports, and the whole estimate before the first observation. `keep` is the share of
    the old evidence that each observation leaves, `pull` how many observations the prior is worth. Plain data.
    """

    scales: tuple[float, ...]
    keep: float = KEEP
    pull: float = PULL
    products: list[list[float]] = field(default_factory=list)
    targets: list[float] = field(default_factory=list)
    observed_at_s: float = 0.0
    weight: float = 0.0  # number of recent observations that count

    def __post_init__(self) -> None:
        self.targets = self.targets or [0.0] * len(self.scales)
        self.products = self.products or [[0.0] * len(self.scales) for _ in self.scales]

    def observe(self, features: Sequence[float], seconds: float, prior: Sequence[float], now_s: float) -> None:
        """Learn one duration, in seconds and above 0.

        Its error counts relative to the expected duration, not the observed one: otherwise the short durations of a
        worker that gets slower would outweigh all the long ones since.
        """
        if not 0 < seconds < float("inf"):
            return
        keep = self.keep * self._left(now_s)
        costs = self.coefficients(prior, now_s)
        expected = sum(cost * feature for cost, feature in zip(costs, features, strict=True))
        unit = max(expected, seconds / 1000)
        scaled = [feature / unit for feature in features]
        for row, left in zip(self.products, scaled, strict=True):
            row[:] = [old * keep + left * right for old, right in zip(row, scaled, strict=True)]
        share = seconds / unit
        self.targets = [old * keep + share * value for old, value in zip(self.targets, scaled, strict=True)]
        self.weight = self.weight * keep + 1.0
        self.observed_at_s = now_s

    def coefficients(self, prior: Sequence[float], now_s: float) -> tuple[float, ...]:
        """Seconds per unit of each feature, as estimated now."""
        import numpy as np  # here: `kvrelay plan --help` stays fast

        left = self._left(now_s)
        expected = sum(p * scale for p, scale in zip(prior, self.scales, strict=True)) or 1.0
        active = list(range(len(self.scales)))
        while active:
            pull = {i: self.pull * (self.scales[i] / expected) ** 2 for i in active}
            matrix = [[left * self.products[i][j] + (pull[i] if i == j else 0.0) for j in active] for i in active]
            values = [left * self.targets[i] + pull[i] * prior[i] for i in active]
            solved = dict(zip(active, np.linalg.solve(matrix, values).tolist(), strict=True))
            negative = [i for i in active if solved[i] < 0]
            if not negative:
                return tuple(solved.get(i, 0.0) for i in range(len(self.scales)))
            active = [i for i in active if i not in negative]
        return tuple(prior)

    def _left(self, now_s: float) -> float:
        """The share of the evidence that has not faded."""
        return float(0.5 ** (max(0.0, now_s - self.observed_at_s) / EVIDENCE_HALF_LIFE_S))
