"""The best static split of a day, searched by running splits. For bench/planner/planner.py.

From a guess on, a worker more of the role that misses more while less than 90 % is kept, one fewer of the role
that misses less while more is (the other role where that brings nothing); then all neighbours of the best (one more or
fewer of a role, one from a role to the other), until none is better. What counts is good requests per worker-hour, of
the splits that keep 90 %.
"""

from collections.abc import Callable, Iterator
from typing import TypeVar

from bench.planner.runs import KEPT, Outcome
from kvrelay.router.planning.types import WorkerCounts

MOST_TRIES = 30
# of the share kept: one more of a role that brings less is not what is missing (prompts wait for decode workers, too)
LEAST_GAIN = 0.01

Static = Callable[[WorkerCounts], Outcome]
_Choice = TypeVar("_Choice")


def static_counts(run: Static, guess: int, most: int) -> dict[WorkerCounts, Outcome]:
    """The same for aggregated workers: fewer than the guess while 90 % are kept, more while they are not."""
    tried: dict[WorkerCounts, Outcome] = {}
    counts = WorkerCounts(0, min(guess, most))
    while counts not in tried and 1 <= counts.decode <= most:
        tried[counts] = run(counts)
        counts = WorkerCounts(0, counts.decode + (-1 if tried[counts].kept_share >= KEPT else 1))
    return tried


def better(one: Outcome, other: Outcome, least: float = KEPT) -> bool:
    """The better of two: one that keeps that share, then more goodput per worker-hour; of two that do not, the one that
    keeps more.
    """
    both = one.kept_share >= least, other.kept_share >= least
    if both == (True, True):
        return one.per_hour > other.per_hour
    return both[0] > both[1] or (both == (False, False) and one.kept_share > other.kept_share)


def misses_prefill(one: Outcome) -> bool:
    """Whether TTFT is missed more often than TPOT."""
    return sum(one.kept_ttft) <= sum(one.kept_tpot)


def static_splits(run: Static, guess: WorkerCounts, most: int) -> dict[WorkerCounts, Outcome]:
    """All that were tried, the best among them."""
    tried: dict[WorkerCounts, Outcome] = {}

    def see(counts: WorkerCounts) -> Outcome:
        if counts not in tried:
            tried[counts] = run(counts)
        return tried[counts]

    counts, before = guess, (True, -1.0)  # the role that grew last, and what was kept then
    while counts not in tried and len(tried) < MOST_TRIES:
        found = see(counts)
        if found.kept_share >= KEPT:
            counts = _moved(counts, *((0, -1) if misses_prefill(found) else (-1, 0)), most)
            continue
        is_prefill, step = misses_prefill(found), 2 if found.kept_share < 0.6 else 1
        if before[0] == is_prefill and found.kept_share < before[1] + LEAST_GAIN:
            is_prefill = not is_prefill
        before = is_prefill, found.kept_share
        counts = _moved(counts, *((step, 0) if is_prefill else (0, step)), most)
    best = best_of(tried)
    while len(tried) < MOST_TRIES:
        for neighbour in list(_neighbours(best, tried, most)):
            see(neighbour)
        if best_of(tried) == best:
            break
        best = best_of(tried)
    return tried


def best_of(tried: dict[_Choice, Outcome], least: float = KEPT) -> _Choice:
    """The best of those that keep that share; if none does, the one that keeps most."""
    best = next(iter(tried))
    for counts, found in tried.items():
        if better(found, tried[best], least):
            best = counts
    return best


def _neighbours(counts: WorkerCounts, tried: dict[WorkerCounts, Outcome], most: int) -> Iterator[WorkerCounts]:
    """None that could not be better: fewer of both than a split that keeps too little; more than a third of the misses
    would pay for.
    """
    kept = tried[counts].kept_share
    for prefill, decode in ((1, -1), (-1, 1), (-1, 0), (0, -1), (1, 0), (0, 1)):
        moved = _moved(counts, prefill, decode, most)
        is_too_few = any(
            moved.prefill <= one.prefill and moved.decode <= one.decode
            for one, found in tried.items()
            if found.kept_share < KEPT
        )
        is_too_many = kept * moved.total / counts.total >= 1.0 - (1.0 - kept) / 3
        if not is_too_few and not is_too_many:
            yield moved


def _moved(counts: WorkerCounts, prefill: int, decode: int, most: int) -> WorkerCounts:
    return WorkerCounts(min(max(counts.prefill + prefill, 1), most), min(max(counts.decode + decode, 1), most))
