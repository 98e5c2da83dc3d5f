"""Hosts in namespaces: apart from each other, reached by ssh, crashed, cut, slowed, and gone without a trace."""

import os
import signal
import socket
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from kvrelay.cluster.chaos.hosts.namespaces import HostError, Hosts
from tests.hosts.traces import traces

pytestmark = [pytest.mark.slow, pytest.mark.alone]
PREFIX = "10.77.9"


def left() -> list[str]:
    """What sets with the prefix have left on this machine."""
    return traces(Hosts(0, PREFIX))


def connect_s(host: str, timeout_s: float = 5.0) -> float:
    """How long a connection to its sshd takes, ARP known."""
    for _ in range(2):
        began_s = time.monotonic()
        socket.create_connection((host, 22), timeout=timeout_s).close()
    return time.monotonic() - began_s


def test_hosts_have_files_processes_and_addresses_of_their_own():
    with Hosts(2, PREFIX) as hosts:
        assert [hosts.run(host, "hostname").strip() for host in (1, 2)] == ["host1", "host2"]
        hosts.run(1, "sh", "-c", "touch /tmp/mark ~/mark /dev/shm/mark; nohup sleep 4321 >/dev/null 2>&1 &")
        assert "sleep 4321" in hosts.run(1, "ps", "ax")
        assert "sleep 4321" not in hosts.run(2, "ps", "ax")
        with pytest.raises(HostError, match="status 2"):
            hosts.run(2, "ls", "/tmp/mark")
        assert hosts.run(2, "sh", "-c", "ls /tmp /dev/shm").count("mark") == 0
        assert not Path.home().joinpath("mark").exists()
        assert socket.create_connection((hosts.address(2), 22), timeout=5).close() is None
        assert hosts.run(1, "getent", "hosts", "host2").split() == [hosts.address(2), "host2"]
        assert left()
    assert left() == []


def test_a_host_crashes_keeps_its_files_and_comes_back():
    with Hosts(2, PREFIX) as hosts:
        hosts.run(2, "touch", "/tmp/mark")
        hosts.crash(2)
        assert hosts.num_processes(2) == 0
        with pytest.raises(ConnectionRefusedError):
            connect_s(hosts.address(2))
        hosts.run(1, "true")
        hosts.start(2)
        hosts.run(2, "ls", "/tmp/mark")
    assert left() == []


def test_a_link_is_cut_mended_and_slowed_both_ways():
    with Hosts(1, PREFIX) as hosts:
        hosts.cut(1)
        with pytest.raises(TimeoutError):
            connect_s(hosts.address(1), timeout_s=0.5)
        hosts.mend(1)
        connect_s(hosts.address(1))
        hosts.slow(1, "10mbit", latency_s=0.1)
        assert 0.2 <= connect_s(hosts.address(1)) < 1.5
        began_s = time.monotonic()
        hosts.run(1, "sh", "-c", "head -c 2000000 /dev/zero")
        assert time.monotonic() - began_s > 16 / 10  # 16 Mbit at 10 Mbit/s
        hosts.fast(1)
        assert connect_s(hosts.address(1)) < 0.2
    assert left() == []


HEAR = "import socket; s = socket.socket(type=2); s.bind(('', 999)); s.settimeout(3); s.recv(9)"
SAY = "import socket; socket.socket(type=2).sendto(b'x', ('{}', 999))"


def arrives(hosts: Hosts, source: int, target: int) -> bool:
    """Whether a packet of the source reaches the target within three seconds."""
    with ThreadPoolExecutor(1) as pool:
        heard = pool.submit(hosts.run, target, sys.executable, "-c", HEAR)
        while not hosts.run(target, "ss", "-lunH", "sport = :999"):
            assert not heard.done()
        hosts.run(source, sys.executable, "-c", SAY.format(hosts.address(target)))
        return heard.exception() is None


def test_a_one_way_link_loses_the_packets_of_one_direction():
    with Hosts(2, PREFIX) as hosts:
        assert arrives(hosts, 1, 2) and arrives(hosts, 2, 1)
        hosts.deafen(1, 2)
        assert not arrives(hosts, 1, 2) and arrives(hosts, 2, 1)
        hosts.reconcile(1, 2)
        assert arrives(hosts, 1, 2)
    assert left() == []


def test_what_a_killed_test_left_is_removed_first():
    lines = (
        "import time",
        "from kvrelay.cluster.chaos.hosts.namespaces import Hosts",
        f"Hosts(2, {PREFIX!r}).up()",
        "print('up', flush=True)",
    )
    code = "; ".join((*lines, "time.sleep(60)"))
    with subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE, cwd=Path(__file__).parents[2]) as other:
        assert other.stdout is not None
        assert other.stdout.readline() == b"up\n"
        os.kill(other.pid, signal.SIGKILL)
    assert left()
    with Hosts(1, PREFIX) as hosts:
        assert "host1" in hosts.run(1, "hostname")
    assert left() == []


def test_a_prefix_that_is_none_is_refused():
    with pytest.raises(HostError, match=r"the first three numbers"):
        Hosts(1, "10.77.0.1")
