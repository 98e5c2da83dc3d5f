"""A route: the target's readers of one source, one for each path, connected when first wanted."""

import asyncio
import logging
import time
from collections.abc import Callable, Mapping

from kvrelay.kvtransfer.paths.path_ranking import Path, PathTable
from kvrelay.kvtransfer.transports.base import Reader, TransportError

logger = logging.getLogger(__name__)

_CONNECT_TIMEOUT_S = 25.0  # an RDMA wire-up included
_FIRST_IN_FLIGHT = 1  # reads at once before the reader's own number is known


class Route:
    """Which reader carries the next read. Owns the readers; a failed one is closed and made anew later."""

    def __init__(
        self, table: PathTable, descriptors: Mapping[str, bytes], make_reader: Callable[[str], Reader]
    ) -> None:
        self.table = table
        self._descriptors, self._make_reader = descriptors, make_reader
        self._connecting: dict[str, asyncio.Task[Reader]] = {}
        self._readers: dict[str, Reader] = {}  # connected
        self._last_end: dict[str, float] = {}
        self._closing: set[asyncio.Task[None]] = set()
        self._is_closed = False

    @property
    def max_in_flight(self) -> int:
        """Reads that may usefully run at once now."""
        path = self.table.best(time.monotonic())
        reader = self._readers.get(path.name) if path is not None else None
        return reader.max_in_flight if reader is not None else _FIRST_IN_FLIGHT

    async def open(self) -> Path:
        """Connect the best path that can be connected. Raises TransportError when none can."""
        tried: set[str] = set()
        while (path := self.table.best(time.monotonic(), tried)) is not None:
            try:
                await self.reader(path.name)
            except TransportError as error:
                tried.add(path.name)
                self.failed(path.name, str(error))
                continue
            return path
        raise TransportError(self.problems() or "no transport that both sides have")

    async def reader(self, name: str) -> Reader:
        """This path's reader, connected. Raises TransportError, also once the route is closed: nobody would close it."""
        if self._is_closed:
            raise TransportError("the route is closed")
        if name in self._readers:
            return self._readers[name]
        if name not in self._connecting:
            self._connecting[name] = asyncio.create_task(self._connect(name), name=f"kv connect over {name}")
        return await asyncio.shield(self._connecting[name])

    async def _connect(self, name: str) -> Reader:
        reader = self._make_reader(name)
        try:
            async with asyncio.timeout(_CONNECT_TIMEOUT_S):
                await reader.connect(self._descriptors[name])
        except BaseException as error:
            await reader.aclose()
            if isinstance(error, TimeoutError):
                raise TransportError("connecting timed out") from error
            raise
        finally:
            self._connecting.pop(name, None)
        self._readers[name] = reader
        return reader

    def ended(self, name: str, num_bytes: int, began: float, now: float) -> float:
        """A read ended well. Returns the seconds that count as its own: not those in which it waited for another."""
        seconds = now - max(began, self._last_end.get(name, 0.0))
        self._last_end[name] = now
        self.table.moved(name, num_bytes, seconds)
        return seconds

    def failed(self, name: str, why: str, reader: Reader | None = None) -> None:
        """Let the path rest, and begin anew with it afterwards. `reader`: the one that failed, where there was one.

        Reads that go down with a reader which has been replaced meanwhile say nothing of the new one.
        """
        if reader is not self._readers.get(name):
            return
        logger.warning("KV path %s rests: %s", name, why)
        self.table.failed(name, why, time.monotonic())
        self._readers.pop(name, None)
        if reader is not None:
            task = asyncio.create_task(reader.aclose(), name=f"kv close {name}")
            self._closing.add(task)
            task.add_done_callback(self._closing.discard)

    def problems(self) -> str:
        """What is wrong with each path that failed last."""
        return "; ".join(f"{path}: {self.table[path].problem}" for path in self.table.names if self.table[path].problem)

    async def aclose(self) -> None:
        """Close every reader, as far as what is in flight lets it. Reads that end by it open no other."""
        self._is_closed = True
        for task in list(self._connecting.values()):
            task.cancel()
        await asyncio.gather(*self._connecting.values(), return_exceptions=True)
        readers, self._readers = list(self._readers.values()), {}
        await asyncio.gather(*(reader.aclose() for reader in readers), *self._closing, return_exceptions=True)
