"""The planner in the event simulator, over a day: against every static split and a clairvoyant plan, by goodput per worker-hour.

    PYTHONPATH=.imports:. python -m bench.planner --load made --out made.json [--seed 0] [--only planner,static,clairvoyant]
    PYTHONPATH=.imports:. python -m bench.planner --load azure --traces FOLDER --out azure.json

All run production's router, schedulers, pools and planner in virtual time (docs/simulator.md). Profiles are of whole machines; so that a
day has few enough requests to simulate, and still needs several workers, each step takes `--slow` times as long as the profile says.

planner      learns from its first day on; `planner, second day` is the same day after another one of the same kind.
static       each of `--splits`, all day; best: the most good requests per worker-hour, of those that keep 90 %.
clairvoyant  of each quarter of an hour the smallest of the static splits (tie: the most kept) that kept 90 % of what came in it,
             as the static runs show it; workers are begun `--start` ahead. It is run, and what it keeps is measured, like the others.
             Splits too small for the day are run in its quiet windows alone.

Runs are written to `--out` one by one, and not made again when they are there.
"""

import argparse
import json
import sys
import time
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np

from bench.figures import show
from bench.planner_loads import DAY_S, made_days, stretched_days
from kvrelay.cluster.simulate_command import simulated
from kvrelay.cluster.simulator.scenario import Scenario, scenario_from
from kvrelay.cluster.simulator.simulation import Simulation
from kvrelay.cluster.simulator_profile import SimulatorProfile, load_profile
from kvrelay.cluster.workloads.trace import TraceEntry
from kvrelay.router.planning.types import Counts, scaled

WINDOW_S = 900.0
KEPT = 0.9
FEWEST = 20  # requests in a window that its share is believed of


def slowed(profile: SimulatorProfile, factor: float) -> SimulatorProfile:
    """Each step takes so many times as long; memory and network are as they are."""
    curves = {"prefill": scaled(profile.prefill, factor), "decode": scaled(profile.decode, factor)}
    return profile.model_copy(update={**curves, "name": f"{profile.name}, {factor:g} times slower"})


@dataclass(frozen=True, slots=True)
class Outcome:
    """One run from `from_s` on. By window: requests that came, and those within both targets."""

    name: str
    requests: int
    good: int
    worker_hours: float
    hit_ratio: float
    changes: tuple[int, int]
    turns: tuple[int, int]
    most: tuple[int, int]
    took_s: float
    came: tuple[int, ...]
    kept: tuple[int, ...]

    @property
    def kept_share(self) -> float:
        return self.good / max(self.requests, 1)

    @property
    def good_per_worker_hour(self) -> float:
        return self.good / self.worker_hours

    def row(self) -> dict[str, Any]:
        return {
            "": self.name, "kept %": 100 * self.kept_share, "worst window %": 100 * min(self.shares(), default=0.0),
            "good / worker-hour": self.good_per_worker_hour, "worker-hours": self.worker_hours,
            "hits %": 100 * self.hit_ratio, "changes P, D": "{} {}".format(*self.changes), "turns P, D": "{} {}".format(*self.turns),
            "most P, D": "{} {}".format(*self.most), "CPU s": self.took_s,
        }  # fmt: skip

    def shares(self) -> list[float]:
        """Of windows with enough requests."""
        return [good / all_ for good, all_ in zip(self.kept, self.came, strict=True) if all_ >= FEWEST]


def outcome(name: str, sim: Simulation, from_s: float, until_s: float, took_s: float) -> Outcome:
    """Worker-hours are paid from a worker's beginning to its end, as far as they are within the span."""
    paid_s = sum(
        max(0.0, min(one.stopped_s, until_s) - max(one.paid_from_s, from_s))
        for one in sim.workers
        if one.paid_from_s < until_s
    )
    summary = sim.summary()
    tally = sim.tally
    counts = [[count for _, count in course_of(sim, role, from_s)] for role in ("prefill", "decode")]
    return Outcome(
        name, len(tally.arrival_s), tally.num_kept, paid_s / 3600, summary["hit_ratio"],
        changes=tuple(sum(a != b for a, b in pairwise(each)) for each in counts), turns=tuple(map(num_turns, counts)),
        most=tuple(max(each) for each in counts), took_s=took_s,
        came=_by_window(tally.arrival_s, from_s, until_s), kept=_by_window(tally.kept_at_s, from_s, until_s),
    )  # fmt: skip


def course_of(sim: Simulation, role: str, from_s: float = 0.0) -> list[tuple[float, int]]:
    """(time, count) of each change from then on, behind the count at that time."""
    first = getattr(sim.scenario, role)
    changes = [(at_s, wanted) for at_s, name, wanted in sim.fleet.changes if name == role]
    before = [first, *(wanted for at_s, wanted in changes if at_s < from_s)][-1]
    return [(from_s, before), *((at_s, wanted) for at_s, wanted in changes if at_s >= from_s)]


def num_turns(counts: Sequence[int]) -> int:
    """Changes that go the other way than the one before."""
    steps = [b - a for a, b in pairwise(counts) if a != b]
    return sum((a > 0) != (b > 0) for a, b in pairwise(steps))


def _by_window(times: Sequence[float], from_s: float, until_s: float) -> tuple[int, ...]:
    edges = np.arange(from_s, until_s + WINDOW_S / 2, WINDOW_S)
    return tuple(int(count) for count in np.histogram(np.asarray(times), edges)[0])


class Bench:
    """One load and one kind of worker; outcomes by name, kept in a file."""

    def __init__(self, arguments: argparse.Namespace) -> None:
        self.arguments = arguments
        self.profile = slowed(load_profile(arguments.profile), arguments.slow)
        self.outcomes: dict[str, Outcome] = {}
        if arguments.out.exists():
            found = json.loads(arguments.out.read_text())["runs"]
            self.outcomes = {one["name"]: Outcome(**{k: _frozen(v) for k, v in one.items()}) for one in found}
        self._days: dict[int, list[TraceEntry]] = {}

    def days(self, num_days: int) -> list[TraceEntry]:
        """The last of them is always the same one, shifted."""
        if num_days not in self._days:
            both = self._load(2)
            first = [one for one in both if one.arrival_s < DAY_S]
            last = [_shifted(one, -DAY_S) for one in both if one.arrival_s >= DAY_S]
            self._days = {1: last, 2: both}
            print(f"{len(first)} + {len(last)} requests", file=sys.stderr)
        return self._days[num_days]

    def _load(self, num_days: int) -> list[TraceEntry]:
        given = self.arguments
        if given.load == "made":
            return made_days(num_days, chat_per_s=given.chat_rate, agents_per_s=given.agent_rate, seed=given.seed)
        rates = [given.traces / f"AzureLLMInferenceTrace_{name}.csv" for name in ("conv", "code")]
        return stretched_days(
            given.traces / "conversation_trace.jsonl", rates, num_days=num_days, per_day=given.per_day, seed=given.seed
        )

    def scenario(self, counts: Counts, **fields: Any) -> Scenario:
        given = self.arguments
        settings = {
            "router": {"reserve_timeout_s": 2 * given.ttft, "max_inflight": 10_000},
            "serve": {"request_timeout_s": 600 * given.slow},
            **fields.pop("settings", {}),
        }
        return scenario_from(
            {
                "prefill": counts.prefill, "decode": counts.decode, "ttft_s": given.ttft, "tpot_s": given.tpot,
                "start_s": given.start, "drain_s": given.drain, "seed": given.seed, "report_s": given.report,
                "settings": settings, **fields,
            }
        )  # fmt: skip

    def run(self, name: str, scenario: Scenario, num_days: int = 1, *, most: int | None = None) -> Outcome:
        """`most`: only what comes in windows of at most so many requests."""
        if name not in self.outcomes:
            began_s = time.process_time()
            from_s = (num_days - 1) * DAY_S
            entries = self.days(num_days)
            if most is not None:
                came = Counter(int(one.arrival_s // WINDOW_S) for one in entries)
                entries = [one for one in entries if came[int(one.arrival_s // WINDOW_S)] <= most]
            sim = simulated(scenario.model_copy(update={"warm_up_s": from_s}), self.profile, entries)
            took_s = time.process_time() - began_s
            self.outcomes[name] = outcome(name, sim, from_s, num_days * DAY_S, took_s)
            self._write()
            print(json.dumps(self.outcomes[name].row()), file=sys.stderr, flush=True)
        return self.outcomes[name]

    def _write(self) -> None:
        runs = [{field: getattr(one, field) for field in one.__slots__} for one in self.outcomes.values()]
        given = {key: str(value) for key, value in vars(self.arguments).items() if key not in ("out", "only")}
        self.arguments.out.write_text(json.dumps({"arguments": given, "runs": runs}, indent=1) + "\n")

    # ---- ways to choose counts

    def planner(self, name: str, num_days: int, **rules: Any) -> Outcome:
        own = {
            "mode": "auto", "max_prefill": self.arguments.most, "max_decode": self.arguments.most,
            "horizon_s": self.arguments.start, "ttft_s": self.arguments.ttft, "tpot_s": self.arguments.tpot, **rules,
        }  # fmt: skip
        return self.run(name, self.scenario(Counts(1, 1), settings={"planner": own}), num_days)

    def statics(self) -> None:
        """Those asked for; `3+4:500`: only in windows of at most 500 requests, for the clairvoyant plan."""
        for one in filter(None, self.arguments.splits.split(",")):
            split, _, most = one.partition(":")
            counts = Counts(*map(int, split.split("+")))
            name = f"{counts.prefill} + {counts.decode}"
            if most:
                self.run(f"quiet {name}", self.scenario(counts), most=int(most))
            else:
                self.run(f"static {name}", self.scenario(counts))

    def tried(self) -> list[tuple[Counts, Outcome]]:
        """Every split that was run, all day or in quiet windows."""
        named = [(name.partition(" "), one) for name, one in self.outcomes.items()]
        return [
            (Counts(*map(int, split.split(" + "))), one)
            for (kind, _, split), one in named
            if kind in ("static", "quiet")
        ]

    def clairvoyant(self) -> Outcome:
        tried = self.tried()
        steps = [self._least(tried, window) for window in range(round(DAY_S / WINDOW_S))]
        plan: list[dict[str, Any]] = []
        for window, (before, now) in enumerate(pairwise(steps), start=1):
            for role in ("prefill", "decode"):
                old, new = getattr(before, role), getattr(now, role)
                at_s = window * WINDOW_S - (self.arguments.start if new > old else 0.0)
                if new != old:
                    plan.append({"at_s": at_s, role: new})
        return self.run("clairvoyant", self.scenario(steps[0], scale=sorted(plan, key=lambda one: one["at_s"])))

    def _least(self, tried: list[tuple[Counts, Outcome]], window: int) -> Counts:
        """The smallest split that kept the target in this window; none: the one that kept most."""
        shares = [(one.kept[window] / one.came[window], counts) for counts, one in tried if one.came[window]]
        kept = [(counts.total, -share, counts) for share, counts in shares if share >= KEPT]
        return min(kept)[2] if kept else max(shares)[1]


def _frozen(value: Any) -> Any:
    return tuple(value) if isinstance(value, list) else value


def _shifted(entry: TraceEntry, by_s: float) -> TraceEntry:
    return replace(entry, arrival_s=entry.arrival_s + by_s)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--load", choices=["made", "azure"], default="made")
    parser.add_argument(
        "--traces", type=Path, help="folder of conversation_trace.jsonl and the AzureLLMInferenceTrace files"
    )
    parser.add_argument("--profile", default="configs/profiles/llama-70b-a800x8-mooncake.json")
    parser.add_argument("--slow", type=float, default=10.0)
    parser.add_argument("--chat-rate", type=float, default=0.9, help="requests/s where the chat's curve is 1")
    parser.add_argument("--agent-rate", type=float, default=0.4)
    parser.add_argument("--per-day", type=int, default=20_000, help="requests of a day of the stretched trace")
    parser.add_argument("--ttft", type=float, default=25.0)
    parser.add_argument("--tpot", type=float, default=0.4)
    parser.add_argument("--start", type=float, default=180.0, help="until a worker serves")
    parser.add_argument("--drain", type=float, default=300.0)
    parser.add_argument("--report", type=float, default=0.5, help="at most so often a worker tells its load")
    parser.add_argument("--most", type=int, default=12, help="workers of a role")
    parser.add_argument(
        "--splits", default="", help="static ones: 5+6,4+6; 2+3:300: only in windows of at most 300 requests"
    )
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--only", default="planner,second,static,clairvoyant")
    parser.add_argument("--out", type=Path, required=True)
    arguments = parser.parse_args()
    bench, only = Bench(arguments), arguments.only.split(",")
    if "planner" in only:
        bench.planner("planner, first day", 1, period_s=0.0)
    if "second" in only:
        bench.planner("planner, second day", 2)
    if "static" in only:
        bench.statics()
    if "clairvoyant" in only:
        bench.clairvoyant()
    ordered: list[Outcome] = sorted(
        (one for one in bench.outcomes.values() if not one.name.startswith("quiet")),
        key=lambda one: -one.good_per_worker_hour,
    )
    show(f"{arguments.load}, {bench.profile.name}, seed {arguments.seed}", [one.row() for one in ordered])


if __name__ == "__main__":
    main()
