"""What Ctrl-C, SIGTERM and SIGHUP do in the process that drives Ray: the first one raises StopRequested.

An exception may get lost: Ray's C++ drops what a handler raises in its callbacks, and its Python may catch it. So whoever
has asked asks again with AGAIN (`supervisor`), until `serve` stops. Must not import Ray.
"""

import signal
import sys
from types import FrameType, TracebackType
from typing import Any

STOPS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
AGAIN = signal.SIGRTMIN  # after all of STOPS: Python calls pending handlers in the order of their numbers


class StopRequested(KeyboardInterrupt):
    """Ctrl-C, SIGTERM or SIGHUP. Nobody but `serve` may catch it.

    A KeyboardInterrupt, for at this (and SystemExit) Ray's C++ leaves its waits, and drops any other: `check_signals` in
    Ray's `_raylet.pyx` (2.60).
    """


class StopSignals:
    """The handlers, as a context: inside, the first signal raises StopRequested; none does after."""

    def __init__(self) -> None:
        self.is_asked = False
        self._is_stopping = False
        self._before: dict[int, Any] = {}

    def __enter__(self) -> "StopSignals":
        self._before = {number: signal.getsignal(number) for number in (*STOPS, AGAIN)}
        self.take_over()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.stopping()

    def take_over(self) -> None:
        """Set the handlers, also where others have set theirs since."""
        for number in STOPS:
            signal.signal(number, self._asked)
        signal.signal(AGAIN, self._asked_again)

    def go_on(self) -> None:
        """After Ray's start, which sets handlers of its own. Raises StopRequested when that start has swallowed one."""
        self.take_over()
        if self.is_asked:
            raise StopRequested

    def stopping(self) -> None:
        """From now on nothing is raised. Safe twice."""
        self._is_stopping = True
        self.take_over()

    def close(self) -> None:
        """Put the handlers of before back."""
        for number, handler in self._before.items():
            signal.signal(number, handler)

    def _asked(self, signum: int, frame: FrameType | None) -> None:
        if not self.is_asked and not self._is_stopping:
            self.is_asked = True
            raise StopRequested

    def _asked_again(self, signum: int, frame: FrameType | None) -> None:
        self.is_asked = True  # its first signal may have met a handler of Ray's
        if not self._is_stopping and not isinstance(sys.exception(), StopRequested):  # else it is on its way
            raise StopRequested
