"""`kvrelay chaos` for a minute: a real cluster, real faults, nothing wrong, broken or left."""

import json
import os
import subprocess
import sys

import pytest

from kvrelay.cluster.chaos.cluster import PARTS
from kvrelay.cluster.chaos.faults import FAULTS
from kvrelay.cluster.chaos.hosts.faults import HOST_FAULTS
from kvrelay.cluster.chaos.hosts.namespaces import why_not

pytestmark = [pytest.mark.slow, pytest.mark.timeout(600), pytest.mark.alone]


def test_a_minute_of_faults_costs_no_token_block_or_process(tmp_path):
    command = [sys.executable, "-m", "kvrelay.cluster.commands.cli", "chaos", "--seconds", "60", "--seed", "1"]
    done = subprocess.run(
        [*command, "--report", str(tmp_path)],
        capture_output=True,
        text=True,
        env=os.environ | {"COLUMNS": "200"},
        timeout=560,
    )
    assert done.returncode == 0, done.stdout[-6000:] + done.stderr[-3000:]
    report = json.loads((tmp_path / "report.json").read_text())
    struck = {one["kind"] for one in report["faults"]}
    assert struck <= set(FAULTS)
    assert set(PARTS) <= {kind.partition("-")[2] for kind in struck}, "some part was not harmed"
    assert report["counts"]["complete"] > 50 and report["problems"] == report["leaks"] == []
    assert (tmp_path / "report.png").stat().st_size > 10_000


@pytest.mark.long
def test_hosts_and_links_that_fail_cost_no_token_block_or_process(tmp_path):
    if why := why_not():
        pytest.skip(why)
    command = [sys.executable, "-m", "kvrelay.cluster.commands.cli", "chaos", "--hosts", "2", "--seconds", "60"]
    done = subprocess.run(
        [*command, "--faults", ",".join(HOST_FAULTS), "--report", str(tmp_path)],
        capture_output=True,
        text=True,
        env=os.environ | {"COLUMNS": "200"},
        timeout=560,
    )
    assert done.returncode == 0, done.stdout[-6000:] + done.stderr[-3000:]
    report = json.loads((tmp_path / "report.json").read_text())
    assert report["faults"] and {one["kind"] for one in report["faults"]} <= set(HOST_FAULTS)
    assert report["counts"]["complete"] > 50 and report["problems"] == report["leaks"] == []


def test_an_unknown_kind_of_fault_is_refused():
    command = [sys.executable, "-m", "kvrelay.cluster.commands.cli", "chaos", "--faults", "kill-time"]
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode == 2 and "kill-time" in done.stderr and "kill-decode" in done.stderr
