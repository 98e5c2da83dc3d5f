"""Clusters that are started to be damaged: their processes by part, and which parts are not whole. Linux only.

The processes are found by a mark in the environment, which every one of them inherits.
"""

import os
import shutil
import signal
import subprocess
import tempfile
import time
import uuid
from collections import Counter
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, Self

from kvrelay.cluster.chaos import processes
from kvrelay.cluster.chaos.clock import CLOCK, open_clock
from kvrelay.cluster.chaos.served import START_S, start_serve
from kvrelay.cluster.errors import ClusterError
from kvrelay.cluster.launch.dashboard import RayDashboard
from kvrelay.cluster.launch.http_json import request_json
from kvrelay.cluster.launch.ray_session import LOOPBACK, free_port

MARK = "KVRELAY_CHAOS_MARK"
STATUS_S = 10.0
COUNTS = {"ingress": 2, "prefill": 2, "decode": 2}
SETTINGS = {"engine.kv_memory": "128MiB"}
PARTS = {  # -> the title of its processes
    "registry": "ray::RegistryActor",
    "controller": "ray::ServeController",
    **{name: f"ray::ServeReplica:kvrelay:{name}" for name in COUNTS},
}


class Cluster:
    """A running cluster; a context manager. `url`: where clients send everything. `log`: all that it has printed."""

    log = ""

    def __init__(self, model: str, counts: Mapping[str, int] = COUNTS, settings: Mapping[str, Any] = SETTINGS) -> None:
        self.source, self._counts, self._settings, self.mark = model, counts, settings, uuid.uuid4().hex
        self.folder = Path(tempfile.mkdtemp(prefix="kvs", dir="/tmp"))  # short: Ray's socket paths have a limit
        self.environment = {**os.environ, MARK: self.mark, "TMPDIR": str(self.folder), "COLUMNS": "200"}
        self.port, self.dashboard_url = free_port(LOOPBACK), ""
        self.clock = Path()  # the file of chaos/clock.py, as its processes see it
        self._spawned: list[subprocess.Popen[bytes]] = []
        self.url = f"http://{LOOPBACK}:{self.port}"

    def __enter__(self) -> Self:
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

    def use_clock(self, library: Path) -> None:
        """Preload this library: the file `clock` then steps the time that a process sees. Call it before `start`."""
        self.clock = library.with_name("clock")
        os.close(open_clock(self.clock))
        self.environment |= {"LD_PRELOAD": str(library), CLOCK: str(self.clock)}

    def restart_gcs(self) -> None:
        raise NotImplementedError

    def stop(self) -> list[str]:
        """End everything; returns what outlived the orderly end, such as processes, which are killed then."""
        for process in self._spawned:  # which end here; Redis writes its title over its environment and carries no mark
            process.kill()
            process.wait(10)
        left = sorted(self.pids())
        found = [f"process {pid}: {processes.short_name(pid)}" for pid in left]
        for pid in left:
            send_signal(pid, signal.SIGKILL)
        shutil.rmtree(self.folder, ignore_errors=True)
        return found

    def spawn(self, command: list[str], name: str) -> subprocess.Popen[bytes]:
        """Start a process that ends with the cluster, and log to a file of this name."""
        with (self.folder / f"{name}.log").open("w") as output:
            process = subprocess.Popen(
                command, stdout=output, stderr=subprocess.STDOUT, env=self.environment, start_new_session=True
            )
        self._spawned.append(process)
        return process

    def pids(self) -> set[int]:
        """All of its processes."""
        return processes.carrying(MARK, self.mark) - {os.getpid()}

    def processes(self, matches: Callable[[str], bool]) -> list[int]:
        """Its processes by what `ps` shows of them, oldest first."""
        return sorted(pid for pid in self.pids() if matches(" ".join(processes.command_line(pid))))

    def part(self, name: str) -> list[int]:
        """Processes of one of PARTS."""
        return self.processes(lambda line: PARTS[name] in line)

    def model(self) -> str:
        return str(request_json("GET", f"{self.url}/v1/models", timeout_s=STATUS_S)["data"][0]["id"])

    def status(self) -> dict[str, Any]:
        """What the ingress that answers knows. Raises ClusterError."""
        return request_json("GET", f"{self.url}/kvrelay/status", timeout_s=STATUS_S)

    def lacking(self) -> set[str]:
        """Which parts are not whole: a replica does not run, or the ingress that answers reaches too few workers."""
        try:
            app = RayDashboard(self.dashboard_url).application()
            workers = Counter(one["role"] for one in self.status()["workers"] if one["is_up"])
        except (ClusterError, KeyError):
            return set(PARTS)
        states = {
            name: [one["state"] for one in of.get("replicas", [])] for name, of in app.get("deployments", {}).items()
        }
        found = {name for name, count in self._counts.items() if states.get(name) != ["RUNNING"] * count}
        return found | {role for role in ("decode", "prefill") if workers[role] != self._counts[role]}

    def is_whole(self) -> bool:
        """Whether every replica runs, and the ingress that answers is connected to every worker."""
        return not self.lacking()

    def wait_until_whole(self) -> None:
        """Raises ClusterError."""
        deadline_s = time.monotonic() + START_S
        while not self.is_whole():
            if time.monotonic() > deadline_s:
                raise ClusterError(f"the cluster did not start; see {self.folder}")
            time.sleep(0.5)


def send_signal(pid: int, number: int) -> None:
    """Nothing where it has gone."""
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

    def stop(self) -> list[str]:
        """Also returns files that it has left."""
        files = list[str]()
        if hasattr(self, "_serve") and self.folder.exists():
            self._serve.stop()
            self.log = self._serve.log.read_text(errors="replace")
            files = [f"file {path.name}" for path in self.folder.iterdir() if path.suffix != ".log"]
        return files + super().stop()
