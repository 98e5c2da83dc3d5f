"""Sums and percentiles over a simulation's requests, as a table and as one picture of several simulations."""

from array import array
from collections import Counter, defaultdict
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from statistics import fmean
from typing import Any

import numpy as np
from numpy.typing import NDArray
from rich import box
from rich.console import Console
from rich.table import Table

from kvrelay.cluster.simulator.requests import SimulatedRequest
from kvrelay.errors import ConfigError

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
    num_local: int = 0  # of completed requests: their decode worker computed the prompt
    local_tokens: int = 0  # that it computed
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
        self.num_local += job.is_local
        self.local_tokens += job.is_local * (job.num_tokens - job.cached_tokens)

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
            "local_prefill": {
                "share": self.num_local / max(self.outcomes["done"], 1),
                "mean_tokens": self.local_tokens / max(self.num_local, 1),
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
    "req/s", "good/s", "kept", "TTFT p50 s", "p99", "TPOT p50 ms", "p99", "hits", "local", "P busy", "D busy",
    "refused",
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
        share(summary["local_prefill"]["share"]),
        share(workers["prefill"]["utilisation"]),
        share(workers["decode"]["utilisation"]),
        str(summary["requests"] - summary["outcomes"].get("done", 0)),
    ]


def number(value: float | None, factor: float = 1.0) -> str:
    """Three digits; a dash for None."""
    return "–" if value is None else f"{value * factor:.3g}" if value * factor < 1000 else f"{value * factor:.0f}"


def share(value: float) -> str:
    return f"{100 * value:.1f}%"


SUFFIXES = (".png", ".jpg", ".jpeg", ".webp", ".svg", ".pdf")
HELD_SHARE = 0.9  # of requests within the SLO: a load that is held
_COLOURS = 10


@dataclass(frozen=True, slots=True)
class Run:
    """One simulation: its name, its load in requests per second, and its summary."""

    name: str
    load: float
    summary: dict[str, Any]


def runs_of(summaries: Sequence[dict[str, Any]]) -> list[Run]:
    def name_of(one: dict[str, Any]) -> str:
        return str(one["scenario"].get("settings", {}).get("router", {}).get("policy", "default policy"))

    return [Run(name_of(one), one["offered_per_s"], one) for one in summaries]


def check_picture(path: Path) -> None:
    """Check the path before simulating. Raises ConfigError: unknown format, or no such folder."""
    if path.suffix.lower() not in SUFFIXES:
        raise ConfigError(f"{path}: unknown picture format; choose one of {', '.join(SUFFIXES)}")
    if not path.absolute().parent.is_dir():
        raise ConfigError(f"{path}: no such folder")


def held_load(runs: Sequence[Run]) -> float:
    held = [run.load for run in runs if run.summary["kept_share"] >= HELD_SHARE]
    return max(held) if held else min(run.load for run in runs)


def over_load(
    runs: Sequence[Run], figure: Callable[[dict[str, Any]], float | None]
) -> dict[str, list[tuple[float, float]]]:
    """By name: (load, mean of the figure over its runs), ascending; loads without the figure are left out."""
    values: defaultdict[str, defaultdict[float, list[float]]] = defaultdict(lambda: defaultdict(list))
    for run in runs:
        if (value := figure(run.summary)) is not None:
            values[run.name][round(run.load, 2)].append(value)
    return {name: sorted((load, fmean(found)) for load, found in loads.items()) for name, loads in values.items()}


def nearest(runs: Sequence[Run], load: float) -> dict[str, Run]:
    found: dict[str, Run] = {}
    for run in runs:
        if run.name not in found or abs(run.load - load) < abs(found[run.name].load - load):
            found[run.name] = run
    return found


def plot(runs: Sequence[Run], path: Path, *, title: str, ttft_slo_s: float = 5.0, tpot_slo_s: float = 0.1) -> None:
    """Write the picture in the format of its suffix. Raises ConfigError or OSError."""
    check_picture(path)
    from matplotlib.figure import Figure
    from matplotlib.lines import Line2D

    names = list(dict.fromkeys(run.name for run in runs))
    colours = {name: f"C{index % _COLOURS}" for index, name in enumerate(names)}
    styles = {name: ("-", "--", ":")[index // _COLOURS % 3] for index, name in enumerate(names)}
    looks: dict[str, dict[str, Any]] = {name: {"color": colours[name], "linestyle": styles[name]} for name in names}
    at = held_load(runs)
    figure = Figure(figsize=(16, 9))
    axes = figure.subplots(2, 3)
    for panel, heading, value in (
        (axes[0][0], "goodput, requests/s", lambda one: one["goodput_per_s"]),
        (axes[0][1], "prompt tokens found in caches", lambda one: one["hit_ratio"]),
        (axes[0][2], "TTFT p99, s", lambda one: one["ttft_s"].get("p99")),
        (axes[1][2], "busy prefill workers", lambda one: one["workers"]["prefill"]["utilisation"]),
    ):
        _draw_over_load(panel, heading, over_load(runs, value), looks)
    _draw_all_kept(axes[0][0])
    if axes[0][2].lines:
        axes[0][2].set_ylim(auto=True)
        axes[0][2].set_yscale("log")
    axes[0][2].axhline(ttft_slo_s, color="grey", linewidth=1)
    chosen = nearest(runs, at)
    _draw_shares(axes[1][0], f"TTFT, s, at {at:.3g} requests/s", chosen, "ttft_percentiles_s", ttft_slo_s, looks)
    if axes[1][0].lines:
        axes[1][0].set_xscale("log")
    _draw_shares(axes[1][1], f"TPOT, s, at {at:.3g} requests/s", chosen, "tpot_percentiles_s", tpot_slo_s, looks)
    axes[1][1].set_xlim(0, 1.5 * tpot_slo_s)
    handles = [Line2D([], [], label=name, **looks[name]) for name in names]
    figure.legend(handles=handles, loc="lower center", ncols=min(len(names), 7), frameon=False)
    figure.suptitle(title)
    figure.tight_layout(rect=(0, 0.03 + 0.025 * (len(names) > 7), 1, 1))
    figure.savefig(path, dpi=110)


def _draw_over_load(axes: Any, title: str, lines: dict[str, list[tuple[float, float]]], looks: dict[str, Any]) -> None:
    axes.set(title=title, xlabel="requests/s offered")
    axes.grid(alpha=0.3)
    for name, points in lines.items():
        axes.plot([load for load, _ in points], [value for _, value in points], marker="o", markersize=3, **looks[name])
    axes.set_ylim(bottom=0)


def _draw_all_kept(axes: Any) -> None:
    most = axes.get_xlim()[1]
    axes.plot([0, most], [0, most], color="grey", linewidth=1)
    axes.set_xlim(0, most)


def _draw_shares(axes: Any, title: str, chosen: dict[str, Run], key: str, slo_s: float, looks: dict[str, Any]) -> None:
    axes.set(title=title, ylabel="share of requests", ylim=(0, 1.02))
    axes.grid(alpha=0.3)
    for name, run in chosen.items():
        if values := run.summary.get(key):
            axes.plot(values, [index / (len(values) - 1) for index in range(len(values))], **looks[name])
    axes.axvline(slo_s, color="grey", linewidth=1)
