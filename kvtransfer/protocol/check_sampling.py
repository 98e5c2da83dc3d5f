"""Which regions of a transfer are checked under `checks: sampled`. Pure: both ends draw the same from the nonce."""

import numpy as np
from numpy.typing import NDArray

Chosen = NDArray[np.bool_]


def chosen_regions(nonce: bytes, num_layers: int, num_blocks: int, share: float) -> Chosen:
    """[num_layers, num_blocks]: about `share` of all regions, and at least one in every block.

    Drawn from the ticket's nonce, so that no region is the one that is never looked at.
    """
    random = np.random.Generator(np.random.PCG64(int.from_bytes(nonce, "little")))
    chosen = random.random((num_layers, num_blocks)) < share
    chosen[random.integers(0, num_layers, num_blocks), np.arange(num_blocks)] = True
    return chosen
