"""LRU behind an admission filter by frequency. Pure."""

from kvrelay.kvcache.eviction_classic import Lru
from kvrelay.kvcache.sketch import FrequencySketch
from kvrelay.kvcache.usage import Usage


class TinyLfu(Lru):
    """A newcomer seen no more often than what it would displace stays for a short window only; the rest is LRU.

    The window: it scores as if it had been used earlier by most of the time for which entries stay. How often the
    displaced was seen is taken from the last evicted ones. Frequencies outlive their entries, in a sketch that ages.

    Source: W-TinyLFU (Einziger, Eytan, Friedman, Manes, 2022).
    """

    name = "tinylfu"
    window_share = 0.05

    def __init__(self, capacity_blocks: int) -> None:
        self._sketch = FrequencySketch(capacity_blocks)
        self._turnover = 0  # blocks inserted: a clock that runs as fast as the cache fills
        self._head_start = (1 - self.window_share) * capacity_blocks
        self._displaced = 0.0  # how often the lately evicted had been seen, on average

    def inserted(self, usage: Usage, now_s: float) -> None:
        self._turnover += usage.num_blocks
        self._touch(usage)

    def used(self, usage: Usage, now_s: float) -> None:
        self._touch(usage)

    def evicted(self, usage: Usage, now_s: float) -> None:
        self._displaced += 0.05 * (self._sketch.estimate(usage.digest) - self._displaced)

    def score(self, usage: Usage, now_s: float) -> float:
        is_admitted = self._sketch.estimate(usage.digest) > self._displaced
        return usage.rank if is_admitted else usage.rank - self._head_start

    def _touch(self, usage: Usage) -> None:
        self._sketch.touch(usage.digest)
        usage.rank = self._turnover
