"""Checksums of KV in a GPU's memory, computed there, so that no KV crosses PCIe for them.

They run on a stream of their own: on the engine's they would wait for all layers that are launched already. Callers
know that the bytes are final (an event of the layer has passed, a read is over), so nothing is waited for but the sums.
"""

import logging
from functools import lru_cache
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

logger = logging.getLogger(__name__)

_MIX = -7046029254386353131  # 0x9E3779B97F4A7C15 as a signed 64-bit integer
_GATHERED_BYTES = 512 << 10  # at a time, without triton


@lru_cache(maxsize=64)
def _stream(device: torch.device) -> Any:
    return torch.cuda.Stream(device)


def device_checksums(memory: object, pieces: NDArray[np.int64], piece_bytes: int) -> NDArray[np.uint64]:
    """Position-weighted sums of 64-bit words, wrapping at 2**64, one for each chunk. From any thread.

    Every weight is odd, so that a single changed bit always changes the sum.

    Args:
        memory: the pool's tensor, contiguous; else TypeError.
        pieces: [num_chunks, pieces_per_chunk] where each piece begins, bytes from the tensor's begin; multiples of 4.
        piece_bytes: a multiple of 4; a chunk is one of 8.
    """
    if not isinstance(memory, Tensor):
        raise TypeError("a CUDA pool's owner must be its tensor")
    halves = memory.reshape(-1).view(torch.int32)
    if not halves.is_cuda:
        return _unsigned(_by_torch(halves, torch.from_numpy(pieces // 4), piece_bytes // 4))
    with torch.cuda.device(halves.device), torch.cuda.stream(_stream(halves.device)):
        sums = _by_triton if has_triton(halves.device) else _by_torch
        begins = torch.from_numpy(pieces // 4).pin_memory().to(halves.device, non_blocking=True)
        found = sums(halves, begins, piece_bytes // 4)
        arrived = torch.empty(found.shape, dtype=torch.int64).pin_memory()
        arrived.copy_(found, non_blocking=True)
        event = torch.cuda.Event()
        event.record()
    event.synchronize()
    return _unsigned(arrived)


def _unsigned(sums: Tensor) -> NDArray[np.uint64]:
    values: NDArray[np.uint64] = sums.numpy().view(np.uint64)
    return values


def _by_torch(halves: Tensor, begins: Tensor, piece_halves: int) -> Tensor:
    """halves: [n] int32. begins: [num_chunks, pieces_per_chunk] into it. Gathers a few hundred KiB at a time."""
    each = begins.shape[1]
    offsets = torch.arange(piece_halves, device=halves.device)
    weights = torch.arange(each * piece_halves // 2, device=halves.device, dtype=torch.int64) * 2 + 1
    step = max(_GATHERED_BYTES // (4 * each * piece_halves), 1)
    totals = []
    for part in begins.split(step):
        words = halves[part[:, :, None] + offsets].reshape(len(part), each * piece_halves).view(torch.int64)
        totals.append(((words ^ _MIX) * weights).sum(-1))
    return torch.cat(totals)


def _by_triton(halves: Tensor, begins: Tensor, piece_halves: int) -> Tensor:
    """As `_by_torch`, in one kernel that writes nothing but the sums."""
    from kvrelay.kvtransfer.mover import checksums_triton

    return checksums_triton.sums(halves, begins, piece_halves, _MIX)


@lru_cache(maxsize=64)
def has_triton(device: torch.device) -> bool:
    """Whether the fused kernel builds and computes what torch does; one log line where it does not.

    On the current stream of that device.
    """
    try:
        halves = torch.arange(-512, 512, dtype=torch.int32, device=device)
        for begins, piece_halves in (([[0, 130], [400, 12]], 6), ([[0], [300]], 256), ([[1, 7, 99, 500]], 3)):
            at = torch.tensor(begins, device=device)
            if not torch.equal(_by_triton(halves, at, piece_halves), _by_torch(halves, at, piece_halves)):
                raise RuntimeError("its sums differ from torch's")
    except Exception as error:  # not installed, or an error of its compiler or the driver
        logger.warning("KV checksums are computed by torch, slower: triton's kernel does not work here (%s)", error)
        return False
    return True
