"""bench/gpu/gpu.py without a GPU: every section's own code over tiny shapes, what fails is told, and nothing stops the
rest.
"""

import argparse
import contextlib
import importlib
import json
import subprocess
import sys
import time
from dataclasses import replace
from pathlib import Path

import psutil
import pytest
import torch

from bench.gpu import gpu, report
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
    return report.rows_of(context.rows_file)


@pytest.mark.parametrize(
    "name", ["limits", "compile", "kernels", "choices", "graphs", "experts", "quantised", "decode", "prefill"]
)
def test_a_section_runs_here_and_all_that_it_checks_holds(name, scratch, tmp_path):
    rows = rows_of(name, scratch, tmp_path)
    assert rows and [row for row in rows if row.get("ok") is False] == []
    speeds = {"decode": "share_of_memory_limit", "prefill": "share_of_gemm_peak"}
    assert name not in speeds or all(row[speeds[name]] > 0 for row in rows)


def test_torchs_int4_product_is_measured_beside_ours(scratch, tmp_path):
    from bench.gpu import experts

    rows = [row for row in rows_of("quantised", scratch, tmp_path) if row["weight"] == "int4"]
    assert rows and all(row["torch_us"] > 0 and row["torch_relative_error"] < 0.02 < row["control"] for row in rows)
    weight = experts.stored_weights(256, 128, "cpu")["int4"]
    shifted = replace(weight, offsets=weight.offsets + 3 * weight.scales)
    x = torch.eye(128, dtype=torch.bfloat16)
    assert experts.error(experts.torch_int4(shifted)(x).T, shifted.restored()) < 0.02
    assert experts.error(experts.torch_int4(weight)(x).T, shifted.restored()) > 0.1, "the control"


def test_a_kernel_that_is_wrong_fails_its_row_alone(scratch, tmp_path, monkeypatch):
    right = CpuBackend.gated_activation
    monkeypatch.setattr(CpuBackend, "gated_activation", lambda self, x, kind: right(self, x, kind) + 0.5)
    from bench.gpu.kernels import Grid
    from bench.gpu.section import Context

    Grid(Context("cpu", True, scratch, tmp_path / "rows")).elementwise()
    rows = report.rows_of(tmp_path / "rows")
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

    for name in ("parity", "tests"):
        with pytest.raises(LeftOut, match=r"needs? a GPU"):
            rows_of(name, scratch, tmp_path)


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
    options = {
        "device": "cpu", "tiny": True, "model": None, "budget": 100.0, "patience": 1.0, "rehearse": False,
        "out": tmp_path / "out", "call": None,
    }  # fmt: skip
    return gpu.Driver(argparse.Namespace(**{**options, **changes}), tmp_path, report.Report("tiny"))


def test_the_calls_fit_their_commands_and_all_of_them_a_quarter_of_an_hour():
    """With the machine's start and the wheels' installation; and the limits' section, where the second call has to
    begin on another machine.
    """
    seconds = {call: gpu.INSTALL_S + gpu.seconds_of_call(call) for call in gpu.CALLS}
    seconds[2] += gpu.SECTIONS[0].limit_s
    seconds[3] += gpu.SECTIONS[0].limit_s
    assert all(taken <= gpu.CALL_S for taken in seconds.values())
    assert sum(gpu.START_S + taken for taken in seconds.values()) <= gpu.HELD_S


def test_the_documents_table_of_sections_is_the_scripts():
    text = (ROOT / "docs" / "gpu.md").read_text()
    table = text.split("| section | call | what | its control |")[1].split("\n\n")[0]
    rows = [[cell.strip() for cell in line.split("|")[1:3]] for line in table.splitlines()[2:]]
    assert rows == [[section.name, ", ".join(map(str, section.calls))] for section in gpu.SECTIONS]


def test_a_call_is_its_sections_and_what_the_machine_can_do_where_it_is_not_known():
    def names(*order, **known):
        return [section.name for section in gpu.wanted_sections(*order, **known)]

    assert names(None, None, knows_limits=False) == list(gpu.NAMES)
    assert {name for call in gpu.CALLS for name in names(call, None, knows_limits=True)} == set(gpu.NAMES)
    assert names(2, None, knows_limits=False) == ["limits", *names(2, None, knows_limits=True)]
    assert names(None, ["graphs"], knows_limits=False) == ["limits", "graphs"]


def test_a_child_that_fails_is_told_with_its_last_words(tmp_path):
    outcome = driver(tmp_path).run(gpu.Section("absent", (1,), "", "", 60.0, ""))
    assert outcome.status == "FAILED" and "there is no section absent" in outcome.note and outcome.is_failure


def test_a_child_that_takes_too_long_is_ended_and_without_time_none_begins(tmp_path, monkeypatch):
    monkeypatch.setattr(gpu, "_LEAST_S", 0.0)
    outcome = driver(tmp_path, patience=0.001).run(gpu.SECTIONS[0])
    assert outcome.status == "TIMED OUT" and outcome.is_failure
    monkeypatch.setattr(gpu, "_LEAST_S", 5.0)
    outcome = driver(tmp_path, budget=1.0).run(gpu.SECTIONS[0])
    assert outcome.status == "left out" and "no time left" in outcome.note


def command(tmp_path, *words):
    words = ["--device", "cpu", "--tiny", "--patience", "10", "--out", str(tmp_path / "out"), *words]
    return [sys.executable, "-m", "bench.gpu.gpu", *words]


def test_two_calls_make_one_report_and_the_second_knows_the_limits(tmp_path):
    files = []
    for name in ("limits", "experts"):
        words = ["--only", name, "--scratch", str(tmp_path / "scratch")]
        done = subprocess.run(command(tmp_path, *words), capture_output=True, text=True, cwd=ROOT, timeout=120)
        assert done.returncode == 0, done.stderr
        files.append(next((tmp_path / "out").glob("*-tiny.json")).read_text())
    found = json.loads(files[-1])
    assert [(one["name"], one["status"]) for one in found["sections"]] == [("limits", "ok"), ("experts", "ok")]
    assert found["sections"][0] == json.loads(files[0])["sections"][0]  # not measured again
    assert all(row["share_of_memory_limit"] > 0 for row in found["sections"][1]["rows"])
    (markdown,) = (tmp_path / "out").glob("*-tiny.md")
    assert "| read_gb_s |" in done.stdout and markdown.read_text() in done.stdout
    assert len(list((tmp_path / "out").iterdir())) == 2


def test_the_sections_of_the_first_call_run_side_by_side_and_bring_no_figures(tmp_path):
    words = ["--call", "1", "--only", "limits", "graphs", "experts", "--scratch", str(tmp_path / "scratch")]
    done = subprocess.run(command(tmp_path, *words), capture_output=True, text=True, cwd=ROOT, timeout=240)
    begun = [line.split()[0] for line in done.stderr.splitlines() if line.endswith("…")]
    ended = [line.split(":")[0] for line in done.stderr.splitlines() if " s" in line and ": " in line]
    assert done.returncode == 0, done.stderr
    assert begun == ["limits", "graphs", "experts"] and ended[0] == "limits" and set(ended) == set(begun)
    assert done.stderr.index("experts …") < done.stderr.index("graphs: ok")
    found = json.loads(next((tmp_path / "out").glob("*-tiny.json")).read_text())["sections"]
    assert ["no figures" in one["note"] for one in found] == [False, True, True]


def statuses(tmp_path):
    """Of the report's sections; none while it is written."""
    for file in (tmp_path / "out").glob("*-tiny.json"):
        with contextlib.suppress(ValueError):
            return [one["status"] for one in json.loads(file.read_text())["sections"]]
    return []


def test_a_driver_that_is_killed_leaves_what_is_done_and_the_next_takes_it_in(tmp_path):
    """The machine's end of a command takes the driver without a word, in the middle of a section."""
    words = ["--only", "limits", "graphs", "--scratch", str(tmp_path / "scratch")]
    with subprocess.Popen(command(tmp_path, *words), stderr=subprocess.PIPE, text=True, cwd=ROOT) as process:
        assert any(line.startswith("graphs …") for line in process.stderr)
        until_s = time.monotonic() + 60
        while statuses(tmp_path) != ["ok", "running"]:
            assert time.monotonic() < until_s
            time.sleep(0.01)
        process.kill()
        process.wait()
        for child in psutil.process_iter(["cmdline"]):
            if str(tmp_path) in " ".join(child.info["cmdline"] or ()):
                child.kill()
    assert statuses(tmp_path) == ["ok", "running"]
    again = report.Report("tiny")
    again.read(tmp_path / "scratch" / "report.json")
    assert [one.status for one in again.outcomes.values()] == ["ok", report.CUT_OFF]
    assert again.outcomes["graphs"].is_failure and not again.outcomes["limits"].is_failure


def test_a_report_from_elsewhere_is_taken_in_and_what_is_none_is_refused(tmp_path):
    earlier = report.Report("tiny")
    earlier.outcomes["pair"] = report.Outcome("pair", "A pair", "ok", 1.0, rows=[{"model": "m", "ok": True}])
    file = earlier.write(tmp_path, gpu.NAMES)
    merged = report.Report("tiny")
    merged.read(file)
    assert merged.outcomes == earlier.outcomes
    (tmp_path / "other.json").write_text('{"sections": [{"title": 1}]}')
    with pytest.raises(ValueError, match="is no report"):
        merged.read(tmp_path / "other.json")


def test_a_row_that_does_not_hold_fails_the_section_and_a_slow_one_is_only_told(tmp_path):
    log, section = tmp_path / "log", gpu.SECTIONS[0]
    log.write_text("last words")

    def judged(rows, status=0, **options):
        outcome = report.Outcome(section.name, section.title, rows=rows)
        driver(tmp_path, **options).judge(outcome, status, log, 1.0)
        return outcome

    for rows, status, note in (
        ([{"ok": True, "meets": False}], "ok", "1 figures below"),
        ([{"ok": False}, {"ok": True}], "FAILED", "1 of 2"),
        ([], "FAILED", "0 of 0"),
    ):
        outcome = judged(rows)
        assert outcome.status == status and outcome.note.startswith(note)
    outcome = judged([{"ok": True}], 3)
    assert (outcome.status, outcome.note) == ("left out", "last words")
    rehearsed = judged([{"ok": False}, {"ok": True}], rehearse=True)
    assert (rehearsed.status, rehearsed.note) == ("rehearsed", "1 of 2 checks do not hold")
    assert judged([], rehearse=True).is_failure and judged([{"ok": True}], 1, rehearse=True).is_failure


def test_real_shapes_on_a_cpu_are_refused_at_once():
    done = subprocess.run(
        [sys.executable, "-m", "bench.gpu.gpu", "--device", "cpu"], capture_output=True, text=True, cwd=ROOT, timeout=60
    )
    assert done.returncode == 2 and "--tiny" in done.stderr
