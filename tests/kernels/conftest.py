"""The CPU backends under test: compiled with one and two threads, and torch alone."""

import pytest

from kvrelay.kernels.cpu.backend import CpuBackend
from kvrelay.kernels.oracle.reference import ReferenceBackend


@pytest.fixture(scope="session")
def torch_only(tmp_path_factory):
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("KVRELAY_NATIVE", "0")
        backend = CpuBackend(1)
    assert backend.describe()["kernels"] == "torch (KVRELAY_NATIVE=0)"
    assert "times (16) slower" in backend.describe()["warning"]
    return backend


@pytest.fixture(scope="session")
def compiled():
    backend = CpuBackend(1)
    if not backend.describe()["kernels"].startswith("native"):
        pytest.skip(f"no compiled kernels here: {backend.describe()['kernels']}")
    return backend


@pytest.fixture(scope="session")
def compiled_2_threads(compiled):
    return CpuBackend(2)


@pytest.fixture(params=["torch_only", "compiled", "compiled_2_threads"])
def cpu(request):
    return request.getfixturevalue(request.param)


@pytest.fixture(scope="session")
def reference():
    return ReferenceBackend("cpu")
