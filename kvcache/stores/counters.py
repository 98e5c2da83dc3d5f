"""A store's counters, incremented by several threads."""

import threading
from dataclasses import replace

from kvrelay.kvcache.stores.store import StoreStats


class StoreCounters:
    """The totals of a StoreStats. Thread-safe."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._stats = StoreStats()

    def add(self, **amounts: float) -> None:
        """Increment fields of StoreStats, by name."""
        with self._lock:
            now = {name: getattr(self._stats, name) + amount for name, amount in amounts.items()}
            self._stats = replace(self._stats, **now)

    def read(self) -> StoreStats:
        with self._lock:
            return self._stats
