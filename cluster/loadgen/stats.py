"""What the load generator counts: per-request records, percentiles, goodput, one summary. Pure.

Owns the meaning of the figures:
  * TTFT: request sent to the first chunk that carries text.
  * ITL: each gap between tokens. Only chunks have arrival times, so a chunk that carries k tokens
    counts as k gaps: the time since the previous chunk, then k - 1 gaps of zero. The sum is right, and
    a stall stays visible as one long gap instead of being spread thin.
  * TPOT: (end - first token) / (tokens - 1), one figure per request; none for one-token answers.
  * E2E: request sent to the end of the stream.
  * goodput: requests per second that succeeded within the SLO.
Imports no clock, socket or random source.
"""

import math
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

OK = "ok"
UNFINISHED = "unfinished"
_QUANTILES = (50.0, 90.0, 95.0, 99.0)


@dataclass(frozen=True, slots=True)
class LoadRecord:
    """One request as the client saw it. Times are seconds; `scheduled_s` and `started_s` since the run began.

    `outcome` is "ok", "unfinished" (stopped by us), "http <status>", or what went wrong in words.
    `num_output_tokens` comes from the server's usage, else from the number of chunks (`is_estimated`).
    """

    index: int
    scheduled_s: float
    started_s: float
    outcome: str
    ttft_s: float | None = None
    e2e_s: float | None = None
    num_prompt_tokens: int = 0
    num_output_tokens: int = 0
    num_cached_tokens: int = 0
    num_chunks: int = 0
    wanted_tokens: int = 0
    is_estimated: bool = False

    @property
    def tpot_s(self) -> float | None:
        """(end - first token) / (tokens - 1), or None for fewer than two tokens."""
        if self.ttft_s is None or self.e2e_s is None or self.num_output_tokens < 2:
            return None
        return (self.e2e_s - self.ttft_s) / (self.num_output_tokens - 1)

    @property
    def end_s(self) -> float:
        return self.started_s + (self.e2e_s or 0.0)


@dataclass(frozen=True, slots=True)
class Slo:
    """Limits that a good request meets. None: no limit."""

    ttft_s: float | None = None
    tpot_s: float | None = None

    def is_met(self, record: LoadRecord) -> bool:
        """Whether the request succeeded inside every limit (a one-token answer has no TPOT to miss)."""
        if record.outcome != OK or record.ttft_s is None:
            return False
        if self.ttft_s is not None and record.ttft_s > self.ttft_s:
            return False
        return self.tpot_s is None or (record.tpot_s or 0.0) <= self.tpot_s


class GapHistogram:
    """Gaps in seconds in buckets 1 % apart, so that memory stays fixed however many tokens arrive.

    Percentiles are right to 0.5 %; gaps under 1 µs count as zero. Count and sum are exact.
    """

    _FLOOR_S = 1e-6
    _STEP = math.log(1.01)

    def __init__(self) -> None:
        self._buckets: Counter[int] = Counter()  # -1 holds the zeros
        self.count = 0
        self.sum_s = 0.0
        self.max_s = 0.0

    def add(self, gap_s: float, times: int = 1) -> None:
        """Count one gap `times` times."""
        if times <= 0:
            return
        bucket = -1 if gap_s < self._FLOOR_S else int(math.log(gap_s / self._FLOOR_S) / self._STEP)
        self._buckets[bucket] += times
        self.count += times
        self.sum_s += gap_s * times
        self.max_s = max(self.max_s, gap_s)

    def percentile(self, q: float) -> float:
        """The value that q % of the gaps do not exceed, seconds; 0 when empty."""
        rank, seen = math.ceil(self.count * q / 100), 0
        for bucket in sorted(self._buckets):
            seen += self._buckets[bucket]
            if seen >= max(rank, 1):
                return self._middle(bucket)
        return 0.0

    def cumulative(self) -> list[tuple[float, float]]:
        """(gap in seconds, share of gaps up to it), ascending: what a plot wants."""
        points, seen = [], 0
        for bucket in sorted(self._buckets):
            seen += self._buckets[bucket]
            points.append((self._middle(bucket), seen / self.count))
        return points

    def _middle(self, bucket: int) -> float:
        if bucket < 0:
            return 0.0
        return min(self._FLOOR_S * math.exp((bucket + 0.5) * self._STEP), self.max_s)


@dataclass(frozen=True, slots=True)
class Distribution:
    """Mean and percentiles of one measure, seconds."""

    count: int = 0
    mean: float = 0.0
    p50: float = 0.0
    p90: float = 0.0
    p95: float = 0.0
    p99: float = 0.0
    max: float = 0.0


@dataclass(frozen=True, slots=True)
class OwnLag:
    """How late the generator itself ran: a saturated generator measures itself, not the server."""

    loop: Distribution = Distribution()  # a timer's lateness in the event loop
    dispatch: Distribution = Distribution()  # request sent later than its arrival time
    cpu_share: float = 0.0  # of one core

    @property
    def is_saturated(self) -> bool:
        return self.loop.p99 > 0.02 or self.dispatch.p99 > 0.05 or self.cpu_share > 0.8


@dataclass(frozen=True, slots=True)
class Summary:
    """Everything that a run reports. Rates are per second of `duration_s`: first request sent to last answer."""

    duration_s: float
    num_requests: int
    num_ok: int
    num_rejected: int  # HTTP 429
    num_failed: int  # neither ok, 429 nor stopped by us
    num_unfinished: int
    errors: dict[str, int]
    ttft_s: Distribution
    itl_s: Distribution
    tpot_s: Distribution
    e2e_s: Distribution
    requests_per_s: float
    output_tokens_per_s: float
    prompt_tokens_per_s: float
    goodput_per_s: float
    slo_attainment: float  # good requests over those sent and not stopped by us
    slo: Slo
    prompt_tokens: int
    output_tokens: int
    cached_tokens: int
    max_concurrency: int
    num_wrong_length: int  # ok, but not as many tokens as were asked for
    num_estimated: int  # ok, but the server sent no usage: tokens are chunks
    lag: OwnLag = field(default_factory=OwnLag)

    def as_dict(self) -> dict[str, Any]:
        """Plain data for JSON."""
        return asdict(self)


def percentile(ordered: Sequence[float], q: float) -> float:
    """The q-th percentile of ascending values, linear between neighbours (numpy's default). 0 when empty."""
    if not ordered:
        return 0.0
    place = (len(ordered) - 1) * q / 100
    low = math.floor(place)
    high = min(low + 1, len(ordered) - 1)
    return ordered[low] + (ordered[high] - ordered[low]) * (place - low)


def distribution(values: Iterable[float]) -> Distribution:
    """Mean and percentiles of any values."""
    ordered = sorted(values)
    if not ordered:
        return Distribution()
    p50, p90, p95, p99 = (percentile(ordered, q) for q in _QUANTILES)
    return Distribution(len(ordered), math.fsum(ordered) / len(ordered), p50, p90, p95, p99, ordered[-1])


def gap_distribution(gaps: GapHistogram) -> Distribution:
    """The same of a histogram of gaps."""
    if not gaps.count:
        return Distribution()
    p50, p90, p95, p99 = (gaps.percentile(q) for q in _QUANTILES)
    return Distribution(gaps.count, gaps.sum_s / gaps.count, p50, p90, p95, p99, gaps.max_s)


def add_gaps(gaps: GapHistogram, chunk_gaps_s: Sequence[float], num_tokens: int) -> None:
    """Count one answer: its chunks' gaps, and a gap of zero for each token that shared a chunk.

    Args:
        chunk_gaps_s: time between chunks, one fewer than chunks.
        num_tokens: tokens of the whole answer.
    """
    for gap in chunk_gaps_s:
        gaps.add(gap)
    gaps.add(0.0, max(num_tokens - 1 - len(chunk_gaps_s), 0))


def max_concurrency(records: Iterable[LoadRecord]) -> int:
    """The most requests that were in flight at once."""
    edges = [edge for record in records for edge in ((record.started_s, 1), (record.end_s, -1))]
    now = most = 0
    for _, change in sorted(edges):  # at equal times an end (-1) comes before a start
        now += change
        most = max(most, now)
    return most


def count_good(records: Iterable[LoadRecord], slo: Slo) -> int:
    """Requests that met the SLO."""
    return sum(slo.is_met(record) for record in records)


def _times(records: Iterable[LoadRecord], name: str) -> Distribution:
    values = (getattr(record, name) for record in records)
    return distribution(value for value in values if value is not None)


def summarize(records: Sequence[LoadRecord], gaps: GapHistogram, slo: Slo, lag: OwnLag | None = None) -> Summary:
    """All figures of one run. `gaps` holds the ITLs of the successful requests."""
    ok = [record for record in records if record.outcome == OK]
    outcomes = Counter(record.outcome for record in records if record.outcome not in (OK, UNFINISHED))
    num_unfinished = sum(record.outcome == UNFINISHED for record in records)
    start_s = min((record.started_s for record in records), default=0.0)
    duration_s = max((record.end_s for record in records), default=0.0) - start_s
    per_s = 1 / duration_s if duration_s > 0 else 0.0
    good = count_good(records, slo)
    output_tokens = sum(record.num_output_tokens for record in ok)
    prompt_tokens = sum(record.num_prompt_tokens for record in ok)
    return Summary(
        duration_s=duration_s,
        num_requests=len(records),
        num_ok=len(ok),
        num_rejected=outcomes["http 429"],
        num_failed=sum(outcomes.values()) - outcomes["http 429"],
        num_unfinished=num_unfinished,
        errors=dict(outcomes.most_common()),
        ttft_s=_times(ok, "ttft_s"),
        itl_s=gap_distribution(gaps),
        tpot_s=_times(ok, "tpot_s"),
        e2e_s=_times(ok, "e2e_s"),
        requests_per_s=len(ok) * per_s,
        output_tokens_per_s=output_tokens * per_s,
        prompt_tokens_per_s=prompt_tokens * per_s,
        goodput_per_s=good * per_s,
        slo_attainment=good / max(len(records) - num_unfinished, 1),
        slo=slo,
        prompt_tokens=prompt_tokens,
        output_tokens=output_tokens,
        cached_tokens=sum(record.num_cached_tokens for record in ok),
        max_concurrency=max_concurrency(records),
        num_wrong_length=sum(0 < record.wanted_tokens != record.num_output_tokens for record in ok),
        num_estimated=sum(record.is_estimated for record in ok),
        lag=lag or OwnLag(),
    )
