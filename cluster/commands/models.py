"""`kvrelay models`: the cache of converted models and of their packed weights, listed and cleared. Hub models lie in
Hugging Face's cache.
"""

import shutil
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Literal

import typer
from rich import box
from rich.console import Console
from rich.table import Table

from kvrelay.engine.checkpoints.checkpoint import cache_root, locked
from kvrelay.engine.checkpoints.packed_weights import packed_folder
from kvrelay.environment import cache_dir
from kvrelay.errors import ConfigError


@dataclass(frozen=True, slots=True)
class CachedModel:
    """A converted model (a folder), or packed weights (files). used_s: its last use, in seconds since the epoch."""

    name: str
    paths: tuple[Path, ...]
    lock: Path  # held by the process that makes it
    num_bytes: int
    used_s: float

    @property
    def is_packed(self) -> bool:
        return self.lock.parent == packed_folder()

    def is_of(self, name: str) -> bool:
        """Whether it has this name, or is the packed weights of the model of this name."""
        return name == self.name or (self.is_packed and name == self.name.rpartition("-")[0])

    def remove(self) -> None:
        """Once no process makes it any more. Workers that have mapped it keep their memory."""
        with locked(self.lock, lambda what, share: None):
            for path in self.paths:
                if path.is_dir():
                    shutil.rmtree(path, ignore_errors=True)
                else:
                    path.unlink(missing_ok=True)


def cached_models() -> list[CachedModel]:
    """What is in the cache: converted models, then packed weights, of each the last used first."""
    found, root = [], cache_root()
    for folder in root.iterdir() if root.is_dir() else ():
        if folder.is_dir() and folder.name[0] != ".":
            size = sum(file.lstat().st_size for file in folder.iterdir())
            lock = root / f".{folder.name}.lock"
            found.append(CachedModel(folder.name, (folder,), lock, size, folder.stat().st_mtime))
    for name in {path.stem for path in packed_folder().glob("*.*") if path.suffix in (".weights", ".part")}:
        paths = [packed_folder() / f"{name}.{end}" for end in ("weights", "checked", "part")]
        stats = [path.stat() for path in paths if path.exists()]
        size, used_s = sum(stat.st_size for stat in stats), max(stat.st_mtime for stat in stats)
        found.append(CachedModel(name, tuple(paths), packed_folder() / f"{name}.lock", size, used_s))
    return sorted(found, key=lambda one: (one.is_packed, -one.used_s))


def command(
    action: Annotated[
        Literal["list", "clear"], typer.Argument(help="list, or clear: remove what is in the cache")
    ] = "list",
    name: Annotated[str | None, typer.Argument(help="clear: this one only, with its packed weights")] = None,
    yes: Annotated[bool, typer.Option("--yes", "-y", help="clear: do not ask")] = False,
) -> None:
    """List converted models and CPU workers' packed weights, with their size and last use, or remove them; they are
    made again when needed.
    """
    console, found = Console(), cached_models()
    if action == "list":
        _show(console, found)
        return
    chosen = [one for one in found if name is None or one.is_of(name)]
    if name is not None and not chosen:
        raise ConfigError(f"no converted model {name}; there are: {', '.join(one.name for one in found) or 'none'}")
    packed = sum(one.is_packed for one in chosen)
    counts = f"{len(chosen) - packed} converted models and {packed} files of packed weights"
    what = f"{name or counts}, {_gigabytes(chosen)}"
    if chosen and not yes:
        typer.confirm(f"Remove {what}?", abort=True)
    for one in chosen:
        one.remove()
    console.print(f"removed {what}", highlight=False)


def _gigabytes(found: list[CachedModel]) -> str:
    return f"{sum(one.num_bytes for one in found) / 1e9:.2f} GB"


def _show(console: Console, found: list[CachedModel]) -> None:
    if not found:
        console.print(f"no converted models in {cache_dir()}", highlight=False)
        return
    table = Table(box=box.SIMPLE, padding=(0, 1, 0, 0))
    table.add_column("model", overflow="fold")
    table.add_column("what")
    for title in ("size", "last used"):
        table.add_column(title, justify="right", no_wrap=True)
    for one in found:
        used = time.strftime("%Y-%m-%d %H:%M", time.localtime(one.used_s))
        table.add_row(one.name, "packed weights" if one.is_packed else "converted", _gigabytes([one]), used)
    console.print(table)
    line = f"{_gigabytes(found)} in {cache_dir()}; kvrelay models clear [NAME] removes them"
    console.print(line, highlight=False, markup=False, soft_wrap=True)
