"""Whether to disaggregate: the best split of a number of workers against as many aggregated ones, by the same capacity
model. Pure.
"""

from bisect import bisect_left
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import TypeVar

from kvrelay.router.planning.capacity import aggregated_fits, decode_fits, prefill_fits, rate_of, workers_for
from kvrelay.router.planning.types import CountLimits, PlanningTarget, WorkerCounts, WorkerModel, Workload

WORTH = 1.02  # gain over aggregated workers from which a split is worth its complexity
_Found = TypeVar("_Found")
LEAST_BUDGET = 64  # tokens per step that aggregated workers are tried with, at least


@dataclass(frozen=True, slots=True)
class Comparison:
    """Rates in requests per s that the same number of workers carries either way, within the targets."""

    workers: int
    split: WorkerCounts  # the best one
    split_rate: float
    prefill_rate: float  # the split's prefill workers alone
    decode_rate: float
    aggregated_rate: float
    aggregated_budget: int  # tokens per step: the best of those tried

    @property
    def disaggregate(self) -> bool:
        return self.split_rate > WORTH * self.aggregated_rate

    @property
    def gain(self) -> float:
        """The split's rate over the aggregated one's; infinite if the latter meets the targets at no rate."""
        if self.aggregated_rate > 0:
            return self.split_rate / self.aggregated_rate
        return float("inf") if self.split_rate > 0 else 1.0


def compared(load: Workload, model: WorkerModel, target: PlanningTarget, workers: int) -> Comparison:
    """Both alternatives, for `workers` (at least 2) workers in all."""
    model = model.crowded(workers)
    split, prefill_rate, decode_rate = best_split(load, model, target, workers)
    rate, budget = best_aggregated(load, model, target, workers)
    return Comparison(workers, split, min(prefill_rate, decode_rate), prefill_rate, decode_rate, rate, budget)


def best_aggregated(load: Workload, model: WorkerModel, target: PlanningTarget, workers: int) -> tuple[float, int]:
    """(rate of so many aggregated workers at the best token budget, that budget): small chunks protect TPOT."""
    return max(
        (rate_of(aggregated_fits, load, replace(model, token_budget=budget), target, workers), budget)
        for budget in _budgets(model)
    )


def _budgets(model: WorkerModel) -> list[int]:
    least = min(LEAST_BUDGET, model.token_budget)
    return list(dict.fromkeys(max(model.token_budget // part, least) for part in (1, 2, 4, 8)))


def best_split(
    load: Workload, model: WorkerModel, target: PlanningTarget, workers: int
) -> tuple[WorkerCounts, float, float]:
    """(counts that carry most, at least one of each role; the rates of either role).

    More prefill workers carry more prompts and leave fewer to decode: the best split is where the two meet.
    """
    if workers < 2:
        raise ValueError("a split takes two workers at least")

    def rates_of(prefill: int) -> tuple[float, float]:
        return (
            rate_of(prefill_fits, load, model, target, prefill),
            rate_of(decode_fits, load, model, target, workers - prefill),
        )

    def prefill_leads(prefill: int) -> bool:
        rates = rates_of(prefill)
        return rates[0] >= rates[1]

    meeting = bisect_left(range(1, workers - 1), True, key=prefill_leads) + 1  # prefill leads from here on, or nowhere
    options = []
    for prefill in {max(1, meeting - 1), meeting}:
        rates = rates_of(prefill)
        options.append((min(rates), -abs(rates[0] - rates[1]), WorkerCounts(prefill, workers - prefill), rates))
    _, _, counts, rates = max(options)
    return counts, *rates


@dataclass(frozen=True, slots=True)
class Needs:
    """Workers that a load needs. None: no number within the limits carries it."""

    prefill: int | None
    decode: int | None

    def counts(self, limits: CountLimits) -> WorkerCounts:
        """Within the limits; a role that none suffices for gets its maximum."""
        prefill = limits.max_prefill if self.prefill is None else self.prefill
        decode = limits.max_decode if self.decode is None else self.decode
        return limits.clipped(WorkerCounts(prefill, decode))


def needs(
    prompts: Workload,
    sequences: Workload,
    model: WorkerModel,
    target: PlanningTarget,
    limits: CountLimits,
    *,
    prefills_on_decode: bool = False,
) -> Needs:
    """Least counts: for prefill of the load `prompts`, for decode of `sequences`, whose rates may differ. Of aggregated
    workers, which do both, for the higher rate. prefills_on_decode: decode workers compute prompts while they have time
    to spare, so that both roles together need not be more than aggregated workers.
    """
    higher = max(prompts, sequences, key=lambda load: load.rate)
    if limits.is_aggregated:
        return Needs(0, needed_aggregated(higher, model, target, limits.max_decode))

    def needed(crowded: WorkerModel) -> Needs:
        return Needs(
            workers_for(prefill_fits, prompts, crowded, target, max(limits.max_prefill, 1)),
            workers_for(decode_fits, sequences, crowded, target, max(limits.max_decode, 1)),
        )

    found = _among_themselves(model, needed, lambda found: found.counts(limits).total)
    if not prefills_on_decode or found.prefill is None or found.decode is None:
        return found
    both = needed_aggregated(higher, model, target, found.prefill + found.decode)
    return found if both is None else Needs(max(1, both - found.decode), found.decode)


def needed_aggregated(load: Workload, model: WorkerModel, target: PlanningTarget, most: int) -> int | None:
    """The least number of aggregated workers, at the best token budget; None: not even `most` carry the load."""

    def needed(crowded: WorkerModel) -> int | None:
        sizes = [
            workers_for(aggregated_fits, load, replace(crowded, token_budget=budget), target, most)
            for budget in _budgets(model)
        ]
        return min((size for size in sizes if size is not None), default=None)

    def size_of(found: int | None) -> int:
        return most if found is None else found

    return _among_themselves(model, needed, size_of)


def _among_themselves(
    model: WorkerModel, needed: Callable[[WorkerModel], _Found], size_of: Callable[[_Found], int]
) -> _Found:
    """The need where workers of a machine slow each other, iterated until it is consistent with its own crowding."""
    found = needed(model.crowded(1))
    for crowd in range(2, model.most_crowded + 1):
        if size_of(found) < crowd:
            break
        found = needed(model.crowded(crowd))
    return found


def within_total(
    counts: WorkerCounts, load: Workload, model: WorkerModel, target: PlanningTarget, limits: CountLimits
) -> WorkerCounts:
    """The counts if they fit `limits.total`, else the split of that total that carries most."""
    if counts.total <= limits.total or limits.is_aggregated:
        return limits.clipped(counts, within_total=True)
    best, _, _ = best_split(load, model.crowded(limits.total), target, limits.total)
    lows = WorkerCounts(limits.min_prefill, limits.min_decode)
    prefill = min(max(best.prefill, lows.prefill), counts.prefill, limits.total - lows.decode)
    return WorkerCounts(prefill, min(limits.total - prefill, counts.decode))
