"""Choosing a backend by name: auto takes what works, an explicit choice that cannot run says why."""

import logging
from pathlib import Path

import pytest
import torch

from kvrelay.config import settings_from
from kvrelay.engine.checkpoints.preflight import check_backend
from kvrelay.errors import BackendUnavailable, ConfigError
from kvrelay.kernels import select
from kvrelay.kernels.cpu import backend as cpu_backend
from kvrelay.kernels.cpu.backend import CpuBackend
from kvrelay.kernels.cpu.selfcheck import first_wrong_kernel
from kvrelay.kernels.cuda.backend import CudaBackend
from kvrelay.kernels.select import backend_class, select_backend
from kvrelay.native import build as native_build
from kvrelay.types import Role

NO_GPU = pytest.mark.skipif(torch.cuda.is_available(), reason="a GPU is here")


@NO_GPU
def test_auto_is_the_cpu_without_a_gpu_and_says_so_once(caplog):
    select._log_once.cache_clear()
    with caplog.at_level(logging.INFO, logger="kvrelay.kernels.select"):
        backends = [select_backend("auto", "auto", 1), select_backend("auto", "cpu", 1)]
    assert {b.name for b in backends} == {"cpu"}
    said = [record.message for record in caplog.records if record.name == select.logger.name]
    assert len(said) == 1 and "no CUDA device" in said[0]


@NO_GPU
@pytest.mark.parametrize(("name", "device"), [("cuda", "auto"), ("auto", "cuda"), ("auto", "cuda:1")])
def test_a_gpu_that_is_not_there_is_refused(name, device):
    with pytest.raises(BackendUnavailable, match="no CUDA device"):
        select_backend(name, device)


def test_unknown_names_and_unknown_devices_of_a_backend_are_refused():
    with pytest.raises(BackendUnavailable, match="the backends are"):
        select_backend("tpu")
    with pytest.raises(BackendUnavailable, match="does not run on cuda"):
        select_backend("cpu", "cuda:0")


def test_the_reference_runs_on_the_given_device():
    assert select_backend("reference", "auto").device == torch.device("cpu")


@NO_GPU
def test_the_caches_that_a_backend_takes_are_known_before_it_is_made():
    assert backend_class("reference").kv_layouts == ("NHD", "HND")
    assert backend_class("auto") is backend_class("cpu") is CpuBackend and CpuBackend.kv_layouts == ("NHD",)
    with pytest.raises(BackendUnavailable, match="no CUDA device"):
        backend_class("cuda")


def test_a_role_whose_backend_cannot_read_its_kv_layout_is_reported_with_the_key():
    settings = settings_from({"decode": {"kv_layout": "HND"}})
    check_backend(CpuBackend, settings, Role.PREFILL)
    check_backend(CudaBackend, settings, Role.DECODE)
    with pytest.raises(ConfigError, match=r"decode\.kv_layout: the cpu backend takes NHD, not HND"):
        check_backend(CpuBackend, settings, Role.DECODE)


def test_without_a_compiler_torch_takes_over_with_one_line(monkeypatch, caplog):
    def refuse(*_):
        raise BackendUnavailable("kernels", "no C compiler")

    monkeypatch.setattr(native_build, "load_native", refuse)
    cpu_backend._warn_slow.cache_clear()
    with caplog.at_level(logging.WARNING):
        backends = [CpuBackend(1), CpuBackend(1)]
    assert {backend.describe()["kernels"] for backend in backends} == {"torch (no C compiler)"}
    assert len(caplog.messages) == 1


def test_a_wrong_compiled_kernel_is_found(compiled, monkeypatch):
    assert first_wrong_kernel(compiled) is None
    monkeypatch.setattr(compiled, "gated_activation", lambda gate_up, kind: gate_up[:, : gate_up.shape[1] // 2])
    assert first_wrong_kernel(compiled) == "activation"


def test_without_amx_tiles_the_compiled_kernels_are_right_too(compiled):
    native = compiled.compiled_kernels
    had_tiles = native.has_tiles
    native.without_tiles()
    try:
        assert first_wrong_kernel(compiled) is None and compiled.describe()["amx"] == "no"
    finally:
        native.has_tiles = bool(native.lib.kr_use_tiles(had_tiles))
    assert native.has_tiles == had_tiles


def test_a_wrong_compiled_kernel_is_not_used(compiled, monkeypatch):
    monkeypatch.setattr("kvrelay.kernels.cpu.backend.first_wrong_kernel", lambda backend: "attention")
    assert "wrong results" in CpuBackend(1).describe()["kernels"]


CPUINFO = Path("/proc/cpuinfo")


@pytest.mark.skipif(not CPUINFO.exists() or "amx_bf16" not in CPUINFO.read_text(), reason="needs AMX")
def test_a_processor_with_amx_uses_it():
    """A kernel that the check at start finds wrong is switched off: the other tests would pass without it."""
    assert CpuBackend(1).describe()["amx"] == "yes"
