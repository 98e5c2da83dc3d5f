"""Lengths of outputs: the probability that a sequence with so many tokens continues for so many more. Pure.

Counts of finished outputs by length, fading: bounded, whatever the load.
"""

import math
from itertools import accumulate

_WIDTH, _NUM_BUCKETS = 32, 256  # tokens; outputs of 8,192 and more share the last bucket
_KEEP = 0.995  # of the counts, per finished output: about two hundred count
PRIOR_TOKENS = 256  # mean output before any evidence
_PRIOR = [2.0 * math.exp(-bucket * _WIDTH / PRIOR_TOKENS) for bucket in range(_NUM_BUCKETS + 1)]


class LengthDistribution:
    """Lengths of finished outputs, in tokens. An output cut at `max_tokens` counts with that length."""

    __slots__ = ("_counts", "_longer", "mean_tokens")

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
