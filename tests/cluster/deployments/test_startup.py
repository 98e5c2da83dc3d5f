"""What processes do for a short start and little memory."""

import ctypes
import gc
import subprocess
import sys
from pathlib import Path

import psutil
import pytest

from kvrelay.cluster.deployments.startup import garbage_collection_paused, return_freed_memory

MIB = 1 << 20


@pytest.fixture(autouse=True)
def unfrozen():
    yield
    gc.enable()
    gc.unfreeze()


@pytest.mark.pure
def test_no_garbage_is_collected_meanwhile_and_what_was_made_is_left_out_later():
    frozen = gc.get_freeze_count()
    with garbage_collection_paused():
        assert not gc.isenabled()
        made = [[] for _ in range(1000)]
    assert gc.isenabled() and gc.get_freeze_count() >= frozen + len(made)


@pytest.mark.pure
def test_after_a_failed_import_garbage_is_collected_again():
    with pytest.raises(ImportError), garbage_collection_paused():
        raise ImportError
    assert gc.isenabled()


@pytest.mark.pure
def test_a_process_that_collects_nothing_is_left_so():
    gc.disable()
    with garbage_collection_paused():
        pass
    assert not gc.isenabled()


@pytest.mark.pure
@pytest.mark.skipif(not hasattr(ctypes.CDLL(None), "malloc_trim"), reason="not glibc")
def test_freed_memory_goes_back_to_the_system_though_what_was_allocated_last_stays():
    process, small = psutil.Process(), 100_000  # below malloc's threshold for mappings of their own
    parts = [bytearray(small) for _ in range(64 * MIB // small)]
    kept = parts.pop()
    parts.clear()
    held = process.memory_info().rss
    return_freed_memory()
    assert held - process.memory_info().rss > 48 * MIB and len(kept) == small


META_KERNELS = """
import sys
from contextlib import nullcontext

from kvrelay.cluster.deployments.startup import without_meta_kernels

with without_meta_kernels() if {without} else nullcontext():
    import torch
before = "torch._prims.rng_prims" in sys.modules
drawn = [torch.randn(3, generator=torch.Generator().manual_seed(1)) for _ in range(2)]
assert torch.equal(*drawn)
import torch._meta_registrations
assert torch._meta_registrations.meta_randperm and torch._prims.rng_prims and torch.Generator()
print(before)
"""


@pytest.mark.slow
@pytest.mark.parametrize("without", [True, False])
def test_torch_registers_no_kernels_for_tensors_without_data_until_someone_imports_them(without):
    code = META_KERNELS.format(without=without)
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=120, check=False)
    assert done.returncode == 0, done.stderr
    registers = not without or Path("/dev/nvidiactl").exists()
    assert done.stdout.strip() == str(registers), "another torch: look at what startup.py leaves out"
