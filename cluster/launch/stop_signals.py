"""Signal handlers of the process that drives Ray: the first Ctrl-C, SIGTERM or SIGHUP raises StopRequested.

The exception may get lost: Ray's C++ drops what a handler raises in its callbacks, and its Python code may catch it. So
the supervisor repeats the request with the signal AGAIN until `serve` stops. Must not import Ray.
"""

import signal
import sys
from types import FrameType, TracebackType
from typing import Any

STOPS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
AGAIN = signal.SIGRTMIN  # after all of STOPS: Python calls pending handlers in the order of their numbers


class StopRequested(KeyboardInterrupt):
    """Ctrl-C, SIGTERM or SIGHUP. Only `serve` may catch it.

    A KeyboardInterrupt, because Ray's C++ ends its waits for that (and SystemExit) and drops any other exception:
    `check_signals` in Ray's `_raylet.pyx` (2.60).
    """


class StopSignals:
    """The handlers, as a context: inside it the first signal raises StopRequested, after it none does."""

    def __init__(self) -> None:
        self.is_requested = False
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
        """Install the handlers, over any that were installed since."""
        for number in STOPS:
            signal.signal(number, self._on_signal)
        signal.signal(AGAIN, self._on_again)

    def after_ray_start(self) -> None:
        """Install the handlers again, over Ray's. Raises StopRequested if Ray's start swallowed a signal."""
        self.take_over()
        if self.is_requested:
            raise StopRequested

    def stopping(self) -> None:
        """Raise nothing from now on. Idempotent."""
        self._is_stopping = True
        self.take_over()

    def close(self) -> None:
        """Restore the previous handlers."""
        for number, handler in self._before.items():
            signal.signal(number, handler)

    def _on_signal(self, signum: int, frame: FrameType | None) -> None:
        if not self.is_requested and not self._is_stopping:
            self.is_requested = True
            raise StopRequested

    def _on_again(self, signum: int, frame: FrameType | None) -> None:
        self.is_requested = True  # Ray's handler may have taken the first signal
        if not self._is_stopping and not isinstance(sys.exception(), StopRequested):  # otherwise it is being handled
            raise StopRequested
