"""One NIXL agent for one pool: import shim, creation, progress, reads in flight (reads.py).

NIXL agents are not thread-safe and `transfer()` may do the whole copy inside the call: the thread that holds the
agent's turn may touch it. That is a thread of its own, and for a read so small that waking the thread would take
longer, the event loop's, if the turn happens to be free. The agent's own progress thread stays off (it would spin a
core): ours polls with back-off while reads are in flight or the source has transfers open. After its last transfer a
source still looks twenty times a second: over TCP a peer's abandoned read ends only if the owner makes progress.
"""

import asyncio
import atexit
import contextlib
import ctypes
import importlib
import logging
import os
import queue
import secrets
import threading
import time
from collections import deque
from collections.abc import Callable, Iterable, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any, TypeVar

from kvrelay.errors import BackendUnavailable, TransportError
from kvrelay.kvtransfer.mover.mover import INLINE_BYTES
from kvrelay.kvtransfer.transports.nixl import ucx
from kvrelay.kvtransfer.transports.nixl.reads import NixlOwner, NixlRead, Reads
from kvrelay.types import KvMemory

logger = logging.getLogger(__name__)
T = TypeVar("T")
Variables = Callable[[], Mapping[str, str]]

BACKEND = "UCX"
_MODULES = ("nixl._api", "nixl_cu13._api", "nixl_cu12._api")
_NUM_SPINS = 32  # polls without a pause: what RDMA moves in that time is reported at once
_FIRST_POLL_S, _LAST_POLL_S, _ABANDONED_POLL_S, _BUSY_POLL_S = 20e-6, 1e-3, 20e-3, 500e-6
_IDLE_POLL_S = 50e-3  # of a source without an open transfer, once it has had one
_FREE_S = 20e-6  # to verify a piece: less than it takes to wake the verifier
_LAST_CALL_S = 5.0  # a call into NIXL takes as long as one piece
_NUM_FAREWELLS = 10  # polls before the thread ends: closed connections are reported to the peers


def import_nixl() -> Any:
    """NIXL's Python API. Raises BackendUnavailable when no build of it can be imported."""
    ucx.set_defaults()
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


class NixlAgent:
    """Owns the agent and its registered pool, which live as long as the process; the thread, as long as it has
    users. 15 attributes: NIXL's handles, the thread, and reads in flight.
    """

    def __init__(self, memory: KvMemory) -> None:
        self.memory = memory
        self.name = f"kvrelay-{secrets.token_hex(8)}"
        self.api: Any = None  # the nixl_agent
        self.peers: dict[str, Any] = {}  # that it has met, by the names of their agents
        self._turn = threading.Lock()  # its holder may touch the api, the peers and the reads
        self._commands: queue.SimpleQueue[Callable[[], None] | None] = queue.SimpleQueue()
        self._reads = Reads(self._hand_over, time.monotonic)
        self.num_users = 0
        self._num_polls = 0  # since the last command
        self._is_busy = False
        self._has_served = False
        self._is_checking_free = False  # as the last `landed` was: checksums may be off
        self._thread: threading.Thread | None = None
        self._starting: asyncio.Task[None] | None = None
        self._verifier = ThreadPoolExecutor(max_workers=1, thread_name_prefix="kv-nixl-verify")

    # ---- users

    async def acquire(self, variables: Variables = dict) -> None:
        """One more user; the agent runs. `variables`: UCX's, if it must be made. Raises BackendUnavailable."""
        self.num_users += 1
        try:
            if self._thread is None:
                self._start_thread()
            if self.api is None:
                if self._starting is None:
                    self._starting = asyncio.create_task(self._start(variables), name="kv-nixl-start")
                    self._starting.add_done_callback(_see)
                await asyncio.shield(self._starting)
        except BaseException:
            self.release()
            raise

    def release(self) -> None:
        """One user less, whose reads have all ended. Agent and registration stay: peers may hold them."""
        self.num_users -= 1
        if not self.num_users and self._thread is not None:
            self._is_busy = self._has_served = False
            self._commands.put(None)
            self._thread = None

    def _start_thread(self) -> None:
        self._commands = queue.SimpleQueue()
        self._thread = threading.Thread(target=self._run, args=(self._commands,), name="kv-nixl", daemon=True)
        _running[self._thread] = self._commands
        self._thread.start()

    async def _start(self, variables: Variables) -> None:
        """Make the agent. It counts as a user meanwhile: a waiter may be cancelled, and the thread must not end
        then.
        """
        self.num_users += 1
        try:
            if why := ucx.problem():
                raise BackendUnavailable("nixl", why)
            nixl, values = await asyncio.to_thread(lambda: (import_nixl(), variables()))
            await self.call(lambda: self._create(nixl, values))
        except BackendUnavailable:
            raise
        except Exception as error:  # NIXL raises classes of its own
            raise BackendUnavailable("nixl", ucx.explain(error)) from error
        finally:
            self._starting = None
            self.release()

    def _create(self, nixl: Any, variables: Mapping[str, str]) -> None:
        with ucx.variables(variables):
            agent = nixl.nixl_agent(self.name, nixl.nixl_agent_config(enable_prog_thread=False, backends=[BACKEND]))
        if BACKEND not in agent.backends:
            raise RuntimeError(f"NIXL's {BACKEND} plugin is missing")
        layout, device = self.memory.layout, self.memory.device
        region = (self.memory.address, layout.num_bytes, device_index(device), "")
        agent.register_memory([region], memory_type(device), backends=[BACKEND])
        # Never let go of the agent and its pool, not even while the interpreter ends: deregistering memory that a peer
        # still knows, or destroying an agent that is read or reads, can take down either process, or keep it alive.
        ctypes.pythonapi.Py_IncRef(ctypes.py_object(self))
        self.api = agent

    async def call(self, work: Callable[[], T]) -> T:
        """Run `work` on the agent's thread, in its turn."""
        result: Future[T] = Future()

        def run() -> None:
            if not result.set_running_or_notify_cancel():  # its caller has gone
                return
            try:
                result.set_result(work())
            except Exception as error:  # handed to the caller
                result.set_exception(error)

        self._commands.put(run)
        return await asyncio.wrap_future(result)

    def submit(self, work: Callable[[], None]) -> None:
        """Run `work` on the agent's thread, in its turn, and do not wait for it. It must not raise."""
        self._commands.put(work)

    def set_busy(self, is_busy: bool) -> None:
        """While busy the thread makes progress for peers that read this pool."""
        if is_busy == self._is_busy:
            return
        self._is_busy = is_busy
        self._has_served = True
        self._commands.put(_wake)

    # ---- reads

    def read(
        self,
        peer: NixlOwner,
        pieces: Iterable[tuple[Any, int]],
        num_bytes: int,
        landed: Callable[[int], None] | None = None,
    ) -> "asyncio.Future[None]":
        """Post what `peer.post` makes of each piece (and its number of bytes); `landed` is called on some thread."""
        loop = asyncio.get_running_loop()
        read = NixlRead(peer, num_bytes, deque(pieces), landed, loop.create_future(), loop)
        is_small = num_bytes <= INLINE_BYTES and self.memory.view is not None  # a CUDA context belongs to the thread
        read.is_light = is_small or landed is None or self._is_checking_free
        if is_small and self._turn.acquire(blocking=False):
            try:
                self._reads.begin(self.api, read)
                self._reads.hand_over()
            finally:
                self._turn.release()
            if not read.done.done():
                self._commands.put(_wake)  # the thread sees to it
        else:
            self._commands.put(lambda: self._reads.begin(self.api, read))
        return read.done

    def _hand_over(self, read: NixlRead, num_landed: int, is_last: bool) -> None:
        """Verify it, on a thread of its own where that takes time; then notify its waiter."""
        if read.is_light:
            self._verify(read, num_landed, is_last)
        else:
            self._verifier.submit(self._verify, read, num_landed, is_last)

    def _verify(self, read: NixlRead, num_landed: int, is_last: bool) -> None:
        """What has `landed` against the bytes that are in place? Anything: no more is read."""
        if read.landed is not None and read.error is None and not read.is_abandoned:
            began = time.perf_counter()
            try:
                read.landed(num_landed)
            except Exception as error:  # raised to the waiter of the read
                read.error = error
            self._is_checking_free = time.perf_counter() - began < _FREE_S
        if read.is_abandoned and read.error is None:  # not all of it came, and nothing was verified
            read.error = TransportError("abandoned")
        if is_last and threading.get_ident() == read.thread_id:
            _settle(read)
        elif is_last:
            with contextlib.suppress(RuntimeError):  # the loop has been closed: there is no waiter
                read.loop.call_soon_threadsafe(_settle, read)

    def abandon(self, done: "asyncio.Future[None]") -> None:
        """Read no more of it than was posted, and poll that seldom."""
        self._commands.put(lambda: self._reads.abandon(done))

    # ---- the thread

    def _run(self, commands: "queue.SimpleQueue[Callable[[], None] | None]") -> None:
        _use_device(self.memory.device)
        while (command := self._next(commands)) is not None:
            self._num_polls = self._num_polls + 1 if command is _poll_is_due else 0
            try:
                with self._turn:
                    command()
                    self._reads.poll(self.api)
                    if self._has_served or self._reads.is_fenced:
                        self._progress()
                    if commands.empty():
                        self._reads.hand_over()
            except Exception:  # a thread's edge: the reads of others go on
                logger.exception("the NIXL agent's thread failed in a step")
        with self._turn:
            for _ in range(_NUM_FAREWELLS):
                self._progress()
        _running.pop(threading.current_thread(), None)

    def _next(self, commands: "queue.SimpleQueue[Callable[[], None] | None]") -> Callable[[], None] | None:
        """The next command; None when this thread is to end."""
        try:
            patience_s = self._patience_s()
            return commands.get(timeout=patience_s) if patience_s != 0.0 else commands.get(block=False)
        except queue.Empty:
            return _poll_is_due

    def _patience_s(self) -> float | None:
        """How long to wait for a command; None: until one comes."""
        if self._reads.has_room:
            return 0.0
        if self._reads.is_awaited:
            doublings = self._num_polls - _NUM_SPINS
            return 0.0 if doublings < 0 else min(_FIRST_POLL_S * 2 ** min(doublings, 10), _LAST_POLL_S)
        if self._is_busy:
            return _BUSY_POLL_S
        if len(self._reads):
            return _ABANDONED_POLL_S
        return _IDLE_POLL_S if self._has_served else None

    def _progress(self) -> None:
        try:
            if self.api is not None:
                self.api.get_new_notifs()
        except Exception as error:  # NIXL's own classes
            logger.warning("nixl could not make progress: %s", error)


def _wake() -> None:
    """A command that only wakes the thread: there is something new to see to."""


def _poll_is_due() -> None:
    """What stands for a command when none came in time."""


def _use_device(device: str) -> None:
    """Make the GPU current on this thread: UCX copies in the context that it finds. Not verified on hardware."""
    if device.startswith("cuda"):
        import torch

        torch.cuda.set_device(device)


def _see(task: "asyncio.Task[None]") -> None:
    """Its error counts as seen, though its waiter may be gone."""
    if not task.cancelled():
        task.exception()


def _settle(read: NixlRead) -> None:
    if read.done.done():
        return
    if read.error is not None:
        read.done.set_exception(read.error)
    else:
        read.done.set_result(None)


# ---- one agent for each pool of this process

_running: dict[threading.Thread, "queue.SimpleQueue[Callable[[], None] | None]"] = {}
_agents: dict[tuple[int, int], NixlAgent] = {}
_is_forked = False


async def agent_for(memory: KvMemory, variables: Variables = dict) -> NixlAgent:
    """The running agent of this pool; the caller is one of its users until release(). Raises BackendUnavailable.

    Args:
        variables: UCX's, for the agent that has to be made; called on a thread.
    """
    if _is_forked:
        raise BackendUnavailable("nixl", "this process was forked from one that had an agent: start it with spawn")
    key = (memory.address, memory.layout.num_bytes)
    if (agent := _agents.get(key)) is None:
        agent = _agents[key] = NixlAgent(memory)
    try:
        await agent.acquire(variables)
    finally:
        if agent.api is None and not agent.num_users and _agents.get(key) is agent:
            del _agents[key]
    return agent


def _disown() -> None:
    """In a forked child: the agents, their threads and their connections are the parent's."""
    global _is_forked
    _is_forked = _is_forked or bool(_agents)
    _agents.clear()
    _running.clear()


def _stop_threads() -> None:
    """At exit, whatever is in flight: a thread that comes back from NIXL into a dying interpreter aborts the
    process.
    """
    threads = dict(_running)
    for commands in threads.values():
        commands.put(None)
    for thread in threads:
        thread.join(timeout=_LAST_CALL_S)


os.register_at_fork(after_in_child=_disown)
atexit.register(_stop_threads)
