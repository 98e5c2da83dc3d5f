"""Every routing policy on the same loads and terms, in virtual time: python -m bench.router.policies TRACE...

All of it but the workers' speed is the product: the routers, the policies, the schedulers, the caches (kvrelay
simulate). Three levels of terms, see bench/router/levels.py: placement alone (a), each contender at its own best split
with the product's queue rules and deferral (b), and with its project's own conditional disaggregation and admission
(c). For each contender and seed:

    capacity   the most requests per second of which 90 % are in time (first token, and then mean time per token),
               refused ones counted as missed: by bisection over steps of `--precision`
    split      of the workers, where it was found; `0 +`: all compute the prompts that they decode, under joint
               and an SLO also others'
    there      hits, TTFT and TPOT of the answered requests, the share of all prompt tokens in time, and the share of
               the shortest and of the longest tenth of the prompts in time
    at 1.5 x   that load (b, c): requests in time per second, as a share of those at the capacity; and TTFT p99

and below each table ours against the best of the others, with stores and without. A made-up load has `--requests`
requests, 12,000 unless said otherwise. A load that misses too much is run only until that is certain. With `--json`
every simulation is kept, so that a run that was stopped goes on where it was; the file belongs to one version of the
code. Seeds move arrivals within the trace's rounded times, and the policies' draws.
"""

import argparse
import statistics
import sys
import time
from collections.abc import Callable, Iterable
from concurrent.futures import ProcessPoolExecutor
from contextlib import ExitStack
from dataclasses import astuple, dataclass, replace
from itertools import groupby, product
from pathlib import Path
from typing import Any

import numpy as np

from bench.router.levels import CONTENDERS, LEVELS, NO_LIMIT, Targets, knows_targets, scenario_of
from bench.router.search import Results, Search, simulated
from kvrelay import types
from kvrelay.cluster.profiles.profile import find_profile
from kvrelay.cluster.simulator import worker as simulated_worker
from kvrelay.cluster.workloads.choose import GENERATORS, make_workload

PROFILE = "llama-3.1-70b-h100x8-bf16"
TARGETS = ("5/0.1", "2/0.05", "10/0.04")
MADE_REQUESTS = 12_000
OVERLOAD = 1.5
"""Of the capacity: a load that is too much."""
WITH_SLO = ", SLO"
OWN_LIMITS = types.MAX_WAITING, simulated_worker.RESERVE_TIMEOUT_S


@dataclass(frozen=True, slots=True)
class Terms:
    """What all tasks of a call have in common."""

    profile: str
    requests: int | None
    workers: int
    split: int
    splits: tuple[int, ...]
    start: float
    precision: float
    pairs: tuple[str, ...]
    json: Path | None


@dataclass(frozen=True, slots=True)
class Task:
    """One contender on one load, with one seed."""

    source: str
    level: str
    wanted: Targets
    contender: str
    seed: int
    terms: Terms


class Lab:
    """Runs one task's simulations."""

    def __init__(self, task: Task, results: Results) -> None:
        self._task, self._level, self._contender = task, LEVELS[task.level], CONTENDERS[task.contender]
        self._results = results
        self._profile = find_profile(task.terms.profile)
        self._variants = self._level.variants(self._contender)

    def run(self, split: int, variant: int, step: int, overload: float = 1.0) -> dict[str, Any]:
        task, terms = self._task, self._task.terms
        load = round(overload * terms.start * (1 + terms.precision) ** step, 4)
        limit = terms.requests or (MADE_REQUESTS if task.source in GENERATORS else None)
        scenario = scenario_of(
            self._level,
            self._contender,
            self._variants[variant],
            task.wanted,
            self._profile,
            prefill=split,
            workers=terms.workers,
            seed=task.seed,
            pairs=terms.pairs,
        )

        def find() -> dict[str, Any]:
            is_limited = self._level.has_rules
            types.MAX_WAITING, simulated_worker.RESERVE_TIMEOUT_S = OWN_LIMITS if is_limited else (NO_LIMIT, 3600.0)
            began_s = time.perf_counter()
            entries = make_workload(task.source, rate_per_s=load, limit=limit, seed=task.seed)
            if not is_limited:  # several tenants take turns
                entries = [replace(entry, tenant="") for entry in entries]
            simulation, tally = simulated(scenario, self._profile, entries, is_whole=overload > 1)
            figures = tally.figures()
            summary = (
                f"{task.level}, {task.contender}, seed {task.seed}, {split} + {terms.workers - split}, {load:.2f}/s"
            )
            summary += f": {figures['in_time']:.1%} in time{'' if figures['holds'] else ' so far'}"
            print(f"{summary} ({time.perf_counter() - began_s:.0f} s)", file=sys.stderr, flush=True)
            return figures | {"deferred": sum(one.stats.deferred for one in simulation.ingresses)}

        name = [Path(task.source).name, limit, load, overload > 1, terms.profile, scenario.model_dump(mode="json")]
        return self._results.get(name, find)

    def found(self) -> dict[str, Any]:
        """The capacity, where it was found, and the figures there; of a level with one split, at that one."""
        terms = self._task.terms
        search = Search(lambda *at: bool(self.run(*at)["holds"]))
        if self._level.has_rules:
            search.over_splits(range(len(self._variants)), terms.split, terms.workers, list(terms.splits))
        else:
            search.improves(terms.split, 0)
        if search.best is None:
            return {"capacity": 0.0, "split": 0, "variant": {}}
        split, variant, step = search.best
        capacity = terms.start * (1 + terms.precision) ** step
        found = {"capacity": capacity, "split": split, "variant": self._variants[variant], **self.run(*search.best)}
        if self._level.has_rules:
            over = self.run(*search.best, OVERLOAD)
            found["overload"] = OVERLOAD * over["in_time"] / found["in_time"], over["ttft_s"]["p99"]
        return found


def measured(task: Task) -> dict[str, Any]:
    results = Results(task.terms.json)
    name = ["capacity", *astuple(replace(task, terms=replace(task.terms, json=None)))]
    return results.get(name, Lab(task, results).found)


# ---- tables

HEAD = (
    "", "capacity", "split", "hits", "TTFT p50 / p90 / p99, s", "TPOT p99, ms", "tokens in time",
    "shortest / longest tenth in time", f"goodput, TTFT p99 at {OVERLOAD:g} x", "own",
)  # fmt: skip


def table(found: dict[str, list[dict[str, Any]]], workers: int) -> str:
    """By contender, one for each seed. Means over seeds, best capacity first; the capacity's spread behind ±.

    In Markdown.
    """
    rows = [HEAD, ("---",) * len(HEAD)]
    rows += [row(name, found[name], workers) for name in sorted(found, key=lambda name: -capacity(found[name]))]
    return "\n".join(f"| {' | '.join(cells)} |" for cells in rows)


def capacity(runs: Iterable[dict[str, Any]]) -> float:
    return statistics.fmean(run["capacity"] for run in runs)


def row(name: str, runs: list[dict[str, Any]], workers: int) -> tuple[str, ...]:
    there = [run for run in runs if run["capacity"]]
    if not there:
        return (name, "0", *("–" for _ in HEAD[2:]))
    capacities = [run["capacity"] for run in runs]
    spread = f" ± {(max(capacities) - min(capacities)) / 2:.2f}" if len(runs) > 1 else ""

    def mean(of: Callable[[dict[str, Any]], Any]) -> Any:
        return np.mean([of(run) for run in there], axis=0)

    ttft = mean(lambda run: [run["ttft_s"][cut] for cut in ("p50", "p90", "p99")])
    overload = mean(lambda run: run["overload"]) if "overload" in there[0] else None
    tenths = mean(lambda run: [run["in_time_by_length"][end] for end in (0, -1)])
    return (
        name,
        f"{capacity(runs):.2f}{spread}",
        ", ".join(sorted({f"{run['split']} + {workers - run['split']}" for run in there})),
        f"{mean(lambda run: run['hit_ratio']):.1%}",
        " / ".join(f"{seconds:.2f}" for seconds in ttft),
        f"{1000 * mean(lambda run: run['tpot_s'].get('p99', 0.0)):.0f}",
        f"{mean(lambda run: run['tokens_in_time']):.1%}",
        " / ".join(f"{share:.1%}" for share in tenths),
        "–" if overload is None else f"{overload[0]:.0%}, {overload[1]:.1f} s",
        "; ".join(sorted({" ".join(f"{key}={value}" for key, value in run["variant"].items()) for run in there})),
    )


def comparison(found: dict[str, list[dict[str, Any]]]) -> list[str]:
    """Each of ours against the best of the others that have no more memory."""
    lines, of = [], {name: CONTENDERS[name.removesuffix(WITH_SLO)] for name in found}
    for name, runs in found.items():
        others = [other for other in found if not of[other].is_ours and of[other].has_store <= of[name].has_store]
        if of[name].is_ours and others:
            best = max(others, key=lambda other: capacity(found[other]))
            ratio = capacity(runs) / max(capacity(found[best]), 1e-9)
            lines.append(f"- {name}: {ratio:.2f} x {best}'s capacity")
    return lines


def headed(task: Task) -> tuple[str, str]:
    """(The heading of its table, its name there); without the product's rules, one table with SLO and without."""
    level, wanted = LEVELS[task.level], task.wanted
    slo = ", SLO set" if wanted.has_slo else ", no SLO set"
    heading = (
        f"{Path(task.source).name}, ({task.level}) {level.title}: TTFT {wanted.ttft_s:g} s, TPOT {wanted.tpot_s:g} s"
    )
    return (heading + slo, task.contender) if level.has_rules else (heading, task.contender + WITH_SLO * wanted.has_slo)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("loads", nargs="+", help="trace files, or loads that are made up (see kvrelay trace)")
    parser.add_argument("--levels", nargs="+", choices=sorted(LEVELS), default=sorted(LEVELS))
    parser.add_argument("--contenders", nargs="+", choices=sorted(CONTENDERS), default=list(CONTENDERS))
    parser.add_argument("--targets", nargs="+", default=TARGETS, help="TTFT/TPOT in seconds")
    parser.add_argument(
        "--slo", nargs="+", choices=["no", "yes"], default=["no", "yes"], help="whether slo.* are set to the targets"
    )
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2])
    parser.add_argument("--workers", type=int, default=16)
    parser.add_argument("--split", type=int, default=8, help="prefill workers at level a; where searches begin")
    parser.add_argument("--splits", type=int, nargs="+", default=[], help="the ones tried, instead of a search")
    parser.add_argument("--requests", type=int, help="of each load; default: all of a trace")
    parser.add_argument("--start", type=float, default=8.0, help="requests per second that are tried first")
    parser.add_argument("--precision", type=float, default=0.03, help="of the capacity, relative")
    parser.add_argument("--profile", default=PROFILE, help="a file, or the name of a ready-made one")
    parser.add_argument("--set", nargs="+", default=[], help="settings of every contender, section.key=value")
    parser.add_argument("--processes", type=int, default=1)
    parser.add_argument("--json", type=Path, help="JSON lines: every simulation; those that are there are not repeated")
    options = parser.parse_args()
    terms = Terms(
        options.profile,
        options.requests,
        options.workers,
        options.split,
        tuple(options.splits),
        options.start,
        options.precision,
        tuple(options.set),
        options.json,
    )
    wanted = [
        Targets(*map(float, pair.split("/")), has_slo)
        for pair, has_slo in product(options.targets, sorted(one == "yes" for one in options.slo))
    ]
    tasks = [
        Task(source, level, one, contender, seed, terms)
        for source, level, one, contender, seed in product(
            options.loads, options.levels, wanted, options.contenders, options.seeds
        )
        if not one.has_slo or knows_targets(LEVELS[level], CONTENDERS[contender])
    ]
    with ExitStack() as stack:
        pool = stack.enter_context(ProcessPoolExecutor(options.processes)) if options.processes > 1 else None
        done = zip(tasks, (map if pool is None else pool.map)(measured, tasks), strict=True)
        for heading, group in groupby(done, key=lambda pair: headed(pair[0])[0]):
            found: dict[str, list[dict[str, Any]]] = {}
            for task, result in group:
                found.setdefault(headed(task)[1], []).append(result)
            print(f"\n## {heading}\n", table(found, terms.workers), "", *comparison(found), sep="\n", flush=True)


if __name__ == "__main__":
    main()
