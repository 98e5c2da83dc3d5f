"""The disk tier's folder: a subfolder per worker, claimed by a file lock, with a manifest that names its namespace.

Owns locks, manifests, and the treatment of subfolders of other namespaces. Segments are io.py's.
"""

import contextlib
import errno
import fcntl
import logging
import os
import re
from dataclasses import dataclass
from pathlib import Path

import msgspec

from kvrelay.errors import StoreError
from kvrelay.kvcache.stores.disk.format import Geometry
from kvrelay.kvcache.stores.namespace import Namespace

logger = logging.getLogger(__name__)

_NAME = re.compile(r"worker-(\d+)")
_LOCK, _MANIFEST = "lock", "manifest.json"
_FOLDER_MODE, FILE_MODE = 0o700, 0o600  # KV gives away prompts


@dataclass(frozen=True, slots=True)
class FolderManifest:
    """The manifest of a subfolder. Sizes are 0 until the size of records is known."""

    fields: dict[str, str]
    record_bytes: int
    rows_per_segment: int


class WorkerFolder:
    """A claimed subfolder: no other process writes to it until close()."""

    def __init__(self, path: Path, lock_fd: int) -> None:
        self.path, self._lock_fd = path, lock_fd
        self.manifest = _read_manifest(path)

    def is_gone(self) -> bool:
        """Whether it was removed or replaced while claimed."""
        try:
            return not os.path.samestat(os.stat(self.path / _LOCK), os.fstat(self._lock_fd))
        except OSError:
            return True

    def wipe(self) -> None:
        """Remove all but the lock. Raises OSError."""
        self.manifest = None
        with contextlib.suppress(FileNotFoundError):
            (self.path / _MANIFEST).unlink()  # first: files without a manifest belong to no namespace
        for path in self.path.iterdir():
            if path.name != _LOCK:
                path.unlink()

    def write_manifest(self, namespace: Namespace, geometry: Geometry | None) -> None:
        """Replace the manifest atomically. Raises OSError."""
        sizes = (geometry.record_bytes, geometry.rows_per_segment) if geometry else (0, 0)
        manifest = FolderManifest(dict(namespace.fields), *sizes)
        new = self.path / f"{_MANIFEST}.new"
        with open(new, "wb", opener=lambda path, flags: os.open(path, flags, FILE_MODE)) as file:
            file.write(msgspec.json.format(msgspec.json.encode(manifest)))
            file.flush()
            os.fsync(file.fileno())
        os.replace(new, self.path / _MANIFEST)
        self.manifest = manifest

    def close(self) -> None:
        """Release the claim."""
        os.close(self._lock_fd)


def claim(root: Path, namespace: Namespace) -> WorkerFolder:
    """Claim the first unused subfolder with this namespace's blocks, else a new one.

    Unused subfolders of other namespaces are never read; they are left alone and logged. Raises StoreError, with a
    remedy: not writable.
    """
    try:
        root.mkdir(_FOLDER_MODE, parents=True, exist_ok=True)
        folder = _claim(root, namespace)
        _make_private(folder.path)
        return folder
    except OSError as error:
        raise StoreError(str(root), _remedy(error, root)) from error


def _claim(root: Path, namespace: Namespace) -> WorkerFolder:
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
                found = f"{path} holds KV of another namespace ({difference}), which is never used"
                size = _bytes_in(path)
                logger.warning("%s; its %d bytes stay on the disk until you delete it: rm -r %s", found, size, path)
        finally:
            folder.close()
    return mine or _new_folder(root)


def _make_private(path: Path) -> None:
    """Also of earlier versions, which left it readable for all. Not every file system has modes."""
    with contextlib.suppress(OSError):
        path.chmod(_FOLDER_MODE)
        for file in path.iterdir():
            file.chmod(FILE_MODE)


def _new_folder(root: Path) -> WorkerFolder:
    number = 0
    while True:
        path = root / f"worker-{number}"
        path.mkdir(_FOLDER_MODE, exist_ok=True)
        folder = _lock(path)
        if folder is not None and folder.manifest is None:
            return folder
        if folder is not None:
            folder.close()
        number += 1


def _lock(path: Path) -> WorkerFolder | None:
    """Claim this subfolder; None when it is in use. Raises OSError: file locks are not supported."""
    try:
        fd = os.open(path / _LOCK, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, FILE_MODE)
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


def _read_manifest(path: Path) -> FolderManifest | None:
    """None: missing or unreadable; the files beside it then belong to no namespace."""
    try:
        return msgspec.json.decode((path / _MANIFEST).read_bytes(), type=FolderManifest)
    except FileNotFoundError:
        return None
    except msgspec.DecodeError as error:
        logger.warning("%s has an unreadable manifest (%s): its blocks are discarded", path, error)
        return None


def unused_folders(root: Path) -> list[tuple[Path, int]]:
    """(path, bytes on disk) of each subfolder that no process has claimed. Raises OSError."""
    found = []
    for path in _subfolders(root):
        folder = _lock(path)
        if folder is not None:
            folder.close()
            found.append((path, _bytes_in(path)))
    return found


def _bytes_in(path: Path) -> int:
    """Bytes on disk of the files in one folder; those that vanish or cannot be read are skipped."""
    total = 0
    with contextlib.suppress(OSError):
        for file in path.iterdir():
            with contextlib.suppress(OSError):
                total += file.stat().st_blocks * 512
    return total


def _remedy(error: OSError, root: Path) -> str:
    why = f"{error.strerror} ({error.filename or root})"
    if error.errno in (errno.EACCES, errno.EPERM, errno.EROFS):
        return f"not writable: {why}; make it writable for the worker's user, or set cache.disk_path to another folder"
    if error.errno in (errno.ENOSPC, errno.EDQUOT):
        return f"the disk is full: {why}; free some space, or set cache.disk_path to another disk"
    return f"not usable: {why}; set cache.disk_path to a folder on a local disk"
