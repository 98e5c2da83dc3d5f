"""One NIXL agent on one thread of its own: import shim, creation, progress, reads in flight.

NIXL agents are not thread-safe and `transfer()` may do the whole copy inside the call, so that
everything happens on this thread. The agent's own progress thread stays off (it would spin a
core): this thread polls with back-off while reads are in flight or the source has transfers
open. After its last transfer a source still looks twenty times a second: over TCP a peer's
abandoned read ends only if the owner of the memory makes progress.

A read that was posted cannot be taken back: releasing its handle lets it go on and overwrite
re-used blocks. So a read ends here in two ways only: NIXL says DONE, or NIXL raises.
"""

import asyncio
import contextlib
import importlib
import logging
import os
import queue
import secrets
import threading
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, TypeVar

from kvrelay.errors import BackendUnavailable
from kvrelay.kvtransfer.transports.base import TransportError
from kvrelay.types import KvMemory

logger = logging.getLogger(__name__)
T = TypeVar("T")

BACKEND = "UCX"
_MODULES = ("nixl._api", "nixl_cu13._api", "nixl_cu12._api")
_FIRST_POLL_S, _LAST_POLL_S, _ABANDONED_POLL_S, _BUSY_POLL_S = 20e-6, 1e-3, 20e-3, 500e-6
_IDLE_POLL_S = 50e-3  # of a source without an open transfer, once it has had one


def import_nixl() -> Any:
    """NIXL's Python API. Raises BackendUnavailable when no build of it can be imported."""
    os.environ.setdefault("NIXL_LOG_LEVEL", "WARN")  # INFO goes to stdout; read at import
    problems = []
    for name in _MODULES:
        try:
            return importlib.import_module(name)
        except (ImportError, OSError) as error:
            problems.append(f"{name}: {error}")
    raise BackendUnavailable("nixl", "; ".join(problems))


def memory_type(device: str) -> str:
    """NIXL's name for where this pool lies."""
    return "VRAM" if device.startswith("cuda") else "DRAM"


def device_index(device: str) -> int:
    """The n of "cuda:n"; 0 on the host."""
    _, _, index = device.partition(":")
    return int(index) if index else 0


@dataclass(slots=True, eq=False)
class _Read:
    """One posted transfer. `handle` is None as soon as it was released (a released one must not be used)."""

    handle: Any
    done: "asyncio.Future[None]"
    loop: asyncio.AbstractEventLoop
    landed: Callable[[], None] | None = None
    abandoned: bool = False


class NixlAgent:
    """Owns the agent and its registered pool. Both live as long as the process: see `keep`."""

    def __init__(self, memory: KvMemory) -> None:
        self.memory = memory
        self.name = f"kvrelay-{secrets.token_hex(8)}"
        self.api: Any = None  # the nixl_agent; touched on the thread only
        self.num_users = 0
        self._commands: queue.SimpleQueue[Callable[[], None] | None] = queue.SimpleQueue()
        self._reads: list[_Read] = []
        self._num_reads = 0  # posted and not ended, as the loop sees it
        self._is_busy = False
        self._has_served = False
        self._thread: threading.Thread | None = None
        self._starting: asyncio.Task[None] | None = None

    async def ensure_started(self) -> None:
        """start(), once for all who share this agent."""
        if self._starting is None:
            self._starting = asyncio.create_task(self.start(), name="kv-nixl-start")
        await asyncio.shield(self._starting)

    async def start(self) -> None:
        """Create the agent and register the pool (about 0.5 s). Raises BackendUnavailable."""
        nixl = await asyncio.to_thread(import_nixl)
        self._thread = threading.Thread(target=self._run, name="kv-nixl", daemon=True)
        self._thread.start()
        try:
            await self.call(lambda: self._create(nixl))
        except Exception as error:  # NIXL raises classes of its own
            self._commands.put(None)
            raise BackendUnavailable("nixl", f"{type(error).__name__}: {error}") from error

    def _create(self, nixl: Any) -> None:
        config = nixl.nixl_agent_config(enable_prog_thread=False, backends=[BACKEND])
        agent = nixl.nixl_agent(self.name, config)
        if BACKEND not in agent.backends:
            raise RuntimeError(f"NIXL's {BACKEND} plugin is missing")
        layout, device = self.memory.layout, self.memory.device
        region = (self.memory.address, layout.num_bytes, device_index(device), "")
        agent.register_memory([region], memory_type(device), backends=[BACKEND])
        self.api = agent

    async def call(self, work: Callable[[], T]) -> T:
        """Run `work` on the agent's thread."""
        loop = asyncio.get_running_loop()
        result: asyncio.Future[T] = loop.create_future()

        def run() -> None:
            try:
                value = work()
            except Exception as error:  # handed to the caller
                self._post(loop, _settle, result, None, error)
            else:
                self._post(loop, _settle, result, value, None)

        self._commands.put(run)
        return await result

    def set_busy(self, is_busy: bool) -> None:
        """While busy the thread makes progress for peers that read this pool."""
        if is_busy == self._is_busy:
            return
        self._is_busy = is_busy
        self._has_served = True
        self._commands.put(lambda: None)  # wakes it

    # ---- reads

    def read(self, make_handle: Callable[[], Any], landed: Callable[[], None] | None = None) -> "asyncio.Future[None]":
        """Post the transfer that `make_handle` prepares (on the thread); `landed` is called there when it is done."""
        loop = asyncio.get_running_loop()
        read = _Read(None, loop.create_future(), loop, landed)
        self._num_reads += 1
        self._commands.put(lambda: self._begin(read, make_handle))
        return read.done

    def _begin(self, read: _Read, make_handle: Callable[[], Any]) -> None:
        self._reads.append(read)
        self._advance(read, lambda: self._post_transfer(read, make_handle))

    def _post_transfer(self, read: _Read, make_handle: Callable[[], Any]) -> str:
        read.handle = make_handle()
        state: str = self.api.transfer(read.handle)
        return state

    def _advance(self, read: _Read, step: Callable[[], str]) -> None:
        try:
            state = step()
        except Exception as error:  # NIXL's own classes: the way in which it reports failed transfers
            self._end(read, TransportError(f"nixl: {type(error).__name__}: {error}"))
            return
        if state == "DONE":
            self._end(read, self._problem(read))
        elif state == "ERR":
            self._end(read, TransportError("nixl reported an error"))

    def _problem(self, read: _Read) -> Exception | None:
        """What `landed` has against the bytes, which are all in place."""
        try:
            if read.landed is not None and not read.abandoned:
                read.landed()
        except Exception as error:  # handed to whoever waits for the read
            return error
        return None

    def _end(self, read: _Read, error: Exception | None) -> None:
        handle, read.handle = read.handle, None
        self._reads.remove(read)
        if handle is not None:
            with contextlib.suppress(Exception):  # it has ended; what is left is only its memory
                handle.release()
        self._post(read.loop, self._finish, read, error)

    def _finish(self, read: _Read, error: Exception | None) -> None:
        self._num_reads -= 1
        _settle(read.done, None, error)

    def abandon(self, done: "asyncio.Future[None]") -> None:
        """Poll this read seldom from now on. It goes on: nothing can stop it."""

        def mark() -> None:
            for read in self._reads:
                read.abandoned = read.abandoned or read.done is done

        self._commands.put(mark)

    @property
    def num_reads(self) -> int:
        return self._num_reads

    # ---- the thread

    def _run(self) -> None:
        pause_s = _FIRST_POLL_S
        while True:
            command, is_due = self._next(pause_s)
            if command is None and not is_due:
                return
            if command is not None:
                command()
                pause_s = _FIRST_POLL_S
            else:
                pause_s = min(pause_s * 2, _LAST_POLL_S)
            for read in list(self._reads):
                self._advance(read, lambda read=read: self.api.check_xfer_state(read.handle))  # type: ignore[misc]
            if self._has_served and self.api is not None:
                self._progress()

    def _next(self, pause_s: float) -> tuple[Callable[[], None] | None, bool]:
        """(the next command, or None, whether a poll is due instead)."""
        try:
            return self._commands.get(timeout=self._patience_s(pause_s)), False
        except queue.Empty:
            return None, True

    def _patience_s(self, pause_s: float) -> float | None:
        if any(not read.abandoned for read in self._reads):
            return pause_s
        if self._is_busy:
            return _BUSY_POLL_S
        if self._reads:
            return _ABANDONED_POLL_S
        return _IDLE_POLL_S if self._has_served else None

    def _progress(self) -> None:
        try:
            self.api.get_new_notifs()
        except Exception as error:  # NIXL's own classes
            logger.warning("nixl could not make progress: %s", error)

    def stop(self) -> None:
        """End the thread if nothing is in flight; agent and registration stay (peers may hold them)."""
        if self._num_reads:
            logger.warning("%d NIXL reads never ended; their agent stays", self._num_reads)
            return
        self._commands.put(None)

    def _post(self, loop: asyncio.AbstractEventLoop, function: Callable[..., None], *args: Any) -> None:
        with contextlib.suppress(RuntimeError):  # the loop has been closed: nobody waits any more
            loop.call_soon_threadsafe(function, *args)


def _settle(future: "asyncio.Future[T]", value: T, error: Exception | None) -> None:
    if future.done():
        return
    if error is not None:
        future.set_exception(error)
    else:
        future.set_result(value)


_kept: list[NixlAgent] = []


def keep(agent: NixlAgent) -> None:
    """Hold the agent (and so its pool) until the process ends.

    Deregistering memory that a peer still knows, or destroying an agent that it reads, can take
    down either process.
    """
    if agent not in _kept:
        _kept.append(agent)
