"""Clients that leave, over a real HTTP server: both workers let go at once, at every stage."""

import asyncio

import httpx
import pytest

from kvrelay.plane import messages as wire
from kvrelay.types import Role
from tests.fakes import FakeWorker, until
from tests.serve.conftest import MODEL, hold_in_line

BODY = {"model": MODEL, "prompt": "hello", "max_tokens": 200}


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("stage", ["reserve", "prefill", "transfer", "decode"])
async def test_a_client_that_leaves_frees_its_blocks(make_cluster, serve_http, stream, stage):
    cluster = await make_cluster()
    prefill, decode = cluster.prefill[0], cluster.decode[0]
    if stage == "reserve":
        decode.answers = [hold_in_line(decode)]
    elif stage == "prefill":
        prefill.hold_first_token.clear()
    elif stage == "transfer":
        prefill.peers = {"d0": FakeWorker("nowhere", Role.DECODE)}
    else:
        decode.pause_at = 3
    url = await serve_http(cluster.app)
    async with httpx.AsyncClient(timeout=30) as client:
        asking = asyncio.create_task(client.post(f"{url}/v1/completions", json=BODY | {"stream": stream}))
        if stage == "decode":
            await decode.paused.wait()
        elif stage == "reserve":
            await decode.until(lambda w: w.holding)
        else:
            await prefill.until(lambda w: w.count(wire.Prefill))
        asking.cancel()
        await asyncio.gather(asking, return_exceptions=True)
    await cluster.all_released()
    assert decode.count(wire.Abort) == 1
    assert cluster.dispatcher.stats.outcomes["client"] == 1


async def test_leaving_one_of_many_leaves_the_others_alone(make_cluster, serve_http):
    cluster = await make_cluster()
    cluster.decode[0].pause_at = 3
    url = await serve_http(cluster.app)
    async with httpx.AsyncClient(timeout=30) as client:
        leaving = asyncio.create_task(client.post(f"{url}/v1/completions", json=BODY | {"n": 2}))
        await cluster.decode[0].until(lambda w: len(w.holding) == 1)
        staying = asyncio.create_task(client.post(f"{url}/v1/completions", json=BODY))
        await cluster.decode[0].until(lambda w: len(w.holding) == 2)
        leaving.cancel()
        await cluster.decode[0].until(lambda w: len(w.holding) == 1)
        cluster.decode[0].resume.set()
        assert (await staying).json()["usage"]["completion_tokens"] == 200
        await asyncio.gather(leaving, return_exceptions=True)
    await cluster.all_released()


async def test_tokens_leave_as_they_come(make_cluster, serve_http):
    """The first token is at the client while the decode worker has sent nothing yet."""
    cluster = await make_cluster()
    cluster.decode[0].pause_at = 1
    url = await serve_http(cluster.app)
    async with (
        httpx.AsyncClient(timeout=30) as client,
        client.stream("POST", f"{url}/v1/completions", json=BODY | {"stream": True}) as response,
    ):
        lines = response.aiter_lines()
        assert (await anext(lines)).startswith("data: {")
        assert not cluster.decode[0].resume.is_set()
        cluster.decode[0].resume.set()
        rest = [line async for line in lines if line]
    assert rest[-1] == "data: [DONE]"


async def test_a_client_that_leaves_in_the_middle_of_its_body_is_forgotten(make_cluster, serve_http, caplog):
    cluster = await make_cluster()
    url = httpx.URL(await serve_http(cluster.app))
    with caplog.at_level("DEBUG", logger="kvrelay.serve.api.endpoint"):
        _, writer = await asyncio.open_connection(url.host, url.port)
        head = (
            "POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\nContent-Length: 100\r\n\r\n"
        )
        writer.write(head.encode() + b'{"prompt": ')
        await writer.drain()
        writer.close()
        await until(lambda: not "the client left /v1/completions" not in caplog.text)
    async with httpx.AsyncClient(timeout=30) as client:
        assert (await client.post(f"{url}/v1/completions", json=BODY | {"max_tokens": 3})).status_code == 200
    await cluster.all_released()
    assert cluster.decode[0].count(wire.Reserve) == 1
