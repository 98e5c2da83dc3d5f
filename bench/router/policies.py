"""Every routing policy on one load, from light to past saturation, in virtual time: python -m bench.router.policies
TRACE

Prefill and decode workers with the speeds of a profile (a 70B model on eight GPUs each), 0.5 million tokens of KV cache
for each prefill worker, under a trace that is played faster and slower. All of it but the workers' speed is the
product: the routers, the policies, the schedulers, the caches (kvrelay simulate). For each policy and seed:

    capacity   the most requests per second of which 90 % have their first token within 5 s and then 100 ms per token at
    most,
               refused ones counted as missed; by bisection
    goodput    requests per second within both, at every load of `--loads` and at 1.25 times the policy's capacity

The others run as their projects do: no limit on their queues, no request refused. `joint` is the product's default;
`joint, SLO` is the product with targets set (slo.ttft_s, slo.tpot_s), so that it refuses requests that would miss.
Seeds move arrivals within the trace's rounded times, and the policies' draws. Below the table: each of ours against the
best of the others, and the load at which it compares worst.
"""

import argparse
import json
import statistics
import sys
import time
from collections.abc import Callable, Iterable
from concurrent.futures import ProcessPoolExecutor
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

from kvrelay import types
from kvrelay.cluster.commands.settings_flags import with_pairs
from kvrelay.cluster.commands.simulate import simulated
from kvrelay.cluster.profiles.profile import SimulatorProfile, find_profile
from kvrelay.cluster.simulator import worker as simulated_worker
from kvrelay.cluster.simulator.scenario import scenario_from
from kvrelay.cluster.workloads.choose import make_workload
from kvrelay.router.planning.types import SpeedCurve

PROFILE = "llama-3.1-70b-h100x8-bf16"
TTFT_S, TPOT_S, SHARE = 5.0, 0.1, 0.9
PREFILL_POOL_TOKENS, DECODE_POOL_TOKENS = 500_000, 1_500_000
LOADS = (2.0, 3.0, 4.0, 5.0, 6.0, 7.0, 8.0, 9.0, 10.0, 12.0)
OVERLOAD = 1.25
NO_LIMITS = {"router": {"max_inflight": 1_000_000, "max_queue_s": 3600.0}}
PROMISES = {"slo": {"ttft_s": TTFT_S, "tpot_s": TPOT_S}}

PEERS = "bench.router.peer_policies"
"""Policies of other projects, named by their paths."""

CONTENDERS: dict[str, dict[str, dict[str, Any]]] = {
    "round_robin": {"router": {"policy": "round_robin"}},
    "least_loaded": {"router": {"policy": "least_loaded"}},
    "power_of_two": {"router": {"policy": "power_of_two"}},
    "session": {"router": {"policy": "session"}},
    "prefix_affinity": {"router": {"policy": "prefix_affinity"}},
    "sglang": {"router": {"policy": f"{PEERS}.sglang:Sglang"}},
    "llm_d": {"router": {"policy": f"{PEERS}.llm_d:LlmD"}},
    "dynamo": {"router": {"policy": f"{PEERS}.dynamo:Dynamo"}},
    "dynamo, credit 4": {"router": {"policy": f"{PEERS}.dynamo:Dynamo", "policy_options": {"credit": 4.0}}},
    "mooncake": {"router": {"policy": f"{PEERS}.mooncake:Mooncake"}},
    "queue + 16 x prefill": {"router": {"policy": f"{PEERS}.queue_plus_prefill:QueuePlusPrefill"}},
    "joint": {"router": {"policy": "joint"}},
    "joint, SLO": {"router": {"policy": "joint"}, **PROMISES},
}
"""Name -> settings of the product."""
OURS = ("joint", "joint, SLO")


@dataclass(frozen=True, slots=True)
class Task:
    """One contender with one seed."""

    contender: str
    seed: int
    source: str
    requests: int | None
    profile: str
    prefill: int
    decode: int
    loads: tuple[float, ...]
    precision: float
    pairs: tuple[str, ...] = ()
    prefill_tokens_per_s: float | None = None

    def speeds(self) -> SimulatorProfile:
        """Of the workers."""
        profile = find_profile(self.profile)
        if self.prefill_tokens_per_s is None:
            return profile
        token_s = 1.0 / self.prefill_tokens_per_s
        flat, decode = SpeedCurve(0.0, 0.0, token_s, 0.0, 0.0), replace(profile.decode, token_s=token_s, pair_s=0.0)
        return profile.model_copy(update={"prefill": flat, "decode": decode})


@dataclass(slots=True)
class Found:
    """What a task came to. Rates are per second."""

    contender: str
    seed: int
    capacity: float
    goodput_at_overload: float
    runs: dict[float, dict[str, Any]] = field(default_factory=dict)  # by offered load

    @property
    def peak(self) -> float:
        return max(run["goodput_per_s"] for run in self.runs.values())


class Lab:
    """Runs one task's simulations, each load once."""

    def __init__(self, task: Task) -> None:
        self._task = task
        self._profile = task.speeds()
        own = CONTENDERS[task.contender]
        settings = {section: {**NO_LIMITS.get(section, {}), **own.get(section, {})} for section in {**NO_LIMITS, **own}}
        settings = with_pairs(settings, list(task.pairs))
        types.MAX_WAITING = 1_000_000  # no limits: see NO_LIMITS
        simulated_worker.RESERVE_TIMEOUT_S = 3600.0
        self._scenario = scenario_from(
            {
                "prefill": task.prefill,
                "decode": task.decode,
                "seed": task.seed,
                "ttft_s": TTFT_S,
                "tpot_s": TPOT_S,
                "prefill_pool_tokens": PREFILL_POOL_TOKENS,
                "decode_pool_tokens": DECODE_POOL_TOKENS,
                "settings": settings,
            }
        )
        self.runs: dict[float, dict[str, Any]] = {}

    def run(self, load: float) -> dict[str, Any]:
        """At so many requests per second."""
        load = round(load, 4)
        if load not in self.runs:
            task, began_s = self._task, time.perf_counter()
            entries = make_workload(task.source, rate_per_s=load, limit=task.requests, seed=task.seed)
            summary = self.runs[load] = simulated(self._scenario, self._profile, entries).summary()
            summary = f"{task.contender}, seed {task.seed}, {load:.2f}/s: {summary['kept_share']:.1%} kept"
            print(f"{summary} ({time.perf_counter() - began_s:.0f} s)", file=sys.stderr, flush=True)
        return self.runs[load]

    def holds(self, load: float) -> bool:
        return bool(self.run(load)["kept_share"] >= SHARE)

    def capacity(self, precision: float) -> float:
        """By bisection between loads that were run already; 0: not even the least of them holds."""
        low = max((load for load, run in self.runs.items() if run["kept_share"] >= SHARE), default=0.0)
        above = [load for load in self.runs if load > low]
        high = min(above) if above else low
        if low == 0.0:
            low = high / 4
            if not self.holds(low):
                return 0.0
        while not above:
            high *= 1.3
            if not self.holds(high):
                break
            low = high
        while high / low > 1 + precision:
            middle = (low * high) ** 0.5
            low, high = (middle, high) if self.holds(middle) else (low, middle)
        return low


def measured(task: Task) -> Found:
    lab = Lab(task)
    for load in task.loads:
        lab.run(load)
    capacity = lab.capacity(task.precision)
    overload = lab.run(OVERLOAD * capacity)["goodput_per_s"] if capacity else 0.0
    return Found(task.contender, task.seed, capacity, overload, lab.runs)


def table(found: Iterable[Found], loads: tuple[float, ...]) -> str:
    """Means over seeds, best capacity first; the spread of the capacity behind ±. In Markdown."""
    head = [
        "",
        "capacity",
        "hits",
        "TTFT p50 / p99 there, s",
        "at 1.25 x, of the peak",
        *(f"{load:g}/s" for load in loads),
    ]
    by_name = _by_name(found)
    order = sorted(by_name, key=lambda name: -_capacity(by_name[name]))
    rows = [head, ["---"] * len(head), *(_row(name, by_name[name], loads) for name in order)]
    return "\n".join(f"| {' | '.join(cells)} |" for cells in rows)


def _by_name(found: Iterable[Found]) -> dict[str, list[Found]]:
    by_name: dict[str, list[Found]] = {}
    for one in found:
        by_name.setdefault(one.contender, []).append(one)
    return by_name


def _capacity(runs: list[Found]) -> float:
    return statistics.fmean(run.capacity for run in runs)


def _goodput(runs: list[Found], load: float) -> float:
    return statistics.fmean(run.runs[load]["goodput_per_s"] for run in runs)


def _kept(runs: list[Found]) -> float:
    """Of the peak, at 1.25 times the capacity."""
    return statistics.fmean(run.goodput_at_overload / run.peak for run in runs)


def _row(name: str, runs: list[Found], loads: tuple[float, ...]) -> list[str]:
    capacities = [run.capacity for run in runs]
    spread = f" ± {(max(capacities) - min(capacities)) / 2:.2f}" if len(runs) > 1 else ""
    there = [run.runs[round(run.capacity, 4)] for run in runs if run.capacity]

    def mean(of: Callable[[dict[str, Any]], float]) -> float:
        return statistics.fmean(map(of, there)) if there else 0.0

    times = f"{mean(lambda one: one['ttft_s']['p50']):.2f} / {mean(lambda one: one['ttft_s']['p99']):.1f}"
    hits = f"{mean(lambda one: one['hit_ratio']):.1%}"
    goodput = [f"{_goodput(runs, load):.2f}" for load in loads]
    return [name, f"{_capacity(runs):.2f}{spread}", hits, times, f"{_kept(runs):.0%}", *goodput]


def comparison(found: Iterable[Found], loads: tuple[float, ...]) -> list[str]:
    """Each of ours against the best of the others, whichever that is for each figure."""
    by_name = _by_name(found)
    others = {name: runs for name, runs in by_name.items() if name not in OURS}
    return [_compared(name, by_name[name], others, loads) for name in OURS if name in by_name and others]


def _compared(name: str, runs: list[Found], others: dict[str, list[Found]], loads: tuple[float, ...]) -> str:
    best = max(others, key=lambda other: _capacity(others[other]))
    capacity = _capacity(runs) / max(_capacity(others[best]), 1e-9)
    summary = f"{name}: capacity {capacity:.2f} x {best}'s; at 1.25 x its capacity {_kept(runs):.0%} of its peak"
    ratios = {
        load: _goodput(runs, load) / max(max(_goodput(other, load) for other in others.values()), 1e-9)
        for load in loads
    }
    worst = min(ratios, key=lambda load: ratios[load], default=None)
    return (
        summary
        if worst is None
        else f"{summary}; goodput at least {ratios[worst]:.3f} x the best other's (at {worst:g}/s)"
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("load", help="a trace file, or a load that is made up (see kvrelay trace)")
    parser.add_argument("--profile", default=PROFILE, help="a file, or the name of a ready-made one")
    parser.add_argument("--prefill-tokens-per-s", type=float, help="instead of the profile's speed, without attention")
    parser.add_argument("--set", nargs="+", default=[], help="settings of every contender, section.key=value")
    parser.add_argument("--prefill", type=int, default=8)
    parser.add_argument("--decode", type=int, default=8)
    parser.add_argument("--requests", type=int, help="of the load; default: all of a trace")
    parser.add_argument("--loads", type=float, nargs="+", default=LOADS, help="requests per second")
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2])
    parser.add_argument("--policies", nargs="+", choices=sorted(CONTENDERS), default=list(CONTENDERS))
    parser.add_argument("--precision", type=float, default=0.03, help="of the capacity, relative")
    parser.add_argument("--processes", type=int, default=1)
    parser.add_argument("--quick", action="store_true", help="one seed, 1,500 requests, three loads, precision 0.1")
    parser.add_argument("--json", type=Path, help="also write everything there")
    options = parser.parse_args()
    if options.quick:
        options.seeds, options.requests = options.seeds[:1], options.requests or 1500
        options.loads = (3.0, 5.0, 8.0) if options.loads is LOADS else options.loads
        options.precision = 0.1
    loads = tuple(sorted(options.loads))
    tasks = [
        Task(
            name,
            seed,
            options.load,
            options.requests,
            options.profile,
            options.prefill,
            options.decode,
            loads,
            options.precision,
            tuple(options.set),
            options.prefill_tokens_per_s,
        )
        for name in options.policies
        for seed in options.seeds
    ]
    if options.processes > 1:
        with ProcessPoolExecutor(options.processes) as pool:
            found = list(pool.map(measured, tasks))
    else:
        found = [measured(task) for task in tasks]
    print(table(found, loads))
    print("", *comparison(found, loads), sep="\n")
    if options.json is not None:
        options.json.write_text(json.dumps([asdict(one) for one in found], indent=1) + "\n")


if __name__ == "__main__":
    main()
