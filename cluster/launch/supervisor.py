"""The processes of `kvrelay serve` that never import Ray: the one in front, and below it the supervisor, which forwards
signals to the driver, which runs Ray, and ends what the driver cannot.

In the driver, Ray's C++ waits for its daemons for 30 s and more, sometimes while holding Python's lock (Ray 2.60:
`wait_for_persisted_port`, `CCoreWorkerProcess.Initialize`), and calls `_exit(1)` when a daemon ends. Neither a handler
nor a thread of the driver can prevent that; a parent process can. The driver reports what to clean up over a pipe.
Ray's processes overwrite their title and with it their environment, so a marker variable does not last. Instead this
process adopts the orphans among its descendants (it is a "child subreaper").

The first Ctrl-C, SIGTERM or SIGHUP raises StopRequested in the driver. The exception may get lost: Ray's C++ drops what
a handler raises in its callbacks, and its Python code may catch it. So the supervisor repeats the request with AGAIN
until `serve` stops.

The process in front is the one that is killed by its id. The supervisor below it has a session of its own, and outlives
that: it then ends everything and removes the folder. If the supervisor dies, the kernel kills the driver, and the
process in front ends the rest. Linux only. Must not import Ray.
"""

import contextlib
import ctypes
import os
import shutil
import signal
import sys
import time
from collections.abc import Callable
from types import FrameType
from typing import Any, Literal

import psutil

# ---- the driver's signal handlers

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

    def __exit__(self, *error: object) -> None:
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


# ---- descendants

KILL_S = 10.0  # a process that outlives SIGKILL this long waits in the kernel, for a disk or a driver
_PR_SET_CHILD_SUBREAPER = 36


def adopt_orphans() -> None:
    """From now on a descendant whose parent dies becomes our child instead of init's."""
    ctypes.CDLL(None, use_errno=True).prctl(_PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)


def descendants() -> list[psutil.Process]:
    """Every living descendant; zombies among the children are reaped."""
    living = []
    for process in psutil.Process().children(recursive=True):
        try:
            if process.status() != psutil.STATUS_ZOMBIE:
                living.append(process)
            elif process.ppid() == os.getpid():
                os.waitpid(process.pid, os.WNOHANG)
        except (psutil.Error, OSError):
            continue
    return living


def end_descendants(*, grace_s: float) -> list[int]:
    """Wait `grace_s` for the descendants to end, then kill the others for at most KILL_S; returns the killed ids."""
    deadline_s = time.monotonic() + grace_s
    while descendants() and time.monotonic() < deadline_s:
        time.sleep(0.05)
    killed: list[int] = []
    deadline_s = time.monotonic() + KILL_S
    while (left := descendants()) and time.monotonic() < deadline_s:
        for process in left:
            try:
                process.kill()
                killed.append(process.pid)
            except psutil.Error:
                continue
        time.sleep(0.02)
    return killed


# ---- the supervisor

ONE_PRESS_S = 0.5  # terminals, make and timeout may deliver one Ctrl-C twice
REPEAT_S = 1.0
REACH_S = 10.0  # from the signal until the driver must begin to stop
END_S = 15.0  # from there until it must have ended
KILLED = 130
_PR_SET_PDEATHSIG = 1
_ALONE = signal.SIGRTMIN + 1  # to the supervisor: the process in front has died
_WATCHED = {*STOPS, signal.SIGCHLD, _ALONE}
Say = Callable[[str], None]  # prints a line of rich markup


def next_step(now_s: float, requested_s: float | None, stopping_s: float | None) -> Literal["wait", "repeat", "end"]:
    """The next action, given the time of the first signal and the time when the driver began to stop (None: not yet).

    Times are seconds of one clock.
    """
    if requested_s is None:
        return "wait"
    if stopping_s is None:
        return "end" if now_s - requested_s > REACH_S else "repeat"
    return "end" if now_s - stopping_s > END_S else "wait"


class _Pipe:
    """The driver's end of the pipe; None in a process without a supervisor."""

    sender: int | None = None


def supervise(say: Say) -> None:
    """Fork twice. Returns only in the driver; the other two end here with the driver's exit status."""
    mask = signal.pthread_sigmask(signal.SIG_BLOCK, _WATCHED)
    if supervisor := _fork(_ALONE):
        sys.exit(_in_front(supervisor))
    os.setsid()  # what is sent to the group of the process in front must not reach this one
    receiver, sender = os.pipe()
    if driver := _fork(signal.SIGKILL):
        os.close(sender)
        sys.exit(Supervisor(driver, receiver, say).run())
    os.close(receiver)
    _Pipe.sender = sender
    signal.pthread_sigmask(signal.SIG_SETMASK, mask)


def _fork(number: int) -> int:
    """Adopt the orphans of a new process, which gets the signal `number` when this one dies; its id, there 0."""
    adopt_orphans()
    parent = os.getpid()
    if child := os.fork():
        return child
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, number, 0, 0, 0)
    if os.getppid() != parent:  # it has died already
        os._exit(1)
    return 0


def _in_front(supervisor: int) -> int:
    """Pass signals on until the supervisor has ended; returns its exit status, after ending what it has left."""
    while True:
        number = signal.sigwaitinfo(_WATCHED).si_signo
        if number in STOPS:
            os.kill(supervisor, number)
        elif (status := _reap(supervisor)) is not None:
            end_descendants(grace_s=0.0)
            return status if status >= 0 else 128 - status


def _reap(child: int) -> int | None:
    """Reap children; the exit status of this one once it has ended. Negative: the signal that ended it."""
    status = None
    with contextlib.suppress(ChildProcessError):
        while (found := os.waitpid(-1, os.WNOHANG))[0]:
            if found[0] == child:
                status = os.waitstatus_to_exitcode(found[1])
    return status


def report(line: str) -> None:
    """Send the supervisor a line: `folder <path>` (to remove after a forced end; sent before it is created), `stopping`
    (because of a signal), `finishing <seconds>` (stopping begins after so many at most) or `failing` (because of an
    error).
    """
    if _Pipe.sender is not None:
        with contextlib.suppress(OSError):
            os.write(_Pipe.sender, line.encode() + b"\n")


class Supervisor:
    """Waits for the driver. The first signal stops it; the second, or the first after an error, kills everything."""

    def __init__(self, driver: int, receiver: int, say: Say) -> None:
        self._driver, self._receiver, self._say = driver, receiver, say
        os.set_blocking(receiver, False)
        self._requested_s: float | None = None
        self._stopping_s: float | None = None
        self._is_failing = False
        self._folder: str | None = None
        self._buffer = b""

    def run(self) -> int:
        """Wait until the driver and its descendants have ended; return the exit status."""
        while True:
            number = self._next_signal()
            self._read_pipe()
            if number == _ALONE or (number in STOPS and self._is_second_press()):
                return self._end(KILLED, "killing everything")
            if (status := _reap(self._driver)) is not None:
                return self._after(status)
            match next_step(time.monotonic(), self._requested_s, self._stopping_s):
                case "repeat" if number is None:
                    os.kill(self._driver, AGAIN)
                case "end":
                    waited_s = REACH_S if self._stopping_s is None else END_S
                    return self._end(0, f"Ray did not stop within {waited_s:.0f} s: killed everything")

    def _next_signal(self) -> int | None:
        """The next signal; they are blocked, so only this call receives them.

        None: REPEAT_S have passed since the first.
        """
        if self._requested_s is None:
            return signal.sigwaitinfo(_WATCHED).si_signo
        found = signal.sigtimedwait(_WATCHED, REPEAT_S)
        return None if found is None else found.si_signo

    def _read_pipe(self) -> None:
        with contextlib.suppress(BlockingIOError):
            self._buffer += os.read(self._receiver, 65536)
        *lines, self._buffer = self._buffer.split(b"\n")
        for line in lines:
            word, _, rest = line.decode().partition(" ")
            if word == "folder":
                self._folder = rest
            elif word == "finishing":
                self._stopping_s = time.monotonic() + float(rest)
            else:
                self._stopping_s = time.monotonic()
                self._is_failing = word == "failing"

    def _is_second_press(self) -> bool:
        """Record and forward the first signal; True for a later one."""
        now_s = time.monotonic()
        if self._requested_s is not None:
            return now_s - self._requested_s > ONE_PRESS_S
        if self._is_failing:
            return True
        self._requested_s = now_s
        os.kill(self._driver, signal.SIGINT)  # for which Ray has no handler
        return False

    def _after(self, status: int) -> int:
        self._read_pipe()
        if status != 0 and (self._requested_s is not None or signal.sigpending() & set(STOPS)):
            return self._end(0, "stopped")
        end_descendants(grace_s=0.0)
        if self._stopping_s is None and self._folder is not None:
            self._say(f"[red]the process that runs Ray has died[/red] ({status}); logs: {self._folder}")
        return status if status >= 0 else 128 - status

    def _end(self, status: int, why: str) -> int:
        end_descendants(grace_s=0.0)
        if self._folder is not None:
            shutil.rmtree(self._folder, ignore_errors=True)
        with contextlib.suppress(OSError):  # the terminal may have gone, with the process in front
            self._say(f"[yellow]{why}[/yellow]")
        return status
