"""Workers change their roles in place, idle and under load: the same tokens, no failed request, every block back."""

import asyncio
import json
import os
import random
import signal

import pytest
import torch
from transformers import AutoModelForCausalLM

from kvrelay.cluster.launch.local import local_cluster
from kvrelay.config import settings_from
from kvrelay.engine.checkpoints.tiny import tiny_checkpoint
from kvrelay.errors import WorkerError, WorkerLost
from kvrelay.hashing import block_hashes
from kvrelay.plane.messages import Sampling, SequenceRequest
from kvrelay.types import sides
from tests.scale import scaled

pytestmark = pytest.mark.alone

SETTINGS = settings_from(
    {
        "model": {"dtype": "float32", "max_model_len": 1024},
        "engine": {"kv_memory": "16MiB", "token_budget": 64, "num_threads": 1},
        "router": {"local_prefill_tokens": 0},
    }
)


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return tiny_checkpoint("llama", tmp_path_factory.mktemp("models") / "tiny-llama")


@pytest.fixture(scope="module")
def expected(folder):
    """Hugging Face's greedy tokens after a prompt of so many tokens."""
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    model.generation_config.eos_token_id = None
    known = {}

    def tokens(length, count):
        if (length, count) not in known:
            ids = torch.tensor([prompt(length)])
            mask = torch.ones_like(ids)
            out = model.generate(ids, attention_mask=mask, max_new_tokens=count, do_sample=False, pad_token_id=0)
            known[length, count] = out[0, length:].tolist()
        return known[length, count]

    return tokens


def prompt(length):
    return torch.randint(3, 250, (length,), generator=torch.Generator().manual_seed(length)).tolist()


def request(name, length, count):
    ids = prompt(length)
    return SequenceRequest(
        request_id=name,
        token_ids=ids,
        num_prompt_tokens=length,
        block_hashes=list(block_hashes(ids, 16)),
        sampling=Sampling(max_tokens=count, temperature=0.0, ignore_eos=True),
    )


async def answer(cluster, name, length, count, started=None):
    tokens = []
    async for output in cluster.dispatcher.generate(request(name, length, count)):
        tokens += output.token_ids
        if started is not None:
            started.set()
    return tokens


async def change(cluster, worker_id, role, drain_s=30.0):
    return json.loads(await cluster.dispatcher.queries.set_role(worker_id, role, drain_s))


def role_at_ingress(cluster):
    return {info.worker_id: info.role for info, _ in cluster.dispatcher.workers.live_workers()}


def last_request(cluster):
    (record,) = cluster.dispatcher.requests.newest(1)
    return record


async def all_blocks_back(cluster):
    assert await cluster.pool_leaks() == []
    async with asyncio.timeout(60):
        while left := {
            info.worker_id: load
            for info, load in cluster.dispatcher.workers.live_workers()
            if load.used_blocks or load.free_blocks < load.total_blocks
        }:
            assert left
            await asyncio.sleep(0.1)


async def test_an_idle_worker_changes_its_role_in_place_and_serves_with_it(folder, expected):
    async with local_cluster(SETTINGS, folder, num_prefill=0, num_inside=2) as cluster:
        first, engine = cluster.inside[0], cluster.inside[0].thread.engine
        assert await answer(cluster, "local", 100, 20) == expected(100, 20)
        facts = await change(cluster, "inside-0", "prefill")
        assert facts["before"] == "decode" and facts["role"] == "prefill" and facts["sequences"] == 0
        assert role_at_ingress(cluster) == {"inside-0": "prefill", "inside-1": "decode"}
        assert await answer(cluster, "apart", 130, 20) == expected(130, 20)
        record = last_request(cluster)
        assert (record.prefill, record.decode, record.path) == ("inside-0", "inside-1", "disaggregated")
        assert first.thread.engine is engine and engine.pool.counts().cached > 0  # the KV of "local" stays
        await change(cluster, "inside-0", "both")
        await change(cluster, "inside-1", "prefill")
        assert await answer(cluster, "back", 130, 20) == expected(130, 20)
        assert last_request(cluster).decode == "inside-0"
        await all_blocks_back(cluster)


async def test_without_prefill_workers_each_computes_prompts_for_the_others_too(folder, expected):
    """Where one holds up sequences, another computes a prompt for it: the same tokens."""
    settings = settings_from(SETTINGS.model_dump() | {"cluster": {"prefill": 0, "decode": 2}})
    async with local_cluster(settings, folder, num_prefill=0, num_inside=2) as cluster:
        assert role_at_ingress(cluster) == {"inside-0": "both", "inside-1": "both"}
        assert await answer(cluster, "here", 100, 20) == expected(100, 20)
        assert last_request(cluster).path == "local"
        tokens = []
        async for output in cluster.dispatcher.generate(request("there", 130, 20), force="remote"):
            tokens += output.token_ids
        record = last_request(cluster)
        assert tokens == expected(130, 20) and record.path == "disaggregated" and record.prefill != record.decode
        await all_blocks_back(cluster)


async def test_a_prefix_is_found_again_after_the_change(folder):
    async with local_cluster(SETTINGS, folder, num_prefill=0, num_inside=2) as cluster:
        await answer(cluster, "r1", 320, 2)
        holder = last_request(cluster).decode
        await change(cluster, holder, "prefill")
        await answer(cluster, "r2", 320, 2)
        record = last_request(cluster)
        assert (record.prefill, record.path) == (holder, "disaggregated") and record.cached_tokens >= 304


async def test_running_sequences_go_on_while_their_worker_changes_its_role(folder, expected):
    async with local_cluster(SETTINGS, folder, num_prefill=0, num_inside=3) as cluster:
        await change(cluster, "inside-0", "prefill")
        lengths = range(60, 160, 20)
        begun = [asyncio.Event() for _ in lengths]
        running = [
            asyncio.create_task(answer(cluster, f"r{length}", length, 400, event))
            for length, event in zip(lengths, begun, strict=True)
        ]
        await asyncio.gather(*(event.wait() for event in begun))
        facts = await change(cluster, "inside-1", "prefill", drain_s=0.0)
        answers = await asyncio.gather(*running)
        assert answers == [expected(length, 400) for length in lengths]
        assert facts["failed"] == facts["sequences"]
        await all_blocks_back(cluster)


async def test_a_change_that_is_given_up_half_way_leaves_the_old_role(folder, expected):
    async with local_cluster(SETTINGS, folder, num_prefill=0, num_inside=1) as cluster:
        worker, begun = cluster.inside[0], asyncio.Event()
        running = asyncio.create_task(answer(cluster, "r1", 100, 300, begun))
        await begun.wait()
        changing = asyncio.create_task(worker.roles.change("prefill", 30.0))
        async with asyncio.timeout(60):
            while role_at_ingress(cluster) != {"inside-0": "changing"}:
                await asyncio.sleep(0.005)
        with pytest.raises(WorkerError, match="changing its role already"):
            await worker.roles.change("both", 1.0)
        changing.cancel()
        await asyncio.gather(changing, return_exceptions=True)
        assert worker.requests.role == "decode"
        assert await running == expected(100, 300)
        assert await answer(cluster, "r2", 110, 20) == expected(110, 20)
        assert role_at_ingress(cluster) == {"inside-0": "decode"}
        await all_blocks_back(cluster)


@pytest.mark.slow
async def test_a_worker_killed_while_it_changes_its_role_costs_no_request(folder, expected):
    async with local_cluster(SETTINGS, folder, num_prefill=0, num_decode=1, num_inside=1) as cluster:
        cluster.dispatcher.router.role_changed("inside-0", "changing")  # so that all go to the other one
        begun = [asyncio.Event() for _ in range(4)]
        running = [asyncio.create_task(answer(cluster, f"r{i}", 60 + i, 300, event)) for i, event in enumerate(begun)]
        await asyncio.gather(*(event.wait() for event in begun))
        cluster.dispatcher.router.role_changed("inside-0", "decode")
        changing = asyncio.create_task(change(cluster, "decode-0", "prefill"))
        async with asyncio.timeout(60):
            while role_at_ingress(cluster)["decode-0"] != "changing":
                await asyncio.sleep(0.002)
        os.kill(cluster.decode[0].pid, signal.SIGKILL)
        with pytest.raises(WorkerLost):
            await changing
        assert await asyncio.gather(*running) == [expected(60 + i, 300) for i in range(4)]
        assert await cluster.pool_leaks() == []


async def storm(cluster, expected, num_requests, num_changes):
    """(wrong or failed answers, changes made) of requests while roles change at random; one worker always decodes."""
    random_of, problems, is_over = random.Random(7), [], asyncio.Event()
    names = [worker.worker_id for worker in cluster.inside]
    room = asyncio.Semaphore(6)

    async def one(number):
        length, count = random_of.choice([40, 90, 200]), random_of.choice([5, 40, 120])
        async with room:
            try:
                if await answer(cluster, f"s{number}", length, count) != expected(length, count):
                    problems.append(f"s{number}: wrong tokens")
            except Exception as error:
                problems.append(f"s{number}: {error!r}")

    async def changes():
        made = 0
        for _ in range(num_changes):
            roles = role_at_ingress(cluster)
            name, role = random_of.choice(names), random_of.choice(["prefill", "decode", "both"])
            others = [now for other, now in roles.items() if other != name]
            if roles[name] == role or ("decode" not in sides(role) and not any("decode" in sides(o) for o in others)):
                continue
            facts = await change(cluster, name, role, drain_s=random_of.choice([0.0, 0.2]))
            assert "error" not in facts, facts
            made += 1
            await asyncio.sleep(0.02)
            if is_over.is_set():
                break
        return made

    changing = asyncio.create_task(changes())
    await asyncio.gather(*(one(number) for number in range(num_requests)))
    is_over.set()
    return problems, await changing


@pytest.mark.slow
async def test_a_storm_of_changes_under_load_fails_no_request_and_loses_no_block(folder, expected):
    async with local_cluster(SETTINGS, folder, num_prefill=0, num_inside=3) as cluster:
        problems, made = await storm(cluster, expected, scaled(400), 1000)
        print(f"{made} changes of role")
        assert problems == [] and made >= 10
        await all_blocks_back(cluster)


@pytest.mark.slow
async def test_control_of_the_storm_sequences_that_are_dropped_without_a_word_are_seen(folder, expected, monkeypatch):
    """A switch that forgets what runs there, instead of failing it, must not pass."""
    monkeypatch.setattr("kvrelay.engine.worker.role_switch.RoleSwitch._drain", forgetful)
    patience = {"serve": {"request_timeout_s": 3.0}}
    impatient = settings_from(SETTINGS.model_dump() | patience)
    async with local_cluster(impatient, folder, num_prefill=0, num_inside=3) as cluster:
        problems, _ = await storm(cluster, expected, 40, 1000)
        assert problems


async def forgetful(self, leaving, drain_s):
    for request_id in self._requests.of_sides(leaving):
        self._requests.remove(request_id)
        self._release(request_id, "forgotten")
    return 0
