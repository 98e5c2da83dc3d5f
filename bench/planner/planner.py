"""The planner in the event simulator, over days: against the best static split and a reactive autoscaler, by goodput
per worker-hour.

    python -m bench.planner.planner --out made.json [--load made,agents,azure] [--seeds 3] [--hours 8]
    python -m bench.planner.planner --load azure --traces FOLDER --out azure.json

made     conversations with two peaks and agents in the afternoon and at night, rushes, quarters of an hour that are off
agents   agents alone: siblings that come together, hours with next to none
azure    Mooncake's conversations at the rates of Azure's 2023 traces, their common hour stretched over the day

planner      on its first day: no season is known. `second`: also on the day after another one of the same kind;
             `history`: with a file of seven past days of the same kind (planner.history), made with other seeds
reactive     Ray Serve's rule of ongoing requests for each role: its defaults, and with the targets that would have been
             best on that day, of nine
static       searched for anew on each day (bench/planner/search.py): what it knows of it beforehand, the planner does
             not
aggregated   the planner, the rule (its default target, and the best of three) and the best static count of workers that
             all do both (`cluster.prefill: 0`), up to twice `--most`

The targets are set as SLOs, so that a miss is refused, unless `--slo no`. A day is 8 hours unless `--hours` says
otherwise: its slopes are three times a real day's, while starts, holds, rushes and bursts last as long as they do. Each
seed is a day of its own. Runs are written to `--out` one by one, and not made again when they are there.
"""

import argparse
from itertools import product, starmap
from pathlib import Path
from statistics import median
from typing import Any

from bench.figures import show
from bench.planner.reactive import QueueTargets
from bench.planner.runs import KINDS, Day, Outcome, Runs, Setting
from bench.planner.search import best_of, static_counts, static_splits
from kvrelay.cluster.autoscaling.worker_model import model_of
from kvrelay.cluster.commands.plan import planned
from kvrelay.router.planning.types import CountLimits, PlanningTarget, WorkerCounts

PREFILLS, DECODES = (1.0, 2.0, 4.0), (8.0, 16.0, 32.0)  # ongoing requests: targets that are tried
BOTH = (4.0, 6.0, 8.0)  # and of workers that do both
SPLIT, AGGREGATED = WorkerCounts(1, 1), WorkerCounts(0, 2)  # at the start


def guess_of(day: Day) -> WorkerCounts:
    """What `kvrelay plan` says of the day's requests."""
    own, kind = day.setting, day.setting.kind
    limits = CountLimits(max_prefill=own.most, max_decode=own.most, total=2 * own.most)
    *_, wanted = planned(day.entries(1), model_of(day.profile), PlanningTarget(kind.ttft_s, kind.tpot_s), limits)
    return wanted.counts(limits)


def figures_of(day: Day, ways: list[str]) -> dict[str, tuple[str, Outcome]]:
    """By way: what was chosen, and what came of it."""
    most, found = day.setting.most, {}
    if "planner" in ways:
        found["planner"] = "", day.planner("planner", 1, SPLIT)
    if "second" in ways:
        found["planner, second day"] = "", day.planner("planner, second day", 2, SPLIT, period_s=day.setting.day_s)
    if "history" in ways:
        found["planner, past days"] = "", day.with_history("planner, past days", SPLIT)
    if "reactive" in ways:
        found["reactive, defaults"] = "", day.reactive(QueueTargets(), SPLIT)
        tuned = {targets: day.reactive(targets, SPLIT) for targets in starmap(QueueTargets, product(PREFILLS, DECODES))}
        best = best_of(tuned)
        found["reactive, tuned"] = str(best), tuned[best]
    if "static" in ways:
        tried = static_splits(day.static, guess_of(day), most)
        counts = best_of(tried)
        found["static"] = f"{counts.prefill} + {counts.decode}", tried[counts]
    if "aggregated" in ways:
        found["aggregated, planner"] = "", day.planner("aggregated, planner", 1, AGGREGATED)
        if "history" in ways:
            found["aggregated, planner, past days"] = "", day.with_history("aggregated, planner, past days", AGGREGATED)
        found["aggregated, reactive, defaults"] = "", day.reactive(QueueTargets(), AGGREGATED)
        tuned = {targets: day.reactive(targets, AGGREGATED) for targets in (QueueTargets(decode=one) for one in BOTH)}
        best = best_of(tuned)
        found["aggregated, reactive, tuned"] = f"{best.decode:g} ongoing", tuned[best]
        tried = static_counts(day.static, guess_of(day).total, 2 * most)
        counts = best_of(tried)
        found["aggregated, static"] = f"{counts.decode}", tried[counts]
    return found


def row_of(load: str, seed: int, way: str, chosen: str, one: Outcome, all_ways: dict[str, Any]) -> dict[str, Any]:
    is_other = way != "static" and "static" in all_ways
    ratios = {"over static": one.per_hour / all_ways["static"][1].per_hour} if is_other else {}
    return {
        "": f"{load} {seed}",
        "way": f"{way} {chosen}".strip(),
        "requests": one.requests,
        "kept %": 100 * one.kept_share,
        "good / worker-hour": one.per_hour,
        "worker-hours": one.worker_hours,
        "hits %": 100 * one.hit_ratio,
        "turns P, D": "{} {}".format(*one.turns),
        "most P, D": "{} {}".format(*one.most),
        **ratios,
    }


def spread(values: list[float]) -> str:
    """Median, and range over the days."""
    return f"{median(values):.2f}" + (f" ({min(values):.2f} to {max(values):.2f})" if len(values) > 1 else "")


def summary_of(load: str, days: list[dict[str, tuple[str, Outcome]]]) -> list[dict[str, Any]]:
    """Of each way: medians over the days, of ratios day by day, too."""
    rows = []
    for way in days[0]:
        each = [found[way][1] for found in days]
        row = {
            "": load, "way": way, "days": len(days), "kept %": spread([100 * one.kept_share for one in each]),
            "good / worker-hour": spread([one.per_hour for one in each]),
            "worker-hours": spread([one.worker_hours for one in each]),
        }  # fmt: skip
        if "static" in days[0] and way != "static":
            row["over static"] = spread([found[way][1].per_hour / found["static"][1].per_hour for found in days])
        rows.append(row)
    return rows


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--load", default="made", help=f"of {', '.join(KINDS)}; several with commas")
    parser.add_argument("--seeds", type=int, default=3, help="days of each load")
    parser.add_argument("--hours", type=float, default=8.0, help="that a day lasts")
    parser.add_argument(
        "--traces", type=Path, help="folder of conversation_trace.jsonl and the AzureLLMInferenceTrace files"
    )
    parser.add_argument("--profile", default="llama-70b-a800x8-mooncake")
    parser.add_argument("--slow", type=float, default=10.0, help="times the profile's steps")
    parser.add_argument("--start", type=float, default=180.0, help="until a worker serves")
    parser.add_argument("--drain", type=float, default=300.0)
    parser.add_argument("--hold", type=float, default=300.0, help="planner.scale_down_delay_s")
    parser.add_argument(
        "--slo", choices=("yes", "no"), default="yes", help="yes: targets are set as slo.*, a miss is refused; all ways"
    )
    parser.add_argument("--most", type=int, default=12, help="workers of a role")
    parser.add_argument("--ways", default="planner,static", help="also: second, history, reactive, aggregated")
    parser.add_argument("--out", type=Path, required=True)
    given = parser.parse_args()
    runs, rows, summary = Runs(given.out), [], []
    for load in given.load.split(","):
        days = []
        for seed in range(given.seeds):
            sizes = given.profile, given.slow, given.hours, given.start, given.drain, given.most
            setting = Setting(load, seed, *sizes, given.traces, given.hold, given.slo == "yes")
            found = figures_of(Day(setting, runs), given.ways.split(","))
            rows += [row_of(load, seed, way, chosen, one, found) for way, (chosen, one) in found.items()]
            days.append(found)
        summary += summary_of(load, days)
    show("each day", rows)
    show("over the days: median, range", summary, given.out.with_suffix(".summary.json"))


if __name__ == "__main__":
    main()
