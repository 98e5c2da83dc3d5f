"""Trace entries, and operations on whole traces: spread, scale, set a rate, name blocks, write. Pure."""

import json
import math
import random
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import count, groupby

from kvrelay.errors import ConfigError

LogNormal = tuple[float, float]
"""Median, and sigma of the logarithm."""
MOONCAKE_BLOCK_TOKENS = 512
MOONCAKE_BUCKET_S = 3.0  # its conversation trace's timestamps are rounded to this,
MOONCAKE_JITTER_S = 0.003  # give or take so much: 29% of them are 1 to 3 ms off


@dataclass(frozen=True, slots=True)
class TraceEntry:
    """One request of a trace. `hash_ids` name its prompt's blocks of `block_tokens` tokens; equal ids, equal tokens.

    session: of one conversation or agent; empty session or tenant: unknown.
    """

    arrival_s: float
    input_tokens: int
    output_tokens: int
    hash_ids: tuple[int, ...] = ()
    block_tokens: int = MOONCAKE_BLOCK_TOKENS
    session: str = ""
    tenant: str = ""


def drawn(draw: random.Random, shape: LogNormal) -> float:
    return draw.lognormvariate(math.log(shape[0]), shape[1])


def length(draw: random.Random, shape: LogNormal) -> int:
    """A number of tokens, at least 1."""
    return max(1, round(drawn(draw, shape)))


def spread_buckets(entries: Sequence[TraceEntry], *, bucket_s: float, seed: int) -> list[TraceEntry]:
    """Undo a timestamp's rounding: entries of one bucket get uniform times inside it, in their order."""
    spread: list[TraceEntry] = []
    for number, group in groupby(entries, key=lambda entry: round(entry.arrival_s / bucket_s)):
        bucket, start_s = list(group), number * bucket_s
        draw = random.Random(f"{seed}:{start_s}")
        offsets = sorted(draw.random() * bucket_s for _ in bucket)
        spread += [replace(entry, arrival_s=start_s + offset) for entry, offset in zip(bucket, offsets, strict=True)]
    return spread


def is_rounded(entries: Sequence[TraceEntry], bucket_s: float = MOONCAKE_BUCKET_S) -> bool:
    """Whether all of several times are whole buckets within a few milliseconds (Mooncake's trace has 5999 ms, too)."""
    times = {entry.arrival_s for entry in entries}
    off_s = (round(abs(time_s - round(time_s / bucket_s) * bucket_s), 6) for time_s in times)
    return len(times) > 1 and all(one <= MOONCAKE_JITTER_S for one in off_s)


def scale_entries(
    entries: Iterable[TraceEntry],
    *,
    time_scale: float = 1.0,
    length_scale: float = 1.0,
    max_input: int | None = None,
    max_output: int | None = None,
) -> list[TraceEntry]:
    """Fit a trace to a machine.

    Args:
        time_scale: arrival times are multiplied by it: 0.5 replays twice as fast.
        length_scale: prompts, outputs and prefix blocks shrink alike, so the shared part stays the same share.
        max_input, max_output: cut after scaling; a prompt loses its end, never its prefix.
    """

    def scaled(length: int, limit: int | None) -> int:
        return max(1, min(round(length * length_scale), limit or round(length * length_scale)))

    return [
        replace(
            entry,
            arrival_s=entry.arrival_s * time_scale,
            input_tokens=scaled(entry.input_tokens, max_input),
            output_tokens=scaled(entry.output_tokens, max_output),
            block_tokens=max(1, round(entry.block_tokens * length_scale)),
        )
        for entry in entries
    ]


def rate_of(entries: Sequence[TraceEntry]) -> float:
    """Requests per second between the first and the last. Raises ConfigError: there are no two times."""
    span_s = entries[-1].arrival_s - entries[0].arrival_s if entries else 0.0
    if span_s <= 0:
        raise ConfigError("a trace needs two requests at different times to have a rate")
    return (len(entries) - 1) / span_s


def at_rate(entries: Sequence[TraceEntry], rate_per_s: float) -> list[TraceEntry]:
    """The same requests with scaled gaps; the first arrives at 0. Raises ConfigError."""
    if rate_per_s <= 0:
        raise ConfigError("an arrival rate must be positive")
    scale, first_s = rate_of(entries) / rate_per_s, entries[0].arrival_s
    return [replace(entry, arrival_s=(entry.arrival_s - first_s) * scale) for entry in entries]


def with_own_blocks(entries: Sequence[TraceEntry]) -> list[TraceEntry]:
    """Give unique ids to blocks of prompts that an entry does not name."""
    fresh = count(1 + max((max(entry.hash_ids, default=-1) for entry in entries), default=-1))
    named: list[TraceEntry] = []
    for entry in entries:
        missing = -(-entry.input_tokens // entry.block_tokens) - len(entry.hash_ids)
        own = tuple(next(fresh) for _ in range(missing))
        named.append(replace(entry, hash_ids=entry.hash_ids + own) if own else entry)
    return named


def as_mooncake(entry: TraceEntry) -> str:
    """One line of a Mooncake trace, without the line break."""
    row = {
        "timestamp": round(entry.arrival_s * 1000),
        "input_length": entry.input_tokens,
        "output_length": entry.output_tokens,
        "hash_ids": list(entry.hash_ids),
    }
    named = {"session_id": entry.session, "tenant": entry.tenant}
    return json.dumps(row | {name: value for name, value in named.items() if value})


class GrowingPrompt:
    """Ids of one prompt's full blocks so far. `fresh` yields unused ids."""

    __slots__ = ("_fresh", "_full")

    def __init__(self, fresh: Iterator[int], shared: tuple[int, ...] = ()) -> None:
        """shared: ids of the blocks that it begins with, as other prompts do."""
        self._fresh, self._full = fresh, list(shared)

    def ids(self, num_tokens: int) -> tuple[int, ...]:
        """Ids of the prompt at `num_tokens` tokens. A partial block gets a new id each time, as in traces."""
        full, rest = divmod(num_tokens, MOONCAKE_BLOCK_TOKENS)
        while len(self._full) < full:
            self._full.append(next(self._fresh))
        return (*self._full[:full], next(self._fresh)) if rest else tuple(self._full[:full])

    def branch(self) -> "GrowingPrompt":
        """Another prompt that shares the blocks so far."""
        return GrowingPrompt(self._fresh, tuple(self._full))
