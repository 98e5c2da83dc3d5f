"""Workloads by generator name or file, at a rate. Reads files; otherwise pure and seeded."""

from collections.abc import Callable
from dataclasses import dataclass, replace
from itertools import pairwise
from pathlib import Path
from statistics import fmean, pstdev

from kvrelay.cluster.workloads.conversations import AgentSpec, SessionSpec, conversation_entries, requests_per_start
from kvrelay.cluster.workloads.mixes import gamma_arrivals, mixed_entries, poisson_arrivals, switching_arrivals
from kvrelay.cluster.workloads.readers import parse_trace
from kvrelay.cluster.workloads.trace import (
    MOONCAKE_BUCKET_S,
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


@dataclass(frozen=True, slots=True)
class Outline:
    """Figures of a workload. Shares are of 1."""

    num_requests: int
    span_s: float
    mean_input_tokens: float
    mean_output_tokens: float
    num_sessions: int
    num_tenants: int
    repeated_share: float  # of prompt tokens: in leading blocks that an earlier prompt had
    gap_variation: float  # deviation of gaps over their mean; Poisson: 1


def outline(entries: list[TraceEntry]) -> Outline:
    """Figures of at least one entry, in order of arrival."""
    seen: set[int] = set()
    repeated = 0
    for entry in entries:
        leading = next((index for index, block in enumerate(entry.hash_ids) if block not in seen), len(entry.hash_ids))
        repeated += min(leading * entry.block_tokens, entry.input_tokens)
        seen.update(entry.hash_ids)
    total = sum(entry.input_tokens for entry in entries)
    gaps = [later.arrival_s - earlier.arrival_s for earlier, later in pairwise(entries)]
    span_s = sum(gaps)
    return Outline(
        num_requests=len(entries),
        span_s=span_s,
        mean_input_tokens=total / len(entries),
        mean_output_tokens=fmean(entry.output_tokens for entry in entries),
        num_sessions=len({entry.session for entry in entries} - {""}),
        num_tenants=len({entry.tenant for entry in entries} - {""}),
        repeated_share=repeated / max(total, 1),
        gap_variation=pstdev(gaps) / fmean(gaps) if span_s else 0.0,
    )
