"""Reads and writes of records: headers, checksums, codec, and runs of adjacent rows in one request.

Knows nothing of which row holds which block: callers hold or have reserved every row that they pass.
"""

import logging
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Executor
from dataclasses import dataclass
from typing import TypeVar

from kvrelay.kvcache.stores.codecs import Codec, CodecError
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
from kvrelay.kvcache.stores.disk.io import Buffers, Segments, is_aligned
from kvrelay.kvcache.stores.store import BlockMeta
from kvrelay.types import BlockHash

logger = logging.getLogger(__name__)

RUN_BYTES = (
    2 << 20
)  # of one request: enough for the device's full bandwidth, and small enough to keep several under way
_SCAN_ROWS = 256


@dataclass(slots=True, eq=False)
class ReadItem:
    """One block to load, and after `read` its result."""

    index: int  # in the caller's order
    header: RecordHeader
    into: memoryview
    is_done: bool = False
    error: OSError | None = None  # not done and no error: it is corrupt


@dataclass(slots=True, eq=False)
class WriteItem:
    """One block to store in a row reserved for it, and after `write` its result."""

    index: int  # in the caller's order
    row: int
    sequence: int
    digest: BlockHash
    meta: BlockMeta
    block: memoryview
    header: RecordHeader | None = None  # set when it is on the disk
    error: OSError | None = None
    is_unfit: bool = False  # encoded, it is larger than a record
    is_rejected: bool = False  # it cannot be encoded


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
        if bytes(frame[:HEADER_BYTES]) != item.header.pack() or payload_checksum(payload) != item.header.checksum:
            return False
        if payload is item.into:
            return True
        try:
            self._codec.decode(payload, item.into)
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
                encoded = self._codec.encode(item.block)
            except CodecError as error:
                logger.warning("a block is not stored on disk: %s", error)
                item.is_rejected = True
                return None
            if encoded.nbytes > room.nbytes:
                item.is_unfit = True
                return None
            payload, parts = room[: encoded.nbytes], [frame]
            payload[:] = encoded
            room[encoded.nbytes :] = bytes(room.nbytes - encoded.nbytes)
        checksum = item.meta.checksum if self._codec.name == "none" else None
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
