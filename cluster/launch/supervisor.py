"""The process in front of `kvrelay serve`: it passes signals on to the one that drives Ray, and ends what that one cannot.

Ray's C++ waits there for its daemons, for 30 s and more, now and then without letting any other thread run Python (Ray
2.60: `wait_for_persisted_port`, `CCoreWorkerProcess.Initialize`); and it leaves with `_exit(1)` when one has gone. Neither
a handler nor a thread in that process can help; a process in front can. It has nothing but a pipe, on which the driver
tells what there is to clear up. Linux, as `processes`. Must not import Ray.
"""

import contextlib
import ctypes
import os
import shutil
import signal
import sys
import time
from collections.abc import Callable
from enum import Enum

from kvrelay.cluster.launch.processes import adopt_orphans, end_descendants
from kvrelay.cluster.launch.stop_signals import AGAIN, STOPS

ONE_PRESS_S = 0.5  # terminals, make and timeout may deliver one Ctrl-C twice, and we pass on what the group has had
REPEAT_S = 1.0
REACH_S = 10.0  # from the signal until the driver begins to stop
END_S = 15.0  # from there until it has gone
KILLED = 130
_PR_SET_PDEATHSIG = 1
_WATCHED = {*STOPS, signal.SIGCHLD}
Say = Callable[[str], None]  # prints a line of rich markup


class SupervisorAction(Enum):
    """What the process in front does next."""

    WAIT = 0
    ASK_AGAIN = 1
    END = 2


def next_step(now_s: float, asked_s: float | None, stopping_s: float | None) -> SupervisorAction:
    """After a signal at `asked_s`; the driver stops since `stopping_s`. None: not yet. Seconds of one clock."""
    if asked_s is None:
        return SupervisorAction.WAIT
    if stopping_s is None:
        return SupervisorAction.END if now_s - asked_s > REACH_S else SupervisorAction.ASK_AGAIN
    return SupervisorAction.END if now_s - stopping_s > END_S else SupervisorAction.WAIT


class _Front:
    """The driver's end of the pipe; None where nobody is in front."""

    sender: int | None = None


def supervise(say: Say) -> None:
    """Fork. Returns in the driver alone; the process in front ends here, with the driver's exit status."""
    adopt_orphans()
    receiver, sender = os.pipe()
    mask = signal.pthread_sigmask(signal.SIG_BLOCK, _WATCHED)
    front = os.getpid()
    driver = os.fork()
    if driver:
        os.close(sender)
        sys.exit(Supervisor(driver, receiver, say).run())
    os.close(receiver)
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
    if os.getppid() != front:  # it died before
        os._exit(1)
    _Front.sender = sender
    signal.pthread_sigmask(signal.SIG_SETMASK, mask)


def tell_folder(folder: os.PathLike[str]) -> None:
    """What is to be removed when everything is ended by force; before it is made."""
    _tell(f"folder {os.fspath(folder)}")


def tell_stopping(*, is_asked: bool) -> None:
    """The driver stops from now on; because of a signal, or of an error."""
    _tell("stopping" if is_asked else "failing")


def _tell(line: str) -> None:
    if _Front.sender is not None:
        with contextlib.suppress(OSError):
            os.write(_Front.sender, line.encode() + b"\n")


class Supervisor:
    """Waits for the driver. The first signal asks it to stop; the next, or the first after an error, ends everything."""

    def __init__(self, driver: int, receiver: int, say: Say) -> None:
        self._driver, self._receiver, self._say = driver, receiver, say
        os.set_blocking(receiver, False)
        self._asked_s: float | None = None
        self._stopping_s: float | None = None
        self._is_failing = False
        self._folder: str | None = None
        self._told = b""

    def run(self) -> int:
        """Until the driver and all below it have gone; the exit status."""
        while True:
            number = self._next_signal()
            self._listen()
            if number in STOPS and self._is_second_press():
                return self._end(KILLED, "killing everything")
            if (status := self._driver_status()) is not None:
                return self._after(status)
            match next_step(time.monotonic(), self._asked_s, self._stopping_s):
                case SupervisorAction.ASK_AGAIN if number is None:
                    os.kill(self._driver, AGAIN)
                case SupervisorAction.END:
                    waited_s = REACH_S if self._stopping_s is None else END_S
                    return self._end(0, f"Ray had not let go after {waited_s:.0f} s: ended everything")

    def _next_signal(self) -> int | None:
        """Blocked, so it comes here only. None when a while has passed after the first."""
        if self._asked_s is None:
            return signal.sigwaitinfo(_WATCHED).si_signo
        found = signal.sigtimedwait(_WATCHED, REPEAT_S)
        return None if found is None else found.si_signo

    def _listen(self) -> None:
        with contextlib.suppress(BlockingIOError):
            self._told += os.read(self._receiver, 65536)
        *lines, self._told = self._told.split(b"\n")
        for line in lines:
            word, _, rest = line.decode().partition(" ")
            if word == "folder":
                self._folder = rest
            else:
                self._stopping_s = time.monotonic()
                self._is_failing = word == "failing"

    def _is_second_press(self) -> bool:
        """Notes the first one and passes it on."""
        now_s = time.monotonic()
        if self._asked_s is not None:
            return now_s - self._asked_s > ONE_PRESS_S
        if self._is_failing:
            return True
        self._asked_s = now_s
        os.kill(self._driver, signal.SIGINT)  # it may have it already, from a terminal; Ray has no handler for this one
        return False

    def _driver_status(self) -> int | None:
        """Its exit status once it has gone, and buries orphans. Negative: the signal that ended it."""
        status = None
        with contextlib.suppress(ChildProcessError):
            while (found := os.waitpid(-1, os.WNOHANG))[0]:
                if found[0] == self._driver:
                    status = os.waitstatus_to_exitcode(found[1])
        return status

    def _after(self, status: int) -> int:
        self._listen()
        if status != 0 and (self._asked_s is not None or signal.sigpending() & set(STOPS)):
            return self._end(0, "stopped")
        end_descendants(grace_s=0.0)
        if self._stopping_s is None and self._folder is not None:
            self._say(f"[red]the process that drives Ray has died[/red] ({status}); logs: {self._folder}")
        return status if status >= 0 else 128 - status

    def _end(self, status: int, why: str) -> int:
        end_descendants(grace_s=0.0)
        if self._folder is not None:
            shutil.rmtree(self._folder, ignore_errors=True)
        self._say(f"[yellow]{why}[/yellow]")
        return status
