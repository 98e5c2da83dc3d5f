"""Carries out a read whose bytes this process can fetch by itself, and has them verified while the caches hold them.

Lets go of the interpreter lock while bytes move and are hashed, so that the engine's thread runs on.
"""

from collections.abc import Callable
from functools import partial

import numpy as np
from numpy.typing import NDArray

from kvrelay.kvtransfer.mover.mover import NativeMove, Place, PythonMove, Receipt, move
from kvrelay.kvtransfer.plans.copy_plan import CopyList
from kvrelay.kvtransfer.reads.arrivals import Arrival
from kvrelay.kvtransfer.transports.base import Landed

Bytes = NDArray[np.uint8]
INLINE_BYTES = 256 << 10  # up to here: copied and verified (< 100 us) before a thread is awake (100 us and more)
_PIECE_BYTES = 256 << 10  # between two calls of `landed`: what the second-level cache keeps


def place_of(array: Bytes) -> Place:
    """This array's memory. Whoever uses the place keeps the array alive."""
    return Place(array.ctypes.data, array.nbytes)


def as_one(
    source: Place, target: Place, copies: CopyList, landed: Landed | None
) -> tuple[NativeMove | PythonMove, Callable[[], None]] | None:
    """(the whole read as one move that hashes what it brings, what to call when it is over: raises CorruptRead).

    None where `landed` must be called as pieces come: a fault is injected, or it is no Arrival.
    """
    receipt = landed.receipt() if isinstance(landed, Arrival) else Receipt() if landed is None else None
    if receipt is None:
        return None
    settle = partial(landed.settle, receipt) if isinstance(landed, Arrival) else _nothing
    return move(source, target, copies, receipt), settle


def _nothing() -> None:
    """What a read without checks has to settle."""


def copy_all(source: Place, target: Place, copies: CopyList, landed: Landed | None = None) -> None:
    """Carry out `copies` and verify them. Raises TransportError (CorruptRead)."""
    one = as_one(source, target, copies, landed)
    if one is not None:
        moving, settle = one
        moving.run()
        settle()
        return
    assert landed is not None
    receipt, total = Receipt(), copies.total_bytes
    moving = move(source, target, copies, receipt)
    while receipt.num_landed < total:
        moving.run(min(receipt.num_landed + _PIECE_BYTES, total))
        landed(receipt.num_landed)
