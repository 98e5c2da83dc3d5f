"""Detects an engine that has work and no longer steps. Imports neither Ray nor torch."""

import asyncio
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from kvrelay.engine.worker.thread import EngineThread

HUNG_S = 60.0  # far above the longest step, also of a large model on a slow CPU


class StepWatch:
    """Measures how long the engine's thread takes to answer between two steps; an idle engine is not woken for it.

    The time of the last step would say less: it is also long ago when work has just arrived after a pause.
    """

    def __init__(self, thread: "EngineThread") -> None:
        self._thread = thread
        self._answer: asyncio.Future[Any] | None = None
        self._called_s = 0.0

    def silence_s(self, now_s: float) -> float:
        """How long a call to the engine has been pending; 0 without one. Starts the next call."""
        if self._answer is not None and not self._answer.done():
            return now_s - self._called_s
        engine = self._thread.engine
        self._answer = None
        if engine is not None and engine.scheduler.has_work:
            self._answer, self._called_s = self._thread.call(_nothing), now_s
        return 0.0


def _nothing(engine: Any) -> None:
    """A call that only proves that the engine's thread answers."""
