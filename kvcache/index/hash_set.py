"""Sets of hashes that keep the order in which they came: one call for many hashes. Pure.

In C (native/hash_set.c) where there is a compiler; else a dict. Both do the same.
"""

import functools
from collections.abc import Iterable
from typing import Any

from kvrelay.hashing import HASH_BYTES, HASH_TABLE, table_seed
from kvrelay.native.build import NativeLibrary
from kvrelay.types import BlockHash

LIBRARY = NativeLibrary.extension(
    "kvrelay_hash_set", __file__, "hash_set.c", [*HASH_TABLE.headers, HASH_TABLE.sources[1]]
)


class PythonHashSet:
    """Hashes of HASH_BYTES, each once, in the order in which they came."""

    __slots__ = ("_hashes",)

    def __init__(self) -> None:
        self._hashes: dict[BlockHash, None] = {}

    def toggle(self, run: bytes, opposite: "PythonHashSet", /) -> None:
        """Each hash in `run` (concatenated) leaves `opposite`, another set; one that is not there joins this one."""
        mine, others = self._hashes, opposite._hashes
        for at in range(0, len(run) - HASH_BYTES + 1, HASH_BYTES):
            one = BlockHash(bytes(run[at : at + HASH_BYTES]))
            if one in others:
                del others[one]
            else:
                mine[one] = None

    def add(self, hashes: tuple[BlockHash, ...], /) -> list[bytes]:
        """Add these; returns those that are new."""
        fresh = list(dict.fromkeys(one for one in hashes if one not in self._hashes))
        self._hashes.update(dict.fromkeys(fresh))
        return list[bytes](fresh)

    def remove(self, hashes: tuple[BlockHash, ...], /) -> list[bytes]:
        """Remove these; returns those that were there."""
        return [one for one in hashes if self._hashes.pop(one, self) is None]

    def hashes(self) -> tuple[BlockHash, ...]:
        """All, in the order in which they came."""
        return tuple(self._hashes)

    def clear(self) -> None:
        """Remove all."""
        self._hashes.clear()

    def __contains__(self, one: object) -> bool:
        return one in self._hashes

    def __len__(self) -> int:
        return len(self._hashes)


HashSet = PythonHashSet  # the extension's HashSet has the same methods


@functools.cache
def extension() -> Any:
    """The extension module with `HashSet(seed)`; None without a compiler."""
    return LIBRARY.load_or_none(instead="cache events are collected in Python")


def new_hash_set(hashes: Iterable[BlockHash] = ()) -> HashSet:
    """A set of these."""
    module = extension()
    fresh: HashSet = PythonHashSet() if module is None else module.HashSet(table_seed())
    fresh.add(tuple(hashes))
    return fresh
