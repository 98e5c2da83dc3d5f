"""The simulator against real runs: one load through real workers and through `kvrelay simulate`, every figure side
by side.

    python -m bench.simulator.check [--prefill 1] [--decode 1] [--rates 1 2.5 4] [--seconds 30] [--model M | --tiny]
        [--profile FILE] [--save-profile FILE [--fit-workers N]] [--policy joint] [--json FILE] [--markdown FILE]

1. `kvrelay profile --fit` measures a worker's speed in a process of its own (or --profile has it from before), alone
and with as
   many neighbours computing as the cluster has workers.
2. Prefill and decode workers (processes of one thread each), behind one ingress without HTTP, get conversations over
shared system
   prompts at each rate: from empty caches, after a warm-up, each request at its time whatever is under way. What a
   message and a transfer take is measured between single requests before.
3. The simulator gets the same requests at the times at which they really came, the same settings, pools and policy.
4.
Printed for each rate: both runs' figures and their errors, and how far single requests are off.

What is the same by construction: lengths, shared prefixes, arrivals, limits of outputs (known to the router in
both).
What is not: the real ingress's own computing, and everything that the machine does beside it.

Each run is also simulated with
workers of twice the
speed: the errors must show that this profile is wrong.
The real runs need a quiet machine: others' work makes its steps longer, not the simulator's.
"""

import argparse
import asyncio
import json
import math
import os
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

from bench.engine.inprocess import count_weights, prepare
from bench.figures import machine, show
from bench.simulator.check_real import (
    Answer,
    Figure,
    Outcome,
    Ways,
    as_markdown,
    compare,
    measure_ways,
    per_request,
    play,
    real_cluster,
    stated,
)
from kvrelay.cluster.commands.settings_flags import with_pairs
from kvrelay.cluster.profiles.profile import SimulatorProfile, load_profile
from kvrelay.cluster.simulator.requests import SimulatedRequest
from kvrelay.cluster.simulator.scenario import Scenario, scenario_from
from kvrelay.cluster.simulator.simulation import Simulation
from kvrelay.cluster.workloads.conversations import SessionSpec, conversation_entries
from kvrelay.cluster.workloads.trace import TraceEntry, at_rate, scale_entries, with_own_blocks
from kvrelay.config import settings_from
from kvrelay.engine.checkpoints.tiny import tiny_checkpoint
from kvrelay.router.planning.types import SpeedCurve
from kvrelay.router.types import Decision, RouteRequest, RoutingRefusal

BLOCK = 16
LENGTH_SCALE = BLOCK / 512
WRONG_SPEED = 2.0  # of the control
WARM_UP, WARM_UP_S = 12, 5.0  # requests, and when the load begins
SESSIONS = SessionSpec(
    starts_per_s=1.0,
    one_off_share=0.2,
    first_continues=0.8,
    think_s=(8.0, 0.5),
    user_tokens=(1600.0, 0.8),
    document_tokens=(12000.0, 0.5),
    output_tokens=(1200.0, 0.5),
    num_apps=4,
    system_tokens=(12000.0, 0.4),
    max_input_tokens=48_000,
    tokens_per_s=1200.0,
)


def sections_of(options: argparse.Namespace) -> dict[str, dict[str, Any]]:
    """The product's settings, of both sides. Speculation is off: the simulator leaves it out."""
    sections: dict[str, dict[str, Any]] = {
        "model": {"dtype": "float32" if options.tiny else "bfloat16"},
        "engine": {"kv_memory": options.kv_memory, "num_threads": 1, "block_size": BLOCK, "speculation": "off"},
        "router": {"policy": options.policy},
        "cluster": {"prefill": options.prefill, "decode": options.decode},
    }
    return with_pairs(sections, options.set)


def load_of(count: int, rate_per_s: float, seed: int) -> list[TraceEntry]:
    """A warm-up of single prompts, then the conversations. No session is named: prompts do not go on from what was
    really stated.
    """
    entries = with_own_blocks(conversation_entries(replace(SESSIONS, seed=seed), count))
    entries = scale_entries(at_rate(entries, rate_per_s), length_scale=LENGTH_SCALE)
    measured = [
        replace(one, arrival_s=WARM_UP_S + one.arrival_s, output_tokens=max(2, one.output_tokens), session="")
        for one in entries
    ]
    first = 1 << 30
    warm = [
        TraceEntry(0.2 * n, 200, 4, tuple(range(first + 20 * n, first + 20 * n + 13)), BLOCK) for n in range(WARM_UP)
    ]
    return warm + measured


# ---- the profile


def fit(options: argparse.Namespace, folder: Path, file: Path) -> SimulatorProfile:
    """By the product's own command, in a process of its own."""
    settings = [
        f"{section}.{name}={value}"
        for section, values in sections_of(options).items()
        for name, value in values.items()
        if section == "engine"
    ]
    command = [
        sys.executable, "-m", "kvrelay.cluster.commands.cli", "profile", "--fit", str(file), "--model", str(folder),
        "--dtype", "float32" if options.tiny else "bfloat16", "--seconds", str(options.fit_seconds),
        "--workers", str(max(options.fit_workers, options.prefill + options.decode)),
        *(part for setting in settings for part in ("--set", setting)),
    ]  # fmt: skip
    subprocess.run(command, check=True, timeout=options.fit_seconds + 300)
    return load_profile(file)


def faster(profile: SimulatorProfile, speed: float) -> SimulatorProfile:
    """Workers so many times as fast."""
    return profile.model_copy(
        update={name: _times(getattr(profile, name), 1 / speed) for name in ("prefill", "decode")}
    )


def _times(curve: SpeedCurve, factor: float) -> SpeedCurve:
    return SpeedCurve(**{name: factor * value for name, value in asdict(curve).items()})


# ---- the simulated side


class Recorded(Simulation):
    """A simulation that keeps its requests, and where they went."""

    def __init__(self, scenario: Scenario, profile: SimulatorProfile, entries: Sequence[TraceEntry]) -> None:
        super().__init__(scenario, profile, entries)
        self.jobs: list[SimulatedRequest] = []
        self.ways: dict[int, Decision] = {}
        for ingress in self.ingresses:
            router, choose = ingress.router, ingress.router.select_and_reserve

            def noting(request: RouteRequest, now_s: float, choose: Any = choose) -> Decision | RoutingRefusal:
                choice: Decision | RoutingRefusal = choose(request, now_s)
                if isinstance(choice, Decision):
                    self.ways[int(request.request_id.partition("~")[0])] = choice
                return choice

            router.select_and_reserve = noting  # type: ignore[method-assign]

    def _ended(self, job: SimulatedRequest) -> None:
        self.jobs.append(job)
        super()._ended(job)


def simulate(
    options: argparse.Namespace,
    profile: SimulatorProfile,
    entries: Sequence[TraceEntry],
    ways: Ways,
    speed: float = 1.0,
) -> Outcome:
    """The same requests, settings and pools. max_tokens of 1: every client allows just what its output will have."""
    scenario = scenario_from(
        {
            "prefill": options.prefill,
            "decode": options.decode,
            "max_tokens": 1,
            "message_s": ways.message_s,
            "settings": sections_of(options),
        }
    )
    update: dict[str, Any] = {"workers_per_node": options.prefill + options.decode, **ways.sizes}
    if (budget := scenario.product_settings().engine.token_budget) is not None:
        update["token_budget"] = budget
    if ways.kv_bytes_per_s:
        update["local_bytes_per_s"] = ways.kv_bytes_per_s
    simulation = Recorded(scenario, faster(profile, speed).model_copy(update=update), entries)
    simulation.run()
    summary = simulation.summary()
    answers = [
        _answer(job, simulation.ways.get(job.index)) for job in sorted(simulation.jobs, key=lambda one: one.index)
    ]
    moved_bytes = sum(worker.moved_bytes for worker in simulation.workers)  # not what goes to a store and comes from it
    return Outcome(tuple(answers), moved_bytes, tiers=summary["tiers"])


def _answer(job: SimulatedRequest, way: Decision | None) -> Answer:
    is_done = job.outcome == "done"
    return Answer(
        index=job.index,
        arrival_s=job.arrival_s,
        prompt_tokens=job.num_tokens,
        output_tokens=job.output_tokens,
        outcome=job.outcome,
        ttft_s=job.ttft_s if is_done else math.nan,
        tpot_s=job.tpot_s if is_done and job.output_tokens > 1 else math.nan,
        cached_tokens=job.cached_tokens,
        path=way.path if way is not None else "",
        workers=()
        if way is None
        else tuple(_real_name(name) for name in (way.prefill, way.decode) if name is not None),
    )


def _real_name(name: str) -> str:
    return f"{'prefill' if name[0] == 'p' else 'decode'}-{name[1:]}"


# ---- all of it


def measured_only(outcome: Outcome) -> Outcome:
    """Without the warm-up's answers."""
    return replace(outcome, answers=tuple(one for one in outcome.answers if one.index >= WARM_UP))


async def real_runs(options: argparse.Namespace, folder: Path) -> tuple[Ways, list[tuple[list[TraceEntry], Outcome]]]:
    """For each rate the load as it came, and what came of it."""
    settings, vocab_size = settings_from(sections_of(options)), count_weights(folder).vocab_size
    runs = []
    async with real_cluster(settings, folder, options.cores) as cluster:
        ways = await measure_ways(cluster, settings, vocab_size)
        for rate in options.rates:
            entries = load_of(max(4, round(rate * options.seconds)), rate, options.seed)
            run = await play(cluster, settings, entries, vocab_size)
            came = [replace(one, arrival_s=at_s) for one, at_s in zip(entries, run.arrivals_s, strict=True)]
            runs.append((came, run.outcome))
    return ways, runs


def check(options: argparse.Namespace, folder: Path, scratch: Path) -> dict[str, Any]:
    """Everything; the figures as plain data."""
    file = options.save_profile or scratch / "profile.json"
    profile = load_profile(options.profile) if options.profile else fit(options, folder, file)
    ways, runs = asyncio.run(real_runs(options, folder))
    print(f"a message takes {1e3 * ways.message_s:.2f} ms, KV moves at {ways.kv_bytes_per_s / 1e9:.2f} GB/s")
    data: dict[str, Any] = {
        "machine": machine(),
        "profile": profile.model_dump(mode="json"),
        "ways": asdict(ways),
        "runs": [],
    }
    sections = []
    for rate, (came, real) in zip(options.rates, runs, strict=True):
        real = measured_only(real)
        simulated, wrong = (
            measured_only(simulate(options, profile, came, ways, speed)) for speed in (1.0, WRONG_SPEED)
        )
        figures, off = (compare(real, one, ttft_s=options.ttft_s, tpot_s=options.tpot_s) for one in (simulated, wrong))
        single, control = per_request(real, simulated), control_summary(off)
        title = f"{options.prefill}P + {options.decode}D, {folder.name}, {len(real.answers)} requests, {rate:g}/s"
        show(title, [figure.row() for figure in figures])
        print(f"{stated(single)} {control}")
        sections.append(as_markdown(title, figures, f"{stated(single)} {control}"))
        shown = [asdict(one) | {"error": one.error} for one in figures]
        data["runs"].append({"rate_per_s": rate, "figures": shown, "control": control})
    if options.markdown:
        options.markdown.write_text("\n".join(sections))
    return data


def control_summary(figures: Sequence[Figure]) -> str:
    """Of a simulation with the wrong speed."""
    errors = {figure.name: figure.error for figure in figures}
    stated = ", ".join(f"{name} {errors[name]:+.0%}" for name in ("TTFT p50", "TTFT p90", "TPOT p50", "TPOT p90"))
    return f"Workers {WRONG_SPEED:g} times as fast, simulated as a control, are off by: {stated}."


def options_of(arguments: Sequence[str] | None = None) -> argparse.Namespace:
    """From the command line, with the cores that each worker is pinned to, where there are enough."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--prefill", type=int, default=1)
    parser.add_argument("--decode", type=int, default=1)
    parser.add_argument("--rates", type=float, nargs="+", default=[1.0, 2.5, 4.0], help="requests per second")
    parser.add_argument("--seconds", type=float, default=30.0, help="of each rate's load")
    parser.add_argument("--model", default="smollm2-135m-instruct")
    parser.add_argument("--tiny", action="store_true", help="random weights of a tiny model")
    parser.add_argument("--kv-memory", default="96MiB", help="of each worker")
    parser.add_argument("--policy", default="joint")
    parser.add_argument("--set", nargs="*", default=[], help="any setting: section.key=value")
    parser.add_argument("--profile", type=Path, help="of workers like these; default: fitted now")
    parser.add_argument("--save-profile", type=Path, help="where the fitted one is kept")
    parser.add_argument("--fit-workers", type=int, default=0, help="up to so many side by side; default: the cluster's")
    parser.add_argument("--fit-seconds", type=float, default=90.0)
    parser.add_argument("--ttft-s", type=float, default=1.0, help="SLO that goodput counts")
    parser.add_argument("--tpot-s", type=float, default=0.05)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--json", type=Path)
    parser.add_argument("--markdown", type=Path)
    options = parser.parse_args(arguments)
    cores = sorted(os.sched_getaffinity(0))
    workers = options.prefill + options.decode
    options.cores = [(core,) for core in cores[:workers]] if workers <= len(cores) else []
    return options


def main() -> None:
    options = options_of()
    with tempfile.TemporaryDirectory() as scratch:
        folder = tiny_checkpoint("llama", Path(scratch) / "tiny-llama") if options.tiny else prepare(options.model)
        data = check(options, folder, Path(scratch))
    if options.json:
        options.json.write_text(json.dumps(data, indent=1) + "\n")


if __name__ == "__main__":
    main()
