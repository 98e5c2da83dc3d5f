"""How long a worker's change of role takes and what clients see of it, beside the same change by processes.

    python -m bench.serving.roles [--rounds 3] [--clients 4] [--many 48] [--long 4096] [--model NAME] [--json FILE]

`kvrelay serve` with one prefill and two decode workers. A decode worker becomes a prefill worker and returns: without
load; with clients, so that its sequences move to the other decode worker; with clients and a drain time of 0, so that
they are computed again there; and by `kvrelay scale`, which starts a prefill worker and stops a decode worker. The
prefill worker becomes a decode worker while it computes a prompt of `--long` tokens, and returns. These take turns;
moves with `--many` clients come last. Clients send greedy requests one after the other, half of them streamed, and
compare every answer with the first one. Medians over the changes and their range: seconds until the new role serves,
sequences that were there, the longest time between two reads of a stream. Exits with 1 when one failed or was wrong.
"""

import argparse
import asyncio
import json
import random
import statistics
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import aiohttp

from bench.figures import show
from bench.serving.survive import Load
from kvrelay.cluster.chaos.cluster import ServeCluster
from kvrelay.cluster.launch.http_json import request_json

COUNTS = {"ingress": 1, "prefill": 1, "decode": 2}
AWAY = {"prefill": 2, "decode": 1}
MOVES, MANY, LONG, DRAIN_0 = "sequences move", "many sequences move", "long prompt", "drain 0"
PROCESSES, IDLE = "processes", "idle"
BUSY_S, SETTLED_S, WINDOW_S, LIMIT_S, BEGUN_S = 3.0, 4.0, 20.0, 240.0, 1.0


class RolesCluster(ServeCluster):
    """`kvrelay serve`, whose workers change."""

    def workers(self) -> dict[str, str]:
        """The role of each worker that serves now."""
        workers = request_json("GET", f"{self.url}/kvrelay/status", timeout_s=10.0)["workers"]
        return {worker["worker_id"]: worker["info"]["role"] for worker in workers if worker["is_up"]}

    def switch(self, way: str, role: str) -> dict[str, Any]:
        """A worker changes its role; the facts that it reports."""
        started_as = "prefill" if way == LONG else "decode"
        name = min(name for name, now in self.workers().items() if name.startswith(started_as) and now != role)
        body = {"worker": name, "role": role, "drain_s": 0.0 if way == DRAIN_0 else None}
        return request_json("POST", f"{self.url}/kvrelay/role", body, timeout_s=LIMIT_S)

    async def scale(self, counts: dict[str, int]) -> dict[str, Any]:
        """The same by processes."""
        command = [sys.executable, "-m", "kvrelay.cluster.commands.cli", "scale"]
        command += [part for name in AWAY for part in (f"--{name}", str(counts[name]))]
        where = ["--url", self.url, "--address", self.dashboard_url]
        process = await asyncio.create_subprocess_exec(*command, *where, env=self.environment)
        if await process.wait():
            raise SystemExit("kvrelay scale failed")
        deadline_s = time.monotonic() + LIMIT_S
        while sorted(self.workers().values()) != sorted(name for name in AWAY for _ in range(counts[name])):
            if time.monotonic() > deadline_s:
                raise SystemExit(f"not at {counts}: {self.workers()}")
            await asyncio.sleep(0.1)
        return {}


async def change(cluster: RolesCluster, way: str, role: str, load: Load | None) -> dict[str, Any]:
    """One change; what it took, and what clients saw from its beginning for WINDOW_S, or SETTLED_S longer than it."""
    outcome = load.begin() if load is not None else None
    began_s = time.monotonic()
    if way == PROCESSES:
        facts = await cluster.scale(AWAY if role == "prefill" else COUNTS)
    else:
        facts = await asyncio.to_thread(cluster.switch, way, role)
    row = {"change": way, "to": role, "seconds": time.monotonic() - began_s, "sequences": facts.get("sequences")}
    row["computed again"] = facts.get("failed")
    if outcome is not None:
        await asyncio.sleep(max(SETTLED_S, WINDOW_S - row["seconds"]))
        row |= {"requests": outcome.requests, "failed": outcome.failed, "wrong": outcome.wrong}
        row["longest gap s"] = max(outcome.itl_s, default=0.0)
        row["first failure"] = outcome.first_failure
    return row


async def send_long(url: str, model: str, session: aiohttp.ClientSession, num_tokens: int) -> None:
    """A prompt that no worker has seen, too long to be computed beside decode steps. Raises when it fails."""
    body = {"model": model, "prompt": random.choices(range(100, 40_000), k=num_tokens), "max_tokens": 4}
    async with session.post(url, json=body, raise_for_status=True) as answer:
        await answer.read()


async def run(cluster: RolesCluster, args: argparse.Namespace) -> list[dict[str, Any]]:
    rows = [await change(cluster, IDLE, role, None) for _ in range(args.rounds) for role in ("prefill", "decode")]
    model = cluster.model()
    for num_clients, ways in ((args.clients, (MOVES, LONG, DRAIN_0, PROCESSES)), (args.many, (MANY,))):
        async with aiohttp.ClientSession(connector=aiohttp.TCPConnector(force_close=True)) as session:
            load = Load(cluster.url, model, num_clients)
            await load.start(session)
            for number in range(args.rounds):
                for way in ways:
                    for role in ("decode", "prefill") if way == LONG else ("prefill", "decode"):
                        await asyncio.sleep(BUSY_S)
                        async with asyncio.TaskGroup() as tasks:
                            if (way, role) == (LONG, "decode"):
                                tasks.create_task(send_long(f"{cluster.url}/v1/completions", model, session, args.long))
                                await asyncio.sleep(BEGUN_S)
                            rows.append(await change(cluster, way, role, load) | {"round": number})
                        print(json.dumps(rows[-1]), file=sys.stderr, flush=True)
            await load.aclose()
    return rows


def summary(rows: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """One line for each way and direction."""
    found = []
    for way, role in dict.fromkeys((row["change"], row["to"]) for row in rows):
        some = [row for row in rows if (row["change"], row["to"]) == (way, role)]
        line = {"change": way, "to": role, "times": len(some)}
        for name in ("seconds", "sequences", "computed again", "longest gap s"):
            line[name] = _spread([row[name] for row in some if row.get(name) is not None])
        found.append(line | {name: sum(row.get(name, 0) for row in some) for name in ("requests", "failed", "wrong")})
    return found


def _spread(values: Sequence[float]) -> str:
    """Median and range."""
    return f"{statistics.median(values):.3g} ({min(values):.3g}-{max(values):.3g})" if values else "-"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="smollm2-135m-instruct")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--clients", type=int, default=4)
    parser.add_argument("--many", type=int, default=48, help="clients, for 16 and more sequences on a worker")
    parser.add_argument("--long", type=int, default=4096, help="tokens of the long prompt")
    parser.add_argument("--json", type=Path)
    args = parser.parse_args()
    cluster = RolesCluster(args.model, COUNTS, {"engine.kv_memory": "512MiB"})
    with cluster:
        rows = asyncio.run(run(cluster, args))
    show("a worker changes its role", summary(rows), args.json)
    if any(row.get("failed") or row.get("wrong") for row in rows):
        raise SystemExit(f"requests failed: {next((row['first failure'] for row in rows if row.get('failed')), '')}")


if __name__ == "__main__":
    main()
