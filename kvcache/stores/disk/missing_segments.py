"""Segments that the disk had no room for: their rows are taken out of use for a while. Not thread-safe."""

from collections.abc import Callable, Iterable

from kvrelay.kvcache.index.tier_index import TierIndex
from kvrelay.kvcache.stores.disk.format import Geometry
from kvrelay.kvcache.stores.disk.io import Segments

_RETRY_S = 60.0


class MissingSegments:
    """Creates segments on demand, and reserves the rows of those that cannot be created."""

    def __init__(self, segments: Segments, geometry: Geometry, index: TierIndex, clock: Callable[[], float]) -> None:
        self._segments, self._geometry, self._index, self._clock = segments, geometry, index, clock
        self._rows: list[int] = []
        self._retry_at_s = 0.0

    def retry(self) -> None:
        """Put the rows back into use, if it is time to try again."""
        if self._rows and self._clock() >= self._retry_at_s:
            self._index.cancel(self._rows)
            self._rows = []

    def ensure(self, rows: Iterable[int]) -> OSError | None:
        """Create the segments of these rows; returns the error of one that cannot be created."""
        for segment in sorted({self._geometry.place(row)[0] for row in rows}):
            try:
                self._segments.ensure(segment)
            except OSError as error:
                return error
        return None

    def block(self) -> None:
        """Reserve all rows of missing segments, none of which was ever used, until the next retry."""
        geometry = self._geometry
        for segment in range(geometry.num_segments):
            if not self._segments.has(segment):
                first = segment * geometry.rows_per_segment
                self._rows += range(first, min(first + geometry.rows_per_segment, geometry.num_rows))
        for row in self._rows:
            self._index.take(row)
        self._retry_at_s = self._clock() + _RETRY_S
