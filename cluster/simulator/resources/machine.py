"""Workers of one machine that compute at the same time: each one's steps take longer, as its profile says. Pure."""

from collections.abc import Sequence
from typing import Protocol


class Computing(Protocol):
    """A worker with a step under way."""

    def crowd_changed(self, before: int, now: int) -> None:
        """So many compute now, itself among them; before it were so many."""


class Machine:
    """Knows who computes, and tells them of each other."""

    __slots__ = ("_computing",)

    def __init__(self) -> None:
        self._computing: dict[Computing, None] = {}

    def crowd_with(self, worker: Computing) -> int:
        """How many compute when this one does."""
        return len(self._computing) + (worker not in self._computing)

    def begins(self, worker: Computing) -> None:
        """Idempotent, as `rests` is."""
        if worker not in self._computing:
            self._change(1)
            self._computing[worker] = None

    def rests(self, worker: Computing) -> None:
        if worker in self._computing:
            del self._computing[worker]
            self._change(-1)

    def _change(self, by: int) -> None:
        """Tell all the others, of whom each counts itself and what has changed."""
        others = len(self._computing)
        before, now = (others, others + 1) if by > 0 else (others + 1, others)
        for other in list(self._computing):
            other.crowd_changed(before, now)


def slowed(slowdown: Sequence[float], crowd: int) -> float:
    """By what steps take longer while so many compute: beyond what was measured, as with the most that were."""
    return slowdown[min(crowd, len(slowdown)) - 1] if slowdown else 1.0
