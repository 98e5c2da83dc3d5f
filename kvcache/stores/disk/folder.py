"""The disk tier's folder: a subfolder for each worker, claimed by a file lock, with a manifest of whose blocks it has.

Owns locks, manifests and what to do about subfolders of other models. Segments are disk_io.py's.
"""

import contextlib
import errno
import fcntl
import json
import logging
import os
import re
import shutil
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from kvrelay.errors import StoreError
from kvrelay.kvcache.stores.disk.format import Geometry
from kvrelay.kvcache.stores.namespace import FieldDifference, Namespace

logger = logging.getLogger(__name__)

Foreign = Literal["keep", "clear", "refuse"]

_NAME = re.compile(r"worker-(\d+)")
_LOCK, _MANIFEST = "lock", "manifest.json"


@dataclass(frozen=True, slots=True)
class Manifest:
    """What a subfolder says of itself. `slot_bytes` is 0 while its slots have no size yet."""

    fields: dict[str, str]
    slot_bytes: int = 0
    slots_per_segment: int = 0


@dataclass(frozen=True, slots=True)
class FolderReport:
    """One subfolder, as found: for messages and tools."""

    path: Path
    num_bytes: int
    is_in_use: bool
    fields: dict[str, str] | None  # None: no readable manifest


class WorkerFolder:
    """One subfolder, ours until close(). Nobody else writes in it."""

    def __init__(self, path: Path, lock_fd: int) -> None:
        self.path, self._lock_fd = path, lock_fd
        self.manifest = _read_manifest(path)

    def is_gone(self) -> bool:
        """Whether somebody removed or replaced it while we held it."""
        try:
            return not os.path.samestat(os.stat(self.path / _LOCK), os.fstat(self._lock_fd))
        except OSError:
            return True

    def wipe(self) -> None:
        """Remove all but the lock. Raises OSError."""
        self.manifest = None
        with contextlib.suppress(FileNotFoundError):
            (self.path / _MANIFEST).unlink()  # first: what is left without it is nobody's
        for path in self.path.iterdir():
            if path.name != _LOCK:
                path.unlink()

    def write_manifest(self, namespace: Namespace, geometry: Geometry | None) -> None:
        """In place of what there is, at once or not at all. Raises OSError."""
        sizes = (geometry.slot_bytes, geometry.slots_per_segment) if geometry else (0, 0)
        manifest = Manifest(dict(namespace.fields), *sizes)
        new = self.path / f"{_MANIFEST}.new"
        with open(new, "w") as file:
            json.dump(
                {"fields": manifest.fields, "slot_bytes": sizes[0], "slots_per_segment": sizes[1]}, file, indent=1
            )
            file.flush()
            os.fsync(file.fileno())
        os.replace(new, self.path / _MANIFEST)
        self.manifest = manifest

    def close(self) -> None:
        """Let it go: another worker may claim it."""
        os.close(self._lock_fd)


def claim(root: Path, namespace: Namespace, foreign: Foreign = "keep") -> WorkerFolder:
    """The first subfolder that nobody uses and that holds this namespace's blocks, else a new one.

    `foreign`: what to do about unused subfolders of other namespaces. They are never read from: "keep" leaves them (and
    says so in the log), "clear" deletes them, "refuse" raises.

    Raises:
        StoreError: not writable; or a foreign subfolder is there and `foreign` is "refuse". The text says what to do.
    """
    try:
        root.mkdir(parents=True, exist_ok=True)
        return _claim(root, namespace, foreign)
    except OSError as error:
        raise StoreError(str(root), _remedy_of(error, root)) from error


def _claim(root: Path, namespace: Namespace, foreign: Foreign) -> WorkerFolder:
    mine: WorkerFolder | None = None
    for path in _subfolders(root):
        folder = _lock(path)
        if folder is None:
            continue
        fields = None if folder.manifest is None else folder.manifest.fields
        if mine is None and (fields is None or namespace.difference(fields) is None):
            mine = folder
            continue
        try:
            if fields is not None and (difference := namespace.difference(fields)) is not None:
                _meet_foreign(path, difference, foreign)
        except BaseException:
            if mine is not None:
                mine.close()
            raise
        finally:
            folder.close()
    return mine or _new_folder(root)


def _meet_foreign(path: Path, difference: FieldDifference, foreign: Foreign) -> None:
    """Somebody else's blocks, locked by us for now."""
    told = f"{path} holds KV of another namespace ({difference}), which is never used"
    if foreign == "refuse":
        raise StoreError(
            str(path),
            f"it holds KV of another namespace: {difference}. To use it, {difference.remedy} "
            f"({difference.field} {difference.theirs}); else set another cache.disk_path, or delete it: rm -r {path}",
        )
    num_bytes = _bytes_in(path)
    if foreign == "clear":
        shutil.rmtree(path)
        logger.warning("%s; deleted its %d bytes", told, num_bytes)
    else:
        logger.warning("%s; its %d bytes stay on the disk until somebody deletes it: rm -r %s", told, num_bytes, path)


def _new_folder(root: Path) -> WorkerFolder:
    number = 0
    while True:
        path = root / f"worker-{number}"
        path.mkdir(exist_ok=True)
        folder = _lock(path)
        if folder is not None and folder.manifest is None:
            return folder
        if folder is not None:
            folder.close()
        number += 1


def _lock(path: Path) -> WorkerFolder | None:
    """This subfolder when nobody uses it; None otherwise. Raises OSError where locks cannot be made."""
    try:
        fd = os.open(path / _LOCK, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o644)
    except FileNotFoundError:  # deleted since it was listed
        return None
    try:
        fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        if os.path.samestat(os.fstat(fd), os.stat(path / _LOCK)):
            return WorkerFolder(path, fd)
    except (BlockingIOError, FileNotFoundError):
        os.close(fd)
        return None
    except BaseException:
        os.close(fd)
        raise
    os.close(fd)
    return None


def _subfolders(root: Path) -> list[Path]:
    found = [(int(match[1]), path) for path in root.iterdir() if (match := _NAME.fullmatch(path.name))]
    return [path for _, path in sorted(found)]


def _read_manifest(path: Path) -> Manifest | None:
    """None: there is none, or it cannot be understood; what lies beside it is then nobody's."""
    try:
        data = json.loads((path / _MANIFEST).read_text())
        fields = {str(name): str(value) for name, value in data["fields"].items()}
        return Manifest(fields, int(data["slot_bytes"]), int(data["slots_per_segment"]))
    except FileNotFoundError:
        return None
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        logger.warning("%s has an unreadable manifest (%s): its blocks are discarded", path, error)
        return None


def survey(root: Path) -> list[FolderReport]:
    """All subfolders, without claiming any for longer than a look. Raises OSError."""
    reports = []
    for path in _subfolders(root):
        folder = _lock(path)
        manifest = _read_manifest(path) if folder is None else folder.manifest
        if folder is not None:
            folder.close()
        reports.append(
            FolderReport(path, _bytes_in(path), folder is None, None if manifest is None else manifest.fields)
        )
    return reports


def _bytes_in(path: Path) -> int:
    """Bytes on disk of the files in one folder, which may vanish meanwhile."""
    total = 0
    with contextlib.suppress(FileNotFoundError):
        for file in path.iterdir():
            with contextlib.suppress(FileNotFoundError):
                total += file.stat().st_blocks * 512
    return total


def _remedy_of(error: OSError, root: Path) -> str:
    why = f"{error.strerror} ({error.filename or root})"
    if error.errno in (errno.EACCES, errno.EPERM, errno.EROFS):
        return f"not writable: {why}; make it writable for the worker's user, or set cache.disk_path to another folder"
    if error.errno in (errno.ENOSPC, errno.EDQUOT):
        return f"the disk is full: {why}; free some space, or set cache.disk_path to another disk"
    return f"not usable: {why}; set cache.disk_path to a folder on a local disk"
