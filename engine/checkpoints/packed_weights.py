"""Packed weights that the workers of a machine share: a file in the cache folder, which each maps to be read only.

A file holds the packed weights of one model in the order in which they are packed. A worker that packs the same model
in the same way again gets the same weights from the file, in the same order: nothing is packed then, and the pages of
the file are in memory once. It is named by the checkpoint, the packing and the NUMA node, written under a lock, and
put in place by one rename. Its end holds an index: a file that was cut off is seen at once. Every byte is compared with
its checksum once after each boot of the machine, by the first that maps the file; a note beside the file says so.
"""

import contextlib
import json
import logging
import mmap
import os
import time
import warnings
import zlib
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO, TypeVar

import torch
from torch import Tensor

from kvrelay.engine.checkpoints.checkpoint import locked
from kvrelay.environment import cache_dir
from kvrelay.kernels.backend import Facts, PackedWeights

logger = logging.getLogger(__name__)
T = TypeVar("T")

ALIGNMENT = 64  # bytes: a cache line, and what torch gives its own tensors
_MAGIC = b"kvrelay packed weights 1"
_TRAILER_BYTES = len(_MAGIC) + 8 + 8 + 4  # where the index begins, its length, its checksum
_KEPT_S = 7 * 86400.0  # files of another version are removed when they were not used for so long
_BOOT_ID = Path("/proc/sys/kernel/random/boot_id")


class PackedFileWrong(Exception):
    """A file of packed weights is cut off, has other bytes than were written, or is of another model or packing."""


@dataclass(frozen=True, slots=True)
class _Entry:
    """One weight in a file."""

    begin: int
    num_bytes: int
    checksum: int
    facts: Facts


class WrittenWeights:
    """To a file, and in memory only as long as the caller keeps them. `finish` makes the file whole."""

    def __init__(self, file: BinaryIO) -> None:
        self._file, self._size = file, 0
        self._entries: list[_Entry] = []

    def place(self, num_bytes: int, fill: Callable[[Tensor], Facts]) -> tuple[Tensor, Facts]:
        packed = torch.empty(num_bytes, dtype=torch.uint8)
        facts = fill(packed)
        flat: Any = packed.numpy()
        view = memoryview(flat)
        begin = self._size + -self._size % ALIGNMENT
        self._file.write(bytes(begin - self._size))
        self._entries.append(_Entry(begin, num_bytes, zlib.crc32(view), facts))
        self._file.write(view)
        self._size = begin + num_bytes
        return packed, facts

    def finish(self) -> None:
        """Write the index. Raises OSError."""
        index = json.dumps([[one.begin, one.num_bytes, one.checksum, one.facts] for one in self._entries]).encode()
        sizes = self._size.to_bytes(8, "little") + len(index).to_bytes(8, "little")
        self._file.write(index + _MAGIC + sizes + zlib.crc32(index + sizes).to_bytes(4, "little"))
        self._file.flush()


class MappedWeights:
    """From a file, mapped to be read only. A tensor keeps the mapping alive.

    Raises PackedFileWrong: the file is cut off. OSError: it cannot be opened or mapped.
    """

    def __init__(self, path: Path) -> None:
        with path.open("rb") as file:
            size = os.fstat(file.fileno()).st_size
            self._entries = _index(file, size)
            self._map = mmap.mmap(file.fileno(), size, mmap.MAP_SHARED, mmap.PROT_READ)
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", "The given buffer is not writable")  # nothing writes to weights
            self._bytes = torch.frombuffer(self._map, dtype=torch.uint8)
        self._next = 0

    def check(self) -> None:
        """Compare every byte with its checksum. Raises PackedFileWrong."""
        view = memoryview(self._map)
        for number, entry in enumerate(self._entries):
            if zlib.crc32(view[entry.begin : entry.begin + entry.num_bytes]) != entry.checksum:
                raise PackedFileWrong(f"weight {number} of {len(self._entries)} has a wrong checksum")

    def place(self, num_bytes: int, fill: Callable[[Tensor], Facts]) -> tuple[Tensor, Facts]:
        entry = self._entries[self._next] if self._next < len(self._entries) else None
        if entry is None or entry.num_bytes != num_bytes:
            has = "ends" if entry is None else f"has {entry.num_bytes} bytes"
            raise PackedFileWrong(f"it {has} where weight {self._next} of {num_bytes} bytes is expected")
        self._next += 1
        return self._bytes[entry.begin : entry.begin + num_bytes], entry.facts

    def finish(self) -> None:
        """Raises PackedFileWrong: the file holds more than was placed."""
        if self._next != len(self._entries):
            raise PackedFileWrong(f"it holds {len(self._entries)} weights, the model has {self._next}")


def _index(file: BinaryIO, size: int) -> list[_Entry]:
    file.seek(max(size - _TRAILER_BYTES, 0))
    trailer = file.read()
    sizes, begin = trailer[len(_MAGIC) : -4], int.from_bytes(trailer[len(_MAGIC) : -12], "little")
    if not trailer.startswith(_MAGIC) or begin > size:
        raise PackedFileWrong("its end is missing")
    file.seek(begin)
    index = file.read(int.from_bytes(sizes[8:], "little"))
    if zlib.crc32(index + sizes) != int.from_bytes(trailer[-4:], "little"):
        raise PackedFileWrong("its index has a wrong checksum")
    return [_Entry(*entry) for entry in json.loads(index)]


# ---- files of the cache folder


def packed_folder() -> Path:
    """Holds NAME.weights, whose NAME.checked was used last when the weights were, NAME.lock, and what is unfinished."""
    return cache_dir() / "packed"


def shared_weights(name: str, pack: Callable[[PackedWeights], object], load: Callable[[PackedWeights], T]) -> T | None:
    """What `load` makes of the weights in the file `name`, which `pack` fills first where there is none that is right.

    None, with the reason in the log: the file can neither be read nor written, so the caller packs for itself.
    """
    path = packed_folder() / f"{name}.weights"
    try:
        for is_last in (False, True):
            try:
                with contextlib.suppress(FileNotFoundError):
                    return _loaded(path, load)
                _write(path, pack)
            except PackedFileWrong as error:
                logger.warning("%s is packed again: %s", path, error)
                path.unlink(missing_ok=True)
                if is_last:
                    raise OSError("what was written is wrong again") from error
        return _loaded(path, load)
    except OSError as error:
        logger.warning("this worker has packed weights of its own, not shared ones in %s: %s", path.parent, error)
        return None


def _loaded(path: Path, load: Callable[[PackedWeights], T]) -> T:
    weights = MappedWeights(path)
    note, state = path.with_suffix(".checked"), _state(path)
    if not note.is_file() or note.read_text() != state:
        weights.check()
        with contextlib.suppress(OSError):  # without the note the next process compares again
            note.write_text(state)
    loaded = load(weights)
    weights.finish()
    with contextlib.suppress(OSError):  # a cache that is only read
        os.utime(note)
    return loaded


def _state(path: Path) -> str:
    """Differs after a boot of the machine, and where the file was written since."""
    stat = path.stat()
    return f"{_BOOT_ID.read_text().strip()} {stat.st_ino} {stat.st_size} {stat.st_mtime_ns}"


def _write(path: Path, pack: Callable[[PackedWeights], object]) -> None:
    """Raises OSError."""
    path.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
    with locked(path.with_suffix(".lock"), lambda what, share: None):
        if path.exists():  # another process was faster
            return
        start_s, scratch = time.monotonic(), path.with_suffix(".part")  # only the holder of the lock has it
        try:
            with scratch.open("wb") as file:
                weights = WrittenWeights(file)
                pack(weights)
                weights.finish()
            path.with_suffix(".checked").write_text(_state(scratch))
            scratch.replace(path)
        finally:
            scratch.unlink(missing_ok=True)
        size = path.stat().st_size / (1 << 20)
        logger.info("packed weights for all workers: %s, %.0f MiB in %.1f s", path, size, time.monotonic() - start_s)
        _remove_old(path)


def _remove_old(path: Path) -> None:
    """Remove the files of all models that were not used for _KEPT_S. A process that has mapped one keeps its memory."""
    for used in (*path.parent.glob("*.checked"), *path.parent.glob("*.part")):  # a part: its writer was killed
        with contextlib.suppress(OSError):
            if time.time() - used.stat().st_mtime > _KEPT_S:
                for each in (used.with_suffix(".weights"), used.with_suffix(".lock"), used):
                    each.unlink(missing_ok=True)
