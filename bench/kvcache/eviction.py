"""Hit ratio against capacity for each eviction policy, with Belady's optimum.

    python -m bench.kvcache.eviction --trace conversation_trace.jsonl --json eviction.json
    python -m bench.kvcache.eviction --requests 12000 --capacities 0.25,0.5,1,2,4,8   # a trace of our own

Replays a Mooncake trace (or a generated one) through one cache of blocks of 512 tokens, with the product's index and
policies. A hit ratio is prompt tokens found over prompt tokens asked for. Also shows what share of the gap between LRU
and the optimum each policy closes.
"""

import argparse
import json
import time
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
        rows.append({"capacity": capacity, "ratio": hits.ratio, "cpu_s": seconds})
    return {"policy": name, "requests": len(prompts), "rows": rows}


def share_closed(figures: dict[str, list[dict[str, float]]], name: str, index: int) -> float | None:
    """(policy - LRU) / (optimum - LRU); None where there is no gap to speak of."""
    lru, best = figures["lru"][index]["ratio"], figures[OPTIMUM][index]["ratio"]
    return (figures[name][index]["ratio"] - lru) / (best - lru) if best - lru > 1e-4 else None


def print_table(figures: dict[str, list[dict[str, float]]], capacities: list[float], title: str) -> None:
    print(f"\n{title}\n\n| policy | " + " | ".join(f"{capacity:g} Mtok" for capacity in capacities) + " |")
    print("|---|" + "---|" * len(capacities))
    for name, rows in figures.items():
        cells = []
        for index, row in enumerate(rows):
            share = share_closed(figures, name, index)
            gap = f" ({share:+.0%})" if share is not None and name not in ("lru", OPTIMUM) else ""
            cells.append(f"{100 * row['ratio']:.2f}{gap}")
        print(f"| {name} | " + " | ".join(cells) + " |")


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--trace", type=Path, help="a Mooncake .jsonl; default: a generated trace")
    parser.add_argument("--requests", type=int, default=1_000_000, help="most requests; of a generated trace: how many")
    parser.add_argument("--capacities", default=CAPACITIES, help="million tokens, with commas")
    parser.add_argument("--policies", default="", help="with commas; default: all")
    parser.add_argument("--seed", type=int, default=0, help="of times inside a bucket, and of a generated trace")
    parser.add_argument("--json", type=Path)
    return parser.parse_args()


def main() -> None:
    asked = parse_arguments()
    capacities = [float(text) for text in asked.capacities.split(",")]
    names = asked.policies.split(",") if asked.policies else list(POLICIES)
    names = list(dict.fromkeys(["lru", *names, OPTIMUM]))
    num_requests = asked.requests if asked.trace or asked.requests < 1_000_000 else 12_000
    results = [run_policy(name, capacities, asked.trace, num_requests, asked.seed) for name in names]
    figures = {result["policy"]: result["rows"] for result in results}
    source = asked.trace.name if asked.trace else f"generated trace, seed {asked.seed}"
    title = f"{source}, {results[0]['requests']} requests"
    print_table(figures, capacities, f"{title}: hit ratio, % (share of the gap from LRU to the optimum)")
    cpu_s = sum(row["cpu_s"] for rows in figures.values() for row in rows)
    print(f"\n{cpu_s:.0f} s of CPU")
    if asked.json:
        asked.json.write_text(json.dumps({"source": title, "seed": asked.seed, "policies": figures}, indent=1) + "\n")


if __name__ == "__main__":
    main()
