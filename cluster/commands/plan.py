"""`kvrelay plan`: how many prefill and decode workers a workload needs, or whether aggregated workers serve it
better.
"""

import json
from collections import Counter, OrderedDict
from collections.abc import Sequence
from dataclasses import asdict
from itertools import pairwise, takewhile
from typing import Annotated, Any

import typer
from rich.console import Console
from rich.markup import escape
from rich.table import Table

from kvrelay.cluster.autoscaling.worker_model import DEFAULT_TPOT_S, DEFAULT_TTFT_S, model_of
from kvrelay.cluster.profiles.profile import SimulatorProfile, find_profile
from kvrelay.cluster.workloads.choose import GENERATORS, make_workload
from kvrelay.cluster.workloads.trace import TraceEntry
from kvrelay.errors import ConfigError
from kvrelay.router.planning.capacity import batch_of, hopeless_share, prompts_of
from kvrelay.router.planning.split import Comparison, Needs, compared, needed_aggregated, needs
from kvrelay.router.planning.types import CountLimits, PlanningTarget, WorkerCounts, WorkerModel, Workload

DEFAULT_MOST = 256
GENERATED = 5000  # requests of a generator by default
WINDOW_S = 60.0
BUSY_SHARE = 0.95  # quantile of the windows' rates that is planned for
FEWEST_WINDOWS = 4
MOST_ROUNDS = 6  # prefill workers and the hits of their pools depend on each other


def command(
    profile: Annotated[
        str, typer.Argument(help="a worker's speed: a ready-made profile's name, or a file of kvrelay profile --fit")
    ],
    source: Annotated[
        str | None,
        typer.Argument(help=f"a trace file (.jsonl, .csv), or one of {', '.join(GENERATORS)}; else say --rate …"),
    ] = None,
    rate: Annotated[float | None, typer.Option(help="requests per second; a trace is scaled to this mean rate")] = None,
    input_tokens: Annotated[float | None, typer.Option("--input", min=1, help="mean prompt length, tokens")] = None,
    output_tokens: Annotated[float | None, typer.Option("--output", min=1, help="mean output length, tokens")] = None,
    cached: Annotated[float, typer.Option(min=0, max=0.99, help="share of prompt tokens found in prefix caches")] = 0.0,
    ttft: Annotated[float, typer.Option(min=0.001, help="TTFT target, s")] = DEFAULT_TTFT_S,
    tpot: Annotated[float, typer.Option(min=0.0001, help="TPOT target, s")] = DEFAULT_TPOT_S,
    share: Annotated[
        float, typer.Option(min=0.5, max=0.999, help="share of requests that must meet both targets")
    ] = 0.9,
    workers: Annotated[int | None, typer.Option(min=2, help="compare splits of this many workers")] = None,
    most: Annotated[int, typer.Option(min=1, help="most workers of each role")] = DEFAULT_MOST,
    requests: Annotated[
        int | None, typer.Option(min=1, help="most requests of the trace; default: all, of a generator 5000")
    ] = None,
    seed: Annotated[int, typer.Option(help="seed of the generator")] = 0,
    as_json: Annotated[bool, typer.Option("--json", help="for programs")] = False,
) -> None:
    """Compute how many prefill and decode workers a workload needs, and compare with aggregated workers."""
    speeds = find_profile(profile)
    model, target = model_of(speeds), PlanningTarget(ttft, tpot, share)
    limits = CountLimits(max_prefill=most, max_decode=most, total=2 * most)
    notes: list[str] = []
    if source is None:
        load = _stated(rate, input_tokens, output_tokens, cached)
        wanted = needs(load, load, model, target, limits)
    else:
        if input_tokens or output_tokens or cached:
            raise ConfigError(
                "--input, --output and --cached describe a workload without a trace; this trace has its own"
            )
        limit = requests or (GENERATED if source in GENERATORS else None)
        entries = make_workload(source, rate_per_s=rate, limit=limit, seed=seed)
        cache_tokens, load, wanted = planned(entries, model, target, limits)
        mean_rate = len(entries) / ((entries[-1].arrival_s - entries[0].arrival_s) or 1.0)
        notes.append(
            f"{len(entries):,} requests, {mean_rate:.3g}/s on average; planned for the 95th percentile of the minutes' "
            f"rates; hits of an LRU cache of {cache_tokens:,} tokens"
        )
    report = _report(speeds, model, load, target, limits, wanted, workers)
    if as_json:
        typer.echo(json.dumps(report | {"notes": notes}, indent=1))
    else:
        _show(Console(), report, notes)


def _stated(rate: float | None, input_tokens: float | None, output_tokens: float | None, cached: float) -> Workload:
    if rate is None or rate <= 0 or input_tokens is None or output_tokens is None:
        raise ConfigError("describe the workload: a trace or a generator, or --rate, --input and --output")
    return Workload(rate, input_tokens, output_tokens, cached)


def _report(
    speeds: SimulatorProfile,
    model: WorkerModel,
    load: Workload,
    target: PlanningTarget,
    limits: CountLimits,
    wanted: Needs,
    workers: int | None,
) -> dict[str, Any]:
    """Everything that is printed, as plain data."""
    most = limits.max_prefill
    aggregated = needed_aggregated(load, model, target, most)
    counts = WorkerCounts(wanted.prefill, wanted.decode) if wanted.prefill and wanted.decode else None
    total = workers or max(counts.total if counts else 2, 2)
    found = compared(load, model, target, total)
    model = model.crowded(counts.total if counts else total)
    prompts = prompts_of(load, model.prefill, model.token_budget)
    batch = batch_of(load, model, target, counts.decode) if counts else None
    return {
        "profile": speeds.name,
        "load": asdict(load),
        "target": asdict(target),
        "prefill": wanted.prefill,
        "decode": wanted.decode,
        "aggregated": aggregated,
        "prompt_s": prompts.mean_s,
        "hopeless_share": hopeless_share(prompts.alone_s, target.ttft_s),
        "batch": asdict(batch) if batch else None,
        "kv_bytes_per_s": load.rate * load.input_tokens * model.kv_bytes_per_token,
        "cost_per_hour": {
            "split": counts.total * speeds.cost_per_hour if counts else None,
            "aggregated": aggregated * speeds.cost_per_hour if aggregated else None,
        },
        "comparison": asdict(found) | {"split": found.split._asdict(), "disaggregate": found.disaggregate},
        "verdict": _verdict(counts, aggregated, found),
    }


def _verdict(counts: WorkerCounts | None, aggregated: int | None, found: Comparison) -> str:
    """One line: the option with fewer workers wins; with equal counts, the one with more throughput."""
    if counts is None and aggregated is None:
        return "no number of workers up to --most meets the targets: relax them, or raise --most"
    if counts is None:
        return f"do not disaggregate: {aggregated} aggregated workers meet the targets, no split does"
    split, together = f"{counts.prefill} prefill + {counts.decode} decode workers", f"{aggregated} aggregated"
    if aggregated is None:
        return f"disaggregate: {split}; no number of aggregated workers meets the targets"
    if aggregated < counts.total:
        return f"do not disaggregate: {together} serve this load; a split needs {split}"
    if aggregated > counts.total:
        return f"disaggregate: {split}; aggregated, it needs {together}"
    if found.disaggregate:
        return f"disaggregate: {split} serve {found.gain:.2f} times the load of {together}"
    return f"do not disaggregate: {together} serve {1 / found.gain:.2f} times the load of {split}"


def _show(console: Console, report: dict[str, Any], notes: list[str]) -> None:
    load, target, found = report["load"], report["target"], report["comparison"]
    table = Table(title=f"plan for {escape(report['profile'])}", title_justify="left", show_header=False)
    table.add_row(
        "load", f"{load['rate']:.3g} requests/s of {load['input_tokens']:,.0f} + {load['output_tokens']:,.0f} tokens"
    )
    table.add_row("", f"{load['cached_share']:.0%} of prompts cached, burstiness {load['burstiness']:.2g} (Poisson: 1)")
    table.add_row(
        "targets", f"TTFT {target['ttft_s']:g} s, TPOT {target['tpot_s']:g} s for {target['share']:.0%} of the requests"
    )
    table.add_row(
        "prefill", f"{_number(report['prefill'])}: a prompt alone takes {report['prompt_s']:.3g} s on average"
    )
    if report["hopeless_share"]:
        table.add_row("", f"{report['hopeless_share']:.0%} of the prompts miss the TTFT target even on an idle worker")
    if batch := report["batch"]:
        about = f"{batch['sequences']:.1f} sequences each, {batch['peak']:.1f} at peaks "
        about += f"with {1000 * batch['tpot_s']:.1f} ms per token"
        table.add_row("decode", f"{_number(report['decode'])}: {about}")
    else:
        table.add_row("decode", _number(report["decode"]))
    table.add_row("transfers", f"{report['kv_bytes_per_s'] / 1e9:.3g} GB/s of KV")
    table.add_row("aggregated", f"{_number(report['aggregated'])} workers")
    table.add_row(
        f"with {found['workers']}",
        f"{found['split']['prefill']} + {found['split']['decode']} serve {found['split_rate']:.3g} requests/s (prefill "
        f"{found['prefill_rate']:.3g}, decode {found['decode_rate']:.3g}); aggregated, with "
        f"{found['aggregated_budget']} tokens "
        f"in a step, {found['aggregated_rate']:.3g}",
    )
    console.print(table)
    for note in notes:
        console.print(f"[dim]{escape(note)}[/dim]", highlight=False)
    console.print(escape(report["verdict"]), highlight=False, soft_wrap=True)


def _number(count: int | None) -> str:
    return "no number meets the targets" if count is None else str(count)


# ---- the workload of a trace. Hits are those of one LRU cache as large as all prefill workers' pools together, as if
# the router always found the worker with the prefix.


def busy_rate(entries: Sequence[TraceEntry]) -> float:
    """Requests per second in the window at the 95th percentile; the mean where the trace has fewer than
    FEWEST_WINDOWS.
    """
    span_s = entries[-1].arrival_s - entries[0].arrival_s
    if span_s <= 0:
        return float(len(entries))
    num_windows = int(span_s // WINDOW_S)
    if num_windows < FEWEST_WINDOWS:
        return len(entries) / span_s
    ordered = sorted(_window_counts(entries, WINDOW_S)[:num_windows])
    return ordered[min(int(BUSY_SHARE * num_windows), num_windows - 1)] / WINDOW_S


def _window_counts(entries: Sequence[TraceEntry], window_s: float) -> list[int]:
    counts = Counter(int((entry.arrival_s - entries[0].arrival_s) // window_s) for entry in entries)
    return [counts[index] for index in range(max(counts) + 1)]


def burstiness(entries: Sequence[TraceEntry], window_s: float) -> float:
    """Variance over mean of the counts in windows, from differences of neighbours, so that a slow change of the rate is
    no burst.
    """
    row = _window_counts(entries, window_s)
    if len(row) < 2:
        return 1.0
    swings = sum((b - a) ** 2 / 2.0 for a, b in pairwise(row)) / (len(row) - 1)
    return min(max(swings / (sum(row) / len(row)), 0.25), 32.0)


def cached_tokens(entries: Sequence[TraceEntry], cache_tokens: int) -> list[int]:
    """Tokens of each prompt that an LRU cache of `cache_tokens` holds when the prompt arrives."""
    cache: OrderedDict[int, int] = OrderedDict()
    held, hits = 0, []
    for entry in entries:
        depth = sum(1 for _ in takewhile(cache.__contains__, entry.hash_ids))
        hits.append(min(depth * entry.block_tokens, entry.input_tokens - 1))
        for block in reversed(entry.hash_ids):  # a prefix is evicted after its continuations
            if block not in cache:
                held += entry.block_tokens
            cache[block] = entry.block_tokens
            cache.move_to_end(block)
        while held > cache_tokens and cache:
            held -= cache.popitem(last=False)[1]
    return hits


def measured(entries: Sequence[TraceEntry], cache_tokens: int, target: PlanningTarget) -> Workload:
    """The workload of at least one entry, in order of arrival, with a cache of that size."""
    import numpy as np  # here: `kvrelay plan --help` stays fast

    hits = cached_tokens(entries, cache_tokens)
    inputs = np.array([entry.input_tokens for entry in entries])
    outputs = np.array([max(entry.output_tokens, 1) for entry in entries])
    computed = inputs - hits
    return Workload(
        rate=busy_rate(entries),
        input_tokens=float(inputs.mean()),
        output_tokens=float(outputs.mean()),
        cached_share=sum(hits) / int(inputs.sum()),
        input_cv2=float(computed.var() / computed.mean() ** 2),
        output_cv2=float(outputs.var() / outputs.mean() ** 2),
        burstiness=burstiness(entries, max(target.ttft_s, 1.0)),
    )


def planned(
    entries: Sequence[TraceEntry], model: WorkerModel, target: PlanningTarget, limits: CountLimits
) -> tuple[int, Workload, Needs]:
    """The tokens of the prefill workers' pools, the workload with so large a cache, and the counts that it needs: a
    fixed point, since the hits depend on the number of pools.
    """
    workers, tried = 1, set()
    while True:
        cache_tokens = workers * model.pool_tokens
        load = measured(entries, cache_tokens, target)
        wanted = needs(load, load, model, target, limits)
        tried.add(workers)
        prefill = wanted.prefill if wanted.prefill is not None else limits.max_prefill
        if prefill in tried or len(tried) == MOST_ROUNDS:
            return cache_tokens, load, wanted
        workers = prefill
