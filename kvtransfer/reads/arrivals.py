"""An arrival: one read's chunks, verified on the reading thread as they land, while they are still in its caches."""

import time
from collections.abc import Callable

import numpy as np
from numpy.typing import NDArray

from kvrelay.kvtransfer.mover.mover import Receipt
from kvrelay.kvtransfer.plans.copy_plan import Offsets
from kvrelay.kvtransfer.protocol.checksums import Checksums, checksums_of
from kvrelay.kvtransfer.transports.base import CorruptRead
from kvrelay.types import KvMemory

Tamper = Callable[[KvMemory, int, int], None]


class Arrival:
    """Call it with the bytes that are in place so far, or let a mover fill in its receipt and settle that.

    Chunks are in the order in which the read copies them.

    Args:
        memory: what the read writes.
        pieces: [num_chunks, pieces_per_chunk] where each piece lands, bytes from the memory's base.
        expected: [num_chunks] what they must hash to; None: nothing is verified.
        is_checked: [num_chunks] which of them to verify; None: all.
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
        self._chunk_bytes = pieces.shape[1] * piece_bytes
        self._num_done = self._num_landed = 0
        self._check_s = 0.0
        self._receipt: Receipt | None = None

    @property
    def num_landed(self) -> int:
        """Bytes so far; tells a slow read from a stuck one."""
        return self._num_landed if self._receipt is None else self._receipt.num_landed

    @property
    def check_s(self) -> float:
        """Seconds spent verifying."""
        return self._check_s if self._receipt is None else self._receipt.hash_s

    def receipt(self) -> Receipt | None:
        """What a mover is to fill in; None where chunks must be looked at one by one: a fault is injected, or
        the memory is a GPU's."""
        if self._tamper is not None or self._memory.view is None:
            return None
        if self._expected is None:
            self._receipt = Receipt()
        else:
            self._receipt = Receipt(self._pieces, self._piece_bytes, self._is_checked)
        return self._receipt

    def settle(self, receipt: Receipt) -> None:
        """The read that filled in `receipt` is over. Raises CorruptRead, naming the first wrong chunk."""
        if self._expected is None or bytes(receipt.hashes) == self._expected.tobytes():
            return
        is_wrong = receipt.found != self._expected
        if self._is_checked is not None:
            is_wrong &= self._is_checked
        _refuse(np.flatnonzero(is_wrong))

    def __call__(self, num_bytes: int) -> None:
        """Raises CorruptRead, naming the first wrong chunk by its index."""
        first, stop = self._num_done, num_bytes // self._chunk_bytes
        self._num_landed, self._num_done = num_bytes, stop
        pieces = self._pieces[first:stop]
        if self._tamper is not None:
            for offset in pieces.ravel().tolist():
                self._tamper(self._memory, offset, self._piece_bytes)
        if self._expected is None or not len(pieces):
            return
        began = time.perf_counter()
        self._verify(first, pieces, self._expected[first:stop])
        self._check_s += time.perf_counter() - began

    def _verify(self, first: int, pieces: Offsets, expected: Checksums) -> None:
        index = np.arange(first, first + len(pieces))
        if self._is_checked is not None:
            chosen = self._is_checked[index]
            index, pieces, expected = index[chosen], pieces[chosen], expected[chosen]
        _refuse(index[checksums_of(self._memory, pieces, self._piece_bytes) != expected])


def _refuse(wrong: NDArray[np.intp]) -> None:
    """Raises CorruptRead when any index is given."""
    if len(wrong):
        raise CorruptRead(len(wrong), int(wrong[0]))
