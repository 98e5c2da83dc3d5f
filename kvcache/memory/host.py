"""The host tier's memory: a slab with one slot for each block, and what its bytes must be.

A slot holds a whole block, layer after layer, in one run of bytes, so that lower tiers and other workers take it in one
piece. The slab is shareable between processes as a pool on CPU is.
"""

import mmap
import os
from collections.abc import Sequence

import torch
import xxhash

from kvrelay.errors import ConfigError
from kvrelay.kvcache.memory.copies import make_copier
from kvrelay.types import KvLayout, KvMemory


def slab_layout(pool: KvLayout, num_slots: int) -> KvLayout:
    """A slab of so many slots as a layout of its own: one layer, one region for each slot."""
    return KvLayout(1, num_slots, 1, 1, pool.block_bytes, "uint8", is_latent=True)


class HostSlab:
    """Memory for `num_slots` blocks of a pool, and the copies between the two. Methods block; any thread."""

    def __init__(self, pool: KvMemory, num_bytes: int) -> None:
        num_slots = num_bytes // pool.layout.block_bytes
        if num_slots < 1:
            raise ConfigError(f"cache.host_memory: {num_bytes} bytes hold no block of {pool.layout.block_bytes}")
        self.num_layers, self.block_bytes = pool.layout.num_layers, pool.layout.block_bytes
        self.num_slots = num_slots
        layout = slab_layout(pool.layout, num_slots)
        memfd = os.memfd_create("kvrelay-host-tier", os.MFD_CLOEXEC)
        os.ftruncate(memfd, layout.num_bytes)
        mapping = mmap.mmap(memfd, layout.num_bytes)
        self._view = memoryview(mapping)
        address = torch.frombuffer(mapping, dtype=torch.uint8).data_ptr()
        self.memory = KvMemory(layout, address, "cpu", memfd, self._view, mapping)
        self._copier = make_copier(pool, self.memory)

    def slot(self, slot: int) -> memoryview:
        """One slot's bytes, writable."""
        return self._view[slot * self.block_bytes : (slot + 1) * self.block_bytes]

    def checksum(self, slot: int) -> int:
        """xxh3 of what is in the slot now."""
        return xxhash.xxh3_64_intdigest(self.slot(slot))

    def checksums(self, slots: Sequence[int]) -> list[int]:
        """The same of several."""
        return self._copier.checksums(slots)

    def save(self, blocks: Sequence[int], slots: Sequence[int]) -> list[int]:
        """Pool to slab; the checksums of what is there then."""
        return self._copier.save(blocks, slots)

    def load(self, slots: Sequence[int], blocks: Sequence[int], layers: range) -> None:
        """Slab to pool, some layers of each block."""
        self._copier.load(slots, blocks, layers)
