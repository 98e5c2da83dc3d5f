"""Constrained streams on real worker processes that are killed, frozen, left and overloaded: Hugging Face's tokens
within the same grammar, and every block back.
"""

import asyncio
import json
import os
import signal

import msgspec
import pytest
import torch

from kvrelay.cluster.launch.local import local_cluster
from kvrelay.cluster.verify.constrained_oracle import Oracle
from kvrelay.decode.target import KvTarget
from kvrelay.engine.checkpoints.tiny import tiny_checkpoint
from kvrelay.errors import Overloaded
from kvrelay.plane.messages import GrammarSpec
from tests.cluster.live.test_faults import (
    collect,
    every_pool_adds_up,
    nothing_held,
    request,
    settings,
    until,
    worker_of,
)
from tests.stopping import stop

pytestmark = [pytest.mark.slow, pytest.mark.processes]

NUMBERS = {"type": "array", "items": {"type": "integer", "maximum": 999}, "minItems": 30, "maxItems": 40}
GRAMMARS = (GrammarSpec("json_schema", json.dumps(NUMBERS)), GrammarSpec("regex", "([a-f]{2,6}-[0-9]{3} ){12}"))


def constrained(name, length=100, *, grammar=GRAMMARS[0], max_tokens=70):
    plain = request(name, length, max_tokens=max_tokens)
    return msgspec.structs.replace(
        plain, sampling=msgspec.structs.replace(plain.sampling, grammar=grammar, ignore_eos=False)
    )


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return tiny_checkpoint("llama", tmp_path_factory.mktemp("models") / "tiny-llama")


@pytest.fixture(scope="module")
def oracle(folder):
    """What Hugging Face generates, once for equal requests; in one thread, since worker processes use the others."""
    model, known, num_threads = Oracle(folder), {}, torch.get_num_threads()
    torch.set_num_threads(1)

    def expected(wanted):
        key = (tuple(wanted.token_ids), wanted.sampling.grammar)
        if key not in known:
            known[key] = model.expected(wanted.token_ids, wanted.sampling)
        return known[key]

    yield expected
    torch.set_num_threads(num_threads)


async def test_killed_workers_leaving_clients_and_overload_change_no_constrained_token(folder, oracle):
    async with local_cluster(settings(max_inflight=6), folder, num_prefill=2, num_decode=2, num_inside=0) as cluster:
        dispatcher = cluster.dispatcher
        wanted = [constrained(f"a{index}", 90 + index, grammar=grammar) for index, grammar in enumerate(GRAMMARS)]
        assert await asyncio.gather(*(collect(cluster, one) for one in wanted)) == [oracle(one) for one in wanted]

        stream = dispatcher.generate(constrained("leaves"), force="remote")
        for _ in range(3):
            await anext(stream)
        await stream.aclose()
        await every_pool_adds_up(cluster)

        crowd = [constrained(f"c{index}", 90 + index % 2, grammar=GRAMMARS[index % 2]) for index in range(10)]
        answers = await asyncio.gather(*(collect(cluster, one, force=None) for one in crowd), return_exceptions=True)
        refused = [answer for answer in answers if isinstance(answer, Overloaded)]
        assert len(refused) == 4
        assert all(answer == oracle(one) for one, answer in zip(crowd, answers, strict=True) if answer not in refused)

        wanted, killed = constrained("decode killed", 90), []

        def kill(count):
            if count >= 20 and not killed:
                killed.append(worker_of(cluster, "decode"))
                os.kill(killed[0].pid, signal.SIGKILL)

        assert await collect(cluster, wanted, after=kill) == oracle(wanted)
        assert dispatcher.stats.retries == 1

        wanted = constrained("prefill killed", 800)
        task = asyncio.create_task(collect(cluster, wanted))
        await until(lambda: any(load.receiving for _, load in dispatcher.workers.live_workers()))
        killed.append(worker_of(cluster, "prefill"))
        os.kill(killed[1].pid, signal.SIGKILL)
        assert await task == oracle(wanted)
        assert dispatcher.stats.retries in (1, 2)  # its part may just have been done

        for worker in killed:
            await worker.process.wait()
        await dispatcher.workers.wait_for(lambda d: len(d.live_workers()) == 2)
        await every_pool_adds_up(cluster)


async def test_a_frozen_prefill_worker_costs_a_constrained_request_one_lease(folder, oracle, monkeypatch):
    monkeypatch.setitem(KvTarget.__init__.__kwdefaults__, "lease_s", 1.0)
    wanted = constrained("frozen", 800)
    async with local_cluster(settings(), folder, num_prefill=2) as cluster:
        task = asyncio.create_task(collect(cluster, wanted))
        await until(lambda: any(load.receiving for _, load in cluster.dispatcher.workers.live_workers()))
        worker = worker_of(cluster, "prefill")
        stop(worker.pid)
        try:
            assert await asyncio.wait_for(task, 60) == oracle(wanted)
            assert cluster.dispatcher.stats.retries == 1
            await nothing_held(cluster)
        finally:
            os.kill(worker.pid, signal.SIGKILL)
