"""Copies between pools of equal block size, for tests of the transports and of the plans."""

import numpy as np

from kvrelay.kvtransfer.mover.copy_plan import pair
from kvrelay.kvtransfer.mover.mover import Receipt, move
from kvrelay.kvtransfer.transports.memory import place_of


def plan_copies(source, target, source_blocks, target_blocks, layers):
    """Copies that bring `source_blocks[i]` to `target_blocks[i]`, blocks of equal size, in every layer of `layers`.

    Sorted by source there are fewest. Raises LayoutMismatch or ValueError when the two do not match.
    """
    both = pair(source, target)
    return both.copies(both.source.chunks(source_blocks), both.target.chunks(target_blocks), layers)


def region_offsets(layout, blocks, layers):
    """Byte offset of every (block, layer) region, block by block. `layers` are the pool's."""
    of_layers = np.arange(layers.start, layers.stop, dtype=np.int64) * layout.region_bytes
    of_blocks = np.asarray(blocks, dtype=np.int64) * layout.block_bytes
    return np.add.outer(of_blocks, of_layers).ravel()


def carry_out(source, target, copies):
    """Copy from one array to the other. Raises TransportError."""
    move(place_of(source), place_of(target), copies, Receipt()).run()
