"""Runs `kvrelay serve` with a Ray of whose start and stop the first argument tells how they go wrong. Not a test itself.

Prints "begun" once there are a child process and a temporary folder to leave behind. Further arguments, NAME=SECONDS, set
constants of stop_signals.
"""

import ctypes
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from rich.console import Console

from kvrelay.cluster import ray_session, serve_command, stop_signals
from kvrelay.cluster.ray_session import RaySession, free_port
from kvrelay.config import Settings

Begun = Callable[[], None]


def block_in_c() -> None:
    """For ever, without Python's lock, and through any signal: a mutex that this thread has already."""
    libc, mutex = ctypes.CDLL(None), ctypes.create_string_buffer(64)  # zeros are an unlocked mutex
    libc.pthread_mutex_lock(mutex)
    libc.pthread_mutex_lock(mutex)


def blocked_in_c(begun: Begun) -> None:
    """Has begun when a signal to the main thread goes unanswered."""
    answered = threading.Event()
    signal.signal(signal.SIGUSR1, lambda signum, frame: answered.set())

    def look() -> None:
        while True:
            answered.clear()
            signal.pthread_kill(threading.main_thread().ident or 0, signal.SIGUSR1)
            if not answered.wait(0.5):
                return begun()

    threading.Thread(target=look, daemon=True).start()
    block_in_c()


def swallowed(begun: Begun) -> None:
    """Code in Python that goes on after whatever a signal raises, twice."""
    for _ in range(2):
        try:
            begun()
            time.sleep(600)
        except BaseException:
            print("swallowed", flush=True)
    time.sleep(600)


def other_error(begun: Begun) -> None:
    try:
        begun()
        time.sleep(600)
    except KeyboardInterrupt:
        raise SystemError("error return without exception set") from None


def forked(begun: Begun) -> None:
    """A child, forked and not executed, gets SIGTERM; its C handler writes to the socket that it shares with us."""
    begun()
    child = os.fork()
    if child == 0:
        try:
            time.sleep(600)
        finally:
            os._exit(0)
    time.sleep(0.2)
    os.kill(child, signal.SIGTERM)
    os.waitpid(child, 0)
    time.sleep(1.5)  # longer than REACH_S
    raise RuntimeError("undisturbed")


def slow(begun: Begun) -> None:
    begun()
    ctypes.CDLL(None).usleep(1_500_000)  # longer than REACH_S, in C, and nobody has asked
    raise RuntimeError("undisturbed")


def plain(begun: Begun) -> None:
    begun()
    time.sleep(600)


STARTS = {"blocked-in-c": blocked_in_c, "unwatched": blocked_in_c, "swallowed": swallowed, "other-error": other_error,
          "forked": forked, "slow": slow, "blocked-stop": plain}  # fmt: skip


class StuckRay(RaySession):
    """The real session around a `ray` that is stuck."""

    def start_ray(self) -> None:
        self._has_ray = True
        self._folder = Path(os.environ["TMPDIR"]) / "kvrelay-test"
        self._folder.mkdir()
        (self._folder / "a log").write_text("of Ray")
        child = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"], start_new_session=True)
        sys.modules["ray"] = SimpleNamespace(shutdown=block_in_c if HOW == "blocked-stop" else lambda: None)  # type: ignore[assignment]
        STARTS[HOW](lambda: print("begun", child.pid, flush=True))


class Prepared:
    """A model that is ready."""

    def __init__(self, *arguments: Any) -> None: ...

    def fail_early(self, within_s: float) -> None: ...

    def stop(self) -> None: ...


if __name__ == "__main__":
    HOW = sys.argv[1]
    for argument in sys.argv[2:]:
        name, _, value = argument.partition("=")
        assert hasattr(stop_signals, name)
        setattr(stop_signals, name, float(value))
    ray_session.STOP_GRACE_S = 0.1  # the child does not go by itself
    if HOW == "unwatched":
        stop_signals.StopSignals._run = lambda self, receiver: None  # type: ignore[method-assign]
    serve_command.RaySession, serve_command.Preparation = StuckRay, Prepared  # type: ignore[misc, assignment]
    sys.exit(serve_command.serve(Settings.model_validate({"serve": {"port": free_port("127.0.0.1")}}), Console()))
