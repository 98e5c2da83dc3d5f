"""What the disk tier counts and logs. Thread-safe."""

import logging
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from kvrelay.kvcache.stores.disk.volume import Outcome
from kvrelay.kvcache.stores.store import StoreStats

logger = logging.getLogger(__name__)

REPEAT_S = 60.0  # between two log lines of one kind


class DiskJournal:
    """Counters for StoreStats, seconds, and errors, each kind of which is logged once a minute at most."""

    def __init__(self, block_bytes: int, remedy: Callable[[OSError], str], clock: Callable[[], float]) -> None:
        """`remedy`: what to do about an error, for its log line."""
        self._block_bytes, self._remedy, self._clock = block_bytes, remedy, clock
        self._lock = threading.Lock()
        self._counts: Counter[str] = Counter()
        self._seconds = {"store": 0.0, "load": 0.0}
        self._logged_s: dict[str, float] = {}

    @contextmanager
    def timed(self, call: str) -> Iterator[None]:
        """Add the duration to the seconds of "load" or "store"."""
        began_s = time.perf_counter()
        try:
            yield
        finally:
            with self._lock:
                self._seconds[call] += time.perf_counter() - began_s

    def count(self, outcome: Outcome, path: object, num_loaded: int = 0) -> None:
        """Add the outcome of a call, and log what went wrong."""
        with self._lock:
            self._counts["loaded"] += num_loaded
            self._counts["stored"] += outcome.num_written
            self._counts["rejected"] += outcome.num_rejected
            self._counts["corrupt"] += outcome.num_corrupt
            self._counts["failures"] += bool(outcome.errors)
        if outcome.num_corrupt:
            self.complain("corrupt", f"discarded {outcome.num_corrupt} blocks in {path}, which failed their checksums")
        if outcome.errors:
            self.complain(outcome.errors[0].strerror or "failed", outcome.errors[0])

    def lost_folder(self, message: str) -> None:
        """The folder was removed while in use."""
        with self._lock:
            self._counts["failures"] += 1
        self.complain("lost", message)

    def closed_volume(self, num_evicted: int) -> None:
        """Keep the evictions of a volume that is closed before the store is."""
        with self._lock:
            self._counts["evicted"] += num_evicted

    def complain(self, kind: str, what: object) -> None:
        """Log an error, unless one of this kind was logged within the last minute."""
        now_s = self._clock()
        with self._lock:
            if now_s < self._logged_s.get(kind, -REPEAT_S) + REPEAT_S:
                return
            self._logged_s[kind] = now_s
        remedy = f"; {self._remedy(what)}" if isinstance(what, OSError) else ""
        logger.error("disk tier: %s%s", what, remedy)

    def stats(self, *, num_blocks: int, num_bytes: int, capacity_bytes: int, num_evicted: int) -> StoreStats:
        """The totals, with the current volume's state."""
        with self._lock:
            counts = self._counts
            return StoreStats(
                num_blocks=num_blocks,
                num_bytes=num_bytes,
                capacity_bytes=capacity_bytes,
                stored_blocks=counts["stored"],
                stored_bytes=counts["stored"] * self._block_bytes,
                loaded_blocks=counts["loaded"],
                loaded_bytes=counts["loaded"] * self._block_bytes,
                store_s=self._seconds["store"],
                load_s=self._seconds["load"],
                rejected_blocks=counts["rejected"],
                evicted_blocks=counts["evicted"] + num_evicted,
                corrupt_blocks=counts["corrupt"],
                failures=counts["failures"],
            )
