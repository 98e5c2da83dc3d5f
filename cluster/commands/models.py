"""`kvrelay models`: the cache of converted models, listed and cleared. Hub models lie in Hugging Face's cache."""

import shutil
import time
from dataclasses import dataclass
from typing import Annotated, Literal

import typer
from rich import box
from rich.console import Console
from rich.table import Table

from kvrelay.engine.checkpoints.checkpoint import cache_root, locked
from kvrelay.environment import cache_dir
from kvrelay.errors import ConfigError


@dataclass(frozen=True, slots=True)
class Conversion:
    """A folder of the cache. used_s: the time of its last use, in seconds since the epoch."""

    name: str
    num_bytes: int
    used_s: float


def conversions() -> list[Conversion]:
    """What is in the cache, the last used first."""
    root = cache_root()
    folders = [path for path in root.iterdir() if path.is_dir() and path.name[0] != "."] if root.is_dir() else []
    found = [
        Conversion(path.name, sum(file.lstat().st_size for file in path.iterdir()), path.stat().st_mtime)
        for path in folders
    ]
    return sorted(found, key=lambda one: -one.used_s)


def remove_conversion(name: str) -> None:
    """Remove a folder of the cache, once no process builds it any more."""
    with locked(cache_root() / f".{name}.lock", lambda what, share: None):
        shutil.rmtree(cache_root() / name, ignore_errors=True)


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
