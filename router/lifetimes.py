"""How long outputs get: the chance that a sequence with so many tokens goes on for so many more. Pure.

Counts of finished outputs in buckets that grow by a quarter, old ones fading: bounded, whatever the load.
"""

import math
from itertools import accumulate

_GROWTH = math.log(1.25)
_NUM_BUCKETS = 64  # up to 1.25**64 tokens, 1.6 million
_KEEP = 0.995  # of the old counts at each finished output: about two hundred count
PRIOR_TOKENS = 256  # mean output before there is any evidence
_PRIOR_WEIGHT = 2.0


def _bucket(num_tokens: int) -> int:
    return min(max(0, round(math.log(max(num_tokens, 1)) / _GROWTH)), _NUM_BUCKETS - 1)


class OutputLengths:
    """The lengths of finished outputs, tokens. One cut at its `max_tokens` counts as so long: it ended there."""

    __slots__ = ("_counts", "_longer", "mean_tokens")

    def __init__(self) -> None:
        self._counts = [0.0] * _NUM_BUCKETS
        self.mean_tokens = float(PRIOR_TOKENS)
        self._longer: list[float] | None = None

    def observe(self, num_tokens: int) -> None:
        self._counts = [count * _KEEP for count in self._counts]
        self._counts[_bucket(num_tokens)] += 1.0
        self.mean_tokens += (1 - _KEEP) * 4 * (num_tokens - self.mean_tokens)
        self._longer = None

    def survival(self, have_tokens: float, more_tokens: float) -> float:
        """The chance that an output with `have_tokens` is still not over `more_tokens` later; in 0..1."""
        now, then = self._share_above(have_tokens), self._share_above(have_tokens + more_tokens)
        return then / now if now > 0 else 0.0

    def _share_above(self, tokens: float) -> float:
        """Weight of the outputs longer than `tokens`: what was seen, with an exponential tail as the prior."""
        if self._longer is None:
            self._longer = [*reversed([*accumulate(reversed(self._counts))]), 0.0]
        place = math.log(max(tokens, 1.0)) / _GROWTH + 0.5
        low = min(int(place), _NUM_BUCKETS - 1)
        share = min(place - low, 1.0)
        seen = self._longer[low] * (1 - share) + self._longer[low + 1] * share
        return seen + _PRIOR_WEIGHT * math.exp(-tokens / PRIOR_TOKENS)
