"""`kvrelay chaos` for a minute: a real cluster, real faults, nothing wrong, broken or left."""

import json
import os
import signal
import subprocess
import sys
import time

import psutil
import pytest

from kvrelay.cluster.chaos.cluster import PARTS
from kvrelay.cluster.chaos.faults import FAULTS
from kvrelay.cluster.chaos.hosts.faults import HOST_FAULTS
from kvrelay.cluster.chaos.hosts.namespaces import why_not

pytestmark = [pytest.mark.slow, pytest.mark.timeout(600), pytest.mark.alone]


def report_of(folder, *flags):
    """The report of a run that must end with 0."""
    command = [sys.executable, "-m", "kvrelay.cluster.commands.cli", "chaos", *flags, "--report", str(folder)]
    done = subprocess.run(command, capture_output=True, text=True, env=os.environ | {"COLUMNS": "200"}, timeout=560)
    written = folder / "report.json"
    report = json.loads(written.read_text()) if written.exists() else {"faults": []}
    faults = "\n".join(f"{one['at_s']:.1f} s: {one['kind']}, back after {one['whole_s']} s" for one in report["faults"])
    log = (folder / "serve.log").read_text()[-9000:] if written.exists() else ""
    assert done.returncode == 0, "\n".join((done.stdout[-6000:], done.stderr[-3000:], faults, log))
    assert report["counts"]["complete"] > 50 and report["problems"] == report["leaks"] == []
    return report


def test_a_minute_of_faults_costs_no_token_block_or_process(tmp_path):
    kinds = set(FAULTS) - {"stop-registry", "stop-controller"}  # so that these two are killed
    report = report_of(tmp_path, "--seconds", "60", "--seed", "1", "--faults", ",".join(sorted(kinds)))
    struck = {one["kind"] for one in report["faults"]}
    assert struck <= kinds
    assert set(PARTS) <= {kind.partition("-")[2] for kind in struck}, "some part was not harmed"
    assert (tmp_path / "report.png").stat().st_size > 10_000


@pytest.mark.long
def test_hosts_and_links_that_fail_cost_no_token_block_or_process(tmp_path):
    if why := why_not():
        pytest.skip(f"no hosts here: {why}")
    report = report_of(tmp_path, "--hosts", "2", "--seconds", "60", "--faults", ",".join(HOST_FAULTS))
    assert report["faults"] and {one["kind"] for one in report["faults"]} <= set(HOST_FAULTS)


def test_a_run_that_is_told_to_end_takes_its_cluster_along(tmp_path):
    command = [sys.executable, "-m", "kvrelay.cluster.commands.cli", "chaos", "--seconds", "300"]
    chaos = subprocess.Popen(command, env=os.environ | {"TMPDIR": str(tmp_path)}, stdout=subprocess.DEVNULL)
    try:
        end_s = time.monotonic() + 120
        while not (cluster := psutil.Process(chaos.pid).children(recursive=True)):
            assert chaos.poll() is None and time.monotonic() < end_s
            time.sleep(0.2)
        time.sleep(5)  # of its start, so that there are more
        cluster += psutil.Process(chaos.pid).children(recursive=True)
        chaos.send_signal(signal.SIGTERM)
        assert chaos.wait(timeout=120) != 0
        gone, alive = psutil.wait_procs(cluster, timeout=30)
        assert gone and not alive
        assert not list(tmp_path.glob("kvrelay-chaos-*"))
    finally:
        chaos.kill()


def test_an_unknown_kind_of_fault_is_refused():
    command = [sys.executable, "-m", "kvrelay.cluster.commands.cli", "chaos", "--faults", "kill-time"]
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode == 2 and "kill-time" in done.stderr and "kill-decode" in done.stderr
