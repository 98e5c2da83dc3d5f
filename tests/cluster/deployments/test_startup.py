"""What processes do for a short start and little memory."""

import ctypes
import gc

import psutil
import pytest

from kvrelay.cluster.deployments.startup import garbage_collection_paused, return_freed_memory

pytestmark = pytest.mark.pure
MIB = 1 << 20


@pytest.fixture(autouse=True)
def unfrozen():
    yield
    gc.enable()
    gc.unfreeze()


def test_no_garbage_is_collected_meanwhile_and_what_was_made_is_left_out_later():
    frozen = gc.get_freeze_count()
    with garbage_collection_paused():
        assert not gc.isenabled()
        made = [[] for _ in range(1000)]
    assert gc.isenabled() and gc.get_freeze_count() >= frozen + len(made)


def test_after_a_failed_import_garbage_is_collected_again():
    with pytest.raises(ImportError), garbage_collection_paused():
        raise ImportError
    assert gc.isenabled()


def test_a_process_that_collects_nothing_is_left_so():
    gc.disable()
    with garbage_collection_paused():
        pass
    assert not gc.isenabled()


@pytest.mark.skipif(not hasattr(ctypes.CDLL(None), "malloc_trim"), reason="not glibc")
def test_freed_memory_goes_back_to_the_system_though_what_was_allocated_last_stays():
    process, small = psutil.Process(), 100_000  # below malloc's threshold for mappings of their own
    parts = [bytearray(small) for _ in range(64 * MIB // small)]
    kept = parts.pop()
    parts.clear()
    held = process.memory_info().rss
    return_freed_memory()
    assert held - process.memory_info().rss > 48 * MIB and len(kept) == small
