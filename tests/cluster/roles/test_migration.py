"""Sequences move between real decode workers in the middle of their output: Hugging Face's tokens, KV that is sent and
not computed again, and every block back.
"""

import asyncio
import contextlib
import json
import os
import signal
import time

import msgspec
import pytest

from kvrelay.cluster.launch.local import local_cluster
from kvrelay.cluster.verify.constrained_oracle import Oracle
from kvrelay.engine.checkpoints.tiny import tiny_checkpoint
from kvrelay.plane.messages import GrammarSpec, Group
from kvrelay.serve.requests.dispatcher import RequestDriver
from tests.cluster.live.test_faults import collect, every_pool_adds_up, nothing_held, oracle, request, settings, until

pytestmark = [pytest.mark.slow, pytest.mark.processes]

BLOCK = 16


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return tiny_checkpoint("llama", tmp_path_factory.mktemp("models") / "tiny-llama")


STEP_S, DRAINING_STEP_S = 0.002, 0.03


def paced(worker):
    """Have each step take a while, as a real model's does. The tiny one ends its output before a move has begun."""
    scheduler = worker.thread.engine.scheduler
    schedule = scheduler.schedule

    def slowly():
        time.sleep(DRAINING_STEP_S if worker.requests.is_draining else STEP_S)
        return schedule()

    scheduler.schedule = slowly


@contextlib.asynccontextmanager
async def two_decode_workers(folder, **options):
    async with local_cluster(settings(), folder, **{"num_inside": 2, **options}) as cluster:
        cluster.dispatcher.migrations.move_s = 0.0  # every sequence is worth a move
        for worker in cluster.inside:
            paced(worker)
        yield cluster


def set_draining(worker, is_draining):
    """What a worker reports when it is to stop; it can be taken back here, so that a sequence moves several times."""
    worker.requests.is_draining = is_draining
    worker._reports.announce()


def stay(cluster):
    """No worker drains."""
    for worker in cluster.inside:
        set_draining(worker, False)


def moving_at(cluster, places):
    """For `collect`: has the sequence moved when so many tokens are there."""
    left = sorted(places)

    def after(count):
        if left and count >= left[0] and not cluster.dispatcher.migrations._emptying:
            left.pop(0)
            (record,) = cluster.dispatcher.requests.newest(1)
            for worker in cluster.inside:
                set_draining(worker, worker.worker_id == record.decode)

    return after


def moves(cluster):
    return cluster.dispatcher.stats.moves


def decoding_at(cluster, worker):
    """The sequences that decode there."""
    attempts = [driver.attempt for driver in cluster.dispatcher.running if driver.attempt is not None]
    return [one for one in attempts if one.is_decoding and one.decision.decode == worker.worker_id]


GREEDY = [  # prompt tokens, output tokens, where it moves
    (1, 60, [3]),
    (100, 200, [5, 40, 80, 120]),  # there and back
    (BLOCK - 1, 90, [1]),
    (3 * BLOCK, 90, [BLOCK - 1, 2 * BLOCK]),
    (900, 123, [20]),  # to the end of the longest context
]


async def test_greedy_tokens_are_those_of_one_worker_and_nothing_is_computed_again(folder):
    num_moves = num_bytes = 0
    async with two_decode_workers(folder) as cluster:
        for number, (length, max_tokens, places) in enumerate(GREEDY):
            wanted = request(f"r{number}", length, max_tokens=max_tokens)
            assert await collect(cluster, wanted, after=moving_at(cluster, places)) == oracle(folder, wanted)
            stay(cluster)
            num_moves += len(places)
            num_bytes += length // BLOCK * BLOCK * cluster.inside[0].info.kv_bytes_per_token
        stats = moves(cluster)
        assert stats.outcomes == {"moved": num_moves}
        assert stats.computed_tokens <= num_moves * BLOCK  # the last block; the rest was in the prefix cache
        assert stats.num_bytes >= num_bytes and cluster.dispatcher.stats.retries == 0
        await nothing_held(cluster)
        await every_pool_adds_up(cluster)


SAMPLED = {
    "a seed": {"temperature": 1.0, "seed": 11},
    "penalties": {"temperature": 0.8, "seed": 3, "repetition_penalty": 1.3, "frequency_penalty": 0.5},
    "logprobs": {"temperature": 0.0, "logprobs": 3},
    "a stop token": {"temperature": 1.0, "seed": 5, "stop_token_ids": (17, 33, 70), "min_tokens": 30},
}


async def test_sampled_tokens_are_those_of_the_run_that_stayed(folder):
    plain = request("a", 60, max_tokens=100)
    async with two_decode_workers(folder) as cluster:
        for name, sampling in SAMPLED.items():
            wanted = msgspec.structs.replace(plain, sampling=msgspec.structs.replace(plain.sampling, **sampling))
            stayed = await collect(cluster, msgspec.structs.replace(wanted, request_id=name))
            moved = msgspec.structs.replace(wanted, request_id=f"{name}, moved")
            assert await collect(cluster, moved, after=moving_at(cluster, [8, 20])) == stayed, name
            stay(cluster)
        assert moves(cluster).outcomes["moved"] >= len(SAMPLED) and not moves(cluster).outcomes["failed"]
        await nothing_held(cluster)


async def test_a_constrained_sequence_stays_within_its_grammar(folder):
    schema = {"type": "array", "items": {"type": "integer", "maximum": 999}, "minItems": 30, "maxItems": 40}
    plain = request("a", 40, max_tokens=90)
    sampling = msgspec.structs.replace(plain.sampling, grammar=GrammarSpec("json_schema", json.dumps(schema)))
    wanted = msgspec.structs.replace(plain, sampling=msgspec.structs.replace(sampling, ignore_eos=False))
    async with two_decode_workers(folder) as cluster:
        tokens = await collect(cluster, wanted, after=moving_at(cluster, [7, 30]))
        assert tokens == Oracle(folder).expected(wanted.token_ids, wanted.sampling)
        assert moves(cluster).outcomes["moved"] >= 1
        await nothing_held(cluster)


async def test_the_choices_of_a_group_move_together(folder):
    plain = request("a", 70, max_tokens=80)
    sampling = msgspec.structs.replace(plain.sampling, temperature=1.0)
    group = msgspec.structs.replace(plain, sampling=sampling, group=Group(seeds=(4, 9)))

    async def said(cluster, wanted, after=lambda count: None):
        found = [[], []]
        async for output in cluster.dispatcher.generate(wanted, force="remote"):
            assert output.position == len(found[output.choice])
            found[output.choice] += output.token_ids
            after(min(map(len, found)))
        return found

    async with two_decode_workers(folder) as cluster:
        stayed = await said(cluster, group)
        moved = msgspec.structs.replace(group, request_id="b")
        assert await said(cluster, moved, moving_at(cluster, [10])) == stayed
        assert moves(cluster).outcomes["moved"] == 1
        await nothing_held(cluster)


async def test_control_a_move_that_loses_a_token_does_not_pass(folder, monkeypatch):
    wanted = request("a", 100, max_tokens=120)
    faithful = RequestDriver._continuation

    def lossy(self):
        whole = faithful(self)
        return msgspec.structs.replace(whole, token_ids=[*whole.token_ids[:-2], 5, whole.token_ids[-1]])

    monkeypatch.setattr(RequestDriver, "_continuation", lossy)
    async with two_decode_workers(folder) as cluster:
        assert await collect(cluster, wanted, after=moving_at(cluster, [10])) != oracle(folder, wanted)
        assert moves(cluster).outcomes["moved"] == 1


async def test_many_sequences_leave_a_worker_under_load_and_it_is_empty(folder):
    wanted = [request(f"r{n}", 40 + n, max_tokens=150) for n in range(12)]
    async with two_decode_workers(folder) as cluster:
        reading = [asyncio.create_task(collect(cluster, one)) for one in wanted]
        first = cluster.inside[0]
        await until(lambda: len(decoding_at(cluster, first)) >= 3)
        num_decoding = len(decoding_at(cluster, first))
        await first.drain(60.0)
        assert not len(first.requests)
        outcomes = moves(cluster).outcomes  # KV that was on its way there moves as well, or is refused
        assert outcomes["moved"] >= num_decoding and not outcomes["failed"], outcomes
        assert cluster.dispatcher.stats.retries == 0
        for one, task in zip(wanted, reading, strict=True):
            assert await task == oracle(folder, one)
        await nothing_held(cluster)
        await every_pool_adds_up(cluster)


@pytest.mark.parametrize("who", ["source", "target"])
async def test_a_worker_killed_in_the_middle_of_a_move_costs_no_token(folder, who):
    """The source is in this process when the target is killed, and the other way round."""
    wanted = request("a", 900, max_tokens=100)
    async with two_decode_workers(folder, num_decode=1, num_inside=1) as cluster:
        inside, outside = cluster.inside[0], cluster.decode[0]
        from_name = outside.name if who == "source" else inside.worker_id
        others = [
            one for one in cluster.members if one.worker_id != (inside.worker_id if who == "source" else outside.name)
        ]
        everyone = cluster.members
        cluster.dispatcher.workers.set_members(others)  # so that it begins where it is to leave
        await until(lambda: len(cluster.dispatcher.workers.live_workers()) == 2)

        def leave(count):
            if count >= 5 and worker_of_or_none(cluster) == from_name and not cluster.dispatcher.stats.moves.outcomes:
                cluster.dispatcher.workers.set_members(everyone)

        task = asyncio.create_task(collect(cluster, wanted, after=leave))
        await until(lambda: len(cluster.dispatcher.workers.live_workers()) == 3)
        cluster.dispatcher.workers.set_members([one for one in everyone if one.worker_id != from_name])
        await until(lambda: any(driver.move for driver in cluster.dispatcher.running) or task.done())
        os.kill(outside.pid, signal.SIGKILL)
        await outside.process.wait()
        assert await task == oracle(folder, wanted)
        await nothing_held(cluster)
        await every_pool_adds_up(cluster)


def worker_of_or_none(cluster):
    (record,) = cluster.dispatcher.requests.newest(1)
    return record.decode
