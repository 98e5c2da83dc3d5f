"""Moves scattered bytes into this process's memory and hashes them as they land.

In C (native/) where there is a compiler, else in Python: the same bytes, the same hashes. Neither holds the
interpreter's lock while bytes move. The mover's own thread (native/worker.c) carries moves out one after the other
without the interpreter: a thread of Python waits for its lock before and after each move, up to 5 ms each while the
engine computes in Python; this one never does. The loop is notified of results over an eventfd.
"""

import asyncio
import ctypes
import functools
import os
import time
import weakref
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import xxhash
from numpy.typing import NDArray

from kvrelay.errors import TransportError
from kvrelay.kvtransfer.mover.copy_plan import CopyList, Offsets
from kvrelay.native.build import XXH3_HEADERS, XXH3_SOURCES, NativeLibrary

Hashes = NDArray[np.uint64]
_FOLDER = Path(__file__).parent / "native"
LIBRARY = NativeLibrary("mover", sorted([*_FOLDER.glob("*.c"), *XXH3_SOURCES]), [*_FOLDER.glob("*.h"), *XXH3_HEADERS])
INLINE_BYTES = 256 << 10  # up to here: moved and hashed (< 100 us) before a thread is awake (100 us and more)
_SHORT_BYTES = 240  # XXH3 hashes up to this in another way, which the C does not have
_STEP_BYTES = 256 << 10  # in Python: copied at once, and at least so much before it is hashed
_YIELD_BYTES = 1 << 20  # xxhash holds the interpreter's lock below 64 KiB: others get it this often
_OUT_OF_BOUNDS, _CANCELLED = -1, -2  # of native/move.h
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
        self.hash_s = 0.0  # of hashing in a pass of its own
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
        *((name, ctypes.c_int64) for name in ("num_rows",)),
        *((name, ctypes.c_char_p) for name in ("source_offset", "target_offset", "num_bytes")),
        *((name, ctypes.c_int64) for name in ("num_chunks", "pieces_per_chunk", "piece_bytes")),
        *((name, ctypes.c_char_p) for name in ("pieces", "is_checked")),
        *((name, ctypes.c_void_p) for name in ("scratch", "found", "landed")),
        *((name, ctypes.c_int64) for name in ("row", "inside", "hashed", "hash_ns")),
        *((name, ctypes.c_int64) for name in ("is_cancelled", "is_done", "problem")),
        ("next", ctypes.c_void_p),
    ]


@functools.cache
def library() -> Any:
    """The compiled mover, or None where there can be none. Compiles at its first call: make that off the loop."""
    lib = LIBRARY.load_or_none(instead="KV is moved and hashed in Python")
    if lib is None:
        return None
    lib.kt_move.argtypes, lib.kt_move.restype = [ctypes.c_void_p], ctypes.c_int
    lib.kt_worker_start.argtypes, lib.kt_worker_start.restype = [ctypes.c_int], ctypes.c_void_p
    lib.kt_worker_submit.argtypes, lib.kt_worker_submit.restype = [ctypes.c_void_p, ctypes.c_void_p], None
    lib.kt_worker_stop.argtypes, lib.kt_worker_stop.restype = [ctypes.c_void_p], None
    return lib


def _packed(array: NDArray[Any]) -> bytes:
    """For a pointer argument: a copy costs 0.1 us, an array's address 1.5 us."""
    return array.astype(np.int64, copy=False).tobytes()


class NativeMove:
    """A read in C. Run once, or given to a worker."""

    def __init__(self, lib: Any, source: Place, target: Place, copies: CopyList, receipt: Receipt) -> None:
        chosen = receipt.is_checked
        # room for a chunk of several pieces
        self._scratch = ctypes.create_string_buffer(receipt.chunk_bytes if receipt.pieces.shape[1] > 1 else 1)
        self._lib, self._receipt = lib, receipt
        self._job = _Job(
            source=source.address,
            target=target.address,
            source_bytes=source.num_bytes,
            target_bytes=target.num_bytes,
            num_rows=len(copies.num_bytes),
            source_offset=_packed(copies.source_offset),
            target_offset=_packed(copies.target_offset),
            num_bytes=_packed(copies.num_bytes),
            num_chunks=len(receipt.pieces),
            pieces_per_chunk=receipt.pieces.shape[1],
            piece_bytes=receipt.piece_bytes,
            pieces=_packed(receipt.pieces),
            is_checked=None if chosen is None else chosen.tobytes(),
            scratch=ctypes.addressof(self._scratch),
            found=ctypes.addressof(receipt.hashes),
            landed=ctypes.addressof(receipt.landed),
        )

    def run(self) -> None:
        """Raises TransportError."""
        self._job.problem = self._lib.kt_move(self.address)
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
        """End it within a few hundred KiB."""
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
        copies.check_bounds(source.num_bytes, target.num_bytes)
        self._source, self._target, self._copies, self._receipt = source, target, copies, receipt
        self._num_hashed = 0

    def run(self) -> None:
        receipt, chunk_bytes, landed, seen = self._receipt, max(self._receipt.chunk_bytes, 1), 0, 0
        for source, target, num_bytes in zip(*self._copies.rows(), strict=True):
            for at in range(0, num_bytes, _STEP_BYTES):
                size = min(_STEP_BYTES, num_bytes - at)
                ctypes.memmove(self._target.address + target + at, self._source.address + source + at, size)
                receipt.landed.value = landed = landed + size
                if landed - seen >= _STEP_BYTES:
                    self._hash(min(landed // chunk_bytes, len(receipt.pieces)))
                    seen = landed
        self._hash(len(receipt.pieces))

    def _hash(self, stop: int) -> None:
        """Chunks up to `stop`, which lie in the target."""
        receipt, began = self._receipt, time.perf_counter()
        if self._num_hashed == stop:
            return
        per_turn = max(_YIELD_BYTES // receipt.chunk_bytes, 1)
        for i in range(self._num_hashed, stop):
            if i % per_turn == per_turn - 1:
                time.sleep(1e-6)
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
    hash_in_place(view, receipt).run()
    return receipt.found


def hash_in_place(view: memoryview, receipt: Receipt) -> NativeMove | PythonMove:
    """A move that moves nothing: it hashes the receipt's chunks where they lie in `view`.

    Raises ValueError when one lies outside.
    """
    pieces = receipt.pieces
    if pieces.size and not 0 <= int(pieces.min()) <= int(pieces.max()) <= view.nbytes - receipt.piece_bytes:
        raise ValueError("a piece lies outside the pool")
    place = Place(np.frombuffer(view, dtype=np.uint8).ctypes.data, view.nbytes)
    return move(place, place, _NO_ROWS, receipt)


def nothing() -> None:
    """What a move without checks has to settle."""


class MoverThread:
    """Starts with the first move. Used on one loop only."""

    def __init__(self) -> None:
        self._pending: deque[tuple[NativeMove, Callable[[], object], asyncio.Future[None]]] = deque()
        self._worker: int | None = None
        self._event_fd = -1
        self._stop: weakref.finalize[[Any, int, int, int], MoverThread] | None = None
        self._loop: asyncio.AbstractEventLoop | None = None

    @staticmethod
    def can_be() -> bool:
        """Whether this system has what it takes."""
        return hasattr(os, "eventfd") and library() is not None

    def submit(self, moving: NativeMove, finish: Callable[[], object] = nothing) -> "asyncio.Future[None]":
        """The future ends when the move has, as its result and `finish()` do, which is called on the loop."""
        if self._worker is None:
            self._start()
        assert self._loop is not None
        done: asyncio.Future[None] = self._loop.create_future()
        self._pending.append((moving, finish, done))
        library().kt_worker_submit(self._worker, moving.address)
        return done

    def cancel(self, done: "asyncio.Future[None]") -> None:
        """End this move within a few hundred KiB, or before it begins. Its future still ends by itself."""
        for moving, _, future in self._pending:
            if future is done:
                moving.cancel()

    def _start(self) -> None:
        self._event_fd = os.eventfd(0, os.EFD_CLOEXEC | os.EFD_NONBLOCK)
        self._worker = library().kt_worker_start(self._event_fd)
        if self._worker is None:
            os.close(self._event_fd)
            raise TransportError("no thread could be started")
        self._stop = weakref.finalize(self, _stop, library(), self._worker, self._event_fd, os.getpid())
        self._loop = asyncio.get_running_loop()
        self._loop.add_reader(self._event_fd, self._collect)

    def _collect(self) -> None:
        os.eventfd_read(self._event_fd)
        self._report_done()

    def _report_done(self) -> None:
        while self._pending and self._pending[0][0].is_done:
            moving, finish, done = self._pending.popleft()
            outcome: TransportError | None = None
            try:
                moving.result()
                finish()
            except TransportError as error:
                outcome = error
            except Exception as error:  # whatever it was, nothing of the move will land any more
                outcome = TransportError(str(error) or type(error).__name__)
            if done.cancelled():
                continue
            if outcome is None:
                done.set_result(None)
            else:
                done.set_exception(outcome)

    async def aclose(self) -> None:
        """Wait until what was submitted is done, then end the thread."""
        if self._stop is None or self._loop is None:
            return
        stop, self._stop, self._worker = self._stop, None, None
        self._loop.remove_reader(self._event_fd)
        stopping = asyncio.ensure_future(asyncio.to_thread(stop))
        stopping.add_done_callback(lambda _: self._report_done())  # though nothing may await it any more
        await asyncio.shield(stopping)


def _stop(lib: Any, worker: int, event_fd: int, pid: int) -> None:
    """Also runs when the interpreter ends: its memory must not go while a move writes it."""
    if os.getpid() != pid:  # a forked child has the object, but not the thread
        return
    lib.kt_worker_stop(worker)
    os.close(event_fd)
