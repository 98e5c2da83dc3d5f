"""Chained hashes of full blocks: the names under which KV is cached, routed and shared.

A block's hash covers its tokens and, through its parent, everything before it, plus the
tenant's salt; two processes agree because nothing here is randomised (Python's `hash` is).
"""

import hashlib
from collections.abc import Sequence

import numpy as np

from kvrelay.types import BlockHash

HASH_SEED = "kvrelay-blake2b-128-v1"
HASH_BYTES = 16


def root_hash(salt: str = "") -> BlockHash:
    """The parent of a sequence's first block; differs for each tenant's salt."""
    return BlockHash(hashlib.blake2b(f"{HASH_SEED}\0{salt}".encode(), digest_size=HASH_BYTES).digest())


def next_hash(parent: BlockHash, block_tokens: Sequence[int]) -> BlockHash:
    """The hash of one full block that follows `parent`."""
    data = np.asarray(block_tokens, dtype="<i4").tobytes()
    return BlockHash(hashlib.blake2b(parent + data, digest_size=HASH_BYTES).digest())


def block_hashes(tokens: Sequence[int], block_size: int, salt: str = "") -> list[BlockHash]:
    """Hashes of every full block of `tokens`, first to last. A partial tail has none."""
    data = np.asarray(tokens, dtype="<i4").tobytes()
    width = 4 * block_size
    parent = root_hash(salt)
    hashes: list[BlockHash] = []
    for start in range(0, len(data) - width + 1, width):
        parent = BlockHash(hashlib.blake2b(parent + data[start : start + width], digest_size=HASH_BYTES).digest())
        hashes.append(parent)
    return hashes
