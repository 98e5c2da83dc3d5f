"""Two bits for each worker in one integer: "holds it anywhere" and, above it, "holds it in its pool". Pure arithmetic.

Row r of the index has the bits 2 r and 2 r + 1.
"""

from collections.abc import Iterable

import numpy as np
from numpy.typing import NDArray

Ints = NDArray[np.int64]

_FEW = 6  # bits up to which a Python loop is faster than numpy


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
        if bits.bit_count() <= _FEW:
            while bits:
                flat[place := bits.bit_length() - 1] = depth
                bits ^= 1 << place
        else:
            packed = np.frombuffer(bits.to_bytes((2 * num_rows + 7) // 8, "little"), np.uint8)
            reach = np.unpackbits(packed, count=2 * num_rows, bitorder="little").view(np.bool_)
            np.copyto(flat, depth, where=reach)
    return found
