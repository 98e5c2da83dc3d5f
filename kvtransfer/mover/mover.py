"""Moves scattered bytes into this process's memory and hashes them as they land.

In C (native/) where there is a compiler, else in Python: the same bytes, the same hashes. Neither holds the
interpreter's lock while bytes move.
"""

import ctypes
import functools
import logging
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import xxhash
from numpy.typing import NDArray

from kvrelay.errors import BackendUnavailable
from kvrelay.kvtransfer.plans.copy_plan import CopyList, Offsets
from kvrelay.kvtransfer.transports.base import TransportError, check_bounds
from kvrelay.native.build import XXH3_HEADERS, XXH3_SOURCES, load_native

logger = logging.getLogger(__name__)

Hashes = NDArray[np.uint64]
_FOLDER = Path(__file__).parent / "native"
INLINE_BYTES = 256 << 10  # up to here: moved and hashed (< 100 us) before a thread is awake (100 us and more)
_SHORT_BYTES = 240  # XXH3 hashes up to this in another way, which the C does not have
_STEP_BYTES = 256 << 10  # in Python: copied, then hashed
_YIELD_BYTES = 1 << 20  # xxhash holds the interpreter's lock below 64 KiB: others get it this often
_OUT_OF_BOUNDS, _CANCELLED, _ALL = -1, -2, -1  # of native/move.h
_NOTHING = np.empty((0, 1), np.int64)
_NO_ROWS = CopyList(np.empty(0, np.int64), np.empty(0, np.int64), np.empty(0, np.int64))


@dataclass(frozen=True, slots=True)
class Place:
    """Memory of this process that bytes come from or go to. Its user keeps the owner alive."""

    address: int
    num_bytes: int


class Receipt:
    """What a move leaves behind: how far it got, and the hashes of the chunks that it was to hash.

    Chunk i is the i-th so many bytes of what lands. Another thread may look at `num_landed` meanwhile.

    Args:
        pieces: [num_chunks, pieces_per_chunk] where they land, in the target; None: nothing is hashed.
        is_checked: [num_chunks] which of them to hash; None: all.
    """

    def __init__(
        self, pieces: Offsets | None = None, piece_bytes: int = 0, is_checked: NDArray[np.bool_] | None = None
    ) -> None:
        self.pieces = _NOTHING if pieces is None else pieces
        self.piece_bytes, self.is_checked = piece_bytes, is_checked
        self.hash_s = 0.0
        self.landed = ctypes.c_int64()  # bytes; written from C
        self.hashes = (ctypes.c_uint64 * len(self.pieces))()

    @property
    def chunk_bytes(self) -> int:
        return int(self.pieces.shape[1]) * self.piece_bytes

    @property
    def num_landed(self) -> int:
        return self.landed.value

    @property
    def found(self) -> Hashes:
        """[num_chunks] the hashes; 0 where there is none (yet)."""
        return np.array(self.hashes, dtype=np.uint64)


class _Job(ctypes.Structure):
    """struct move of native/move.h."""

    _fields_ = [
        *((name, ctypes.c_uint64) for name in ("source", "target")),
        *((name, ctypes.c_int64) for name in ("source_bytes", "target_bytes")),
        *((name, ctypes.c_int64) for name in ("num_rows", "repeats", "source_stride", "target_stride")),
        *((name, ctypes.c_char_p) for name in ("source_offset", "target_offset", "num_bytes")),
        *((name, ctypes.c_int64) for name in ("num_chunks", "pieces_per_chunk", "piece_bytes")),
        *((name, ctypes.c_char_p) for name in ("pieces", "is_checked")),
        *((name, ctypes.c_void_p) for name in ("scratch", "found", "landed")),
        *((name, ctypes.c_int64) for name in ("repeat", "row", "inside", "hashed", "hash_ns")),
        *((name, ctypes.c_int64) for name in ("is_cancelled", "is_done", "problem")),
        ("next", ctypes.c_void_p),
    ]


@functools.cache
def library() -> Any:
    """The compiled mover, or None where there can be none. Compiles at its first call: make that off the loop."""
    try:
        sources, headers = sorted(_FOLDER.glob("*.c")), sorted(_FOLDER.glob("*.h"))
        lib: Any = load_native("mover", [*sources, *XXH3_SOURCES], [*headers, *XXH3_HEADERS])
    except BackendUnavailable as error:
        logger.info("KV is moved and hashed in Python: %s", error)
        return None
    lib.kt_move.argtypes, lib.kt_move.restype = [ctypes.c_void_p, ctypes.c_int64], ctypes.c_int
    lib.kt_worker_start.argtypes, lib.kt_worker_start.restype = [ctypes.c_int], ctypes.c_void_p
    lib.kt_worker_submit.argtypes, lib.kt_worker_submit.restype = [ctypes.c_void_p, ctypes.c_void_p], None
    lib.kt_worker_stop.argtypes, lib.kt_worker_stop.restype = [ctypes.c_void_p], None
    return lib


def _packed(array: NDArray[Any]) -> bytes:
    """For a pointer argument: a copy costs 0.1 us, an array's address 1.5 us."""
    return array.astype(np.int64, copy=False).tobytes()


def _scratch(pieces: Offsets, piece_bytes: int) -> "ctypes.Array[ctypes.c_char]":
    """Room for a chunk of several pieces."""
    each = pieces.shape[1]
    return ctypes.create_string_buffer(each * piece_bytes if each > 1 else 1)


class NativeMove:
    """A read in C. It goes on where it stopped, as often as it is run."""

    def __init__(self, lib: Any, source: Place, target: Place, copies: CopyList, receipt: Receipt) -> None:
        chosen = receipt.is_checked
        self._scratch = _scratch(receipt.pieces, receipt.piece_bytes)
        self._lib, self._receipt = lib, receipt
        self._job = _Job(
            source=source.address, target=target.address, source_bytes=source.num_bytes, target_bytes=target.num_bytes,
            num_rows=len(copies.num_bytes),
            repeats=copies.repeats, source_stride=copies.source_stride, target_stride=copies.target_stride,
            source_offset=_packed(copies.source_offset), target_offset=_packed(copies.target_offset),
            num_bytes=_packed(copies.num_bytes), num_chunks=len(receipt.pieces),
            pieces_per_chunk=receipt.pieces.shape[1], piece_bytes=receipt.piece_bytes, pieces=_packed(receipt.pieces),
            is_checked=None if chosen is None else chosen.tobytes(), scratch=ctypes.addressof(self._scratch),
            found=ctypes.addressof(receipt.hashes), landed=ctypes.addressof(receipt.landed),
        )  # fmt: skip

    def run(self, until: int = _ALL) -> None:
        """Go on until the first `until` bytes have landed. Raises TransportError."""
        self._job.problem = self._lib.kt_move(self.address, until)
        self.result()

    @property
    def address(self) -> int:
        """For a worker."""
        return ctypes.addressof(self._job)

    @property
    def is_done(self) -> bool:
        """A worker has carried it out."""
        return bool(self._job.is_done)

    def cancel(self) -> None:
        """End it within a few hundred KiB. No effect on a later run."""
        self._job.is_cancelled = 1

    def result(self) -> None:
        """How it went. Raises TransportError."""
        self._receipt.hash_s = self._job.hash_ns / 1e9
        problem = self._job.problem
        if problem == _OUT_OF_BOUNDS:
            raise TransportError("a copy lies outside the pool")
        if problem == _CANCELLED:
            raise TransportError("abandoned")


class PythonMove:
    """The same without a compiler."""

    def __init__(self, source: Place, target: Place, copies: CopyList, receipt: Receipt) -> None:
        check_bounds(copies, source.num_bytes, target.num_bytes)
        self._source, self._target, self._receipt = source, target, receipt
        self._rows = [row.tolist() for row in copies.expanded()]
        self._total = copies.total_bytes
        self._row = self._inside = self._num_hashed = 0

    def run(self, until: int = _ALL) -> None:
        """Go on until the first `until` bytes have landed. Raises TransportError."""
        until = self._total if until == _ALL else until
        if until > self._total:
            raise TransportError("a copy lies outside the pool")
        while (landed := self._receipt.num_landed) < until:
            size = min(max(_STEP_BYTES, self._receipt.chunk_bytes), until - landed)
            for source, target, num_bytes in self._take(size):
                ctypes.memmove(target, source, num_bytes)
            self._receipt.landed.value = landed + size
            self._hash()

    def _take(self, size: int) -> Iterator[tuple[int, int, int]]:
        """(address in the source, address in the target, length) of the next `size` bytes."""
        sources, targets, sizes = self._rows
        while size:
            some = min(sizes[self._row] - self._inside, size)
            if some:
                source = self._source.address + sources[self._row] + self._inside
                yield source, self._target.address + targets[self._row] + self._inside, some
            size, self._inside = size - some, self._inside + some
            if self._inside == sizes[self._row]:
                self._row, self._inside = self._row + 1, 0

    def _hash(self) -> None:
        receipt = self._receipt
        if not len(receipt.pieces):
            return
        began = time.perf_counter()
        stop = min(receipt.num_landed // receipt.chunk_bytes, len(receipt.pieces))
        for i in range(self._num_hashed, stop):
            if receipt.is_checked is None or receipt.is_checked[i]:
                chunk = xxhash.xxh3_64()
                for offset in receipt.pieces[i].tolist():
                    chunk.update(_bytes_at(self._target.address + offset, receipt.piece_bytes))
                receipt.hashes[i] = chunk.intdigest()
        self._num_hashed = stop
        receipt.hash_s += time.perf_counter() - began


def _bytes_at(address: int, num_bytes: int) -> memoryview:
    return memoryview((ctypes.c_char * num_bytes).from_address(address)).cast("B")


def move(source: Place, target: Place, copies: CopyList, receipt: Receipt) -> NativeMove | PythonMove:
    """A read that `run` carries out. `receipt` may hold chunks of any size."""
    lib = library()
    if lib is None or (len(receipt.pieces) and receipt.chunk_bytes <= _SHORT_BYTES):
        return PythonMove(source, target, copies, receipt)
    return NativeMove(lib, source, target, copies, receipt)


def xxh3_regions(view: memoryview, offsets: Offsets, num_bytes: int) -> Hashes:
    """xxh3-64 of `view[offset : offset + num_bytes]` for each offset. Raises ValueError when one lies outside."""
    return xxh3_chunks(view, offsets[:, None], num_bytes)


def xxh3_chunks(view: memoryview, pieces: Offsets, piece_bytes: int) -> Hashes:
    """xxh3-64 of each chunk: its pieces of `view`, one behind the other. Raises ValueError when one lies outside.

    Args:
        pieces: [num_chunks, pieces_per_chunk] where each piece begins.
    """
    receipt = Receipt(pieces, piece_bytes)
    hashing = hash_in_place(view, receipt)
    if hashing is None:
        return _xxh3_in_python(view, pieces, piece_bytes)
    hashing.run()
    return receipt.found


def hash_in_place(view: memoryview, receipt: Receipt) -> NativeMove | None:
    """A move that moves nothing: it hashes the receipt's chunks where they lie in `view`. None: only Python can.

    Raises ValueError when one lies outside.
    """
    pieces = receipt.pieces
    if pieces.size and not 0 <= int(pieces.min()) <= int(pieces.max()) <= view.nbytes - receipt.piece_bytes:
        raise ValueError("a piece lies outside the pool")
    lib = library()
    if lib is None or receipt.chunk_bytes <= _SHORT_BYTES:
        return None
    place = Place(np.frombuffer(view, dtype=np.uint8).ctypes.data, view.nbytes)
    return NativeMove(lib, place, place, _NO_ROWS, receipt)


def _xxh3_in_python(view: memoryview, pieces: Offsets, piece_bytes: int) -> Hashes:
    step = max(_YIELD_BYTES // max(pieces.shape[1] * piece_bytes, 1), 1)
    values: list[int] = []
    for first in range(0, len(pieces), step):
        if first:
            time.sleep(1e-6)
        for starts in pieces[first : first + step].tolist():
            chunk = xxhash.xxh3_64()
            for start in starts:
                chunk.update(view[start : start + piece_bytes])
            values.append(chunk.intdigest())
    return np.array(values, dtype=np.uint64)
