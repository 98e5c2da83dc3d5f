"""The gate before an ingress that clients reach directly, and what happens when Serve stops a replica."""

import asyncio
import threading

import httpx
import pytest
from starlette.responses import PlainTextResponse

from kvrelay.cluster.deployments import http_server
from kvrelay.cluster.deployments.http_server import Gate, finish_before_stop


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
