"""What upsets a planner, in the event simulator: a step of three times the load, a load that flaps, workers that crash meanwhile.

    PYTHONPATH=.imports:. python -m bench.planner_shocks [--only step,flap,crash] [--json FILE]

Prompts share nothing, arrivals are Poisson at the rate said, lengths log-normal and exponential. Back: the end of the last half minute in
which less than 90 % of the requests that came kept both targets, counted from the shock.
"""

import argparse
import math
import random
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

from bench.figures import show
from bench.planner_runs import course_of, num_turns
from kvrelay.cluster.autoscaling.worker_model import model_of
from kvrelay.cluster.commands.simulate import simulated
from kvrelay.cluster.profiles.profile import load_profile
from kvrelay.cluster.simulator.scenario import scenario_from
from kvrelay.cluster.simulator.simulation import Simulation
from kvrelay.cluster.workloads.trace import TraceEntry, with_own_blocks
from kvrelay.router.planning.damping import most_turns
from kvrelay.router.planning.split import needs
from kvrelay.router.planning.types import Counts, Limits, Target, Workload

LOOK_S = 30.0
SHAPE = Workload(1.0, 4000.0, 250.0, input_cv2=0.5)
TARGET = Target(5.0, 0.1)
LIMITS = Limits(max_prefill=24, max_decode=24)
BEFORE_S, AFTER_S = 1200.0, 1800.0
PERIODS_S = (200.0, 700.0)  # of a load that flaps: shorter than a hold, and a little longer than two


def entries_of(rate: Callable[[float], float], seconds: float, most: float, seed: int) -> list[TraceEntry]:
    """Poisson arrivals at a rate that changes, `most` at most."""
    draw, now_s, made = random.Random(f"shock:{seed}"), 0.0, []
    sigma = math.sqrt(math.log1p(SHAPE.input_cv2))
    while (now_s := now_s + draw.expovariate(most)) < seconds:
        size = SHAPE.input_tokens * math.exp(draw.gauss(-(sigma**2) / 2, sigma))
        output = draw.expovariate(1 / SHAPE.output_tokens)
        if draw.random() * most < rate(now_s):
            made.append(TraceEntry(now_s, max(2, round(size)), max(2, round(output))))
    return with_own_blocks(made)


class Shocks:
    """Simulations of one kind of worker under the planner."""

    def __init__(self, arguments: argparse.Namespace) -> None:
        self.profile, self.seed = load_profile(arguments.profile), arguments.seed
        self.rows: list[dict[str, Any]] = []

    def counts(self, rate: float) -> Counts:
        """What the model says that this rate needs."""
        load = SHAPE.at(rate)
        return needs(load, load, model_of(self.profile), TARGET, LIMITS).counts(LIMITS)

    def run(self, entries: list[TraceEntry], start: Counts, start_s: float, **fields: Any) -> Simulation:
        planner = {
            "mode": "auto", "max_prefill": LIMITS.max_prefill, "max_decode": LIMITS.max_decode,
            "horizon_s": start_s, "ttft_s": TARGET.ttft_s, "tpot_s": TARGET.tpot_s, "period_s": 0.0,
        }  # fmt: skip
        scenario = scenario_from(
            {
                "prefill": start.prefill, "decode": start.decode, "ttft_s": TARGET.ttft_s, "tpot_s": TARGET.tpot_s,
                "start_s": start_s, "seed": self.seed, "report_s": 0.25, **fields,
                "settings": {"planner": planner, "router": {"max_inflight": 10_000}},
            }
        )  # fmt: skip
        return simulated(scenario, self.profile, entries)

    def tell(self, name: str, sim: Simulation, **others: Any) -> None:
        summary = sim.summary()
        row = {
            "": name, "requests": summary["requests"], "kept %": 100 * summary["kept_share"],
            "not done": summary["requests"] - summary["outcomes"].get("done", 0), **others,
            "turns P, D": " ".join(str(num_turns([count for _, count in course_of(sim, role)])) for role in ("prefill", "decode")),
            "most P, D": " ".join(str(max(count for _, count in course_of(sim, role))) for role in ("prefill", "decode")),
            "worker-hours": summary["worker_hours"],
        }  # fmt: skip
        self.rows.append(row)
        print(row, file=sys.stderr, flush=True)

    # ---- shocks

    def step(self, low: float, factor: float) -> None:
        entries = entries_of(
            lambda now_s: low * (factor if now_s >= BEFORE_S else 1.0), BEFORE_S + AFTER_S, low * factor, self.seed
        )
        for start_s in (30.0, 60.0, 180.0):
            sim = self.run(entries, self.counts(low), start_s)
            self.tell(
                f"{low:g} -> {factor * low:g}/s, a start takes {start_s:g} s", sim,
                **{"back after s": back_s(sim, BEFORE_S), "kept before %": 100 * kept_between(sim, 0.0, BEFORE_S)},
            )  # fmt: skip

    def flap(self, low: float, high: float) -> None:
        for period_s in PERIODS_S:
            seconds = 3600.0
            entries = entries_of(square(low, high, period_s), seconds, high, self.seed)
            sim = self.run(entries, self.counts(low), 60.0)
            bound = most_turns(seconds, 300.0)
            self.tell(f"{low:g} and {high:g}/s in turn, {period_s:g} s for both", sim, **{"bound of turns": bound})

    def crash(self, low: float, factor: float) -> None:
        """A prefill and a decode worker die 30 s after a step, while others start; the planner's next look begins others for them."""
        entries = entries_of(
            lambda now_s: low * (factor if now_s >= BEFORE_S else 1.0), BEFORE_S + AFTER_S, low * factor, self.seed
        )
        for who in (["p0"], ["p0", "d0"]):
            faults = [{"kind": "crash", "at_s": BEFORE_S + 30.0, "who": one} for one in who]
            sim = self.run(entries, self.counts(low), 60.0, faults=faults)
            self.tell(
                f"{low:g} -> {factor * low:g}/s, {' and '.join(who)} crash 30 s later",
                sim,
                **{"back after s": back_s(sim, BEFORE_S)},
            )
        steady = entries_of(lambda _: low * factor, 2400.0, low * factor, self.seed)
        faults = [{"kind": "crash", "at_s": BEFORE_S, "who": "d0"}]
        sim = self.run(steady, self.counts(low * factor), 60.0, faults=faults)
        self.tell(f"{low * factor:g}/s, d0 crashes", sim, **{"back after s": back_s(sim, BEFORE_S)})


def square(low: float, high: float, period_s: float) -> Callable[[float], float]:
    """Half of each period high, then low."""
    return lambda now_s: high if now_s % period_s < period_s / 2 else low


def kept_between(sim: Simulation, begin_s: float, end_s: float) -> float:
    """Share of those that came then and kept both; 1.0 of nobody."""
    came, kept = (
        sum(begin_s <= at_s < end_s for at_s in times) for times in (sim.tally.arrival_s, sim.tally.kept_at_s)
    )
    return kept / came if came else 1.0


def back_s(sim: Simulation, shock_s: float) -> float:
    """Seconds after the shock until it is kept for good."""
    last = 0.0
    end_s = max(sim.tally.arrival_s)
    at_s = shock_s
    while at_s + LOOK_S <= end_s:
        if kept_between(sim, at_s, at_s + LOOK_S) < TARGET.share:
            last = at_s + LOOK_S - shock_s
        at_s += LOOK_S
    return last


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--profile", default="configs/profiles/llama-70b-a800x8-mooncake.json")
    parser.add_argument("--low", type=float, default=2.0, help="requests/s before a step")
    parser.add_argument("--factor", type=float, default=3.0)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--only", default="step,flap,crash")
    parser.add_argument("--json", type=Path)
    arguments = parser.parse_args()
    shocks = Shocks(arguments)
    for name in arguments.only.split(","):
        getattr(shocks, name)(arguments.low, arguments.factor if name != "flap" else arguments.low * arguments.factor)
    show(f"{arguments.profile}, 4000 + 250 tokens, TTFT 5 s, TPOT 100 ms, hold 300 s", shocks.rows, arguments.json)


if __name__ == "__main__":
    main()
