"""The host tier's memory: a slab with one row for each block.

A row holds a whole block, layer after layer, in one run of bytes, so stores and other workers read it in one piece. The
slab is shareable between processes, as a pool on CPU is.
"""

import ctypes
import functools
import logging
import mmap
import os
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, Protocol

import numpy as np
import torch
import xxhash
from numpy.typing import NDArray

from kvrelay.errors import BackendUnavailable, ConfigError
from kvrelay.native.build import XXH3_HEADERS, XXH3_SOURCES, load_native
from kvrelay.types import KvLayout, KvMemory

logger = logging.getLogger(__name__)

Numbers = NDArray[np.int64]
_SOURCES = (Path(__file__).parent / "native" / "copy.c", *XXH3_SOURCES)
_CopyRuns = Callable[[int, int, Numbers, Numbers, int], None]  # target, source, their offsets, bytes of a run
_HASH_FROM = 241  # bytes: for shorter inputs XXH3 is another function, which native/xxh3 does not have


class Copier(Protocol):
    """Copies between one pool and one slab, whose rows hold a block's regions, layer after layer. Thread-safe."""

    def save(self, blocks: Sequence[int], rows: Sequence[int]) -> list[int]:
        """Pool to slab, every layer. Done on return; returns the rows' checksums (XXH3-64)."""

    def load(self, rows: Sequence[int], blocks: Sequence[int], layers: range) -> None:
        """Slab to pool, these layers. Done on return."""

    def checksums(self, rows: Sequence[int]) -> list[int]:
        """XXH3-64 of each row's current bytes."""


def make_copier(pool: KvMemory, slab: KvMemory) -> Copier:
    """The copier for this pool's device."""
    return HostCopier(pool, slab) if pool.view is not None else CudaCopier(pool, slab)


class _Offsets:
    """Byte offsets of the regions of blocks and rows."""

    def __init__(self, layout: KvLayout) -> None:
        self._layout = layout

    def in_pool(self, blocks: Sequence[int], layers: range) -> Numbers:
        """[len(blocks) * len(layers)] int64 byte offsets in the pool, block by block."""
        block = np.asarray(blocks, np.int64)[:, None] * self._layout.region_bytes
        return (block + np.asarray(layers, np.int64) * self._layout.layer_bytes).ravel()

    def in_slab(self, rows: Sequence[int], layers: range) -> Numbers:
        """[len(rows) * len(layers)] int64 byte offsets in the slab, row by row."""
        row = np.asarray(rows, np.int64)[:, None] * self._layout.block_bytes
        return (row + np.asarray(layers, np.int64) * self._layout.region_bytes).ravel()


class HostCopier:
    """Pool and slab in host memory."""

    def __init__(self, pool: KvMemory, slab: KvMemory) -> None:
        self._pool, self._slab, self._layout = pool, slab, pool.layout
        self._offsets = _Offsets(pool.layout)
        self._native = _native() if pool.layout.block_bytes >= _HASH_FROM else None
        self._copy = _native_copy() or _numpy_copy(pool, slab)

    def save(self, blocks: Sequence[int], rows: Sequence[int]) -> list[int]:
        layers = range(self._layout.num_layers)
        source, target = self._offsets.in_pool(blocks, layers), self._offsets.in_slab(rows, layers)
        if self._native is None:
            self._copy(self._slab.address, self._pool.address, target, source, self._layout.region_bytes)
            return self.checksums(rows)
        hashes = np.empty(len(rows), np.uint64)
        self._native.copy_hashed(
            self._slab.address,
            self._pool.address,
            target.ctypes.data,
            source.ctypes.data,
            len(target),
            self._layout.region_bytes,
            len(layers),
            hashes.ctypes.data,
        )
        return [int(found) for found in hashes.tolist()]

    def checksums(self, rows: Sequence[int]) -> list[int]:
        if self._native is None:
            return _checksums(self._slab, rows, self._layout.block_bytes)
        offsets = np.asarray(rows, np.int64) * self._layout.block_bytes
        hashes = np.empty(len(rows), np.uint64)
        self._native.hash_runs(
            self._slab.address, offsets.ctypes.data, len(rows), self._layout.block_bytes, hashes.ctypes.data
        )
        return [int(found) for found in hashes.tolist()]

    def load(self, rows: Sequence[int], blocks: Sequence[int], layers: range) -> None:
        source, target = self._offsets.in_slab(rows, layers), self._offsets.in_pool(blocks, layers)
        self._copy(self._pool.address, self._slab.address, target, source, self._layout.region_bytes)


def _checksums(slab: KvMemory, rows: Sequence[int], block_bytes: int) -> list[int]:
    assert slab.view is not None
    return [xxhash.xxh3_64_intdigest(slab.view[row * block_bytes : (row + 1) * block_bytes]) for row in rows]


@functools.cache
def _native() -> Any | None:
    """native/copy.c; None where it cannot be compiled."""
    try:
        library = load_native("kvcache", _SOURCES, XXH3_HEADERS)
    except BackendUnavailable as error:
        logger.info("no C compiler: numpy copies blocks between tiers: %s", error.why)
        return None
    pointer, number = ctypes.c_void_p, ctypes.c_int64
    library.copy_runs.argtypes = [pointer] * 4 + [number] * 2
    library.copy_hashed.argtypes = [pointer] * 4 + [number] * 3 + [pointer]
    library.hash_runs.argtypes = [pointer] * 2 + [number] * 2 + [pointer]
    for function in (library.copy_runs, library.copy_hashed, library.hash_runs):
        function.restype = None
    return library


def _native_copy() -> _CopyRuns | None:
    library = _native()
    if library is None:
        return None
    function = library.copy_runs

    def copy(target: int, source: int, target_offsets: Numbers, source_offsets: Numbers, run_bytes: int) -> None:
        function(target, source, target_offsets.ctypes.data, source_offsets.ctypes.data, len(target_offsets), run_bytes)

    return copy


def _numpy_copy(*memories: KvMemory) -> _CopyRuns:
    """The same through numpy, which holds the GIL."""
    buffers = {memory.address: np.frombuffer(memory.view, np.uint8) for memory in memories if memory.view is not None}

    def copy(target: int, source: int, target_offsets: Numbers, source_offsets: Numbers, run_bytes: int) -> None:
        into, out_of = buffers[target], buffers[source]
        for to, start in zip(target_offsets.tolist(), source_offsets.tolist(), strict=True):
            into[to : to + run_bytes] = out_of[start : start + run_bytes]

    return copy


class CudaCopier:
    """Pool on a GPU, slab in pinned host memory. Unverified on a GPU."""

    def __init__(self, pool: KvMemory, slab: KvMemory) -> None:
        layout = pool.layout
        tensor: Any = pool.owner
        self._device = torch.device(pool.device)
        self._pool = tensor.view(torch.uint8).view(layout.num_layers, layout.num_blocks, layout.region_bytes)
        host = torch.frombuffer(slab.view, dtype=torch.uint8)
        self._slab = host[: slab.layout.num_bytes].view(-1, layout.num_layers, layout.region_bytes)
        _pin(slab)
        self._stream = torch.cuda.Stream(self._device)
        self._memory = slab

    def _after_steps(self) -> None:
        """Wait for the work queued on the engine's stream, which may still use these blocks."""
        self._stream.wait_stream(torch.cuda.default_stream(self._device))

    def save(self, blocks: Sequence[int], rows: Sequence[int]) -> list[int]:
        self._after_steps()
        with torch.cuda.stream(self._stream):
            chosen = torch.tensor(blocks, device=self._device)
            gathered = self._pool.index_select(1, chosen).transpose(0, 1).contiguous()
            for index, row in enumerate(rows):
                self._slab[row].copy_(gathered[index], non_blocking=True)
        self._stream.synchronize()
        return self.checksums(rows)

    def checksums(self, rows: Sequence[int]) -> list[int]:
        return _checksums(self._memory, rows, self._memory.layout.block_bytes)

    def load(self, rows: Sequence[int], blocks: Sequence[int], layers: range) -> None:
        self._after_steps()
        with torch.cuda.stream(self._stream):
            for row, block in zip(rows, blocks, strict=True):
                part = self._slab[row, layers.start : layers.stop]
                self._pool[layers.start : layers.stop, block].copy_(part, non_blocking=True)
        self._stream.synchronize()


def _pin(slab: KvMemory) -> None:
    """Page-lock the slab for asynchronous copies by the GPU, until the process ends."""
    status = torch.cuda.cudart().cudaHostRegister(slab.address, slab.layout.num_bytes, 0)
    if int(status):
        logger.warning("cannot page-lock the host tier's memory (CUDA error %d): copies are slower", int(status))


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
