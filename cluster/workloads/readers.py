"""Trace files: Mooncake's JSON lines, Azure's and BurstGPT's CSV. Pure: lines in, entries out.

A line that is not what the format says raises ConfigError with its number.
"""

import csv
import json
from collections.abc import Iterable, Iterator
from datetime import UTC, datetime
from itertools import chain, count, islice

from kvrelay.cluster.workloads.trace import GrowingPrompt, TraceEntry
from kvrelay.errors import ConfigError

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
