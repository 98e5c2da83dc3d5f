"""The limits of an ingress under `kvrelay serve`, where Ray Serve lies between its sockets and its API."""

import asyncio
import json

import httpx
import pytest

from kvrelay.cluster.chaos.served import running_serve
from tests.checkpoints import chat_checkpoint

pytestmark = [pytest.mark.slow, pytest.mark.alone, pytest.mark.timeout(300)]

SIZE = 4 << 20
JSON = "Host: x\r\nContent-Type: application/json\r\nx-request-id: "


async def sent(url, data):
    reader, writer = await asyncio.open_connection(url.host, url.port)
    writer.write(data)
    return reader, writer


async def answer_to_unfinished_body(url):
    head = f"POST /v1/completions HTTP/1.1\r\n{JSON}1\r\nContent-Length: {SIZE}\r\n\r\n".encode()
    reader, writer = await sent(url, head + bytes(SIZE - 1))
    end = await reader.readuntil(b"}}")
    writer.close()
    return b"503" in end and b"too_many_bodies" in end, b"408" in end and b"body_timeout" in end


async def check(url):
    reader, writer = await sent(url, f"GET /health HTTP/1.1\r\n{JSON}".encode() + b"a\xff\r\n\r\nGET / HTTP/1.1\r\n")
    answers = await reader.read()  # to the end of the connection
    writer.close()
    assert answers.startswith(b"HTTP/1.1 200") and answers.count(b"HTTP/1.1") == 1

    async with httpx.AsyncClient(base_url=url, timeout=60) as client:
        model = (await client.get("/v1/models")).json()["data"][0]["id"]
        body = json.dumps({"model": model, "prompt": "a", "max_tokens": 8000, "ignore_eos": True, "stream": True})
        head = f"POST /v1/completions HTTP/1.1\r\n{JSON}2\r\nContent-Length: {len(body)}\r\n\r\n"
        reader, writer = await sent(url, f"{head}{body}GET /health HTTP/1.1\r\nHost: x\r\n\r\n".encode())
        await reader.readuntil(b"data: ")
        writer.close()
        await reader.read()
        for _ in range(100):
            metrics = (await client.get("/metrics")).text
            if 'kvrelay_requests_total{outcome="client"} 1.0' in metrics:
                break
            await asyncio.sleep(0.1)
        else:
            raise AssertionError("the generation goes on")

        ends = await asyncio.gather(*(answer_to_unfinished_body(url) for _ in range(40)))
        assert all(any(one) for one in ends) and any(refused for refused, _ in ends), ends


def test_pipelined_unfinished_and_odd_requests_are_refused_and_ended(tmp_path):
    model = chat_checkpoint("qwen2.5", tmp_path / "model")
    flags = ("--dtype", "float32", "--set", "engine.kv_memory=64MiB", "--set", "cluster.drain_timeout_s=2")
    with running_serve(tmp_path, "--model", str(model), *flags) as served:
        asyncio.run(asyncio.wait_for(check(httpx.URL(served.url)), 200))
