"""`kvrelay rotate` on a running cluster under TLS: no request fails, though the registry is killed halfway."""

import asyncio
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import pytest

from kvrelay.cluster.chaos.cluster import ServeCluster
from kvrelay.cluster.errors import ClusterError
from kvrelay.cluster.launch.http_json import request_json
from kvrelay.engine.checkpoints.tiny import tiny_checkpoint
from kvrelay.errors import AuthenticationFailed, ConnectionLost
from kvrelay.plane import connection as plane
from kvrelay.plane.tls import ClusterTls, issue

pytestmark = [pytest.mark.slow, pytest.mark.alone, pytest.mark.timeout(600)]

SECRET = "the secret of this cluster"
SETTINGS = {
    "cluster.tls": True,
    "cluster.secret": SECRET,
    "engine.kv_memory": "64MiB",
    "transfer.transport": "tcp",
    "router.local_prefill_tokens": 0,
    "model.max_model_len": 512,
}
NUM_CLIENTS = 2


@pytest.fixture
def cluster(tmp_path: Path) -> Iterator[ServeCluster]:
    model = tiny_checkpoint("llama", tmp_path / "model")
    with ServeCluster(str(model), {"ingress": 1, "prefill": 1, "decode": 1}, SETTINGS) as running:
        yield running


@dataclass
class Clients:
    """Clients that send one request after the other, each computed by both workers."""

    cluster: ServeCluster
    num_answered: int = 0
    failures: tuple[str, ...] = ()
    is_ending: bool = False

    def ask(self) -> dict[str, Any]:
        prompt = [3 + (7 * index + self.num_answered) % 200 for index in range(150)]
        body = {"model": self.cluster.model(), "prompt": prompt, "max_tokens": 24, "ignore_eos": True}
        headers = {"x-kvrelay-prefill": "remote"}
        return request_json("POST", f"{self.cluster.url}/v1/completions", body, headers=headers, timeout_s=120.0)

    def run(self) -> None:
        while not self.is_ending:
            try:
                assert self.ask()["usage"]["completion_tokens"] == 24
                self.num_answered += 1
            except (ClusterError, AssertionError) as error:
                self.failures += (repr(error),)

    def __enter__(self) -> "Clients":
        self.threads = [threading.Thread(target=self.run) for _ in range(NUM_CLIENTS)]
        for thread in self.threads:
            thread.start()
        return self

    def __exit__(self, *error: object) -> None:
        self.is_ending = True
        for thread in self.threads:
            thread.join()


def workers(cluster: ServeCluster) -> list[tuple[str, int]]:
    """Where they listen."""
    places = [one["address"].rpartition(":") for one in cluster.status()["workers"] if one["is_up"]]
    return [(host, int(port)) for host, _, port in places]


def is_accepted(place: tuple[str, int], tls: ClusterTls) -> bool:
    """Whether a worker takes this certificate, from one that knows the cluster's secret."""

    async def connect() -> None:
        connection = await plane.connect(*place, SECRET.encode(), timeout_s=30.0, tls=tls)
        await connection.aclose()

    try:
        asyncio.run(connect())
    except (AuthenticationFailed, ConnectionLost):
        return False
    return True


def start_rotate(cluster: ServeCluster) -> subprocess.Popen[str]:
    command = [sys.executable, "-u", "-m", "kvrelay.cluster.commands.cli", "rotate"]
    where = ("--url", cluster.url, "--address", cluster.dashboard_url)
    return subprocess.Popen([*command, *where], stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)


def test_no_request_fails_while_the_authority_is_rotated_and_the_old_one_is_refused_then(cluster: ServeCluster):
    now, day = datetime.now(UTC), timedelta(days=1)
    stolen = issue(SECRET.encode(), now - day, now + day)
    old = ClusterTls(lambda _: stolen)
    places = workers(cluster)
    assert len(places) == 2 and all(is_accepted(place, old) for place in places)  # before a rotation
    with Clients(cluster) as clients:
        with start_rotate(cluster) as rotating:
            assert rotating.stdout is not None
            assert "step 1 of 3" in rotating.stdout.readline()
            (registry,) = cluster.part("registry")
            os.kill(registry, signal.SIGKILL)
            lines = rotating.stdout.read().splitlines()
        assert rotating.returncode == 0, lines
        num_before = clients.num_answered
        while clients.num_answered < num_before + 4 and not clients.failures:
            time.sleep(0.1)
    assert clients.failures == () and num_before > 0
    assert [line[:11] for line in lines[:-1]] == ["step 2 of 3", "step 3 of 3"]
    assert lines[-1].startswith("rotated: 3 processes on 1 host show")
    assert cluster.part("registry") != [registry]
    assert workers(cluster) == places and not any(is_accepted(place, old) for place in places)

    scale = ("scale", "--decode", "2", "--url", cluster.url, "--address", cluster.dashboard_url)
    subprocess.run([sys.executable, "-m", "kvrelay.cluster.commands.cli", *scale], check=True, capture_output=True)
    while len(workers(cluster)) < 3:  # the new one, and every other process, trust each other
        time.sleep(0.5)
    assert all(clients.ask()["usage"]["completion_tokens"] == 24 for _ in range(4))
    assert not any(is_accepted(place, old) for place in workers(cluster))
