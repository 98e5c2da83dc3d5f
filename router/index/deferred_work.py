"""Work that would block its caller for long: done in slices, round robin, or at once unless deferral is on. Pure."""

from collections import deque
from collections.abc import Callable

Step = Callable[[], bool]
"""Does a slice of work; returns whether there is more."""


class DeferredWork:
    """Pending work of several workers."""

    __slots__ = ("_steps", "_wake")

    def __init__(self) -> None:
        self._steps: deque[Step] = deque()
        self._wake: Callable[[], object] | None = None

    def __len__(self) -> int:
        return len(self._steps)

    @property
    def are_deferred(self) -> bool:
        return self._wake is not None

    def defer(self, wake: Callable[[], object]) -> None:
        """From now on only `work` does anything; `wake` is called when there is work and there was none."""
        self._wake = wake

    def add(self, step: Step) -> None:
        """Add work; `step` is called until it returns False."""
        if self._wake is None:
            while step():
                continue
            return
        self._steps.append(step)
        if len(self._steps) == 1:
            self._wake()

    def work(self) -> bool:
        """A slice of the oldest work. Whether there is more."""
        if self._steps:
            step = self._steps.popleft()
            if step():
                self._steps.append(step)
        return bool(self._steps)
