"""The host tier's memory: a slab with one row for each block, and the copies between it and a worker's KV pool.

A row is a copy of a whole block: one run of bytes, layer after layer, as in the pool. The slab is shareable between
processes, as a pool on CPU is. On CPU a batch is one C call without the GIL (numpy where there is no compiler); on CUDA
torch copies on a stream of its own (these copies have not run on a GPU yet).
"""

import ctypes
import functools
import logging
import mmap
import os
import weakref
from collections.abc import Sequence
from pathlib import Path
from typing import Any, cast

import numpy as np
import torch
import xxhash
from numpy.typing import NDArray
from torch import Tensor

from kvrelay.errors import ConfigError
from kvrelay.native.build import XXH3_HEADERS, XXH3_SOURCES, NativeLibrary
from kvrelay.types import KvLayout, KvMemory

logger = logging.getLogger(__name__)

Numbers = NDArray[np.int64]
LIBRARY = NativeLibrary("kvcache", (Path(__file__).parent / "native" / "copy.c", *XXH3_SOURCES), XXH3_HEADERS)
_HASH_FROM = 241  # bytes: for shorter inputs XXH3 is another function, which native/xxh3 does not have


@functools.cache
def native_copies() -> Any | None:
    """native/copy.c; None where it cannot be compiled."""
    library = LIBRARY.load_or_none(instead="numpy copies blocks between tiers")
    if library is None:
        return None
    pointer, number = ctypes.c_void_p, ctypes.c_int64
    library.copy_runs.argtypes = [pointer] * 4 + [number] * 2
    library.copy_hashed.argtypes = [pointer] * 4 + [number] * 2 + [pointer]
    library.hash_runs.argtypes = [pointer] * 2 + [number] * 2 + [pointer]
    for function in (library.copy_runs, library.copy_hashed, library.hash_runs):
        function.restype = None
    return library


class HostSlab:
    """Memory for `num_rows` blocks of a pool in host memory, and the copies between the two. A BlockSlab."""

    def __init__(self, pool: KvMemory, num_bytes: int) -> None:
        """Raises ConfigError: `num_bytes` hold no block."""
        self._pool = pool
        self.num_layers, self.block_bytes = pool.layout.num_layers, pool.layout.block_bytes
        self.num_rows = num_bytes // self.block_bytes
        if self.num_rows < 1:
            raise ConfigError(f"cache.host_memory: {num_bytes} bytes hold no block of {self.block_bytes}")
        layout = KvLayout(1, self.num_rows, 1, 1, self.block_bytes, "uint8", is_latent=True)  # one region for each row
        memfd = os.memfd_create("kvrelay-host-tier", os.MFD_CLOEXEC)
        os.ftruncate(memfd, layout.num_bytes)
        mapping = mmap.mmap(memfd, layout.num_bytes)
        self._view = memoryview(mapping)
        address = torch.frombuffer(mapping, dtype=torch.uint8).data_ptr()
        self.memory = KvMemory(layout, address, "cpu", memfd, self._view, mapping)
        self._library = native_copies()
        self._is_hashed_in_c = self._library is not None and self.block_bytes >= _HASH_FROM

    def row(self, row: int) -> memoryview:
        """One row's bytes, writable."""
        return self._view[row * self.block_bytes : (row + 1) * self.block_bytes]

    def checksum(self, row: int) -> int:
        """XXH3-64 of the row's current bytes."""
        return xxhash.xxh3_64_intdigest(self.row(row))

    def checksums(self, rows: Sequence[int]) -> list[int]:
        """XXH3-64 of each row's current bytes."""
        if self._library is None or not self._is_hashed_in_c:
            return [self.checksum(row) for row in rows]
        offsets, hashes = np.asarray(rows, np.int64) * self.block_bytes, np.empty(len(rows), np.uint64)
        self._library.hash_runs(
            self.memory.address, offsets.ctypes.data, len(rows), self.block_bytes, hashes.ctypes.data
        )
        return [int(found) for found in hashes.tolist()]

    def save(self, blocks: Sequence[int], rows: Sequence[int]) -> list[int]:
        """Copy blocks of the pool into rows; returns the rows' checksums."""
        source, target = self._offsets(blocks), self._offsets(rows)
        if self._library is None or not self._is_hashed_in_c:
            self._copy(self.memory, self._pool, target, source, self.block_bytes)
            return self.checksums(rows)
        hashes = np.empty(len(rows), np.uint64)
        self._library.copy_hashed(
            self.memory.address,
            self._pool.address,
            target.ctypes.data,
            source.ctypes.data,
            len(target),
            self.block_bytes,
            hashes.ctypes.data,
        )
        return [int(found) for found in hashes.tolist()]

    def load(self, rows: Sequence[int], blocks: Sequence[int], layers: range) -> None:
        """Copy some layers of rows into blocks of the pool."""
        to, start = self._offsets(blocks, layers.start), self._offsets(rows, layers.start)
        self._copy(self._pool, self.memory, to, start, len(layers) * self._pool.layout.region_bytes)

    def _offsets(self, numbers: Sequence[int], layer: int = 0) -> Numbers:
        """int64 byte offsets of this layer of blocks in the pool, or of rows in the slab."""
        return np.asarray(numbers, np.int64) * self.block_bytes + layer * self._pool.layout.region_bytes

    def _copy(self, target: KvMemory, source: KvMemory, to: Numbers, start: Numbers, num_bytes: int) -> None:
        """Copy runs from the offsets `start` of one memory to the offsets `to` of the other."""
        if self._library is not None:
            addresses = target.address, source.address, to.ctypes.data, start.ctypes.data
            self._library.copy_runs(*addresses, len(to), num_bytes)
            return
        assert target.view is not None and source.view is not None
        into, out_of = np.frombuffer(target.view, np.uint8), np.frombuffer(source.view, np.uint8)
        for there, here in zip(to.tolist(), start.tolist(), strict=True):
            into[there : there + num_bytes] = out_of[here : here + num_bytes]


def page_lock(owner: object, address: int, num_bytes: int, device: torch.device) -> None:
    """Lock memory for asynchronous copies by the GPU, until `owner` is gone: memory that is unmapped while it is locked
    keeps its addresses from being locked again. By the driver: a failure in the runtime fails torch's next launch.
    """
    driver = ctypes.CDLL("libcuda.so.1")

    def call(function: str, *arguments: Any) -> int:
        with torch.cuda.device(device):
            torch.cuda.mem_get_info()  # the driver needs this thread's context
            return int(getattr(driver, function)(ctypes.c_void_p(address), *arguments))

    if code := call("cuMemHostRegister_v2", ctypes.c_size_t(num_bytes), 0):
        logger.warning("cannot page-lock %d bytes of host memory (CUDA error %d): copies are slower", num_bytes, code)
    else:
        weakref.finalize(owner, call, "cuMemHostUnregister").atexit = False


class CudaSlab(HostSlab):
    """The same for a pool on a GPU, in pinned host memory."""

    def __init__(self, pool: KvMemory, num_bytes: int) -> None:
        super().__init__(pool, num_bytes)
        self._device = torch.device(pool.device)
        self._blocks = cast(Tensor, pool.owner).view(torch.uint8).view(-1, self.block_bytes)
        self._rows = torch.frombuffer(self._view, dtype=torch.uint8).view(-1, self.block_bytes)
        self._stream = torch.cuda.Stream(self._device)
        page_lock(self, self.memory.address, self.memory.layout.num_bytes, self._device)

    def _after_steps(self) -> None:
        """Wait for the work queued on the engine's stream, which may still use these blocks."""
        self._stream.wait_stream(torch.cuda.default_stream(self._device))

    def save(self, blocks: Sequence[int], rows: Sequence[int]) -> list[int]:
        self._after_steps()
        with torch.cuda.stream(self._stream):
            for row, block in zip(rows, blocks, strict=True):
                self._rows[row].copy_(self._blocks[block], non_blocking=True)
        self._stream.synchronize()
        return self.checksums(rows)

    def load(self, rows: Sequence[int], blocks: Sequence[int], layers: range) -> None:
        self._after_steps()
        region_bytes = self._pool.layout.region_bytes
        part = slice(layers.start * region_bytes, layers.stop * region_bytes)
        with torch.cuda.stream(self._stream):
            for row, block in zip(rows, blocks, strict=True):
                self._blocks[block, part].copy_(self._rows[row, part], non_blocking=True)
        self._stream.synchronize()


def make_slab(pool: KvMemory, num_bytes: int) -> HostSlab:
    """The slab for this pool's device. Raises ConfigError: `num_bytes` hold no block."""
    return HostSlab(pool, num_bytes) if pool.view is not None else CudaSlab(pool, num_bytes)
