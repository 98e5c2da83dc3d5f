"""`kvrelay serve` as a process of its own, to be looked at, and damaged, from outside."""

import contextlib
import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

from kvrelay.cluster.errors import ClusterError
from kvrelay.cluster.launch.ray_session import free_port

START_S, STOP_S, POLL_S = 240.0, 60.0, 0.2


@dataclass(frozen=True, slots=True)
class ServeProcess:
    """process: leader of a session of its own. log: all that it prints."""

    process: subprocess.Popen[str]
    url: str
    log: Path

    @property
    def dashboard(self) -> str:
        """Ray's, once it has started."""
        found = re.search(r"dashboard +(http://\S+)", text := self.log.read_text(errors="replace"))
        assert found is not None, text
        return found[1]

    def wait_until_started(self, limit_s: float = START_S) -> None:
        """Raises ClusterError with its last lines."""
        deadline_s = time.monotonic() + limit_s
        while "Ctrl-C stops everything" not in (text := self.log.read_text(errors="replace")):
            if self.process.poll() is not None or time.monotonic() > deadline_s:
                raise ClusterError(f"kvrelay serve did not start:\n{text[-3000:]}")
            time.sleep(POLL_S)

    def stop(self) -> None:
        """End it with Ctrl-C; what is left after STOP_S is killed."""
        with contextlib.suppress(subprocess.TimeoutExpired):
            self.process.send_signal(signal.SIGINT)
            self.process.wait(STOP_S)
        self.kill()

    def kill(self) -> None:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self.process.pid, signal.SIGKILL)
        self.process.wait()


def start_serve(folder: Path, *flags: str, environment: Mapping[str, str] | None = None) -> ServeProcess:
    """Start the command with these flags, on free ports; its log lies in `folder`."""
    log, port = folder / "serve.log", free_port("127.0.0.1")
    ports = ("--port", str(port), "--dashboard-port", str(free_port("127.0.0.1")))
    with log.open("w") as output:
        process = subprocess.Popen(
            [sys.executable, "-u", "-m", "kvrelay.cluster.commands.cli", "serve", *ports, *flags],
            stdout=output,
            stderr=subprocess.STDOUT,
            text=True,
            start_new_session=True,
            env={**os.environ, "COLUMNS": "200", **(environment or {})},
            preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_DFL),  # shells ignore it for background jobs
        )
    return ServeProcess(process, f"http://127.0.0.1:{port}", log)


@contextlib.contextmanager
def running_serve(
    folder: Path, *flags: str, environment: Mapping[str, str] | None = None, limit_s: float = START_S
) -> Iterator[ServeProcess]:
    """Started, and stopped at the end. Raises ClusterError as `wait_until_started`."""
    served = start_serve(folder, *flags, environment=environment)
    try:
        served.wait_until_started(limit_s)
        yield served
    finally:
        served.stop()
