"""The planner's capacity model against the event simulator: the highest rate with 90 % of the requests within both targets.

    PYTHONPATH=.imports:. python bench/planner_model.py [--seconds 90] [--json FILE]

The simulator runs production's router, scheduler and pools in virtual time (docs/simulator.md); the model is a formula
(router/planning/capacity.py). Prompts share nothing, arrivals are Poisson, lengths log-normal and exponential. Each row is simulated at
some multiples of the model's rate; the rate at which 90 % are kept is read off between the last that keeps them and the next.
"""

import argparse
import json
import math
import random
from pathlib import Path

from rich.console import Console
from rich.table import Table

from kvrelay.cluster.autoscaling.worker_model import model_of
from kvrelay.cluster.commands.simulate import simulated
from kvrelay.cluster.profiles.profile import SimulatorProfile, load_profile
from kvrelay.cluster.simulator.scenario import Scenario
from kvrelay.cluster.workloads.trace import TraceEntry, with_own_blocks
from kvrelay.router.planning.capacity import aggregated_fits, decode_fits, prefill_fits, rate_of
from kvrelay.router.planning.split import best_aggregated, best_split
from kvrelay.router.planning.types import Target, Workload

FOLDER = Path("configs/profiles")
CASES = [  # profile, workers, input, output, ttft_s, tpot_s as a multiple of a bare step
    ("llama-3.1-8b-h100-bf16", 4, 500, 500, 2.0, 1.8),
    ("llama-3.1-8b-h100-bf16", 4, 4000, 250, 2.0, 1.3),
    ("llama-3.1-8b-h100-bf16", 4, 4000, 250, 2.0, 3.0),
    ("llama-70b-a800x8-mooncake", 8, 4000, 250, 5.0, 1.2),
    ("llama-70b-a800x8-mooncake", 8, 4000, 250, 5.0, 3.0),
    ("llama-70b-a800x8-mooncake", 8, 12000, 300, 5.0, 4.0),
]


def entries_of(load: Workload, count: int, seed: int) -> list[TraceEntry]:
    draw, now_s, made = random.Random(f"model:{seed}"), 0.0, []
    sigma = math.sqrt(math.log1p(load.input_cv2))
    for _ in range(count):
        now_s += draw.expovariate(load.rate)
        size = load.input_tokens * math.exp(draw.gauss(-(sigma**2) / 2, sigma))
        made.append(TraceEntry(now_s, max(2, round(size)), max(2, round(draw.expovariate(1 / load.output_tokens)))))
    return with_own_blocks(made)


def kept(profile: SimulatorProfile, prefill: int, decode: int, load: Workload, target: Target, seconds: float) -> float:
    """Share of the requests within both targets, of those that come after the first third of the time."""
    entries = entries_of(load, max(200, round(load.rate * seconds)), seed=0)
    scenario = Scenario(
        prefill=prefill, decode=decode, ttft_s=target.ttft_s, tpot_s=target.tpot_s,
        warm_up_s=entries[len(entries) // 3].arrival_s,
    )  # fmt: skip
    return float(simulated(scenario, profile, entries).summary()["kept_share"])


def simulated_rate(profile, prefill, decode, load, target, seconds, guess: float) -> float:
    """0: not even the smallest multiple is kept; the largest, where all are."""
    last, share = 0.0, 1.0
    for multiple in (0.6, 0.8, 1.0, 1.2, 1.45, 1.75, 2.1, 2.5):
        now = kept(profile, prefill, decode, load.at(multiple * guess), target, seconds)
        if now < target.share:
            return last + (multiple * guess - last) * (share - target.share) / max(share - now, 1e-9) if last else 0.0
        last, share = multiple * guess, now
    return last


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--seconds", type=float, default=90.0, help="of load, in each simulation")
    parser.add_argument("--json", type=Path)
    arguments = parser.parse_args()
    table = Table(title="requests/s with 90 % within both targets")
    for column in ("case", "workers", "model", "simulated", "model / simulated"):
        table.add_column(column, justify="left" if column == "case" else "right")
    told = []
    for name, workers, size, output, ttft_s, steps in CASES:
        profile = load_profile(FOLDER / f"{name}.json")
        model = model_of(profile)
        load = Workload(1.0, size, output, input_cv2=0.5)
        target = Target(ttft_s, steps * model.decode.decode_step_s(1, size), 0.9)
        counts, _, _ = best_split(load, model, target, workers)
        split = min(
            rate_of(prefill_fits, load, model, target, counts.prefill),
            rate_of(decode_fits, load, model, target, counts.decode),
        )
        rate, budget = best_aggregated(load, model, target, workers)
        other = profile.model_copy(update={"token_budget": budget, "max_running": min(profile.max_running, budget)})
        assert rate_of(aggregated_fits, load, model_of(other), target, workers) >= rate * 0.99
        ways = ((profile, counts.prefill, counts.decode, split), (other, 0, workers, rate))
        case = f"{name}, {size} + {output}, TTFT {ttft_s:g} s, TPOT {1000 * target.tpot_s:.1f} ms"
        for used, prefill, decode, guess in ways:
            found = simulated_rate(used, prefill, decode, load, target, arguments.seconds, guess)
            kind = f"{prefill} + {decode}" if prefill else f"{decode} aggregated, {budget} tokens"
            told.append({"case": case, "workers": kind, "model": guess, "simulated": found})
            table.add_row(case, kind, f"{guess:.2f}", f"{found:.2f}", f"{guess / found:.2f}" if found else "-")
            print(case, kind, f"{guess:.2f} {found:.2f}", flush=True)
    Console(width=150).print(table)
    if arguments.json:
        arguments.json.write_text(json.dumps(told, indent=1) + "\n")


if __name__ == "__main__":
    main()
