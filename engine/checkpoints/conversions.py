"""The cache of converted checkpoints: folders that are built once, under a lock, and reused; listed and cleared."""

import contextlib
import fcntl
import os
import shutil
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

from kvrelay.engine.checkpoints.files import check_folder
from kvrelay.environment import cache_dir
from kvrelay.errors import ModelError

Progress = Callable[[str, float], None]  # (activity, fraction done)

_POLL_S = 0.2


@dataclass(frozen=True, slots=True)
class Conversion:
    """A folder of the cache. used_s: the time of its last use, in seconds since the epoch."""

    name: str
    num_bytes: int
    used_s: float


def conversions() -> list[Conversion]:
    """What is in the cache, the last used first."""
    root = _root()
    folders = [path for path in root.iterdir() if path.is_dir() and path.name[0] != "."] if root.is_dir() else []
    found = [
        Conversion(path.name, sum(file.lstat().st_size for file in path.iterdir()), path.stat().st_mtime)
        for path in folders
    ]
    return sorted(found, key=lambda one: -one.used_s)


def remove_conversion(name: str) -> None:
    """Remove a folder of the cache, once no process builds it any more."""
    with _locked(_root() / f".{name}.lock", lambda what, share: None):
        shutil.rmtree(_root() / name, ignore_errors=True)


def cached(source: str, key: str, build: Callable[[Path, Path, Progress], None], report: Progress) -> Path:
    """The finished folder of that key, built under a lock into a temporary one and renamed when whole.

    Args:
        source: the model, for errors.
        build: called with a scratch folder, the folder to fill, and `report`.
    """
    root = _root()
    folder = root / key
    if not _is_whole(folder):
        try:
            root.mkdir(parents=True, exist_ok=True)
            with _locked(root / f".{key}.lock", report):
                if not _is_whole(folder):
                    _build(root, key, build, report)
        except OSError as error:
            raise ModelError(source, f"cannot write the converted model to {root}: {error}") from error
    with contextlib.suppress(OSError):  # a cache that is only read
        os.utime(folder)
    return folder


def _root() -> Path:
    return cache_dir() / "checkpoints"


def _is_whole(folder: Path) -> bool:
    try:
        check_folder(folder)
    except ModelError:
        return False
    return True


def _build(root: Path, key: str, build: Callable[[Path, Path, Progress], None], report: Progress) -> None:
    for stale in root.glob(f".{key}.work-*"):  # left by a process that died: this one holds the lock
        shutil.rmtree(stale, ignore_errors=True)
    work = root / f".{key}.work-{os.getpid()}"
    target = work / "checkpoint"
    target.mkdir(parents=True)
    try:
        build(work, target, report)
        check_folder(target)
        shutil.rmtree(root / key, ignore_errors=True)
        target.rename(root / key)
    finally:
        shutil.rmtree(work, ignore_errors=True)


@contextlib.contextmanager
def _locked(path: Path, report: Progress) -> Iterator[None]:
    """Hold an exclusive lock between processes (the kernel releases it when the holder dies)."""
    with path.open("w") as file:
        while True:
            try:
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
                break
            except BlockingIOError:
                report("waiting for another process to prepare the same model", 0.0)
                time.sleep(_POLL_S)
        yield
