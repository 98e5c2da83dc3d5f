"""The last 15 minutes of one ingress: a point every 5 s, and how fast KV travels between workers.

Pure: a timer feeds it with the counters of ServeStats, so that no token and no request pays for it; the clock is an
argument. Memory is fixed: NUM_POINTS points of ten numbers, and WINDOW and FLOW_PERIODS sets of counters.
"""

from collections import Counter, deque
from collections.abc import Sequence
from dataclasses import dataclass, fields
from typing import Any

from kvrelay.serve.telemetry.observer import Flow, ServeStats

PERIOD_S = 5.0
NUM_POINTS = 180  # 15 minutes
WINDOW = 3  # a point is over that many periods: percentiles of a single one would be of a few requests
FLOW_PERIODS = 6  # KV flows are means over that many
LATE = 1.5  # a sample that comes so many periods after the one before leaves a gap
_SERVED = ("stop", "length", "client")  # outcomes of sequences that were neither refused nor failed


@dataclass(frozen=True, slots=True)
class Point:
    """Means and percentiles over the last WINDOW periods. None: nothing to measure."""

    requests_per_s: float  # sequences that ended
    failed_per_s: float  # of those, refused or failed
    prompt_tokens_per_s: float
    output_tokens_per_s: float
    ttft_p50_s: float | None
    ttft_p99_s: float | None
    itl_p50_s: float | None
    itl_p99_s: float | None
    hit_share: float | None  # of the prompt tokens looked up in prefix caches, those found
    kv_bytes_per_s: float


_Counts = tuple[int, ...]
"""Counters of the ingress since its start, or in a period: ended, served, prompt, output, looked-up and cached tokens,
KV bytes, then the buckets of TTFT, then those of ITL.
"""


def quantile(bounds: Sequence[float], counts: Sequence[int], share: float) -> float | None:
    """The value below which `share` of the observations lie, interpolated within its bucket; None without any.

    Exact to the width of that bucket. Above the last bound: that bound.

    Args:
        bounds: upper bounds, ascending.
        counts: observations per bucket, one more than bounds.
    """
    rank = share * sum(counts)
    if not rank:
        return None
    below, low = 0, 0.0
    for bound, count in zip(bounds, counts, strict=False):
        if count and below + count >= rank:
            return low + (bound - low) * (rank - below) / count
        below, low = below + count, bound
    return low


class History:
    """Rates and percentiles of the last 15 minutes, a point for each period, oldest first."""

    def __init__(self) -> None:
        self._points: deque[Point | None] = deque(maxlen=NUM_POINTS)  # None: a gap
        self._recent: deque[tuple[float, _Counts]] = deque(maxlen=WINDOW)  # seconds, counts in them
        self._flows: deque[tuple[float, Counter[Flow]]] = deque(maxlen=FLOW_PERIODS)
        self._kv_bytes = 0
        self._last: tuple[float, _Counts] | None = None

    def record(self, stats: ServeStats, now_s: float) -> None:
        """The period that began with the call before is over. Takes the KV flows out of `stats`."""
        flows, stats.kv_flows = stats.kv_flows, Counter()
        self._kv_bytes += flows.total()
        counts = _counts(stats, self._kv_bytes)
        if self._last is not None and now_s > self._last[0]:
            period = tuple(now - before for now, before in zip(counts, self._last[1], strict=True))
            self._add(now_s - self._last[0], period, flows)
            self._points.append(_point(self._recent, stats.ttft_s.bounds, stats.itl_s.bounds))
        self._last = now_s, counts

    def _add(self, seconds: float, counts: _Counts, flows: Counter[Flow]) -> None:
        if seconds > LATE * PERIOD_S:
            self._points.extend([None] * min(round(seconds / PERIOD_S) - 1, NUM_POINTS))
            self._recent.clear()
            self._flows.clear()
        self._recent.append((seconds, counts))
        self._flows.append((seconds, flows))

    def view(self, now_s: float) -> dict[str, Any]:
        """As plain data: for each field of Point its values, oldest first, None in gaps; `age_s` of the newest.

        `flows`: source, target, transport and bytes per second, means over the last FLOW_PERIODS periods.
        """
        columns = {
            field.name: [None if point is None else _short(getattr(point, field.name)) for point in self._points]
            for field in fields(Point)
        }
        return {
            "period_s": PERIOD_S,
            "num_points": NUM_POINTS,
            "age_s": 0.0 if self._last is None else now_s - self._last[0],
            "points": columns,
            "flows": self._rates(),
        }

    def _rates(self) -> list[dict[str, Any]]:
        seconds = sum(one for one, _ in self._flows)
        moved: Counter[Flow] = sum((one for _, one in self._flows), Counter())
        return [
            {"source": source, "target": target, "transport": transport, "bytes_per_s": _short(num_bytes / seconds)}
            for (source, target, transport), num_bytes in moved.most_common()
        ]


def _short(value: float | None) -> float | None:
    """Four significant digits: what a chart shows."""
    return None if value is None else float(f"{value:.4g}")


def _counts(stats: ServeStats, kv_bytes: int) -> _Counts:
    return (
        stats.outcomes.total(),
        sum(stats.outcomes[name] for name in _SERVED),
        stats.prompt_tokens,
        stats.output_tokens,
        stats.looked_up_tokens,
        stats.cached_prefix_tokens,
        kv_bytes,
        *stats.ttft_s.counts,
        *stats.itl_s.counts,
    )


def _point(recent: Sequence[tuple[float, _Counts]], ttft_bounds: Sequence[float], itl_bounds: Sequence[float]) -> Point:
    seconds = sum(one for one, _ in recent)
    total = [sum(values) for values in zip(*(counts for _, counts in recent), strict=True)]
    ended, served, prompt, output, looked_up, cached, kv_bytes, *buckets = total
    ttft, itl = buckets[: len(ttft_bounds) + 1], buckets[len(ttft_bounds) + 1 :]
    return Point(
        requests_per_s=ended / seconds,
        failed_per_s=(ended - served) / seconds,
        prompt_tokens_per_s=prompt / seconds,
        output_tokens_per_s=output / seconds,
        ttft_p50_s=quantile(ttft_bounds, ttft, 0.5),
        ttft_p99_s=quantile(ttft_bounds, ttft, 0.99),
        itl_p50_s=quantile(itl_bounds, itl, 0.5),
        itl_p99_s=quantile(itl_bounds, itl, 0.99),
        hit_share=min(1.0, cached / looked_up) if looked_up else None,  # a continued sequence may find its own output
        kv_bytes_per_s=kv_bytes / seconds,
    )
