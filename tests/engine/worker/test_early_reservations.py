"""A reservation is told before the step that granted it is computed: a prompt waits for it elsewhere."""

import asyncio
import threading

import pytest
import torch

from kvrelay.engine.checkpoints.tiny import tiny_checkpoint
from kvrelay.engine.step.build import load_engine
from kvrelay.engine.step.config import EngineConfig
from kvrelay.engine.worker.thread import EngineThread
from kvrelay.hashing import block_hashes
from kvrelay.kernels.select import select_backend
from kvrelay.plane.messages import Sampling, SequenceRequest


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return tiny_checkpoint("llama", tmp_path_factory.mktemp("models") / "tiny-llama")


def request(name, first):
    prompt = list(range(first, first + 40))
    return SequenceRequest(
        request_id=name,
        token_ids=prompt,
        num_prompt_tokens=40,
        block_hashes=list(block_hashes(prompt, 16)),
        sampling=Sampling(max_tokens=8, temperature=0.0, ignore_eos=True),
    )


async def test_who_reserves_does_not_wait_for_the_step_of_the_others(folder):
    backend = select_backend("reference", "cpu", 1)
    engine = load_engine(folder, backend, torch.float32, EngineConfig(kv_memory_bytes=4 << 20))
    granted, is_told, in_time = [], threading.Event(), []

    def on_step(result):
        granted.extend(one.request_id for one in result.reservations)
        if granted:
            is_told.set()

    run = engine.runner.run

    def computing(*args):
        in_time.append(is_told.wait(10.0))  # as long as it takes somebody to hear of it, or far longer
        return run(*args)

    thread = EngineThread(lambda: engine, on_step=on_step, on_failure=lambda error: None)
    await thread.start()
    try:
        engine.runner.run = computing
        await thread.call(lambda e: (e.add(request("first", 10), hold=False), e.reserve(request("next", 90))))
        async with asyncio.timeout(30):
            while not in_time:
                await asyncio.sleep(0.01)
        assert in_time[0] and granted == ["next"]
        async with asyncio.timeout(30):
            while await thread.call(lambda e: bool(e.scheduler.running)):
                await asyncio.sleep(0.01)
        assert granted == ["next"]  # once
        await thread.call(lambda e: e.abort("next"))
        await thread.call(lambda e: e.check())
    finally:
        is_told.set()
        await thread.aclose()
