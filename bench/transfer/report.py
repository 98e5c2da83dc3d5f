"""Table, goals and plot of bench/transfer/transfer.py, from its figures alone."""

from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

COLOURS = {"off": "#2a7f62", "sampled": "#63b59a", "full": "#a8d8c8", "": "#8a8f98"}


@dataclass(frozen=True, slots=True)
class Goal:
    """One goal of the issue. `is_met` is None where it was not measured in this run."""

    text: str
    figure: str
    is_met: bool | None


def print_report(figures: dict[str, Any]) -> list[dict[str, Any]]:
    """Show everything; returns the goals as plain data."""
    console = Console(width=max(Console().width, 172))
    console.print(_table(figures))
    where = figures["machine"]
    console.print(
        f"{where['cpu']}, {where['cores']} cores, "
        f"load average {where['load_average']} at the end of {figures['rounds']} "
        "rounds; read: first read to last byte verified; busy: with a read under way; whole: open to commit",
        highlight=False,
        markup=False,
    )
    for name, ends in figures["idle"].items():
        shares = ", ".join(f"{end} {share:.2%}" for end, share in ends.items())
        console.print(f"idle {name}: {shares} of a core", highlight=False, markup=False)
    goals = goals_of(figures)
    for goal in goals:
        verdict = {True: "met", False: "MISSED", None: "not measured"}[goal.is_met]
        console.print(f"goal: {goal.text}: {verdict} ({goal.figure})", highlight=False, markup=False)
    return [asdict(goal) for goal in goals]


def _table(figures: dict[str, Any]) -> Table:
    table = Table(title=f"{figures['blocks']:,} scattered blocks of 32 KiB unless said otherwise; GB/s, best round")
    columns: list[tuple[str, Callable[[dict[str, Any]], str]]] = [
        ("path", lambda row: row["name"]),
        ("read", _number("many read")),
        ("x memcpy", lambda row: f"{row['many read'] / figures['memcpy']['many read']:.2f}"),
        ("busy", _number("many busy")),
        ("whole", _number("many whole")),
        ("16 layers", _number("layers read")),
        ("16 x 64 KiB", _number("few read")),
        ("64 x 1 MiB", _number("large read")),
        ("1 block, read us", _number("one read", 0)),
        ("whole us", _number("one whole", 0)),
        ("CPU s/GB source", _cpu("source")),
        ("target", _cpu("target")),
    ]
    for index, (title, _) in enumerate(columns):
        table.add_column(title, justify="right" if index else "left")
    for row in ({"name": "memcpy", **figures["memcpy"]}, *figures["rows"]):
        table.add_row(*(cell(row) for _, cell in columns))
    return table


def _number(key: str, digits: int = 2) -> Callable[[dict[str, Any]], str]:
    return lambda row: f"{row[key]:,.{digits}f}" if key in row else ""


def _cpu(end: str) -> Callable[[dict[str, Any]], str]:
    def cell(row: dict[str, Any]) -> str:
        spent = row["cpu_s_per_gb"]
        both = f"{spent['both']:.3f} both" if "both" in spent and end == "source" else ""
        return f"{spent[end]:.3f}" if end in spent else both

    return cell


# ---- goals


def goals_of(figures: dict[str, Any]) -> list[Goal]:
    """Each goal of the issue that one run of this script can show."""
    rows = figures["rows"]
    limit = figures["memcpy"]["many read"]

    def ours(transport: str, checks: str) -> dict[str, Any] | None:
        """The fastest of a transport's rows (streams are a setting), without TLS."""
        found = [
            row for row in rows
            if row["contender"] == transport and row["settings"].get("checks") == checks and not row["table"].get("tls")
        ]  # fmt: skip
        return max(found, key=lambda row: row["many read"], default=None)

    def peer(contender: str) -> dict[str, Any] | None:
        return next((row for row in rows if row["contender"] == contender), None)

    def share(text: str, row: dict[str, Any] | None, of: float | None, wanted: float, unit: str) -> Goal:
        if row is None or of is None:
            return Goal(text, "-", None)
        got = row["many read"] / of
        whole = (
            f", busy {row['many busy'] / of:.2f}, open to commit {row['many whole'] / of:.2f}"
            if "many whole" in row
            else ""
        )
        return Goal(text, f"{got:.2f} {unit}{whole}", got >= wanted)

    raw = peer("raw-nixl")
    goals = [
        share("shm >= 0.9 x memcpy, checks off", ours("shm", "off"), limit, 0.9, "x"),
        share("shm >= 0.6 x memcpy, checks full", ours("shm", "full"), limit, 0.6, "x"),
        share("TCP >= 2.2 GB/s, checks off", ours("tcp", "off"), 1.0, 2.2, "GB/s"),
        share("NIXL path >= 0.95 x NIXL alone", ours("nixl", "off"), raw and raw["many read"], 0.95, "x"),
    ]
    for title, contender in (("Mooncake over TCP", "mooncake"), ("NIXL over TCP", "raw-nixl-tcp")):
        other = peer(contender)
        goals.append(share(f"TCP ahead of {title}", ours("tcp", "off"), other and other["many read"], 1.0, "x"))
    found = ours("tcp", "off")
    figure = "-" if found is None else f"{found['one read']:.0f} us, open to commit {found['one whole']:.0f} us"
    goals.append(Goal("one block <= 50 us over tcp", figure, found and found["one read"] <= 50))
    idle = [share for ends in (figures["idle"].get("nixl", {}),) for share in ends.values()]
    met = max(idle) <= 0.03 if idle else None
    goals.append(Goal("idle NIXL agents <= 3 % of a core", f"{max(idle):.2%}" if idle else "-", met))
    return goals


# ---- plot


def plot(figures: dict[str, Any], path: Path) -> None:
    """Bandwidth, one block's latency and CPU of every row, as a picture."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    rows = sorted(figures["rows"], key=lambda row: row["many read"])
    names = [row["name"] for row in rows]
    colours = [COLOURS.get(row["settings"].get("checks", ""), COLOURS[""]) for row in rows]
    picture, panels = pyplot.subplots(1, 3, sharey=True, figsize=(16, 1.5 + 0.32 * len(rows)), layout="constrained")
    panels[0].barh(names, [row["many read"] for row in rows], color=colours)
    panels[0].axvline(figures["memcpy"]["many read"], color="black", linewidth=1, linestyle="--", label="memcpy")
    panels[0].set_title(f"GB/s, {figures['blocks']:,} blocks of 32 KiB")
    panels[0].legend(loc="lower right")
    panels[1].barh(names, [row["one read"] for row in rows], color=colours)
    panels[1].set_xscale("log")
    panels[1].set_title("one block of 32 KiB, microseconds")
    left = [0.0] * len(rows)
    for end, colour in (("source", "#b5651d"), ("target", "#e0a96d"), ("both", "#c9885a")):
        spent = [row["cpu_s_per_gb"].get(end, 0.0) for row in rows]
        panels[2].barh(names, spent, left=left, color=colour, label=end)
        left = [before + more for before, more in zip(left, spent, strict=True)]
    panels[2].set_title("CPU seconds per GB")
    panels[2].legend(loc="upper right")
    handles = [pyplot.Rectangle((0, 0), 1, 1, color=colour) for colour in COLOURS.values()]
    labels = [f"kvrelay, checks {checks}" if checks else "peer" for checks in COLOURS]
    picture.legend(handles, labels, loc="outside lower center", ncols=len(COLOURS))
    picture.savefig(path, dpi=110)
