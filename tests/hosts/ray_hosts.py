"""Ray on several hosts, as its user brings it up: `ray up` of configs/ray-up-local.yaml, then kvrelay's own commands,
all of them from another machine.

Only what differs between machines is changed in the file: addresses, the ssh key, and how kvrelay gets there (a link to
this checkout's environment in place of pip).
"""

import contextlib
import json
import os
import pty
import re
import subprocess
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import yaml

from kvrelay.cluster.chaos.hosts.namespaces import HostError, Hosts, printed
from kvrelay.cluster.deployments.serve_config import APPLICATIONS, IMPORT_PATH
from kvrelay.cluster.launch.switch import without
from kvrelay.cluster.registry.names import APP_NAME

ROOT = Path(__file__).parents[2]
BIN = Path(sys.executable).parent
CONFIG = ROOT / "configs/ray-up-local.yaml"
DOCS = ROOT / "docs/deploy.md"
DASHBOARD_PORT, HTTP_PORT, WORKER_PORTS = 8265, 8000, (20000, 20099)
_PLACES = {"ingress": {"ray_actor_options": {"num_cpus": 0.1, "resources": {"node:__internal_head__": 0.01}}}}
_LOOPBACK = ("127.0.0.1", "[::1]", "[::ffff:127.0.0.1]")
_BOUNDS = ("min-worker-port", "max-worker-port")
_QUIET = {  # fewer processes and wake-ups: several hosts share this machine's cores
    "RAY_enable_worker_prestart": "0",
    "RAY_prestart_worker_first_driver": "0",
    "RAY_memory_monitor_refresh_ms": "0",
    "RAY_USAGE_STATS_ENABLED": "0",
    "REPORTER_UPDATE_INTERVAL_MS": "30000",
    "OMP_NUM_THREADS": "1",
    "RAY_SERVE_LOG_TO_STDERR": "0",
    "RAY_raylet_start_wait_time_s": "100",
    "RAY_gcs_rpc_server_reconnect_timeout_s": "20",  # without a head Ray ends after that time; its default is 60
    "RAY_agent_register_timeout_ms": "120000",  # on a busy machine Ray's agent takes longer than its 15 s to start
}


class RayHosts:
    """Ray on hosts 1 (head) to n. `laptop` is the user's machine: its home folder holds the token, and nothing else."""

    def __init__(self, hosts: Hosts, laptop: Path) -> None:
        self.hosts, self.laptop = hosts, laptop
        self.head = hosts.address(1)
        self.dashboard = f"http://{self.head}:{DASHBOARD_PORT}"
        self.url = f"http://{self.head}:{HTTP_PORT}"
        self._config = laptop / "cluster.yaml"
        self._commands: dict[str, Any] = {}
        home = laptop / "home"
        home.mkdir(parents=True)
        temp = laptop / "tmp"
        temp.mkdir()
        self.environment = {
            **{name: value for name, value in os.environ.items() if not name.startswith("RAY_")},
            "HOME": str(home),
            "RAY_TMPDIR": str(temp),
            "TMPDIR": str(temp),
            "PATH": f"{BIN}:{os.environ['PATH']}",
        }
        self.local("ray", "get-auth-token", "--generate")
        self.token = (home / ".ray/auth_token").read_text().strip()

    # ---- Ray

    def up(self, workers: Sequence[int]) -> None:
        """`ray up` with these hosts as workers. Returns when all of them have joined. Raises HostError."""
        config = yaml.safe_load(CONFIG.read_text())
        config["cluster_name"] = f"kvrelay-{self.hosts.prefix}"
        config["provider"] |= {"head_ip": self.head, "worker_ips": [self.hosts.address(one) for one in workers]}
        config["min_workers"] = config["max_workers"] = len(workers)
        config["auth"] = {"ssh_user": "root", "ssh_private_key": str(self.hosts.key)}
        config["rsync_exclude"] += ["/tests", "/bench", "/docs"]
        setup = config["setup_commands"]
        assert "venv" in setup[0], setup
        assert "pip install" in setup[1], setup
        config["setup_commands"] = [f"ln -sfn {BIN.parent} ~/kvrelay-venv", *setup[2:]]
        quiet = " ".join(f"{name}={value}" for name, value in _QUIET.items())
        for name in ("head_start_ray_commands", "worker_start_ray_commands"):
            config[name] = [command.replace("export ", f"export {quiet} ") for command in config[name]]
            small = "ray start --num-cpus=4 --object-store-memory=80000000 --include-log-monitor=false "
            config[name] = [command.replace("ray start ", small) for command in config[name]]
        self._commands = config
        self._config.write_text(yaml.safe_dump(config))
        self.local("ray", "up", "-y", str(self._config), timeout_s=240)
        self.await_nodes(1 + len(workers))

    def join(self, host: int) -> None:
        """Start Ray on a host by the file's own commands, as its owner does for one that `ray up` does not know."""
        self.hosts.run(host, "sh", "-c", f"umask 77; mkdir -p ~/.ray; echo {self.token} > ~/.ray/auth_token")
        for command in (*self._commands["setup_commands"], *self._commands["worker_start_ray_commands"]):
            self.on_host(host, f"export RAY_HEAD_IP={self.head}; {command}")

    def on_host(self, host: int, command: str) -> str:
        """What a command prints there in a login shell, as `ray up` runs them. Raises HostError."""
        return self.hosts.run(host, "bash", "--login", "-i", "-c", command)

    def down(self) -> None:
        """`ray down`."""
        self.local("ray", "down", "-y", str(self._config), timeout_s=120)

    def exec(self, command: str) -> str:
        """What the command prints on the head, by `ray exec`."""
        return self.local("ray", "exec", str(self._config), command)

    def attach(self, line: str) -> str:
        """What a terminal with `ray attach` shows when the line, then `exit`, is typed. Raises HostError."""
        near, far = pty.openpty()
        command = ["timeout", "--foreground", "60", "ray", "attach", str(self._config)]
        with subprocess.Popen(command, stdin=far, stdout=far, stderr=far, env=self.environment, cwd=ROOT) as running:
            os.close(far)
            os.write(near, f"{line}\nexit\n".encode())
            shown = b""
            with contextlib.suppress(OSError):  # the other end is closed
                while part := os.read(near, 4096):
                    shown += part
        os.close(near)
        text = shown.decode(errors="replace")
        if running.returncode:
            raise HostError(f"`ray attach`: status {running.returncode}\n{text}")
        return text

    def kvrelay(self, *words: str) -> str:
        """What a command of kvrelay prints on the laptop, given the head's address. Raises HostError when it fails."""
        return self.local("kvrelay", *words, "--address", self.head, timeout_s=180)

    def local(self, *command: str, timeout_s: float = 120.0) -> str:
        """What a command on the laptop prints. Raises HostError when it fails."""
        return printed(command, f"`{' '.join(command)}`", timeout_s=timeout_s, env=self.environment, cwd=ROOT)

    def num_nodes(self) -> int:
        """How many of Ray's nodes are alive."""
        with contextlib.suppress(OSError, ValueError):
            answer = self.request("/nodes?view=summary")
            return sum(node["raylet"].get("state") == "ALIVE" for node in answer["data"]["summary"])
        return 0

    def await_nodes(self, count: int, timeout_s: float = 180.0) -> None:
        """Wait until so many nodes are alive."""
        self.until(lambda: self.num_nodes() == count, timeout_s, f"{count} nodes are alive")

    @staticmethod
    def until(condition: Any, timeout_s: float, what: str) -> float:
        """Wait until the condition holds; returns the seconds. Raises HostError."""
        began_s = time.monotonic()
        while not condition():
            if time.monotonic() - began_s > timeout_s:
                raise HostError(f"not within {timeout_s:.0f} s: {what}")
            time.sleep(0.2)
        return time.monotonic() - began_s

    def listening(self, host: int) -> dict[int, str]:
        """The TCP ports that are open to other machines there, each with its processes."""
        sockets = [line.split(maxsplit=5) for line in self.hosts.run(host, "ss", "-ltnpH").splitlines()]
        places = [(place.rpartition(":"), *users) for _, _, _, place, _, *users in sockets]
        return {int(port): " ".join(users) for (at, _, port), *users in places if at not in _LOOPBACK}

    def pinned(self, kind: str) -> set[int]:
        """The ports that the cluster file gives to Ray on a host of the kind: head or worker."""
        command = self._commands[f"{kind}_start_ray_commands"][-1]
        return {int(port) for name, port in re.findall(r"--([a-z-]*port)=(\d+)", command) if name not in _BOUNDS}

    # ---- the dashboard and the API

    def request(self, path: str, *, token: str | None = None, put: Any = None) -> Any:
        """What Ray's dashboard answers, to a PUT if there is something to put; token "" sends none. Raises
        urllib.error.HTTPError.
        """
        headers = {"authorization": f"Bearer {self.token if token is None else token}"} if token != "" else {}
        request = urllib.request.Request(self.dashboard + path, headers=headers)
        if put is not None:
            request.data, request.method = json.dumps(put).encode(), "PUT"
            request.add_header("content-type", "application/json")
        with urllib.request.urlopen(request, timeout=60) as answer:
            text = answer.read()
        return json.loads(text) if text else None

    def remove(self, app_name: str) -> None:
        """Remove an application, and wait until Serve lists it no more."""
        self.request(APPLICATIONS, put=without(self.request(APPLICATIONS), app_name))
        self.until(lambda: app_name not in self.request(APPLICATIONS)["applications"], 60, f"{app_name} is gone")

    def deploy(
        self,
        args: dict[str, Any],
        *,
        app_name: str = APP_NAME,
        options: Mapping[str, dict[str, Any]] = _PLACES,
        **counts: int,
    ) -> str:
        """`kvrelay deploy` of the application; returns what it prints. Of a deployment without `options` of its own
        a host has one replica at most. Raises HostError.
        """
        deployments = [
            {"name": name, "num_replicas": count, **options.get(name, {"max_replicas_per_node": 1})}
            for name, count in counts.items()
        ]
        route = "/" if app_name == APP_NAME else f"/{app_name}"
        app = {"name": app_name, "route_prefix": route, "import_path": IMPORT_PATH}
        config = {
            "proxy_location": "HeadOnly",
            "http_options": {"host": "0.0.0.0", "port": HTTP_PORT},
            "applications": [{**app, "args": args, "deployments": deployments}],
        }
        file = self.laptop / "serve.yaml"
        file.write_text(yaml.safe_dump(config))
        return self.kvrelay("deploy", str(file))

    def status(self) -> dict[str, Any]:
        """What `kvrelay status` shows, without the start of a process."""
        return self._get("/kvrelay/status")

    def requests(self) -> list[dict[str, Any]]:
        """The ingress's log of requests, newest first."""
        return list(self._get("/kvrelay/requests")["requests"])

    def _get(self, path: str) -> dict[str, Any]:
        with urllib.request.urlopen(self.url + path, timeout=30) as answer:
            return dict(json.load(answer))

    def workers(self) -> dict[str, str]:
        """The address of each running worker's host."""
        found = self.status()["workers"]
        return {one["worker_id"]: one["address"].rpartition(":")[0] for one in found if one["is_up"]}

    def complete(self, body: dict[str, Any], timeout_s: float = 60.0) -> dict[str, Any]:
        """The answer of /v1/completions. Raises urllib.error.HTTPError with the API's error."""
        with self._post(body, timeout_s) as answer:
            return dict(json.load(answer))

    def stream(self, body: dict[str, Any], timeout_s: float = 60.0) -> Iterator[dict[str, Any]]:
        """The chunks of a streamed completion."""
        with self._post(body | {"stream": True}, timeout_s) as answer:
            for line in answer:
                if line.startswith(b"data: ") and not line.startswith(b"data: [DONE]"):
                    yield json.loads(line[6:])

    def _post(self, body: dict[str, Any], timeout_s: float) -> Any:
        headers = {"content-type": "application/json", "x-kvrelay-explain": "1"}
        request = urllib.request.Request(f"{self.url}/v1/completions", json.dumps(body).encode(), headers)
        return urllib.request.urlopen(request, timeout=timeout_s)


def refuses(call: Any) -> bool:
    """Whether the dashboard refuses the call for want of a token."""
    try:
        call()
    except urllib.error.HTTPError as error:
        with error:
            return error.code in (401, 403)
    return False


def firewall_table() -> list[range]:
    """The ports that the docs have opened between hosts."""
    _, _, table = DOCS.read_text().partition("\n### Ports\n")
    cells = re.findall(r"^\| ([\d–, ]+) \|", table.partition("\n## ")[0], re.MULTILINE)
    bounds = [one.split("–") for cell in cells for one in cell.split(", ")]
    return [range(int(one[0]), int(one[-1]) + 1) for one in bounds]
