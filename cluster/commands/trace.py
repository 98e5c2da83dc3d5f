"""`kvrelay trace`: writes a trace file or a generated workload as Mooncake's JSON lines to standard output, or
summarises it.
"""

from typing import Annotated

import typer
from rich.console import Console
from rich.table import Table

from kvrelay.cluster.workloads.choose import GENERATORS, make_workload, outline
from kvrelay.cluster.workloads.trace import as_mooncake


def command(
    source: Annotated[str, typer.Argument(help=f"a trace file (.jsonl, .csv), or one of {', '.join(GENERATORS)}")],
    requests: Annotated[int | None, typer.Option(min=1, help="number of requests; default: the whole file")] = None,
    rate: Annotated[float | None, typer.Option(help="requests per second; default: the file's own, else 1")] = None,
    seed: Annotated[int, typer.Option(help="seed of the generator")] = 0,
    summary: Annotated[bool, typer.Option("--summary", help="print a summary instead")] = False,
) -> None:
    """Write a workload as a Mooncake trace, for `kvrelay bench --trace` and `kvrelay simulate`."""
    entries = make_workload(source, rate_per_s=rate, limit=requests, seed=seed)
    if summary:
        _show(Console(), source, outline(entries))
        return
    for entry in entries:
        typer.echo(as_mooncake(entry))


def _show(console: Console, source: str, about: dict[str, float]) -> None:
    table = Table(title=source, title_justify="left", show_header=False)
    rate = f"{(about['num_requests'] - 1) / about['span_s']:.3g} requests/s" if about["span_s"] else "at once"
    for name, text in (
        ("requests", f"{about['num_requests']:,} in {about['span_s']:,.0f} s: {rate}"),
        ("prompt", f"{about['mean_input_tokens']:,.0f} tokens on average"),
        ("output", f"{about['mean_output_tokens']:,.0f} tokens on average"),
        ("sessions", f"{about['num_sessions']:,}" if about["num_sessions"] else "not given"),
        ("tenants", f"{about['num_tenants']:,}" if about["num_tenants"] else "not given"),
        ("repeated", f"{about['repeated_share']:.1%} of prompt tokens begin as an earlier prompt did"),
        ("gaps", f"deviation {about['gap_variation']:.2f} of their mean (Poisson: 1)"),
    ):
        table.add_row(name, text)
    console.print(table)
