"""When requests arrive and what they ask: trace files, Poisson arrivals, deterministic prompts. Pure.

Every draw depends on a seed and an index alone, so a run can be repeated exactly against another
server, and request i has the same prompt whatever came before it. Imports no clock or socket.
"""

import csv
import json
import random
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from datetime import datetime
from itertools import groupby, islice

import numpy as np

from kvrelay.errors import ConfigError

MOONCAKE_BLOCK_TOKENS = 512
MOONCAKE_BUCKET_S = 3.0  # its timestamps are rounded down to this
_AZURE_COLUMNS = ("TIMESTAMP", "ContextTokens", "GeneratedTokens")
_SHARED, _OWN, _BLOCK = 0, 1, 2  # keeps the three kinds of draws apart

_WORD_LIST = (
    "time year people way day man thing woman life child world school state family student group country problem "
    "hand part place case week company system program question work night point home water room mother area money "
    "story fact month lot right study book eye job word business issue side kind head house service friend father "
    "power hour game line end member law car city name team minute idea body back parent face level office door "
    "health person art war history party result change morning reason research girl guy moment air teacher force "
    "good new first last long great little own other old big high small large next early young important public bad"
)
_WORDS = _WORD_LIST.split()


@dataclass(frozen=True, slots=True)
class TraceEntry:
    """One request of a trace. `hash_ids` name its prompt's blocks of `block_tokens` tokens; equal ids, equal tokens."""

    arrival_s: float
    input_tokens: int
    output_tokens: int
    hash_ids: tuple[int, ...] = ()
    block_tokens: int = MOONCAKE_BLOCK_TOKENS


@dataclass(frozen=True, slots=True)
class PromptSpec:
    """How synthetic prompts are made: token ids in [low, high), the same `shared_tokens` in front of each."""

    input_tokens: int = 128
    shared_tokens: int = 0
    low: int = 1000
    high: int = 30000
    seed: int = 0


def parse_mooncake(lines: Iterable[str]) -> Iterator[TraceEntry]:
    """Entries of a Mooncake trace: one JSON object a line. Raises ConfigError naming the line."""
    for number, line in enumerate(lines, start=1):
        if not line.strip():
            continue
        try:
            row = json.loads(line)
            yield TraceEntry(
                arrival_s=float(row["timestamp"]) / 1000,
                input_tokens=int(row["input_length"]),
                output_tokens=int(row["output_length"]),
                hash_ids=tuple(int(hash_id) for hash_id in row["hash_ids"]),
            )
        except (ValueError, KeyError, TypeError) as error:
            raise ConfigError(f"trace line {number} is not a Mooncake request: {error!r}") from error


def _azure_time(text: str) -> datetime:
    """ "2023-11-16 18:17:03.9799600": seven decimals, of which datetime takes six."""
    whole, _, fraction = text.partition(".")
    return datetime.fromisoformat(f"{whole}.{(fraction + '000000')[:6]}")


def parse_azure(lines: Iterable[str]) -> Iterator[TraceEntry]:
    """Entries of an Azure LLM trace; the first arrives at 0. Lengths only: it has no prefixes. Raises ConfigError."""
    rows = csv.DictReader(lines)
    if tuple(rows.fieldnames or ()) != _AZURE_COLUMNS:
        raise ConfigError(f"an Azure trace starts with the columns {','.join(_AZURE_COLUMNS)}")
    start: datetime | None = None
    for row in rows:
        try:
            now = _azure_time(row["TIMESTAMP"])
            start = start or now
            arrival_s = (now - start).total_seconds()
            yield TraceEntry(arrival_s, int(row["ContextTokens"]), int(row["GeneratedTokens"]))
        except (ValueError, TypeError) as error:
            raise ConfigError(f"trace line {rows.line_num} is not an Azure request: {error}") from error


def parse_trace(lines: Iterable[str], *, is_csv: bool, limit: int) -> list[TraceEntry]:
    """The first `limit` entries of either format."""
    return list(islice(parse_azure(lines) if is_csv else parse_mooncake(lines), limit))


def spread_buckets(entries: Sequence[TraceEntry], *, bucket_s: float, seed: int) -> list[TraceEntry]:
    """Undo a timestamp's rounding: entries of one bucket get uniform times inside it, in their order."""
    spread: list[TraceEntry] = []
    for start_s, group in groupby(entries, key=lambda entry: entry.arrival_s):
        bucket = list(group)
        draw = random.Random(f"{seed}:{start_s}")
        offsets = sorted(draw.random() * bucket_s for _ in bucket)
        spread += [replace(entry, arrival_s=start_s + offset) for entry, offset in zip(bucket, offsets, strict=True)]
    return spread


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
        TraceEntry(
            arrival_s=entry.arrival_s * time_scale,
            input_tokens=scaled(entry.input_tokens, max_input),
            output_tokens=scaled(entry.output_tokens, max_output),
            hash_ids=entry.hash_ids,
            block_tokens=max(1, round(entry.block_tokens * length_scale)),
        )
        for entry in entries
    ]


def poisson_arrivals(rate_per_s: float, *, seed: int) -> Iterator[float]:
    """Arrival times in seconds, for ever: exponential gaps with mean 1 / rate."""
    if rate_per_s <= 0:
        raise ConfigError("an arrival rate must be above 0")
    draw = random.Random(f"arrivals:{seed}")
    now_s = 0.0
    while True:
        now_s += draw.expovariate(rate_per_s)
        yield now_s


def _draw_tokens(spec: PromptSpec, kind: int, key: int, count: int) -> list[int]:
    """`count` token ids that depend on (seed, kind, key) alone; a longer draw starts with the shorter one."""
    generator = np.random.default_rng([spec.seed, kind, key])
    tokens: list[int] = generator.integers(spec.low, spec.high, size=count).tolist()
    return tokens


def synthetic_prompt(spec: PromptSpec, index: int) -> list[int]:
    """Request `index`'s prompt: exactly `input_tokens` ids, the shared ones first."""
    shared = min(spec.shared_tokens, spec.input_tokens)
    own = _draw_tokens(spec, _OWN, index, spec.input_tokens - shared)
    return _draw_tokens(spec, _SHARED, 0, shared) + own


def trace_prompt(spec: PromptSpec, entry: TraceEntry, index: int) -> list[int]:
    """A trace entry's prompt: each hash id becomes its block of tokens; what no id covers is the request's own."""
    tokens: list[int] = []
    for hash_id in entry.hash_ids:
        if len(tokens) >= entry.input_tokens:
            break
        tokens += _draw_tokens(spec, _BLOCK, hash_id, entry.block_tokens)
    tokens = tokens[: entry.input_tokens]
    return tokens + _draw_tokens(spec, _OWN, index, entry.input_tokens - len(tokens))


def as_text(tokens: Sequence[int]) -> str:
    """One common English word per id, so that equal prefixes stay equal: about one token each."""
    return " ".join(_WORDS[token % len(_WORDS)] for token in tokens)
