"""Work that would hold up its caller for long: done a slice at a time, in turns, or at once where nobody asked for slices. Pure."""

from collections import deque
from collections.abc import Callable

Step = Callable[[], bool]
"""Does a slice; whether there is more."""


class DeferredWork:
    """What is to be done for several workers, each in its order."""

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
        """From now on nothing is done but by `work`; `wake` is called when there is something to do, where there was nothing."""
        self._wake = wake

    def add(self, step: Step) -> None:
        """To be called until it says that there is no more."""
        if self._wake is None:
            while step():
                continue
            return
        self._steps.append(step)
        if len(self._steps) == 1:
            self._wake()

    def work(self) -> bool:
        """A slice of whatever has waited longest. Whether there is more."""
        if self._steps:
            step = self._steps.popleft()
            if step():
                self._steps.append(step)
        return bool(self._steps)
