"""The mover's own thread (native/worker.c): moves are carried out one after the other without the interpreter.

A thread of Python waits for the interpreter's lock before and after each move, up to 5 ms each while the engine
computes in Python; this one never does. The loop is notified of results over an eventfd.
"""

import asyncio
import os
import weakref
from collections import deque
from collections.abc import Callable
from typing import Any

from kvrelay.kvtransfer.mover.mover import NativeMove, library
from kvrelay.kvtransfer.transports.base import TransportError


class MoverThread:
    """Starts with the first move. Used on one loop only."""

    def __init__(self) -> None:
        self._pending: deque[tuple[NativeMove, Callable[[], None], asyncio.Future[None]]] = deque()
        self._worker: int | None = None
        self._event_fd = -1
        self._stop: weakref.finalize[[Any, int, int, int], MoverThread] | None = None
        self._loop: asyncio.AbstractEventLoop | None = None

    @staticmethod
    def can_be() -> bool:
        """Whether this system has what it takes."""
        return hasattr(os, "eventfd") and library() is not None

    @property
    def in_flight(self) -> int:
        """Moves whose bytes may still land, or whose result has not been reported yet."""
        return len(self._pending)

    def submit(self, moving: NativeMove, finish: Callable[[], None]) -> "asyncio.Future[None]":
        """The future ends when the move has, as `finish()` does, which is called on the loop."""
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
        if self._worker is not None:
            return
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
            _, finish, done = self._pending.popleft()
            try:
                finish()
            except TransportError as error:
                outcome: Exception | None = error
            except Exception as error:  # whatever it was, nothing of the move will land any more
                outcome = TransportError(str(error) or type(error).__name__)
            else:
                outcome = None
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
