"""bench/gpu/gpu.py without a GPU: every section's own code over tiny shapes, what fails is told, and nothing stops the
rest.
"""

import argparse
import importlib
import json
import subprocess
import sys
from pathlib import Path

import pytest

from bench.gpu import gpu
from kvrelay.kernels.cpu.backend import CpuBackend
from kvrelay.kernels.cpu.recorded_steps import RecordedSteps

pytestmark = pytest.mark.alone


ROOT = Path(__file__).resolve().parents[2]
LIMITS = {"read_gb_s": 10.0, "copy_gb_s": 10.0, "gemm_gflop_s": 100.0}


@pytest.fixture(scope="module")
def scratch(tmp_path_factory):
    return tmp_path_factory.mktemp("gpu")


def rows_of(name, scratch, tmp_path):
    """A section's rows, run in this process."""
    from bench.gpu.section import Context

    section = next(one for one in gpu.SECTIONS if one.name == name)
    context = Context("cpu", True, scratch, tmp_path / "rows", LIMITS)
    getattr(importlib.import_module(f"bench.gpu.{section.module}"), section.function)(context)
    return gpu.rows_of(context.rows_file)


@pytest.mark.parametrize("name", ["limits", "compile", "kernels", "choices", "graphs", "experts", "decode", "prefill"])
def test_a_section_runs_here_and_all_that_it_checks_holds(name, scratch, tmp_path):
    rows = rows_of(name, scratch, tmp_path)
    assert rows and [row for row in rows if row.get("ok") is False] == []
    speeds = {"decode": "share_of_memory_limit", "prefill": "share_of_gemm_peak"}
    assert name not in speeds or all(row[speeds[name]] > 0 for row in rows)


def test_a_kernel_that_is_wrong_fails_its_row_alone(scratch, tmp_path, monkeypatch):
    right = CpuBackend.gated_activation
    monkeypatch.setattr(CpuBackend, "gated_activation", lambda self, x, kind: right(self, x, kind) + 0.5)
    from bench.gpu.kernels import Grid
    from bench.gpu.section import Context

    Grid(Context("cpu", True, scratch, tmp_path / "rows")).elementwise()
    rows = gpu.rows_of(tmp_path / "rows")
    assert [row["kernel"] for row in rows if not row["ok"]] == ["gated activation"] and len(rows) == 2


def test_a_graph_that_replays_something_else_fails(scratch, tmp_path, monkeypatch):
    right = RecordedSteps.run
    monkeypatch.setattr(RecordedSteps, "run", lambda *args: right(*args).flip(1))
    rows = rows_of("graphs", scratch, tmp_path)
    if any("left_out" in row for row in rows):
        pytest.skip("nothing is recorded on this processor")
    assert any(row.get("ok") is False for row in rows)


def test_what_needs_a_gpu_is_left_out_without_one(scratch, tmp_path):
    from bench.gpu.section import LeftOut

    with pytest.raises(LeftOut, match="need a GPU"):
        rows_of("tests", scratch, tmp_path)


def test_weights_that_do_not_fit_the_disk_are_left_out(scratch, tmp_path):
    from bench.gpu.models import folder_of
    from bench.gpu.section import Context, LeftOut

    usage = argparse.Namespace(free=1 << 20)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("shutil.disk_usage", lambda path: usage)
        with pytest.raises(LeftOut, match="do not fit the disk"):
            folder_of(Context("cpu", False, tmp_path, tmp_path / "rows"), "llama-8b")
    assert not list(tmp_path.glob("*/model.safetensors"))


def driver(tmp_path, **changes):
    options = {"device": "cpu", "tiny": True, "model": None, "budget": 100.0, "patience": 1.0}
    return gpu.Driver(argparse.Namespace(**{**options, **changes}), tmp_path)


def test_a_child_that_fails_is_told_with_its_last_words(tmp_path):
    outcome = driver(tmp_path).run(gpu.Section("absent", "", "", 60.0, ""))
    assert outcome.status == "FAILED" and "there is no section absent" in outcome.note and outcome.is_failure


def test_a_child_that_takes_too_long_is_ended_and_without_time_none_begins(tmp_path, monkeypatch):
    monkeypatch.setattr(gpu, "_LEAST_S", 0.0)
    outcome = driver(tmp_path, patience=0.001).run(gpu.SECTIONS[0])
    assert outcome.status == "TIMED OUT" and outcome.is_failure
    monkeypatch.setattr(gpu, "_LEAST_S", 5.0)
    outcome = driver(tmp_path, budget=1.0).run(gpu.SECTIONS[0])
    assert outcome.status == "left out" and "no time left" in outcome.note


def test_the_whole_writes_json_and_prints_markdown(tmp_path):
    done = subprocess.run(
        [
            sys.executable,
            "-m",
            "bench.gpu.gpu",
            "--device",
            "cpu",
            "--tiny",
            "--only",
            "limits",
            "--out",
            str(tmp_path / "out"),
        ],
        capture_output=True,
        text=True,
        cwd=ROOT,
        timeout=120,
    )
    assert done.returncode == 0, done.stderr
    (file,) = (tmp_path / "out").glob("*-tiny.json")
    report = json.loads(file.read_text())
    assert [(one["name"], one["status"]) for one in report["sections"]] == [("limits", "ok")]
    assert "| read_gb_s |" in done.stdout and "## What the device can do" in done.stdout


def test_a_row_that_does_not_hold_fails_the_section_and_a_slow_one_is_only_told(tmp_path):
    log, section = tmp_path / "log", gpu.SECTIONS[0]
    log.write_text("last words")
    for rows, status, note in (
        ([{"ok": True, "meets": False}], "ok", "1 figures below"),
        ([{"ok": False}, {"ok": True}], "FAILED", "1 of 2"),
        ([], "FAILED", "0 of 0"),
    ):
        outcome = gpu.Outcome(section, "ok", rows=rows)
        driver(tmp_path).judge(outcome, 0, log, 1.0)
        assert outcome.status == status and outcome.note.startswith(note)
    outcome = gpu.Outcome(section, "ok", rows=[{"ok": True}])
    driver(tmp_path).judge(outcome, 3, log, 1.0)
    assert (outcome.status, outcome.note) == ("left out", "last words")


def test_real_shapes_on_a_cpu_are_refused_at_once():
    done = subprocess.run(
        [sys.executable, "-m", "bench.gpu.gpu", "--device", "cpu"], capture_output=True, text=True, cwd=ROOT, timeout=60
    )
    assert done.returncode == 2 and "--tiny" in done.stderr
