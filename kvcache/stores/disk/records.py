"""Reads and writes of records: segment files with direct I/O where the file system supports it, aligned buffers,
headers, checksums, codec, and runs of adjacent rows in one request.

Knows nothing of which row holds which block: callers hold or have reserved every row that they pass.
"""

import contextlib
import errno
import logging
import mmap
import os
import queue
import threading
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Executor
from dataclasses import dataclass
from pathlib import Path
from typing import TypeVar

import numpy as np

from kvrelay.kvcache.stores.codecs import Codec, CodecError
from kvrelay.kvcache.stores.disk.folder import FILE_MODE
from kvrelay.kvcache.stores.disk.format import (
    HEADER_BYTES,
    MAX_IOVECS,
    PAGE_BYTES,
    Geometry,
    RecordHeader,
    payload_checksum,
    runs,
    unpack_header,
)
from kvrelay.types import BlockHash, BlockMeta

logger = logging.getLogger(__name__)

RUN_BYTES = 2 << 20  # of one request: the device's full bandwidth, and small enough to keep several under way
_SCAN_ROWS = 256
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
                fd = os.open(path, flags | os.O_DIRECT, FILE_MODE)
                self._is_direct = True
                return fd
            if self._is_direct:
                raise OSError(errno.EINVAL, "no direct I/O on this file system", str(path))
        fd = os.open(path, flags, FILE_MODE)
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


@dataclass(slots=True, eq=False)
class ReadItem:
    """One block to load, and after `read` its result."""

    header: RecordHeader
    into: memoryview
    meta: BlockMeta  # the caller's: the header's has no root
    is_done: bool = False
    error: OSError | None = None  # not done and no error: it is corrupt


@dataclass(slots=True, eq=False)
class WriteItem:
    """One block to store in a row reserved for it, and after `write` its result."""

    row: int
    sequence: int
    digest: BlockHash
    meta: BlockMeta
    block: memoryview
    header: RecordHeader | None = None  # set when it is on the disk
    error: OSError | None = None
    is_unfit: bool = False  # encoded, it is larger than a record


_Item = TypeVar("_Item", ReadItem, WriteItem)


class RecordIo:
    """Reads and writes the records of one folder."""

    def __init__(
        self, segments: Segments, geometry: Geometry, namespace: bytes, codec: Codec, executor: Executor, depth: int
    ) -> None:
        """`depth`: the number of requests under way at once."""
        self._segments, self._geometry, self._namespace = segments, geometry, namespace
        self._codec, self._executor = codec, executor
        self._depth = depth
        self._run_rows = max(1, min(RUN_BYTES // geometry.record_bytes, MAX_IOVECS // 2))
        self._buffers = Buffers(depth, self._run_rows * geometry.record_bytes)

    def read(self, items: Sequence[ReadItem]) -> None:
        """Load all items, each verified against its header."""
        self._by_runs(self._read_run, items, [item.header.row for item in items])

    def write(self, items: Sequence[WriteItem]) -> None:
        """Store all items."""
        self._by_runs(self._write_run, items, [item.row for item in items])

    def erase(self, rows: Sequence[int]) -> None:
        """Clear the headers of these rows, so that no later process finds them. Raises OSError."""
        with self._buffers.borrow() as buffer:
            page = buffer[:PAGE_BYTES]
            page[:] = bytes(PAGE_BYTES)
            for row in rows:
                self._segments.write(*self._geometry.place(row), [page])

    def scan(self, segments: Sequence[int]) -> list[RecordHeader]:
        """All intact headers in these segments, unordered. Raises OSError."""
        jobs: list[range] = []
        for segment in segments:
            first = segment * self._geometry.rows_per_segment
            stop = first + self._geometry.segment_bytes(segment) // self._geometry.record_bytes
            jobs += [range(at, min(at + _SCAN_ROWS, stop)) for at in range(first, stop, _SCAN_ROWS)]
        return [header for headers in self._executor.map(self._scan_range, jobs) for header in headers]

    def _scan_range(self, rows: range) -> list[RecordHeader]:
        found = []
        with self._buffers.borrow() as buffer:
            page = buffer[:PAGE_BYTES]
            for row in rows:
                self._segments.read(*self._geometry.place(row), [page])
                header = unpack_header(page, self._namespace, row)
                if header is not None and header.num_bytes <= self._geometry.payload_bytes:
                    found.append(header)
        return found

    def _by_runs(self, action: Callable[[Sequence[_Item]], None], items: Sequence[_Item], rows: Sequence[int]) -> None:
        """Run `action` on every run of adjacent rows, one of them on this thread, which would only wait."""
        order = sorted(range(len(items)), key=rows.__getitem__)
        most = min(self._run_rows, max(1, -(-len(items) // self._depth)))  # split few blocks over all threads, too
        cut = runs([rows[index] for index in order], self._geometry, max_rows=most)
        parts = [[items[index] for index in order[run.start : run.stop]] for run in cut]
        others = [self._executor.submit(action, part) for part in parts[1:]]
        try:
            if parts:
                action(parts[0])
        finally:
            for other in others:  # nothing may use the caller's memory after this returns
                other.exception()
        for other in others:
            other.result()

    def _frames(self, buffer: memoryview, count: int) -> Iterator[memoryview]:
        size = self._geometry.record_bytes
        return (buffer[place * size : (place + 1) * size] for place in range(count))

    def _is_direct(self, block: memoryview) -> bool:
        """Whether a block's bytes equal those on the disk and are aligned, so that they need no buffer."""
        return self._codec.name == "none" and block.nbytes == self._geometry.payload_bytes and is_aligned(block)

    # ---- reading

    def _read_run(self, run: Sequence[ReadItem]) -> None:
        try:
            self._read_together(run)
        except OSError as error:
            if len(run) == 1:
                run[0].error = error
                return
            for item in run:  # one bad sector must not fail its neighbours
                self._read_run([item])

    def _read_together(self, run: Sequence[ReadItem]) -> None:
        with self._buffers.borrow() as buffer:
            vectors: list[memoryview] = []
            payloads: list[memoryview] = []
            frames = list(self._frames(buffer, len(run)))
            for frame, item in zip(frames, run, strict=True):
                if self._is_direct(item.into):
                    vectors += [frame[:PAGE_BYTES], item.into]
                    payloads.append(item.into)
                else:
                    vectors.append(frame)
                    payloads.append(frame[PAGE_BYTES : PAGE_BYTES + item.header.num_bytes])
            self._segments.read(*self._geometry.place(run[0].header.row), vectors)
            for frame, payload, item in zip(frames, payloads, run, strict=True):
                item.is_done = self._accept(frame, payload, item)

    def _accept(self, frame: memoryview, payload: memoryview, item: ReadItem) -> bool:
        """Verify header and payload, then decode the block into the caller's memory. False: it is corrupt."""
        if bytes(frame[:HEADER_BYTES]) != item.header.pack():
            return False
        if not self._codec.is_sealed and payload_checksum(payload) != item.header.checksum:
            return False
        if payload is item.into:
            return True
        try:
            self._codec.of(item.header.digest, item.meta).decode(payload, item.into)
        except CodecError as error:
            logger.warning("row %d cannot be decoded: %s", item.header.row, error)
            return False
        return True

    # ---- writing

    def _write_run(self, run: Sequence[WriteItem]) -> None:
        with self._buffers.borrow() as buffer:
            packed: list[tuple[WriteItem, RecordHeader]] = []
            vectors: list[memoryview] = []
            for frame, item in zip(self._frames(buffer, len(run)), run, strict=True):
                header = self._pack(frame, item, vectors)
                if header is not None:
                    packed.append((item, header))
                else:
                    self._flush(packed, vectors)
            self._flush(packed, vectors)

    def _pack(self, frame: memoryview, item: WriteItem, vectors: list[memoryview]) -> RecordHeader | None:
        """Add one record's buffers to `vectors`.

        None, and nothing added: the block is too large or cannot be encoded.
        """
        page, room = frame[:PAGE_BYTES], frame[PAGE_BYTES:]
        if self._is_direct(item.block):
            payload, parts = item.block, [page, item.block]
        else:
            try:
                encoded = self._codec.of(item.digest, item.meta).encode(item.block)
            except CodecError as error:
                logger.warning("a block is not stored on disk: %s", error)
                return None
            if encoded.nbytes > room.nbytes:
                item.is_unfit = True
                return None
            payload, parts = room[: encoded.nbytes], [frame]
            payload[:] = encoded
            room[encoded.nbytes :] = bytes(room.nbytes - encoded.nbytes)
        checksum = item.meta.checksum if self._codec.name == "none" else 0 if self._codec.is_sealed else None
        if checksum is None:
            checksum = payload_checksum(payload)
        header = RecordHeader(
            self._namespace, item.row, item.sequence, item.digest, item.meta, payload.nbytes, checksum
        )
        page[:HEADER_BYTES] = header.pack()  # the rest of the page is undefined
        vectors += parts
        return header

    def _flush(self, packed: list[tuple[WriteItem, RecordHeader]], vectors: list[memoryview]) -> None:
        """Write the packed records and clear both lists."""
        if packed:
            try:
                self._segments.write(*self._geometry.place(packed[0][0].row), vectors)
                for item, header in packed:
                    item.header = header
            except OSError as error:
                for item, _ in packed:
                    item.error = error
        packed.clear()
        vectors.clear()
