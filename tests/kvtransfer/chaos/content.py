"""What a block of tests/kvtransfer/chaos/chaos.py must hold: a function of who wrote it, where, and for the how-manieth
time.

So a block that is another's, or of another time, shows. Pure: numpy and hashlib only.
"""

import hashlib
from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from kvrelay.types import KvLayout

LAYOUT = KvLayout(num_layers=4, num_blocks=384, block_size=16, num_kv_heads=4, head_dim=32, dtype="bfloat16")
_STEP, _MIX = np.uint64(0x9E3779B97F4A7C15), np.uint64(0xBF58476D1CE4E5B9)


def content(epoch: str, blocks: Sequence[int], generations: Sequence[int]) -> NDArray[np.uint8]:
    """[num_layers, blocks, region_bytes] as the source of this epoch writes them."""
    seeds = np.empty((LAYOUT.num_layers, len(blocks)), dtype=np.uint64)
    for column, (block, generation) in enumerate(zip(blocks, generations, strict=True)):
        name = f"{epoch}/{block}/{generation}".encode()
        seeds[:, column] = np.frombuffer(hashlib.blake2b(name, digest_size=8 * LAYOUT.num_layers).digest(), dtype="<u8")
    words = seeds[..., None] + np.arange(LAYOUT.region_bytes // 8, dtype=np.uint64) * _STEP
    words = (words ^ (words >> np.uint64(30))) * _MIX
    words ^= words >> np.uint64(27)
    return words.astype("<u8", copy=False).view(np.uint8)


def digests(regions: NDArray[np.uint8]) -> list[str]:
    """One of each block, over all its layers. `regions`: [num_layers, blocks, region_bytes]."""
    return [hashlib.blake2b(regions[:, i].tobytes(), digest_size=16).hexdigest() for i in range(regions.shape[1])]
