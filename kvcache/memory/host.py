"""The host tier's memory: a slab with one row for each block.

A row holds a whole block, layer after layer, in one run of bytes, so stores and other workers read it in one piece. The
slab is shareable between processes, as a pool on CPU is.
"""

import mmap
import os
from collections.abc import Sequence

import torch
import xxhash

from kvrelay.errors import ConfigError
from kvrelay.kvcache.memory.copies import make_copier
from kvrelay.types import KvLayout, KvMemory


def slab_layout(pool: KvLayout, num_rows: int) -> KvLayout:
    """A slab of `num_rows` blocks of this pool as a layout of its own: one layer, one region for each row."""
    return KvLayout(1, num_rows, 1, 1, pool.block_bytes, "uint8", is_latent=True)


class HostSlab:
    """Memory for `num_rows` blocks of a pool, and the copies between the two. A BlockSlab."""

    def __init__(self, pool: KvMemory, num_bytes: int) -> None:
        """Raises ConfigError: `num_bytes` hold no block."""
        num_rows = num_bytes // pool.layout.block_bytes
        if num_rows < 1:
            raise ConfigError(f"cache.host_memory: {num_bytes} bytes hold no block of {pool.layout.block_bytes}")
        self.num_layers, self.block_bytes = pool.layout.num_layers, pool.layout.block_bytes
        self.num_rows = num_rows
        layout = slab_layout(pool.layout, num_rows)
        memfd = os.memfd_create("kvrelay-host-tier", os.MFD_CLOEXEC)
        os.ftruncate(memfd, layout.num_bytes)
        mapping = mmap.mmap(memfd, layout.num_bytes)
        self._view = memoryview(mapping)
        address = torch.frombuffer(mapping, dtype=torch.uint8).data_ptr()
        self.memory = KvMemory(layout, address, "cpu", memfd, self._view, mapping)
        self._copier = make_copier(pool, self.memory)

    def row(self, row: int) -> memoryview:
        """One row's bytes, writable."""
        return self._view[row * self.block_bytes : (row + 1) * self.block_bytes]

    def checksum(self, row: int) -> int:
        """XXH3-64 of the row's current bytes."""
        return xxhash.xxh3_64_intdigest(self.row(row))

    def checksums(self, rows: Sequence[int]) -> list[int]:
        """XXH3-64 of each row's current bytes."""
        return self._copier.checksums(rows)

    def save(self, blocks: Sequence[int], rows: Sequence[int]) -> list[int]:
        """Copy blocks of the pool into rows; returns the rows' checksums."""
        return self._copier.save(blocks, rows)

    def load(self, rows: Sequence[int], blocks: Sequence[int], layers: range) -> None:
        """Copy some layers of rows into blocks of the pool."""
        self._copier.load(rows, blocks, layers)
