"""Checksums of regions: what proves that a block arrived as it left.

Host memory: xxh3-64 (mover.py). CUDA memory: a position-weighted 64-bit sum computed on the device, so
that no KV crosses PCIe for it (not verified on hardware yet). Both ends must use the same kind;
the kind follows from where the pool lies and is compared when they connect.
"""

from typing import Any

import numpy as np
from numpy.typing import NDArray

from kvrelay.kvtransfer.plans.copy_plan import Offsets
from kvrelay.types import KvMemory

Checksums = NDArray[np.uint64]
_MIX = -7046029254386353131  # 0x9E3779B97F4A7C15 as a signed 64-bit integer


def weighted_sums(words: Any, layers: list[int], blocks: list[int]) -> Checksums:
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
    sums = ((words[of_layers, of_blocks] ^ _MIX) * weights).sum(-1)
    values: Checksums = sums.cpu().numpy().view(np.uint64)
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
    return weighted_sums(_device_words(memory), layers.tolist(), blocks.tolist())


def pack(checksums: Checksums) -> bytes:
    """As little-endian u64, for a message."""
    return checksums.astype("<u8", copy=False).tobytes()


def unpack(data: bytes) -> Checksums:
    """Raises ValueError when `data` is no whole number of u64."""
    return np.frombuffer(data, dtype="<u8")
