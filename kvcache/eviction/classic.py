"""LRU, FIFO, LFU and segmented LRU. Pure."""

from collections import OrderedDict

from kvrelay.kvcache.eviction.usage import Usage


class Lru:
    """Least recently used first. Also what other policies build on: it notes nothing."""

    name = "lru"
    num_revisions = 0

    def inserted(self, usage: Usage, now_s: float) -> None:
        """Nothing to note."""

    def used(self, usage: Usage, now_s: float) -> None:
        """Nothing to note: `used_s` is all."""

    def evicted(self, usage: Usage, now_s: float) -> None:
        """Nothing to note."""

    def score(self, usage: Usage, now_s: float) -> float:
        return usage.used_s


class Fifo(Lru):
    """First come, first to go, however often it was used."""

    name = "fifo"

    def score(self, usage: Usage, now_s: float) -> float:
        return usage.inserted_s


class Lfu(Lru):
    """Least frequently used first, aged: a newcomer starts from the score of what last had to go, so that past fame fades.

    Source: LFU with dynamic ageing (Arlitt et al., 2000).
    """

    name = "lfu"

    def __init__(self) -> None:
        self._age = 0.0

    def inserted(self, usage: Usage, now_s: float) -> None:
        usage.rank = self._age + 1 + usage.hits

    def used(self, usage: Usage, now_s: float) -> None:
        usage.rank = self._age + 1 + usage.hits

    def evicted(self, usage: Usage, now_s: float) -> None:
        self._age = max(self._age, usage.rank)

    def score(self, usage: Usage, now_s: float) -> float:
        return usage.rank


class Slru(Lru):
    """Segmented LRU: what was used again is protected, up to a share of the cache; the rest is on probation and goes first.

    What the protected segment has no room for falls back to probation, behind what is there and before what comes
    later. Scores hold until the next use, so falling back cannot lower one: protected scores are the numbers 1, 2, 3…
    of their last uses, and whoever comes on probation gets more than the last number that fell back, by less than 1.

    Source: Karedla, Love, Wherry, 1994.
    """

    name = "slru"
    protected_share = 0.8

    def __init__(self, capacity_blocks: int) -> None:
        self._most = max(1.0, self.protected_share * capacity_blocks)
        self._scale = float(max(capacity_blocks, 64))
        self._protected: OrderedDict[Usage, None] = OrderedDict()
        self._num_protected = 0  # blocks, each entry's counted as it was when it came in (`segment`)
        self._last_number = 0.0
        self._fallen = 0.0
        self._since_fall = 0

    def inserted(self, usage: Usage, now_s: float) -> None:
        self._since_fall += 1
        usage.segment = 0
        usage.rank = self._fallen + self._since_fall / (self._since_fall + self._scale)

    def used(self, usage: Usage, now_s: float) -> None:
        self._leave(usage)
        self._last_number += 1
        usage.rank = max(self._last_number, self._fallen + 1)
        usage.segment = usage.num_blocks
        self._protected[usage] = None
        self._num_protected += usage.num_blocks
        while self._num_protected > self._most and len(self._protected) > 1:
            oldest = next(iter(self._protected))
            self._fallen, self._since_fall = max(self._fallen, oldest.rank), 0
            self._leave(oldest)

    def evicted(self, usage: Usage, now_s: float) -> None:
        self._leave(usage)

    def score(self, usage: Usage, now_s: float) -> float:
        return usage.rank

    def _leave(self, usage: Usage) -> None:
        if usage in self._protected:
            del self._protected[usage]
            self._num_protected -= usage.segment
            usage.segment = 0
