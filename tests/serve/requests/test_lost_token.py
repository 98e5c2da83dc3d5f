"""A first token that died with its worker, after the blocks had arrived."""

import asyncio

import pytest

from kvrelay.plane import messages as wire
from tests.fakes import alphabet, expected_tokens, until
from tests.serve.conftest import collect, sequence


@pytest.mark.parametrize("num_prefill", [1, 2])
async def test_a_first_token_lost_with_its_worker_is_computed_again_and_no_stream_hangs(make_cluster, num_prefill):
    cluster = await make_cluster(prefill=num_prefill)
    for worker in cluster.prefill:
        worker.hold_first_token.clear()
    request = sequence()
    decode = cluster.decode[0]
    reading = asyncio.create_task(collect(cluster.dispatcher.generate(request)))
    await until(lambda: any(worker.count(wire.Prefill) for worker in cluster.prefill))
    victims = [worker for worker in cluster.prefill if worker.count(wire.Prefill)]
    decode.pause_at = 5
    decode.commit("r1")  # the blocks are here: decoding begins, its tokens wait for the first one
    await decode.paused.wait()
    await cluster.dispatcher.queries.status("d0")
    assert not reading.done()
    await victims[0].kill()
    decode.resume.set()
    for worker in cluster.prefill:
        worker.hold_first_token.set()
    async with asyncio.timeout(10):
        assert (await reading)[0] == expected_tokens(alphabet, request)


async def test_a_worker_that_owes_nothing_more_may_die(make_cluster):
    cluster = await make_cluster()
    cluster.decode[0].pause_at = 4
    request = sequence()
    reading = asyncio.create_task(collect(cluster.dispatcher.generate(request)))
    await cluster.decode[0].paused.wait()
    await cluster.dispatcher.queries.status("d0")
    await cluster.dispatcher.queries.status("p0")
    await cluster.prefill[0].kill()
    cluster.decode[0].resume.set()
    assert (await reading)[0] == expected_tokens(alphabet, request)
    assert cluster.dispatcher.stats.retries == 0
