"""One picture of a run: three distributions and the course over time. The only user of matplotlib here."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from kvrelay.cluster.loadgen.client import LoadResult
from kvrelay.cluster.loadgen.stats import OK, LoadRecord, Slo

SUFFIXES = ("", ".png", ".jpg", ".jpeg", ".webp", ".svg", ".pdf")  # without one: PNG


def _shares(values: Sequence[float]) -> tuple[list[float], list[float]]:
    """Ascending values in ms and the share of values up to each."""
    ordered = sorted(values)
    return [1000 * value for value in ordered], [(rank + 1) / len(ordered) for rank in range(len(ordered))]


def _draw_shares(axes: Any, title: str, points: tuple[Sequence[float], Sequence[float]], limit_s: float | None) -> None:
    axes.set_title(title)
    axes.set_xlabel("ms")
    axes.set_ylabel("share of values")
    axes.set_ylim(0, 1.02)
    axes.grid(alpha=0.3)
    if points[0]:
        axes.step(points[0], points[1], where="post")
    if limit_s is not None:
        axes.axvline(1000 * limit_s, color="tab:red", linestyle="--", label="SLO")
        axes.legend(loc="lower right")


def concurrency_steps(records: Sequence[LoadRecord]) -> tuple[list[float], list[int]]:
    """How many requests were in flight from each moment on: times in seconds, counts."""
    edges = sorted(edge for record in records for edge in ((record.started_s, 1), (record.end_s, -1)))
    times, counts, now = [0.0], [0], 0
    for time_s, change in edges:
        now += change
        times.append(time_s)
        counts.append(now)
    return times, counts


def _draw_course(axes: Any, records: Sequence[LoadRecord]) -> None:
    axes.set_title("course of the run")
    axes.set_xlabel("s since start")
    axes.set_ylabel("requests in flight")
    axes.grid(alpha=0.3)
    axes.step(*concurrency_steps(records), where="post", color="tab:gray")
    other = axes.twinx()
    other.set_ylabel("TTFT, ms")
    first = [(record.started_s, 1000 * record.ttft_s) for record in records if record.ttft_s is not None]
    other.scatter([x for x, _ in first], [y for _, y in first], s=8)
    bad = [record.started_s for record in records if record.outcome != OK]
    if bad:
        other.scatter(bad, [0.0] * len(bad), s=24, marker="x", color="tab:red", label="not ok")
        other.legend(loc="upper right")


def plot(result: LoadResult, path: Path, *, title: str, slo: Slo) -> None:
    """Write the picture as PNG (or what the suffix says). Raises OSError when it cannot be written."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    ok = [record for record in result.records if record.outcome == OK]
    ttfts = [record.ttft_s for record in ok if record.ttft_s is not None]
    tpots = [tpot for record in ok if (tpot := record.tpot_s) is not None]
    gaps = result.gaps.cumulative()
    figure, axes = pyplot.subplots(2, 2, figsize=(11, 7.5))
    try:
        _draw_shares(axes[0][0], "time to first token", _shares(ttfts), slo.ttft_s)
        _draw_shares(
            axes[0][1],
            "gap between tokens (ITL)",
            ([1000 * gap for gap, _ in gaps], [share for _, share in gaps]),
            None,
        )
        _draw_shares(axes[1][0], "time per output token (TPOT)", _shares(tpots), slo.tpot_s)
        _draw_course(axes[1][1], result.records)
        figure.suptitle(title)
        figure.tight_layout()
        figure.savefig(path, dpi=110)
    finally:
        pyplot.close(figure)
