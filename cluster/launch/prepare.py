"""Prepares the model's checkpoint in a child process, which can be killed at any time and keeps torch out of this one.

The child (`python -m kvrelay.cluster.launch.prepare`) reads the settings as JSON from standard input, checks that the
model fits them, and writes JSON lines: progress, then the folder or the error.
"""

import contextlib
import json
import logging
import subprocess
import sys
import threading
from collections.abc import Callable
from concurrent.futures import Future
from pathlib import Path

from kvrelay.cluster.errors import ClusterError
from kvrelay.config import Settings
from kvrelay.types import Role

logger = logging.getLogger(__name__)

STOP_S = 2.0
FIRST_LINE_S = 30.0  # Python's start on a busy machine
Report = Callable[[str, float], None]  # the current activity and its progress, 0 to 1


class Preparation:
    """The running child. `result` returns the served name and the folder; `stop` ends the child."""

    def __init__(self, settings: Settings, report: Report) -> None:
        self._report = report
        self._future: Future[tuple[str, Path]] = Future()
        self._has_started = threading.Event()
        self._child = subprocess.Popen(
            [sys.executable, "-u", "-m", "kvrelay.cluster.launch.prepare"],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            start_new_session=True,
        )
        assert self._child.stdin is not None
        self._child.stdin.write(settings.model_dump_json())
        self._child.stdin.close()
        self._reader = threading.Thread(target=self._read, name="prepare", daemon=True)
        self._reader.start()

    def result(self) -> tuple[str, Path]:
        """Served name and folder. Raises ClusterError with the child's error."""
        return self._future.result()

    def fail_early(self, within_s: float) -> None:
        """Wait `within_s` from the child's first line: a wrong name or folder fails at once. Raises ClusterError."""
        self._has_started.wait(FIRST_LINE_S)
        with contextlib.suppress(TimeoutError):
            self._future.result(within_s)

    def stop(self) -> None:
        """End the child if it still runs."""
        with contextlib.suppress(OSError):
            self._child.terminate()
        self._reader.join(STOP_S)

    def _read(self) -> None:
        last = ""
        try:
            with self._child:  # closes its pipes
                assert self._child.stdout is not None
                for line in filter(str.strip, self._child.stdout):
                    try:
                        self._take(json.loads(line))
                    except ValueError:
                        last = line.strip()
            self._fail(f"the model could not be prepared: {last or f'exit status {self._child.returncode}'}")
        except Exception as error:  # the thread's edge: `result` must not wait forever
            logger.exception("reading from the model's preparation failed")
            self._fail(f"the model could not be prepared: {error!r}")
        finally:
            self._has_started.set()

    def _take(self, message: object) -> None:
        """Handle one line of the child. Other lines come from libraries and are ignored."""
        match message:
            case {"name": str(name), "folder": str(folder)} if not self._future.done():
                self._future.set_result((name, Path(folder)))
            case {"error": str(error)}:
                self._fail(error)
            case {"what": str(what), "share": int() | float() as share}:
                self._report(what, share)
            case _:
                return
        self._has_started.set()

    def _fail(self, why: str) -> None:
        if not self._future.done():
            self._future.set_exception(ClusterError(why))


def _write(**message: object) -> None:
    print(json.dumps(message))


def _check_backend(settings: Settings, role: Role) -> None:
    """Check the backend where the settings leave doubt: importing torch takes seconds.

    Raises BackendUnavailable, ConfigError.
    """
    engine = settings.for_role(role).engine
    is_quantized = settings.model.quantization != "none" and (engine.backend, engine.device) != ("cpu", "auto")
    if is_quantized or engine.backend == "cuda" or engine.kv_layout != "NHD":
        from kvrelay.engine.checkpoints.preflight import check_backend
        from kvrelay.kernels.select import backend_class

        check_backend(backend_class(engine.backend, engine.device), settings, role)


def main() -> int:
    """The child."""
    from kvrelay.engine.checkpoints.checkpoint import model_name, prepare_checkpoint
    from kvrelay.engine.checkpoints.preflight import check_fit
    from kvrelay.engine.models.spec import ModelSpec
    from kvrelay.engine.speculation.draft_fit import prepare_draft_model
    from kvrelay.errors import KvrelayError

    settings = Settings.model_validate_json(sys.stdin.read())
    _write(what=f"looking for {settings.model.source}", share=0.0)
    reported = -1.0

    def report(what: str, share: float) -> None:
        nonlocal reported
        if abs(share - reported) >= 0.005 or share in (0.0, 1.0):
            reported = share
            _write(what=what, share=share)

    try:
        folder = prepare_checkpoint(settings.model, report)
        spec = ModelSpec.from_folder(folder)
        for role in [Role.PREFILL, Role.DECODE] if settings.cluster.prefill else [Role.DECODE]:
            check_fit(spec, settings, role)
            _check_backend(settings, role)
        prepare_draft_model(settings, folder, report)
        _write(name=model_name(settings.model), folder=str(folder))
    except KvrelayError as error:
        _write(error=str(error))
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
