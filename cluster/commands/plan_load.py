"""The planner's workload from a trace: its busy rate, its mean requests, and the hit share of the prefix caches. Pure.

Hits are those of one LRU cache of blocks as large as all prefill workers' pools together, as if the router always found
the worker with the prefix.
"""

from collections import Counter, OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise

from kvrelay.cluster.workloads.trace import TraceEntry
from kvrelay.router.planning.split import Needs, needs
from kvrelay.router.planning.types import CountLimits, PlanningTarget, WorkerModel, Workload

WINDOW_S = 60.0
BUSY_SHARE = 0.95  # quantile of the windows' rates that is planned for
FEWEST_WINDOWS = 4
MOST_ROUNDS = 6  # prefill workers and the hits of their pools depend on each other


@dataclass(frozen=True, slots=True)
class MeasuredLoad:
    """A trace's workload with a cache of a given size."""

    load: Workload
    mean_rate: float
    cache_tokens: int


def busy_rate(entries: Sequence[TraceEntry]) -> float:
    """Requests per second in the window at the 95th percentile; the mean where the trace has fewer than
    FEWEST_WINDOWS.
    """
    first, span_s = entries[0].arrival_s, entries[-1].arrival_s - entries[0].arrival_s
    if span_s <= 0:
        return float(len(entries))
    num_windows = int(span_s // WINDOW_S)
    if num_windows < FEWEST_WINDOWS:
        return len(entries) / span_s
    counts = Counter(int((entry.arrival_s - first) // WINDOW_S) for entry in entries)
    ordered = sorted(counts.get(index, 0) for index in range(num_windows))
    return ordered[min(int(BUSY_SHARE * num_windows), num_windows - 1)] / WINDOW_S


def burstiness(entries: Sequence[TraceEntry], window_s: float) -> float:
    """Variance over mean of the counts in windows, from differences of neighbours, so that a slow change of the rate is
    no burst.
    """
    first = entries[0].arrival_s
    counts = Counter(int((entry.arrival_s - first) // window_s) for entry in entries)
    row = [counts.get(index, 0) for index in range(max(counts) + 1)]
    if len(row) < 2:
        return 1.0
    swings = sum((b - a) ** 2 / 2.0 for a, b in pairwise(row)) / (len(row) - 1)
    return min(max(swings / (sum(row) / len(row)), 0.25), 32.0)


def cached_tokens(entries: Sequence[TraceEntry], cache_tokens: int) -> list[int]:
    """Tokens of each prompt that an LRU cache of `cache_tokens` holds when the prompt arrives."""
    cache: OrderedDict[int, int] = OrderedDict()
    held, hits = 0, []
    for entry in entries:
        depth = 0
        for block in entry.hash_ids:
            if block not in cache:
                break
            depth += 1
        hits.append(min(depth * entry.block_tokens, entry.input_tokens - 1))
        for block in reversed(entry.hash_ids):  # a prefix is evicted after its continuations
            if block not in cache:
                held += entry.block_tokens
            cache[block] = entry.block_tokens
            cache.move_to_end(block)
        while held > cache_tokens and cache:
            held -= cache.popitem(last=False)[1]
    return hits


def measured(entries: Sequence[TraceEntry], cache_tokens: int, target: PlanningTarget) -> MeasuredLoad:
    """The workload of at least one entry, in order of arrival."""
    hits = cached_tokens(entries, cache_tokens)
    inputs = [entry.input_tokens for entry in entries]
    outputs = [max(entry.output_tokens, 1) for entry in entries]
    computed = [size - hit for size, hit in zip(inputs, hits, strict=True)]
    span_s = entries[-1].arrival_s - entries[0].arrival_s
    load = Workload(
        rate=busy_rate(entries),
        input_tokens=_mean(inputs),
        output_tokens=_mean(outputs),
        cached_share=sum(hits) / sum(inputs),
        input_cv2=_cv2(computed),
        output_cv2=_cv2(outputs),
        burstiness=burstiness(entries, max(target.ttft_s, 1.0)),
    )
    return MeasuredLoad(load, len(entries) / span_s if span_s > 0 else float(len(entries)), cache_tokens)


def _mean(values: Sequence[int]) -> float:
    return sum(values) / len(values)


def _cv2(values: Sequence[int]) -> float:
    mean = _mean(values)
    return sum((value - mean) ** 2 for value in values) / len(values) / mean**2


def planned(
    entries: Sequence[TraceEntry], model: WorkerModel, target: PlanningTarget, limits: CountLimits
) -> tuple[MeasuredLoad, Needs]:
    """The counts that a trace needs: a fixed point, since the hits depend on the number of prefill workers' pools."""
    workers, tried = 1, set()
    while True:
        found = measured(entries, workers * model.pool_tokens, target)
        wanted = needs(found.load, found.load, model, target, limits)
        tried.add(workers)
        prefill = wanted.prefill if wanted.prefill is not None else limits.max_prefill
        if prefill in tried or len(tried) == MOST_ROUNDS:
            return found, wanted
        workers = prefill
