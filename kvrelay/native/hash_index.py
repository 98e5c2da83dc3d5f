"""Which row of a column holds each block hash: in C, or in Python where no compiler is.

Owns the row numbers alone. The hashes lie in the caller's bytearray (`column`), 16 bytes for each row. In C an entry
takes 8 bytes, in a table that is between an eighth and three quarters full. In Python it is a dict that holds the
hashes too, some 120 bytes each, which is copied when it has become much too large. Both do the same
(tests/kvrelay/test_hash_index.py).
"""

import functools
import logging
import os
from array import array
from collections.abc import Sequence
from itertools import repeat
from pathlib import Path
from typing import Any, Protocol

from kvrelay.errors import BackendUnavailable
from kvrelay.hashing import HASH_BYTES
from kvrelay.native.build import load_extension

logger = logging.getLogger(__name__)

_FOLDER = Path(__file__).parent / "hash_table"
_SPARSE = 4  # the dict is copied once it has held so many times the hashes that it holds
_SMALL = 1024


class HashIndex(Protocol):
    """The row of each hash that has one, from 1 on. Lists are lists: no other sequence is accepted."""

    def find(self, column: bytearray, kinds: "array[int]", hashes: list[bytes], /) -> tuple[list[int], list[int]]:
        """(the row of each hash, 0 where it has none; `kinds` of that row, which has 32 bits for each)."""

    def find_one(self, column: bytearray, block_hash: bytes, /) -> int:
        """Its row; 0: it has none."""

    def add(self, column: bytearray, hashes: list[bytes], first: int, /) -> None:
        """Write these hashes, which are distinct and have no row, to the rows from `first` on."""

    def move(self, column: bytearray, rows: list[int], first: int, /) -> None:
        """Move the hashes of these rows to those from `first` on. None of those is a row that comes later in the
        list.
        """

    def remove(self, column: bytearray, rows: list[int], /) -> None:
        """The hashes of these rows are no longer found; the column keeps them."""

    def count(self) -> int:
        """Hashes that have a row."""

    def num_bytes(self) -> int:
        """Memory outside of Python's own count."""


class PythonHashIndex:
    """A dict."""

    __slots__ = ("_peak", "_row_of")

    def __init__(self) -> None:
        self._row_of: dict[bytes, int] = {}
        self._peak = 0

    def find(self, column: bytearray, kinds: "array[int]", hashes: list[bytes], /) -> tuple[list[int], list[int]]:
        rows = list(map(self._row_of.get, hashes, repeat(0)))
        return rows, list(map(kinds.__getitem__, rows))

    def find_one(self, column: bytearray, block_hash: bytes, /) -> int:
        return self._row_of.get(block_hash, 0)

    def add(self, column: bytearray, hashes: list[bytes], first: int, /) -> None:
        column[HASH_BYTES * first : HASH_BYTES * (first + len(hashes))] = b"".join(hashes)
        self._row_of.update(zip(hashes, range(first, first + len(hashes)), strict=True))
        self._peak = max(self._peak, len(self._row_of))

    def move(self, column: bytearray, rows: list[int], first: int, /) -> None:
        moved = self._hashes(column, rows)
        column[HASH_BYTES * first : HASH_BYTES * (first + len(moved))] = b"".join(moved)
        self._row_of.update(zip(moved, range(first, first + len(moved)), strict=True))

    def remove(self, column: bytearray, rows: list[int], /) -> None:
        for block_hash in self._hashes(column, rows):
            del self._row_of[block_hash]
        if self._peak > _SMALL and _SPARSE * len(self._row_of) < self._peak:
            self._row_of = dict(self._row_of)
            self._peak = len(self._row_of)

    def _hashes(self, column: bytearray, rows: Sequence[int]) -> list[bytes]:
        return [bytes(column[HASH_BYTES * row : HASH_BYTES * (row + 1)]) for row in rows]

    def count(self) -> int:
        return len(self._row_of)

    def num_bytes(self) -> int:
        return 0


@functools.cache
def native() -> Any:
    """The extension module with `HashTable(seed)` and `are_distinct(hashes)`; None without a compiler. Compiled on
    first use.
    """
    try:
        return load_extension("kvrelay_hash_table", [_FOLDER / "module.c", _FOLDER / "table.c"], [_FOLDER / "table.h"])
    except BackendUnavailable as error:
        logger.info("the hash index runs in Python: %s", error)
        return None


def new_hash_index() -> HashIndex:
    """An empty index. Its seed is random, so that no client can choose prompts whose hashes collide in it."""
    extension = native()
    if extension is None:
        return PythonHashIndex()
    index: HashIndex = extension.HashTable(int.from_bytes(os.urandom(8), "little"))
    return index


def distinct(hashes: Sequence[bytes]) -> list[bytes]:
    """Each of them once, in their order; the list itself where they are distinct."""
    extension = native()
    if extension is not None and type(hashes) is list and extension.are_distinct(hashes):
        return hashes
    return list(dict.fromkeys(hashes))
