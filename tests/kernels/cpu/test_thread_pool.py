"""The kernels' thread pool: every task once, asleep when idle, harmless after fork, gone when dropped."""

import gc
import os
import threading
import time
from pathlib import Path

import pytest
import torch

from kvrelay.kernels.cpu.native_kernels import NativeKernels, NativeLinear


def random(*shape, seed=0):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def threads():
    return {int(task.name) for task in Path("/proc/self/task").iterdir()}


def wait_until(condition, deadline_s=30.0):
    end = time.monotonic() + deadline_s
    while not condition():
        assert time.monotonic() < end, "it did not come true"
        time.sleep(0.005)


@pytest.fixture
def four(compiled):
    return NativeKernels(4)


def test_many_small_jobs_on_more_threads_than_cores_are_right(four, compiled):
    weight, x = random(200, 40), random(3, 40, seed=1)
    linear, alone = NativeLinear(four, weight, None, 0), compiled.pack_linear(weight)
    expected = alone(x)
    assert all(torch.equal(linear(x), expected) for _ in range(3000))


@pytest.mark.skipif(not Path("/proc/self/task").exists(), reason="needs /proc")
def test_idle_threads_sleep(compiled):
    before = threads()
    four = NativeKernels(4)
    NativeLinear(four, random(200, 40), None, 0)(random(3, 40))
    mine = threads() - before
    assert len(mine) == 3
    states = [Path(f"/proc/self/task/{thread}/stat") for thread in mine]
    wait_until(lambda: all(path.read_text().rsplit(")", 1)[1].split()[0] == "S" for path in states))
    used = [path.read_text().rsplit(")", 1)[1].split()[11:13] for path in states]
    time.sleep(0.1)
    assert used == [path.read_text().rsplit(")", 1)[1].split()[11:13] for path in states]


@pytest.mark.skipif(not Path("/proc/self/task").exists(), reason="needs /proc")
def test_threads_stay_on_the_cores_of_the_thread_that_made_the_pool(compiled):
    core = min(os.sched_getaffinity(0))
    found = []

    def engine():
        os.sched_setaffinity(0, {core})
        before = threads()
        kernels = NativeKernels(3)
        found.extend(os.sched_getaffinity(thread) for thread in threads() - before)
        del kernels

    pinned = threading.Thread(target=engine)
    pinned.start()
    pinned.join()
    assert found == [{core}] * 2


@pytest.mark.skipif(not Path("/proc/self/task").exists(), reason="needs /proc")
def test_a_dropped_pool_ends_its_threads(compiled):
    before = threads()
    kernels = NativeKernels(3)
    assert len(threads() - before) == 2
    del kernels
    gc.collect()
    wait_until(lambda: not threads() - before)


def test_a_forked_child_computes_alone(four):
    linear, x = NativeLinear(four, random(200, 40), None, 0), random(3, 40)
    expected = linear(x)
    pid = os.fork()
    if pid == 0:
        os._exit(0 if torch.equal(linear(x), expected) else 1)
    assert os.waitpid(pid, 0)[1] == 0
