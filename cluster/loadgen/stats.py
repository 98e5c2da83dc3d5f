"""What the load generator counts: per-request records, percentiles, goodput, one summary. Pure.

Owns the meaning of the figures:
  * TTFT: request sent to the first chunk that carries text.
  * ITL: each gap between tokens. Only chunks have arrival times, so a chunk that carries k tokens
    counts as k gaps: the time since the previous chunk, then k - 1 gaps of zero. The sum is right, and
    a stall stays visible as one long gap instead of being spread thin.
  * TPOT: (end - first token) / (tokens - 1), one figure per request; none for one-token answers.
  * E2E: request sent to the end of the stream.
  * goodput: requests per second that succeeded within the SLO.
  * lateness: request sent later than it was due, because the generator itself was slow.
"""

from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

OK = "ok"
UNFINISHED = "unfinished"
LATE_S = 0.05


@dataclass(frozen=True, slots=True)
class LoadRecord:
    """One request as the client saw it. Times are seconds; `scheduled_s` and `started_s` since the run began.

    It was scheduled for its arrival time, or in a closed loop for when its client became free.
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


def distribution(values: Iterable[float]) -> Distribution:
    """Mean and percentiles of any values."""
    import numpy as np  # here: `kvrelay bench --help` stays fast

    found = np.fromiter(values, np.float64)
    if not found.size:
        return Distribution()
    p50, p90, p95, p99 = np.percentile(found, (50, 90, 95, 99)).tolist()
    return Distribution(found.size, float(found.mean()), p50, p90, p95, p99, float(found.max()))


def token_gaps(chunk_gaps_s: Sequence[float], num_tokens: int) -> list[float]:
    """One answer's gaps: its chunks', and a gap of zero for each token that shared a chunk.

    Args:
        chunk_gaps_s: time between chunks, one fewer than chunks.
        num_tokens: tokens of the whole answer.
    """
    return [*chunk_gaps_s, *[0.0] * max(num_tokens - 1 - len(chunk_gaps_s), 0)]


def concurrency_steps(records: Sequence[LoadRecord]) -> tuple[list[float], list[int]]:
    """How many requests were in flight from each moment on: times in seconds, counts."""
    # at equal times an end (-1) comes before a start
    edges = sorted(edge for record in records for edge in ((record.started_s, 1), (record.end_s, -1)))
    times, counts, now = [0.0], [0], 0
    for time_s, change in edges:
        now += change
        times.append(time_s)
        counts.append(now)
    return times, counts


def _times(records: Iterable[LoadRecord], name: str) -> Distribution:
    values = (getattr(record, name) for record in records)
    return distribution(value for value in values if value is not None)


class Summary:
    """Everything that a run reports, as attributes; the JSON file has the same names.

    Rates are per second of `duration_s`: first request sent to last answer.

    Args:
        gaps_s: ITLs of the successful requests.
        cpu_share: of one core, by the generator.
    """

    def __init__(
        self, records: Sequence[LoadRecord], gaps_s: Sequence[float], slo: Slo, cpu_share: float = 0.0
    ) -> None:
        ok = [record for record in records if record.outcome == OK]
        outcomes = Counter(record.outcome for record in records if record.outcome not in (OK, UNFINISHED))
        start_s = min((record.started_s for record in records), default=0.0)
        good = sum(slo.is_met(record) for record in records)
        self.duration_s = max((record.end_s for record in records), default=0.0) - start_s
        per_s = 1 / self.duration_s if self.duration_s > 0 else 0.0
        self.num_requests = len(records)
        self.num_ok = len(ok)
        self.num_rejected = outcomes["http 429"]
        self.num_failed = sum(outcomes.values()) - self.num_rejected
        self.num_unfinished = sum(record.outcome == UNFINISHED for record in records)
        self.errors = dict(outcomes.most_common())
        self.ttft_s = _times(ok, "ttft_s")
        self.itl_s = distribution(gaps_s)
        self.tpot_s = _times(ok, "tpot_s")
        self.e2e_s = _times(ok, "e2e_s")
        self.prompt_tokens = sum(record.num_prompt_tokens for record in ok)
        self.output_tokens = sum(record.num_output_tokens for record in ok)
        self.cached_tokens = sum(record.num_cached_tokens for record in ok)
        self.requests_per_s = len(ok) * per_s
        self.output_tokens_per_s = self.output_tokens * per_s
        self.prompt_tokens_per_s = self.prompt_tokens * per_s
        self.goodput_per_s = good * per_s
        self.slo_attainment = good / max(len(records) - self.num_unfinished, 1)  # of those not stopped by us
        self.slo = slo
        self.max_concurrency = max(concurrency_steps(records)[1])
        self.num_wrong_length = sum(0 < record.wanted_tokens != record.num_output_tokens for record in ok)
        self.num_estimated = sum(record.is_estimated for record in ok)  # without usage: their tokens are chunks
        self.late_s = distribution(record.started_s - record.scheduled_s for record in records)
        self.cpu_share = cpu_share

    @property
    def is_late(self) -> bool:
        """Whether the generator sent its requests late: then the latencies are partly its own."""
        return self.late_s.p99 > LATE_S
