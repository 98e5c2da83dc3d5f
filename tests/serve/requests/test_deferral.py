"""Sequences that wait at the ingress since their first token will be late in any case: their turn, and every other
end.
"""

import asyncio
import contextlib

import msgspec
import pytest

from kvrelay.errors import Overloaded, RequestError, WorkerLost
from kvrelay.plane import messages as wire
from kvrelay.router.decision.deferral import OVERDUE_TOKENS
from kvrelay.router.types import RouteRequest
from kvrelay.serve.telemetry.explain import Explain
from tests.fakes import alphabet, expected_tokens, until
from tests.serve.conftest import MODEL, collect, sequence

ROOMY = {"num_blocks": 4096, "max_model_len": 20_000}
HURRIED = {"policy_options": {"ttft_s": 1e-6}}


@pytest.fixture
async def crowded(make_cluster):
    """Its only prefill worker is at one late prompt, and gives it no first token yet: (cluster, that one's reader)."""
    readers = []

    async def make(**sections):
        sections["router"] = HURRIED | sections.get("router", {})
        cluster = await make_cluster(info=ROOMY, **sections)
        cluster.prefill[0].hold_first_token.clear()
        first = asyncio.create_task(collect(cluster.dispatcher.generate(long("r1"))))
        readers.append(first)
        await cluster.prefill[0].until(lambda worker: worker.count(wire.Prefill) == 1)
        return cluster, first

    yield make
    for reader in readers:
        reader.cancel()
        with contextlib.suppress(asyncio.CancelledError, Exception):
            await reader


def long(request_id):
    return sequence(request_id * (OVERDUE_TOKENS // len(request_id) + 1), request_id=request_id)


async def deferred(cluster, count):
    await until(lambda: cluster.dispatcher.router.num_deferred == count)


def nothing_waits(cluster):
    return not cluster.dispatcher.router.num_deferred and not cluster.dispatcher.placer._turns


def counted(router):
    return [(view.assigned_requests, view.assigned_tokens) for view in router.workers()]


async def test_its_turn_comes_with_the_first_token_of_who_was_there(crowded):
    cluster, first = await crowded()
    explain = Explain(cluster.dispatcher.clock())
    second = asyncio.create_task(collect(cluster.dispatcher.generate(long("r2"), explain=explain)))
    await deferred(cluster, 1)
    assert cluster.decode[0].count(wire.Reserve) == 1, "nothing is reserved for who waits"
    cluster.prefill[0].hold_first_token.set()
    assert (await first)[0] == expected_tokens(alphabet, long("r1"))
    assert (await second)[0] == expected_tokens(alphabet, long("r2"))
    assert explain.deferred_s > 0 and explain.parts_us()["deferred"] > 0
    assert sum(explain.parts_us().values()) == explain.ttft_us()
    assert cluster.dispatcher.stats.deferred == 1 and nothing_waits(cluster)
    stages = [stage["name"] for stage in cluster.dispatcher.requests.find("r2")[0].stages]
    assert stages.index("deferred") < stages.index("routed")
    await cluster.all_released()


async def test_who_goes_away_meanwhile_leaves_nothing_and_the_next_one_has_its_turn(crowded):
    cluster, first = await crowded()
    second = asyncio.create_task(collect(cluster.dispatcher.generate(long("r2"))))
    await deferred(cluster, 1)
    third = asyncio.create_task(collect(cluster.dispatcher.generate(long("r3"))))
    await deferred(cluster, 2)
    second.cancel()
    await deferred(cluster, 1)
    cluster.prefill[0].hold_first_token.set()
    await first
    assert (await third)[0] == expected_tokens(alphabet, long("r3"))
    assert not any(
        message.request.request_id == "r2"
        for message in cluster.decode[0].received
        if isinstance(message, wire.Reserve)
    )
    assert nothing_waits(cluster)
    await cluster.all_released()


async def test_a_sequence_that_is_closed_while_it_is_deferred_gives_its_turn_up(crowded):
    cluster, first = await crowded()
    waiting = asyncio.create_task(anext(cluster.dispatcher.open(long("r2")).tokens()))
    await deferred(cluster, 1)
    waiting.cancel()
    with pytest.raises(asyncio.CancelledError):
        await waiting
    assert nothing_waits(cluster)
    cluster.prefill[0].hold_first_token.set()
    await first
    await cluster.all_released()


async def test_the_time_limit_ends_the_wait(crowded):
    cluster, first = await crowded(serve={"request_timeout_s": 0.5})
    with pytest.raises(RequestError) as caught:
        await collect(cluster.dispatcher.generate(long("r2")))
    assert caught.value.status == 504 and nothing_waits(cluster)
    with pytest.raises(RequestError):
        await first
    cluster.prefill[0].hold_first_token.set()
    await cluster.all_released()


@pytest.mark.usefixtures("short_waits")
async def test_with_the_last_worker_the_hope_goes(crowded):
    cluster, first = await crowded()
    second = asyncio.create_task(collect(cluster.dispatcher.generate(long("r2"))))
    await deferred(cluster, 1)
    for worker in cluster.workers:
        await worker.kill()
    for reading in (second, first):
        with pytest.raises((RequestError, WorkerLost)):
            await reading
    assert nothing_waits(cluster)


async def test_who_has_waited_for_max_queue_s_gets_429_and_leaves_nothing(crowded):
    cluster, first = await crowded(router={"max_queue_s": 0.3})
    with pytest.raises(Overloaded, match="it has been queued for 0 s") as caught:
        await collect(cluster.dispatcher.generate(long("r2")))
    assert (caught.value.status, caught.value.code, caught.value.retry_after_s) == (429, "overloaded", 1.0)
    assert nothing_waits(cluster) and cluster.dispatcher.stats.deferred == 1
    assert cluster.decode[0].count(wire.Reserve) == 1, "nothing was reserved for it"
    cluster.prefill[0].hold_first_token.set()
    await first
    await cluster.all_released()


async def test_who_would_wait_longer_than_max_queue_s_gets_429_at_once(make_cluster):
    """Six prompts are queued, of which the workers start one in ten seconds."""
    cluster = await make_cluster()
    router, start_s = cluster.dispatcher.router, cluster.dispatcher.clock() - 120.0
    for number in range(18):
        router.select_and_reserve(RouteRequest(f"x{number}", (), 100, 8), start_s)
    for number in range(12):
        router.on_first_token(f"x{number}", start_s + 10.0 * (number + 1))
    before = counted(router)
    answer = await cluster.client.post("/v1/completions", json={"model": MODEL, "prompt": "hello", "max_tokens": 4})
    assert answer.status_code == 429 and answer.json()["error"]["code"] == "overloaded"
    assert "it would be queued for about 60 s" in answer.json()["error"]["message"]
    assert answer.headers["retry-after"] == "30"
    assert counted(router) == before and nothing_waits(cluster), "something is counted for it"
    assert not any(worker.holding for worker in cluster.workers)
    for number in range(18):
        router.on_end(f"x{number}")
    answer = await cluster.client.post("/v1/completions", json={"model": MODEL, "prompt": "hello", "max_tokens": 4})
    assert answer.status_code == 200
    await cluster.all_released()


@pytest.mark.parametrize(("deadline_s", "force"), [(60.0, None), (None, "remote")])
async def test_who_has_a_deadline_or_a_forced_path_goes_at_once(crowded, deadline_s, force):
    cluster, first = await crowded()
    request = msgspec.structs.replace(long("r2"), deadline_s=deadline_s)
    second = asyncio.create_task(collect(cluster.dispatcher.generate(request, force=force)))
    await cluster.decode[0].until(lambda worker: worker.count(wire.Reserve) == 2)
    cluster.prefill[0].hold_first_token.set()
    await asyncio.gather(first, second)
    assert cluster.dispatcher.stats.deferred == 0
    await cluster.all_released()


async def test_a_turn_that_comes_at_once_is_not_missed(crowded, monkeypatch):
    cluster, first = await crowded()
    router = cluster.dispatcher.router
    monkeypatch.setattr(router, "take_ready", lambda: router._queue.call())  # whoever waits
    second = asyncio.create_task(collect(cluster.dispatcher.generate(long("r2"))))
    await cluster.decode[0].until(lambda worker: worker.count(wire.Reserve) == 2)
    cluster.prefill[0].hold_first_token.set()
    await asyncio.gather(first, second)
    assert cluster.dispatcher.stats.deferred == 1 and nothing_waits(cluster)


async def test_where_no_kv_can_travel_any_more_who_waited_hears_it(crowded):
    cluster, first = await crowded()
    second = asyncio.create_task(collect(cluster.dispatcher.generate(long("r2"))))
    await deferred(cluster, 1)
    cluster.dispatcher.placer.blocked = "p0 and d0 are incompatible"
    cluster.prefill[0].hold_first_token.set()
    with pytest.raises(RequestError) as caught:
        await second
    assert caught.value.status == 503 and nothing_waits(cluster)
    assert not cluster.dispatcher.router._queue.called
    await first
    await cluster.all_released()
