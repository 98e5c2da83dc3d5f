"""What of a read is in place: pieces come over several streams, what is reported is the beginning without gaps."""

import threading
from collections.abc import Sequence

from kvrelay.kvtransfer.transports.base import Landed


class ReadProgress:
    """Counts bytes of numbered pieces; reports how many of the read's first bytes are there.

    One thread at a time reports; the others go on receiving meanwhile, and it reports what they brought.
    """

    def __init__(self, sizes: Sequence[int], report: Landed | None) -> None:
        self._report, self._lock = report, threading.Lock()
        self._sizes, self._got = sizes, [0] * len(sizes)
        self._first = 0  # piece that is not complete
        self._before = 0  # bytes of the pieces before it
        self._reported = 0
        self._is_reporting = False

    def add(self, piece: int, num_bytes: int) -> None:
        """So many more bytes of this piece are in place. Raises what `report` raises; it is not called again then."""
        with self._lock:
            self._got[piece] += num_bytes
            while self._first < len(self._sizes) and self._got[self._first] == self._sizes[self._first]:
                self._before += self._sizes[self._first]
                self._first += 1
            if self._report is None or self._is_reporting or self._prefix() == self._reported:
                return
            self._is_reporting = True
        self._report_prefix(self._report)

    def _prefix(self) -> int:
        return self._before + (self._got[self._first] if self._first < len(self._sizes) else 0)

    def _report_prefix(self, report: Landed) -> None:
        while True:
            with self._lock:
                prefix = self._prefix()
                if prefix == self._reported:
                    self._is_reporting = False
                    return
                self._reported = prefix
            report(prefix)
