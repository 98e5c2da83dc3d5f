"""The gate before an ingress that clients reach directly, and what happens when Serve stops a replica."""

import asyncio
import threading

import httpx
import pytest
from starlette.responses import PlainTextResponse

from kvrelay.cluster.deployments import http_server
from kvrelay.cluster.deployments.http_server import Gate, finish_before_stop
from tests.fakes import until


async def app(scope, receive, send):
    await PlainTextResponse("served")(scope, receive, send)


async def test_a_closed_gate_refuses_new_requests_and_lets_rays_checks_pass():
    gate = Gate()
    client = httpx.AsyncClient(transport=httpx.ASGITransport(gate.before(app)), base_url="http://test")
    async with client:
        assert (await client.post("/v1/completions")).text == "served"
        gate.is_closed = True
        refused = await client.post("/v1/completions")
        assert refused.status_code == 503 and refused.json()["error"]["code"] == "ingress_stops"
        assert (refused.headers["retry-after"], refused.headers["connection"]) == ("1", "close")
        assert (await client.get("/-/healthz")).text == "served"


@pytest.mark.parametrize("has_haproxy", [False, True])
async def test_rays_server_listens_with_our_limits(monkeypatch, has_haproxy):
    from ray.serve._private import constants, http_util, replica
    from ray.serve.config import HTTPOptions

    class Replica:
        _route_prefix = "/"

        async def direct_ingress(self, scope, receive, send):
            given = dict(scope["headers"])[b"x-request-id"].decode()  # as Serve does
            await PlainTextResponse(f"id {given}")(scope, receive, send)

    monkeypatch.setattr(constants, "RAY_SERVE_ENABLE_HA_PROXY", has_haproxy)
    monkeypatch.setattr(http_util, "set_socket_reuse_port", http_util.set_socket_reuse_port)
    monkeypatch.setattr(replica, "start_asgi_http_server", replica.start_asgi_http_server)
    http_server.listen_with_limits(512)
    options, loop = HTTPOptions(host="127.0.0.1", port=0), asyncio.get_running_loop()
    task, server = await replica.start_asgi_http_server(Replica().direct_ingress, options, event_loop=loop)
    await until(lambda: server.started)
    limits = server.config.http_protocol_class.__self__
    assert limits.per_address == (None if has_haproxy else 1024)
    port = server.servers[0].sockets[0].getsockname()[1]
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    writer.write(b"GET / HTTP/1.1\r\nHost: x\r\nx-request-id: a\xff\r\n\r\n" * 2)  # the second is dropped
    async with asyncio.timeout(30):
        assert (await reader.read()).endswith(b"\r\n\r\nid a?")
    assert sum(limits.counts.values()) <= 1
    writer.close()
    server.should_exit = True
    await task


@pytest.fixture
def replica(monkeypatch):
    """Ray's class with a shutdown that notes when it runs; the gate and the class as before afterwards."""
    from ray.serve._private import replica

    events = []

    async def stop(self):
        events.append("serve waits")
        await asyncio.sleep(0.1)
        events.append("serve is done")

    assert asyncio.iscoroutinefunction(replica.Replica._perform_graceful_shutdown)  # what we hook into is there
    monkeypatch.setattr(replica.Replica, "_perform_graceful_shutdown", stop)
    monkeypatch.setattr(http_server, "GATE", Gate())
    return replica.Replica, events


@pytest.mark.parametrize("has_haproxy", [False, True])
async def test_requests_finish_while_serve_waits_and_on_the_loop_that_serves_them(replica, monkeypatch, has_haproxy):
    from ray.serve._private import constants

    monkeypatch.setattr(constants, "RAY_SERVE_ENABLE_HA_PROXY", has_haproxy)
    kind, events = replica
    own = threading.get_ident()

    async def finish():
        assert threading.get_ident() == own
        events.append("finishing")

    finish_before_stop(finish)
    # Ray may run the replica on another thread's loop
    await asyncio.to_thread(lambda: asyncio.run(kind._perform_graceful_shutdown(object())))
    assert sorted(events[:2]) == ["finishing", "serve waits"] and events[2] == "serve is done"
    assert http_server.GATE.is_closed is not has_haproxy
