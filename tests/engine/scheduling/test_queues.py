"""Lines and deadlines of a real engine: on its thread, and behind a whole worker."""

import asyncio

import pytest
import torch

from kvrelay.cluster.launch.local import local_cluster
from kvrelay.config import settings_from
from kvrelay.engine.checkpoints.tiny import tiny_checkpoint
from kvrelay.engine.scheduling.fair_share import QueueRules, queue_rules
from kvrelay.engine.step.build import load_engine
from kvrelay.engine.step.config import EngineConfig
from kvrelay.engine.worker.thread import EngineThread
from kvrelay.errors import DeadlinePassed
from kvrelay.hashing import block_hashes
from kvrelay.kernels.select import select_backend
from kvrelay.plane.messages import Sampling, SequenceRequest

BLOCK = 16


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return tiny_checkpoint("llama", tmp_path_factory.mktemp("models") / "tiny-llama")


def engine_of(folder, **options):
    config = EngineConfig(kv_memory_bytes=4 << 20, block_size=BLOCK, **options)
    return load_engine(folder, select_backend("reference", "cpu", 1), torch.float32, config)


def request(number, *, tokens=20, max_tokens=3, **facts):
    prompt = [3 + (number * 31 + index * 7) % 200 for index in range(tokens)]
    return SequenceRequest(
        request_id=f"r{number}",
        token_ids=prompt,
        num_prompt_tokens=tokens,
        block_hashes=list(block_hashes(prompt, BLOCK)),
        sampling=Sampling(max_tokens=max_tokens, temperature=0.0, ignore_eos=True),
        **facts,
    )


def outputs_of(engine):
    """(tokens by request, in the order of their first tokens), when nothing is left to do."""
    said = {}
    while engine.scheduler.has_work:
        for output in engine.step().outputs:
            said.setdefault(output.request_id, []).extend(output.token_ids)
    return said


def test_a_worker_that_stops_refuses_what_is_queued_and_finishes_what_has_begun(folder):
    engine = engine_of(folder, max_running=1)
    for number in range(3):
        engine.add(request(number))
    engine.step()
    engine.scheduler.reject_queued()
    refused = engine.step().refused
    assert [(name, reason) for name, reason, _ in refused] == [("r1", "draining"), ("r2", "draining")]
    assert list(outputs_of(engine)) == ["r0"]
    engine.check()
    assert engine.pool.counts().used == 0


def test_the_order_changes_who_is_first_and_no_token(folder):
    plain, ordered = engine_of(folder, max_running=1), engine_of(folder, max_running=1)
    for number in range(4):
        plain.add(request(number))
        ordered.add(request(number, priority=-number, tenant=str(number)))
    by_arrival, by_priority = outputs_of(plain), outputs_of(ordered)
    assert list(by_arrival) == ["r0", "r1", "r2", "r3"] and list(by_priority) == ["r3", "r2", "r1", "r0"]
    assert by_arrival == by_priority


def test_the_load_reports_the_queue_and_the_service(folder):
    engine = engine_of(folder, max_running=1)
    for number, tenant in enumerate(("gold", "b", "b")):
        engine.add(request(number, tenant=tenant, priority=number // 2))
    load = engine.reports.load()
    assert (load.waiting_by_priority, load.waiting_tenants) == ({0: 2, 1: 1}, 2)
    outputs_of(engine)
    load = engine.reports.load()
    assert (load.waiting_by_priority, load.waiting_tenants) == ({}, 0)
    assert load.tenant_tokens == {"gold": 22, "b": 44}


async def test_a_stuck_engine_wakes_for_a_deadline_and_refuses(folder):
    refused = asyncio.Queue()
    thread = EngineThread(
        lambda: engine_of(folder),
        on_failure=lambda error: refused.put_nowait(error),
        on_step=lambda result: [refused.put_nowait(one) for one in result.refused],
    )
    await thread.start()
    try:
        blocks = await thread.call(
            lambda engine: engine.take_probe_blocks(10**6)
        )  # nothing can be admitted, nothing will happen
        await thread.call(lambda engine: engine.add(request(0, deadline_s=0.05)))
        async with asyncio.timeout(60):
            request_id, reason, message = await refused.get()
        assert (request_id, reason) == ("r0", "deadline") and "0.05 s" in message
        await thread.call(lambda engine: engine.scheduler.blocks.return_probe_blocks(blocks))
        assert await thread.call(lambda engine: (engine.check(), len(engine.scheduler.sequences))) == (None, 0)
    finally:
        await thread.aclose()


async def test_a_worker_refuses_what_is_overdue_and_goes_on(folder):
    settings = settings_from(
        {
            "model": {"source": str(folder), "dtype": "float32"},
            "engine": {
                "kv_memory": "2MiB",
                "block_size": BLOCK,
                "num_threads": 1,
                "backend": "reference",
                "max_running": 1,
            },
        }
    )
    async with local_cluster(settings, folder, num_prefill=0, num_inside=1) as cluster:
        busy = cluster.dispatcher.generate(request(0, max_tokens=100))
        await anext(busy)
        with pytest.raises(DeadlinePassed, match=r"not started within 0\.02 s"):
            await anext(cluster.dispatcher.generate(request(1, deadline_s=0.02)))
        await busy.aclose()
        said = [output async for output in cluster.dispatcher.generate(request(2, deadline_s=60.0))]
        assert sum(len(output.token_ids) for output in said) == 3
        thread = cluster.inside[0].thread
        load = await thread.call(lambda engine: (engine.check(), engine.reports.load())[1])
        assert (load.deadline_refusals, load.waiting) == (1, 0)


def test_sequences_have_been_queued_for_long_after_half_of_what_is_allowed():
    assert queue_rules(20.0) == QueueRules(aged_s=10.0)


@pytest.mark.parametrize("facts", [{"priority": 9}, {"priority": -9}, {"deadline_s": 0.0}, {"deadline_s": float("nan")},
                                   {"tenant": "t" * 65}, {"weight": 0.0}, {"weight": float("inf")}])  # fmt: skip
def test_the_engine_takes_no_standing_that_makes_no_sense(folder, facts):
    engine = engine_of(folder)
    assert (engine.requests.refusal(request(0, **facts)) or ("",))[0] == "invalid"
    assert engine.requests.refusal(request(0, priority=8, deadline_s=1.0, tenant="t" * 64)) is None
