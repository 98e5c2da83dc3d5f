"""Workers change their roles in place, idle and under load: the same tokens, no failed request, every block back."""

import asyncio
import json
import os
import random
import signal
import time

import pytest
import torch
from transformers import AutoModelForCausalLM

from kvrelay.cluster.launch.local import local_cluster
from kvrelay.config import settings_from
from kvrelay.engine.checkpoints.tiny import tiny_checkpoint
from kvrelay.hashing import block_hashes
from kvrelay.plane.messages import Sampling, SequenceRequest
from kvrelay.types import sides
from tests.scale import scaled

pytestmark = pytest.mark.processes

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


def slowed(worker):
    """Have its sequences still run when the test looks at them: the tiny model is fast."""
    scheduler = worker.thread.engine.scheduler
    schedule = scheduler.schedule

    def slowly():
        time.sleep(0.02)
        return schedule()

    scheduler.schedule = slowly


async def test_a_busy_worker_takes_its_new_role_at_once_and_ends_the_old_one_beside_it(folder, expected):
    async with local_cluster(SETTINGS, folder, num_prefill=0, num_inside=2) as cluster:
        worker, begun = cluster.inside[1], [asyncio.Event() for _ in range(4)]
        slowed(worker)
        cluster.dispatcher.migrations.is_enabled = False  # what runs there stays until it ends
        running = [asyncio.create_task(answer(cluster, f"r{i}", 60 + i, 200, event)) for i, event in enumerate(begun)]
        await asyncio.gather(*(event.wait() for event in begun))
        facts = await change(cluster, "inside-1", "prefill")
        assert facts["sequences"] > facts["failed"] == 0 and role_at_ingress(cluster)["inside-1"] == "prefill"
        assert await answer(cluster, "apart", 130, 20) == expected(130, 20)
        (record,) = cluster.dispatcher.requests.find("apart")
        assert (record.prefill, record.decode) == ("inside-1", "inside-0")
        assert len(worker.requests.not_of_role()) == facts["sequences"]  # they still decode there
        facts = await change(cluster, "inside-1", "decode")
        assert facts["sequences"] == 0 and worker.requests.not_of_role() == []  # and may stay
        assert await asyncio.gather(*running) == [expected(60 + i, 200) for i in range(4)]
        assert cluster.dispatcher.stats.retries == 0
        await all_blocks_back(cluster)


async def test_what_is_left_when_the_drain_time_ends_is_computed_again_elsewhere(folder, expected):
    async with local_cluster(SETTINGS, folder, num_prefill=0, num_inside=2) as cluster:
        worker, begun = cluster.inside[1], [asyncio.Event() for _ in range(4)]
        slowed(worker)
        cluster.dispatcher.migrations.is_enabled = False
        running = [asyncio.create_task(answer(cluster, f"r{i}", 60 + i, 200, event)) for i, event in enumerate(begun)]
        await asyncio.gather(*(event.wait() for event in begun))
        facts = await change(cluster, "inside-1", "prefill", drain_s=0.05)
        async with asyncio.timeout(10):
            while worker.requests.not_of_role():
                await asyncio.sleep(0.01)
        assert await asyncio.gather(*running) == [expected(60 + i, 200) for i in range(4)]
        assert facts["sequences"] and facts["failed"] == 0
        again = [one for one in cluster.dispatcher.requests.newest(4) if one.decode == "inside-0" and one.attempts > 1]
        assert len(again) == facts["sequences"]
        await all_blocks_back(cluster)


async def test_a_worker_that_shuts_down_and_an_unknown_role_are_refused(folder):
    async with local_cluster(SETTINGS, folder, num_prefill=0, num_inside=2) as cluster:
        worker = cluster.inside[0]
        assert "a role is one of" in (await change(cluster, "inside-0", "encode"))["error"]
        worker.requests.is_draining = True
        assert "shutting down" in (await change(cluster, "inside-0", "prefill"))["error"]
        assert worker.requests.role == "decode"


@pytest.mark.slow
async def test_a_worker_killed_after_it_has_changed_its_role_costs_no_request(folder, expected):
    async with local_cluster(SETTINGS, folder, num_prefill=0, num_decode=1, num_inside=1) as cluster:
        cluster.dispatcher.router.role_changed("inside-0", "none")  # so that all go to the other one
        begun = [asyncio.Event() for _ in range(4)]
        running = [asyncio.create_task(answer(cluster, f"r{i}", 60 + i, 300, event)) for i, event in enumerate(begun)]
        await asyncio.gather(*(event.wait() for event in begun))
        cluster.dispatcher.router.role_changed("inside-0", "decode")
        facts = await change(cluster, "decode-0", "prefill")
        os.kill(cluster.decode[0].pid, signal.SIGKILL)
        assert facts["sequences"] == 4
        assert await asyncio.gather(*running) == [expected(60 + i, 300) for i in range(4)]
        assert await cluster.pool_leaks() == []


async def storm(cluster, expected, num_requests, num_changes, prefix="s"):
    """(wrong or failed answers, changes made) of requests while roles change at random; one worker always decodes."""
    random_of, problems, is_over = random.Random(7), [], asyncio.Event()
    names = [worker.worker_id for worker in cluster.inside]
    room = asyncio.Semaphore(6)

    async def one(number):
        length, count = random_of.choice([40, 90, 200]), random_of.choice([5, 40, 120])
        async with room:
            try:
                if await answer(cluster, f"{prefix}{number}", length, count) != expected(length, count):
                    problems.append(f"{prefix}{number}: wrong tokens")
            except Exception as error:
                problems.append(f"{prefix}{number}: {error!r}")

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
    monkeypatch.setattr("kvrelay.engine.worker.role_switch.RoleSwitch._fail_left", forgetful)
    patience = {"serve": {"request_timeout_s": 3.0}}
    impatient = settings_from(SETTINGS.model_dump() | patience)
    async with local_cluster(impatient, folder, num_prefill=0, num_inside=3) as cluster:
        for number in range(10):  # a storm whose dropped sequences were all on their way goes on with other workers
            problems, _ = await storm(cluster, expected, 40, 1000, f"c{number}-")
            if problems:
                break
        assert problems


def forgetful(self):
    left = self._requests.not_of_role()
    for request_id in left:
        self._requests.remove(request_id)
        self._release(request_id, "forgotten")
    return len(left)
