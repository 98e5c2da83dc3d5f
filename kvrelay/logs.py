"""Where a cluster's log messages go: to each process's own log, and to one file that `kvrelay serve` shows.

A line about one request begins with "request ID: " in every process, so that grep finds all of them.
"""

import logging
import threading
from collections.abc import Callable, Mapping
from pathlib import Path

from kvrelay.environment import log_file, log_level

ACCESS_LOGGER = "kvrelay.access"
POLL_S = 0.2


def configure_logging(process: str) -> None:
    """Send this process's messages from $KVRELAY_LOG_LEVEL on to $KVRELAY_LOG_FILE, where that is set.

    Its own log has everything from INFO on in any case, but requests (kvrelay.access) only from that level on.
    """
    own, level, path = logging.getLogger("kvrelay"), log_level(), log_file()
    own.setLevel(min(level, logging.INFO))
    logging.getLogger(ACCESS_LOGGER).setLevel(level)
    if path is not None:
        handler = logging.FileHandler(path)  # appends; a line is one write, so that processes do not mix theirs
        handler.setLevel(level)
        handler.setFormatter(logging.Formatter(f"%(asctime)s %(levelname)s {process}: %(message)s", "%H:%M:%S"))
        own.addHandler(handler)


def with_facts(values: Mapping[str, object]) -> str:
    """What a line about a request ends with: ", name=value" for each plain value; text that could forge a line is
    quoted.
    """
    plain = {name: value for name, value in values.items() if isinstance(value, str | int | float)}
    return "".join(f", {name}={_plain(value)}" for name, value in plain.items())


def _plain(value: str | int | float) -> str:
    if isinstance(value, str):
        return value if value.isprintable() and " " not in value else repr(value)
    return f"{value:.6g}" if isinstance(value, float) else str(value)


class LogFollower:
    """Shows the lines that are appended to a file, from a thread of its own, until `stop`."""

    def __init__(self, path: Path, show: Callable[[str], object]) -> None:
        self._path, self._show = path, show
        self._is_stopping = threading.Event()
        self._thread = threading.Thread(target=self._run, name="log follower", daemon=True)

    def start(self) -> None:
        self._path.touch()
        self._thread.start()

    def stop(self) -> None:
        """Show what is there, and end; the file may be deleted by now. Idempotent."""
        self._is_stopping.set()
        if self._thread.ident is not None:
            self._thread.join()

    def _run(self) -> None:
        rest = ""
        with self._path.open(encoding="utf-8", errors="replace") as file:
            while True:
                is_last = self._is_stopping.wait(POLL_S)
                *lines, rest = (rest + file.read()).split("\n")
                for line in lines:
                    self._show(line)
                if is_last:
                    return
