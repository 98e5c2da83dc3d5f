"""Carries out a read whose bytes this process can fetch by itself, and has them verified while the caches hold them.

Lets go of the interpreter lock while bytes move and are hashed, so that the engine's thread runs on.
"""

import numpy as np
from numpy.typing import NDArray

from kvrelay.kvtransfer.arrivals import Arrival
from kvrelay.kvtransfer.mover import Receipt, move
from kvrelay.kvtransfer.plans import CopyList
from kvrelay.kvtransfer.process_memory import Place
from kvrelay.kvtransfer.transports.base import Landed

Bytes = NDArray[np.uint8]
INLINE_BYTES = 256 << 10  # up to here: copied and verified (< 100 us) before a thread is awake (100 us and more)
_PIECE_BYTES = 256 << 10  # between two calls of `landed`: what the second-level cache keeps


def place_of(array: Bytes) -> Place:
    """This array's memory. Whoever uses the place keeps the array alive."""
    return Place(array.ctypes.data, array.nbytes)


def copy_all(source: Place, target: Place, copies: CopyList, landed: Landed | None = None) -> None:
    """Carry out `copies` and verify them. Raises TransportError (CorruptRead, NotTheSource), OSError.

    An Arrival is verified in one go with the copying: the lock is taken once a read, not once a piece. That counts
    when the engine's thread is busy, which may keep it for milliseconds each time.
    """
    receipt = landed.receipt() if isinstance(landed, Arrival) else None
    if isinstance(landed, Arrival) and receipt is not None:
        move(source, target, copies, receipt).run()
        landed.settle(receipt)
        return
    receipt, total = Receipt(), copies.total_bytes
    moving = move(source, target, copies, receipt)
    if landed is None:
        moving.run()
        return
    while receipt.num_landed < total:
        moving.run(min(receipt.num_landed + _PIECE_BYTES, total))
        landed(receipt.num_landed)
