"""Blocks in a row of numbered slots, those that were stored together next to each other, so that chains lie in the row.

Owns the row: of each slot its block's name, its kind (who holds it, kinds.py; 0: nobody, the slot is free), whether the block of
the next slot is known to follow it in a chain (`chained`), and whether the next slot's kind is another (`edges`). 23 bytes each,
of which the garbage collector walks none. Slots are handed out in turn around the row; it grows when less than a quarter is free.
When less than a third is in use, `close_up` moves the blocks down, in their order, and cuts the row off behind them.

`chained` is learned from lookups, whose hashes are chains, by comparing names. Who follows whom in a chain never changes, so that
it stays true for as long as both slots keep their names, whoever comes to hold them. The first and the last slot are nobody's.

Never imports torch, Ray, sockets or a clock.
"""

from array import array
from collections.abc import Iterable, Sequence
from operator import ne

import numpy as np

from kvrelay.hashing import HASH_BYTES
from kvrelay.native.hash_index import new_hash_index
from kvrelay.router.index.bits import Ints

MIN_GROWTH = 256
MAX_GROWTH = 1 << 16  # at a time, so that none takes long, unless more are stored at once
_SPARSE = 3  # times as many slots as blocks make it worth moving them
_FEW = 64  # slots that are written faster one by one
_SEARCHED = 1 << 14  # slots that are looked through for room
_STRETCH = 1 << 13  # slots that are looked through for blocks to be moved
_LEAP = 4  # each comparison looks so many times further than the one before


class Slots:
    """The row, and the slot of each hash that somebody holds. Callers pass each hash once in a call."""

    __slots__ = ("_ahead", "_chained", "_cursor", "_edges", "_names", "_packed", "_table", "_used", "kinds")

    def __init__(self) -> None:
        self._table = new_hash_index()
        self.kinds = array("i", (0, 0))
        self._names = bytearray(2 * HASH_BYTES)
        self._used, self._chained, self._edges = bytearray(b"\1\1"), bytearray(2), bytearray(2)
        self._cursor = 1
        self._packed = self._ahead = 0  # while it closes up: what lies between the two is free

    def __len__(self) -> int:
        return self._table.count()

    @property
    def native_bytes(self) -> int:
        """Of memory that Python does not count."""
        return self._table.num_bytes()

    # ---- changes

    def add(self, hashes: Sequence[bytes], kind: int) -> None:
        """Blocks that nobody held come into the row, in this order."""
        done = 0
        while done < len(hashes):
            first, end = self._room(len(hashes) - done)
            some = list(hashes[done : done + end - first])
            self._table.add(self._names, some, first)
            self._chained[first - 1 : end] = bytes(1 + len(some))
            self._paint_run(first, end, kind)
            done += len(some)

    def remove(self, slots: list[int]) -> None:
        """Nobody holds the blocks of these slots any more."""
        self._table.remove(self._names, slots)
        self.paint(slots, 0)

    def paint(self, slots: list[int], kind: int) -> None:
        """They are of this kind now."""
        first, last = slots[0], slots[-1]
        if last - first == len(slots) - 1 and slots == list(range(first, last + 1)):
            self._paint_run(first, last + 1, kind)
        elif first - last == len(slots) - 1 and slots == list(range(first, last - 1, -1)):
            self._paint_run(last, first + 1, kind)
        elif len(slots) <= _FEW:
            for slot in slots:
                self.kinds[slot], self._used[slot] = kind, kind != 0
            for slot in slots:
                self._mark_edge(slot - 1)
                self._mark_edge(slot)
        else:
            self._paint_many(np.array(slots), kind)

    def _paint_run(self, first: int, end: int, kind: int) -> None:
        count = end - first
        self.kinds[first:end] = array("i", (kind,)) * count
        self._used[first:end] = (b"\1" if kind else b"\0") * count
        self._edges[first:end] = bytes(count)
        self._mark_edge(first - 1)
        self._mark_edge(end - 1)

    def _paint_many(self, slots: Ints, kind: int) -> None:
        kinds = np.frombuffer(self.kinds, np.intc)
        used, edges = (np.frombuffer(column, np.uint8) for column in (self._used, self._edges))
        kinds[slots], used[slots] = kind, kind != 0
        for places in (slots - 1, slots):
            edges[places] = kinds[places] != kinds[places + 1]

    def _mark_edge(self, slot: int) -> None:
        self._edges[slot] = self.kinds[slot] != self.kinds[slot + 1]

    def _room(self, count: int) -> tuple[int, int]:
        """Free slots next to each other, from the first to before the second: at most `count`, at least one."""
        if self._packed < self._ahead:
            first, self._packed = self._packed, min(self._packed + count, self._ahead)
            return first, self._packed
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
        """By a quarter, or MAX_GROWTH, and by `count` at least. Returns the first new slot."""
        last, more = len(self._used) - 1, max(count, min(len(self._used) // 4, MAX_GROWTH), MIN_GROWTH)
        self._names.extend(bytes(HASH_BYTES * more))
        self.kinds.frombytes(bytes(self.kinds.itemsize * more))
        for column in (self._used, self._chained, self._edges):
            column.extend(bytes(more))
        self._used[last], self._used[-1] = 0, 1
        return last

    def gather(self, chain: Sequence[bytes], slots: list[int]) -> None:
        """The blocks of a piece of a chain, in these slots, move to others that are next to each other, if some are found soon."""
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
        kinds = list(map(self.kinds.__getitem__, slots))
        self.paint(slots, 0)
        self._table.move(self._names, slots, first)
        self._chained[first - 1 : end] = b"\0" + b"\1" * (count - 1) + b"\0"
        self.kinds[first:end] = array("i", kinds)
        self._used[first:end] = b"\1" * count
        self._edges[first : end - 1] = bytes(map(ne, kinds, kinds[1:]))
        self._mark_edge(first - 1)
        self._mark_edge(end - 1)

    # ---- a shorter row

    @property
    def is_sparse(self) -> bool:
        """Whether the row is much longer than it need be."""
        return len(self.kinds) > max(8 * MIN_GROWTH, _SPARSE * len(self))

    @property
    def is_closing(self) -> bool:
        return self._ahead > 0

    def begin_closing(self) -> None:
        """From now on `close_up` is called until it is done, or given up. Meanwhile nothing is to be gathered."""
        self._packed = self._ahead = 1

    def give_up_closing(self) -> None:
        """What has moved stays there."""
        self._packed = self._ahead = 0

    def close_up(self, most: int) -> bool:
        """The next blocks, at most so many, move down to those before. Whether there are more; if not, the row is cut off."""
        last = len(self._used) - 1
        if self._ahead < last:
            self._ahead = self._close_stretch(most, min(self._ahead + _STRETCH, last))
            return True
        size = min(self._packed + self._packed // 2 + MIN_GROWTH, len(self._used))
        for column, width in ((self._names, HASH_BYTES), (self._used, 1), (self._chained, 1), (self._edges, 1)):
            del column[width * size :]
        del self.kinds[size:]
        self._used[-1], self._edges[-1], self._chained[-1] = 1, 0, 0
        self._cursor = min(self._packed, size - 1)
        self.give_up_closing()
        return False

    def _close_stretch(self, most: int, stop: int) -> int:
        """Of the slots from `_ahead` to before `stop`, the first blocks, at most so many, move down. Returns how far it came."""
        used, chained, edges = (np.frombuffer(column, np.uint8) for column in (self._used, self._chained, self._edges))
        first, target, kinds = self._ahead, self._packed, np.frombuffer(self.kinds, np.intc)
        places = first + np.flatnonzero(used[first:stop])
        if len(places) > most:
            places, stop = places[:most], int(places[most])
        self._packed = end = target + len(places)
        if not len(places) or places[-1] == end - 1:
            return stop  # they are there
        moved, follows = kinds[places], chained[places] & used[places + 1]
        follows[-1] = 0  # what comes next moves later
        self._table.move(self._names, places.tolist(), target)
        kinds[places], used[places] = 0, 0
        kinds[target:end], used[target:end], chained[target:end] = moved, 1, follows
        chained[target - 1] = 0
        for begin, after in ((target - 1, end), (first - 1, stop)):
            edges[begin:after] = kinds[begin:after] != kinds[begin + 1 : after + 1]
        return stop

    # ---- answers

    def names(self, slots: Iterable[int]) -> list[bytes]:
        """Of the blocks there."""
        return [bytes(self._names[HASH_BYTES * slot : HASH_BYTES * (slot + 1)]) for slot in slots]

    def kind(self, block_hash: bytes) -> int:
        """Its kind; 0: nobody holds it."""
        return self.kinds[self.slot(block_hash)]

    def slot(self, block_hash: bytes) -> int:
        """Where it is; 0: nobody holds it."""
        return self._table.find_one(self._names, block_hash)

    def kinds_of(self, hashes: Iterable[bytes]) -> tuple[list[int], list[int]]:
        """(the slot of each, 0: none; its kind)."""
        return self._table.find(self._names, self.kinds, list(hashes))

    def edge(self, slot: int, stop: int) -> int:
        """The first slot from this one to before `stop` whose next is of another kind; -1: none."""
        return self._edges.find(1, slot, stop)

    def follow(self, hashes: Sequence[bytes], depth: int, slot: int) -> int:
        """How many hashes from `depth` on are the names of as many slots from `slot` on; the first one is.

        Where slots are chained one name stands for all before it, so that few are looked at.
        """
        chained, left, count = self._chained, len(hashes) - depth, 1
        while True:
            known = min(chained.find(0, slot + count - 1) - slot + 1, left)
            if known > count and not self._is_named(slot + known - 1, hashes[depth + known - 1]):
                return self._parting(hashes, depth, slot, count, known - 1)
            count = max(count, known)
            more = self._compared(hashes, depth + count, slot + count) if count < left else 0
            if not more:
                return count
            chained[slot + count - 1 : slot + count + more - 1] = b"\1" * more
            count += more

    def _is_named(self, slot: int, packed: bytes) -> bool:
        """Whether these are the names of as many slots from this one on."""
        return self._names.startswith(packed, HASH_BYTES * slot)

    def _parting(self, hashes: Sequence[bytes], depth: int, slot: int, low: int, high: int) -> int:
        """How many of `high` chained slots the chain passes; at least `low`. Where it leaves them their holders often differ, too."""
        edge = self.edge(slot + low - 1, slot + high)
        if edge >= 0 and self._is_named(edge, hashes[depth + edge - slot]):
            low = edge + 1 - slot
            if not self._is_named(edge + 1, hashes[depth + low]):
                return low
        while low < high:
            middle = (low + high + 1) // 2
            if self._is_named(slot + middle - 1, hashes[depth + middle - 1]):
                low = middle
            else:
                high = middle - 1
        return low

    def _compared(self, hashes: Sequence[bytes], depth: int, slot: int) -> int:
        """How many hashes from `depth` on are the names of as many slots from `slot` on: all of them are compared.

        In leaps, while the name at the end of each is right; then in ever smaller ones.
        """
        most, count, leap, is_near = min(len(hashes) - depth, len(self._used) - slot), 0, 1, False
        while leap and count < most:
            leap = min(leap, most - count)
            place = depth + count
            if not self._is_named(slot + count + leap - 1, hashes[place + leap - 1]):
                leap, is_near = leap // 2, True
                continue
            if not self._is_named(slot + count, b"".join(hashes[place : place + leap])):
                leap, is_near = leap // 2, True  # no chain, or not of ours
                continue
            count += leap
            leap = leap if is_near else _LEAP * leap
        return count
