"""`kvrelay simulate`: a cluster of any size in virtual time, under a trace. Needs no Ray, no model and no GPU.

The simulator is imported when the command runs, so that `--help` is fast.
"""

import json
import os
import sys
import time
from collections.abc import Iterable
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass
from itertools import chain
from multiprocessing import get_context
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.console import Console

if TYPE_CHECKING:
    from kvrelay.cluster.profiles.profile import SimulatorProfile
    from kvrelay.cluster.simulator.scenario import Scenario
    from kvrelay.cluster.simulator.simulation import Simulation
    from kvrelay.cluster.workloads.trace import TraceEntry

FILE_WIDTH = 120  # columns of the table where standard output is no terminal


def command(
    load: Annotated[
        str, typer.Argument(help="a trace file, or a generated workload; `kvrelay trace --help` lists them")
    ],
    profile: Annotated[
        str, typer.Option(help="the workers' speed and memory: the name of a published profile, or a JSON file")
    ],
    scenario: Annotated[Path | None, typer.Option(help="YAML: cluster, faults, settings; flags override it")] = None,
    prefill: Annotated[int | None, typer.Option(help="prefill workers; 0: decode workers compute all prompts")] = None,
    decode: Annotated[int | None, typer.Option(help="decode workers")] = None,
    ingress: Annotated[int | None, typer.Option(help="ingresses, with a router each")] = None,
    policy: Annotated[list[str] | None, typer.Option(help="router.policy; repeatable: one run each")] = None,
    rate: Annotated[
        list[float] | None, typer.Option(min=0.0, help="mean requests per second; repeatable: one run each")
    ] = None,
    limit: Annotated[int | None, typer.Option(min=1, help="most requests of the trace")] = None,
    seed: Annotated[
        int | None, typer.Option(help="seed of arrivals within a trace's buckets, of faults and noise")
    ] = None,
    ttft_s: Annotated[float | None, typer.Option(help="TTFT target, s, for goodput")] = None,
    tpot_s: Annotated[float | None, typer.Option(help="TPOT target, s, for goodput")] = None,
    json_file: Annotated[Path | None, typer.Option("--json", help="also write the results to this file")] = None,
    plot: Annotated[Path | None, typer.Option(help="plot the results to this file: PNG, SVG, PDF")] = None,
    seeds: Annotated[int, typer.Option(min=1, help="so many seeds from --seed on, each in a process of its own")] = 1,
    set_: Annotated[list[str] | None, typer.Option("--set", help="any setting: section.key=value, repeatable")] = None,
) -> None:
    """Simulate a cluster under a workload: percentiles, goodput, hits, bytes, utilisation, cost."""
    from kvrelay.cluster.commands.settings_flags import with_pairs
    from kvrelay.cluster.profiles.profile import find_profile
    from kvrelay.cluster.simulator.results import check_picture, runs_of, show
    from kvrelay.cluster.simulator.results import plot as draw
    from kvrelay.cluster.simulator.scenario import load_scenario, scenario_from

    data = load_scenario(scenario) if scenario is not None else {}
    flags = {"prefill": prefill, "decode": decode, "ingress": ingress, "seed": seed, "ttft_s": ttft_s, "tpot_s": tpot_s}
    data |= {name: value for name, value in flags.items() if value is not None}
    data["settings"] = with_pairs(data.get("settings", {}), set_ or [])
    workers = find_profile(profile)
    if plot is not None:
        check_picture(plot)
    base = scenario_from(data)
    policies: tuple[str | None, ...] = tuple(policy) if policy else (None,)
    rates: tuple[float | None, ...] = tuple(rate) if rate else (None,)
    work = _Work(load, workers, policies, rates, limit, is_one_seed=seeds == 1)
    scenarios = [base.model_copy(update={"seed": base.seed + number}) for number in range(seeds)]
    if seeds == 1:
        found = work.run(base)
    else:
        with ProcessPoolExecutor(min(seeds, len(os.sched_getaffinity(0))), get_context("spawn")) as processes:
            found = list(chain.from_iterable(processes.map(work.run, scenarios)))
    show(Console(width=None if sys.stdout.isatty() else FILE_WIDTH), found)
    if json_file is not None:
        json_file.write_text(json.dumps([summary for _, summary in found], indent=1) + "\n")
    if plot is not None:
        runs = runs_of([summary for _, summary in found])
        draw(runs, plot, title=f"{Path(load).name} on {workers.name}", ttft_slo_s=base.ttft_s, tpot_slo_s=base.tpot_s)


@dataclass(frozen=True, slots=True)
class _Work:
    """What one process simulates for one seed: each policy (None: the scenario's) at each rate (None: the load's)."""

    load: str
    profile: "SimulatorProfile"
    policies: tuple[str | None, ...]
    rates: tuple[float | None, ...]
    limit: int | None
    is_one_seed: bool

    def run(self, scenario: "Scenario") -> list[tuple[str, dict[str, Any]]]:
        """A name and a summary for each run; the scenario's seed is also the load's."""
        from kvrelay.cluster.workloads.choose import make_workload

        found = []
        for policy in self.policies:
            for rate in self.rates:
                entries = make_workload(self.load, rate_per_s=rate, limit=self.limit, seed=scenario.seed)
                found.append(self._run(with_policy(scenario, policy), entries, policy, rate))
        return found

    def _run(
        self, scenario: "Scenario", entries: "list[TraceEntry]", policy: str | None, rate: float | None
    ) -> tuple[str, dict[str, Any]]:
        began_s = time.perf_counter()
        simulation = simulated(scenario, self.profile, entries)
        summary = simulation.summary() | simulation.tally.percentiles()
        seed = None if self.is_one_seed else f"seed {scenario.seed}"
        name = " ".join(filter(None, (policy, None if rate is None else f"{rate:g}/s", seed))) or "simulated"
        print(f"{name}: {summary['requests']} requests in {time.perf_counter() - began_s:.1f} s", file=sys.stderr)
        return name, summary


def simulated(scenario: "Scenario", profile: "SimulatorProfile", entries: "Iterable[TraceEntry]") -> "Simulation":
    """A completed simulation. Where the trace has block hashes, the workers take its block size."""
    from kvrelay.cluster.simulator.simulation import Simulation

    entries = list(entries)
    if entries and entries[0].hash_ids and entries[0].block_tokens != profile.block_size:
        profile = profile.with_block_size(entries[0].block_tokens)
    return Simulation(scenario, profile, entries).run()


def with_policy(scenario: "Scenario", name: str | None) -> "Scenario":
    """The same cluster with another policy of the router."""
    if name is None:
        return scenario
    settings = {**scenario.settings, "router": {**scenario.settings.get("router", {}), "policy": name}}
    return scenario.model_copy(update={"settings": settings})
