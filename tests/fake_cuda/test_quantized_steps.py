"""Engines over quantised weights: their steps cost what those of plain weights cost."""

import pytest
import torch

from kvrelay.kernels.common.quant_scheme import Scheme
from kvrelay.kernels.common.stored_weights import Fp8Weight
from kvrelay.kernels.cuda.backend import CudaBackend
from kvrelay.kernels.cuda.experts import StoredExperts
from kvrelay.kernels.cuda.quantized import Fp8Linear, StoredLinear
from tests.fake_cuda import engines
from tests.fake_cuda.test_steps import measurements, patched, stalls  # noqa: F401

BF16 = torch.bfloat16


def as_fp8(weight, tile):
    rows, columns = (min(*pair) for pair in zip(tile, weight.shape, strict=True))
    shape = (-(-weight.shape[0] // rows), -(-weight.shape[1] // columns))
    return Fp8Weight(weight.to(torch.float8_e4m3fn), torch.ones(shape, device=weight.device), (rows, columns))


def store_fp8(monkeypatch, tile):
    """Loading takes every bfloat16 weight for an fp8 one."""
    plain, experts = CudaBackend.pack_linear, CudaBackend.pack_experts

    def pack_linear(self, weight, bias=None):
        if weight.dtype != BF16:
            return plain(self, weight, bias)
        return self.pack_stored(as_fp8(weight, tile), bias, BF16)[0]

    def pack_experts(self, pairs, *args):
        return experts(self, (tuple(as_fp8(weight, tile) for weight in pair) for pair in pairs), *args)

    monkeypatch.setattr(CudaBackend, "pack_linear", pack_linear)
    monkeypatch.setattr(CudaBackend, "pack_experts", pack_experts)


def check(engine, num_layers):
    """Decode steps are one graph and one wait; steps with prompts one wait and a graph more than layers."""
    with engines.decoding(engine, 4) as step:
        for counts in engines.counts_of(step):
            assert stalls(counts) == {} and counts["event_waits"] == 1 and counts["graph_launches"] == 1
        engines.add_prompt(engine, 700)
        for counts in engines.counts_of(step):
            assert stalls(counts) == {} and counts.get("event_waits", 0) <= 1
            assert counts["graph_launches"] == num_layers + 1


@pytest.mark.parametrize(
    ("tile", "kind"),
    [((1 << 20, 1 << 20), Fp8Linear), ((1, 1 << 20), Fp8Linear), ((128, 128), Fp8Linear), ((64, 64), StoredLinear)],
)
def test_fp8_weights(measurements, monkeypatch, tile, kind):  # noqa: F811
    store_fp8(monkeypatch, tile)
    engine = engines.make(measurements.folder("llama"))
    assert all(type(layer.attention.qkv) is kind for layer in engine.model.layers)
    check(engine, 2)
    engine.close()


@pytest.mark.parametrize("bits", [4, 8])
def test_weights_that_are_quantised_at_load(measurements, bits):  # noqa: F811
    engine = engines.make(measurements.folder("llama"), quantization=Scheme(bits))
    assert all(type(layer.attention.qkv) is StoredLinear for layer in engine.model.layers)
    check(engine, 2)
    engine.close()


@pytest.mark.parametrize("scheme", [None, Scheme(4)])
def test_experts(measurements, monkeypatch, scheme):  # noqa: F811
    if scheme is None:
        store_fp8(monkeypatch, (128, 128))
    engine = engines.make(measurements.folder("qwen3-moe"), quantization=scheme)
    assert all(isinstance(layer.mlp.experts, StoredExperts) for layer in engine.model.layers)
    check(engine, 2)
    engine.close()
