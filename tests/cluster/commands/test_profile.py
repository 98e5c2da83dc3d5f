"""`kvrelay profile --step`: its table, its JSON, its flame graph, and how it says no."""

import json
import re
import sys
import threading
import time

import pytest

from kvrelay.cluster.commands import profile as profile_command
from kvrelay.cluster.commands.cli import _add_lazy_commands, run
from kvrelay.cluster.profiles.flame import frames_under, page, sampled, stack_of, tree_of
from kvrelay.cluster.profiles.profile import load_profile, parse_profile, published_profile
from kvrelay.config import settings_from
from kvrelay.engine.checkpoints.tiny import tiny_checkpoint

pytestmark = pytest.mark.alone


def said(capsys, *arguments):
    _add_lazy_commands(["profile"])
    code = run(["profile", *arguments])
    text = capsys.readouterr()
    assert "Traceback" not in text.err + text.out
    return code, text.out, text.err


def test_a_step_is_shown_written_and_drawn(capsys, tmp_path, monkeypatch):
    monkeypatch.setattr(profile_command, "_MOST_FLAME_ROUNDS", 10)
    folder = tiny_checkpoint("llama", tmp_path / "tiny")
    flame, figures = tmp_path / "flame.html", tmp_path / "steps.json"
    code, out, _ = said(
        capsys,
        "--step",
        "--model",
        str(folder),
        "--dtype",
        "float32",
        "--batch",
        "1",
        "--batch",
        "3",
        "--prompt",
        "24",
        "--steps",
        "3",
        "--flame",
        str(flame),
        "--json",
        str(figures),
        "--set",
        "engine.kv_memory=16MiB",
    )
    assert code == 0 and "outside kernels" in out and "scheduling" in out and "the target of 10%" in out
    steps = json.loads(figures.read_text())["steps"]
    assert [one["workload"] for one in steps] == ["decode 1", "decode 3", "prefill 24", "decode 3 + prefill 24"]
    assert all(one["step_s"] > 0 and one["outside_s"] == sum(p["outside_s"] for p in one["phases"]) for one in steps)
    drawn = json.loads(re.search(r"const data = (.*);\n", flame.read_text()).group(1))
    assert [tree["name"] for tree in drawn["trees"]] == [one["workload"] for one in steps]
    for tree in drawn["trees"]:
        assert any(child["name"].endswith("Engine.step") for child in tree["children"]), tree
    assert "http" not in flame.read_text().lower()  # loads nothing


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
        ([], "--step"),
        (["--step", "--published", "x"], "one of"),
        (["--published", "gpt-9"], "llama-3.1-8b-h100-fp8"),
        (["--fit", "/no/such/folder/x.json"], "--fit"),
        (["--step", "--batch", "0"], "--batch"),
        (["--step", "--flame", "/no/such/folder/x.html"], "--flame"),
        (["--step", "--json", "/"], "--json"),
        (["--step", "--dtype", "fp8"], "model.dtype"),
        (["--step", "--promt", "1"], "--prompt"),
    ],
)
def test_wrong_use_is_one_line_with_exit_code_2(capsys, arguments, named):
    code, _, err = said(capsys, *arguments)
    assert code == 2 and named in err and len(err.strip().splitlines()) == 1


def test_the_sampler_sees_where_a_thread_spends_its_time_and_gives_the_switch_interval_back():
    before_s, stop, ready = sys.getswitchinterval(), threading.Event(), threading.Event()

    def waits_here():
        ready.set()
        stop.wait()

    thread = threading.Thread(target=waits_here)
    thread.start()
    ready.wait()
    with sampled(thread.ident, 0.0001) as sampler:
        while sampler.num_samples < 5:
            time.sleep(0)
    stop.set()
    thread.join()
    assert sys.getswitchinterval() == before_s
    assert sampler.seconds
    under = frames_under(sampler.seconds, "waits_here")
    assert under and all("Event.wait" in stack[0] for stack in under)
    assert frames_under(sampler.seconds, "nobody") == {}
    assert "stack-sampler" not in [one.name for one in threading.enumerate()]


def test_a_tree_adds_up_and_a_name_cannot_break_out_of_the_page():
    tree = tree_of({("a", "b"): 1.0, ("a",): 2.0, ("c",): 4.0}, "all")
    assert tree["value"] == 7.0
    assert [(child["name"], child["value"]) for child in tree["children"]] == [("a", 3.0), ("c", 4.0)]
    assert tree["children"][0]["children"] == [{"name": "b", "value": 1.0, "children": []}]
    text = page("</script><b>", [tree], [""])
    assert "</script><b>" not in text and text.count("</script>") == 1


def test_a_stack_is_named_from_the_outside_in():
    names = stack_of(sys._getframe())
    assert names[-1] == "test_profile:test_a_stack_is_named_from_the_outside_in"


def test_steps_that_are_profiled_carry_no_drafts(tmp_path):
    source = str(tiny_checkpoint("llama", tmp_path / "llama"))
    settings = settings_from({"model": {"source": source}, "engine": {"kv_memory": "1MiB", "speculation": "ngram"}})
    engine = profile_command._engine(settings)
    assert engine.config.draft_tokens == 0
    engine.close()
