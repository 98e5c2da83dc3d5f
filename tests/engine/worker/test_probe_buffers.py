"""Blocks taken to the KV plane's probes: filled, free ones only, and back whatever becomes of the borrower."""

import asyncio
import threading

import pytest
import torch

from kvrelay.engine.checkpoints.tiny import tiny_checkpoint
from kvrelay.engine.step.build import load_engine
from kvrelay.engine.step.config import EngineConfig
from kvrelay.engine.worker import thread as lending
from kvrelay.engine.worker.thread import EngineProbeBuffers, EngineThread
from kvrelay.kernels.select import select_backend
from kvrelay.kvcache.memory.storage import KvStorage
from kvrelay.types import BlockId, KvLayout


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return tiny_checkpoint("llama", tmp_path_factory.mktemp("models") / "tiny-llama")


@pytest.fixture
async def thread(folder):
    config = EngineConfig(kv_memory_bytes=4 << 20)
    failures = []
    thread = EngineThread(
        lambda: load_engine(folder, select_backend("reference", "cpu", 1), torch.float32, config),
        on_step=lambda result: None,
        on_failure=failures.append,
    )
    await thread.start()
    yield thread
    await thread.aclose()
    assert failures == []


class Busy:
    """Keeps the engine's thread in one step until `release`."""

    def __init__(self, thread):
        self.has_begun, self._may_end = threading.Event(), threading.Event()
        thread.post(lambda engine: (self.has_begun.set(), self._may_end.wait(30)))

    def release(self):
        self._may_end.set()


async def probe_blocks(thread):
    def look(engine):
        engine.check()
        return len(engine.scheduler.blocks.probe_blocks), engine.pool.counts().used, engine.reports.load().probe_blocks

    return await thread.call(look)


async def test_lent_blocks_hold_noise_and_show_as_lent_until_they_are_back(thread):
    probe_buffers = EngineProbeBuffers(thread)
    blocks = await probe_buffers.take(3)
    assert len(set(blocks)) == 3
    assert await probe_blocks(thread) == (3, 3, 3)
    tensor = thread.engine.cache.storage.tensor
    assert all(tensor[block].abs().sum() > 0 for block in blocks) and torch.isfinite(tensor).all()
    probe_buffers.put_back(blocks)
    assert await probe_blocks(thread) == (0, 0, 0)


async def test_a_borrower_that_leaves_while_the_engine_is_busy_leaves_nothing_lent(thread):
    busy = Busy(thread)
    borrowing = asyncio.create_task(EngineProbeBuffers(thread).take(3))
    await asyncio.to_thread(busy.has_begun.wait)
    borrowing.cancel()
    with pytest.raises(asyncio.CancelledError):
        await borrowing
    busy.release()
    async with asyncio.timeout(60):
        while await probe_blocks(thread) != (0, 0, 0):
            await asyncio.sleep(0)


async def test_a_busy_engine_lends_nothing_and_takes_back_what_it_lends_too_late(thread, monkeypatch):
    monkeypatch.setattr(lending, "PATIENCE_S", 0.01)
    busy = Busy(thread)
    assert await EngineProbeBuffers(thread).take(3) == []
    busy.release()
    async with asyncio.timeout(60):
        while await probe_blocks(thread) != (0, 0, 0):
            await asyncio.sleep(0)


async def test_blocks_that_cannot_be_filled_are_not_lent(thread, monkeypatch):
    def fail(blocks):
        raise MemoryError("no room for noise")

    monkeypatch.setattr(thread.engine.cache.storage, "fill_with_noise", fail)
    with pytest.raises(MemoryError):
        await EngineProbeBuffers(thread).take(3)
    assert await probe_blocks(thread) == (0, 0, 0)


async def test_a_stopped_engine_lends_nothing_and_takes_what_comes_back(thread):
    probe_buffers = EngineProbeBuffers(thread)
    blocks = await probe_buffers.take(1)
    await thread.aclose()
    assert await probe_buffers.take(3) == []
    probe_buffers.put_back(blocks)


async def test_a_question_to_the_engine_that_nobody_waits_for_any_more_does_it_no_harm(thread):
    busy = Busy(thread)
    asking = thread.call(lambda engine: engine.pool.num_blocks)
    await asyncio.to_thread(busy.has_begun.wait)
    asking.cancel()
    await asyncio.sleep(0)  # the other half of the future hears of it
    busy.release()
    assert await thread.call(lambda engine: engine.pool.num_blocks) > 0
    assert thread.is_alive


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16"])
def test_noise_is_finite_differs_from_region_to_region_and_keeps_to_its_blocks(dtype):
    storage = KvStorage(KvLayout(3, 8, 4, 2, 8, dtype), torch.device("cpu"))
    storage.fill_with_noise([BlockId(1), BlockId(5)])
    noisy = storage.tensor[[1, 5]].reshape(6, -1)
    assert torch.isfinite(noisy).all() and len(torch.unique(noisy, dim=0)) == 6
    assert not storage.tensor[[0, 2, 3, 4, 6, 7]].any()
