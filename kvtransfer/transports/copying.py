"""Reads whose bytes this process can copy itself; they are verified while the caches hold them.

Releases the interpreter's lock while bytes move and are hashed, so that the engine's thread runs on.
"""

import asyncio
import logging
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from functools import partial

import numpy as np
from numpy.typing import NDArray

from kvrelay.kvtransfer.mover.mover import INLINE_BYTES, NativeMove, Place, PythonMove, Receipt, move
from kvrelay.kvtransfer.mover.mover_thread import MoverThread
from kvrelay.kvtransfer.plans.copy_plan import CopyList
from kvrelay.kvtransfer.reads.receive_plan import ArrivingRead
from kvrelay.kvtransfer.transports.base import Landed, TransportError
from kvrelay.types import KvMemory

logger = logging.getLogger(__name__)

Bytes = NDArray[np.uint8]
_PIECE_BYTES = 256 << 10  # between two calls of `landed`: what the second-level cache keeps


def place_of(array: Bytes) -> Place:
    """This array's memory. The caller keeps the array alive."""
    return Place(array.ctypes.data, array.nbytes)


def as_one(
    source: Place, target: Place, copies: CopyList, landed: Landed | None
) -> tuple[NativeMove | PythonMove, Callable[[], None]] | None:
    """(the whole read as one move that hashes what it brings, what to call when it is over: raises CorruptRead).

    None where `landed` must be called as pieces come: a fault is injected, or it is no ArrivingRead.
    """
    receipt = landed.receipt() if isinstance(landed, ArrivingRead) else Receipt() if landed is None else None
    if receipt is None:
        return None
    settle = partial(landed.settle, receipt) if isinstance(landed, ArrivingRead) else _nothing
    return move(source, target, copies, receipt), settle


def _nothing() -> None:
    """What a read without checks has to settle."""


def copy_all(source: Place, target: Place, copies: CopyList, landed: Landed | None = None) -> None:
    """Carry out `copies` and verify them. Raises TransportError (CorruptRead)."""
    one = as_one(source, target, copies, landed)
    if one is not None:
        moving, settle = one
        moving.run()
        settle()
        return
    assert landed is not None
    receipt, total = Receipt(), copies.total_bytes
    moving = move(source, target, copies, receipt)
    while receipt.num_landed < total:
        moving.run(min(receipt.num_landed + _PIECE_BYTES, total))
        landed(receipt.num_landed)


class ReadThread:
    """Runs blocking reads off the loop; knows how many are under way. The thread starts with the first."""

    def __init__(self, name: str, *, inline_bytes: int = INLINE_BYTES) -> None:
        self._executor = ThreadPoolExecutor(max_workers=1, thread_name_prefix=name)
        self._inline_bytes = inline_bytes
        self.in_flight = 0

    def submit(self, work: Callable[[CopyList], None], copies: CopyList) -> "asyncio.Future[None]":
        """`work(copies)` as a future that ends when the work has. OSError becomes TransportError."""
        loop = asyncio.get_running_loop()
        done: asyncio.Future[None] = loop.create_future()
        self.in_flight += 1
        if copies.total_bytes <= self._inline_bytes:
            self._finish(done, self._run(work, copies))
            return done

        def run() -> None:
            error = self._run(work, copies)
            if not loop.is_closed():
                loop.call_soon_threadsafe(self._finish, done, error)

        self._executor.submit(run)
        return done

    def _run(self, work: Callable[[CopyList], None], copies: CopyList) -> Exception | None:
        try:
            work(copies)
        except TransportError as error:
            return error
        except Exception as error:  # the thread's edge: whatever it was, the bytes are not there and none will land
            logger.debug("a read failed", exc_info=True)
            return TransportError(str(error) or type(error).__name__)
        return None

    def _finish(self, done: "asyncio.Future[None]", error: Exception | None) -> None:
        self.in_flight -= 1
        if done.cancelled():
            return
        if error is None:
            done.set_result(None)
        else:
            done.set_exception(error)

    async def aclose(self) -> None:
        """Wait for the thread to end; its work is bounded by memory speed or by a closed socket."""
        await asyncio.to_thread(self._executor.shutdown, True)


class CopyingReader:
    """A Reader that copies from a pool that this process can address: `connect` sets `_source`.

    Tiny reads run on the loop; others on the mover's thread; on one of Python's where there is no compiler, or where
    `landed` must be called as pieces come.
    """

    max_in_flight = 4  # a thread must not run dry while the loop is held up: 4 units are a few milliseconds

    def __init__(self, name: str, memory: KvMemory) -> None:
        assert memory.view is not None
        self._bytes: Bytes = np.frombuffer(memory.view, dtype=np.uint8)
        self._target = place_of(self._bytes)
        self._source: Place | None = None
        self._thread, self._mover = ReadThread(name), MoverThread()

    def read(self, copies: CopyList, landed: Landed | None = None) -> "asyncio.Future[None]":
        if copies.total_bytes > INLINE_BYTES and MoverThread.can_be():
            assert self._source is not None
            one = as_one(self._source, self._target, copies, landed)
            if one is not None and isinstance(moving := one[0], NativeMove):
                return self._mover.submit(moving, partial(self._finish, moving, one[1]))
        return self._thread.submit(partial(self._copy, landed), copies)

    def _finish(self, moving: NativeMove, settle: Callable[[], None]) -> None:
        moving.result()
        settle()

    def _copy(self, landed: Landed | None, copies: CopyList) -> None:
        assert self._source is not None
        copy_all(self._source, self._target, copies, landed)

    def abandon(self, read: "asyncio.Future[None]") -> None:
        self._mover.cancel(read)  # others end by themselves within milliseconds

    @property
    def in_flight(self) -> int:
        return self._thread.in_flight + self._mover.in_flight

    async def aclose(self) -> None:
        await self._mover.aclose()
        await self._thread.aclose()
        self._source = None
