"""Where each block's name stands in a row of slots: in C, or in Python where no compiler is.

Owns the slots' numbers alone. The names stand in the caller's bytearray, 16 bytes for each slot. In C an entry is 8 bytes, of
a table that is between an eighth and three quarters full. In Python it is a dict with the names in it, some 120 bytes each, which
is copied when it has become much too large. Both do the same (tests/kvrelay/test_hash_index.py).
"""

import functools
import logging
import os
from array import array
from collections.abc import Callable, Sequence
from itertools import repeat
from pathlib import Path
from typing import Any, NamedTuple, Protocol

from kvrelay.errors import BackendUnavailable
from kvrelay.hashing import HASH_BYTES
from kvrelay.native.build import load_builtins

logger = logging.getLogger(__name__)

_SPARSE = 4  # times as many as there are names, that the dict once had, make it worth copying
_SMALL = 1024


class BlockTable(Protocol):
    """A slot for each name that has one, from 1 on. Lists are lists: nothing else will do."""

    def find(self, names: bytearray, kinds: "array[int]", hashes: list[bytes]) -> tuple[list[int], list[int]]:
        """(the slot of each, 0 where it has none; that slot's number in `kinds`, of 32 bits each)."""

    def find_one(self, names: bytearray, name: bytes) -> int:
        """Its slot; 0: it has none."""

    def add(self, names: bytearray, hashes: list[bytes], first: int) -> None:
        """These, which have no slot, each once, are written to the slots from `first` on, and found there from now on."""

    def move(self, names: bytearray, slots: list[int], first: int) -> None:
        """The names in these slots stand in those from `first` on. None of those is a slot that comes later in the list."""

    def remove(self, names: bytearray, slots: list[int]) -> None:
        """The names in these slots are found no more; they stay written there."""

    def count(self) -> int:
        """Names that have a slot."""

    def num_bytes(self) -> int:
        """Of memory that Python does not count."""


class PythonTable:
    """A dict."""

    __slots__ = ("_most", "_slot_of")

    def __init__(self) -> None:
        self._slot_of: dict[bytes, int] = {}
        self._most = 0

    def find(self, names: bytearray, kinds: "array[int]", hashes: list[bytes]) -> tuple[list[int], list[int]]:
        slots = list(map(self._slot_of.get, hashes, repeat(0)))
        return slots, list(map(kinds.__getitem__, slots))

    def find_one(self, names: bytearray, name: bytes) -> int:
        return self._slot_of.get(name, 0)

    def add(self, names: bytearray, hashes: list[bytes], first: int) -> None:
        names[HASH_BYTES * first : HASH_BYTES * (first + len(hashes))] = b"".join(hashes)
        self._slot_of.update(zip(hashes, range(first, first + len(hashes)), strict=True))
        self._most = max(self._most, len(self._slot_of))

    def move(self, names: bytearray, slots: list[int], first: int) -> None:
        moved = self._named(names, slots)
        names[HASH_BYTES * first : HASH_BYTES * (first + len(moved))] = b"".join(moved)
        self._slot_of.update(zip(moved, range(first, first + len(moved)), strict=True))

    def remove(self, names: bytearray, slots: list[int]) -> None:
        for name in self._named(names, slots):
            del self._slot_of[name]
        if self._most > _SMALL and _SPARSE * len(self._slot_of) < self._most:
            self._slot_of = dict(self._slot_of)
            self._most = len(self._slot_of)

    def _named(self, names: bytearray, slots: Sequence[int]) -> list[bytes]:
        return [bytes(names[HASH_BYTES * slot : HASH_BYTES * (slot + 1)]) for slot in slots]

    def count(self) -> int:
        return len(self._slot_of)

    def num_bytes(self) -> int:
        return 0


class NativeTable:
    """The compiled one: its functions in the place of methods, for the calls are many and short."""

    __slots__ = ("add", "count", "find", "find_one", "move", "num_bytes", "remove")

    def __init__(self, functions: tuple[Callable[..., Any], ...]) -> None:
        self.find, self.find_one, self.add, self.move, self.remove, self.count, self.num_bytes = functions


class Library(NamedTuple):
    """The compiled functions: `make(seed)` gives a table's, `are_distinct` whether some names are known to be."""

    make: Callable[[int], tuple[Callable[..., Any], ...]]
    are_distinct: Callable[[list[bytes]], int]


@functools.cache
def library() -> Library | None:
    """Compiled at the first use; None where it cannot be had."""
    try:
        return Library(*load_builtins("block_table", [Path(__file__).parent / "table" / "table.c"]))
    except BackendUnavailable as error:
        logger.info("tables of blocks in Python: %s", error)
        return None


def block_table() -> BlockTable:
    """An empty table. Its seed is drawn: nobody can choose prompts whose names crowd in it."""
    native = library()
    return PythonTable() if native is None else NativeTable(native.make(int.from_bytes(os.urandom(8), "little") >> 1))


def distinct(hashes: Sequence[bytes]) -> list[bytes]:
    """Each of them once, in their order; the list itself where they are distinct."""
    native = library()
    if native is not None and type(hashes) is list and native.are_distinct(hashes):
        return hashes
    return list(dict.fromkeys(hashes))
