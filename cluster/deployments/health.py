"""Notices an engine that has work and no longer does it. Imports neither Ray nor torch."""

import asyncio
from typing import Any, Protocol

HUNG_S = 60.0  # far above the longest step, also of a large model on a slow CPU


class Steps(Protocol):
    """What is used of engine/worker/thread.py's EngineThread."""

    engine: Any

    def call(self, action: Any) -> "asyncio.Future[Any]": ...


class StepWatch:
    """Asks the engine's thread to answer between two steps; never of an idle one, which it would wake.

    The time of the last step says less: it is long past, too, when work has just come after a pause.
    """

    def __init__(self, steps: Steps) -> None:
        self._steps = steps
        self._answer: asyncio.Future[Any] | None = None
        self._asked_s = 0.0

    def silence_s(self, now_s: float) -> float:
        """For how long a question has been without an answer; 0 without one. Asks the next one."""
        if self._answer is not None and not self._answer.done():
            return now_s - self._asked_s
        engine = self._steps.engine
        self._answer = None
        if engine is not None and engine.scheduler.has_work:
            self._answer, self._asked_s = self._steps.call(_nothing), now_s
        return 0.0


def _nothing(engine: Any) -> None:
    """What the engine is asked to do."""
