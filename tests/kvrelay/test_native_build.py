"""Compiling C at start: cached by content, rebuilt when the source changes, and clear when it cannot be."""

import shutil
import subprocess
import sys

import pytest

from kvrelay.errors import BackendUnavailable
from kvrelay.native.build import load_native

pytestmark = pytest.mark.skipif(not shutil.which("cc"), reason="no C compiler")


@pytest.fixture
def source(tmp_path, monkeypatch):
    monkeypatch.setenv("KVRELAY_CACHE", str(tmp_path / "cache"))
    monkeypatch.delenv("KVRELAY_NATIVE", raising=False)
    path = tmp_path / "answer.c"
    path.write_text("int answer(void) { return 42; }\n")
    return path


def test_a_library_is_compiled_once_and_again_when_its_source_changes(source, tmp_path):
    assert load_native("answer", [source]).answer() == 42
    (built,) = (tmp_path / "cache" / "native").glob("*.so")
    stamp = built.stat().st_mtime_ns
    assert load_native("answer", [source]).answer() == 42
    assert built.stat().st_mtime_ns == stamp
    source.write_text("int answer(void) { return 43; }\n")
    assert load_native("answer", [source]).answer() == 43


def test_a_broken_source_reports_the_compilers_words_and_leaves_nothing(source, tmp_path):
    source.write_text("int answer(void) { return fortytwo; }\n")
    with pytest.raises(BackendUnavailable, match="fortytwo"):
        load_native("answer", [source])
    assert [p.name for p in (tmp_path / "cache" / "native").iterdir()] == ["answer.lock"]


def test_it_can_be_switched_off(source, monkeypatch):
    monkeypatch.setenv("KVRELAY_NATIVE", "0")
    with pytest.raises(BackendUnavailable, match="KVRELAY_NATIVE=0"):
        load_native("answer", [source])


def test_no_compiler_is_told(source, monkeypatch):
    monkeypatch.setattr(shutil, "which", lambda name: None)
    with pytest.raises(BackendUnavailable, match="no C compiler"):
        load_native("answer", [source])


@pytest.mark.slow
def test_processes_that_start_together_share_one_build(source, tmp_path):
    code = "import sys; from pathlib import Path; from kvrelay.native.build import load_native; "
    code += "sys.exit(load_native('answer', [Path(sys.argv[1])]).answer() - 42)"
    started = [subprocess.Popen([sys.executable, "-c", code, str(source)]) for _ in range(3)]
    assert [process.wait(timeout=120) for process in started] == [0, 0, 0]
    assert len(list((tmp_path / "cache" / "native").glob("*.so"))) == 1
