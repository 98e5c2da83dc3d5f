"""Autoscaling live: a prefill-heavy load, a pause, a decode-heavy load and a pause, on a cluster of our own.

    python -m bench.planner.live [--model smollm2-135m-instruct] [--most 2] [--hold-s 20] [--load-s 60]

Starts `kvrelay serve` with planner.mode=auto. Without --model a tiny checkpoint with random weights is served, and the
planner goes by a profile of a worker far slower than it (`SLOW`), so that two cores carry every load and the counts
depend on the load alone. With --model it goes by what the workers report. Prints each role's lowest and highest target
and running workers in each phase, when a second worker of the role was wanted and served, the requests and the failed
ones, and how often each count changed its direction, with the bound of docs/scaling.md. Exits with 1 when a request
failed, the wrong role grew, or a bound was exceeded.
"""

import argparse
import asyncio
import contextlib
import json
import math
import os
import re
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import AsyncIterator, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from bench.figures import show
from kvrelay.cluster.errors import ClusterError
from kvrelay.cluster.launch.dashboard import RayDashboard
from kvrelay.cluster.launch.ray_session import free_port
from kvrelay.cluster.loadgen.client import LoadRequest, LoadResult, LoadTarget, run_load
from kvrelay.cluster.loadgen.prompts import PromptSpec, synthetic_prompt
from kvrelay.cluster.loadgen.stats import OK
from kvrelay.engine.checkpoints.tiny import tiny_checkpoint

ROLES = ("prefill", "decode")
START_S, STOP_S, POLL_S = 240.0, 60.0, 0.5
_CURVE = {"overhead_s": 0.0, "weights_s": 0.01, "token_s": 0.002, "pair_s": 0.0, "context_s": 0.0}
SLOW = {
    "name": "slow", "prefill": _CURVE, "decode": {**_CURVE, "sequence_s": 0.008}, "block_size": 16, "num_blocks": 1024,
    "token_budget": 512, "max_running": 8, "max_model_len": 2048, "kv_bytes_per_token": 1024,
    "link_bytes_per_s": 1e9, "local_bytes_per_s": 1e9,
}  # fmt: skip


@dataclass(frozen=True, slots=True)
class Phase:
    """Requests per second of so many prompt and output tokens, for `seconds`. `grows`: the role that is to grow."""

    name: str
    seconds: float
    rate: float = 0.0
    input_tokens: int = 0
    output_tokens: int = 0
    grows: str | None = None

    def requests(self, first: int, vocab: tuple[int, int]) -> Iterator[LoadRequest]:
        """Evenly spaced; `first` is the first one's index, from which its prompt follows."""
        spec = PromptSpec(self.input_tokens, low=vocab[0], high=vocab[1])
        for index in range(math.floor(self.rate * self.seconds)):
            prompt = synthetic_prompt(spec, first + index)
            yield LoadRequest(first + index, prompt, self.output_tokens, index / self.rate)


def phases(load_s: float, pause_s: float) -> tuple[Phase, ...]:
    return (
        Phase("prefill-heavy", load_s, 6.0, 600, 2, "prefill"),
        Phase("pause", pause_s),
        Phase("decode-heavy", load_s, 4.0, 16, 150, "decode"),
        Phase("second pause", pause_s),
    )


@dataclass(frozen=True, slots=True)
class Sample:
    """Serve's target and the running replicas of each role, in the order of ROLES. at_s: since the first phase."""

    at_s: float
    target: tuple[int, ...]
    running: tuple[int, ...]


@dataclass(slots=True)
class Run:
    """What was seen. begins: (time, phase)."""

    samples: list[Sample] = field(default_factory=list)
    begins: list[tuple[float, Phase]] = field(default_factory=list)
    load: LoadResult = field(default_factory=LoadResult)

    def of_phase(self, index: int) -> list[Sample]:
        start_s = self.begins[index][0]
        end_s = self.begins[index + 1][0] if index + 1 < len(self.begins) else math.inf
        return [sample for sample in self.samples if start_s <= sample.at_s < end_s]

    @property
    def failed(self) -> int:
        """An answer of a random model may be no text (`empty answer`); all others must be whole."""
        return sum(record.outcome not in (OK, "empty answer") for record in self.load.records)

    def turns(self, role: str) -> int:
        """How often the target of a role changed its direction."""
        return turns([sample.target[ROLES.index(role)] for sample in self.samples])

    def problems(self, hold_s: float) -> list[str]:
        """What does not hold; empty: all of it does."""
        found = [f"{self.failed} requests failed: {self.load.first_failure}"] if self.failed else []
        for role in ROLES:
            if self.turns(role) > (most := most_turns(self.samples[-1].at_s, hold_s)):
                found.append(f"{role} changed its direction {self.turns(role)} times, bound {most}")
            if self.samples[-1].target[ROLES.index(role)] != 1:
                found.append(f"{role} did not return to one worker")
        for index, (_, phase) in enumerate(self.begins):
            for number, role in enumerate(ROLES if phase.grows else ()):
                most = max(sample.running[number] for sample in self.of_phase(index))
                if (most > 1) != (role == phase.grows):
                    found.append(f"{phase.name}: up to {most} {role} workers served")
        return found


def turns(counts: Iterable[int]) -> int:
    """Changes of direction in a series of counts."""
    found, last, direction = 0, None, 0
    for count in counts:
        if last is not None and count != last:
            now = 1 if count > last else -1
            found += direction not in (0, now)
            direction = now
        last = count
    return found


def most_turns(seconds: float, hold_s: float) -> int:
    """The bound of docs/scaling.md."""
    return 2 * math.floor(seconds / hold_s) + 3


# ---- the cluster


@dataclass(frozen=True, slots=True)
class Cluster:
    """A running `kvrelay serve`."""

    process: subprocess.Popen[str]
    url: str
    dashboard: str
    log: Path


@contextlib.contextmanager
def cluster(folder: Path, flags: Sequence[str], *, limit_s: float = START_S) -> Iterator[Cluster]:
    """`kvrelay serve` with these flags, ended with Ctrl-C. Raises RuntimeError with its last lines."""
    log, port, dashboard = folder / "serve.log", free_port("127.0.0.1"), free_port("127.0.0.1")
    ports = ("--port", str(port), "--dashboard-port", str(dashboard))
    command = [sys.executable, "-u", "-m", "kvrelay.cluster.commands.cli", "serve", *ports, *flags]
    with log.open("w") as output:
        process = subprocess.Popen(
            command,
            stdout=output,
            stderr=subprocess.STDOUT,
            text=True,
            start_new_session=True,
            env={**os.environ, "COLUMNS": "200"},
            preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_DFL),  # shells ignore it for background jobs
        )
    try:
        deadline_s = time.monotonic() + limit_s
        while "Ctrl-C stops everything" not in (text := log.read_text(errors="replace")):
            if process.poll() is not None or time.monotonic() > deadline_s:
                raise RuntimeError(f"kvrelay serve did not start:\n{text[-3000:]}")
            time.sleep(POLL_S)
        found = re.search(r"dashboard +(http://\S+)", text)
        assert found is not None, text
        yield Cluster(process, f"http://127.0.0.1:{port}", found[1], log)
    finally:
        with contextlib.suppress(ProcessLookupError):
            process.send_signal(signal.SIGINT)
            with contextlib.suppress(subprocess.TimeoutExpired):
                process.wait(STOP_S)
            os.killpg(process.pid, signal.SIGKILL)
        process.wait()


def planner_flags(hold_s: float, most: int, profile: Path | None) -> list[str]:
    bounds = {"max_prefill": most, "max_decode": most, "scale_down_delay_s": hold_s}
    values = {"mode": "auto", **bounds, **({"profile": str(profile)} if profile else {})}
    return [part for name, value in values.items() for part in ("--set", f"planner.{name}={value}")]


def counts(dashboard: str) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """(targets, running replicas) of Serve, in the order of ROLES. Raises ClusterError."""
    deployments = RayDashboard(dashboard).application()["deployments"]
    states = {name: [replica["state"] for replica in deployments[name]["replicas"]] for name in ROLES}
    targets = tuple(int(deployments[name]["target_num_replicas"]) for name in ROLES)
    return targets, tuple(states[name].count("RUNNING") for name in ROLES)


# ---- the load


async def _watch(dashboard: str, run: Run, start_s: float) -> None:
    while True:
        with contextlib.suppress(ClusterError):  # the dashboard is busy: this sample is left out
            target, running = await asyncio.to_thread(counts, dashboard)
            run.samples.append(Sample(time.monotonic() - start_s, target, running))
        await asyncio.sleep(POLL_S)


@contextlib.asynccontextmanager
async def _watched(dashboard: str, run: Run) -> AsyncIterator[float]:
    start_s = time.monotonic()
    watching = asyncio.create_task(_watch(dashboard, run, start_s))
    try:
        yield start_s
    finally:
        watching.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await watching


async def drive(target: LoadTarget, dashboard: str, plan: Sequence[Phase], vocab: tuple[int, int]) -> Run:
    """Run the phases, one after the other. A phase with a load ends early once the role's second worker serves and
    half of its time has passed; a pause once both targets are 1.
    """
    run, first = Run(), 0
    async with _watched(dashboard, run) as start_s:
        for phase in plan:
            run.begins.append((time.monotonic() - start_s, phase))
            if phase.rate:
                await run_load(target, phase.requests(first, vocab), result=run.load)
                first += 1 << 20
            else:
                await _until_small(run, phase.seconds)
    return run


async def _until_small(run: Run, seconds: float) -> None:
    end_s = time.monotonic() + seconds
    while time.monotonic() < end_s:
        await asyncio.sleep(POLL_S)
        if run.samples and max(run.samples[-1].target) == 1 and max(run.samples[-1].running) == 1:
            return


def rows(run: Run) -> list[dict[str, Any]]:
    found = []
    for index, (start_s, phase) in enumerate(run.begins):
        seen = run.of_phase(index)
        row: dict[str, Any] = {"phase": phase.name, "from s": round(start_s)}
        for number, role in enumerate(ROLES):
            wanted = [sample.target[number] for sample in seen]
            served = [sample.running[number] for sample in seen]
            row[f"{role} wanted"] = f"{min(wanted)}-{max(wanted)}"
            row[f"{role} running"] = f"{min(served)}-{max(served)}"
        if phase.grows:
            number = ROLES.index(phase.grows)
            wanted_s = [sample.at_s - start_s for sample in seen if sample.target[number] > 1]
            served_s = [sample.at_s - start_s for sample in seen if sample.running[number] > 1]
            row["2 wanted after s"] = min(wanted_s, default=None)
            row["2 serve after s"] = min(served_s, default=None)
        found.append(row)
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", help="a prepared model; default: a tiny one, and a profile")
    parser.add_argument("--most", type=int, default=2, help="workers of each role")
    parser.add_argument("--hold-s", type=float, default=20.0, help="planner.scale_down_delay_s")
    parser.add_argument("--load-s", type=float, default=60.0)
    parser.add_argument("--pause-s", type=float, default=120.0, help="at most")
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="kv", dir="/tmp") as name:
        folder, profile = Path(name), None
        vocab = (1000, 30_000)
        model = options.model
        if model is None:
            model, profile, vocab = str(tiny(folder)), folder / "slow.json", (10, 300)
            profile.write_text(json.dumps(SLOW))
        flags = ["--model", model, "--served-name", "model", *planner_flags(options.hold_s, options.most, profile)]
        with cluster(folder, flags) as served:
            plan = phases(options.load_s, options.pause_s)
            target = LoadTarget(served.url, "model")
            run = asyncio.run(drive(target, served.dashboard, plan, vocab))
    show("workers by load", rows(run), options.json)
    print(f"{len(run.load.records)} requests, {run.failed} failed")
    bound = most_turns(run.samples[-1].at_s, options.hold_s)
    print("; ".join(f"{role} changed its direction {run.turns(role)} times" for role in ROLES), f"(bound {bound})")
    if problems := run.problems(options.hold_s):
        raise SystemExit("\n".join(problems))


def tiny(folder: Path) -> Path:
    """A tiny checkpoint."""
    return tiny_checkpoint("llama", folder / "tiny")


if __name__ == "__main__":
    main()
