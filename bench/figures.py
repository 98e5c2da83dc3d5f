"""What the scripts of bench/ share: a table on the screen, the same figures as JSON, threads. No measuring."""

import json
import os
import platform
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table


def available_cores() -> int:
    """Cores that this process may run on."""
    return len(os.sched_getaffinity(0))


def machine() -> dict[str, Any]:
    """Where figures were taken: without it they mean little."""
    lines = Path("/proc/cpuinfo").read_text().splitlines()
    model = next((line.partition(":")[2].strip() for line in lines if line.startswith("model name")), "unknown")
    load = [round(value, 2) for value in os.getloadavg()]
    return {"cpu": model, "cores": available_cores(), "load_average": load, "python": platform.python_version()}


def show(title: str, rows: Sequence[dict[str, Any]], out: Path | None = None) -> None:
    """Print `rows` (equal keys: the columns) and write them, with the machine, as JSON when `out` is given."""
    table = Table(title=title, title_justify="left")
    names = list(dict.fromkeys(name for row in rows for name in row))
    for name in names:
        table.add_column(name, justify="left" if name == names[0] else "right", overflow="fold")
    for row in rows:
        table.add_row(*(_cell(row.get(name)) for name in names))
    where = machine()
    console = Console(width=max(Console().width, 120))
    console.print(table)
    console.print(
        f"{where['cpu']}, {where['cores']} cores, load average {where['load_average']}", highlight=False, markup=False
    )
    if out is not None:
        out.write_text(json.dumps({"title": title, "machine": where, "rows": list(rows)}, indent=1) + "\n")


def _cell(value: Any) -> str:
    if value is None:
        return "-"
    if isinstance(value, float):
        return f"{value:.3f}" if abs(value) < 10 else f"{value:,.1f}"
    return str(value)
