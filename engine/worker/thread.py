"""The thread that owns an engine. Everyone else asks it by message and hears from it once per step."""

import asyncio
import logging
import os
import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from functools import partial
from typing import TypeVar

from kvrelay.engine.step.config import Reservation, StepResult
from kvrelay.engine.step.engine import Engine
from kvrelay.grammar.compiler import GrammarCompiler
from kvrelay.types import BlockId

logger = logging.getLogger(__name__)
T = TypeVar("T")

_LOAD_PERIOD_S = 0.05
_IDLE_S = 1.0  # after so long without work the blocks are counted
_NICENESS = 5  # of an engine on cores that it shares with processes that must answer at once, such as an ingress


def _settle(ready: "asyncio.Future[Engine]", outcome: Engine | BaseException) -> None:
    if ready.done():
        return
    if isinstance(outcome, BaseException):
        ready.set_exception(outcome)
    else:
        ready.set_result(outcome)


def _sooner(*waits_s: float | None) -> float | None:
    """None is for ever."""
    return min((wait_s for wait_s in waits_s if wait_s is not None), default=None)


class EngineThread:
    """Runs `engine.step()` while there is work; sleeps on a condition while there is none.

    Reservations are reported by an `on_step` of their own before the step that granted them is computed.
    Once in each longer rest it checks that every block is accounted for: an engine that has lost one fails.

    `on_step(result)` is called on the event loop, once per step that brought something about. Before it `send(result)`
    is called on the engine's own thread: what it sends it takes out of `result.outputs`, and where nothing is left of a
    step the loop need not wake. `on_failure(error)` is called there when the engine raised: the thread has ended then.
    """

    def __init__(
        self,
        build: Callable[[], Engine],
        *,
        on_step: Callable[[StepResult], None],
        on_failure: Callable[[BaseException], None],
        send: Callable[[StepResult], None] | None = None,
        cores: tuple[int, ...] | None = None,
    ) -> None:
        self._build, self._on_step, self._on_failure, self._cores = build, on_step, on_failure, cores
        self._send = send
        self._inbox: deque[Callable[[], object]] = deque()
        self._wake = threading.Condition()
        self._stopping = False
        self._thread: threading.Thread | None = None
        self._loop: asyncio.AbstractEventLoop | None = None
        self.engine: Engine | None = None
        self.failed: BaseException | None = None

    async def start(self) -> Engine:
        """Build the engine on its thread; returns it for reading of constants only."""
        self._loop = asyncio.get_running_loop()
        ready: asyncio.Future[Engine] = self._loop.create_future()
        self._thread = threading.Thread(target=self._run, args=(ready,), name="engine", daemon=True)
        self._thread.start()
        self.engine = await ready
        return self.engine

    def post(self, action: Callable[[Engine], object]) -> None:
        """Run `action(engine)` on the engine's thread before the next step; nothing comes back."""
        self._put(lambda: action(self._require()))

    def call(self, action: Callable[[Engine], T]) -> "asyncio.Future[T]":
        """Run `action(engine)` on the engine's thread before the next step; its result or error comes back."""
        outcome: Future[T] = Future()

        def run() -> None:
            if not outcome.set_running_or_notify_cancel():  # the caller left: nothing may be set
                return
            try:
                outcome.set_result(action(self._require()))
            except Exception as error:
                outcome.set_exception(error)

        self._put(run)
        return asyncio.wrap_future(outcome)

    @property
    def grammars(self) -> GrammarCompiler:
        """Compiles grammars for the engine's model, from any thread."""
        grammars = self._require().constraints.grammars
        assert grammars is not None, "a worker's engine comes from a checkpoint"
        return grammars

    def _require(self) -> Engine:
        assert self.engine is not None
        return self.engine

    def _put(self, action: Callable[[], object]) -> None:
        with self._wake:
            self._inbox.append(action)
            self._wake.notify()

    async def aclose(self) -> None:
        """End after the step in progress."""
        thread = self._thread
        if thread is None:
            return
        with self._wake:
            self._stopping = True
            self._wake.notify()
        await asyncio.to_thread(thread.join, 10.0)

    @property
    def is_alive(self) -> bool:
        return self._thread is not None and self._thread.is_alive() and self.failed is None

    # ---- on the thread

    def _run(self, ready: "asyncio.Future[Engine]") -> None:
        loop = self._loop
        assert loop is not None
        try:
            if self._cores:
                os.sched_setaffinity(0, self._cores)
                os.nice(_NICENESS)
            engine = self._build()
        except BaseException as error:
            self.failed = error
            self._call_on_loop(loop, partial(_settle, ready, error))
            return
        self.engine = engine
        self._call_on_loop(loop, partial(_settle, ready, engine))
        try:
            self._serve(engine, loop)
        except BaseException as error:
            logger.exception("the engine failed")
            self.failed = error
            self._call_on_loop(loop, partial(self._on_failure, error))
        finally:
            engine.close()

    def _serve(self, engine: Engine, loop: asyncio.AbstractEventLoop) -> None:
        reported_s, is_stuck, is_checked = 0.0, False, False
        on_reserved = partial(self._report_reserved, loop)
        while True:
            with self._wake:
                while not self._inbox and not self._stopping and (is_stuck or not engine.scheduler.has_work):
                    if not self._wake.wait(_sooner(None if is_checked else _IDLE_S, engine.max_wait_s())):
                        break
                if self._stopping:
                    return
                actions = list(self._inbox)
                self._inbox.clear()
            is_due = engine.max_wait_s() == 0.0
            if not actions and not is_due and (is_stuck or not engine.scheduler.has_work):
                engine.check()
                is_checked = True
                continue
            is_checked = False
            for action in actions:
                action()
            result = engine.step(on_reserved)
            is_stuck = result.is_stuck
            result.reservations = []  # reported already
            if self._send is not None and result.outputs:
                self._send(result)
            result.events = engine.reports.drain_events()
            now_s = time.monotonic()
            if now_s - reported_s >= _LOAD_PERIOD_S or is_stuck or not engine.scheduler.has_work:
                result.load, reported_s = engine.reports.load(), now_s
            ended = result.refused, result.returned_to_prefill, result.failed
            if result.outputs or any(ended) or result.events or result.load:
                self._call_on_loop(loop, partial(self._on_step, result))

    def _report_reserved(self, loop: asyncio.AbstractEventLoop, reservations: list[Reservation]) -> None:
        """At once: a prompt waits for it, and the step that follows is none of its business."""
        self._call_on_loop(loop, partial(self._on_step, StepResult(reservations=reservations)))

    @staticmethod
    def _call_on_loop(loop: asyncio.AbstractEventLoop, callback: Callable[[], object]) -> None:
        try:
            loop.call_soon_threadsafe(callback)
        except RuntimeError:
            logger.debug("the event loop is closed")


PATIENCE_S = 2.0  # for the engine to finish its step; a busy one gives none


class EngineProbeBuffers:
    """A worker's pool, as kvtransfer's ProbeBuffers sees it. Lives on the worker's loop."""

    def __init__(self, thread: EngineThread) -> None:
        self._thread = thread

    async def take(self, count: int) -> list[int]:
        """Up to `count` blocks that nothing else holds, filled with noise; none while the pool is in demand."""
        if not self._thread.is_alive:
            return []
        taken = self._thread.call(lambda engine: engine.take_probe_blocks(count))
        try:
            async with asyncio.timeout(PATIENCE_S):
                return list(await asyncio.shield(taken))
        except TimeoutError:
            taken.add_done_callback(self._undo)
            return []
        except asyncio.CancelledError:
            taken.add_done_callback(self._undo)
            raise

    def put_back(self, blocks: Sequence[int]) -> None:
        """These may be re-used."""
        if blocks:
            self._thread.post(lambda engine: engine.scheduler.blocks.return_probe_blocks(map(BlockId, blocks)))

    def _undo(self, taken: "asyncio.Future[list[BlockId]]") -> None:
        """The borrower has left before it was served."""
        if not taken.cancelled() and taken.exception() is None:
            self.put_back(taken.result())
