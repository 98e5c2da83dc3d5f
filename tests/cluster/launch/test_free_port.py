"""A port is free again at once when its server has ended, and taken while anybody listens."""

import contextlib
import errno
import socket
import struct
import sys

import pytest

from kvrelay.cluster.errors import ClusterError
from kvrelay.cluster.launch import ray_session
from kvrelay.cluster.launch.ray_session import RaySession, free_port, held_port, why_not_free
from kvrelay.config import Settings

pytestmark = pytest.mark.alone


IP_LOCAL_PORT_RANGE = 51  # Linux 6.3; which ports the system may give this socket


def listener(port: int) -> socket.socket:
    """A server's socket as our ingress has Ray Serve make it."""
    server = socket.socket()
    server.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    server.bind(("127.0.0.1", port))
    server.listen()
    return server


def test_a_listener_is_seen():
    port = free_port("127.0.0.1")
    with listener(port):
        assert why_not_free("127.0.0.1", port)


def test_a_server_that_ended_with_connections_open_leaves_its_port_free():
    port = free_port("127.0.0.1")
    server = listener(port)
    with socket.create_connection(("127.0.0.1", port)):
        accepted, _ = server.accept()
        accepted.close()  # the server closes first: its side waits in TIME_WAIT
        server.close()
    assert why_not_free("127.0.0.1", port) is None
    with listener(port):
        assert why_not_free("127.0.0.1", port)


def given_port(low: int) -> int | None:
    """The port that the system gives a server that takes any, when only `low` is there; None: it gives none."""
    with socket.socket() as server:
        server.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        server.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEPORT, 1)  # as gRPC's servers
        try:
            server.setsockopt(socket.IPPROTO_IP, IP_LOCAL_PORT_RANGE, struct.pack("I", low << 16 | low))
        except OSError:
            pytest.skip("this system cannot narrow the ports that it gives")
        try:
            server.bind(("0.0.0.0", 0))
        except OSError as error:
            assert error.errno == errno.EADDRINUSE
            return None
        return int(server.getsockname()[1])


@pytest.mark.skipif(sys.platform != "linux", reason="the option is Linux's")
def test_a_held_port_is_given_to_nobody_and_can_be_listened_at():
    port = free_port("127.0.0.1")
    assert given_port(port) == port  # the control
    with held_port("127.0.0.1", port):
        assert given_port(port) is None
        assert why_not_free("127.0.0.1", port) is None
        with listener(port):
            assert why_not_free("127.0.0.1", port)


def test_a_session_holds_the_ports_of_its_ingresses_until_it_stops():
    port = free_port("127.0.0.1")
    settings = Settings.model_validate({"serve": {"host": "127.0.0.1", "port": port}, "cluster": {"ingress": 2}})
    session = RaySession(settings)
    session.check_ports()
    with contextlib.closing(socket.socket()) as rude, pytest.raises(OSError):
        rude.bind(("127.0.0.1", port))  # who does not ask for reuse
    session.stop()
    with contextlib.closing(socket.socket()) as rude:
        rude.bind(("127.0.0.1", port))
    with listener(port), pytest.raises(ClusterError, match="taken"):
        session.check_ports()
    session.stop()


def test_a_session_holds_the_ports_of_haproxy_which_starts_last(monkeypatch):
    given: list[int] = []

    def start(session: RaySession) -> None:
        for port in given:
            with contextlib.closing(socket.socket()) as rude, pytest.raises(OSError):
                rude.bind(("127.0.0.1", port))
            listener(port).close()
        raise RuntimeError("no Ray here")

    monkeypatch.setattr(ray_session, "set_ray_environment", lambda port, haproxy: given.extend(haproxy))
    monkeypatch.setattr(RaySession, "_init_ray", start)
    session = RaySession(Settings.model_validate({"cluster": {"ingress": 2}}))
    with pytest.raises(ClusterError, match="no Ray here"):
        session.start_ray()
    session.stop()
    assert len(set(given)) == 2
    for port in given:
        with contextlib.closing(socket.socket()) as rude:
            rude.bind(("127.0.0.1", port))
