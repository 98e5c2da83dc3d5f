"""CUDA IPC without CUDA: what the kernel is told to copy, the kernel in Triton's interpreter, and whom a handle serves.

Two processes, over a fake CUDA runtime: tests/fake_cuda/test_cuda_ipc.py.
"""

import ctypes
import dataclasses
import importlib.util
import os
import subprocess
import sys
from pathlib import Path

import msgspec
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvrelay.errors import BackendUnavailable, TransportError
from kvrelay.kvtransfer.mover.copy_plan import CopyList
from kvrelay.kvtransfer.transports import cuda_ipc
from kvrelay.kvtransfer.transports.base import host_id
from kvrelay.kvtransfer.transports.cuda_ipc import CUDA_IPC

ROOT = Path(__file__).resolve().parents[3]
NUM_BYTES = 240_000


@given(st.data(), st.integers(1, 70_000))
def test_the_tiles_are_the_copies(data, tile_bytes):
    row = st.tuples(st.integers(0, 99), st.integers(0, 99), st.one_of(st.just(0), st.integers(1, NUM_BYTES // 3)))
    columns = np.array(data.draw(st.lists(row, max_size=5)), dtype=np.int64).reshape(-1, 3).T
    copies = CopyList(*columns)
    source = np.random.default_rng(0).integers(0, 256, NUM_BYTES, dtype=np.uint8)
    expected, found = np.zeros((2, NUM_BYTES), dtype=np.uint8)
    for begin, at, num_bytes in zip(*columns, strict=True):
        expected[at : at + num_bytes] = source[begin : begin + num_bytes]
    for begin, at, num_bytes in zip(*copies.tiles(tile_bytes), strict=True):
        assert 0 < num_bytes <= tile_bytes
        found[at : at + num_bytes] = source[begin : begin + num_bytes]
    assert np.array_equal(found, expected)


# in a process of its own: triton decides at its import whether to interpret
PROGRAM = """
import mmap
import numpy as np
import torch
from kvrelay.kvtransfer.mover.copy_plan import CopyList
from kvrelay.kvtransfer.transports import cuda_ipc_triton

def far(num_bytes):  # pages that are not touched take no memory
    return np.frombuffer(mmap.mmap(-1, num_bytes, mmap.MAP_PRIVATE | 0x4000), dtype=np.uint8)  # MAP_NORESERVE

def copied(columns, source, target):
    "Those bytes, and none beside them."
    copies = CopyList(*map(np.array, columns))
    cuda_ipc_triton.launch(copies, source.ctypes.data, target.ctypes.data, torch.device("cpu"))
    for begin, at, size in zip(*columns, strict=True):
        if not np.array_equal(source[begin : begin + size], target[at : at + size]):
            return False
        if target[at - 64 : at].any() or target[at + size : at + size + 64].any():
            return False
    return True

GIB = 1 << 30
draw = np.random.default_rng(0)
source, target = far(9 * GIB), far(9 * GIB)
for at in (0, 3 * GIB, 6 * GIB):
    source[at : at + (1 << 20)] = draw.integers(1, 256, 1 << 20, dtype=np.uint8)
print(
    cuda_ipc_triton.problem(torch.device("cpu")),
    # 16-byte words, beyond 2 ** 31; a full tile, and one and a bit
    copied(([3 * GIB + 4096, 262144], [GIB, 5 * GIB + 16], [65536, 65536 + 48]), source, target),
    # odd sizes at odd places
    copied(([7, 6 * GIB + 5], [6 * GIB + 1001, 7 * GIB + 3], [1, 70001]), source, target),
    copied(([8], [8 * GIB + 4], [8188]), source, target),
)
real = cuda_ipc_triton.launch
cuda_ipc_triton.launch = lambda copies, source, *rest: real(copies, source + 16, *rest)
cuda_ipc_triton.problem.cache_clear()
print(cuda_ipc_triton.problem(torch.device("cpu")))
"""


@pytest.mark.skipif(importlib.util.find_spec("triton") is None, reason="triton is not installed")
def test_the_kernel_copies_those_bytes_in_the_interpreter():
    environment = {**os.environ, "TRITON_INTERPRET": "1", "OMP_NUM_THREADS": "1"}
    environment.pop("LD_PRELOAD", None)
    done = subprocess.run([sys.executable, "-c", PROGRAM], cwd=ROOT, env=environment, capture_output=True, text=True)
    found, control = done.stdout.splitlines() if done.returncode == 0 else ("", done.stderr)
    assert found == "None True True True", done.stderr
    assert control == "triton's copy kernel copies wrong bytes (in words of [16, 4, 1] bytes)"


# ---- who may map a pool


def sealed(secret, **changes):
    told = {"host": host_id("ipc", "pid"), "handle": bytes(64), "offset": 0, "num_bytes": 1}
    body = msgspec.msgpack.encode(told | changes)
    return cuda_ipc._mac(secret, body) + body


@pytest.mark.parametrize(
    ("descriptor", "why"),
    [
        (lambda secret: sealed(b"another secret"), "does not know this cluster's secret"),
        (lambda secret: sealed(secret)[:-1] + b"\2", "does not know this cluster's secret"),
        (lambda secret: b"", "does not know this cluster's secret"),
        (lambda secret: sealed(secret, offset="x"), "malformed"),
        (lambda secret: sealed(secret, host="elsewhere"), "on another host"),
    ],
)
async def test_what_another_cluster_or_host_offers_is_not_opened(kv, descriptor, why):
    reader = CUDA_IPC.make_reader(on_gpu(kv), kv.lib.SECRET, "")
    with pytest.raises(TransportError, match=why):
        await reader.connect(descriptor(kv.lib.SECRET))
    await reader.aclose()


def on_gpu(kv):
    return dataclasses.replace(kv.lib.allocate(), device="cuda:0", memfd=None, view=None)


def test_it_is_for_cuda_memory_and_needs_triton_and_a_driver(kv, monkeypatch):
    assert CUDA_IPC.why_not(kv.lib.allocate()) == "the pool is not in CUDA memory"
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    assert CUDA_IPC.why_not(on_gpu(kv)) == "triton is not installed"
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: object())

    def no_driver(name):
        raise OSError(f"{name}: cannot open shared object file")

    cuda_ipc._driver.cache_clear()
    monkeypatch.setattr(ctypes, "CDLL", no_driver)
    assert CUDA_IPC.why_not(on_gpu(kv)) == "libcuda.so.1: cannot open shared object file"


async def test_an_exporter_without_a_device_says_so(kv):
    exporter = CUDA_IPC.make_exporter(on_gpu(kv), kv.lib.SECRET, "")
    if importlib.util.find_spec("torch") is None or __import__("torch").cuda.is_available():
        pytest.skip("there is a device")
    with pytest.raises(BackendUnavailable, match="cuda_ipc"):
        await exporter.start()
