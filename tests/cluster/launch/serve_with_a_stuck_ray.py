"""Runs `kvrelay serve` with a Ray of whose start and stop the first argument tells how they go wrong. Not a test
itself.

Prints "begun" once there are a child process and a temporary folder to leave behind. Further arguments, NAME=SECONDS,
set constants of supervisor; when it is "alone", no process is in front.
"""

import ctypes
import os
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from rich.console import Console

from kvrelay.cluster.commands import serve as serve_command
from kvrelay.cluster.launch import ray_session, supervisor
from kvrelay.cluster.launch.ray_session import RaySession, free_port
from kvrelay.config import Settings


def block(libc: ctypes.CDLL) -> None:
    """For ever, and through any signal: a mutex that this thread has already."""
    mutex = ctypes.create_string_buffer(64)  # zeros are an unlocked one
    libc.pthread_mutex_lock(mutex)
    libc.pthread_mutex_lock(mutex)


def block_in_c() -> None:
    """Where other threads may run Python."""
    block(ctypes.CDLL(None))


def hold_python() -> None:
    """Where no thread may."""
    block(ctypes.PyDLL(None))


def swallow() -> None:
    """Code in Python that goes on after whatever a signal raises, twice."""
    for _ in range(2):
        try:
            time.sleep(600)
        except BaseException:
            print("swallowed", flush=True)
    time.sleep(600)


def another_error() -> None:
    try:
        time.sleep(600)
    except KeyboardInterrupt:
        raise SystemError("error return without exception set") from None


def die() -> None:
    """As Ray's core worker does when its raylet has gone; no handler runs before."""
    ctypes.PyDLL(None).usleep(1_500_000)
    ctypes.PyDLL(None)._exit(1)


def fail_slowly() -> None:
    ctypes.CDLL(None).usleep(1_500_000)  # longer than a stop may take
    raise RuntimeError("undisturbed")


STARTS = {"blocked-in-c": block_in_c, "alone": block_in_c, "holds-python": hold_python, "swallows": swallow,
          "another-error": another_error, "dies": die, "fails-slowly": fail_slowly,
          "stop-blocked": lambda: time.sleep(600)}  # fmt: skip


class StuckRay(RaySession):
    """The real session around a `ray` that is stuck."""

    def start_ray(self, meanwhile: Callable[[], object] = lambda: None) -> None:
        self.has_ray = True
        self._folder = Path(os.environ["TMPDIR"]) / "kvrelay-test"
        supervisor.report(f"folder {self._folder}")
        self._folder.mkdir()
        (self._folder / "a log").write_text("of Ray")
        child = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"], start_new_session=True)
        subprocess.Popen(["sh", "-c", f"sleep 0.5; echo begun {child.pid}"])  # by then we are where the argument says
        sys.modules["ray"] = SimpleNamespace(shutdown=block_in_c if HOW == "stop-blocked" else lambda: None)  # type: ignore[assignment]
        STARTS[HOW]()


class Prepared:
    """A model that is ready."""

    def __init__(self, *arguments: Any) -> None: ...

    def fail_early(self, within_s: float) -> None: ...

    def stop(self) -> None: ...


if __name__ == "__main__":
    HOW = sys.argv[1]
    for argument in sys.argv[2:]:
        name, _, value = argument.partition("=")
        assert hasattr(supervisor, name)
        setattr(supervisor, name, float(value))
    ray_session.STOP_GRACE_S = 0.1  # the child does not go by itself
    if HOW != "alone":
        supervisor.supervise(lambda line: print(line, flush=True))
    serve_command.RaySession, serve_command.Preparation = StuckRay, Prepared  # type: ignore[misc, assignment]
    sys.exit(serve_command.serve(Settings.model_validate({"serve": {"port": free_port("127.0.0.1")}}), Console()))
