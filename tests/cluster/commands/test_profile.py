"""`kvrelay profile`: its table, its trace, its speed profiles, and how it says no."""

import json

import pytest

from kvrelay.cluster.commands import profile as profile_command
from kvrelay.cluster.commands.cli import run
from kvrelay.cluster.profiles.profile import load_profile, parse_profile, published_profile
from kvrelay.config import settings_from
from kvrelay.engine.checkpoints.tiny import tiny_checkpoint
from kvrelay.kernels.cpu.backend import CpuBackend

pytestmark = pytest.mark.alone


def said(capsys, *arguments):
    code = run(["profile", *arguments])
    text = capsys.readouterr()
    assert "Traceback" not in text.err + text.out
    return code, text.out, text.err


@pytest.mark.parametrize(("batch", "prompt"), [("3", "0"), ("2", "24"), ("0", "24")])
def test_steps_are_profiled_with_the_names_of_their_parts_and_traced(capsys, tmp_path, batch, prompt):
    folder, file = tiny_checkpoint("llama", tmp_path / "tiny"), tmp_path / "trace.json"
    sizes = ("--batch", batch, "--prompt", prompt, "--steps", "3", "--set", "engine.kv_memory=16MiB")
    code, out, err = said(capsys, "--model", str(folder), "--dtype", "float32", "--trace", str(file), *sizes)
    assert code == 0, err
    for shown in ("Self CPU", "schedule", "advance", "run", "ms unprofiled", str(file)):
        assert shown in out, shown
    names = [event.get("name", "") for event in json.loads(file.read_text())["traceEvents"]]
    assert names.count("step") == 3
    if CpuBackend(1).compiled_kernels is not None:
        assert any(name.startswith("kr_") for name in names)


def test_a_profile_is_fitted_and_written(capsys, tmp_path):
    folder, file = tiny_checkpoint("llama", tmp_path / "tiny"), tmp_path / "tiny.json"
    code, out, _ = said(
        capsys,
        "--fit",
        str(file),
        "--model",
        str(folder),
        "--dtype",
        "float32",
        "--seconds",
        "20",
        "--set",
        "engine.kv_memory=8MiB",
    )
    assert code == 0 and "median error" in out and "tiny.json" in out
    profile = load_profile(file)
    assert profile.fit is not None and {"prefill", "decode", "mixed"} == set(profile.fit.errors)
    assert profile.decode.decode_step_s(1, 100) > 0


@pytest.mark.filterwarnings("ignore:resource_tracker")  # other tests end all of this process's children
def test_how_workers_of_one_machine_slow_each_other_down_is_measured_and_written(capsys, tmp_path):
    folder, file = tiny_checkpoint("llama", tmp_path / "tiny"), tmp_path / "tiny.json"
    code, out, _ = said(
        capsys,
        "--fit",
        str(file),
        "--model",
        str(folder),
        "--dtype",
        "float32",
        "--seconds",
        "10",
        "--workers",
        "2",
        "--set",
        "engine.kv_memory=8MiB",
        "--set",
        "engine.num_threads=1",
    )
    assert code == 0 and "with 2 busy workers" in out
    profile = load_profile(file)
    assert profile.workers_per_node == 2 and {len(ratios) for ratios in profile.slowdown.values()} == {2}


def test_a_published_profile_is_printed(capsys):
    code, out, _ = said(capsys, "--published", "llama-3.1-70b-h100x8-fp8")
    assert code == 0 and parse_profile(out, "printed") == published_profile("llama-3.1-70b-h100x8-fp8")


@pytest.mark.parametrize(
    ("arguments", "named"),
    [
        (["--batch", "0"], "--prompt"),
        (["--fit", "x.json", "--published", "x"], "one of"),
        (["--published", "gpt-9"], "llama-3.1-8b-h100-fp8"),
        (["--fit", "/no/such/folder/x.json"], "--fit"),
        (["--batch", "-1"], "--batch"),
        (["--trace", "/no/such/folder/x.json"], "--trace"),
        (["--trace", "/"], "--trace"),
        (["--dtype", "fp8"], "model.dtype"),
        (["--promt", "1"], "--prompt"),
    ],
)
def test_wrong_use_is_one_line_with_exit_code_2(capsys, arguments, named):
    code, _, err = said(capsys, *arguments)
    assert code == 2 and named in err and len(err.strip().splitlines()) == 1


@pytest.mark.parametrize("sizes", [("1000", "8", "0"), ("1", "8", "4000"), ("4", "800", "0"), ("1", "4000", "0")])
def test_steps_that_the_engine_cannot_run_are_refused(capsys, tmp_path, sizes):
    """More sequences than run, more tokens than a step takes, more KV than the pool has, longer than the model's."""
    flags = ("--model", str(tiny_checkpoint("llama", tmp_path / "tiny")), "--set", "engine.kv_memory=1MiB")
    batch, context, prompt = sizes
    code, _, err = said(capsys, *flags, "--batch", batch, "--context", context, "--prompt", prompt, "--steps", "3")
    assert code == 2 and ("--batch" in err or "refuses" in err), err


def test_steps_that_are_profiled_carry_no_drafts(tmp_path):
    source = str(tiny_checkpoint("llama", tmp_path / "llama"))
    settings = settings_from({"model": {"source": source}, "engine": {"kv_memory": "1MiB", "speculation": "ngram"}})
    engine = profile_command._engine(settings)
    assert engine.config.draft_tokens == 0
    engine.close()
