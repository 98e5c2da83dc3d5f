"""Moving KV blocks between two processes of this host: every transport of ours and the peers, in one run.

    python -m bench.transfer.transfer [--rounds 9] [--transports shm,tcp] [--peers plain,nixl,mooncake]
        [--pages shared|huge] [--json F]
    pip install -r bench/requirements-transfer.txt    # the peers

Shapes: 2,048 scattered blocks of 32 KiB; as much in 128 blocks of 16 layers (where sampled checks leave something out);
16 blocks of 64 KiB; 64 of 1 MiB; one block of 32 KiB, twenty times. "read" runs from the target's first read to its
last byte verified; in it, "busy" is the time with a read under way (the source's checksums may be what the target waits
for); "whole" runs from open to commit. A peer has no protocol around its read. The limit is libc's memcpy of the same
blocks inside one process; the plain loop sends and receives a block with a call, over a blocking socket. Each contender
takes a turn in every round, in changing order, so that foreign load hits all alike; figures are medians of the rounds
with their range, a latency is the median of a round's twenty. Pools are shared mappings, as a worker's; `--pages huge`:
private memory in huge pages, which TCP, NIXL and the peers can use. The share of huge pages is printed. What the target
has is compared with what the source had before anything is timed. Handshakes are not counted. CPU is process time of
either end.
"""

import argparse
import asyncio
import json
import random
import statistics
import sys
from collections import defaultdict
from collections.abc import Callable
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

from bench.figures import machine
from bench.transfer.blocks import Memcpy, Row, Shape, shapes
from bench.transfer.contenders import Contender, ContenderFailed, Pair, contenders

KINDS = ("read", "busy", "whole")


class Figures:
    """What was measured, by row and shape."""

    def __init__(self, every: dict[str, Shape]) -> None:
        self._shapes = every
        self._seconds: dict[tuple[str, str, str], list[float]] = defaultdict(list)  # (row, shape, kind), by round
        self._cpu: dict[str, dict[str, float]] = defaultdict(lambda: defaultdict(float))
        self._moved: dict[str, int] = defaultdict(int)

    def add(self, name: str, shape: Shape, visit: dict[str, Any]) -> None:
        for kind in KINDS:
            if kind in visit:
                self._seconds[name, shape.name, kind].append(statistics.median(visit[kind]))
        if shape.name == "many" and "cpu_s" in visit:
            self._moved[name] += shape.num_bytes
            for end, seconds in visit["cpu_s"].items():
                self._cpu[name][end] += seconds

    def of(self, name: str) -> dict[str, Any]:
        """One row: [median, lowest, highest] of GB/s or, for one block, microseconds; CPU seconds per GB by end."""
        row: dict[str, Any] = {}
        for shape in self._shapes.values():
            for kind in KINDS:
                if rounds := self._seconds.get((name, shape.name, kind)):
                    values = [s * 1e6 if shape.is_latency else shape.num_bytes / s / 1e9 for s in rounds]
                    row[f"{shape.name} {kind}"] = [statistics.median(values), min(values), max(values)]
        row["cpu_s_per_gb"] = {end: s / (self._moved[name] / 1e9) for end, s in self._cpu[name].items()}
        return row


async def start(
    wanted: list[Contender], num_blocks: int, pages: str, every: dict[str, Shape]
) -> list[tuple[Pair, list[Row]]]:
    """Those that start and deliver, with the rows that they can fill; the others are printed."""
    ready = []
    for contender in wanted:
        pair = Pair(contender)
        try:
            await pair.start(num_blocks, pages)
        except ContenderFailed as error:
            hint = f"; {contender.install}" if contender.install else ""
            print(f"left out: {contender.name}: {error}{hint}", flush=True)
            await pair.aclose()
            continue
        ready.append((pair, await proven(pair, every)))
    return ready


async def proven(pair: Pair, every: dict[str, Shape]) -> list[Row]:
    rows = []
    for row in pair.contender.rows:
        try:
            for shape in every:
                await pair.prove(row, shape)
        except ContenderFailed as error:
            print(f"left out: {row['name']}: {error}", flush=True)
        else:
            rows.append(row)
    return rows


async def measure(
    ready: list[tuple[Pair, list[Row]]], memcpy: Memcpy, rounds: int, seed: int, every: dict[str, Shape]
) -> Figures:
    order = random.Random(seed)
    found = Figures(every)

    def limit() -> None:
        for shape in every.values():
            found.add("memcpy", shape, {"read": memcpy.seconds(shape)})

    turns = [(pair, row) for pair, rows in ready for row in rows]
    limit()
    for index in range(rounds):
        order.shuffle(turns)
        limit()
        for pair, row in turns:
            for shape in every.values():
                found.add(row["name"], shape, await pair.visit(row, shape.name))
        print(f"round {index + 1} of {rounds}", file=sys.stderr, flush=True)
    limit()
    return found


async def run(options: argparse.Namespace) -> dict[str, Any]:
    wanted, every = contenders(options.transports, options.peers), shapes(options.blocks)
    memcpy = Memcpy(options.blocks, options.pages)
    ready = await start(wanted, options.blocks, options.pages, every)
    try:
        found = await measure(ready, memcpy, options.rounds, options.seed, every)
    finally:
        await asyncio.gather(*(pair.aclose() for pair, _ in ready))
    return {
        "machine": machine(),
        "rounds": options.rounds,
        "blocks": options.blocks,
        "pages": options.pages,
        "huge_share": memcpy.huge_share(),
        "memcpy": found.of("memcpy"),
        "rows": [
            {**row, "contender": pair.contender.name, **found.of(row["name"])} for pair, rows in ready for row in rows
        ],
    }


def names(text: str) -> list[str]:
    return [name for name in text.split(",") if name]


def print_report(figures: dict[str, Any]) -> None:
    """Show everything."""
    console = Console(width=max(Console().width, 220))
    console.print(_table(figures))
    where = figures["machine"]
    console.print(
        f"{where['cpu']}, {where['cores']} cores, {figures['pages']} pools, {figures['huge_share']:.0%} in huge pages, "
        f"load average {where['load_average']} at the end of {figures['rounds']} "
        "rounds; read: first read to last byte verified; busy: with a read under way; whole: open to commit",
        highlight=False,
        markup=False,
    )


def _table(figures: dict[str, Any]) -> Table:
    table = Table(title=f"{figures['blocks']:,} scattered blocks of 32 KiB unless said otherwise; GB/s, median (range)")
    columns: list[tuple[str, Callable[[dict[str, Any]], str]]] = [
        ("path", lambda row: row["name"]),
        ("read", _number("many read")),
        ("x memcpy", lambda row: f"{row['many read'][0] / figures['memcpy']['many read'][0]:.2f}"),
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
    def cell(row: dict[str, Any]) -> str:
        if key not in row:
            return ""
        median, low, high = (f"{value:,.{digits}f}" for value in row[key])
        return f"{median} ({low}-{high})"

    return cell


def _cpu(end: str) -> Callable[[dict[str, Any]], str]:
    def cell(row: dict[str, Any]) -> str:
        spent = row["cpu_s_per_gb"]
        return f"{spent[end]:.3f}" if end in spent else ""

    return cell


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--blocks", type=int, default=2048, help="scattered blocks of 32 KiB")
    parser.add_argument("--rounds", type=int, default=9)
    parser.add_argument("--seed", type=int, default=1, help="of the order within rounds")
    parser.add_argument("--transports", type=names, help="default: all that kvrelay has")
    parser.add_argument("--peers", type=names, help="plain, nixl, mooncake; default: all")
    parser.add_argument("--pages", choices=("shared", "huge"), default="shared", help="of the pools")
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    figures = asyncio.run(run(options))
    print_report(figures)
    if options.json:
        options.json.write_text(json.dumps(figures, indent=1) + "\n")


if __name__ == "__main__":
    main()
