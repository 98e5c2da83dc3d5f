"""A Reader whose reads run one after the other on a thread of its own, or at once when tiny."""

import asyncio
import logging
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from functools import partial

import numpy as np

from kvrelay.kvtransfer.plans import CopyList
from kvrelay.kvtransfer.process_memory import Place
from kvrelay.kvtransfer.transports.base import Landed, TransportError
from kvrelay.kvtransfer.transports.copying import INLINE_BYTES, Bytes, copy_all, place_of
from kvrelay.types import KvMemory

logger = logging.getLogger(__name__)


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


class FetchingReader:
    """A Reader that fetches by itself, from a pool that this process can address or read: `connect` sets `_source`."""

    max_in_flight = 2  # the second is begun by the thread while the loop still ends the first

    def __init__(self, name: str, memory: KvMemory) -> None:
        assert memory.view is not None
        self._bytes: Bytes = np.frombuffer(memory.view, dtype=np.uint8)
        self._target = place_of(self._bytes)
        self._source: Place | None = None
        self._thread = ReadThread(name)

    def read(self, copies: CopyList, landed: Landed | None = None) -> "asyncio.Future[None]":
        return self._thread.submit(partial(self._copy, landed), copies)

    def _copy(self, landed: Landed | None, copies: CopyList) -> None:
        assert self._source is not None
        copy_all(self._source, self._target, copies, landed)

    def abandon(self, read: "asyncio.Future[None]") -> None:
        """A copy ends by itself within milliseconds."""

    @property
    def in_flight(self) -> int:
        return self._thread.in_flight

    async def aclose(self) -> None:
        await self._thread.aclose()
        self._source = None
