"""The child that prepares the model: whatever it prints or however it ends, whoever waits for it hears."""

import sys
from pathlib import Path

import pytest

from kvrelay.cluster.errors import ClusterError
from kvrelay.cluster.launch import prepare
from kvrelay.cluster.launch.prepare import Preparation
from kvrelay.config import Settings, settings_from
from kvrelay.engine.checkpoints.tiny import tiny_checkpoint

pytestmark = pytest.mark.processes


def child_that(monkeypatch: pytest.MonkeyPatch, program: str, shown: list[str] | None = None) -> Preparation:
    """A preparation whose child is this program instead."""
    popen = prepare.subprocess.Popen
    monkeypatch.setattr(
        prepare.subprocess, "Popen", lambda command, **options: popen([sys.executable, "-c", program], **options)
    )
    return Preparation(Settings(), lambda what, share: (shown if shown is not None else []).append(what))


@pytest.mark.parametrize(
    ("sections", "told"),
    [
        ({"prefill": {"kv_layout": "HND", "backend": "cpu"}}, "prefill.kv_layout: the cpu backend takes NHD, not HND"),
        ({"decode": {"kv_memory": "1KiB"}}, "decode.kv_memory: 1024 bytes hold 0 blocks"),
    ],
)
def test_what_one_role_cannot_run_with_is_told_by_its_own_key(tmp_path: Path, sections: dict[str, object], told: str):
    source = str(tiny_checkpoint("llama", tmp_path / "tiny-llama"))
    preparation = Preparation(settings_from({"model": {"source": source}, **sections}), lambda what, share: None)
    with pytest.raises(ClusterError) as caught:
        preparation.result()
    preparation.stop()
    assert told in str(caught.value)


def test_the_section_of_a_role_without_workers_is_not_looked_at(tmp_path: Path):
    source = str(tiny_checkpoint("llama", tmp_path / "tiny-llama"))
    sections = {"prefill": {"kv_memory": "1KiB"}, "cluster": {"prefill": 0}}
    preparation = Preparation(settings_from({"model": {"source": source}, **sections}), lambda what, share: None)
    name, _ = preparation.result()
    preparation.stop()
    assert name == "tiny-llama"


DONE = 'print(\'{"name": "m", "folder": "/f"}\', flush=True)'


@pytest.mark.timeout(30)
@pytest.mark.parametrize("noise", ["7", "[1]", "null", "{}", '{"what": 1}', '{"what": "x"}', "Downloading ..."])
def test_what_a_library_prints_is_passed_over(monkeypatch: pytest.MonkeyPatch, noise: str):
    preparation = child_that(monkeypatch, f"print({noise!r}); {DONE}")
    assert preparation.result() == ("m", Path("/f"))
    preparation.stop()


@pytest.mark.timeout(30)
def test_a_child_that_says_its_end_twice_is_heard_once(monkeypatch: pytest.MonkeyPatch):
    preparation = child_that(monkeypatch, f"{DONE}; {DONE}")
    assert preparation.result() == ("m", Path("/f"))
    preparation.stop()


@pytest.mark.timeout(30)
def test_a_child_that_dies_is_told_with_its_last_words(monkeypatch: pytest.MonkeyPatch):
    preparation = child_that(monkeypatch, "import sys; print(7); sys.exit('out of luck')")
    with pytest.raises(ClusterError, match="out of luck"):
        preparation.result()
    preparation.stop()


@pytest.mark.timeout(30)
def test_a_report_that_fails_fails_the_preparation(monkeypatch: pytest.MonkeyPatch):
    def broken(what: str, share: float) -> None:
        raise RuntimeError("no terminal")

    preparation = child_that(monkeypatch, """print('{"what": "x", "share": 0.5}', flush=True)""")
    monkeypatch.setattr(preparation, "_report", broken)
    with pytest.raises(ClusterError):
        preparation.result()
    preparation.stop()


@pytest.mark.timeout(30)
def test_the_moment_for_an_early_error_begins_with_the_childs_first_word(monkeypatch: pytest.MonkeyPatch):
    slow = """import time; time.sleep(1.0); print('{"error": "no such model"}', flush=True)"""
    preparation = child_that(monkeypatch, slow)
    with pytest.raises(ClusterError, match="no such model"):
        preparation.fail_early(0.01)
    preparation.stop()
