"""What Ctrl-C, SIGTERM and SIGHUP do to `kvrelay serve`: a StopRequested where Python runs, and an end where it does not.

Python runs a signal's handler in the main thread only, between two bytecodes. Ray waits for its daemons in C++ there (Ray
2.60: `wait_for_persisted_port` and `GlobalState.get_node`, 30 s each; `ray.get`, for ever), and what a handler raises inside
one of Ray's callbacks is dropped. So a thread, woken by the signal itself (`signal.set_wakeup_fd`), asks the main thread again
every REPEAT_S, and ends the process when that does not help. A C call that keeps Python's lock holds this thread up too.
Must not import Ray.
"""

import contextlib
import os
import select
import signal
import socket
import sys
import threading
import time
from collections.abc import Callable
from enum import Enum
from types import FrameType, TracebackType
from typing import Any

STOPS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
AGAIN = (
    signal.SIGRTMIN
)  # ours: to the main thread. After STOPS, for Python calls pending handlers in the order of their numbers
ONE_PRESS_S = 0.5  # terminals, make and timeout may deliver one Ctrl-C twice
REPEAT_S = 1.0
REACH_S = 10.0  # from the signal until the main thread begins to stop
END_S = 15.0  # from there until the process has gone
SAY_S = 1.0  # a terminal may be halted
KILLED = 130


class StopRequested(KeyboardInterrupt):
    """Ctrl-C, SIGTERM or SIGHUP. Nobody but `serve` may catch it.

    A KeyboardInterrupt, for this and SystemExit are the only ones at which Ray's C++ leaves its waits (`check_signals` in
    Ray's `_raylet.pyx`); it drops any other.
    """


class Step(Enum):
    """What the watching thread does next."""

    WAIT = 0
    ASK_AGAIN = 1
    END = 2


def next_step(now_s: float, asked_s: float | None, stopping_s: float | None) -> Step:
    """After a signal at `asked_s`; the main thread stops since `stopping_s`. None: not yet. Seconds of one clock."""
    if asked_s is None:
        return Step.WAIT
    if stopping_s is None:
        return Step.END if now_s - asked_s > REACH_S else Step.ASK_AGAIN
    return Step.END if now_s - stopping_s > END_S else Step.WAIT


class StopSignals:
    """The handlers and the watching thread. As a context: inside, the first signal raises StopRequested; none does after.

    The second signal, or the first one while `serve` stops because of an error, ends the process at once with KILLED.
    `kill` ends what was started, and `say` prints a line: both are called in the watching thread, before the process ends.
    """

    def __init__(self, kill: Callable[[], None], say: Callable[[str], None]) -> None:
        self._kill, self._say = kill, say
        self._asked_s: float | None = None
        self._stopping_s: float | None = None
        self._is_raised = False
        self._num_heard = 0  # signals of STOPS that the watching thread knows of
        self._ends: tuple[socket.socket, socket.socket] | None = (
            None  # the system writes signals' numbers to the second
        )
        self._watch: threading.Thread | None = None
        self._handlers_before: dict[int, Any] = {}
        self._fd_before = -1
        self._closing = threading.Lock()
        self._is_closed = False

    @property
    def is_asked(self) -> bool:
        """Whether a signal has come, handled or not."""
        return self._asked_s is not None

    def __enter__(self) -> "StopSignals":
        self._ends = socket.socketpair()
        for end in self._ends:
            end.setblocking(False)
        self._fd_before = signal.set_wakeup_fd(self._ends[1].fileno(), warn_on_full_buffer=False)
        self._handlers_before = {number: signal.getsignal(number) for number in (*STOPS, AGAIN)}
        self._watch = threading.Thread(target=self._run, args=(self._ends[0],), name="stop signals", daemon=True)
        self._watch.start()
        self.take_over()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.stopping()

    def take_over(self) -> None:
        """Set the handlers, also where others have set theirs since."""
        for number in STOPS:
            signal.signal(number, self._handle)
        signal.signal(AGAIN, self._asked_again)

    def go_on(self) -> None:
        """After Ray's start, which sets handlers of its own. Raises StopRequested when that start has swallowed one."""
        self.take_over()
        if self._is_raised:
            raise StopRequested

    def stopping(self) -> None:
        """From now on nothing is raised. Safe twice."""
        if self._stopping_s is None:
            self._stopping_s = time.monotonic()
            if self._ends is not None:
                self.take_over()

    def close(self) -> None:
        """Put everything back as it was. When a signal has come, leave it out: the watch lasts until the process has gone."""
        with self._closing:  # else the process is being ended
            self._is_closed = True
        if self._ends is None:
            return
        for number, handler in self._handlers_before.items():
            signal.signal(number, handler)
        if self._is_woken():
            signal.set_wakeup_fd(self._fd_before, warn_on_full_buffer=False)
        receiver, sender = self._ends
        sender.close()  # the thread reads the end
        if self._watch is not None and self._watch.ident is not None:
            self._watch.join()
        receiver.close()
        self._ends = None

    # ---- in the main thread

    def _handle(self, signum: int, frame: FrameType | None) -> None:
        if self._ends is not None and not self._is_woken():  # somebody else has set a wakeup fd since
            self._ends[1].send(bytes([signum]))
        if self._stopping_s is None and not self._is_raised:
            self._is_raised = True
            self._asked_s = self._asked_s or time.monotonic()
            raise StopRequested

    def _asked_again(self, signum: int, frame: FrameType | None) -> None:
        if not self._is_raised:  # a forked child's signal came over the shared socket, none of ours
            self._asked_s, self._num_heard = None, 0
        elif self._stopping_s is None and not isinstance(sys.exception(), StopRequested):  # else it is on its way
            raise StopRequested

    def _is_woken(self) -> bool:
        """Whether the wakeup fd is still ours. Leaves another's in place."""
        assert self._ends is not None
        found = signal.set_wakeup_fd(self._ends[1].fileno(), warn_on_full_buffer=False)
        if found == self._ends[1].fileno():
            return True
        signal.set_wakeup_fd(found)
        return False

    # ---- in the watching thread

    def _run(self, receiver: socket.socket) -> None:
        while True:
            patience_s = None if self._asked_s is None else REPEAT_S
            if select.select([receiver], [], [], patience_s)[0]:
                numbers = receiver.recv(64)
                if not numbers:
                    return
                self._pass_on(numbers)
                if any(number in STOPS for number in numbers):
                    self._hear()
                continue
            match next_step(time.monotonic(), self._asked_s, self._stopping_s):
                case Step.ASK_AGAIN:
                    signal.pthread_kill(threading.main_thread().ident or 0, AGAIN)
                case Step.END:
                    waited_s = REACH_S if self._stopping_s is None else END_S
                    self._end(0, f"Ray had not let go after {waited_s:.0f} s: ended everything")

    def _pass_on(self, numbers: bytes) -> None:
        if self._fd_before != -1:
            with contextlib.suppress(OSError):
                os.write(self._fd_before, numbers)

    def _hear(self) -> None:
        """A signal of STOPS, or the same one twice."""
        self._num_heard += 1
        now_s = time.monotonic()
        if self._num_heard == 1:
            is_second = self._stopping_s is not None and self._asked_s is None
            self._asked_s = self._asked_s or now_s
        else:
            is_second = now_s - (self._asked_s or now_s) > ONE_PRESS_S
        if is_second:
            self._end(KILLED, "killing everything")

    def _end(self, status: int, why: str) -> None:
        """End everything and this process; returns when `close` came first."""
        with self._closing:
            if self._is_closed:
                return
            try:
                self._kill()
                saying = threading.Thread(target=self._say, args=(why,), daemon=True)
                saying.start()
                saying.join(SAY_S)
            finally:
                os._exit(status)
