"""The best static split of a day, and a clairvoyant plan for it: searched by running them. For
bench/planner/planner.py.

Static: from a guess on, a worker more of the role that misses more while less than 90 % is kept, one fewer of the role
that misses less while more is (the other role where that brings nothing); then all neighbours of the best (one more or
fewer of a role, one from a role to the other), until none is better. What counts is good requests per worker-hour, of
the splits that keep 90 %.

Clairvoyant: numbers for each window by what comes in it, then changed again and again by what a whole run of them
shows: where a window keeps 90 %, one fewer of the role that misses less, else one more of the role that misses more,
which then never falls below that there again, and of both where that had been tried. The best of these runs that keeps
90 % of the day counts. It knows the day to come, prefixes and lengths and all; it is no proven optimum.
"""

from collections.abc import Callable, Iterator

from bench.planner.runs import KEPT, Outcome
from kvrelay.router.planning.types import WorkerCounts

ROUNDS = 3
FEWEST = 5  # requests in a window that its share is believed of
MOST_TRIES = 30
# of the share kept: one more of a role that brings less is not what is missing (prompts wait for decode workers, too)
LEAST_GAIN = 0.01

Static = Callable[[WorkerCounts], Outcome]
Follow = Callable[[list[WorkerCounts]], Outcome]


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


def best_of(tried: dict[WorkerCounts, Outcome], least: float = KEPT) -> WorkerCounts:
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


def best_clairvoyant(
    run: Follow, guesses: list[list[WorkerCounts]], most: int, rounds: int = ROUNDS
) -> tuple[list[WorkerCounts], Outcome]:
    """All guesses, and so many changed plans from the best of them on."""
    found, plan = run(guesses[0]), guesses[0]
    for guess in guesses[1:]:
        if better(other := run(guess), found):
            found, plan = other, guess
    best, floors = (plan, found), [WorkerCounts(1, 1)] * len(plan)
    for _ in range(rounds):
        plan, floors = changed(plan, floors, found, most)
        found = run(plan)
        if better(found, best[1]):
            best = plan, found
    return best


def changed(
    plan: list[WorkerCounts], floors: list[WorkerCounts], found: Outcome, most: int
) -> tuple[list[WorkerCounts], list[WorkerCounts]]:
    """The next plan, and what each window needs at least by what has been seen."""
    plan, floors = list(plan), list(floors)
    for window, (came, kept) in enumerate(zip(found.came, found.kept, strict=True)):
        if came < FEWEST:
            plan[window] = floors[window]
            continue
        is_prefill = found.kept_ttft[window] <= found.kept_tpot[window]
        counts = plan[window]
        if kept < KEPT * came:
            step = 2 if kept < 0.6 * came else 1
            had_its_more = getattr(floors[window], "prefill" if is_prefill else "decode") == counts[not is_prefill] > 1
            more = (step, step) if had_its_more else (step, 0) if is_prefill else (0, step)
            plan[window] = _moved(counts, *more, most)
            floors[window] = _at_least(floors[window], _moved(counts, is_prefill, not is_prefill, most), is_prefill)
        else:
            order = ("decode", "prefill") if is_prefill else ("prefill", "decode")
            spare = [role for role in order if getattr(counts, role) > getattr(floors[window], role)]
            if spare:
                plan[window] = counts._replace(**{spare[0]: getattr(counts, spare[0]) - 1})
    return plan, floors


def _at_least(floor: WorkerCounts, counts: WorkerCounts, is_prefill: bool) -> WorkerCounts:
    if is_prefill:
        return WorkerCounts(max(floor.prefill, counts.prefill), floor.decode)
    return WorkerCounts(floor.prefill, max(floor.decode, counts.decode))
