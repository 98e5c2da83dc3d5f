"""`kvrelay models`: the cache of converted models, listed and cleared."""

import io
import os

import pytest

from kvrelay.cluster.commands.cli import run
from kvrelay.cluster.commands.models import cached_models
from kvrelay.engine.checkpoints.checkpoint import cached
from kvrelay.engine.checkpoints.tiny import tiny_checkpoint


@pytest.fixture
def cache(tmp_path, monkeypatch):
    """Two conversions, `old` used before `new`."""
    monkeypatch.setenv("KVRELAY_CACHE", str(tmp_path))
    for name, used_s in (("old", 1e9), ("new", 2e9)):
        folder = cached("m", name, lambda work, target, report: tiny_checkpoint("llama", target), lambda *what: None)
        os.utime(folder, (used_s, used_s))
    return tmp_path


def test_the_list_has_names_sizes_and_the_last_use(cache, capsys):
    assert run(["models"]) == 0
    text = capsys.readouterr().out
    assert text.index("new") < text.index("old") and str(cache) in text
    assert "2033-05" in text and "2001-09" in text and "GB" in text
    assert [one.num_bytes > 100_000 for one in cached_models()] == [True, True]


def test_use_moves_a_conversion_to_the_front(cache):
    cached("m", "old", None, lambda *what: None)
    os.utime(cache / "checkpoints" / "new", (1e9, 1e9))
    assert [one.name for one in cached_models()] == ["old", "new"]


def test_one_is_removed_by_name_and_all_without_one(cache, capsys):
    assert run(["models", "clear", "old", "--yes"]) == 0
    assert [one.name for one in cached_models()] == ["new"] and "removed old, 0.0" in capsys.readouterr().out
    assert run(["models", "clear", "--yes"]) == 0
    assert cached_models() == [] and "1 converted models and 0" in capsys.readouterr().out
    assert run(["models"]) == 0 and "no converted models" in capsys.readouterr().out


@pytest.mark.parametrize(("answer", "left"), [("n", ["new", "old"]), ("y", [])])
def test_it_asks_first(cache, monkeypatch, answer, left):
    monkeypatch.setattr("sys.stdin", io.StringIO(f"{answer}\n"))
    assert (run(["models", "clear"]) == 0) is (answer == "y")
    assert [one.name for one in cached_models()] == left


def test_an_unknown_name_is_refused_with_the_names_there_are(cache, capsys):
    assert run(["models", "clear", "odl", "--yes"]) == 2
    assert "no converted model odl" in (text := capsys.readouterr().err) and "new, old" in text


@pytest.fixture
def packed(cache):
    """The packed weights of `new` and of a model elsewhere, and what a killed worker has left."""
    (cache / "packed").mkdir()
    names = ("new-5e", "folder-6f", "folder-70")
    for name, end in zip(names, ("weights", "weights", "part"), strict=True):
        (cache / "packed" / f"{name}.{end}").write_bytes(bytes(30_000_000))
        (cache / "packed" / f"{name}.lock").touch()
    (cache / "packed" / "new-5e.checked").write_text("boot")
    os.utime(cache / "packed" / "new-5e.checked", (3e9, 3e9))
    return cache / "packed"


def test_packed_weights_are_listed_with_their_size_and_last_use(packed, capsys):
    assert run(["models"]) == 0
    lines = [line.split() for line in capsys.readouterr().out.splitlines() if "packed weights " in line]
    assert sorted(line[0] for line in lines) == ["folder-6f", "folder-70", "new-5e"]
    assert lines[0][:5] == ["new-5e", "packed", "weights", "0.03", "GB"] and lines[0][5].startswith("2065")


def test_packed_weights_go_with_their_model_by_name_or_with_all(packed, capsys):
    assert run(["models", "clear", "new", "--yes"]) == 0
    assert cached_models()[0].name == "old"
    assert {path.name for path in packed.iterdir()} == {
        "new-5e.lock",
        "folder-6f.lock",
        "folder-6f.weights",
        "folder-70.lock",
        "folder-70.part",
    }
    assert run(["models", "clear", "folder-70", "--yes"]) == 0 and not list(packed.glob("*.part"))
    capsys.readouterr()
    assert run(["models", "clear", "--yes"]) == 0
    assert "1 converted models and 1 files of packed weights, 0.0" in capsys.readouterr().out
    assert cached_models() == [] and not list(packed.glob("*.weights"))
