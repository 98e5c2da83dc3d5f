"""One picture of a run: three distributions and the course over time. The only user of matplotlib here."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from kvrelay.cluster.loadgen.client import LoadResult
from kvrelay.cluster.loadgen.stats import OK, LoadRecord, Slo, concurrency_steps

SUFFIXES = ("", ".png", ".jpg", ".jpeg", ".webp", ".svg", ".pdf")  # without one: PNG


def _draw_shares(axes: Any, title: str, values_s: Sequence[float], limit_s: float | None) -> None:
    axes.set_title(title)
    axes.set_xlabel("ms")
    axes.set_ylabel("share of values")
    axes.set_ylim(0, 1.02)
    axes.grid(alpha=0.3)
    if values_s:
        axes.ecdf([1000 * value for value in values_s])
    if limit_s is not None:
        axes.axvline(1000 * limit_s, color="tab:red", linestyle="--", label="SLO")
        axes.legend(loc="lower right")


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
    figure, axes = pyplot.subplots(2, 2, figsize=(11, 7.5))
    try:
        _draw_shares(axes[0][0], "time to first token", ttfts, slo.ttft_s)
        _draw_shares(axes[0][1], "gap between tokens (ITL)", result.gaps_s, None)
        _draw_shares(axes[1][0], "time per output token (TPOT)", tpots, slo.tpot_s)
        _draw_course(axes[1][1], result.records)
        figure.suptitle(title)
        figure.tight_layout()
        figure.savefig(path, dpi=110)
    finally:
        pyplot.close(figure)
