"""Figures of simulations as a table. The plain data are `Simulation.summary`."""

from collections.abc import Sequence
from typing import Any

from rich import box
from rich.console import Console
from rich.table import Table

_COLUMNS = (
    "req/s", "good/s", "kept", "TTFT p50 s", "p99", "TPOT p50 ms", "p99", "hits", "P busy", "D busy", "refused",
)  # fmt: skip


def show(console: Console, summaries: Sequence[tuple[str, dict[str, Any]]]) -> None:
    """One row for each named simulation."""
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
