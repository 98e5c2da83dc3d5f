"""Block hashes in an array of numbered positions; hashes that were stored together are adjacent, so that chains are
contiguous. Pure.

For each position: the block's hash, its holder set (0: the position is free), whether the next position is known to
follow it in a chain (`chained`, learned from lookups; it never changes while both hashes stay), and whether the next
has another holder set (`edges`). 23 bytes each, none of which the garbage collector visits. Free positions are used in
turn around the array; it grows when less than a quarter is free, and never shrinks. First and last are sentinels.
"""

from array import array
from bisect import bisect_left
from collections.abc import Iterable, Sequence
from operator import ne

import numpy as np
from numpy.typing import NDArray

from kvrelay.hashing import HASH_BYTES, new_hash_index

Ints = NDArray[np.int64]

_FEW_BITS = 6  # bits up to which a Python loop is faster than numpy


def anywhere_bit(row: int) -> int:
    """The bit of a worker that holds a block in any tier."""
    return 1 << 2 * row


def both_bits(row: int) -> int:
    """The bits of a worker that holds a block in its pool."""
    return 3 << 2 * row


def depths_by_row(ends: Iterable[tuple[int, int]], num_rows: int, found: Ints | None = None) -> Ints:
    """[num_rows, 2]: the depth of each row's two bits, from (depth, bits that reach exactly this depth); 0 for the
    others.
    """
    if found is None:
        found = np.zeros((num_rows, 2), np.int64)
    flat = found.reshape(-1)
    for depth, bits in ends:
        if bits.bit_count() <= _FEW_BITS:
            while bits:
                flat[place := bits.bit_length() - 1] = depth
                bits ^= 1 << place
        else:
            packed = np.frombuffer(bits.to_bytes((2 * num_rows + 7) // 8, "little"), np.uint8)
            reach = np.unpackbits(packed, count=2 * num_rows, bitorder="little").view(np.bool_)
            np.copyto(flat, depth, where=reach)
    return found


MIN_GROWTH = 256
MAX_GROWTH = 1 << 16  # at a time, to bound the time that it takes, unless more are stored at once
_FEW = 64  # positions up to which a Python loop is faster than numpy
_SEARCHED = 1 << 14  # positions that are searched for free ones
_GROWTH = 4  # factor by which each comparison looks further ahead than the one before


class HashArray:
    """The array, and the position of each hash that a worker holds. A call has each hash once."""

    __slots__ = ("_chained", "_cursor", "_edges", "_names", "_table", "_used", "set_ids")

    def __init__(self) -> None:
        self._table = new_hash_index()
        self.set_ids = array("i", (0, 0))
        self._names = bytearray(2 * HASH_BYTES)
        self._used, self._chained, self._edges = bytearray(b"\1\1"), bytearray(2), bytearray(2)
        self._cursor = 1

    def __len__(self) -> int:
        return self._table.count()

    # ---- changes

    def add(self, hashes: Sequence[bytes], set_id: int) -> None:
        """Append hashes that no worker holds yet, in this order."""
        done = 0
        while done < len(hashes):
            first, end = self._free_run(len(hashes) - done)
            some = list(hashes[done : done + end - first])
            self._table.add(self._names, some, first)
            self._chained[first - 1 : end] = bytes(1 + len(some))
            self._set_run(first, end, set_id)
            done += len(some)

    def remove(self, positions: list[int]) -> None:
        """No worker holds the hashes at these positions any more."""
        self._table.remove(self._names, positions)
        self.set_positions(positions, 0)

    def set_positions(self, positions: list[int], set_id: int) -> None:
        first, last = positions[0], positions[-1]
        if last - first == len(positions) - 1 and positions == list(range(first, last + 1)):
            self._set_run(first, last + 1, set_id)
        elif first - last == len(positions) - 1 and positions == list(range(first, last - 1, -1)):
            self._set_run(last, first + 1, set_id)
        elif len(positions) <= _FEW:
            for position in positions:
                self.set_ids[position], self._used[position] = set_id, set_id != 0
            for position in positions:
                self._update_edge(position - 1)
                self._update_edge(position)
        else:
            self._set_many(np.array(positions), set_id)

    def _set_run(self, first: int, end: int, set_id: int) -> None:
        count = end - first
        self.set_ids[first:end] = array("i", (set_id,)) * count
        self._used[first:end] = (b"\1" if set_id else b"\0") * count
        self._edges[first:end] = bytes(count)
        self._update_edge(first - 1)
        self._update_edge(end - 1)

    def _set_many(self, positions: Ints, set_id: int) -> None:
        set_ids = np.frombuffer(self.set_ids, np.intc)
        used, edges = (np.frombuffer(column, np.uint8) for column in (self._used, self._edges))
        set_ids[positions], used[positions] = set_id, set_id != 0
        for places in (positions - 1, positions):
            edges[places] = set_ids[places] != set_ids[places + 1]

    def _update_edge(self, position: int) -> None:
        self._edges[position] = self.set_ids[position] != self.set_ids[position + 1]

    def _free_run(self, count: int) -> tuple[int, int]:
        """(first, end) of adjacent free positions: at least one, at most `count`."""
        first = self._used.find(0, self._cursor)
        if first < 0 and not self._is_full:
            first = self._used.find(0)
        if first < 0:
            first = self._grow(count)
        end = self._used.find(1, first, first + count)
        self._cursor = first + count if end < 0 else end
        return first, self._cursor

    @property
    def _is_full(self) -> bool:
        return 4 * len(self) >= 3 * (len(self._used) - 2)

    def _grow(self, count: int) -> int:
        """Grow by a quarter, at most MAX_GROWTH, at least `count`. Returns the first new position."""
        last, more = len(self._used) - 1, max(count, min(len(self._used) // 4, MAX_GROWTH), MIN_GROWTH)
        self._names.extend(bytes(HASH_BYTES * more))
        self.set_ids.frombytes(bytes(self.set_ids.itemsize * more))
        for column in (self._used, self._chained, self._edges):
            column.extend(bytes(more))
        self._used[last], self._used[-1] = 0, 1
        return last

    def move_together(self, chain: Sequence[bytes], positions: list[int]) -> None:
        """Move a chunk of a chain from these positions to adjacent ones, if a free run is found soon."""
        count, empty = len(chain), bytes(len(chain))
        stop = self._cursor + _SEARCHED
        first = self._used.find(empty, self._cursor, stop)
        if first < 0:
            first = self._used.find(empty, 0, _SEARCHED)
        if first < 0 and self._is_full:
            first = self._grow(count)
        if first < 0:
            self._cursor = stop if stop < len(self._used) else 1
            return
        self._cursor = end = first + count
        set_ids = list(map(self.set_ids.__getitem__, positions))
        self.set_positions(positions, 0)
        self._table.move(self._names, positions, first)
        self._chained[first - 1 : end] = b"\0" + b"\1" * (count - 1) + b"\0"
        self.set_ids[first:end] = array("i", set_ids)
        self._used[first:end] = b"\1" * count
        self._edges[first : end - 1] = bytes(map(ne, set_ids, set_ids[1:]))
        self._update_edge(first - 1)
        self._update_edge(end - 1)

    # ---- queries

    def names(self, positions: Iterable[int]) -> list[bytes]:
        return [bytes(self._names[HASH_BYTES * position : HASH_BYTES * (position + 1)]) for position in positions]

    def set_id(self, block_hash: bytes) -> int:
        """Its holder set; 0: no worker holds it."""
        return self.set_ids[self.position(block_hash)]

    def position(self, block_hash: bytes) -> int:
        """Its position; 0: no worker holds it."""
        return self._table.find_one(self._names, block_hash)

    def find(self, hashes: Iterable[bytes]) -> tuple[list[int], list[int]]:
        """([position of each hash; 0: none], [its holder set])."""
        return self._table.find(self._names, self.set_ids, list(hashes))

    def edge(self, position: int, stop: int) -> int:
        """The first position from this one to before `stop` whose successor has another holder set; -1: none."""
        return self._edges.find(1, position, stop)

    def follow(self, hashes: Sequence[bytes], depth: int, position: int) -> int:
        """How many hashes from `depth` on are stored at as many positions from `position` on; the first one is.

        Where positions are chained, one hash stands for all before it, so few are compared.
        """
        chained, left, count = self._chained, len(hashes) - depth, 1
        while True:
            known = min(chained.find(0, position + count - 1) - position + 1, left)
            if known > count and not self._has_hashes(position + known - 1, hashes[depth + known - 1]):
                return self._divergence(hashes, depth, position, count, known - 1)
            count = max(count, known)
            more = self._matching_run(hashes, depth + count, position + count) if count < left else 0
            if not more:
                return count
            chained[position + count - 1 : position + count + more - 1] = b"\1" * more
            count += more

    def _has_hashes(self, position: int, packed: bytes) -> bool:
        """Whether these are the hashes from this position on."""
        return self._names.startswith(packed, HASH_BYTES * position)

    def _divergence(self, hashes: Sequence[bytes], depth: int, position: int, low: int, high: int) -> int:
        """How many of `high` chained positions the chain follows; at least `low`.

        Holder sets often change where it diverges.
        """
        edge = self.edge(position + low - 1, position + high)
        if edge >= 0 and self._has_hashes(edge, hashes[depth + edge - position]):
            low = edge + 1 - position
            if not self._has_hashes(edge + 1, hashes[depth + low]):
                return low
        return bisect_left(
            range(high), True, low, key=lambda place: not self._has_hashes(position + place, hashes[depth + place])
        )

    def _matching_run(self, hashes: Sequence[bytes], depth: int, position: int) -> int:
        """How many hashes from `depth` on are stored from `position` on, by comparing all of them.

        The number compared at a time grows while the last of them matches, then shrinks.
        """
        most, count, step, is_near = min(len(hashes) - depth, len(self._used) - position), 0, 1, False
        while step and count < most:
            step = min(step, most - count)
            place = depth + count
            if not self._has_hashes(position + count + step - 1, hashes[place + step - 1]):
                step, is_near = step // 2, True
                continue
            if not self._has_hashes(position + count, b"".join(hashes[place : place + step])):
                step, is_near = step // 2, True  # no chain, or another one
                continue
            count += step
            step = step if is_near else _GROWTH * step
        return count
