"""Which hashes were offered before, in little memory: Bloom filters that age. Pure, no random source."""

from kvrelay.types import BlockHash

_MIN_CAPACITY = 16


class OfferedBefore:
    """Remembers the last `10 * capacity` offers at least, and twice as many at most, in two Bloom filters.

    A collision may admit a hash at its first offer, and never refuses one.

    Source: the doorkeeper of TinyLFU (Einziger, Friedman, Manes, 2017).
    """

    def __init__(self, capacity: int) -> None:
        self._period = 10 * max(capacity, _MIN_CAPACITY)
        self._mask = (1 << (8 * self._period - 1).bit_length()) - 1
        self._new, self._old = bytearray(self._mask + 1 >> 3), bytearray(self._mask + 1 >> 3)
        self._num_new = 0

    def offer(self, digest: BlockHash) -> bool:
        """Remember this offer; returns whether there was one before."""
        number, mask = int.from_bytes(digest[-16:], "little"), self._mask  # evenly distributed
        bits = number & mask, number >> 64 & mask
        was_offered = any(all(seen[bit >> 3] >> (bit & 7) & 1 for bit in bits) for seen in (self._new, self._old))
        if self._num_new >= self._period:
            self._old, self._new, self._num_new = self._new, bytearray(len(self._new)), 0
        self._num_new += 1
        for bit in bits:
            self._new[bit >> 3] |= 1 << (bit & 7)
        return was_offered
