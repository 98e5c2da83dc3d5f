"""Compiling C at start: cached by content, rebuilt when the source changes, and clear when it cannot be."""

import platform
import shutil
import subprocess
import sys
import sysconfig
from pathlib import Path

import pytest

from kvrelay.errors import BackendUnavailable
from kvrelay.native import ahead, build
from kvrelay.native.build import WARNINGS, NativeLibrary, load_extension, load_native, source_flags

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


def test_a_broken_source_reports_the_compilers_error_and_leaves_nothing(source, tmp_path):
    source.write_text("int answer(void) { return fortytwo; }\n")
    with pytest.raises(BackendUnavailable, match="fortytwo"):
        load_native("answer", [source])
    assert [p.name for p in (tmp_path / "cache" / "native").iterdir()] == ["answer.lock"]


def test_it_can_be_switched_off(source, monkeypatch):
    monkeypatch.setenv("KVRELAY_NATIVE", "0")
    with pytest.raises(BackendUnavailable, match="KVRELAY_NATIVE=0"):
        load_native("answer", [source])


def test_a_missing_compiler_is_reported(source, monkeypatch):
    monkeypatch.setattr(shutil, "which", lambda name: None)
    with pytest.raises(BackendUnavailable, match="no C compiler"):
        load_native("answer", [source])


MODULE = """
#include <Python.h>
static PyModuleDef MODULE = {PyModuleDef_HEAD_INIT, .m_name = "kvrelay_answer"};
PyMODINIT_FUNC PyInit_kvrelay_answer(void)
{
    PyObject *module = PyModule_Create(&MODULE);
    if (module) PyModule_AddIntConstant(module, "answer", 42);
    return module;
}
"""


def test_an_extension_module_is_compiled_against_this_interpreters_headers(source, monkeypatch, tmp_path):
    source.write_text(MODULE)
    assert load_extension("kvrelay_answer", [source]).answer == 42
    with pytest.raises(BackendUnavailable, match="PyInit_kvrelay_other"):
        load_extension("kvrelay_other", [source])
    monkeypatch.setattr(sysconfig, "get_path", lambda name: str(tmp_path))
    with pytest.raises(BackendUnavailable, match=r"no Python\.h"):
        load_extension("kvrelay_answer", [source])


ROOT = Path(__file__).resolve().parents[2]
FOLDERS = ("kvrelay", "kernels", "kvcache", "kvtransfer", "router")
SOURCES = sorted(str(path.relative_to(ROOT)) for folder in FOLDERS for path in (ROOT / folder).rglob("*.c"))


def test_every_source_is_found():
    assert len(SOURCES) >= 20


@pytest.mark.slow
@pytest.mark.parametrize("source", SOURCES)
def test_sources_compile_without_a_warning(source):
    path = ROOT / source
    folders = {path.parent, ROOT / "kvrelay/native/xxh3", ROOT / "kvrelay/native/hash_table"}
    includes = [*(f"-I{folder}" for folder in folders), "-isystem", sysconfig.get_path("include")]
    for target in ("-march=native", "-march=x86-64-v3") if sysconfig.get_platform() == "linux-x86_64" else ("-O2",):
        flags = ["-O2", "-std=gnu11", "-fPIC", target, *source_flags(path), *WARNINGS, "-Werror"]
        done = subprocess.run(
            ["cc", *flags, *includes, "-c", str(path), "-o", "/dev/null"], capture_output=True, text=True
        )
        assert done.returncode == 0, done.stderr


@pytest.mark.slow
def test_processes_that_start_together_share_one_build(source, tmp_path):
    code = "import sys; from pathlib import Path; from kvrelay.native.build import load_native; "
    code += "sys.exit(load_native('answer', [Path(sys.argv[1])]).answer() - 42)"
    started = [subprocess.Popen([sys.executable, "-c", code, str(source)]) for _ in range(3)]
    assert [process.wait(timeout=120) for process in started] == [0, 0, 0]
    assert len(list((tmp_path / "cache" / "native").glob("*.so"))) == 1


ANSWER = "int answer(void) { return %s; }\n"


@pytest.fixture
def environment(tmp_path, monkeypatch):
    """An installation of its own, so that nothing is left in this one's."""
    monkeypatch.setattr(sys, "prefix", str(tmp_path / "installed"))
    return tmp_path / "installed" / "share" / "kvrelay" / "native"


def test_what_was_compiled_ahead_is_loaded_without_a_compiler(source, environment, monkeypatch, tmp_path):
    slowest = ahead.levels_of_machine()[-1]
    path = NativeLibrary("answer", [source]).compile_ahead(slowest)
    assert path.parent == environment and path.name.startswith(f"answer.{slowest.name}.")
    monkeypatch.setattr(shutil, "which", lambda name: None)
    assert load_native("answer", [source]).answer() == 42
    assert not (tmp_path / "cache").exists()
    source.write_text(ANSWER % 43)  # another version of the source is not what was compiled
    with pytest.raises(BackendUnavailable, match="nothing compiled ahead fits"):
        load_native("answer", [source])


def test_an_extension_module_is_loaded_without_a_compiler_or_headers(source, environment, monkeypatch, tmp_path):
    source.write_text(MODULE)
    library = NativeLibrary("kvrelay_answer", [source], is_extension=True)
    library.compile_ahead(ahead.levels_of_machine()[-1])
    monkeypatch.setattr(shutil, "which", lambda name: None)
    monkeypatch.setattr(sysconfig, "get_path", lambda name: str(tmp_path))
    assert library.load().answer == 42


@pytest.mark.skipif(platform.machine() != "x86_64", reason="levels of x86-64")
def test_the_fastest_level_that_the_processor_has_is_loaded(source, environment, monkeypatch):
    levels = {level.name: level for level in ahead.LEVELS}
    source.write_text("#ifdef __AVX2__\n" + ANSWER % 3 + "#else\n" + ANSWER % 1 + "#endif\n")
    for name in ("x86-64-v4", "x86-64-v3", "x86-64"):  # compiled, whatever this processor is
        NativeLibrary("answer", [source]).compile_ahead(levels[name])
    for level, wanted in (("x86-64", "x86-64"), ("x86-64-v3", "x86-64-v3"), ("x86-64-v4-bf16", "x86-64-v4")):
        monkeypatch.setattr(build, "processor", lambda level=level: " ".join(["x86_64", *levels[level].features]))
        found = build._compiled_ahead("answer", [source], (), is_extension=False)
        assert found is not None and found.name.split(".")[1] == wanted


def test_the_levels_of_a_processor_are_ordered_and_each_has_what_it_needs():
    v3 = next(level for level in ahead.LEVELS if level.name == "x86-64-v3").features
    assert [one.name for one in ahead.runnable(v3, "x86_64")] == ["x86-64-v3", "x86-64"]
    assert [one.name for one in ahead.runnable(v3 - {"fma"}, "x86_64")] == ["x86-64"]
    assert [one.name for one in ahead.runnable((), "aarch64")] == ["armv8-a"]
    assert ahead.runnable(v3, "riscv64") == ()
