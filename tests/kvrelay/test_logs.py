"""Log messages: which go where, and how they reach the terminal."""

import logging
import threading
from pathlib import Path

import pytest

from kvrelay.environment import LOG_FILE_VARIABLE, LOG_LEVEL_VARIABLE, log_level
from kvrelay.logs import ACCESS_LOGGER, LogFollower, configure_logging


@pytest.fixture
def access():
    """The access logger; the loggers are as they were afterwards."""
    own, access = logging.getLogger("kvrelay"), logging.getLogger(ACCESS_LOGGER)
    levels, handlers = (own.level, access.level), list(own.handlers)
    yield access
    own.setLevel(levels[0])
    access.setLevel(levels[1])
    for handler in set(own.handlers) - set(handlers):
        own.removeHandler(handler)
        handler.close()


@pytest.mark.parametrize(
    ("name", "level"), [("debug", 10), ("INFO", 20), ("warning", 30), ("error", 40), ("", 30), ("loud", 30)]
)
def test_the_level_is_a_name_in_the_environment(monkeypatch, name, level):
    monkeypatch.setenv(LOG_LEVEL_VARIABLE, name)
    assert log_level() == level


@pytest.mark.parametrize(("name", "shown"), [("info", ["INFO", "WARNING"]), ("warning", ["WARNING"]), ("error", [])])
def test_the_file_gets_a_processs_messages_from_the_level_on(monkeypatch, tmp_path, access, name, shown):
    monkeypatch.setenv(LOG_LEVEL_VARIABLE, name)
    monkeypatch.setenv(LOG_FILE_VARIABLE, str(tmp_path / "log"))
    configure_logging("p0")
    worker = logging.getLogger("kvrelay.engine")
    worker.info("one")
    worker.warning("two")
    lines = (tmp_path / "log").read_text().splitlines()
    assert [line.split()[1] for line in lines] == shown and all(" p0: " in line for line in lines)
    assert worker.isEnabledFor(logging.INFO)  # for the process's own log
    assert access.isEnabledFor(logging.INFO) is (name == "info")


class Shown:
    def __init__(self) -> None:
        self.lines: list[str] = []
        self._has_more = threading.Condition()

    def __call__(self, line: str) -> None:
        with self._has_more:
            self.lines.append(line)
            self._has_more.notify_all()

    def wait_for(self, count: int) -> None:
        with self._has_more:
            assert self._has_more.wait_for(lambda: len(self.lines) >= count, timeout=10), self.lines


def test_lines_are_shown_as_they_come_and_the_last_ones_though_the_file_is_gone(tmp_path: Path):
    shown, path = Shown(), tmp_path / "log"
    follower = LogFollower(path, shown)
    follower.start()
    with path.open("a") as file:
        file.write("one\ntw")
        file.flush()
        shown.wait_for(1)
        file.write("o\nthree\n")
        file.flush()
        path.unlink()
    follower.stop()
    follower.stop()
    assert shown.lines == ["one", "two", "three"]
