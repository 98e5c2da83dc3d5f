"""Autoscaling live: a prefill-heavy load, a decode-heavy one and next to none, on a cluster of our own.

    python -m bench.planner.live [--hold-s 10] [--load-s 60] [--switch-roles | --aggregated]

Starts `kvrelay serve` with planner.mode=auto, at most two workers of a role, and a tiny checkpoint with random weights.
The planner goes by a profile of a worker far slower than it (`SLOW`), so that two cores carry every load and the counts
depend on the load alone. Each phase lasts at least --load-s, and until its counts are there. Prints each role's lowest
and highest target and running workers in each phase, how often the targets changed, when the phase's counts ran, the
requests and the failed ones; and, where a worker came, TTFT and TPOT p99 of the requests before it and of those in the
SETTLED_S after. With --switch-roles workers change their roles before processes start, and are counted by
their roles instead of by Serve's deployments. With --aggregated each worker does both (`cluster.prefill: 0`), and there
are two phases: much, and little. Exits with 1 when a request failed or lacks a token, a phase did not
reach its counts, a count changed more often than from one to the other, or it left its bounds.
"""

import argparse
import asyncio
import contextlib
import itertools
import json
import math
import tempfile
import time
from collections.abc import AsyncIterator, Iterator, Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np

from bench.figures import show
from kvrelay.cluster.chaos.served import running_serve
from kvrelay.cluster.errors import ClusterError
from kvrelay.cluster.launch.dashboard import RayDashboard
from kvrelay.cluster.launch.http_json import request_json
from kvrelay.cluster.loadgen.client import LoadRequest, LoadResult, LoadTarget, run_load
from kvrelay.cluster.loadgen.prompts import PromptSpec, synthetic_prompt
from kvrelay.cluster.loadgen.stats import OK, LoadRecord
from kvrelay.engine.checkpoints.tiny import tiny_checkpoint

ROLES = ("prefill", "decode")
MOST = 2  # workers of a role
PHASE_BITS = 20  # of a request's index, above which its phase's number stands
PHASE_S, POLL_S, SETTLED_S = 200.0, 0.5, 15.0
_CURVE = {"overhead_s": 0.0, "weights_s": 0.01, "token_s": 0.002, "pair_s": 0.0, "context_s": 0.0}
SLOW = {
    "name": "slow", "prefill": _CURVE, "decode": {**_CURVE, "sequence_s": 0.008}, "block_size": 16, "num_blocks": 4096,
    "token_budget": 512, "max_running": 64, "max_model_len": 2048, "kv_bytes_per_token": 1024,
    "link_bytes_per_s": 1e9, "local_bytes_per_s": 1e9,
}  # fmt: skip


@dataclass(frozen=True, slots=True)
class Phase:
    """`rate` requests per second of so many prompt and output tokens, until as many workers as `wanted` run, in the
    order of ROLES.
    """

    name: str
    rate: float
    input_tokens: int
    output_tokens: int
    wanted: tuple[int, int]

    def requests(self, first: int) -> Iterator[LoadRequest]:
        """Evenly spaced, without end; `first` is the first one's index, from which its prompt follows."""
        spec = PromptSpec(self.input_tokens, low=10, high=300)
        for index in itertools.count():
            yield LoadRequest(
                first + index, synthetic_prompt(spec, first + index), self.output_tokens, index / self.rate
            )


PHASES = (
    Phase("prefill-heavy", 6.0, 600, 2, (MOST, 1)),
    Phase("decode-heavy", 4.0, 16, 150, (1, MOST)),
    Phase("next to none", 1.0, 16, 8, (1, 1)),
)
BOTH_PHASES = (Phase("much", 6.0, 600, 2, (0, MOST)), Phase("little", 3.0, 16, 8, (0, 1)))


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
    names: set[str] = field(default_factory=set)  # of all workers that were seen, where they are counted by role

    def of_phase(self, index: int) -> list[Sample]:
        start_s = self.begins[index][0]
        end_s = self.begins[index + 1][0] if index + 1 < len(self.begins) else math.inf
        return [sample for sample in self.samples if start_s <= sample.at_s < end_s]

    def has_reached(self, wanted: tuple[int, int]) -> bool:
        last = self.samples[-1] if self.samples else None
        return last is not None and last.target == last.running == wanted

    @property
    def failed(self) -> list[LoadRecord]:
        return [record for record in self.load.records if not is_whole(record)]

    def changes(self, index: int, role: int) -> int:
        """How often the target of a role changed in a phase, its beginning included."""
        before = [sample for sample in self.samples if sample.at_s < self.begins[index][0]][-1:]
        return sum(a.target[role] != b.target[role] for a, b in pairwise([*before, *self.of_phase(index)]))

    def problems(self) -> list[str]:
        """What does not hold; empty: all of it does."""
        failed = self.failed
        found = [f"{len(failed)} requests failed: {self.load.first_failure or failed[0]}"] if failed else []
        before = self.samples[0].target if self.samples else ()
        for index, (_, phase) in enumerate(self.begins):
            seen = self.of_phase(index)
            if not seen or (seen[-1].target, seen[-1].running) != (phase.wanted, phase.wanted):
                found.append(f"{phase.name}: not at {phase.wanted}: {seen[-1:]}")
            for number, role in enumerate(ROLES):
                most = abs(phase.wanted[number] - before[number]) if before else 0
                if (changes := self.changes(index, number)) > most:
                    found.append(f"{phase.name}: {role} changed {changes} times, not {most}")
            before = phase.wanted
        least = min(count for _, phase in self.begins for count in phase.wanted)
        counts = {count for sample in self.samples for count in (*sample.target, *sample.running)}
        if not counts <= set(range(least, MOST + 1)):
            found.append(f"counts from {min(counts)} to {max(counts)}, not from {least} to {MOST}")
        return found


def is_whole(record: LoadRecord) -> bool:
    """Whether the answer ended well and has every token by the server's own account."""
    has_all = record.num_output_tokens == record.wanted_tokens and not record.is_estimated
    return has_all and record.outcome == OK


def planner_flags(hold_s: float, profile: Path, *, switch_roles: bool) -> list[str]:
    values = {
        "mode": "auto",
        "switch_roles": switch_roles,
        "max_prefill": MOST,
        "max_decode": MOST,
        "scale_down_delay_s": hold_s,
        "profile": profile,
    }
    return [part for name, value in values.items() for part in ("--set", f"planner.{name}={value}")]


def counts(dashboard: str) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """(targets, running replicas) of Serve, in the order of ROLES. Raises ClusterError."""
    none: dict[str, Any] = {"replicas": [], "target_num_replicas": 0}
    found = [RayDashboard(dashboard).application()["deployments"].get(name, none) for name in ROLES]
    running = (sum(replica["state"] == "RUNNING" for replica in one["replicas"]) for one in found)
    return tuple(int(one["target_num_replicas"]) for one in found), tuple(running)


def roles(url: str, names: set[str]) -> tuple[int, ...]:
    """Workers by their role now, in the order of ROLES; adds to `names`. Raises ClusterError."""
    workers = request_json("GET", f"{url}/kvrelay/status", timeout_s=10.0)["workers"]
    names |= {worker["worker_id"] for worker in workers}
    now = [worker["info"]["role"] for worker in workers if worker["is_up"]]
    return tuple(now.count(role) for role in ROLES)


async def _watch(dashboard: str, url: str | None, run: Run, start_s: float) -> None:
    while True:
        with contextlib.suppress(ClusterError):  # the dashboard is busy: this sample is left out
            target, running = await asyncio.to_thread(counts, dashboard)
            if url is not None:
                target = running = await asyncio.to_thread(roles, url, run.names)
            run.samples.append(Sample(time.monotonic() - start_s, target, running))
        await asyncio.sleep(POLL_S)


@contextlib.asynccontextmanager
async def _watched(dashboard: str, url: str | None, run: Run) -> AsyncIterator[float]:
    start_s = time.monotonic()
    watching = asyncio.create_task(_watch(dashboard, url, run, start_s))
    try:
        yield start_s
    finally:
        watching.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await watching


async def drive(
    target: LoadTarget, dashboard: str, plan: Sequence[Phase], least_s: float, *, by_role: bool = False
) -> Run:
    """Run the phases one after the other, each for `least_s` at least, and PHASE_S more at most until its counts are
    there. by_role: count workers by their roles.
    """
    run = Run()
    async with _watched(dashboard, target.url if by_role else None, run) as start_s:
        for number, phase in enumerate(plan):
            begun_s = time.monotonic()
            run.begins.append((begun_s - start_s, phase))

            def goes_on(_: object, begun_s: float = begun_s, phase: Phase = phase) -> bool:
                passed_s = time.monotonic() - begun_s
                return passed_s < least_s or (passed_s < least_s + PHASE_S and not run.has_reached(phase.wanted))

            await run_load(target, itertools.takewhile(goes_on, phase.requests(number << PHASE_BITS)), result=run.load)
    return run


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
            row[f"{role} changes"] = run.changes(index, number)
        for key, has in (("counts wanted after s", "target"), ("they run after s", "running")):
            times = [sample.at_s - start_s for sample in seen if getattr(sample, has) == phase.wanted]
            row[key] = min(times, default=None)
        came_s = next((b.at_s - start_s for a, b in pairwise(seen) if sum(b.running) > sum(a.running)), None)
        records = [record for record in run.load.records if record.index >> PHASE_BITS == index]
        for name in ("ttft_s", "tpot_s") if came_s is not None else ():
            for when, from_s, until_s in (("before", 0.0, came_s), ("after", came_s, came_s + SETTLED_S)):
                inside = [getattr(record, name) for record in records if from_s <= record.started_s < until_s]
                times = [1000 * time_s for time_s in inside if time_s is not None]
                row[f"{name[:4]} p99 ms {when}"] = float(np.percentile(times, 99)) if times else None
        found.append(row)
    return found


def autoscaled(
    folder: Path, *, hold_s: float, least_s: float, switch_roles: bool = False, aggregated: bool = False
) -> Run:
    """All phases on a cluster of its own, whose files lie in `folder`. Raises RuntimeError: it did not start."""
    profile = folder / "slow.json"
    profile.write_text(json.dumps(SLOW))
    model = tiny_checkpoint("llama", folder / "tiny")
    flags = [
        "--model",
        str(model),
        "--served-name",
        "model",
        *planner_flags(hold_s, profile, switch_roles=switch_roles),
        *(("--prefill", "0") if aggregated else ()),
    ]
    phases = BOTH_PHASES if aggregated else PHASES
    with running_serve(folder, *flags, environment={"TMPDIR": str(folder)}) as served:
        target = LoadTarget(served.url, "model")
        return asyncio.run(drive(target, served.dashboard, phases, least_s, by_role=switch_roles))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--hold-s", type=float, default=10.0, help="planner.scale_down_delay_s")
    parser.add_argument("--load-s", type=float, default=60.0, help="a phase lasts at least so long")
    group = parser.add_mutually_exclusive_group()
    group.add_argument("--switch-roles", action="store_true", help="planner.switch_roles")
    group.add_argument("--aggregated", action="store_true", help="workers that do both")
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="kv", dir="/tmp") as name:
        kind = {"switch_roles": options.switch_roles, "aggregated": options.aggregated}
        run = autoscaled(Path(name), hold_s=options.hold_s, least_s=options.load_s, **kind)
    show("workers by load", rows(run), options.json)
    print(f"{len(run.load.records)} requests, {len(run.failed)} failed")
    if run.names:
        print(f"{len(run.names)} worker processes: {', '.join(sorted(run.names))}")
    if problems := run.problems():
        raise SystemExit("\n".join(problems))


if __name__ == "__main__":
    main()
