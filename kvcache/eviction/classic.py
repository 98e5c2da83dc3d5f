"""LRU and LFU. Pure."""

from kvrelay.kvcache.eviction.usage import EntryUsage


class Lru:
    """Least recently used first. Keeps no state, so other policies derive from it."""

    name = "lru"
    num_revisions = 0

    def inserted(self, usage: EntryUsage, now_s: float) -> None:
        """Keeps no state."""

    def used(self, usage: EntryUsage, now_s: float) -> None:
        """Keeps no state: `used_s` is enough."""

    def evicted(self, usage: EntryUsage, now_s: float) -> None:
        """Keeps no state."""

    def score(self, usage: EntryUsage, now_s: float) -> float:
        return usage.used_s


class Lfu(Lru):
    """Least frequently used first, with dynamic ageing: a new entry starts from the score of the last evicted one.

    Source: LFU with dynamic ageing (Arlitt et al., 2000).
    """

    name = "lfu"

    def __init__(self) -> None:
        self._age = 0.0

    def inserted(self, usage: EntryUsage, now_s: float) -> None:
        usage.rank = self._age + 1 + usage.hits

    def used(self, usage: EntryUsage, now_s: float) -> None:
        usage.rank = self._age + 1 + usage.hits

    def evicted(self, usage: EntryUsage, now_s: float) -> None:
        self._age = max(self._age, usage.rank)

    def score(self, usage: EntryUsage, now_s: float) -> float:
        return usage.rank
