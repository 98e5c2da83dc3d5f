"""`kvrelay simulate`: a cluster of any size in virtual time, under a trace. Needs no Ray, no model and no GPU.

The simulator is imported when the command runs, so that `--help` is fast.
"""

import json
import sys
import time
from collections.abc import Iterable
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
    set_: Annotated[list[str] | None, typer.Option("--set", help="any setting: section.key=value, repeatable")] = None,
) -> None:
    """Simulate a cluster under a workload: percentiles, goodput, hits, bytes, utilisation, cost."""
    from kvrelay.cluster.commands.settings_flags import with_pairs
    from kvrelay.cluster.profiles.profile import find_profile
    from kvrelay.cluster.simulator.results import check_picture, runs_of, show
    from kvrelay.cluster.simulator.results import plot as draw
    from kvrelay.cluster.simulator.scenario import load_scenario, scenario_from
    from kvrelay.cluster.workloads.choose import make_workload

    data = load_scenario(scenario) if scenario is not None else {}
    flags = {"prefill": prefill, "decode": decode, "ingress": ingress, "seed": seed, "ttft_s": ttft_s, "tpot_s": tpot_s}
    data |= {name: value for name, value in flags.items() if value is not None}
    data["settings"] = with_pairs(data.get("settings", {}), set_ or [])
    workers = find_profile(profile)
    if plot is not None:
        check_picture(plot)
    base = scenario_from(data)
    found: list[tuple[str, dict[str, Any]]] = []
    for name in policy or [None]:  # type: ignore[list-item]
        for each in rate or [None]:  # type: ignore[list-item]
            entries = make_workload(load, rate_per_s=each, limit=limit, seed=base.seed)
            found.append(_run(with_policy(base, name), workers, entries, name, each))
    show(Console(width=None if sys.stdout.isatty() else FILE_WIDTH), found)
    if json_file is not None:
        json_file.write_text(json.dumps([summary for _, summary in found], indent=1) + "\n")
    if plot is not None:
        runs = runs_of([summary for _, summary in found])
        draw(runs, plot, title=f"{Path(load).name} on {workers.name}", ttft_slo_s=base.ttft_s, tpot_slo_s=base.tpot_s)


def _run(
    scenario: "Scenario",
    profile: "SimulatorProfile",
    entries: "list[TraceEntry]",
    policy: str | None,
    rate: float | None,
) -> tuple[str, dict[str, Any]]:
    began_s = time.perf_counter()
    simulation = simulated(scenario, profile, entries)
    summary = simulation.summary() | simulation.tally.percentiles()
    name = " ".join(filter(None, (policy, None if rate is None else f"{rate:g}/s"))) or "simulated"
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
