"""`kvrelay models`: the cache of converted models, listed and cleared. Hub models lie in Hugging Face's cache."""

import time
from typing import Annotated, Literal

import typer
from rich import box
from rich.console import Console
from rich.table import Table

from kvrelay.engine.checkpoints.checkpoint import Conversion, conversions, remove_conversion
from kvrelay.environment import cache_dir
from kvrelay.errors import ConfigError


def command(
    action: Annotated[
        Literal["list", "clear"], typer.Argument(help="list, or clear: remove what is in the cache")
    ] = "list",
    name: Annotated[str | None, typer.Argument(help="clear: this one only")] = None,
    yes: Annotated[bool, typer.Option("--yes", "-y", help="clear: do not ask")] = False,
) -> None:
    """List the converted models with their size and last use, or remove them; they are converted again when needed."""
    console, found = Console(), conversions()
    if action == "list":
        _show(console, found)
        return
    chosen = [one for one in found if name in (None, one.name)]
    if name is not None and not chosen:
        raise ConfigError(f"no converted model {name}; there are: {', '.join(one.name for one in found) or 'none'}")
    what = f"{name or f'{len(chosen)} converted models'}, {_gigabytes(chosen)}"
    if chosen and not yes:
        typer.confirm(f"Remove {what}?", abort=True)
    for one in chosen:
        remove_conversion(one.name)
    console.print(f"removed {what}", highlight=False)


def _gigabytes(found: list[Conversion]) -> str:
    return f"{sum(one.num_bytes for one in found) / 1e9:.2f} GB"


def _show(console: Console, found: list[Conversion]) -> None:
    if not found:
        console.print(f"no converted models in {cache_dir()}", highlight=False)
        return
    table = Table(box=box.SIMPLE, padding=(0, 1, 0, 0))
    table.add_column("model", overflow="fold")
    for title in ("size", "last used"):
        table.add_column(title, justify="right", no_wrap=True)
    for one in found:
        used = time.strftime("%Y-%m-%d %H:%M", time.localtime(one.used_s))
        table.add_row(one.name, _gigabytes([one]), used)
    console.print(table)
    line = f"{_gigabytes(found)} in {cache_dir()}; kvrelay models clear [NAME] removes them"
    console.print(line, highlight=False, markup=False, soft_wrap=True)
