"""What clients see while a running cluster changes: a table with a row for each change.

    python -m bench.serving.rolling [--only setting code model node spot] [--clients 4] [--model NAME] [--json FILE]

`setting`: one ingress, one prefill and one decode worker on a Ray of the user's get another token budget by
`kvrelay deploy`. `code`: they get another version of kvrelay, from an archive that the file names. `model`: another
application with another model takes over its route. `node`: of a head and two hosts in network namespaces, behind
configs/haproxy.cfg, the one with the registry is drained by `ray drain-node`, and may take 120 s. `spot`: the same, but
30 s, less than the replicas' own time to stop.

Clients send greedy requests one after the other, half of them streamed, and compare every answer with the one that the
cluster gave at first. Each row: requests, failed and wrong ones while it changed; the 99th percentile of the time to
the first token and between two reads of a stream, before and meanwhile; seconds until the change was complete.
"""

import argparse
import asyncio
import json
import math
import shutil
import subprocess
import sys
import time
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import aiohttp
import yaml

from bench.serving.survive import Load, Outcome
from bench.serving.survive_clusters import HostsCluster, RayCluster
from kvrelay import __version__
from kvrelay.cluster.chaos.cluster import COUNTS, Cluster
from kvrelay.cluster.deployments.serve_config import IMPORT_PATH
from kvrelay.cluster.launch.dashboard import RayDashboard
from kvrelay.cluster.launch.http_json import request_json
from kvrelay.cluster.launch.ray_session import LOOPBACK
from kvrelay.engine.checkpoints.tiny import tiny_checkpoint

BEFORE_S = 10.0
AFTER_S = 5.0
CHANGE_S = 240.0
ROOT = Path(__file__).resolve().parents[3]
CODE = ("kvrelay", "kernels", "kvcache", "engine", "kvtransfer", "prefill", "decode", "router", "serve", "cluster")


class ChangingRay(RayCluster):
    """One worker of each role; deployed by `kvrelay deploy`."""

    app_name, served_name, token_budget = "kvrelay", ["old"], 512

    def __init__(self, model: str) -> None:
        super().__init__(model, dict.fromkeys(COUNTS, 1))
        self.runtime_env = dict[str, Any]()

    def deploy(self, host: str, proxies: str) -> None:
        args = {
            "model": {"source": self.source, "dtype": "float32", "served_name": self.served_name},
            "engine": {"kv_memory": "128MiB", "token_budget": self.token_budget},
            "cluster": dict(self._counts),
        }
        app = {"name": self.app_name, "route_prefix": "/", "import_path": IMPORT_PATH, "args": args}
        app["runtime_env"] = self.runtime_env
        http = {"host": host, "port": self.port}
        file = self.folder / "serve.yaml"
        file.write_text(yaml.safe_dump({"proxy_location": proxies, "http_options": http, "applications": [app]}))
        command = [sys.executable, "-m", "kvrelay.cluster.commands.cli", "deploy", str(file)]
        command += ["--address", self.dashboard_url]
        done = subprocess.run(command, env=self.environment, capture_output=True, text=True, timeout=CHANGE_S)
        if done.returncode:
            raise SystemExit(done.stdout + done.stderr)

    def replicas(self) -> list[dict[str, Any]]:
        """All of the application's, in Serve's details."""
        app = RayDashboard(self.dashboard_url).application(self.app_name)
        return [one for of in app["deployments"].values() for one in of["replicas"]]

    def change(self) -> None:
        self.token_budget //= 2
        self.deploy(LOOPBACK, "HeadOnly")


class ChangingCode(ChangingRay):
    """Its next version comes as an archive of a checkout, as from a release's page."""

    VERSION = "9.9.9"

    def change(self) -> None:
        checkout = self.folder / "code" / "kvrelay"
        for name in CODE:
            shutil.copytree(ROOT / name, checkout / name, ignore=shutil.ignore_patterns("__pycache__"))
        shutil.copy(ROOT / "pyproject.toml", checkout)
        package = checkout / "kvrelay" / "__init__.py"
        package.write_text(package.read_text().replace(f'"{__version__}"', f'"{self.VERSION}"'))
        archive = shutil.make_archive(str(self.folder / "code"), "zip", self.folder / "code")
        self.runtime_env = {"working_dir": f"file://{archive}"}
        self.deploy(LOOPBACK, "HeadOnly")

    def version(self) -> str:
        return str(request_json("GET", f"{self.url}/kvrelay/status", timeout_s=10.0)["version"])


class ChangingModel(ChangingRay):
    """The next model's application has another name, and takes requests that name the old model, too."""

    next_source = ""

    def change(self) -> None:
        if not self.next_source:
            self.next_source = str(tiny_checkpoint("qwen3", self.folder / "next", seed=7))
        self.app_name, self.served_name, self.source = "next", ["new", "old"], self.next_source
        self.deploy(LOOPBACK, "HeadOnly")


class DrainedHosts(HostsCluster):
    """A head without replicas, and two hosts, of which one goes."""

    DEADLINE_S = 120

    def ingress_hosts(self) -> set[str]:
        """The addresses of the hosts that ingresses run on."""
        replicas = RayDashboard(self.dashboard_url).application()["deployments"]["ingress"]["replicas"]
        return {one["node_ip"] for one in replicas}

    def change(self) -> None:
        """What a node's own watcher does on a notice, and then the cloud: it kills what is still there."""
        dashboard, head = RayDashboard(self.dashboard_url), self._hosts.address(self.HEAD)
        nodes = {node["node_id"]: node["node_ip"] for node in dashboard.nodes()}
        busy = [one["node_id"] for one in dashboard.actors() if one["name"] == "kvrelay-registry"]
        node_id = next(one for one in [*busy, *nodes] if nodes[one] != head)
        host = next(one for one in self.REPLICAS if self._hosts.address(one) == nodes[node_id])

        def wait_until_gone(timeout_s: float) -> None:
            until_s = time.monotonic() + timeout_s
            while any(node["node_id"] == node_id for node in dashboard.nodes()) and time.monotonic() < until_s:
                time.sleep(0.5)

        ray = [sys.executable, "-m", "ray.scripts.scripts", "drain-node", f"--address={head}:6379"]
        why = ["--reason=DRAIN_NODE_REASON_PREEMPTION", "--reason-message=bench"]
        self._hosts.run(host, *ray, *why, f"--deadline-remaining-seconds={self.DEADLINE_S}")
        wait_until_gone(self.DEADLINE_S)
        self._hosts.crash(host)
        wait_until_gone(CHANGE_S)


class SpotHosts(DrainedHosts):
    """One goes after a notice as short as a spot machine's."""

    DEADLINE_S = 30


@dataclass(frozen=True, slots=True)
class Row:
    """A change, and what came of it. Times in seconds."""

    change: str
    requests: int
    failed: int
    wrong: int
    ttft_before_s: float
    ttft_s: float
    itl_before_s: float
    itl_s: float
    change_s: float
    ingresses: int  # that answered before
    first_failure: str


def p99(values: list[float]) -> float:
    """NaN without any."""
    return sorted(values)[math.ceil(0.99 * len(values)) - 1] if values else math.nan


async def measure(name: str, cluster: ChangingRay | DrainedHosts, num_clients: int) -> Row:
    connector = aiohttp.TCPConnector(force_close=True, limit=0)
    async with aiohttp.ClientSession(connector=connector, timeout=aiohttp.ClientTimeout(total=90)) as session:
        load = Load(cluster.url, await asyncio.to_thread(cluster.model), num_clients)
        await load.start(session)
        try:
            before: Outcome = load.begin()
            await asyncio.sleep(BEFORE_S)
            ingresses = len(load.ingresses)
            during, begun_s = load.begin(), time.monotonic()
            await asyncio.to_thread(cluster.change)
            change_s = time.monotonic() - begun_s
            await asyncio.sleep(AFTER_S)
            await load.judge(session)
        finally:
            await load.aclose()
    times = (p99(before.ttft_s), p99(during.ttft_s), p99(before.itl_s), p99(during.itl_s), change_s)
    return Row(name, during.requests, during.failed, during.wrong, *times, ingresses, during.first_failure)


def table(rows: list[Row]) -> str:
    lines = [
        "| change | requests | failed | wrong | TTFT p99 ms, before / meanwhile | ITL p99 ms, before / meanwhile | s |",
        "|---|---|---|---|---|---|---|",
    ]
    for row in rows:
        ttft, itl = (
            f"{1e3 * before:.0f} / {1e3 * during:.0f}"
            for before, during in ((row.ttft_before_s, row.ttft_s), (row.itl_before_s, row.itl_s))
        )
        lines.append(
            f"| {row.change} | {row.requests} | {row.failed} | {row.wrong} | {ttft} | {itl} | {row.change_s:.0f} |"
        )
    return "\n".join(lines)


CHANGES: dict[str, type[ChangingRay] | type[DrainedHosts]] = {
    "setting": ChangingRay,
    "code": ChangingCode,
    "model": ChangingModel,
    "node": DrainedHosts,
    "spot": SpotHosts,
}


def run(names: list[str], model: str, num_clients: int) -> list[Row]:
    """A row for each change, each on a cluster of its own."""
    rows = []
    for name in names:
        cluster: Cluster
        with CHANGES[name](model) as cluster:
            rows.append(asyncio.run(measure(name, cluster, num_clients)))
        print(table(rows[-1:]).splitlines()[-1], rows[-1].first_failure, flush=True)
    return rows


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", nargs="*", choices=list(CHANGES), default=list(CHANGES))
    parser.add_argument("--clients", type=int, default=4)
    parser.add_argument("--model", default="smollm2-135m-instruct")
    parser.add_argument("--json", type=Path)
    given = parser.parse_args()
    rows = run(given.only, given.model, given.clients)
    print(f"\n{table(rows)}")
    if given.json:
        given.json.write_text(json.dumps([asdict(row) for row in rows], indent=1))


if __name__ == "__main__":
    main()
