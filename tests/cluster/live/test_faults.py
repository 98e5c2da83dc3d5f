"""Real worker processes, killed and left at every stage: a clear end, the same tokens, and every block back."""

import asyncio
import os
import signal

import msgspec
import pytest
import torch
from transformers import AutoModelForCausalLM

from kvrelay.cluster.launch.local import local_cluster
from kvrelay.config import settings_from
from kvrelay.decode.target import KvTarget
from kvrelay.engine.checkpoints.tiny import tiny_checkpoint
from kvrelay.errors import KvrelayError, Overloaded
from kvrelay.hashing import block_hashes
from kvrelay.plane.messages import Beams, Group, Sampling, SequenceRequest
from tests.stopping import stop

pytestmark = [pytest.mark.slow, pytest.mark.processes]


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return tiny_checkpoint("llama", tmp_path_factory.mktemp("models") / "tiny-llama")


def settings(**router):
    return settings_from(
        {
            "model": {"dtype": "float32", "max_model_len": 1024},
            "engine": {"kv_memory": "16MiB", "token_budget": 32, "num_threads": 1},
            "router": {"local_prefill_tokens": 0, **router},
        }
    )


def request(name: str, length: int = 100, *, max_tokens: int = 40) -> SequenceRequest:
    ids = torch.randint(3, 250, (length,), generator=torch.Generator().manual_seed(length)).tolist()
    return SequenceRequest(
        request_id=name,
        token_ids=ids,
        num_prompt_tokens=length,
        block_hashes=list(block_hashes(ids, 16)),
        sampling=Sampling(max_tokens=max_tokens, temperature=0.0, ignore_eos=True),
    )


def oracle(folder, wanted: SequenceRequest) -> list[int]:
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    model.generation_config.eos_token_id = None
    ids = torch.tensor([wanted.token_ids])
    count = wanted.sampling.max_tokens
    out = model.generate(
        ids, attention_mask=torch.ones_like(ids), max_new_tokens=count, do_sample=False, pad_token_id=0
    )
    return out[0, ids.shape[1] :].tolist()


async def collect(cluster, wanted, force="remote", after=None):
    """All tokens; `after(n)` is called when n tokens are there."""
    tokens: list[int] = []
    async for output in cluster.dispatcher.generate(wanted, force=force):
        assert output.position == len(tokens)
        tokens += output.token_ids
        if after is not None:
            after(len(tokens))
    return tokens


async def until(condition, *, limit_s=60):
    """Wait for what a load report will show."""
    async with asyncio.timeout(limit_s):
        while not condition():
            await asyncio.sleep(0.005)


async def nothing_held(cluster):
    """Wait until the decode worker in this process has every block back; fails with what is left."""
    problems = []
    for _ in range(600):
        problems = await cluster.pool_leaks()
        if not problems:
            return
        await asyncio.sleep(0.1)
    raise AssertionError(problems)


async def every_pool_adds_up(cluster):
    """Wait until every surviving worker reports all of its blocks as free or cached; fails with who does not."""
    left = {}
    for _ in range(600):
        loads = {info.worker_id: load for info, load in cluster.dispatcher.workers.live_workers()}
        left = {name: load for name, load in loads.items() if load.used_blocks or load.free_blocks < load.total_blocks}
        if loads and not left:
            return
        await asyncio.sleep(0.1)
    raise AssertionError(left or "no worker is left")


def worker_of(cluster, part: str):
    """The process that the only sequence's attempt has chosen for `part` ("prefill" or "decode")."""
    (record,) = cluster.dispatcher.requests.newest(1)
    chosen = getattr(record, part)
    return next(worker for worker in [*cluster.prefill, *cluster.decode] if worker.member.worker_id == chosen)


async def test_a_prefill_worker_killed_during_a_prompt_costs_a_retry_not_the_request(folder):
    wanted = request("a", 900)
    async with local_cluster(settings(), folder, num_prefill=2) as cluster:
        task = asyncio.create_task(collect(cluster, wanted))
        await until(lambda: any(load.receiving for _, load in cluster.dispatcher.workers.live_workers()))
        worker = worker_of(cluster, "prefill")
        os.kill(worker.pid, signal.SIGKILL)
        assert await task == oracle(folder, wanted)
        assert cluster.dispatcher.stats.retries == 1
        await worker.process.wait()
        await cluster.dispatcher.workers.wait_for(lambda d: len(d.live_workers()) == 2)
        await nothing_held(cluster)
        await every_pool_adds_up(cluster)


async def test_the_last_prefill_worker_killed_leaves_local_prefill_or_a_clear_error_and_no_block(folder):
    async with local_cluster(settings(), folder) as cluster:
        os.kill(cluster.prefill[0].pid, signal.SIGKILL)
        await cluster.prefill[0].process.wait()
        await cluster.dispatcher.workers.wait_for(lambda d: len(d.live_workers()) == 1)
        wanted = request("a")
        assert await collect(cluster, wanted, force=None) == oracle(folder, wanted)
        await nothing_held(cluster)


async def test_a_decode_worker_killed_mid_stream_is_continued_elsewhere_without_a_lost_or_doubled_token(folder):
    wanted = request("a")
    async with local_cluster(settings(), folder, num_decode=2, num_inside=0) as cluster:
        killed = []

        def kill(count):
            if count >= 5 and not killed:  # outputs are merged: 5 itself may never be seen
                killed.append(worker_of(cluster, "decode"))
                os.kill(killed[0].pid, signal.SIGKILL)

        assert await collect(cluster, wanted, after=kill) == oracle(folder, wanted)
        assert cluster.dispatcher.stats.retries == 1
        await killed[0].process.wait()
        await cluster.dispatcher.workers.wait_for(lambda d: len(d.live_workers()) == 2)
        await every_pool_adds_up(cluster)


async def test_the_only_decode_worker_killed_mid_stream_is_a_clear_error(folder):
    async with local_cluster(settings(), folder, num_decode=1, num_inside=0) as cluster:
        killed = []

        def kill(count):
            if count >= 5 and not killed:
                os.kill(cluster.decode[0].pid, signal.SIGKILL)
                killed.append(True)

        with pytest.raises(KvrelayError):
            await collect(cluster, request("a", max_tokens=800), after=kill)
        await every_pool_adds_up(cluster)


async def test_a_client_that_leaves_frees_its_blocks_on_both_workers(folder):
    async with local_cluster(settings(), folder) as cluster:
        for leave_after in (0, 1, 3):
            await _leaves(cluster, leave_after)


async def _leaves(cluster, leave_after):
    stream = cluster.dispatcher.generate(request(f"a{leave_after}", 700, max_tokens=300), force="remote")
    if leave_after == 0:
        task = asyncio.create_task(anext(stream))
        await until(lambda: any(load.receiving for _, load in cluster.dispatcher.workers.live_workers()))
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)
    else:
        for _ in range(leave_after):
            await anext(stream)
    await stream.aclose()
    await nothing_held(cluster)

    def prefill():
        return {info.role: load for info, load in cluster.dispatcher.workers.live_workers()}["prefill"]

    await until(lambda: prefill().used_blocks == 0)
    assert prefill().used_blocks == 0 and prefill().running == 0


async def test_overload_is_refused_not_queued_for_ever_and_the_rest_is_served(folder):
    config = settings(max_inflight=4)
    async with local_cluster(config, folder) as cluster:
        results = await asyncio.gather(
            *(collect(cluster, request(str(i), 50 + i), force=None) for i in range(12)), return_exceptions=True
        )
        refused = [result for result in results if isinstance(result, Overloaded)]
        served = [result for result in results if isinstance(result, list)]
        assert refused and served and len(refused) + len(served) == 12
        assert all(error.retry_after_s > 0 for error in refused)
        await nothing_held(cluster)


async def test_more_sequences_than_decode_memory_all_finish_with_the_right_tokens(folder):
    config = settings_from(
        {
            **settings().model_dump(),
            "engine": {"kv_memory": 40 * 16 * 4 * 2 * 2 * 32 * 4, "token_budget": 64, "num_threads": 1},
        }
    )
    async with local_cluster(config, folder) as cluster:
        wanted = [request(str(i), 60 + i, max_tokens=60) for i in range(10)]
        results = await asyncio.gather(*(collect(cluster, one, force=None) for one in wanted))
        assert results == [oracle(folder, one) for one in wanted]
        await nothing_held(cluster)


async def test_a_frozen_prefill_worker_is_given_up_within_its_lease(folder, monkeypatch):
    monkeypatch.setitem(KvTarget.__init__.__kwdefaults__, "lease_s", 2.0)
    async with local_cluster(settings(), folder, retry_budget=0) as cluster:
        worker = cluster.prefill[0]
        task = asyncio.create_task(collect(cluster, request("a", 900)))
        await until(lambda: any(load.receiving for _, load in cluster.dispatcher.workers.live_workers()))
        stop(worker.pid)
        try:
            with pytest.raises(KvrelayError):
                await asyncio.wait_for(task, 60)
            await nothing_held(cluster)
        finally:
            os.kill(worker.pid, signal.SIGKILL)


@pytest.mark.parametrize("part", ["prefill", "decode"])
async def test_a_frozen_worker_is_taken_over_and_holds_nothing_once_it_goes_on(folder, part):
    wanted = request("a", 900, max_tokens=60)
    async with local_cluster(settings(), folder, num_prefill=2, num_decode=2, num_inside=0) as cluster:
        frozen = []

        def freeze(count):
            if count >= 5 and not frozen:
                frozen.append(worker_of(cluster, part))
                stop(frozen[0].pid)

        task = asyncio.create_task(collect(cluster, wanted, after=freeze if part == "decode" else None))
        if part == "prefill":
            await until(lambda: any(load.receiving for _, load in cluster.dispatcher.workers.live_workers()))
            frozen.append(worker_of(cluster, part))
            stop(frozen[0].pid)
        try:
            assert await asyncio.wait_for(task, 60) == oracle(folder, wanted)
            (record,) = cluster.dispatcher.requests.find("a")
            assert cluster.dispatcher.stats.retries == 1 and getattr(record, part) != frozen[0].member.worker_id
        finally:
            os.kill(frozen[0].pid, signal.SIGCONT)
        await cluster.dispatcher.workers.wait_for(lambda d: len(d.live_workers()) == 4)
        await every_pool_adds_up(cluster)


async def test_a_decode_worker_killed_during_a_beam_search_has_it_begun_anew_elsewhere(folder):
    """Killed when it has reported all beams: nothing of the answer is out by then, and all of it is as if nothing had
    been.
    """
    width = 4

    def asked(name):
        group = Group(beams=Beams(width=width, num_returned=width))
        return msgspec.structs.replace(request(name, max_tokens=200), group=group)

    async with local_cluster(settings(), folder, num_decode=2, num_inside=0) as cluster:
        task = asyncio.create_task(collect_choices(cluster, asked("killed"), width))
        await until(
            lambda: any(load.running == width for _, load in cluster.dispatcher.workers.live_workers()), limit_s=40
        )
        worker = worker_of(cluster, "decode")
        os.kill(worker.pid, signal.SIGKILL)
        found = await task
        assert cluster.dispatcher.stats.retries == 1
        (record,) = cluster.dispatcher.requests.find("killed")
        assert record.attempts == 2 and record.decode != worker.member.worker_id
        assert found == await collect_choices(cluster, asked("undisturbed"), width)
        assert len({tuple(tokens) for tokens in found}) == width and all(len(tokens) == 200 for tokens in found)
        await worker.process.wait()
        await cluster.dispatcher.workers.wait_for(lambda d: len(d.live_workers()) == 2)
        await every_pool_adds_up(cluster)


async def collect_choices(cluster, wanted, count):
    """Each choice's tokens; every position came once."""
    tokens: list[list[int]] = [[] for _ in range(count)]
    async for output in cluster.dispatcher.generate(wanted, force="remote"):
        assert output.position == len(tokens[output.choice])
        tokens[output.choice] += output.token_ids
    return tokens
