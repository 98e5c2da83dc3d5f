"""Recent frequency of hashes in little memory: a count-min sketch that ages. Pure, no random source."""

from array import array

from kvrelay.types import BlockHash

_ROWS = 4
_MOST = 15  # counters of four bits' range: larger ones would only slow the ageing


class FrequencySketch:
    """Counts touches of hashes. Collisions only raise an estimate; all are halved every `10 * capacity` touches.

    The first touch in a period only sets two bits of the doorkeeper, a Bloom filter, so one-off hashes use no counter.

    Source: TinyLFU (Einziger, Friedman, Manes, 2017).
    """

    def __init__(self, capacity: int) -> None:
        width = 1 << max(8, (2 * capacity - 1).bit_length())
        self._mask = width - 1
        self._counters = [array("B", bytes(width)) for _ in range(_ROWS)]
        self._doorkeeper = bytearray(width)  # one byte per bit: no shifting
        self._touches = 0
        self._period = 10 * max(capacity, 16)

    def touch(self, digest: BlockHash) -> int:
        """Count one more; returns the estimate, this touch included."""
        self._touches += 1
        if self._touches >= self._period:
            self._age()
        columns = self._columns(digest)
        doorkeeper = self._doorkeeper
        if not (doorkeeper[columns[0]] and doorkeeper[columns[1]]):
            doorkeeper[columns[0]] = doorkeeper[columns[1]] = 1
            return 1 + min(row[column] for row, column in zip(self._counters, columns, strict=True))
        least = min(row[column] for row, column in zip(self._counters, columns, strict=True))
        if least < _MOST:
            for row, column in zip(self._counters, columns, strict=True):
                if row[column] == least:  # conservative update: only the smallest grow
                    row[column] = least + 1
            least += 1
        return least + 1

    def _columns(self, digest: BlockHash) -> tuple[int, int, int, int]:
        """One column per row, from the hash itself, which is evenly distributed."""
        number = int.from_bytes(digest[-16:], "little")
        low, high = number & 0xFFFFFFFF, (number >> 32) | 1
        mask = self._mask
        return low & mask, (low + high) & mask, (low + 2 * high) & mask, (low + 3 * high) & mask

    def _age(self) -> None:
        """Halve every counter and clear the doorkeeper."""
        self._touches //= 2
        halves = bytes(value >> 1 for value in range(256))
        for index, row in enumerate(self._counters):
            self._counters[index] = array("B", row.tobytes().translate(halves))
        self._doorkeeper = bytearray(len(self._doorkeeper))
