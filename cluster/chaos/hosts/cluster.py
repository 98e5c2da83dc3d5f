"""A cluster on several hosts in namespaces, as `ray start` and `kvrelay deploy` make it."""

import json
import os
import sys
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from kvrelay.cluster.chaos import processes
from kvrelay.cluster.chaos.clock import CLOCK, open_clock
from kvrelay.cluster.chaos.cluster import COUNTS, MARK, SETTINGS, Cluster
from kvrelay.cluster.chaos.hosts.namespaces import HostError, Hosts, why_not
from kvrelay.cluster.chaos.served import START_S, STOP_S
from kvrelay.cluster.deployments.serve_config import serve_config
from kvrelay.cluster.errors import ClusterError
from kvrelay.cluster.launch.dashboard import RayDashboard, keep_ray_token_private
from kvrelay.cluster.launch.ray_environment import SHARED_ADDRESS
from kvrelay.config import settings_from

HEAD = 1
NETWORK = "10.78"  # with the process's number: several clusters may exist side by side
CPUS = 8  # of each host, as far as Ray knows
PASSED = {MARK, CLOCK, "LD_PRELOAD", "PYTHONPATH"}
RAY = [sys.executable, "-m", "ray.scripts.scripts"]
ENVIRONMENT = {  # of Ray on hosts that share this machine's cores
    "RAY_AUTH_MODE": "token",
    "RAY_worker_niceness": "0",
    "RAY_enable_worker_prestart": "0",
    "REPORTER_UPDATE_INTERVAL_MS": "30000",
    "RAY_raylet_start_wait_time_s": "100",
    "RAY_agent_register_timeout_ms": "120000",
    **SHARED_ADDRESS,
}


class ClusterOnHosts(Cluster):
    """`count` hosts. On the first are Ray's head, HAProxy, which clients use, and the ingresses; a host has at most one
    worker of each role. Its disks are one folder, which survives crashes.
    """

    def __init__(
        self, count: int, model: str, counts: Mapping[str, int] = COUNTS, settings: Mapping[str, Any] = SETTINGS
    ) -> None:
        """Raises ClusterError: hosts cannot be made here, or are too few for the workers."""
        if why := why_not():
            raise ClusterError(f"--hosts: {why}")
        if count < max(counts["prefill"], counts["decode"]):
            raise ClusterError(f"--hosts: at least {max(counts['prefill'], counts['decode'])}, one for each worker")
        super().__init__(model, counts, settings)
        self.hosts, self.port = Hosts(count, f"{NETWORK}.{os.getpid() % 256}"), 8000
        self._numbers, self._has_begun = range(1, count + 1), False
        self.url = f"http://{self.hosts.address(HEAD)}:{self.port}"
        self.dashboard_url = f"http://{self.hosts.address(HEAD)}:8265"

    def use_clock(self, library: Path) -> None:
        super().use_clock(library)
        self.clock = Path("/tmp/clock")  # of each host's own: processes of two hosts may have one pid
        self.environment[CLOCK] = str(self.clock)

    def start(self) -> None:
        keep_ray_token_private()
        self._has_begun = True
        self.hosts.up()
        for host in self._numbers:
            os.close(open_clock(self.hosts.folder / f"h{host}/tmp/clock"))
        passed = {name: value for name, value in self.environment.items() if name in PASSED}
        self.hosts.environment = {**passed, **ENVIRONMENT}
        for host in self._numbers:
            self.start_ray(host)
        RayDashboard(self.dashboard_url).deploy(self._config())
        self.wait_until_whole()

    def start_ray(self, host: int) -> None:
        """Raises HostError."""
        as_what = ["--head", "--port=6379", "--dashboard-host=0.0.0.0"]
        as_what = as_what if host == HEAD else [f"--address={self.hosts.address(HEAD)}:6379"]
        own = ["--object-store-memory=80000000", f"--node-ip-address={self.hosts.address(host)}", f"--num-cpus={CPUS}"]
        self.hosts.run(host, *RAY, "start", *as_what, *own, "--disable-usage-stats", timeout_s=START_S)

    def keep_up(self, host: int) -> bool:
        """Start Ray where it does not run, as a service manager does: it ends when the head has given its host up.
        False: it did not start, and the next call tries again.
        """
        try:
            if "/raylet/raylet " not in self.hosts.run(host, "ps", "-eo", "args"):
                self.start_ray(host)
        except HostError:
            return False
        return True

    def _config(self) -> dict[str, Any]:
        """Of the application. Raises ConfigError."""
        nested: dict[str, Any] = {"model": {"source": self.source, "dtype": "float32"}, "cluster": dict(self._counts)}
        for key, value in self._settings.items():
            section, _, name = key.partition(".")
            nested.setdefault(section, {})[name] = value
        config = serve_config(settings_from(nested), http_port=self.port)
        config["http_options"]["host"] = "0.0.0.0"
        for deployment in config["applications"][0]["deployments"]:
            if deployment["name"] == "ingress":
                deployment["ray_actor_options"] = {"num_cpus": 0.1, "resources": {"node:__internal_head__": 0.01}}
            else:
                deployment["max_replicas_per_node"] = 1
        return dict(json.loads(json.dumps(config, default=str)))

    def stop(self) -> list[str]:
        """Also returns processes and shared memory of each host."""
        found = list[str]()
        if self._has_begun and self.hosts.folder.exists():
            try:
                found = self._end()
                logs = sorted(self.hosts.folder.glob("h*/tmp/ray/session_2*/logs/serve/*.log"))
                self.log = "".join(f"== {path}\n{path.read_text(errors='replace')}" for path in logs)
            except ClusterError as error:
                found = [f"no orderly end: {error}"]
            finally:
                self.hosts.close()
        return found + super().stop()

    def _end(self) -> list[str]:
        RayDashboard(self.dashboard_url).deploy({"applications": []})
        until_s = time.monotonic() + STOP_S
        while replicas := self.processes(lambda line: "ray::ServeReplica:kvrelay" in line):
            if time.monotonic() > until_s:
                break
            time.sleep(0.5)
        found = [f"process {pid}: {processes.short_name(pid)}" for pid in replicas]
        for host in reversed(self._numbers):
            self.hosts.run(host, *RAY, "stop", "--grace-period=20", timeout_s=STOP_S)
            files = self.hosts.run(host, "ls", "/dev/shm").split()
            found += [f"host {host}: shared memory {name}" for name in files]
        return found
