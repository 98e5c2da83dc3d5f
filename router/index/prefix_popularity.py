"""Arrival rate of prompts by shared prefix. Pure: the caller passes the time.

Counted by the hashes at a few depths of each prompt's chain, which distinguishes a system prompt that all requests
share from one client's conversation. Counts fade; memory is bounded.
"""

import math
from collections.abc import Sequence

FADE_S = 10.0
"""Age at which an arrival counts 1/e."""
MAX_COUNTED = 65_536
"""Prefixes that are counted; the oldest are dropped."""


class PrefixPopularity:
    """Arrivals per second, by prefix."""

    __slots__ = ("_counts",)

    def __init__(self) -> None:
        self._counts: dict[bytes, tuple[float, float]] = {}  # (faded count, time of the last update); the oldest first

    def __len__(self) -> int:
        return len(self._counts)

    def observe(self, hashes: Sequence[bytes], now_s: float) -> None:
        """A prompt arrived."""
        for depth in _depths(len(hashes)):
            name = hashes[depth - 1]
            count, then_s = self._counts.pop(name, (0.0, now_s))
            self._counts[name] = count * math.exp((then_s - now_s) / FADE_S) + 1.0, now_s
        while len(self._counts) > MAX_COUNTED:
            del self._counts[next(iter(self._counts))]

    def arrivals_per_s(self, hashes: Sequence[bytes], depth: int, now_s: float) -> float:
        """Arrival rate of prompts that share the first `depth` hashes with this one (or a power of two of them)."""
        depths = _depths(min(depth, len(hashes)))
        if not depths:
            return 0.0
        count, then_s = self._counts.get(hashes[depths[-1] - 1], (0.0, now_s))
        return count * math.exp((then_s - now_s) / FADE_S) / FADE_S


def _depths(most: int) -> list[int]:
    """1, 2, 4, ... up to `most`."""
    return [1 << power for power in range(most.bit_length())]
