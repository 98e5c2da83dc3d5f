"""Forecasts and damping alone, over days, in a queue instead of the event simulator: seconds instead of minutes a day.

    python -m bench.planner.queue_model --load azure --traces FOLDER --seeds 3

Prompts wait for prefill workers first come, first served, each for as long as the profile's curve says, a share of
CACHED of it cached; DECODE decode workers are paid for, and limit nothing. The planner's forecast, its capacity model
and its damper choose the number of prefill workers; role changes, corrections by measured speeds and what is overdue
are left out. What a day is, and the ways, are those of bench/planner/planner.py.
"""

import argparse
import heapq
from bisect import bisect_left
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from typing import Any

from bench.figures import show
from bench.planner.planner import turned
from bench.planner.runs import KEPT, Day, Runs, Setting, past_times
from kvrelay.cluster.autoscaling.history import season_of
from kvrelay.cluster.autoscaling.worker_model import model_of
from kvrelay.router.planning.capacity import prefill_fits, rate_of
from kvrelay.router.planning.damping import Damper
from kvrelay.router.planning.demand import Demand
from kvrelay.router.planning.planner import RISE_SHARE, PlannerRules
from kvrelay.router.planning.season import Season
from kvrelay.router.planning.types import Interval, PlanningTarget, Workload

CACHED, DECODE, LOOK_S, MOST = 0.33, 3, 10.0, 12
Count = Callable[[int, float], int]
"""(arrivals of the last look, time) -> prefill workers from now on."""


@dataclass(frozen=True, slots=True)
class Queue:
    """A day's prompts as (arrival, seconds of a worker)."""

    prompts: list[tuple[float, float]]
    ttft_s: float
    start_s: float

    def served(self, first: int, count: Count, day_s: float) -> tuple[float, float]:
        """(share within the target, good requests per worker-hour)."""
        free, starting, waiting = [0.0] * first, list[float](), list[tuple[float, float]]()
        arrived = served = good = 0
        paid_s = now_s = 0.0
        while now_s < day_s:
            while starting and starting[0] <= now_s:
                heapq.heappush(free, starting.pop(0))
            paid_s += (len(free) + len(starting) + DECODE) * LOOK_S
            now_s, before = now_s + LOOK_S, arrived
            while arrived < len(self.prompts) and self.prompts[arrived][0] < now_s:
                waiting.append(self.prompts[arrived])
                arrived += 1
            while served < arrived and max(free[0], waiting[served][0]) < now_s:
                at_s, work_s = waiting[served]
                end_s = max(heapq.heappop(free), at_s) + work_s
                heapq.heappush(free, end_s)
                good += end_s - at_s <= self.ttft_s
                served += 1
            change = count(arrived - before, now_s) - len(free) - len(starting)
            starting += [now_s + self.start_s] * max(change, 0)
            for _ in range(max(-change, 0)):  # those that still start first, then those that have been idle longest
                starting.pop() if starting else heapq.heappop(free)
        return good / max(arrived, 1), good / (paid_s / 3600)


def figures_of(day: Day) -> dict[str, tuple[float, float]]:
    own, kind, model = day.setting, day.setting.kind, model_of(day.profile)
    target, tokens = PlanningTarget(kind.ttft_s, kind.tpot_s, KEPT), [one.input_tokens for one in day.entries]
    works = {
        size: model.prefill.prefill_s(size, round(CACHED * size), model.token_budget) for size in dict.fromkeys(tokens)
    }
    queue = Queue([(one.arrival_s, works[one.input_tokens]) for one in day.entries], kind.ttft_s, own.start_s)
    mean = sum(tokens) / len(tokens)
    cv2 = sum(size * size for size in tokens) / len(tokens) / mean**2 - 1.0
    load = Workload(1.0, mean, 300.0, CACHED, cv2, burstiness=1.5)
    rates = [rate_of(prefill_fits, load, model, target, workers) for workers in range(1, MOST)]

    def planner(season: Season, period_s: float) -> tuple[float, float]:
        rules = PlannerRules(horizon_s=own.start_s)
        demand = Demand(own.start_s, period_s, season=season)
        damper = Damper(1, rules.hold_s, RISE_SHARE * own.start_s)

        def count(arrivals: int, now_s: float) -> int:
            seen = Interval(now_s - LOOK_S, now_s, arrivals, round(mean * arrivals), ended=arrivals, output_tokens=1)
            demand.observe(seen)
            rate = demand.expected(KEPT)
            need, low = (1 + bisect_left(rates, one) for one in (rate, rate * (1.0 + rules.margin)))
            return damper.step(need, low, now_s, most=MOST)

        return queue.served(1, count, own.day_s)

    past_s = past_times(own)
    statics = {number: queue.served(number, lambda *_, n=number: n, own.day_s) for number in range(2, MOST + 1)}
    best = max(statics, key=lambda number: (statics[number][0] >= KEPT, statics[number][1]))
    return {
        "planner": planner(Season(), 0.0),
        "planner, history": planner(season_of(past_s, own.day_s), own.day_s),
        "planner, misled": planner(season_of(turned(past_s, own.day_s), own.day_s), own.day_s),
        f"static {best} + {DECODE}": statics[best],
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--load", default="azure")
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--traces", type=Path)
    given = parser.parse_args()
    rows, ratios = list[dict[str, Any]](), dict[str, list[float]]()
    for seed in range(given.seeds):
        setting = Setting(given.load, seed, "llama-70b-a800x8-mooncake", 10.0, 8.0, 180.0, 300.0, MOST, given.traces)
        found = figures_of(Day(setting, Runs(Path("none"))))
        *_, static = found.values()
        for way, (kept, per_hour) in found.items():
            row = {"": f"{given.load} {seed}", "way": way, "kept %": 100 * kept, "good / worker-hour": per_hour}
            rows.append(row | {"over static": per_hour / static[1]})
            ratios.setdefault(way.partition(" ")[0] if "static" in way else way, []).append(per_hour / static[1])
    show("each day", rows)
    show("over static", [{"way": way, "median": median(each), "least": min(each)} for way, each in ratios.items()])


if __name__ == "__main__":
    main()
