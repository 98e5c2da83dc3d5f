"""A wall clock that is wrong, and a monotonic one that is right: in processes that were started for it, at once."""

import json
import os
import subprocess
import sys
import time

import pytest

from kvrelay.cluster.chaos.clock import CLOCK, clock_library, open_clock, set_clock
from kvrelay.cluster.chaos.faults import NothingToHarm, StepClock

pytestmark = pytest.mark.processes

CODE = """
import datetime, json, sys, time
for line in sys.stdin:
    print(json.dumps([time.time(), datetime.datetime.now().timestamp(), time.monotonic()]), flush=True)
"""


@pytest.fixture
def clock(tmp_path):
    file = open_clock(tmp_path / "clock")
    yield file
    os.close(file)


@pytest.fixture
def process(tmp_path, clock):
    if (library := clock_library(tmp_path)) is None:
        pytest.skip("no C compiler here")
    environment = os.environ | {"LD_PRELOAD": str(library), CLOCK: str(tmp_path / "clock")}
    command = [sys.executable, "-c", CODE]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, env=environment) as found:
        yield found
        found.stdin.close()


def times(process):
    process.stdin.write("now\n")
    process.stdin.flush()
    return json.loads(process.stdout.readline())


def test_python_sees_the_step_and_its_undoing_and_monotonic_time_goes_on(process, clock):
    for step_s in (0, 3600, -3600, 0):
        set_clock(clock, process.pid, step_s)
        seen_s, date_s, monotonic_s = times(process)
        assert seen_s - time.time() == pytest.approx(step_s, abs=600)
        assert date_s == pytest.approx(seen_s, abs=600)
        assert monotonic_s == pytest.approx(time.monotonic(), abs=600)


def test_other_processes_keep_the_time(process, clock):
    set_clock(clock, os.getpid(), 3600)
    assert times(process)[0] == pytest.approx(time.time(), abs=600)


async def test_a_fault_steps_the_clock_of_a_worker_and_undoes_it_when_that_has_gone(process, tmp_path):
    class OneWorker:
        """A cluster of one decode worker."""

        clock = tmp_path / "clock"

        def part(self, name):
            return [process.pid] if name == "decode" else []

    kind = StepClock(OneWorker())
    await kind.strike(0.3)
    assert abs(times(process)[0] - time.time()) > 60
    process.kill()
    process.wait()
    kind.undo()
    assert not any((tmp_path / "clock").read_bytes())
    with pytest.raises(NothingToHarm):
        await kind.strike(0.3)
