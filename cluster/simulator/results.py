"""Sums and percentiles over a simulation's requests. Pure."""

from array import array
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from numpy.typing import NDArray
from rich import box
from rich.console import Console
from rich.table import Table

from kvrelay.cluster.simulator.requests import SimulatedRequest

QUANTILES = (50, 90, 95, 99)


@dataclass(slots=True)
class Tally:
    """Counts requests that have ended; those that arrived before `from_s` are ignored."""

    from_s: float
    ttft_slo_s: float
    tpot_slo_s: float
    outcomes: Counter[str] = field(default_factory=Counter)
    arrival_s: "array[float]" = field(default_factory=lambda: array("d"))
    ttft_s: "array[float]" = field(default_factory=lambda: array("d"))  # of completed requests
    tpot_s: "array[float]" = field(default_factory=lambda: array("d"))  # of those with more than one token
    num_kept: int = 0
    num_ttft_kept: int = 0
    num_tpot_kept: int = 0
    prompt_tokens: int = 0  # of completed requests
    output_tokens: int = 0
    cached_tokens: int = 0
    tier_tokens: int = 0
    num_attempts: int = 0
    kept_at_s: "array[float]" = field(default_factory=lambda: array("d"))  # arrivals of requests within both

    def add(self, job: SimulatedRequest) -> None:
        if job.arrival_s < self.from_s:
            return
        self.outcomes[job.outcome] += 1
        self.arrival_s.append(job.arrival_s)
        self.num_attempts += job.num_attempts
        if job.outcome != "done":
            return
        ttft_s, tpot_s = job.ttft_s, job.tpot_s
        self.ttft_s.append(ttft_s)
        if job.output_tokens > 1:
            self.tpot_s.append(tpot_s)
        is_in_time, is_fast = ttft_s <= self.ttft_slo_s, tpot_s <= self.tpot_slo_s
        self.num_ttft_kept += is_in_time
        self.num_tpot_kept += is_fast
        if is_in_time and is_fast:
            self.num_kept += 1
            self.kept_at_s.append(job.arrival_s)
        self.prompt_tokens += job.num_tokens
        self.output_tokens += job.output_tokens
        self.cached_tokens += job.cached_tokens
        self.tier_tokens += job.tier_tokens

    def summary(self) -> dict[str, Any]:
        """Times in seconds; goodput: requests within both SLOs per second of arrivals."""
        count = len(self.arrival_s)
        span_s = max(max(self.arrival_s, default=0.0) - self.from_s, 1e-9)
        prompt = max(self.prompt_tokens, 1)
        return {
            "requests": count,
            "outcomes": dict(sorted(self.outcomes.items())),
            "offered_per_s": count / span_s,
            "goodput_per_s": self.num_kept / span_s,
            "kept_share": self.num_kept / max(count, 1),
            "ttft_kept_share": self.num_ttft_kept / max(count, 1),
            "tpot_kept_share": self.num_tpot_kept / max(count, 1),
            "ttft_s": quantiles(np.asarray(self.ttft_s)),
            "tpot_s": quantiles(np.asarray(self.tpot_s)),
            "prompt_tokens": self.prompt_tokens,
            "output_tokens": self.output_tokens,
            "hit_ratio": self.cached_tokens / prompt,
            "hit_ratio_by_tier": {
                "pool": (self.cached_tokens - self.tier_tokens) / prompt,
                "lower_tiers": self.tier_tokens / prompt,
            },
            "attempts": self.num_attempts,
        }

    def percentiles(self) -> dict[str, list[float]]:
        """Percentiles 0 to 100 of TTFT and TPOT in seconds; empty without requests."""
        times = {"ttft_percentiles_s": self.ttft_s, "tpot_percentiles_s": self.tpot_s}
        return {
            name: [float(f"{cut:.4g}") for cut in np.percentile(np.asarray(values), range(101))] if len(values) else []
            for name, values in times.items()
        }


def quantiles(values: NDArray[np.float64]) -> dict[str, float]:
    """mean, p50, p90, p95, p99; empty without values."""
    if not len(values):
        return {}
    cuts = np.percentile(values, QUANTILES)
    return {"mean": float(values.mean())} | {f"p{q}": float(cut) for q, cut in zip(QUANTILES, cuts, strict=True)}


_COLUMNS = (
    "req/s", "good/s", "kept", "TTFT p50 s", "p99", "TPOT p50 ms", "p99", "hits", "P busy", "D busy", "refused",
)  # fmt: skip


def show(console: Console, summaries: Sequence[tuple[str, dict[str, Any]]]) -> None:
    table = Table(box=box.SIMPLE_HEAD, pad_edge=False, padding=(0, 1, 0, 0))
    table.add_column("", no_wrap=True)
    for name in _COLUMNS:
        table.add_column(name, justify="right", overflow="fold")
    for name, summary in summaries:
        table.add_row(name, *_cells(summary))
    console.print(table)


def _cells(summary: dict[str, Any]) -> list[str]:
    ttft, tpot, workers = summary["ttft_s"], summary["tpot_s"], summary["workers"]
    return [
        number(summary["offered_per_s"]),
        number(summary["goodput_per_s"]),
        share(summary["kept_share"]),
        number(ttft.get("p50")),
        number(ttft.get("p99")),
        number(tpot.get("p50"), 1000),
        number(tpot.get("p99"), 1000),
        share(summary["hit_ratio"]),
        share(workers["prefill"]["utilisation"]),
        share(workers["decode"]["utilisation"]),
        str(summary["requests"] - summary["outcomes"].get("done", 0)),
    ]


def number(value: float | None, factor: float = 1.0) -> str:
    """Three digits; a dash for None."""
    return "–" if value is None else f"{value * factor:.3g}" if value * factor < 1000 else f"{value * factor:.0f}"


def share(value: float) -> str:
    return f"{100 * value:.1f}%"
