"""Checksums of regions: what proves that a block arrived as it left.

Host memory: xxh3-64 (mover.py). CUDA memory: a position-weighted 64-bit sum computed on the device, so
that no KV crosses PCIe for it (not verified on hardware yet). Both ends must use the same kind;
the kind follows from where the pool lies and is compared when they connect.

A chunk may lie in several pieces: both ends hash the same bytes in the same order. On a GPU a chunk of one piece is
summed where it lies; chunks of several pieces are gathered first, a few hundred KiB at a time.
"""

import asyncio
import time
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import numpy as np
from numpy.typing import NDArray

from kvrelay.kvtransfer.mover.mover import INLINE_BYTES, Receipt, hash_in_place, xxh3_chunks
from kvrelay.kvtransfer.mover.mover_thread import MoverThread
from kvrelay.kvtransfer.plans.copy_plan import Offsets
from kvrelay.types import KvMemory

Checksums = NDArray[np.uint64]
Chosen = NDArray[np.bool_]
_BATCH_BYTES = 512 << 10
_MIX = -7046029254386353131  # 0x9E3779B97F4A7C15 as a signed 64-bit integer


def weighted_checksums(words: Any, layers: list[int], blocks: list[int]) -> Checksums:
    """Position-weighted sum of each region's 64-bit words, wrapping at 2**64.

    Args:
        words: torch int64 tensor [num_layers, num_blocks, words of a region], any device.
        layers, blocks: one of each per region.

    Every weight is odd, so a single changed bit always changes the sum.
    """
    import torch

    weights = torch.arange(words.shape[2], device=words.device, dtype=torch.int64) * 2 + 1
    of_layers = torch.tensor(layers, device=words.device, dtype=torch.int64)
    of_blocks = torch.tensor(blocks, device=words.device, dtype=torch.int64)
    totals = ((words[of_layers, of_blocks] ^ _MIX) * weights).sum(-1)
    values: Checksums = totals.cpu().numpy().view(np.uint64)
    return values


def _device_words(memory: KvMemory) -> Any:
    """The CUDA pool as int64 words [num_layers, num_blocks, words]. `owner` must be the pool's tensor."""
    import torch

    if not isinstance(memory.owner, torch.Tensor):
        raise TypeError("a CUDA pool's owner must be its tensor")
    layout = memory.layout
    flat = memory.owner.reshape(-1).view(torch.int64)
    return flat.view(layout.num_layers, layout.num_blocks, layout.region_bytes // 8)


def kind_of(memory: KvMemory, checks: str) -> str:
    """Which checksums this pool makes under `settings.checks`: "xxh3", "sum64" or "off"."""
    if checks == "off":
        return "off"
    return "sum64" if memory.view is None else "xxh3"


def device_checksums(memory: KvMemory, offsets: Offsets) -> Checksums:
    """One checksum for each region of this CUDA pool that begins at `offsets`, bytes from its base."""
    layout = memory.layout
    layers, rest = np.divmod(offsets, layout.layer_bytes)
    blocks = rest // layout.region_bytes
    return weighted_checksums(_device_words(memory), layers.tolist(), blocks.tolist())


def pack(checksums: Checksums) -> bytes:
    """As little-endian u64, for a message."""
    return checksums.astype("<u8", copy=False).tobytes()


def unpack(data: bytes) -> Checksums:
    """Raises ValueError when `data` is no whole number of u64."""
    return np.frombuffer(data, dtype="<u8")


def checksums_of(memory: KvMemory, pieces: Offsets, piece_bytes: int) -> Checksums:
    """One checksum per chunk.

    Args:
        pieces: [num_chunks, pieces_per_chunk] where each piece begins, bytes from the pool's base.
    """
    if memory.view is not None:
        return xxh3_chunks(memory.view, pieces, piece_bytes)
    num_chunks, each = pieces.shape
    if each == 1 and piece_bytes == memory.layout.region_bytes:
        return device_checksums(memory, pieces[:, 0])
    step = max(_BATCH_BYTES // (each * piece_bytes), 1)
    batches = [_device_batch(memory, pieces[first : first + step], piece_bytes) for first in range(0, num_chunks, step)]
    return np.concatenate(batches) if batches else np.empty(0, dtype=np.uint64)


def _device_batch(memory: KvMemory, pieces: Offsets, piece_bytes: int) -> Checksums:
    """Unverified on a GPU. Pieces must be whole 32-bit words and chunks whole 64-bit ones, as those of 4 or more
    numbers are.
    """
    import torch

    assert isinstance(memory.owner, torch.Tensor)
    width = 8 if piece_bytes % 8 == 0 else 4  # a vector with its scale is no whole number of 64-bit words
    words = memory.owner.reshape(-1).view(torch.int64 if width == 8 else torch.int32)
    begins = torch.from_numpy(pieces // width).to(words.device)
    index = begins[:, :, None] + torch.arange(piece_bytes // width, device=words.device)
    gathered = words[index].reshape(1, len(pieces), -1).view(torch.int64)
    return weighted_checksums(gathered, [0] * len(pieces), list(range(len(pieces))))


class PoolChecksums:
    """Checksums of one pool, off the loop where they take long. Used on one loop."""

    def __init__(self, memory: KvMemory) -> None:
        self._memory, self._mover = memory, MoverThread()
        self._thread = ThreadPoolExecutor(max_workers=1, thread_name_prefix="kv-checksums")  # where there is no mover
        self.seconds = 0.0  # spent so far

    async def packed(self, pieces: Offsets, piece_bytes: int) -> bytes:
        """Of chunks whose pieces begin at `pieces`, [num_chunks, pieces_per_chunk]; as `pack` writes them."""
        began = time.perf_counter()
        if pieces.size * piece_bytes <= INLINE_BYTES and self._memory.view is not None:
            values = checksums_of(self._memory, pieces, piece_bytes)
        else:
            values = await self._on_thread(pieces, piece_bytes)
        self.seconds += time.perf_counter() - began
        return pack(values)

    async def _on_thread(self, pieces: Offsets, piece_bytes: int) -> Checksums:
        receipt = Receipt(pieces, piece_bytes)
        if self._memory.view is not None and MoverThread.can_be():
            hashing = hash_in_place(self._memory.view, receipt)
            if hashing is not None:
                await self._mover.submit(hashing, hashing.result)
                return receipt.found
        loop = asyncio.get_running_loop()
        return await loop.run_in_executor(self._thread, checksums_of, self._memory, pieces, piece_bytes)

    async def aclose(self) -> None:
        await self._mover.aclose()
        self._thread.shutdown(wait=False)


def chosen_regions(nonce: bytes, num_layers: int, num_blocks: int, share: float) -> Chosen:
    """[num_layers, num_blocks]: about `share` of all regions, and at least one in every block.

    Drawn from the ticket's nonce, so that no region is the one that is never looked at.
    """
    random = np.random.Generator(np.random.PCG64(int.from_bytes(nonce, "little")))
    chosen = random.random((num_layers, num_blocks)) < share
    chosen[random.integers(0, num_layers, num_blocks), np.arange(num_blocks)] = True
    return chosen
