"""`kvrelay chaos`: its flags."""

import signal
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console


def command(
    seconds: Annotated[float, typer.Option(min=1, help="how long faults strike")] = 60.0,
    seed: Annotated[int, typer.Option(help="of the faults' order and the requests")] = 0,
    faults: Annotated[str, typer.Option(help="kinds of faults, with commas between them, or all")] = "all",
    rate: Annotated[
        float,
        typer.Option(min=0.01, help="faults per second that overlap; as many more, if every part recovered at once"),
    ] = 1.0,
    clients: Annotated[int, typer.Option(min=1, help="clients, each with one request after the other")] = 8,
    model: Annotated[str | None, typer.Option(help="as for serve; default: a tiny one with random weights")] = None,
    hosts: Annotated[
        int,
        typer.Option(min=1, help="on so many hosts in network namespaces, for faults of hosts and links; needs root"),
    ] = 1,
    report: Annotated[Path | None, typer.Option(help="folder for report.json, report.png and the log")] = None,
    is_soak: Annotated[bool, typer.Option("--soak", help="also print how the memory of each process grows")] = False,
) -> None:
    """Start a cluster here, harm its parts under load, and check every token, block and process.

    Exit code 1 when anything is wrong. Other clusters on this machine are not touched. Linux only.
    """
    from kvrelay.cluster.chaos.session import ChaosOptions, chaos, kinds_of

    signal.signal(signal.SIGTERM, signal.default_int_handler)  # as Ctrl-C: the cluster ends, too
    options = ChaosOptions(seconds, seed, kinds_of(faults, hosts), rate, clients, model, hosts)
    raise typer.Exit(0 if chaos(options, report, Console(), shows_growth=is_soak) else 1)
