"""Ports of the planes: any free one, or one of `cluster.worker_ports`, whatever the process opens."""

import socket

import pytest

from kvrelay.config import settings_from
from kvrelay.errors import ConfigError
from kvrelay.kvtransfer.transports.nixl import ucx
from kvrelay.plane import ports
from kvrelay.plane.connection import Server, connect

HOST, SECRET = "127.0.0.1", b"secret"


@pytest.fixture
def three_ports(monkeypatch):
    monkeypatch.setattr(ports, "_range", range(0))  # restored afterwards
    for first in range(21000, 60000, 50):
        try:
            for port in range(first, first + 3):
                socket.create_server((HOST, port)).close()
        except OSError:
            continue
        ports.use_ports(range(first, first + 3))
        return range(first, first + 3)
    pytest.fail("no three free ports")


def test_listeners_take_every_port_of_the_range_and_then_say_so(three_ports):
    listeners = [ports.listen(HOST, backlog=1) for _ in three_ports]
    assert sorted(one.getsockname()[1] for one in listeners) == list(three_ports)
    with pytest.raises(OSError, match=rf"every port of cluster.worker_ports, {three_ports.start}-.*widen"):
        ports.listen(HOST, backlog=1)
    listeners.pop().close()
    listeners.append(ports.listen(HOST, backlog=1))
    for one in listeners:
        one.close()


async def test_a_server_of_the_request_plane_listens_in_the_range(three_ports):
    async def hang_up(connection):
        pass

    server = Server(hang_up, SECRET)
    port = await server.start(HOST)
    assert port in three_ports
    (await connect(HOST, port, SECRET)).abort()
    await server.aclose()


def test_ucx_gets_the_range_unless_the_user_has_set_one(three_ports, monkeypatch):
    monkeypatch.setenv("UCX_TCP_PORT_RANGE", "1-2")
    ucx.set_defaults()
    assert ucx.os.environ["UCX_TCP_PORT_RANGE"] == "1-2"
    monkeypatch.delenv("UCX_TCP_PORT_RANGE")
    ucx.set_defaults()
    assert ucx.os.environ["UCX_TCP_PORT_RANGE"] == f"{three_ports.start}-{three_ports.stop - 1}"


def test_the_setting_is_a_range_of_enough_ports():
    assert settings_from({}).cluster.ports == range(0)
    assert settings_from({"cluster": {"worker_ports": "20000-20099"}}).cluster.ports == range(20000, 20100)
    for wrong, why in {
        "20000": "write a range",
        "9-4": "write a range",
        "80-90": "1024",
        "20000-20003": "4 ports",
    }.items():
        with pytest.raises(ConfigError, match=why):
            settings_from({"cluster": {"worker_ports": wrong}})
