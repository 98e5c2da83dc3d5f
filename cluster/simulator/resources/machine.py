"""Workers of one machine slow each other down while they compute, as their profile states. Pure."""

from collections.abc import Sequence
from typing import Protocol


class Computing(Protocol):
    """A worker with a step in progress."""

    def crowd_changed(self, before: int, now: int) -> None:
        """The number of computing workers, itself included, has changed."""


class Machine:
    """Notifies the workers that compute when their number changes."""

    __slots__ = ("_computing",)

    def __init__(self) -> None:
        self._computing: dict[Computing, None] = {}

    def crowd_with(self, worker: Computing) -> int:
        """How many compute when this one does."""
        return len(self._computing) + (worker not in self._computing)

    def begins(self, worker: Computing) -> None:
        """Idempotent, as `ends` is."""
        if worker not in self._computing:
            self._change(1)
            self._computing[worker] = None

    def ends(self, worker: Computing) -> None:
        if worker in self._computing:
            del self._computing[worker]
            self._change(-1)

    def _change(self, by: int) -> None:
        """Notify all others; each counts itself and the one that changed."""
        others = len(self._computing)
        before, now = (others, others + 1) if by > 0 else (others + 1, others)
        for other in list(self._computing):
            other.crowd_changed(before, now)


def slowed(slowdown: Sequence[float], crowd: int) -> float:
    """The factor on a step's time while `crowd` workers compute; beyond what was measured, that of the most."""
    return slowdown[min(crowd, len(slowdown)) - 1] if slowdown else 1.0
