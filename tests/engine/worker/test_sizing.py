"""Sizes of the pool, the step and the batch: as set, else by the device and the machine."""

import pytest

from kvrelay.config import settings_from
from kvrelay.engine.worker.sizing import context_notice, engine_sizes

pytestmark = pytest.mark.pure
GIB = 1 << 30


def sizes(engine=None, *, has_device=False, free=24 * GIB, workers=2, gpus=0.0):
    return engine_sizes(
        settings_from({"engine": engine or {}}).engine,
        has_device=has_device,
        free_host_bytes=free,
        num_workers=workers,
        gpus_per_worker=gpus,
    )


@pytest.mark.parametrize(
    ("free", "workers", "expected"),
    [
        (24 * GIB, 2, GIB),  # at most 1 GiB
        (4 * GIB, 2, GIB // 2),
        (4 * GIB, 4, GIB // 4),
        (1 << 20, 2, 64 << 20),  # at least 64 MiB
    ],
)
def test_on_a_cpu_the_workers_divide_a_quarter_of_the_free_memory_within_bounds(free, workers, expected):
    chosen = sizes(free=free, workers=workers)
    assert (chosen.kv_memory_bytes, chosen.kv_memory_share) == (expected, None)
    assert (chosen.token_budget, chosen.max_running) == (512, 64)


@pytest.mark.parametrize(
    ("workers", "gpus", "share"),
    [(2, 1.0, 0.9), (2, 2.0, 0.9), (2, 0.5, 0.45), (4, 0.25, 0.225), (1, 0, 0.9), (2, 0, 0.45)],
)
def test_on_a_gpu_the_pool_is_nine_tenths_of_what_is_free_among_those_that_share_it(workers, gpus, share):
    chosen = sizes(has_device=True, workers=workers, gpus=gpus)
    assert chosen.kv_memory_bytes is None and chosen.kv_memory_share == pytest.approx(share)
    assert (chosen.token_budget, chosen.max_running) == (8192, 256)


@pytest.mark.parametrize("has_device", [False, True])
def test_what_is_set_is_taken_and_a_batch_is_no_larger_than_a_step(has_device):
    chosen = sizes({"kv_memory": "3MiB", "token_budget": 32}, has_device=has_device)
    assert (chosen.kv_memory_bytes, chosen.kv_memory_share) == (3 << 20, None)
    assert (chosen.token_budget, chosen.max_running) == (32, 32)
    chosen = sizes({"kv_memory": "50%", "max_running": 3}, has_device=has_device)
    assert (chosen.kv_memory_bytes, chosen.kv_memory_share, chosen.max_running) == (
        None,
        0.5 if has_device else 0.25,  # two workers divide the memory of a CPU's machine
        3,
    )


def test_the_line_says_what_was_chosen_and_why():
    line = sizes().describe(GIB)
    assert line == (
        "KV pool 1,024 MiB (by 24.0 GiB of free memory and 2 workers; at most 1 GiB), 512 tokens a step, "
        "64 sequences (defaults on a CPU)"
    )
    line = sizes({"kv_memory": "50%", "max_running": 3}).describe(GIB)
    assert "(engine.kv_memory: 50% of the free memory)" in line and "3 sequences (engine.max_running)" in line
    assert "45% of the GPU's free memory, which 2 workers share" in sizes(has_device=True).describe(GIB)


def test_a_context_that_is_cut_names_the_setting_that_lifts_it():
    assert context_notice(8192, 8192) is None
    notice = context_notice(7280, 32_768)
    assert "from 32,768 to 7,280 tokens" in notice and "engine.kv_memory" in notice
