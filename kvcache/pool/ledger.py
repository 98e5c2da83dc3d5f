"""The state of each block: its references, its generation, and the node of the prefix index that holds it. Pure.

Flat arrays, and operations on many blocks at once: single calls into C (native/ledger.c) where there is a compiler,
else the same in Python.
"""

import functools
from array import array
from collections.abc import Callable
from typing import Any, TypeAlias

import numpy as np
from numpy.typing import NDArray

from kvrelay.hashing import HASH_BYTES
from kvrelay.native.build import NativeLibrary

BlockIds: TypeAlias = "array[int]"  # "i": a block id array, as fast to slice and join as bytes
Ints = NDArray[np.int32]
Run = bytes | bytearray  # concatenated hashes


class BlockLedger:
    """References, generation and node index (-1: not indexed) of each block."""

    take: Callable[[BlockIds], None]
    """Set one reference on each block, and advance its generation."""
    acquire: Callable[[BlockIds], tuple[int, list[int]]]
    """Add a reference to each: (how many had none, their nodes, perhaps repeated). AssertionError: a free block."""
    release: Callable[[BlockIds], tuple[int, list[int], bytes]]
    """Drop a reference of each: (how many indexed ones have none left, their nodes, packed ids of the freed ones)."""
    held: Callable[[BlockIds], int]
    """The number of blocks up to the last one with a reference."""
    assign: Callable[[BlockIds, int], None]
    """These blocks are in this node of the index from now on; -1: in none."""
    common: Callable[[Run, int, Run, int, int], int]
    """(run, first, other, position, limit): the common leading hashes of run[first:] and other[position:], up to
    `limit`.
    """

    def __init__(self, num_blocks: int) -> None:
        self.refs, self.generations = array("i", [0]) * num_blocks, array("I", [0]) * num_blocks
        self.owners = array("i", [-1]) * num_blocks
        self.ref_array: Ints = np.frombuffer(self.refs, dtype=np.int32)  # views of the same memory
        self.owner_array: Ints = np.frombuffer(self.owners, dtype=np.int32)
        bind = binder()
        own = (self._take, self._acquire, self._release, self._held, self._assign, _common)
        compiled = bind(self.refs, self.generations, self.owners) if bind is not None else own
        self.take, self.acquire, self.release, self.held, self.assign, self.common = compiled

    def idle(self, first: int) -> NDArray[np.int64]:
        """Indexed blocks without a reference, ascending from `first` on, then the others."""
        found = np.flatnonzero((self.ref_array == 0) & (self.owner_array >= 0))
        return np.roll(found, -int(np.searchsorted(found, first)))

    def _take(self, table: BlockIds) -> None:
        for block in table:
            self.refs[block] = 1
            self.generations[block] += 1

    def _acquire(self, table: BlockIds) -> tuple[int, list[int]]:
        refs = self.refs
        nodes = [self.owners[block] for block in table if not refs[block]]
        assert -1 not in nodes, "a free block cannot be acquired"
        for block in table:
            refs[block] += 1
        return len(nodes), list(dict.fromkeys(nodes))

    def _release(self, table: BlockIds) -> tuple[int, list[int], bytes]:
        nodes: list[int] = []
        freed = array("i")
        for block in table:
            left = self.refs[block] - 1
            assert left >= 0, f"block {block} is released more often than acquired"
            self.refs[block] = left
            if left:
                continue
            if self.owners[block] < 0:
                freed.append(block)
            else:
                nodes.append(self.owners[block])
        return len(nodes), list(dict.fromkeys(nodes)), freed.tobytes()

    def _held(self, table: BlockIds) -> int:
        return next((at for at in range(len(table), 0, -1) if self.refs[table[at - 1]]), 0)

    def _assign(self, table: BlockIds, node: int) -> None:
        for block in table:
            self.owners[block] = node


def _common(run: Run, first: int, other: Run, position: int, most: int) -> int:
    most = min(most, len(run) // HASH_BYTES - first, len(other) // HASH_BYTES - position)
    if most <= 0:
        return 0
    mine = np.frombuffer(run, np.uint64, 2 * most, first * HASH_BYTES)
    unlike = mine != np.frombuffer(other, np.uint64, 2 * most, position * HASH_BYTES)
    at = int(unlike.argmax())
    return at // 2 if unlike[at] else most


LIBRARY = NativeLibrary.extension("kvrelay_ledger", __file__, "ledger.c")


@functools.cache
def binder() -> Callable[..., tuple[Any, ...]] | None:
    """Returns take, acquire, release, held, assign and common for three arrays; None without a compiler."""
    module = LIBRARY.load_or_none(instead="the block pool runs in Python")
    if module is None:
        return None

    def bind(refs: object, generations: object, owners: object) -> tuple[Any, ...]:
        counters = module.BlockCounters(refs, generations, owners)
        return counters.take, counters.acquire, counters.release, counters.held, counters.assign, module.common

    return bind
