"""Checksums of atoms, which may lie in several pieces: both ends hash the same bytes in the same order.

In host memory the mover hashes them. On a GPU an atom of one piece is summed where it lies; atoms of several pieces
are gathered first, a few hundred KiB at a time.
"""

import numpy as np

from kvrelay.kvtransfer.mover.mover import xxh3_atoms
from kvrelay.kvtransfer.plans.copy_plan import Offsets
from kvrelay.kvtransfer.protocol.checksums import Checksums, device_checksums, weighted_sums
from kvrelay.types import KvMemory

_BATCH_BYTES = 512 << 10


def checksums_of_atoms(memory: KvMemory, pieces: Offsets, piece_bytes: int) -> Checksums:
    """One checksum per atom.

    Args:
        pieces: [num_atoms, pieces_per_atom] where each piece begins, bytes from the pool's base.
    """
    if memory.view is not None:
        return xxh3_atoms(memory.view, pieces, piece_bytes)
    num_atoms, each = pieces.shape
    if each == 1 and piece_bytes == memory.layout.region_bytes:
        return device_checksums(memory, pieces[:, 0])
    step = max(_BATCH_BYTES // (each * piece_bytes), 1)
    batches = [_device_batch(memory, pieces[first : first + step], piece_bytes) for first in range(0, num_atoms, step)]
    return np.concatenate(batches) if batches else np.empty(0, dtype=np.uint64)


def _device_batch(memory: KvMemory, pieces: Offsets, piece_bytes: int) -> Checksums:
    """Unverified on a GPU. Pieces must be whole 32-bit words and atoms whole 64-bit ones, as those of 4 or more numbers are."""
    import torch

    assert isinstance(memory.owner, torch.Tensor)
    width = 8 if piece_bytes % 8 == 0 else 4  # a vector with its scale is no whole number of 64-bit words
    words = memory.owner.reshape(-1).view(torch.int64 if width == 8 else torch.int32)
    begins = torch.from_numpy(pieces // width).to(words.device)
    index = begins[:, :, None] + torch.arange(piece_bytes // width, device=words.device)
    gathered = words[index].reshape(1, len(pieces), -1).view(torch.int64)
    return weighted_sums(gathered, [0] * len(pieces), list(range(len(pieces))))
