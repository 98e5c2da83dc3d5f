"""Compiling FlashInfer's modules, with a ninja of ours that compiles nothing."""

import os
import signal
import subprocess
import sys
import threading
import time
from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch
from filelock import FileLock
from rich.console import Console

from kvrelay.cluster.commands import cli, prepare
from kvrelay.cluster.compiling import kernels as building
from kvrelay.cluster.compiling.kernels import Build
from kvrelay.config import load_settings
from kvrelay.engine.checkpoints.loading import load_model
from kvrelay.engine.checkpoints.tiny import tiny_checkpoint
from kvrelay.engine.execution.runner import _graph_spec
from kvrelay.engine.models.spec import ModelSpec
from kvrelay.errors import BackendUnavailable
from kvrelay.kernels.cuda.modules import KernelModule
from kvrelay.kernels.oracle.reference import ReferenceBackend
from kvrelay.types import Role

# -C FOLDER is the module's; a file `fails` or `hangs` there says how it goes
NINJA = """#!/bin/bash
while [ $# -gt 0 ]; do case $1 in -n) plans=1;; -C) cd $2; shift;; -j) jobs=$2; shift;; esac; shift; done
name=$(basename $PWD)
if [ -e $name.so ]; then echo 'ninja: no work to do.'; exit; fi
if [ -n "$plans" ]; then echo '[1/2] nvcc -c a.cu'; echo '[2/2] ld'; exit; fi
echo $jobs > jobs; echo run >> runs
if [ -e hangs ]; then trap 'echo > stopped; exit 2' TERM; echo $$ > pid; while :; do sleep 0.05; done; fi
if [ -e fails ]; then
    printf '[1/2] nvcc -c a.cu\\nFAILED: a.o\\nnvcc -c a.cu\\na.cu(3): error: no such type\\n'; exit 1
fi
echo '[1/2] nvcc -c a.cu'; sleep 0.05; echo '[2/2] ld'; touch $name.so
"""


@pytest.fixture(autouse=True)
def tools(tmp_path, monkeypatch):
    """ninja and nvcc."""
    folder = tmp_path / "cuda" / "bin"
    folder.mkdir(parents=True)
    for name in ("ninja", "nvcc"):
        (folder / name).write_text(NINJA)
        (folder / name).chmod(0o755)
    monkeypatch.setenv("PATH", str(folder), prepend=os.pathsep)
    monkeypatch.setenv("CUDA_HOME", str(folder.parent))
    monkeypatch.setattr(building, "_POLL_S", 0.02)
    monkeypatch.setattr(building, "_link_without_driver", lambda: None)
    return folder


@pytest.fixture
def module(tmp_path):
    def make(name, *marks):
        folder = tmp_path / name
        folder.mkdir()
        for mark in marks:
            (folder / mark).touch()
        spec = SimpleNamespace(
            name=name,
            is_aot=False,
            build_dir=folder,
            ninja_path=folder / "build.ninja",
            lock_path=tmp_path / f"{name}.lock",
            get_library_path=lambda: folder / f"{name}.so",
            write_ninja=lambda: None,
        )
        return KernelModule(f"{name} kernels", spec)

    return make


def wait_until(is_so):
    for _ in range(500):
        if is_so():
            return
        time.sleep(0.02)
    raise AssertionError("not within 10 s")


def wait_for(path):
    wait_until(lambda: path.exists() and path.read_text().strip())
    return path.read_text()


def is_running(pid):
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    return True


def test_what_is_missing_is_compiled_once(module):
    modules, shown = [module("page"), module("rope")], []

    def report(*progress):
        shown.append(progress)

    assert [one.files_to_compile() for one in modules] == [2, 2]
    assert Build(modules, report).run() == {}
    assert shown[-1][:2] == (4, 4) and "2 of 2 modules" in shown[-1][2]
    again = Build(modules, report)
    assert again.num_modules == 0 and again.run() == {} and not any(one.files_to_compile() for one in modules)


def test_a_failed_module_is_named_with_the_compilers_words_and_the_others_go_on(module):
    bad, good = module("bad", "fails"), module("good")
    assert Build([bad, good], print, jobs=1).run() == {"bad": "FAILED: a.o\na.cu(3): error: no such type"}
    assert good.library.exists()


def test_no_more_files_are_compiled_at_a_time_than_allowed(module, tmp_path):
    modules, most = [module(f"m{i}") for i in range(4)], []
    Build(modules, lambda done, of, what: most.append(what.count(" kernels")), jobs=3).run()
    jobs = [int((tmp_path / one.name / "jobs").read_text()) for one in modules]
    assert max(most) == 2 and sum(jobs[:2]) == 3  # two files of one, one of the next


def test_a_module_that_another_process_compiles_is_waited_for(module):
    page, shown = module("page"), []
    lock = FileLock(page.spec.lock_path, thread_local=False)
    lock.acquire()

    def report(done, of, what):
        shown.append(what)
        if "another process" in what and lock.is_locked:
            lock.release()

    assert Build([page], report).run() == {} and page.library.exists()
    assert "another" not in shown[-1] and any("another process compiles page kernels" in one for one in shown)


def test_one_that_does_not_wait_leaves_it_to_the_other(module):
    page = module("page")
    with FileLock(page.spec.lock_path):
        assert Build([page], print, is_late=True).run() == {}
    assert not page.library.exists()


def test_an_interrupt_stops_the_compilers(module, tmp_path):
    page = module("page", "hangs")

    def report(*progress):
        if (tmp_path / "page" / "pid").exists():
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        Build([page], report).run()
    pid = int(wait_for(tmp_path / "page" / "pid"))
    assert (tmp_path / "page" / "stopped").exists()
    assert not is_running(pid)
    with FileLock(page.spec.lock_path, timeout=5):
        pass


def test_the_compilers_end_with_a_process_that_is_killed(module, tmp_path):
    module("page", "hangs")
    code = f"""
from types import SimpleNamespace
from pathlib import Path
from kvrelay.cluster.compiling import kernels as building
from kvrelay.kernels.cuda import modules
folder = Path({str(tmp_path / "page")!r})
spec = SimpleNamespace(name="page", is_aot=False, build_dir=folder, ninja_path=folder / "build.ninja",
    lock_path=folder / "lock", write_ninja=lambda: None)
building._link_without_driver = lambda: None
building.Build([modules.KernelModule("page", spec)], lambda *progress: None).run()
"""
    process = subprocess.Popen([sys.executable, "-c", code])
    pid = int(wait_for(tmp_path / "page" / "pid"))
    process.send_signal(signal.SIGKILL)
    process.wait()
    wait_until(lambda: not is_running(pid))


def test_a_machine_without_a_compiler_says_what_it_lacks(module, tools):
    (tools / "nvcc").unlink()
    failures = Build([module("page")], print).run()
    assert "has no nvcc" in failures["page"] and str(tools) in failures["page"]


def test_a_compiled_library_of_an_installed_flashinfer_needs_no_ninja(module, tools):
    page = module("page")
    page.spec.is_aot = True
    (tools / "ninja").unlink()
    assert page.files_to_compile() == 0


# ---- at a worker's start


@pytest.fixture
def compile_missing(tmp_path, monkeypatch):
    """At the start of a worker whose model needs these modules."""
    folder = tiny_checkpoint("llama", tmp_path / "model")

    def run(modules):
        monkeypatch.setattr(building, "kernel_modules", lambda backend, device, needs: modules)
        building.compile_missing(load_settings(None), Role.PREFILL, folder)

    return run


def test_a_start_compiles_what_steps_need_and_says_so(module, caplog, monkeypatch, compile_missing):
    monkeypatch.setattr(building, "_LOG_EVERY_S", 0.0)
    modules = [module("page"), module("rope")]
    compile_missing(modules)
    assert all(one.library.exists() for one in modules)
    lines = [record.message for record in caplog.records]
    assert "kvrelay prepare" in lines[0] and "page kernels" in lines[0]
    assert any("of 2 modules" in line and "now" in line for line in lines) and "compiled" in lines[-1]
    caplog.clear()
    compile_missing(modules)
    assert not caplog.records


def test_a_module_that_does_not_compile_ends_the_start_unless_workers_do_without_it(module, compile_missing):
    bad = module("bad", "fails")
    with pytest.raises(BackendUnavailable, match=r"bad kernels (.|\n)* no such type"):
        compile_missing([bad])
    compile_missing([replace(bad, is_optional=True)])


def test_what_is_tried_out_only_if_it_is_there_does_not_delay_the_start(module, tmp_path, caplog, compile_missing):
    late = replace(module("fa3", "hangs"), is_late=True)
    compile_missing([late, module("page")])
    assert "fa3 kernels: compiled in the background for the next start" in caplog.text
    pid = int(wait_for(tmp_path / "fa3" / "pid"))
    assert os.getpriority(os.PRIO_PROCESS, pid) == 19 and (tmp_path / "page" / "page.so").exists()
    compile_missing([late])  # as another worker does: it leaves the module to the first
    wait_until(lambda: len(compiling()) == 1)
    os.kill(pid, signal.SIGTERM)
    wait_until(lambda: not compiling())
    assert (tmp_path / "fa3" / "runs").read_text() == "run\n"
    assert "fa3 does not compile, fa2 stays in use" in caplog.text


def compiling():
    return [thread for thread in threading.enumerate() if thread.name == "compile kernels"]


# ---- which models need what, and what the command prints


@pytest.mark.parametrize("family", ["llama", "gemma2", "gemma3", "deepseek_v2"])
def test_needs_are_those_of_the_loaded_model(family, tmp_path):
    folder = tiny_checkpoint(family, tmp_path / family)
    settings = load_settings(None, {"engine": {"block_size": 32, "kv_layout": "HND", "kv_dtype": "float32"}})
    (needs,) = building.needs_of(settings, ModelSpec.from_folder(folder))
    backend = ReferenceBackend("cpu")
    options = {"block_size": 32, "kv_layout": "HND", "kv_dtype": torch.float32}
    model = load_model(folder, backend, torch.bfloat16, **options)
    assert needs.shape == model.attention_shape
    assert needs.variants == _graph_spec(model, max_blocks=1, max_running=1, max_tokens=1).variants


def test_the_command_names_what_does_not_compile(module, tmp_path, capsys):
    bad, good = module("bad", "fails"), module("good")
    assert not prepare.compile_gpu_kernels([bad, good], Console(soft_wrap=True))
    printed = capsys.readouterr().out
    assert "not compiled: bad kernels (bad):" in printed and "a.cu(3): error: no such type" in printed
    assert printed.endswith("0 GPU modules were there, 1 are compiled, 1 failed\n")
    (tmp_path / "bad" / "fails").unlink()
    assert prepare.compile_gpu_kernels([bad, good], Console(soft_wrap=True))
    assert capsys.readouterr().out.endswith("1 GPU modules were there, 1 are compiled, 0 failed\n")
    prepare.copy([bad, good], tmp_path / "out")
    assert sorted(path.name for path in (tmp_path / "out").glob("*/*.so")) == ["bad.so", "good.so"]


def test_without_cuda_the_cpus_kernels_are_compiled_and_the_rest_is_named(tmp_path, capsys, monkeypatch):
    monkeypatch.setenv("FLASHINFER_CUDA_ARCH_LIST", "9.0a")  # to be as it was afterwards
    folder = str(tiny_checkpoint("llama", tmp_path / "model"))
    assert cli.run(["prepare", folder]) == 0
    printed = capsys.readouterr().out
    assert "8 CPU libraries are there" in printed and "GPU kernels are left out: torch" in printed
    assert cli.run(["prepare", folder, "--arch", "9.0a"]) == 1
    assert "cuda is not available here: torch" in capsys.readouterr().err
    assert cli.run(["prepare", folder, "--arch", "hopper"]) == 2
    assert "--arch hopper: a compute capability" in capsys.readouterr().err
