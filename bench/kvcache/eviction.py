"""Hit ratio against capacity for each eviction policy, with Belady's optimum.

    python -m bench.kvcache.eviction --trace conversation_trace.jsonl --json eviction.json --plot eviction.png
    python -m bench.kvcache.eviction --requests 12000 --capacities 0.25,0.5,1,2,4,8   # a trace of our own

Replays a Mooncake trace (or a generated one) through one cache of blocks of 512 tokens, with the product's index and
policies. A hit ratio is prompt tokens found over prompt tokens asked for. Also shows what share of the gap between LRU
and the optimum each policy closes, and the same for the second half of the requests alone, for policies that learn.
"""

import argparse
import json
import time
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path
from typing import Any

from bench.kvcache.cache_replay import BLOCK_TOKENS, Belady, load_prompts, replay
from kvrelay.kvcache.eviction.policies import POLICIES, make_policy
from kvrelay.kvcache.index.tier_index import TierIndex

CAPACITIES = "0.5,1,2,4,8,16,24,30"
OPTIMUM = "belady"


def run_policy(name: str, capacities: list[float], trace: Path | None, num_requests: int, seed: int) -> dict[str, Any]:
    """One policy at every capacity (Mtok)."""
    prompts = load_prompts(trace, num_requests=num_requests, seed=seed)
    rows = []
    for capacity in capacities:
        num_blocks = max(1, int(capacity * 1e6) // BLOCK_TOKENS)
        policy = Belady(prompts) if name == OPTIMUM else make_policy(name, num_blocks)
        start = time.process_time()
        hits = replay(prompts, TierIndex(num_blocks, policy))
        seconds = time.process_time() - start
        rows.append({"capacity": capacity, "ratio": hits.ratio, "late_ratio": hits.late_ratio, "cpu_s": seconds})
    return {"policy": name, "requests": len(prompts), "rows": rows}


def share_closed(figures: dict[str, list[dict[str, float]]], name: str, index: int, key: str) -> float | None:
    """(policy - LRU) / (optimum - LRU); None where there is no gap to speak of."""
    lru, best = figures["lru"][index][key], figures[OPTIMUM][index][key]
    return (figures[name][index][key] - lru) / (best - lru) if best - lru > 1e-4 else None


def print_table(figures: dict[str, list[dict[str, float]]], capacities: list[float], key: str, title: str) -> None:
    print(f"\n{title}\n\n| policy | " + " | ".join(f"{capacity:g} Mtok" for capacity in capacities) + " |")
    print("|---|" + "---|" * len(capacities))
    for name, rows in figures.items():
        cells = []
        for index, row in enumerate(rows):
            share = share_closed(figures, name, index, key)
            gap = f" ({share:+.0%})" if share is not None and name not in ("lru", OPTIMUM) else ""
            cells.append(f"{100 * row[key]:.2f}{gap}")
        print(f"| {name} | " + " | ".join(cells) + " |")


def plot(figures: dict[str, list[dict[str, float]]], path: Path, title: str) -> None:
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    figure, axes = pyplot.subplots(figsize=(9, 5.5))
    for name, rows in figures.items():
        style = {"lru": "k-o", OPTIMUM: "k--s"}.get(name, "-o")
        axes.plot([row["capacity"] for row in rows], [100 * row["ratio"] for row in rows], style, label=name, ms=4)
    axes.set_xscale("log", base=2)
    axes.set_xticks([row["capacity"] for row in figures["lru"]], [f"{row['capacity']:g}" for row in figures["lru"]])
    axes.set_xlabel("capacity, million tokens")
    axes.set_ylabel("prompt tokens found, %")
    axes.set_title(title)
    axes.grid(alpha=0.3)
    axes.legend()
    figure.tight_layout()
    figure.savefig(path, dpi=120)


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--trace", type=Path, help="a Mooncake .jsonl; default: a generated trace")
    parser.add_argument("--requests", type=int, default=1_000_000, help="most requests; of a generated trace: how many")
    parser.add_argument("--capacities", default=CAPACITIES, help="million tokens, with commas")
    parser.add_argument("--policies", default="", help="with commas; default: all")
    parser.add_argument("--seed", type=int, default=0, help="of times inside a bucket, and of a generated trace")
    parser.add_argument("--processes", type=int, default=1)
    parser.add_argument("--json", type=Path)
    parser.add_argument("--plot", type=Path)
    return parser.parse_args()


def main() -> None:
    asked = parse_arguments()
    capacities = [float(text) for text in asked.capacities.split(",")]
    names = asked.policies.split(",") if asked.policies else list(POLICIES)
    names = list(dict.fromkeys(["lru", *names, OPTIMUM]))
    num_requests = asked.requests if asked.trace or asked.requests < 1_000_000 else 12_000
    with ProcessPoolExecutor(asked.processes) as pool:
        jobs = [pool.submit(run_policy, name, capacities, asked.trace, num_requests, asked.seed) for name in names]
        results = [job.result() for job in jobs]
    figures = {result["policy"]: result["rows"] for result in results}
    source = asked.trace.name if asked.trace else f"generated trace, seed {asked.seed}"
    title = f"{source}, {results[0]['requests']} requests"
    print_table(figures, capacities, "ratio", f"{title}: hit ratio, % (share of the gap from LRU to the optimum)")
    print_table(figures, capacities, "late_ratio", "the second half of the requests alone")
    cpu_s = sum(row["cpu_s"] for rows in figures.values() for row in rows)
    print(f"\n{cpu_s:.0f} s of CPU")
    if asked.json:
        asked.json.write_text(json.dumps({"source": title, "seed": asked.seed, "policies": figures}, indent=1) + "\n")
    if asked.plot:
        plot(figures, asked.plot, title)


if __name__ == "__main__":
    main()
