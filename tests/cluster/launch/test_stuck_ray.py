"""One Ctrl-C ends `kvrelay serve` whatever Ray's start does to it: nothing is left, and the status is a normal
stop's.
"""

import contextlib
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest

pytestmark = pytest.mark.processes


LIMIT_S = 60.0
AT_ONCE, NEVER = 0.3, 600.0


class Stuck:
    """A serving process whose Ray goes wrong in the way `how`; the constants are of supervisor."""

    def __init__(self, folder: Path, how: str, **constants: float) -> None:
        self.folder = folder
        program = Path(__file__).with_name("serve_with_a_stuck_ray.py")
        constants = {"REACH_S": NEVER, "END_S": NEVER, "REPEAT_S": AT_ONCE, **constants}
        paths = os.pathsep.join([str(Path.cwd()), os.environ.get("PYTHONPATH", "")])
        self.process = subprocess.Popen(
            [sys.executable, str(program), how, *(f"{name}={value}" for name, value in constants.items())],
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            start_new_session=True,
            env={**os.environ, "TMPDIR": str(folder), "PYTHONPATH": paths},
            preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_DFL),
        )
        self.child = 0

    def begin(self) -> None:
        """Until Ray's start has begun, with a child process and a folder to leave behind."""
        assert self.process.stdout is not None
        for line in self.process.stdout:
            if line.startswith("begun"):
                self.child = int(line.split()[1])
                return
        raise AssertionError("it did not begin")

    def press(self) -> None:
        """Ctrl-C."""
        os.killpg(self.process.pid, signal.SIGINT)

    def output(self, timeout_s: float = LIMIT_S) -> str:
        """All it says until it ends."""
        return self.process.communicate(timeout=timeout_s)[0]

    def left(self) -> tuple[bool, list[Path]]:
        """Whether the child lives, and the files."""
        return psutil.pid_exists(self.child), list(self.folder.iterdir())

    def end(self) -> None:
        for pid in (self.process.pid, self.child):
            with contextlib.suppress(ProcessLookupError):
                if pid:
                    os.kill(pid, signal.SIGKILL)
        self.process.communicate()


@contextlib.contextmanager
def stuck(folder: Path, how: str, **constants: float) -> Iterator[Stuck]:
    process = Stuck(folder, how, **constants)
    try:
        process.begin()
        yield process
    finally:
        process.end()


NOTHING: tuple[bool, list[Path]] = (False, [])


@pytest.mark.parametrize("how", ["blocked-in-c", "holds-python"])
def test_a_start_that_is_blocked_is_ended(tmp_path, how):
    with stuck(tmp_path, how, REACH_S=AT_ONCE) as serving:
        assert serving.left()[0] and serving.left()[1]
        serving.press()
        said = serving.output()
        assert serving.process.returncode == 0 and "killed everything" in said, said
        assert serving.left() == NOTHING


def test_control_without_a_process_in_front_it_stays_blocked(tmp_path):
    with stuck(tmp_path, "alone", REACH_S=AT_ONCE) as serving:
        serving.press()
        with pytest.raises(subprocess.TimeoutExpired):
            serving.output(timeout_s=3.0)
        assert serving.left() != NOTHING


def test_a_second_ctrl_c_kills_at_once_even_then(tmp_path):
    with stuck(tmp_path, "holds-python") as serving:
        serving.press()
        with pytest.raises(subprocess.TimeoutExpired):
            serving.output(timeout_s=1.0)
        serving.press()
        said = serving.output()
        assert serving.process.returncode == 130 and "killing everything" in said, said
        assert serving.left() == NOTHING


def test_a_start_that_swallows_the_exception_is_asked_again(tmp_path):
    with stuck(tmp_path, "swallows") as serving:
        serving.press()
        said = serving.output()
        assert serving.process.returncode == 0, said
        assert said.count("swallowed") == 2 and "stopped" in said and "killed everything" not in said
        assert serving.left() == NOTHING


@pytest.mark.parametrize("how", ["another-error", "dies"])
def test_a_start_that_fails_because_of_it_still_stops_as_asked(tmp_path, how):
    with stuck(tmp_path, how) as serving:
        serving.press()
        said = serving.output()
        assert serving.process.returncode == 0 and "stopped" in said and "SystemError" not in said, said
        assert serving.left() == NOTHING


def test_a_stop_that_is_blocked_is_ended(tmp_path):
    with stuck(tmp_path, "stop-blocked", END_S=AT_ONCE) as serving:
        serving.press()
        said = serving.output()
        assert serving.process.returncode == 0 and "killed everything" in said, said
        assert serving.left() == NOTHING


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGHUP])
def test_a_signal_to_the_process_in_front_alone_stops_it_too(tmp_path, number):
    with stuck(tmp_path, "another-error") as serving:
        serving.process.send_signal(number)
        said = serving.output()
        assert serving.process.returncode == 0 and "stopped" in said, said
        assert serving.left() == NOTHING


def test_nothing_is_ended_that_nobody_asked_to_end(tmp_path):
    """Though the start takes longer than a stop may: its own error comes out, and the logs stay."""
    with stuck(tmp_path, "fails-slowly", REACH_S=AT_ONCE, END_S=2.0) as serving:
        said = serving.output()
        assert serving.process.returncode == 1 and "RuntimeError: undisturbed" in said, said
        assert "logs:" in said and not serving.left()[0] and serving.left()[1]


def test_a_driver_that_dies_leaves_its_logs_and_no_process(tmp_path):
    with stuck(tmp_path, "dies") as serving:
        said = serving.output()
        assert serving.process.returncode == 1 and "has died" in said, said
        assert not serving.left()[0] and serving.left()[1]


def test_whoever_kills_the_process_in_front_ends_everything(tmp_path):
    with stuck(tmp_path, "swallows") as serving:
        others = psutil.Process(serving.process.pid).children(recursive=True)
        assert serving.child in {process.pid for process in others}
        os.killpg(serving.process.pid, signal.SIGKILL)
        assert psutil.wait_procs(others, timeout=LIMIT_S)[1] == []
        assert serving.left() == NOTHING


def test_the_process_in_front_ends_what_a_dead_supervisor_leaves_and_keeps_the_logs(tmp_path):
    with stuck(tmp_path, "swallows") as serving:
        (supervisor,) = psutil.Process(serving.process.pid).children()
        others = supervisor.children(recursive=True)
        supervisor.kill()
        assert psutil.wait_procs(others, timeout=LIMIT_S)[1] == []
        serving.output()
        assert serving.process.returncode == 128 + signal.SIGKILL
        assert not serving.left()[0] and serving.left()[1]
