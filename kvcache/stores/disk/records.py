"""Blocks into slots and out of them: headers, checksums, codec, and which neighbours travel together.

Knows nothing of which slot is whose: who calls holds or has reserved every slot that it names.
"""

import logging
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Executor
from dataclasses import dataclass
from typing import TypeVar

from kvrelay.kvcache.stores.codecs import Codec, CodecError
from kvrelay.kvcache.stores.disk.format import (
    HEADER_BYTES,
    MOST_IOVECS,
    PAGE_BYTES,
    Geometry,
    SlotHeader,
    payload_checksum,
    runs,
    unpack_header,
)
from kvrelay.kvcache.stores.disk.io import Buffers, Segments, is_aligned
from kvrelay.kvcache.stores.store import BlockMeta
from kvrelay.types import BlockHash

logger = logging.getLogger(__name__)

RUN_BYTES = 2 << 20  # one request to the device: enough for its full rate, little enough to keep several under way
_SCAN_SLOTS = 256


@dataclass(slots=True, eq=False)
class ReadItem:
    """One block to load: after `read`, what became of it."""

    index: int  # in the caller's order
    header: SlotHeader
    into: memoryview
    is_done: bool = False
    error: OSError | None = None  # neither: it is corrupt


@dataclass(slots=True, eq=False)
class WriteItem:
    """One block to store in a slot reserved for it: after `write`, what became of it."""

    index: int  # in the caller's order
    slot: int
    sequence: int
    digest: BlockHash
    meta: BlockMeta
    block: memoryview
    header: SlotHeader | None = None  # it is on the disk
    error: OSError | None = None
    is_unfit: bool = False  # as encoded it is larger than a slot
    is_rejected: bool = False  # it cannot be encoded


_Item = TypeVar("_Item", ReadItem, WriteItem)


class SlotIo:
    """The bytes of one folder's slots."""

    def __init__(
        self, segments: Segments, geometry: Geometry, namespace: bytes, codec: Codec, executor: Executor, depth: int
    ) -> None:
        """`depth`: requests under way at once."""
        self._segments, self._geometry, self._namespace = segments, geometry, namespace
        self._codec, self._executor = codec, executor
        self._depth = depth
        self._run_slots = max(1, min(RUN_BYTES // geometry.slot_bytes, MOST_IOVECS // 2))
        self._buffers = Buffers(depth, self._run_slots * geometry.slot_bytes)

    def read(self, items: Sequence[ReadItem]) -> None:
        """Load them all, each verified against its header."""
        self._by_runs(self._read_run, items, [item.header.slot for item in items])

    def write(self, items: Sequence[WriteItem]) -> None:
        """Store them all."""
        self._by_runs(self._write_run, items, [item.slot for item in items])

    def erase(self, slots: Sequence[int]) -> None:
        """Let these be found by no later process. Raises OSError."""
        with self._buffers.lend() as buffer:
            page = buffer[:PAGE_BYTES]
            page[:] = bytes(PAGE_BYTES)
            for slot in slots:
                self._segments.write(*self._geometry.place(slot), [page])

    def scan(self, segments: Sequence[int]) -> list[SlotHeader]:
        """All whole headers in these segments, in no order. Raises OSError."""
        jobs: list[range] = []
        for segment in segments:
            first = segment * self._geometry.slots_per_segment
            stop = first + self._geometry.segment_bytes(segment) // self._geometry.slot_bytes
            jobs += [range(at, min(at + _SCAN_SLOTS, stop)) for at in range(first, stop, _SCAN_SLOTS)]
        return [header for headers in self._executor.map(self._scan_range, jobs) for header in headers]

    def _scan_range(self, slots: range) -> list[SlotHeader]:
        found = []
        with self._buffers.lend() as buffer:
            page = buffer[:PAGE_BYTES]
            for slot in slots:
                self._segments.read(*self._geometry.place(slot), [page])
                header = unpack_header(page, self._namespace, slot)
                if header is not None and header.num_bytes <= self._geometry.payload_bytes:
                    found.append(header)
        return found

    def _by_runs(self, action: Callable[[Sequence[_Item]], None], items: Sequence[_Item], slots: Sequence[int]) -> None:
        """`action` on every run of neighbours; one of them in this thread, which would only wait."""
        order = sorted(range(len(items)), key=slots.__getitem__)
        most = min(self._run_slots, max(1, -(-len(items) // self._depth)))  # few blocks are shared out too
        cut = runs([slots[index] for index in order], self._geometry, most_slots=most)
        parts = [[items[index] for index in order[run.start : run.stop]] for run in cut]
        others = [self._executor.submit(action, part) for part in parts[1:]]
        try:
            if parts:
                action(parts[0])
        finally:
            for other in others:  # nothing may touch the caller's memory once this returns
                other.exception()
        for other in others:
            other.result()

    def _frames(self, buffer: memoryview, count: int) -> Iterator[memoryview]:
        size = self._geometry.slot_bytes
        return (buffer[place * size : (place + 1) * size] for place in range(count))

    def _goes_straight(self, block: memoryview) -> bool:
        """Whether a block's bytes are what is on the disk, and lie so that they need no buffer between."""
        return self._codec.name == "none" and block.nbytes == self._geometry.payload_bytes and is_aligned(block)

    # ---- reading

    def _read_run(self, run: Sequence[ReadItem]) -> None:
        try:
            self._read_together(run)
        except OSError as error:
            if len(run) == 1:
                run[0].error = error
                return
            for item in run:  # one bad place must not cost its neighbours
                self._read_run([item])

    def _read_together(self, run: Sequence[ReadItem]) -> None:
        with self._buffers.lend() as buffer:
            vectors: list[memoryview] = []
            payloads: list[memoryview] = []
            frames = list(self._frames(buffer, len(run)))
            for frame, item in zip(frames, run, strict=True):
                if self._goes_straight(item.into):
                    vectors += [frame[:PAGE_BYTES], item.into]
                    payloads.append(item.into)
                else:
                    vectors.append(frame)
                    payloads.append(frame[PAGE_BYTES : PAGE_BYTES + item.header.num_bytes])
            self._segments.read(*self._geometry.place(run[0].header.slot), vectors)
            for frame, payload, item in zip(frames, payloads, run, strict=True):
                item.is_done = self._accept(frame, payload, item)

    def _accept(self, frame: memoryview, payload: memoryview, item: ReadItem) -> bool:
        """Verify header and payload, then bring the block where it belongs. False: it is not what was stored."""
        if bytes(frame[:HEADER_BYTES]) != item.header.pack() or payload_checksum(payload) != item.header.checksum:
            return False
        if payload is item.into:
            return True
        try:
            self._codec.decode(payload, item.into)
        except CodecError as error:
            logger.warning("slot %d: %s", item.header.slot, error)
            return False
        return True

    # ---- writing

    def _write_run(self, run: Sequence[WriteItem]) -> None:
        with self._buffers.lend() as buffer:
            packed: list[tuple[WriteItem, SlotHeader]] = []
            vectors: list[memoryview] = []
            for frame, item in zip(self._frames(buffer, len(run)), run, strict=True):
                header = self._pack(frame, item, vectors)
                if header is not None:
                    packed.append((item, header))
                else:
                    self._flush(packed, vectors)
            self._flush(packed, vectors)

    def _pack(self, frame: memoryview, item: WriteItem, vectors: list[memoryview]) -> SlotHeader | None:
        """Add one slot's bytes to `vectors`. None, and nothing added, when they are too many, or none."""
        page, room = frame[:PAGE_BYTES], frame[PAGE_BYTES:]
        if self._goes_straight(item.block):
            payload, parts = item.block, [page, item.block]
        else:
            try:
                encoded = self._codec.encode(item.block)
            except CodecError as error:
                logger.warning("not stored: %s", error)
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
        header = SlotHeader(self._namespace, item.slot, item.sequence, item.digest, item.meta, payload.nbytes, checksum)
        page[:HEADER_BYTES] = header.pack()  # what is left of the page means nothing
        vectors += parts
        return header

    def _flush(self, packed: list[tuple[WriteItem, SlotHeader]], vectors: list[memoryview]) -> None:
        """Write what has been gathered, and gather anew."""
        if packed:
            try:
                self._segments.write(*self._geometry.place(packed[0][0].slot), vectors)
                for item, header in packed:
                    item.header = header
            except OSError as error:
                for item, _ in packed:
                    item.error = error
        packed.clear()
        vectors.clear()
