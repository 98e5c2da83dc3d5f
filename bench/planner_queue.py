"""The planner against static splits, a clairvoyant plan and simpler ways, in a simulation of queues only: quick, many requests.

    PYTHONPATH=.imports:. python -m bench.planner_queue [--profile FILE] [--seeds 3] [--json FILE]

bench/planner.py is the same comparison in the event simulator, with caches, network, production's router and schedulers.

The day is six hours long (`--hours`), so that all slopes are four times a real day's, and the load is simulated request by request
(bench/planner_day.py says what is left out). Two days are played and the second is measured, but for "first day".
"""

import argparse
import math
from pathlib import Path
from statistics import mean
from typing import Any

from bench.figures import show
from bench.planner_day import LOOK_S, Cluster, Day, Outcome
from kvrelay.cluster.autoscaling.policies import utilisation, wanted_replicas
from kvrelay.cluster.autoscaling.worker_model import model_of
from kvrelay.cluster.profiles.profile import load_profile
from kvrelay.router.planning.planner import Planner, Rules
from kvrelay.router.planning.split import needs
from kvrelay.router.planning.types import Counts, Limits, Target, Workload

LIMITS = Limits(max_prefill=40, max_decode=40, total=80)
STARTUP_S = 60.0
HOLD_S = 300.0
DYNAMO_S = 180.0  # ai-dynamo's default adjustment interval


def needed(rate: float, load: Workload, setting) -> Counts:
    one = load.at(rate)
    return needs(one, one, setting.model, setting.target, LIMITS).counts(LIMITS)


class Setting:
    """One day and the cluster that it meets."""

    def __init__(self, arguments: argparse.Namespace, seed: int) -> None:
        self.model = model_of(load_profile(arguments.profile))
        self.target = Target(arguments.ttft, arguments.tpot, 0.9)
        shape = Workload(arguments.rate, arguments.input, arguments.output, input_cv2=1.0)
        self.length_s = arguments.hours * 3600
        self.day = Day(self.length_s, shape, 2, seed)

    def cluster(self, start: Counts, startup_s: float = STARTUP_S) -> Cluster:
        return Cluster(self.model, self.target, self.day, start, startup_s=startup_s)

    def start(self) -> Counts:
        return needed(self.day.rate(0.0), self.day.shape, self)


def static(setting: Setting, counts: Counts) -> Outcome:
    return setting.cluster(counts).run(lambda seen, now: counts, measure_from=setting.length_s)


def clairvoyant(setting: Setting) -> Outcome:
    """Knows every minute's true rate: workers serve when they are needed, and stop when they are not for HOLD_S."""
    day, known = setting.day, {}

    def at(minute: int) -> Counts:
        if minute not in known:
            known[minute] = needed(day.rate(minute * 60.0), day.shape, setting)
        return known[minute]

    def decide(seen, now):
        ahead = [at(int(now // 60) + step) for step in range(int(HOLD_S // 60) + 1)]
        return Counts(max(each.prefill for each in ahead), max(each.decode for each in ahead))

    return setting.cluster(decide(None, 0.0), startup_s=0.0).run(decide, measure_from=setting.length_s)


def planner(setting: Setting, *, first_day: bool = False, period: bool = True) -> Outcome:
    rules = Rules(horizon_s=STARTUP_S, hold_s=HOLD_S, period_s=setting.length_s if period else 0.0)
    it = Planner(setting.model, setting.target, LIMITS, rules, setting.start())
    if first_day:
        setting.day = Day(setting.length_s, setting.day.shape, 1, setting.day.seed)
    return setting.cluster(it.counts).run(
        lambda seen, now: it.observe(seen).counts, measure_from=0.0 if first_day else setting.length_s
    )


def by_utilisation(setting: Setting) -> Outcome:
    """Ours before: each role by how busy its workers are, up after 5 s and down after 60 s of agreement, as Serve does."""
    cluster = setting.cluster(setting.start())
    since = {0: (0, 0.0), 1: (0, 0.0)}

    def busy(role: int) -> list[float]:
        if role == 0:
            tokens = (len(cluster.line) + cluster.busy / 2) * setting.day.shape.input_tokens / cluster.counts.prefill
            speed = setting.day.shape.input_tokens / mean(cluster.prompt_s)
            one = utilisation(used_blocks=0, total_blocks=1, running=cluster.busy, waiting=len(cluster.line),
                              max_running=setting.model.max_running * cluster.counts.prefill,
                              queued_tokens=round(tokens), tokens_per_s=speed)  # fmt: skip
            return [one] * cluster.counts.prefill
        batch = len(cluster.ends) / max(cluster.counts.decode, 1)
        used = batch * cluster.context / setting.model.pool_tokens
        return [max(used, batch / setting.model.max_running)] * cluster.counts.decode

    def decide(seen, now):
        counts = list(cluster.counts)
        for role, most in ((0, LIMITS.max_prefill), (1, LIMITS.max_decode)):
            wanted = min(max(wanted_replicas(busy(role), counts[role]), 1), most)
            direction = (wanted > counts[role]) - (wanted < counts[role])
            if direction != since[role][0]:
                since[role] = (direction, now)
            if direction and now - since[role][1] >= (5.0 if direction > 0 else 60.0):
                counts[role] = wanted
        return Counts(*counts)

    return cluster.run(decide, measure_from=setting.length_s)


def by_throughput(setting: Setting) -> Outcome:
    """Tokens of the last interval over what a worker computes: the formulas of Dynamo's SLA planner with its constant predictor.

    Source: ai-dynamo docs, planner design, v1.2: prefill = tokens/s over profiled tokens/s; decode = tokens/s over the profiled
    throughput at the ITL target. Its corrections are 1 here, for the profile is exact.
    """
    cluster, shape = setting.cluster(setting.start()), setting.day.shape
    prompt_s = mean(cluster.prompt_s)
    held = 1
    while held < setting.model.max_running and (
        setting.model.decode.decode_step_s(held + 1, round((held + 1) * cluster.context)) <= setting.target.tpot_s
    ):
        held += 1
    held = min(held, int(setting.model.pool_tokens / cluster.context))
    tokens_per_s = held / setting.model.decode.decode_step_s(held, round(held * cluster.context))
    seen_arrivals = [0]

    def decide(seen, now):
        seen_arrivals[0] += seen.arrivals
        if now % DYNAMO_S >= LOOK_S / 2:
            return cluster.counts
        rate, seen_arrivals[0] = seen_arrivals[0] / DYNAMO_S, 0
        return LIMITS.clipped(Counts(math.ceil(rate * prompt_s), math.ceil(rate * shape.output_tokens / tokens_per_s)))

    return cluster.run(decide, measure_from=setting.length_s)


def grid(make) -> list[tuple[Counts, Outcome]]:
    """One seed of every split around what the usual day and its rush need."""
    setting = make()[0]
    usual, rush = (needed(setting.day.shape.rate * factor, setting.day.shape, setting) for factor in (0.7, 1.6))
    return [
        (Counts(prefill, decode), static(setting, Counts(prefill, decode)))
        for prefill in range(max(1, usual.prefill - 2), rush.prefill + 2)
        for decode in range(max(1, usual.decode - 1), rush.decode + 2)
    ]


def best_static(make, tried, *, least_kept: float) -> tuple[Counts, list[Outcome]]:
    """The most goodput per worker-hour of those that keep so much."""
    fine = [(outcome.good_per_worker_hour, counts) for counts, outcome in tried if outcome.kept >= least_kept]
    counts = max(fine)[1]
    return counts, [static(setting, counts) for setting in make()]


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--profile", default="configs/profiles/llama-70b-a800x8-mooncake.json")
    parser.add_argument("--rate", type=float, default=8.0, help="at the top of the usual day")
    parser.add_argument("--input", type=float, default=4000.0)
    parser.add_argument("--output", type=float, default=300.0)
    parser.add_argument("--ttft", type=float, default=5.0)
    parser.add_argument("--tpot", type=float, default=0.1)
    parser.add_argument("--hours", type=float, default=6.0)
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--json", type=Path)
    arguments = parser.parse_args()

    def make() -> list[Setting]:
        return [Setting(arguments, seed) for seed in range(arguments.seeds)]

    rows: list[tuple[str, list[Outcome]]] = []
    tried = grid(make)
    counts, outcomes = best_static(make, tried, least_kept=0.9)
    rows.append((f"best static with 90 % kept: {counts.prefill} + {counts.decode}", outcomes))
    counts, outcomes = best_static(make, tried, least_kept=0.0)
    rows.append((f"best static at any price: {counts.prefill} + {counts.decode}", outcomes))
    rows.append(("clairvoyant", [clairvoyant(setting) for setting in make()]))
    rows.append(("planner", [planner(setting) for setting in make()]))
    rows.append(("planner, first day", [planner(setting, first_day=True) for setting in make()]))
    rows.append(("planner, no season", [planner(setting, period=False) for setting in make()]))
    rows.append(("by utilisation", [by_utilisation(setting) for setting in make()]))
    rows.append(("by throughput (Dynamo's formulas)", [by_throughput(setting) for setting in make()]))
    show(
        f"{arguments.profile}, top {arguments.rate:g}/s, {arguments.seeds} seeds",
        [row_of(name, outcomes) for name, outcomes in rows],
        arguments.json,
    )


def row_of(name: str, outcomes: list[Outcome]) -> dict[str, Any]:
    """Means over the seeds, but for the most workers."""
    counts = {
        f"{what} P, D": " ".join(f"{mean(getattr(each, what)[role] for each in outcomes):.0f}" for role in (0, 1))
        for what in ("changes", "turns")
    }
    return {
        "": name, "kept %": 100 * mean(each.kept for each in outcomes),
        "good / worker-hour": mean(each.good_per_worker_hour for each in outcomes),
        "worker-hours": mean(each.worker_s for each in outcomes) / 3600, "most": max(each.most for each in outcomes), **counts,
    }  # fmt: skip


if __name__ == "__main__":
    main()
