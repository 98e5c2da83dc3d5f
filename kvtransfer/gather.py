"""Checksums of atoms, which may lie in several pieces: both ends hash the same bytes in the same order.

An atom of one piece is hashed where it lies. One of several pieces is gathered first, a few hundred KiB at a time.
"""

from typing import Any

import numpy as np
from numpy.typing import NDArray

from kvrelay.kvtransfer.checksums import Checksums, checksums_at, weighted_sums
from kvrelay.kvtransfer.mover import xxh3_regions
from kvrelay.kvtransfer.plans import Offsets
from kvrelay.types import KvMemory

_BATCH_BYTES = 512 << 10


def checksums_of_atoms(memory: KvMemory, pieces: Offsets, piece_bytes: int) -> Checksums:
    """One checksum per atom.

    Args:
        pieces: [num_atoms, pieces_per_atom] where each piece begins, bytes from the pool's base.
    """
    num_atoms, each = pieces.shape
    if each == 1 and (memory.view is not None or piece_bytes == memory.layout.region_bytes):
        return checksums_at(memory, pieces[:, 0], piece_bytes)
    step = max(_BATCH_BYTES // (each * piece_bytes), 1)
    batches = [_batch(memory, pieces[first : first + step], piece_bytes) for first in range(0, num_atoms, step)]
    return np.concatenate(batches) if batches else np.empty(0, dtype=np.uint64)


def _batch(memory: KvMemory, pieces: Offsets, piece_bytes: int) -> Checksums:
    if memory.view is None:
        return _device_batch(memory, pieces, piece_bytes)
    word = 8 if piece_bytes % 8 == 0 and not (pieces % 8).any() and memory.layout.num_bytes % 8 == 0 else 1
    pool: NDArray[Any] = np.frombuffer(memory.view, dtype=np.uint64 if word == 8 else np.uint8)
    index = (pieces // word)[:, :, None] + np.arange(piece_bytes // word)
    gathered = np.ascontiguousarray(pool[index].reshape(len(pieces), -1)).view(np.uint8)
    atom_bytes = gathered.shape[1]
    return xxh3_regions(gathered.reshape(-1).data, np.arange(len(pieces)) * atom_bytes, atom_bytes)


def _device_batch(memory: KvMemory, pieces: Offsets, piece_bytes: int) -> Checksums:
    """Unverified on a GPU. Pieces must be whole 64-bit words, as every head of 4 or more elements is."""
    import torch

    assert isinstance(memory.owner, torch.Tensor)
    words = memory.owner.reshape(-1).view(torch.int64)
    begins = torch.from_numpy(pieces // 8).to(words.device)
    index = begins[:, :, None] + torch.arange(piece_bytes // 8, device=words.device)
    gathered = words[index].reshape(1, len(pieces), -1)
    return weighted_sums(gathered, [0] * len(pieces), list(range(len(pieces))))
