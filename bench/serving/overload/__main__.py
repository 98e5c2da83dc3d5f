"""What an overload does to a cluster and its clients: goodput, first tokens, refusals and memory at 3 and 10 times the
capacity.

    .venv/bin/python -m bench.serving.overload [--factors 3 10] [--rounds 3] [--duration 90] [--set …]

`kvrelay serve` with one prefill and one decode worker. In each round, first the capacity: what closed-loop clients get,
twice as many as the cluster runs at once, which is too few for a refusal. Then requests come at random times, `factor`
times as many, for `--duration` seconds; what has not ended `--drain` seconds later is unfinished. Goals: at least 90 %
of the capacity is served, a refusal (429) takes at most 50 ms, no request is unfinished, the ingress does not grow.

Columns: requests per second that were offered and served (those that ended while the load lasted, without its first
quarter), share of the capacity, accepted requests' TTFT, time until a 429 that came at once (within half a second),
429s that came later, requests unfinished and failed otherwise, seconds until the last one ended after the load, and
the ingress's resident memory before and after.
"""

import argparse
import asyncio
import contextlib
import json
import statistics
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from kvrelay.cluster.chaos import processes
from kvrelay.cluster.chaos.cluster import ServeCluster
from kvrelay.cluster.loadgen.cli import LoadPlan
from kvrelay.cluster.loadgen.client import LoadResult, LoadTarget, run_load
from kvrelay.cluster.loadgen.prompts import PromptSpec
from kvrelay.cluster.loadgen.stats import OK, UNFINISHED, LoadRecord, distribution

COUNTS = {"ingress": 1, "prefill": 1, "decode": 1}
CLIENTS = 32
AT_ONCE_S = 0.5
UNBOUNDED = 1 << 30


@dataclass(frozen=True, slots=True)
class Row:
    """One load. Rates are requests per second; times seconds, memory MiB."""

    factor: float
    offered_per_s: float
    served_per_s: float
    share: float
    ttft_s: dict[str, float]  # p50, p99, max
    refusal_s: dict[str, float]  # of 429s at once
    num_ok: int
    num_refused: int
    num_refused_later: int
    num_unfinished: int
    num_failed: int
    last_end_s: float
    rss_mib: tuple[float, float]


async def loaded(plan: LoadPlan, target: LoadTarget, limit_s: float) -> list[LoadRecord]:
    """The records of a run; requests that have not ended after `limit_s` are unfinished."""
    result = LoadResult()
    with contextlib.suppress(TimeoutError):
        async with asyncio.timeout(limit_s):
            await run_load(target, plan.jobs(), concurrency=plan.concurrency, duration_s=plan.duration_s, result=result)
    return result.records


def served_per_s(records: list[LoadRecord], duration_s: float) -> float:
    """Requests that ended well per second, between a quarter of the duration and its end."""
    begun_s = duration_s / 4
    return sum(one.outcome == OK and begun_s <= one.end_s < duration_s for one in records) / (duration_s - begun_s)


def row_of(records: list[LoadRecord], factor: float, capacity: float, duration_s: float, rss: tuple[float, ...]) -> Row:
    ok = [one for one in records if one.outcome == OK]
    refused = [one.e2e_s or 0.0 for one in records if one.outcome == "http 429"]
    at_once = distribution(time_s for time_s in refused if time_s < AT_ONCE_S)
    first = distribution(one.ttft_s for one in ok if one.ttft_s is not None)
    served, unfinished = served_per_s(records, duration_s), sum(one.outcome == UNFINISHED for one in records)
    return Row(
        factor,
        len(records) / duration_s,
        served,
        served / capacity,
        {"p50": first.p50, "p99": first.p99, "max": first.max},
        {"p50": at_once.p50, "p99": at_once.p99},
        len(ok),
        len(refused),
        len(refused) - at_once.count,
        unfinished,
        len(records) - len(ok) - len(refused) - unfinished,
        max((one.end_s for one in records), default=0.0) - duration_s,
        (rss[0], rss[1]),
    )


def table(rows: list[Row]) -> str:
    lines = [
        "| load | offered/s | served/s | of the capacity | TTFT p50 / p99 / longest, s | 429 p50 / p99, ms "
        "| 429 at once, later | unfinished, failed | last end after, s | ingress, MiB |",
        "|" + "---|" * 10,
    ]
    for row in rows:
        first, refusal = row.ttft_s, row.refusal_s
        lines.append(
            f"| {row.factor:g} x | {row.offered_per_s:.1f} | {row.served_per_s:.2f} | {row.share:.0%} "
            f"| {first['p50']:.1f} / {first['p99']:.1f} / {first['max']:.1f} "
            f"| {1e3 * refusal['p50']:.0f} / {1e3 * refusal['p99']:.0f} "
            f"| {row.num_refused - row.num_refused_later}, {row.num_refused_later} "
            f"| {row.num_unfinished}, {row.num_failed} | {row.last_end_s:.1f} "
            f"| {row.rss_mib[0]:.0f} to {row.rss_mib[1]:.0f} |"
        )
    return "\n".join(lines)


def ingress_mib(cluster: ServeCluster) -> float:
    return processes.memory(cluster.part("ingress")[0], "Rss")[0] / (1 << 20)


def measure(cluster: ServeCluster, args: argparse.Namespace) -> list[Row]:
    """A row for each load of each round, one after the other on the same cluster."""
    target = LoadTarget(cluster.url, cluster.model())

    def plan(seed: int, **arrivals: Any) -> LoadPlan:
        return LoadPlan(PromptSpec(args.input, seed=seed), args.output, UNBOUNDED, duration_s=args.duration, **arrivals)

    limit_s, rows = args.duration + args.drain, list[Row]()
    for number in range(args.rounds):
        seed = args.seed + number * (1 + len(args.factors))
        records = asyncio.run(loaded(plan(seed, concurrency=CLIENTS), target, limit_s))
        capacity = served_per_s(records, args.duration)
        print(f"capacity: {capacity:.2f} requests/s, {args.input} tokens in, {args.output} out", flush=True)
        for factor in args.factors:
            seed, before = seed + 1, ingress_mib(cluster)
            records = asyncio.run(loaded(plan(seed, rate=factor * capacity), target, limit_s))
            rows.append(row_of(records, factor, capacity, args.duration, (before, ingress_mib(cluster))))
            print(table(rows[-1:]).splitlines()[-1], flush=True)
    return rows


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="smollm2-135m-instruct")
    parser.add_argument("--factors", type=float, nargs="+", default=[3.0, 10.0])
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--duration", type=float, default=90.0, help="seconds of each load")
    parser.add_argument("--drain", type=float, default=60.0, help="seconds after which a request is unfinished")
    parser.add_argument("--input", type=int, default=300, help="prompt tokens")
    parser.add_argument("--output", type=int, default=50, help="output tokens")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--set", nargs="*", default=[], metavar="KEY=VALUE", help="settings of the cluster")
    parser.add_argument("--json", type=Path)
    args = parser.parse_args()
    settings = {"engine.kv_memory": "128MiB", **dict(one.split("=", 1) for one in args.set)}
    with ServeCluster(args.model, COUNTS, settings) as cluster:
        rows = measure(cluster, args)
    print(f"\n{table(rows)}\n")
    for factor in args.factors:
        shares = [row.share for row in rows if row.factor == factor]
        low, high = min(shares), max(shares)
        print(f"{factor:g} x: {statistics.median(shares):.0%} of the capacity served ({low:.0%} to {high:.0%})")
    if args.json:
        args.json.write_text(json.dumps([asdict(row) for row in rows], indent=1))


if __name__ == "__main__":
    main()
