"""An ingress's HTTP server against clients that hold what they should not, over real sockets."""

import asyncio
import contextlib
import json
import time

import pytest
import uvicorn
from starlette.requests import ClientDisconnect, Request
from starlette.responses import PlainTextResponse

from kvrelay.plane import messages as wire
from kvrelay.serve.edge.connections import ConnectionLimits
from kvrelay.serve.edge.open_bodies import OpenBodies, with_readable_headers
from tests.fakes import until
from tests.serve.conftest import MODEL

MIB = 1 << 20
JSON = "Host: x\r\nContent-Type: application/json\r\n"


@pytest.fixture
async def serve():
    """Serves an app under limits; returns a function that opens a connection."""
    servers = []

    async def serve(app, limits=None, keep_alive_s=30):
        http = (limits or ConnectionLimits()).protocol
        config = uvicorn.Config(app, port=0, log_level="critical", lifespan="off", ws="none", http=http)
        config.timeout_keep_alive = keep_alive_s
        server = uvicorn.Server(config)
        servers.append((server, asyncio.create_task(server._serve())))
        await until(lambda: server.started)
        port = server.servers[0].sockets[0].getsockname()[1]
        return lambda: asyncio.open_connection("127.0.0.1", port)

    yield serve
    for server, task in servers:
        server.should_exit = server.force_exit = True
        await task


async def echo(scope, receive, send):
    with contextlib.suppress(ClientDisconnect):
        await PlainTextResponse(f"{len(await Request(scope, receive).body())}")(scope, receive, send)


async def answer(reader):
    """(status, body) of a response with a length."""
    head = (await reader.readuntil(b"\r\n\r\n")).decode().lower()
    length = int(head.partition("content-length: ")[2].split()[0])
    return int(head.split()[1]), head, await reader.readexactly(length)


def error_code(body):
    return json.loads(body)["error"]["code"]


# ---- bodies


async def test_a_hundred_unfinished_bodies_stay_within_the_budget_and_end(serve):
    size, budget, most = 4 * MIB - 1, 16 * MIB, 0
    bodies = OpenBodies(budget, body_s=3.0, least_bytes_per_s=1 << 40)
    connect = await serve(bodies.before(echo))
    head = f"POST / HTTP/1.1\r\n{JSON}Content-Length: {size + 1}\r\n\r\n".encode()

    async def hold():
        reader, writer = await connect()
        writer.write(head + bytes(size))
        status, head_back, body = await answer(reader)
        writer.close()
        return status, error_code(body), "retry-after: 1" in head_back

    async def watch():
        nonlocal most
        while True:
            most = max(most, bodies.num_bytes)
            await asyncio.sleep(0)

    watching = asyncio.create_task(watch())
    async with asyncio.timeout(60):
        ends = await asyncio.gather(*(hold() for _ in range(100)))
    watching.cancel()
    assert {*ends} == {(503, "too_many_bodies", True), (408, "body_timeout", False)}
    assert budget / 2 < most <= budget and bodies.num_bytes == 0


async def test_one_large_body_that_is_alone_passes_and_so_does_a_slow_one_at_the_least_rate(serve):
    bodies = OpenBodies(MIB, body_s=0.9, least_bytes_per_s=MIB)
    connect = await serve(bodies.before(echo))
    reader, writer = await connect()
    writer.write(f"POST / HTTP/1.1\r\n{JSON}Content-Length: {3 * MIB}\r\n\r\n".encode() + bytes(2 * MIB))
    for _ in range(4):
        await asyncio.sleep(0.3)
        writer.write(bytes(MIB // 4))
    assert (await answer(reader))[::2] == (200, str(3 * MIB).encode())
    assert bodies.num_bytes == 0
    writer.close()


async def test_a_body_that_stands_still_ends_however_much_of_it_has_come(serve):
    connect = await serve(OpenBodies(body_s=0.3).before(echo))
    reader, writer = await connect()
    writer.write(f"POST / HTTP/1.1\r\n{JSON}Content-Length: {3 * MIB}\r\n\r\n".encode() + bytes(2 * MIB))
    async with asyncio.timeout(30):
        assert (await answer(reader))[0] == 408
    writer.close()


async def test_a_client_that_leaves_its_body_gives_back_its_share(serve):
    bodies = OpenBodies()
    connect = await serve(bodies.before(echo))
    _, writer = await connect()
    writer.write(f"POST / HTTP/1.1\r\n{JSON}Content-Length: {2 * MIB}\r\n\r\n".encode() + bytes(MIB))
    await until(lambda: bodies.num_bytes > MIB // 2)
    writer.close()
    await until(lambda: bodies.num_bytes == 0)


async def test_other_headers_than_utf8_are_readable_for_the_server_around_the_api():
    seen = []

    async def app(scope, receive, send):
        seen.extend(scope["headers"])

    given = [(b"x-request-id", b"a\xff"), (b"x", "é".encode()), (b"x-kvrelay-cache-salt", b"\xff")]
    await with_readable_headers(app)({"type": "http", "headers": given}, None, None)
    assert seen == [(b"x-request-id", b"a?"), *given[1:]]


# ---- connections


@pytest.mark.parametrize("sent", [b"", b"\r\n\r\n", b"GET / HTTP/1.1\r\nHost: x\r\nx-slow: "])
async def test_a_connection_without_a_whole_head_ends(serve, sent):
    connect = await serve(echo, ConnectionLimits(head_s=0.3))
    reader, writer = await connect()
    started_s = time.monotonic()

    async def trickle():
        while sent:
            writer.write(sent if time.monotonic() < started_s + 0.05 else sent[-1:])
            await asyncio.sleep(0.1)

    trickling = asyncio.create_task(trickle())
    async with asyncio.timeout(30):
        end = await reader.read()
    trickling.cancel()
    assert (b"408" in end and b"head_timeout" in end) if b"GET" in sent else end == b""
    writer.close()


async def test_a_head_without_end_is_refused(serve):
    connect = await serve(echo)
    reader, writer = await connect()
    writer.write(b"GET / HTTP/1.1\r\nx-long: " + bytes([120]) * (70 << 10))
    status, _, body = await answer(reader)
    assert (status, error_code(body)) == (431, "head_too_large")
    writer.close()


async def test_requests_that_follow_each_other_on_a_connection_are_served_and_a_running_one_has_no_deadline(serve):
    async def slow(scope, receive, send):
        await asyncio.sleep(0.6)
        await echo(scope, receive, send)

    connect = await serve(slow, ConnectionLimits(head_s=0.3))
    reader, writer = await connect()
    for _ in range(3):
        writer.write(f"POST / HTTP/1.1\r\n{JSON}Content-Length: 2\r\n\r\n{{}}".encode())
        assert (await answer(reader))[::2] == (200, b"2")
    writer.close()


async def test_an_address_has_only_so_many_connections_and_gets_new_ones_for_those_that_it_closes(serve):
    limits = ConnectionLimits(per_address=2)
    connect = await serve(echo, limits)
    open_ones = [await connect() for _ in range(2)]
    await until(lambda: limits.counts["127.0.0.1"] == 2)
    reader, writer = await connect()
    status, head, body = await answer(reader)
    assert (status, error_code(body)) == (503, "too_many_connections") and "retry-after: 1" in head
    writer.close()
    open_ones[0][1].close()
    await until(lambda: limits.counts["127.0.0.1"] == 1)
    reader, writer = await connect()
    writer.write(b"GET / HTTP/1.1\r\nHost: x\r\n\r\n")
    assert (await answer(reader))[0] == 200
    for one in (writer, open_ones[1][1]):
        one.close()
    await until(lambda: not limits.counts)


# ---- pipelining


@pytest.mark.parametrize("is_one_segment", [True, False])
@pytest.mark.parametrize("stream", [True, False])
async def test_a_client_that_pipelines_and_leaves_ends_its_generation(make_cluster, serve, is_one_segment, stream):
    cluster = await make_cluster()
    decode = cluster.decode[0]
    decode.pause_at = 3
    connect = await serve(OpenBodies().before(cluster.app))
    _, writer = await connect()
    body = json.dumps({"model": MODEL, "prompt": "hello", "max_tokens": 200, "stream": stream})
    first = f"POST /v1/completions HTTP/1.1\r\n{JSON}Content-Length: {len(body)}\r\n\r\n{body}".encode()
    second = f"POST /v1/models HTTP/1.1\r\n{JSON}Content-Length: 9\r\n\r\nnot mixed".encode()
    writer.write(first + second if is_one_segment else first)
    await decode.paused.wait()
    if not is_one_segment:
        writer.write(second)
        await writer.drain()
        await asyncio.sleep(0.1)
    writer.close()
    await cluster.all_released()
    assert decode.count(wire.Abort) == 1 and decode.count(wire.Reserve) == 1
    assert cluster.dispatcher.stats.outcomes["client"] == 1


async def test_the_request_before_a_pipelined_one_is_answered_whole_and_the_connection_closes(serve):
    go = asyncio.Event()

    async def held(scope, receive, send):
        await go.wait()
        await echo(scope, receive, send)

    connect = await serve(held)
    reader, writer = await connect()
    writer.write(f"POST / HTTP/1.1\r\n{JSON}Content-Length: 2\r\n\r\n{{}}GET /2 HTTP/1.1\r\nHost: x\r\n\r\n".encode())
    await asyncio.sleep(0.1)
    go.set()
    status, head, body = await answer(reader)
    assert (status, body) == (200, b"2") and "connection: close" in head
    assert await reader.read() == b""
    writer.close()
