"""A Ray of our own: its ports, free again at once when a server has ended and taken while one listens, and what starts
when.
"""

import contextlib
import errno
import socket
import struct
import sys
import threading
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace

import pytest
from ray._private import ray_constants, services
from ray._private.node import Node
from ray.dashboard.subprocesses.module import SubprocessModule
from ray.dashboard.utils import DashboardHeadModule, get_all_modules

from kvrelay.cluster.errors import ClusterError
from kvrelay.cluster.launch import ray_session
from kvrelay.cluster.launch.ray_session import (
    RaySession,
    dashboard_beside,
    free_port,
    held_port,
    why_not_free,
    without_idle_processes,
)
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
def test_a_free_port_is_none_that_the_system_gives_to_others():
    first_given = int(Path("/proc/sys/net/ipv4/ip_local_port_range").read_text().split()[0])
    if first_given < 32_768:
        pytest.skip("this system gives more ports than Linux does by default")
    assert all(free_port("127.0.0.1") < first_given for _ in range(50))


def test_a_free_port_is_found_where_all_of_the_usual_ones_are_taken(monkeypatch):
    with held_port("127.0.0.1", 0) as taken:
        taken.listen()
        monkeypatch.setattr(ray_session, "OWN_PORTS", [taken.getsockname()[1]])
        monkeypatch.setattr(ray_session, "OWN_PORTS_TRIED", 1)
        assert why_not_free("127.0.0.1", free_port("127.0.0.1")) is None


@pytest.mark.skipif(sys.platform != "linux", reason="the option is Linux's")
def test_a_held_port_is_given_to_nobody_and_can_be_listened_at():
    with held_port("127.0.0.1", 0) as probe:  # of those that the system gives
        port = int(probe.getsockname()[1])
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

    def start(session: RaySession, meanwhile: Callable[[], object]) -> None:
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


# ---- Ray's processes


@pytest.fixture
def dashboard(monkeypatch):
    """A dashboard that answers once `answers` is set; `thread` started it."""
    found = SimpleNamespace(answers=threading.Event(), thread=None, options=None, error=None)

    def start(node, **options):
        found.thread, found.options = threading.current_thread(), options
        assert found.answers.wait(10)
        if found.error:
            raise found.error
        node.webui_url = "127.0.0.1:8265"

    monkeypatch.setattr(Node, "start_api_server", start)
    found.start = start
    return found


def test_ray_goes_on_while_the_dashboard_starts(dashboard):
    node = SimpleNamespace(webui_url=None)
    with dashboard_beside() as address:
        Node.start_api_server(node, include_dashboard=True, raise_on_failure=True)
        assert node.webui_url is None
    dashboard.answers.set()
    assert address() == "127.0.0.1:8265"
    assert dashboard.options == {"include_dashboard": True, "raise_on_failure": True}
    assert Node.start_api_server is dashboard.start


def test_the_thread_that_started_the_dashboard_stays_since_the_system_kills_the_dashboard_when_it_ends(dashboard):
    dashboard.answers.set()
    with dashboard_beside() as address:
        Node.start_api_server(SimpleNamespace(webui_url=None))
    address()
    dashboard.thread.join(0.2)
    assert dashboard.thread.is_alive() and dashboard.thread.daemon


def test_a_dashboard_that_does_not_start_fails_the_start(dashboard):
    dashboard.error = RuntimeError("port taken")
    dashboard.answers.set()
    with dashboard_beside() as address:
        Node.start_api_server(SimpleNamespace(webui_url=None))
    with pytest.raises(RuntimeError, match="port taken"):
        address()


def test_ray_as_it_was_after_a_start_that_failed(dashboard):
    with pytest.raises(RuntimeError), dashboard_beside():
        raise RuntimeError
    assert Node.start_api_server is dashboard.start


def test_the_dashboard_starts_all_its_parts_but_those_of_ray_data_and_ray_train(monkeypatch):
    commands = []
    monkeypatch.setattr(services, "start_ray_process", lambda command, process_type, **_: commands.append(command))
    for name in ("start_log_monitor", "start_monitor"):
        monkeypatch.setattr(Node, name, getattr(Node, name))
    without_idle_processes()
    services.start_ray_process(["dashboard.py"], ray_constants.PROCESS_TYPE_DASHBOARD, fate_share=True)
    services.start_ray_process(["raylet"], ray_constants.PROCESS_TYPE_RAYLET)
    assert commands[1] == ["raylet"]
    loaded = set(commands[0][1].removeprefix("--modules-to-load=").split(","))
    there = {one.__name__ for kind in (DashboardHeadModule, SubprocessModule) for one in get_all_modules(kind)}
    assert there - loaded == {"DataHead", "TrainHead"} and loaded <= there


def test_neither_the_log_monitor_nor_the_autoscaler_starts(monkeypatch):
    monkeypatch.setattr(services, "start_ray_process", services.start_ray_process)
    for name in ("start_log_monitor", "start_monitor"):
        monkeypatch.setattr(Node, name, getattr(Node, name))  # restored afterwards; fails when Ray has renamed it
    without_idle_processes()
    bare = object.__new__(Node)
    assert bare.start_log_monitor() is None and bare.start_monitor() is None
