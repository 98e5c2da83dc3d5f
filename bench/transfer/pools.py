"""Pools for the benches of KV transfers: one layer of 32 KiB blocks in a memfd, and blocks drawn from it."""

import mmap
import os

import numpy as np

from kvrelay.types import Fingerprint, KvLayout, KvMemory

SECRET = b"bench"
FINGERPRINT = Fingerprint(1, "bench", "bfloat16", 16, 1, 8, 64, "bench")


def layout_for(num_blocks):
    """Twice as many blocks as will be moved, so that they can be scattered."""
    return KvLayout(1, 2 * num_blocks, 16, 8, 64, "bfloat16")


def allocate(layout):
    """A pool whose every page is there before any clock runs."""
    fd = os.memfd_create("kvrelay-bench", os.MFD_CLOEXEC)
    os.ftruncate(fd, layout.num_bytes)
    mapping = mmap.mmap(fd, layout.num_bytes)
    array = np.frombuffer(mapping, dtype=np.uint8)
    array[:] = np.arange(len(array), dtype=np.uint8)
    return KvMemory(layout, array.ctypes.data, "cpu", fd, memoryview(mapping), array)


def scattered(layout, count, seed):
    """`count` different blocks in random order."""
    return np.random.default_rng(seed).permutation(layout.num_blocks)[:count].tolist()
