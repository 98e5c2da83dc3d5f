"""A wall clock that is wrong, and a monotonic one that is right: in processes that were started for it, at once."""

import json
import os
import subprocess
import sys
import time

import pytest

from kvrelay.cluster.chaos.clock import CLOCK, clock_library, set_clock

pytestmark = pytest.mark.processes

CODE = """
import datetime, json, sys, time
for line in sys.stdin:
    print(json.dumps([time.time(), datetime.datetime.now().timestamp(), time.monotonic()]), flush=True)
"""


@pytest.fixture
def process(tmp_path):
    if (library := clock_library(tmp_path)) is None:
        pytest.skip("no C compiler here")
    set_clock(tmp_path / "clock")
    environment = os.environ | {"LD_PRELOAD": str(library), CLOCK: str(tmp_path / "clock")}
    command = [sys.executable, "-c", CODE]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, env=environment) as found:
        yield found
        found.stdin.close()


def times(process):
    process.stdin.write("now\n")
    process.stdin.flush()
    return json.loads(process.stdout.readline())


def test_python_sees_the_step_and_its_undoing_and_monotonic_time_goes_on(process, tmp_path):
    for step_s in (0, 3600, -3600, 0):
        set_clock(tmp_path / "clock", process.pid, step_s)
        seen_s, date_s, monotonic_s = times(process)
        assert seen_s - time.time() == pytest.approx(step_s, abs=600)
        assert date_s == pytest.approx(seen_s, abs=600)
        assert monotonic_s == pytest.approx(time.monotonic(), abs=600)


def test_other_processes_keep_the_time(process, tmp_path):
    set_clock(tmp_path / "clock", os.getpid(), 3600)
    assert times(process)[0] == pytest.approx(time.time(), abs=600)
