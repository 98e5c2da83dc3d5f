"""An arrival: one read's atoms, verified on the reading thread as they land, while they are still in its caches."""

import time
from collections.abc import Callable

import numpy as np
from numpy.typing import NDArray

from kvrelay.kvtransfer.checksums import Checksums
from kvrelay.kvtransfer.gather import checksums_of_atoms
from kvrelay.kvtransfer.plans import Offsets
from kvrelay.kvtransfer.transports.base import CorruptRead
from kvrelay.types import KvMemory

Tamper = Callable[[KvMemory, int, int], None]


class Arrival:
    """Call it with the bytes that are in place so far. Atoms are in the order in which the read copies them.

    Args:
        memory: what the read writes.
        pieces: [num_atoms, pieces_per_atom] where each piece lands, bytes from the memory's base.
        expected: [num_atoms] what they must hash to; None: nothing is verified.
        is_checked: [num_atoms] which of them to verify; None: all.
        tamper: fault injection, called with (memory, offset, num_bytes) for every piece before it is verified.
    """

    def __init__(
        self,
        memory: KvMemory,
        pieces: Offsets,
        piece_bytes: int,
        expected: Checksums | None,
        is_checked: NDArray[np.bool_] | None = None,
        tamper: Tamper | None = None,
    ) -> None:
        self._memory, self._pieces, self._piece_bytes = memory, pieces, piece_bytes
        self._expected, self._is_checked, self._tamper = expected, is_checked, tamper
        self._atom_bytes = pieces.shape[1] * piece_bytes
        self._num_done = 0
        self.num_landed = 0  # bytes; tells a slow read from a stuck one
        self.check_s = 0.0

    def __call__(self, num_bytes: int) -> None:
        """Raises CorruptRead, naming the first wrong atom by its index."""
        first, stop = self._num_done, num_bytes // self._atom_bytes
        self.num_landed, self._num_done = num_bytes, stop
        pieces = self._pieces[first:stop]
        if self._tamper is not None:
            for offset in pieces.ravel().tolist():
                self._tamper(self._memory, offset, self._piece_bytes)
        if self._expected is None or not len(pieces):
            return
        began = time.perf_counter()
        self._verify(first, pieces, self._expected[first:stop])
        self.check_s += time.perf_counter() - began

    def _verify(self, first: int, pieces: Offsets, expected: Checksums) -> None:
        index = np.arange(first, first + len(pieces))
        if self._is_checked is not None:
            chosen = self._is_checked[index]
            index, pieces, expected = index[chosen], pieces[chosen], expected[chosen]
        wrong = np.flatnonzero(checksums_of_atoms(self._memory, pieces, self._piece_bytes) != expected)
        if len(wrong):
            raise CorruptRead(len(wrong), int(index[wrong[0]]))
