"""Days of load for bench/planner/planner.py: made up ones, and a public trace that is stretched over a day. Pure but
for reading traces.

Sessions are thinned, not requests: conversations and agents keep their own gaps, whatever the hour. A day may be
shorter than a real
one: its hours pass faster, rushes and noise last as long as they do.
"""

import math
import random
from bisect import bisect_right
from collections.abc import Callable, Sequence
from dataclasses import replace
from itertools import accumulate
from pathlib import Path

from kvrelay.cluster.workloads.choose import load_trace
from kvrelay.cluster.workloads.conversations import AgentSpec, SessionSpec, conversation_entries, requests_per_start
from kvrelay.cluster.workloads.trace import TraceEntry, with_own_blocks

DAY_S = 86400.0
NOISE = 0.15  # deviation of a quarter of an hour's rate from the curve, as a share
NOISE_S = 900.0

Curve = Callable[[float], float]
"""Share of the highest rate, by the hour of the day."""


def _bell(hour: float, middle: float, width: float) -> float:
    return math.exp(-(((hour - middle) / width) ** 2) / 2)


def chat_curve(hour: float) -> float:
    """Peaks in the morning and in the evening; from noon on less, for agents have taken over."""
    usual = 0.10 + 0.75 * _bell(hour, 10.0, 1.8) + 0.65 * _bell(hour, 20.0, 1.6)
    return min(1.0, usual * (0.75 if hour >= 13.0 else 1.0))


def agent_curve(hour: float) -> float:
    """Next to none until noon; a working afternoon; a night's batch."""
    afternoon = 0.9 * _bell(hour, 15.5, 1.5) if hour >= 12.5 else 0.0
    night = 0.35 if 1.0 <= hour < 3.0 else 0.0
    return 0.03 + afternoon + night


def rushes(day: int, seed: int, faster: float) -> list[tuple[float, float, float]]:
    """(begin, end, factor), hours of the day: two that every day has, at hours of its own, and one that comes every day
    at nine.
    """
    draw = random.Random(f"rush:{seed}:{day}")
    own = [
        (at := draw.uniform(low, high), at + faster * draw.uniform(0.15, 0.4), 1.7)
        for low, high in ((11.5, 16.5), (18, 22))
    ]
    return [(9.0, 9.0 + faster * 0.5, 1.5), *own]


def made_days(
    num_days: int, *, chat_per_s: float, agents_per_s: float, seed: int, day_s: float = DAY_S
) -> list[TraceEntry]:
    """`chat_per_s`, `agents_per_s`: requests per s where their curve is 1; 0: none of them."""
    span_s, most = num_days * day_s, 2.0
    chats, tasks = SessionSpec(seed=seed), AgentSpec(seed=seed)
    parts = []
    if chat_per_s:
        chats = replace(chats, starts_per_s=most * chat_per_s / requests_per_start(chats))
        entries = conversation_entries(chats, math.ceil(1.02 * most * chat_per_s * span_s))
        parts.append(_thinned(entries, _factor(chat_curve, num_days, seed, "chat", day_s), most, f"{seed}:chat"))
    if agents_per_s:
        tasks = replace(tasks, starts_per_s=most * agents_per_s / requests_per_start(tasks))
        entries = conversation_entries(tasks, math.ceil(1.02 * most * agents_per_s * span_s))
        parts.append(_thinned(entries, _factor(agent_curve, num_days, seed, "agents", day_s), most, f"{seed}:agents"))
    return _merged(parts, span_s)


def _factor(curve: Curve, num_days: int, seed: int, name: str, day_s: float) -> Curve:
    """The day's curve with noise and rushes, by the second."""
    draw = random.Random(f"noise:{seed}:{name}")
    noise = [draw.gammavariate(NOISE**-2, NOISE**2) for _ in range(math.ceil(num_days * day_s / NOISE_S))]
    rush = [rushes(day, seed, DAY_S / day_s) for day in range(num_days)]

    def at(now_s: float) -> float:
        day, hour = int(now_s // day_s), now_s % day_s / day_s * 24
        if day >= num_days:
            return 0.0
        usual = curve(hour) * noise[int(now_s // NOISE_S)]
        return usual * math.prod(factor for begin, end, factor in rush[day] if begin <= hour < end)

    return at


def _thinned(entries: Sequence[TraceEntry], factor: Curve, most: float, seed: str) -> list[TraceEntry]:
    """Whole sessions, each kept with the chance that the curve has where it begins; siblings go with their task."""
    draw, kept = random.Random(f"thin:{seed}"), dict[str, bool]()
    chosen = []
    for entry in entries:
        root = "-".join(entry.session.split("-")[:2])
        if root not in kept:
            kept[root] = draw.random() * most < factor(entry.arrival_s)
        if kept[root]:
            chosen.append(entry)
    return chosen


def _merged(parts: Sequence[list[TraceEntry]], span_s: float) -> list[TraceEntry]:
    """In order of arrival, with block ids and sessions that do not meet."""
    merged, first = [], 0
    for number, entries in enumerate(parts):
        merged += [
            replace(one, hash_ids=tuple(first + block for block in one.hash_ids), session=f"{number}:{one.session}")
            for one in entries
            if one.arrival_s < span_s
        ]
        first += 1 + max((max(one.hash_ids, default=0) for one in entries), default=0)
    return sorted(merged, key=lambda one: one.arrival_s)


def stretched_days(
    requests: Path, rates: Sequence[Path], *, num_days: int, per_day: int, seed: int, day_s: float = DAY_S
) -> list[TraceEntry]:
    """The requests of one trace, in their order, at the rates of others: an hour of theirs becomes a day, and so again.

    Args:
        requests: whose lengths and prefixes are taken, again with other prefixes when they are used up.
        rates: whose arrivals, of an hour or so, are the day's curve, which begins where they are fewest.
        per_day: requests of a day, about.
    """
    shape = _from_low(rates)
    entries, times, draw = load_trace(requests, seed=seed), [], random.Random(f"stretched:{seed}")
    weights = list(accumulate(shape))
    for day in range(num_days):
        for _ in range(per_day):
            place = bisect_right(weights, draw.random() * weights[-1])
            times.append((day + (place + draw.random()) / len(shape)) * day_s)
    times.sort()
    named = with_own_blocks(entries)
    size = 1 + max(max(one.hash_ids) for one in named)
    made = []
    for index, at_s in enumerate(times):
        again, place = divmod(index, len(named))
        one = named[place]
        made.append(replace(one, arrival_s=at_s, hash_ids=tuple(again * size + block for block in one.hash_ids)))
    return made


def _from_low(rates: Sequence[Path], bins: int = 144) -> list[int]:
    """Arrivals in equal parts of the traces' common time, turned so that the day begins where they are fewest."""
    arrivals = [[one.arrival_s for one in load_trace(path)] for path in rates]
    span_s = min(times[-1] for times in arrivals)
    counts = [0] * bins
    for times in arrivals:
        for at_s in times:
            if at_s < span_s:
                counts[int(at_s / span_s * bins)] += 1
    around = [sum(counts[(index + step) % bins] for step in range(-6, 7)) for index in range(bins)]
    low = around.index(min(around))
    return counts[low:] + counts[:low]
