"""A store's sums, counted from several threads."""

import threading
from dataclasses import replace

from kvrelay.kvcache.stores.store import StoreStats


class StoreCounters:
    """Adds up what StoreStats tells."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._stats = StoreStats()

    def add(self, **amounts: float) -> None:
        """By fields of StoreStats."""
        with self._lock:
            now = {name: getattr(self._stats, name) + amount for name, amount in amounts.items()}
            self._stats = replace(self._stats, **now)

    def read(self) -> StoreStats:
        with self._lock:
            return self._stats
