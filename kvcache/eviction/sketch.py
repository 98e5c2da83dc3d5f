"""How often something was seen lately, in little memory: a count-min sketch that ages. Pure, no random source."""

from array import array

from kvrelay.types import BlockHash

_ROWS = 4
_MOST = 15  # counters are as good as four bits wide: more would only slow the ageing


class FrequencySketch:
    """Estimates never too low by collisions, halved every `10 * capacity` touches, so that the past fades.

    The first touch of a period only enters the doorkeeper, a Bloom filter: what comes once costs no counter.

    Source: TinyLFU (Einziger, Friedman, Manes, 2017).
    """

    def __init__(self, capacity: int) -> None:
        width = 1 << max(8, (2 * capacity - 1).bit_length())
        self._mask = width - 1
        self._counters = [array("B", bytes(width)) for _ in range(_ROWS)]
        self._door = bytearray(width)  # a byte a bit: no shifting
        self._touches = 0
        self._period = 10 * max(capacity, 16)

    def touch(self, digest: BlockHash) -> int:
        """Count one more; returns the estimate with it."""
        self._touches += 1
        if self._touches >= self._period:
            self._age()
        spots = self._spots(digest)
        door = self._door
        if not (door[spots[0]] and door[spots[1]]):
            door[spots[0]] = door[spots[1]] = 1
            return 1 + min(row[spot] for row, spot in zip(self._counters, spots, strict=True))
        least = min(row[spot] for row, spot in zip(self._counters, spots, strict=True))
        if least < _MOST:
            for row, spot in zip(self._counters, spots, strict=True):
                if row[spot] == least:  # conservative update: only the smallest grow
                    row[spot] = least + 1
            least += 1
        return least + 1

    def estimate(self, digest: BlockHash) -> int:
        """Touches of late, 0 for what was not seen."""
        spots = self._spots(digest)
        is_known = self._door[spots[0]] and self._door[spots[1]]
        return min(row[spot] for row, spot in zip(self._counters, spots, strict=True)) + (1 if is_known else 0)

    def _spots(self, digest: BlockHash) -> tuple[int, int, int, int]:
        """Four places from the hash itself, which is evenly spread already."""
        number = int.from_bytes(digest[-16:], "little")
        low, high = number & 0xFFFFFFFF, (number >> 32) | 1
        mask = self._mask
        return low & mask, (low + high) & mask, (low + 2 * high) & mask, (low + 3 * high) & mask

    def _age(self) -> None:
        """Halve every counter and empty the doorkeeper."""
        self._touches //= 2
        halves = bytes(value >> 1 for value in range(256))
        for index, row in enumerate(self._counters):
            self._counters[index] = array("B", row.tobytes().translate(halves))
        self._door = bytearray(len(self._door))
