"""Makes the model's checkpoint ready in a child process: killable at any moment, and torch stays out of ours.

The child (`python -m kvrelay.cluster.prepare`) reads the model's settings as JSON from standard
input and writes JSON lines: progress, then the folder or the error.
"""

import contextlib
import json
import subprocess
import sys
import threading
from collections.abc import Callable
from concurrent.futures import Future
from pathlib import Path
from typing import IO, Any

from kvrelay.cluster.errors import ClusterError
from kvrelay.config import ModelSettings

STOP_S = 2.0
Report = Callable[[str, float], None]  # what is being done, and its share done, 0 to 1


class Preparation:
    """A running child. `result` is its folder and served name; `stop` ends it."""

    def __init__(self, settings: ModelSettings, report: Report) -> None:
        self._report = report
        self._future: Future[tuple[str, Path]] = Future()
        self._child = subprocess.Popen(
            [sys.executable, "-m", "kvrelay.cluster.prepare"],
            stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, start_new_session=True,
        )  # fmt: skip
        assert self._child.stdin is not None
        self._child.stdin.write(settings.model_dump_json())
        self._child.stdin.close()
        self._reader = threading.Thread(target=self._read, name="prepare", daemon=True)
        self._reader.start()

    def result(self) -> tuple[str, Path]:
        """Served name and folder. Raises ClusterError with the child's error."""
        return self._future.result()

    def fail_early(self, within_s: float) -> None:
        """Give it a moment: a wrong name or folder shows at once. Raises ClusterError with the child's error."""
        with contextlib.suppress(TimeoutError):
            self._future.result(within_s)

    def stop(self) -> None:
        """End the child if it still runs."""
        with contextlib.suppress(OSError):
            self._child.terminate()
        self._reader.join(STOP_S)

    def _read(self) -> None:
        with self._child:  # closes its pipes
            self._follow()

    def _follow(self) -> None:
        assert self._child.stdout is not None and self._child.stderr is not None
        errors: list[str] = []
        drain = threading.Thread(target=_drain, args=(self._child.stderr, errors), daemon=True)
        drain.start()
        for line in self._child.stdout:
            with contextlib.suppress(ValueError):
                message = json.loads(line)
                if "folder" in message:
                    self._future.set_result((message["name"], Path(message["folder"])))
                elif "error" in message:
                    self._future.set_exception(ClusterError(message["error"]))
                else:
                    self._report(message["what"], message["share"])
        drain.join()
        self._child.wait()
        if not self._future.done():
            last = errors[-1] if errors else f"exit status {self._child.returncode}"
            self._future.set_exception(ClusterError(f"the model could not be prepared: {last}"))


def _drain(stream: IO[str], lines: list[str]) -> None:
    for line in stream:
        if line.strip():
            lines.append(line.strip())
            del lines[:-20]


def _say(message: dict[str, Any]) -> None:
    sys.stdout.write(json.dumps(message) + "\n")
    sys.stdout.flush()


def main() -> int:
    """The child."""
    from kvrelay.engine.checkpoint import model_name, prepare_checkpoint
    from kvrelay.errors import KvrelayError

    settings = ModelSettings.model_validate_json(sys.stdin.read())
    shown = -1.0

    def report(what: str, share: float) -> None:
        nonlocal shown
        if abs(share - shown) >= 0.005 or share in (0.0, 1.0):
            shown = share
            _say({"what": what, "share": share})

    try:
        folder = prepare_checkpoint(settings, report)
        _say({"name": model_name(settings), "folder": str(folder)})
    except KvrelayError as error:
        _say({"error": str(error)})
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
