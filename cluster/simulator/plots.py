"""One picture of simulations: goodput, hits, TTFT and busy prefill workers over the load; distributions at one load."""

from collections import defaultdict
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import fmean
from typing import Any

from kvrelay.errors import ConfigError

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
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    names = list(dict.fromkeys(run.name for run in runs))
    colours = {name: f"C{index % _COLOURS}" for index, name in enumerate(names)}
    styles = {name: ("-", "--", ":")[index // _COLOURS % 3] for index, name in enumerate(names)}
    looks = {name: {"color": colours[name], "linestyle": styles[name]} for name in names}
    at = held_load(runs)
    figure, axes = pyplot.subplots(2, 3, figsize=(16, 9))
    try:
        for panel, title, value in (
            (axes[0][0], "goodput, requests/s", lambda one: one["goodput_per_s"]),
            (axes[0][1], "prompt tokens found in caches", lambda one: one["hit_ratio"]),
            (axes[0][2], "TTFT p99, s", lambda one: one["ttft_s"].get("p99")),
            (axes[1][2], "busy prefill workers", lambda one: one["workers"]["prefill"]["utilisation"]),
        ):
            _draw_over_load(panel, title, over_load(runs, value), looks)
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
        handles = [pyplot.Line2D([], [], label=name, **looks[name]) for name in names]
        figure.legend(handles=handles, loc="lower center", ncols=min(len(names), 7), frameon=False)
        figure.suptitle(title)
        figure.tight_layout(rect=(0, 0.03 + 0.025 * (len(names) > 7), 1, 1))
        figure.savefig(path, dpi=110)
    finally:
        pyplot.close(figure)


def _draw_over_load(axes: Any, title: str, lines: dict[str, list[tuple[float, float]]], looks: dict[str, Any]) -> None:
    axes.set_title(title)
    axes.set_xlabel("requests/s offered")
    axes.grid(alpha=0.3)
    for name, points in lines.items():
        axes.plot([load for load, _ in points], [value for _, value in points], marker="o", markersize=3, **looks[name])
    axes.set_ylim(bottom=0)


def _draw_all_kept(axes: Any) -> None:
    most = axes.get_xlim()[1]
    axes.plot([0, most], [0, most], color="grey", linewidth=1)
    axes.set_xlim(0, most)


def _draw_shares(axes: Any, title: str, chosen: dict[str, Run], key: str, slo_s: float, looks: dict[str, Any]) -> None:
    axes.set_title(title)
    axes.set_ylabel("share of requests")
    axes.set_ylim(0, 1.02)
    axes.grid(alpha=0.3)
    for name, run in chosen.items():
        if values := run.summary.get(key):
            axes.plot(values, [index / (len(values) - 1) for index in range(len(values))], **looks[name])
    axes.axvline(slo_s, color="grey", linewidth=1)
