"""The checksum for pools on a GPU: by torch on the CPU, and by Triton's kernel in its interpreter."""

import importlib.util
import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

torch = pytest.importorskip("torch")

from kvrelay.kvtransfer.mover.device_checksums import device_checksums  # noqa: E402

ROOT = Path(__file__).resolve().parents[3]
REGION = 32 * 8


def pool():
    return torch.randint(-(2**62), 2**62, (3, 6, 32), generator=torch.Generator().manual_seed(0))


def sums(words, regions):
    """regions: (layer, block) of each."""
    begins = np.array([[(layer * 6 + block) * REGION] for layer, block in regions])
    return device_checksums(words, begins, REGION)


@pytest.mark.parametrize("bit", [0, 17, 62, 63])
def test_a_flipped_bit_changes_its_region_only(bit):
    words, regions = pool(), [(1, 4), (1, 1), (2, 4), (2, 1)]
    before = sums(words, regions)
    words[2, 1, 9] ^= torch.tensor(-(2**63) if bit == 63 else 1 << bit)
    assert (sums(words, regions) != before).tolist() == [False, False, False, True]


def test_swapped_words_and_swapped_blocks_show():
    words = pool()
    before = sums(words, [(0, 0), (0, 1)])
    words[0, 0, [3, 4]] = words[0, 0, [4, 3]]
    after = sums(words, [(0, 0), (0, 1)])
    assert after[0] != before[0]
    assert before[0] != before[1]


@pytest.mark.parametrize("piece_bytes", [4, 12, 20, 64])
def test_a_chunk_in_pieces_has_the_sum_of_its_bytes_in_order(piece_bytes):
    memory = torch.randint(0, 255, (4096,), dtype=torch.uint8, generator=torch.Generator().manual_seed(1))
    pieces = np.array([[0, 400, 1200, 80], [2000, 4, 900, 3000]])
    found = device_checksums(memory, pieces, piece_bytes)
    for row, value in zip(pieces, found, strict=True):
        whole = torch.cat([memory[at : at + piece_bytes] for at in row])
        assert device_checksums(whole, np.array([[0]]), 4 * piece_bytes)[0] == value
    assert device_checksums(memory, pieces[:, ::-1].copy(), piece_bytes)[0] != found[0]


def test_of_no_chunks_there_are_no_sums():
    assert device_checksums(pool(), np.empty((0, 2), dtype=np.int64), 8).shape == (0,)


# in a process of its own: triton decides at its import whether to interpret
PROGRAM = """
import torch
from kvrelay.kvtransfer.mover import device_checksums
device = torch.device("cpu")
print(device_checksums.has_triton(device))
real = device_checksums._by_triton
device_checksums._by_triton = lambda halves, begins, size: real(halves, begins + 1, size)
device_checksums.has_triton.cache_clear()
print(device_checksums.has_triton(device))
"""


@pytest.mark.skipif(importlib.util.find_spec("triton") is None, reason="triton is not installed")
def test_the_fused_kernel_computes_the_same_sums_in_the_interpreter():
    environment = {**os.environ, "TRITON_INTERPRET": "1", "OMP_NUM_THREADS": "1"}
    environment.pop("LD_PRELOAD", None)
    done = subprocess.run([sys.executable, "-c", PROGRAM], cwd=ROOT, env=environment, capture_output=True, text=True)
    assert done.stdout.split() == ["True", "False"], done.stderr
