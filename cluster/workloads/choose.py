"""Workloads by generator name or file, at a rate. Reads files; otherwise pure and seeded."""

import csv
import json
from collections.abc import Callable, Iterable, Iterator
from dataclasses import replace
from datetime import UTC, datetime
from itertools import chain, count, islice, pairwise
from pathlib import Path
from statistics import fmean, pstdev

from kvrelay.cluster.workloads.conversations import AgentSpec, SessionSpec, conversation_entries, requests_per_start
from kvrelay.cluster.workloads.mixes import gamma_arrivals, mixed_entries, poisson_arrivals, switching_arrivals
from kvrelay.cluster.workloads.trace import (
    MOONCAKE_BUCKET_S,
    GrowingPrompt,
    TraceEntry,
    at_rate,
    is_rounded,
    rate_of,
    spread_buckets,
    with_own_blocks,
)
from kvrelay.errors import ConfigError

DEFAULT_RATE_PER_S = 1.0
GAMMA_VARIATION = 3.0
RATE_ROUNDS = 2  # in which the rate is approached; what is left is a few per cent, by which all gaps are scaled
NO_LIMIT = 1 << 62


def _conversations(spec: SessionSpec | AgentSpec, rate_per_s: float, num_requests: int) -> list[TraceEntry]:
    """A trace of conversations with this rate from its first to its last request.

    Conversations that begin at a constant rate bring theirs only when as many end; in a trace that is over before that,
    more of them begin, so that readers' pauses keep their length.
    """
    starts = rate_per_s / requests_per_start(spec)
    made = conversation_entries(replace(spec, starts_per_s=starts), num_requests)
    for _ in range(RATE_ROUNDS):
        if len(made) < 2 or made[0].arrival_s == made[-1].arrival_s:
            return made
        starts *= rate_per_s / rate_of(made)
        made = conversation_entries(replace(spec, starts_per_s=starts), num_requests)
    return at_rate(made, rate_per_s)


GENERATORS: dict[str, Callable[[float, int, int], list[TraceEntry]]] = {
    "chat": lambda rate_per_s, limit, seed: _conversations(SessionSpec(seed=seed), rate_per_s, limit),
    "agents": lambda rate_per_s, limit, seed: _conversations(AgentSpec(seed=seed), rate_per_s, limit),
    "bursty": lambda rate_per_s, limit, seed: mixed_entries(
        switching_arrivals(rate_per_s, seed=seed), limit, seed=seed
    ),
    "gamma": lambda rate_per_s, limit, seed: mixed_entries(
        gamma_arrivals(rate_per_s, variation=GAMMA_VARIATION, seed=seed), limit, seed=seed
    ),
    "poisson": lambda rate_per_s, limit, seed: mixed_entries(poisson_arrivals(rate_per_s, seed=seed), limit, seed=seed),
}
"""Name -> (requests per second, how many, seed) -> entries."""


def load_trace(path: Path, *, limit: int | None = None, seed: int = 0) -> list[TraceEntry]:
    """A trace file's first requests, in order of arrival; times that are whole buckets of 3 s are spread inside them.

    Raises ConfigError: it cannot be read, or holds no requests.
    """
    try:
        with path.open(encoding="utf-8", newline="" if path.suffix == ".csv" else None) as lines:
            entries = parse_trace(lines, is_csv=path.suffix == ".csv", limit=limit or NO_LIMIT)
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"{path}: {error}") from error
    except ConfigError as error:
        raise ConfigError(f"{path}: {error}") from error
    if not entries:
        raise ConfigError(f"{path} holds no requests")
    entries.sort(key=lambda entry: entry.arrival_s)
    if is_rounded(entries):
        entries = spread_buckets(entries, bucket_s=MOONCAKE_BUCKET_S, seed=seed)
    return entries


def make_workload(
    source: str, *, rate_per_s: float | None = None, limit: int | None = None, seed: int = 0
) -> list[TraceEntry]:
    """Requests that all name their blocks, in order of arrival.

    Args:
        source: a name in GENERATORS, or a trace file.
        rate_per_s: of the requests made (default 1); a trace file is scaled to it (default: its own).
        limit: how many; a generator needs it.

    Raises ConfigError.
    """
    if rate_per_s is not None and rate_per_s <= 0:
        raise ConfigError("an arrival rate must be positive")
    if limit is not None and limit < 1:
        raise ConfigError("a workload needs at least one request")
    if source in GENERATORS:
        if limit is None:
            raise ConfigError(f"{source} is endless: give the number of requests")
        return GENERATORS[source](rate_per_s or DEFAULT_RATE_PER_S, limit, seed)
    path = Path(source)
    if not path.exists():
        raise ConfigError(f"{source} is neither a trace file nor one of {', '.join(GENERATORS)}")
    entries = load_trace(path, limit=limit, seed=seed)
    return with_own_blocks(entries if rate_per_s is None else at_rate(entries, rate_per_s))


def outline(entries: list[TraceEntry]) -> dict[str, float]:
    """Figures of at least one entry, in order of arrival.

    repeated_share: of prompt tokens, in leading blocks that an earlier prompt had. gap_variation: deviation of gaps,
    as a share of their mean; Poisson: 1.
    """
    seen: set[int] = set()
    repeated = 0
    for entry in entries:
        leading = next((index for index, block in enumerate(entry.hash_ids) if block not in seen), len(entry.hash_ids))
        repeated += min(leading * entry.block_tokens, entry.input_tokens)
        seen.update(entry.hash_ids)
    total = sum(entry.input_tokens for entry in entries)
    gaps = [later.arrival_s - earlier.arrival_s for earlier, later in pairwise(entries)]
    span_s = sum(gaps)
    return {
        "num_requests": len(entries),
        "span_s": span_s,
        "mean_input_tokens": total / len(entries),
        "mean_output_tokens": fmean(entry.output_tokens for entry in entries),
        "num_sessions": len({entry.session for entry in entries} - {""}),
        "num_tenants": len({entry.tenant for entry in entries} - {""}),
        "repeated_share": repeated / max(total, 1),
        "gap_variation": pstdev(gaps) / fmean(gaps) if span_s else 0.0,
    }


_AZURE_COLUMNS = ("TIMESTAMP", "ContextTokens", "GeneratedTokens")
_BURSTGPT_COLUMNS = ("Timestamp", "Model", "Request tokens", "Response tokens", "Total tokens", "Log Type")
_MOST_TOKENS = 1 << 24


def parse_mooncake(lines: Iterable[str]) -> Iterator[TraceEntry]:
    """Entries of a Mooncake trace: one JSON object a line; session_id and tenant are taken where they are there."""
    for number, line in enumerate(lines, start=1):
        if not line.strip():
            continue
        try:
            row = json.loads(line)
            yield TraceEntry(
                arrival_s=_time(float(row["timestamp"]) / 1000),
                input_tokens=_tokens(row["input_length"]),
                output_tokens=_tokens(row["output_length"]),
                hash_ids=tuple(int(hash_id) for hash_id in row["hash_ids"]),
                session=str(row.get("session_id", "")),
                tenant=str(row.get("tenant", "")),
            )
        except (ValueError, KeyError, TypeError, AttributeError, OverflowError) as error:
            raise ConfigError(f"trace line {number} is not a Mooncake request: {error!r}") from error


def _tokens(value: str | int | None) -> int:
    number = int(value) if value is not None else -1
    if not 0 <= number <= _MOST_TOKENS:
        raise ValueError(f"{value!r} is no number of tokens")
    return number


def _time(seconds: float) -> float:
    if not 0 <= seconds < 1e12:
        raise ValueError(f"{seconds} s is no time of arrival")
    return seconds


def _azure_time(text: str) -> datetime:
    """ "2023-11-16 18:17:03.9799600" or, from 2024, "2024-05-10 00:00:00.009930+00:00"; the zone is UTC."""
    whole, _, fraction = text.removesuffix("+00:00").partition(".")
    return datetime.fromisoformat(f"{whole}.{(fraction + '000000')[:6]}").replace(tzinfo=UTC)


def parse_azure(lines: Iterable[str]) -> Iterator[TraceEntry]:
    """Entries of an Azure LLM trace of 2023 or 2024; the first arrives at 0. Lengths only: it has no prefixes."""
    rows = csv.DictReader(lines)
    if tuple(rows.fieldnames or ()) != _AZURE_COLUMNS:
        raise ConfigError(f"an Azure trace starts with the columns {','.join(_AZURE_COLUMNS)}")
    start: datetime | None = None
    for row in rows:
        try:
            now = _azure_time(row["TIMESTAMP"])
            start = start or now
            arrival_s = _time((now - start).total_seconds())
            yield TraceEntry(arrival_s, _tokens(row["ContextTokens"]), _tokens(row["GeneratedTokens"]))
        except (ValueError, TypeError, AttributeError) as error:
            raise ConfigError(f"trace line {rows.line_num} is not an Azure request: {error}") from error


def parse_burstgpt(lines: Iterable[str]) -> Iterator[TraceEntry]:
    """Entries of a BurstGPT trace; the first arrives at 0. Its tenant is the model, its session the Session ID, if any.

    Requests that failed (no response tokens) are left out. A conversation's prompt that is at least as long as the one
    before with its answer is taken to begin with both; the trace does not say so.
    """
    rows = csv.DictReader(lines)
    if missing := set(_BURSTGPT_COLUMNS) - set(rows.fieldnames or ()):
        raise ConfigError(f"a BurstGPT trace has the columns {', '.join(_BURSTGPT_COLUMNS)}; missing: {min(missing)}")
    fresh = count()
    prompts: dict[str, tuple[GrowingPrompt, int]] = {}  # and how long the conversation is with its last answer
    start_s: float | None = None
    for row in rows:
        try:
            now_s = _time(float(row["Timestamp"]))
            start_s = now_s if start_s is None else start_s
            arrival_s = _time(now_s - start_s)
            num_input, num_output = _tokens(row["Request tokens"]), _tokens(row["Response tokens"])
        except (ValueError, TypeError) as error:
            raise ConfigError(f"trace line {rows.line_num} is not a BurstGPT request: {error}") from error
        if not num_input or not num_output:
            continue
        session = (row.get("Session ID") or "").strip()
        prompt, so_far = prompts.get(session, (None, 0))
        if prompt is None or num_input < so_far:
            prompt = GrowingPrompt(fresh)
        if session:
            prompts[session] = (prompt, num_input + num_output)
        yield TraceEntry(arrival_s, num_input, num_output, prompt.ids(num_input), session=session, tenant=row["Model"])


def parse_csv(lines: Iterable[str]) -> Iterator[TraceEntry]:
    """Of either project, by the first line."""
    lines = iter(lines)
    head = next(lines, "")
    parse = parse_burstgpt if "Request tokens" in head else parse_azure
    return parse(chain([head.removeprefix("\ufeff")], lines))


def parse_trace(lines: Iterable[str], *, is_csv: bool, limit: int) -> list[TraceEntry]:
    """The first `limit` entries."""
    return list(islice(parse_csv(lines) if is_csv else parse_mooncake(lines), limit))
