"""An ingress that stops finishes what it has begun; what takes too long ends with an error, not a broken connection."""

import asyncio
import json

import pytest

from kvrelay.plane import messages as wire
from kvrelay.serve.requests.stopping import finish
from tests.fakes import alphabet, expected_tokens
from tests.serve.conftest import MODEL, collect, sequence

pytestmark = pytest.mark.pure


async def paused(make_cluster, read, at=5):
    cluster = await make_cluster()
    cluster.decode[0].pause_at = at
    reading = asyncio.create_task(read(cluster))
    await cluster.decode[0].paused.wait()
    return cluster, reading


async def test_it_waits_for_what_runs(make_cluster):
    request = sequence(max_tokens=20)
    cluster, reading = await paused(make_cluster, lambda cluster: collect(cluster.dispatcher.generate(request)))
    finishing = asyncio.create_task(finish(cluster.dispatcher, 30.0))
    await asyncio.sleep(0.3)
    assert not finishing.done()
    cluster.decode[0].resume.set()
    assert await reading == (expected_tokens(alphabet, request), "length")
    await asyncio.wait_for(finishing, 1.0)


async def test_without_requests_it_is_over_at_once(make_cluster):
    cluster = await make_cluster()
    await asyncio.wait_for(finish(cluster.dispatcher, 30.0), 1.0)


@pytest.mark.parametrize("stream", [True, False])
async def test_what_takes_too_long_ends_with_an_error(make_cluster, stream):
    asked = {"model": MODEL, "prompt": "x", "max_tokens": 20, "stream": stream}
    cluster, reading = await paused(make_cluster, lambda cluster: cluster.client.post("/v1/completions", json=asked))
    await asyncio.wait_for(finish(cluster.dispatcher, 0.2), 1.0)
    answer = await reading
    if stream:
        *chunks, last = [json.loads(line[6:]) for line in answer.text.splitlines() if line.startswith("data: ")]
        assert answer.status_code == 200 and len("".join(one["choices"][0]["text"] for one in chunks)) == 5
    else:
        last = answer.json()
        assert answer.status_code == 503 and answer.headers["retry-after"] == "1"
    assert last["error"]["code"] == "ingress_stops" and "0.2 s" in last["error"]["message"]
    cluster.decode[0].resume.set()
    await cluster.all_released()


async def test_a_request_without_its_first_token_ends_too(make_cluster):
    cluster = await make_cluster()
    cluster.prefill[0].hold_first_token.clear()
    reading = asyncio.create_task(collect(cluster.dispatcher.generate(sequence(max_tokens=20))))
    await cluster.prefill[0].until(lambda worker: worker.count(wire.Prefill))
    await finish(cluster.dispatcher, 0.1)
    with pytest.raises(Exception, match="this ingress stops"):
        await reading
    cluster.prefill[0].hold_first_token.set()
    await cluster.all_released()


async def test_viewers_of_the_page_leave(make_cluster):
    cluster = await make_cluster()
    viewing = asyncio.create_task(cluster.client.get("/kvrelay/live/events"))
    await asyncio.sleep(0.1)
    await finish(cluster.dispatcher, 30.0)
    answer = await asyncio.wait_for(viewing, 5.0)
    assert answer.text.startswith("data: {")
