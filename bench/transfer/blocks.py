"""What is moved in bench/transfer/transfer.py: shapes, pools, which blocks go where. Every end works them out alike."""

import ctypes
import hashlib
import mmap
import os
import time
from collections import deque
from dataclasses import dataclass
from itertools import repeat
from typing import Any

import numpy as np
from numpy.typing import NDArray

from kvrelay.types import Fingerprint, KvLayout, KvMemory

KIB, MIB = 1 << 10, 1 << 20
HEAD_BYTES = 2 * 16 * 64 * 2  # of one region: K and V of 16 tokens x 64 values in bfloat16
ENDS = ("source", "target")
SEEDS = (1, 2)  # of the permutations: where blocks come from, where they go


@dataclass(frozen=True, slots=True)
class Shape:
    """`num_blocks` blocks of `num_layers` regions each in one transfer; `repeat` such transfers after each other."""

    name: str
    region_bytes: int
    num_blocks: int
    num_layers: int = 1
    repeat: int = 1

    @property
    def num_bytes(self) -> int:
        """Of one transfer."""
        return self.block_bytes * self.num_blocks

    @property
    def block_bytes(self) -> int:
        return self.region_bytes * self.num_layers

    @property
    def is_latency(self) -> bool:
        return self.num_blocks == 1


def shapes(num_blocks: int) -> dict[str, Shape]:
    """The figures' shapes by name; `num_blocks` of 32 KiB in the first. "layers" is as much, as a model has it."""
    every = (
        Shape("many", 32 * KIB, num_blocks),
        Shape("layers", 32 * KIB, max(num_blocks // 16, 1), num_layers=16),
        Shape("few", 64 * KIB, 16),
        Shape("large", MIB, 64),
        Shape("one", 32 * KIB, 1, repeat=20),
    )
    return {shape.name: shape for shape in every}


def pool_bytes(num_blocks: int) -> int:
    """Room for twice the blocks of each shape, so that they can lie scattered."""
    wanted = max(2 * shape.num_bytes * shape.repeat for shape in shapes(num_blocks).values())
    return -(-wanted // MIB) * MIB


def layout_of(shape: Shape, num_bytes: int) -> KvLayout:
    """The whole pool as such blocks."""
    num_blocks = num_bytes // shape.block_bytes
    return KvLayout(shape.num_layers, num_blocks, 16, shape.region_bytes // HEAD_BYTES, 64, "bfloat16")


def fingerprint_of(layout: KvLayout) -> Fingerprint:
    return Fingerprint(
        protocol=1,
        model="bench",
        dtype=layout.dtype,
        block_size=layout.block_size,
        num_layers=layout.num_layers,
        num_kv_heads=layout.num_kv_heads,
        head_dim=layout.head_dim,
        hash_seed="bench",
    )


def block_lists(shape: Shape, num_bytes: int) -> list[tuple[list[int], list[int]]]:
    """(source blocks, target blocks) of each of the shape's transfers: scattered, the same in every process."""
    total, wanted = layout_of(shape, num_bytes).num_blocks, shape.num_blocks * shape.repeat
    sources, targets = (np.random.default_rng(seed).permutation(total)[:wanted].tolist() for seed in SEEDS)
    step = shape.num_blocks
    return [(sources[i : i + step], targets[i : i + step]) for i in range(0, wanted, step)]


class Pool:
    """Memory like a worker's: a shared mapping; or, "huge", private memory in huge pages where the system has them.
    Every page is there before a clock runs.
    """

    def __init__(self, num_bytes: int, *, is_filled: bool, pages: str = "shared") -> None:
        self.num_bytes, self.memfd = num_bytes, None
        if pages == "huge":
            mapping = mmap.mmap(-1, num_bytes, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
            mapping.madvise(mmap.MADV_HUGEPAGE)
        else:
            self.memfd = os.memfd_create("kvrelay-bench", os.MFD_CLOEXEC)
            os.ftruncate(self.memfd, num_bytes)
            mapping = mmap.mmap(self.memfd, num_bytes)
        self.bytes: NDArray[np.uint8] = np.frombuffer(mapping, dtype=np.uint8)
        self.view = memoryview(mapping)
        words = self.bytes.view(np.uint64)
        words[:] = np.random.default_rng(3).integers(0, 1 << 63, len(words), dtype=np.uint64) if is_filled else 0

    @property
    def address(self) -> int:
        return int(self.bytes.ctypes.data)

    def huge_share(self) -> float:
        """Which part of it the system keeps in huge pages: of the whole mapping, where it was joined to others."""
        num_kib = size = 0
        with open("/proc/self/smaps") as maps:
            for line in maps:
                first, *rest = line.split()
                if not first.endswith(":"):
                    begin, end = (int(edge, 16) for edge in first.split("-"))
                    size = end - begin if begin <= self.address < end else 0
                elif size and first in ("AnonHugePages:", "ShmemPmdMapped:", "FilePmdMapped:"):
                    num_kib += int(rest[0])
                elif size and first == "VmFlags:":
                    return num_kib * KIB / size
        return 0.0

    def memory(self, shape: Shape) -> KvMemory:
        layout = layout_of(shape, self.num_bytes)
        return KvMemory(layout, self.address, "cpu", self.memfd, self.view, self.bytes)

    def blocks(self, shape: Shape) -> NDArray[np.uint8]:
        """[num_blocks, block_bytes]."""
        used = self.num_bytes // shape.block_bytes * shape.block_bytes
        return self.bytes[:used].reshape(-1, shape.block_bytes)

    def clear(self, shape: Shape) -> None:
        """Zero what the shape's transfers will land in."""
        for _, blocks in block_lists(shape, self.num_bytes):
            self.blocks(shape)[blocks] = 0

    def digest(self, shape: Shape, end: str) -> str:
        """Of the blocks of one end ("source", "target"), in the order in which they are sent."""
        found = hashlib.blake2b()
        for pair in block_lists(shape, self.num_bytes):
            found.update(self.blocks(shape)[pair[ENDS.index(end)]].tobytes())
        return found.hexdigest()


class Memcpy:
    """The limit: the same blocks copied inside one process by libc, as they come and sorted by source."""

    def __init__(self, num_blocks: int, pages: str) -> None:
        size = pool_bytes(num_blocks)
        self._source, self._target = (Pool(size, is_filled=is_source, pages=pages) for is_source in (True, False))

    def huge_share(self) -> float:
        """Of its pools' pages, which are made like those of all others."""
        return min(self._source.huge_share(), self._target.huge_share())

    def _addresses(self, shape: Shape) -> list[list[tuple[int, int]]]:
        """(target, source) addresses of each of the shape's transfers."""
        size = shape.block_bytes
        return [
            [(self._target.address + j * size, self._source.address + i * size) for i, j in zip(*pair, strict=True)]
            for pair in block_lists(shape, self._source.num_bytes)
        ]

    def seconds(self, shape: Shape) -> list[float]:
        """Of each of the shape's transfers, in the faster of the two orders."""
        plans = self._addresses(shape)
        in_order = [sorted(plan, key=lambda pair: pair[1]) for plan in plans]
        return min(([_copy(plan, shape.block_bytes) for plan in way] for way in (plans, in_order)), key=sum)


def _copy(plan: list[tuple[int, int]], num_bytes: int) -> float:
    to, from_ = zip(*plan, strict=True)
    began = time.perf_counter()
    deque(map(ctypes.memmove, to, from_, repeat(num_bytes)), maxlen=0)
    return time.perf_counter() - began


Row = dict[str, Any]  # one row of the table: {"name": ..., "settings": {...}}


class End:
    """One end, with what most ends do. The acting end (`move`) is the source in kvrelay, the target elsewhere.

    Args:
        pools: by end, "source" or "target": this process's.
    """

    def __init__(self, pools: dict[str, Pool]) -> None:
        self.pools = pools

    async def start(self) -> dict[str, Any]:
        """What the other end needs to connect. Raises ImportError when something is not installed."""
        return {}

    async def connect(self, peer: dict[str, Any]) -> None:
        """`peer`: what the other end's start() gave."""

    async def begin(self, row: Row, shape: Shape) -> dict[str, Any]:
        """Get ready for one visit; what the acting end needs to know for it."""
        return {}

    async def move(self, row: Row, shape: Shape, order: dict[str, Any]) -> None:
        """On the acting end: the shape's transfers, one after the other."""
        raise NotImplementedError

    async def end(self) -> dict[str, list[float]]:
        """Seconds of each transfer of the visit. "read": first read to last byte (verified); "whole": the protocol
        too.
        """
        return {}

    async def aclose(self) -> None:
        """Let go of everything."""

    def cpu_s(self) -> dict[str, float]:
        """CPU seconds so far, all threads, by end."""
        return {next(iter(self.pools)): time.process_time()}

    def clear(self, shape: Shape) -> None:
        """Zero the target's blocks, so that what arrives differs from what was there."""
        self.pools["target"].clear(shape)

    def digest(self, shape: Shape, end: str) -> str:
        """Of one end's blocks: equal once they have arrived."""
        return self.pools[end].digest(shape, end)
