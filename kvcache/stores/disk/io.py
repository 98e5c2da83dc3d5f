"""The disk tier's reads and writes: segment files, direct I/O where the file system supports it, aligned buffers.

Owns file descriptors and a bounded set of buffers. Knows nothing of blocks.
"""

import contextlib
import errno
import mmap
import os
import queue
import threading
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

import numpy as np

from kvrelay.kvcache.stores.disk.format import PAGE_BYTES, Geometry

_Vectored = Callable[[int, Sequence[memoryview], int], int]


def is_aligned(view: memoryview) -> bool:
    """Whether direct I/O can use this memory."""
    address: int = np.frombuffer(view, np.uint8).__array_interface__["data"][0]
    return address % PAGE_BYTES == 0 and view.nbytes % PAGE_BYTES == 0


class Buffers:
    """A fixed number of page-aligned buffers."""

    def __init__(self, count: int, num_bytes: int) -> None:
        self._maps = [mmap.mmap(-1, num_bytes) for _ in range(count)]
        self._free: queue.SimpleQueue[memoryview] = queue.SimpleQueue()
        for mapping in self._maps:
            self._free.put(memoryview(mapping))

    @contextlib.contextmanager
    def borrow(self) -> Iterator[memoryview]:
        """One buffer, waiting until one is free."""
        view = self._free.get()
        try:
            yield view
        finally:
            self._free.put(view)


class Segments:
    """One folder's segment files. Reads and writes may come from many threads."""

    def __init__(self, folder: Path, geometry: Geometry, *, is_direct: bool | None = None) -> None:
        """`is_direct`: None tries direct I/O and falls back to the page cache where there is none."""
        self._folder, self._geometry, self._is_direct = folder, geometry, is_direct
        self._fds: dict[int, int] = {}
        self._lock = threading.Lock()

    @property
    def is_direct(self) -> bool:
        """Whether the open files bypass the page cache."""
        return bool(self._is_direct)

    def path(self, segment: int) -> Path:
        return self._folder / f"segment-{segment:06d}.kv"

    def open_all(self) -> list[int]:
        """Open the existing segments within the geometry, and delete the others. Raises OSError."""
        found: list[int] = []
        for path in sorted(self._folder.glob("segment-*.kv")):
            number = path.stem.removeprefix("segment-")
            segment = int(number) if number.isdigit() else -1
            if not 0 <= segment < self._geometry.num_segments or self.path(segment) != path:
                path.unlink()
                continue
            try:
                self.ensure(segment)
            except OSError as error:
                if error.errno not in (errno.ENOSPC, errno.EDQUOT):
                    raise
                path.unlink(missing_ok=True)  # was being created when the disk was full
                continue
            found.append(segment)
        return found

    def ensure(self, segment: int) -> None:
        """Create or open this segment, with all of its bytes allocated.

        Raises OSError; then no partial file is left.
        """
        with self._lock:
            if segment in self._fds:
                return
            path, size = self.path(segment), self._geometry.segment_bytes(segment)
            is_new = not path.exists()
            fd = self._open(path)
            try:
                if os.fstat(fd).st_size > size:
                    os.ftruncate(fd, size)
                elif os.fstat(fd).st_size < size or is_new:
                    os.posix_fallocate(fd, 0, size)
            except BaseException:
                os.close(fd)
                if is_new:
                    path.unlink(missing_ok=True)
                raise
            self._fds[segment] = fd

    def _open(self, path: Path) -> int:
        flags = os.O_RDWR | os.O_CREAT | os.O_CLOEXEC
        if self._is_direct is not False:
            with contextlib.suppress(OSError):
                fd = os.open(path, flags | os.O_DIRECT, 0o644)
                self._is_direct = True
                return fd
            if self._is_direct:
                raise OSError(errno.EINVAL, "no direct I/O on this file system", str(path))
        fd = os.open(path, flags, 0o644)
        self._is_direct = False
        os.posix_fadvise(fd, 0, 0, os.POSIX_FADV_RANDOM)
        return fd

    def has(self, segment: int) -> bool:
        return segment in self._fds

    def read(self, segment: int, offset: int, buffers: Sequence[memoryview]) -> None:
        """Fill the buffers in order. Raises OSError, also at the end of the file."""
        self._move(os.preadv, segment, offset, buffers)

    def write(self, segment: int, offset: int, buffers: Sequence[memoryview]) -> None:
        """Write the buffers in order. Raises OSError; any part may have been written then."""
        self._move(os.pwritev, segment, offset, buffers)

    def _move(self, call: _Vectored, segment: int, offset: int, buffers: Sequence[memoryview]) -> None:
        fd, left = self._fds[segment], list(buffers)
        while left:
            count = call(fd, left, offset)
            if count == 0:
                raise OSError(errno.EIO, "the file ends early", str(self.path(segment)))
            offset += count
            while left and count >= left[0].nbytes:
                count -= left.pop(0).nbytes
            if count:
                left[0] = left[0][count:]

    def sync(self) -> None:
        """Flush all writes to the disk. Raises OSError."""
        for fd in list(self._fds.values()):
            os.fdatasync(fd)

    def close(self) -> None:
        with self._lock:
            while self._fds:
                os.close(self._fds.popitem()[1])
