"""bf16 logits become float32 exactly, in every backend, without torch's threads."""

import pytest
import torch

from kvrelay.kernels.cpu.backend import CpuBackend
from kvrelay.kernels.cpu.selfcheck import first_wrong_kernel
from kvrelay.kernels.oracle.reference import ReferenceBackend


def all_bf16():
    """Every number there is, NaN, infinities and subnormals included."""
    return torch.arange(-(1 << 15), 1 << 15, dtype=torch.int32).to(torch.int16).view(torch.bfloat16)


@pytest.mark.parametrize("count", [0, 1, 7, 33, 16384, 65536])
@pytest.mark.parametrize("threads", [1, 2])
def test_every_number_is_widened_bit_for_bit(count, threads):
    x = all_bf16()[:count].view(1, count)
    expected = x.float()
    for backend in (CpuBackend(threads), ReferenceBackend("cpu")):
        found = backend.widened(x)
        assert found.dtype == torch.float32 and found.shape == x.shape
        assert torch.equal(found.view(torch.int32), expected.view(torch.int32))


def test_what_is_not_contiguous_bf16_goes_to_torch():
    backend = CpuBackend(1)
    x = torch.randn(6, 4).to(torch.bfloat16).t()
    assert torch.equal(backend.widened(x), x.float())
    wide = torch.randn(3, 3)
    assert torch.equal(backend.widened(wide), wide)


def test_a_kernel_that_widens_wrongly_is_found(monkeypatch):
    backend = CpuBackend(1)
    if backend.compiled_kernels is None:
        pytest.skip("no compiled kernels")
    assert first_wrong_kernel(backend) is None
    monkeypatch.setattr(CpuBackend, "widened", lambda self, x: x.float() + 1e-3)
    assert first_wrong_kernel(backend) == "widening"
