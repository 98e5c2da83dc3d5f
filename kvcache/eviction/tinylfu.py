"""LRU behind an admission filter by frequency. Pure."""

from kvrelay.kvcache.eviction.classic import Lru
from kvrelay.kvcache.eviction.sketch import FrequencySketch
from kvrelay.kvcache.eviction.usage import Usage


class TinyLfu(Lru):
    """A newcomer seen no more often than what it would displace is not admitted: it goes before nearly all that was.

    The admitted are in LRU order, on a clock that only admissions drive, so that a flood of strangers ages nobody. A
    stranger ranks among the oldest twentieth of them. How often the displaced was seen is taken from the last evicted
    ones. Frequencies outlive their entries, in a sketch that ages.

    Source: W-TinyLFU (Einziger, Eytan, Friedman, Manes, 2022).
    """

    name = "tinylfu"
    window_share = 0.05

    def __init__(self, capacity_blocks: int) -> None:
        self._sketch = FrequencySketch(capacity_blocks)
        self._admitted_blocks = 0  # in all: the clock
        self._head_start = (1 - self.window_share) * capacity_blocks
        self._displaced = 0.0  # how often the lately evicted had been seen, on average

    def inserted(self, usage: Usage, now_s: float) -> None:
        usage.segment = 0
        self._touch(usage)

    def used(self, usage: Usage, now_s: float) -> None:
        self._touch(usage)

    def evicted(self, usage: Usage, now_s: float) -> None:
        self._displaced += 0.05 * (self._sketch.estimate(usage.digest) - self._displaced)

    def score(self, usage: Usage, now_s: float) -> float:
        return usage.rank if usage.segment else usage.rank - self._head_start

    def _touch(self, usage: Usage) -> None:
        """`segment` is 1 once it is admitted."""
        if self._sketch.touch(usage.digest) > max(self._displaced, 1.0) and not usage.segment:
            usage.segment = 1
            self._admitted_blocks += usage.num_blocks
        usage.rank = self._admitted_blocks
