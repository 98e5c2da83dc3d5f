"""Engines over quantised weights: their steps cost what those of plain weights cost."""

from dataclasses import fields, replace

import pytest
import torch

from kvrelay.kernels.common.quant_scheme import Scheme
from kvrelay.kernels.common.stored_weights import Fp8Weight
from kvrelay.kernels.cuda.experts import StoredExperts
from kvrelay.kernels.cuda.quantized import Fp8Linear, Products, StoredLinear, on_device
from kvrelay.kernels.oracle.stored_examples import EXAMPLES
from tests.engine.checkpoints.quantised_folders import FORMATS, fp8_blocks, quantised_folder
from tests.fake_cuda import engines
from tests.fake_cuda.test_steps import measurements, patched, stalls  # noqa: F401

MAKERS = FORMATS | {"fp8 blocks of 128": fp8_blocks(128)}


@pytest.fixture
def stored(measurements, tmp_path):  # noqa: F811
    """A model's folder with its weights in a published format."""

    def without_order(tensors):  # it is compared with the usual one on the device, where no kernel compares
        for name in [name for name in tensors if name.endswith("g_idx")]:
            del tensors[name]

    return lambda model, kind: quantised_folder(
        measurements.folder(model), tmp_path / "made", MAKERS[kind], without_order
    )[0]


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
    ("kind", "product"),
    [
        ("fp8", Fp8Linear),
        ("fp8 channels", Fp8Linear),
        ("fp8 blocks of 128", Fp8Linear),
        ("fp8 blocks", StoredLinear),
        ("int4", StoredLinear),
        ("gptq", StoredLinear),
        ("mxfp4", StoredLinear),
    ],
)
def test_published_weights(stored, kind, product):
    engine = engines.make(stored("narrow llama", kind))
    attentions = [layer.attention for layer in engine.model.layers]
    assert {type(linear) for it in attentions for linear in (it.qkv, it.o)} == {product}
    check(engine, 2)
    engine.close()


@pytest.mark.parametrize("bits", [4, 8])
def test_weights_that_are_quantised_at_load(measurements, bits):  # noqa: F811
    engine = engines.make(measurements.folder("llama"), quantization=Scheme(bits))
    assert all(type(layer.attention.qkv) is StoredLinear for layer in engine.model.layers)
    check(engine, 2)
    engine.close()


@pytest.mark.parametrize("kind", ["fp8 blocks of 128", "int4", "bf16"])
def test_experts(measurements, stored, kind):  # noqa: F811
    model = "narrow qwen3-moe"
    folder = measurements.folder(model) if kind == "bf16" else stored(model, kind)
    engine = engines.make(folder, quantization=Scheme(4) if kind == "bf16" else None)
    assert all(isinstance(layer.mlp.experts, StoredExperts) for layer in engine.model.layers)
    check(engine, 2)
    engine.close()


@pytest.mark.parametrize("kind", EXAMPLES)
def test_a_weight_is_packed_in_little_more_room_than_it_takes(kind):
    """Where weights fill a device, restoring them for their error must not: a copy and a piece are there besides."""
    small = on_device(EXAMPLES[kind](0), torch.device("cuda:0"))
    if isinstance(small, Fp8Weight):
        small = replace(small, scales=small.scales[:1], tile=(1 << 20, small.tile[1]))
    num_rows = (64 << 20) // small.in_features
    tensors = {field.name: getattr(small, field.name) for field in fields(small)}
    large = {
        name: x.repeat(num_rows // len(x) + 1, *(1 for _ in x.shape[1:]))[:num_rows]
        for name, x in tensors.items()
        if isinstance(x, torch.Tensor) and len(x) == small.out_features
    }
    weight = replace(small, **large)
    before = torch.cuda.memory_allocated()
    torch.cuda.reset_peak_memory_stats()
    linear, _ = Products(torch.device("cuda:0")).linear(weight, None, torch.bfloat16)
    taken = torch.cuda.max_memory_allocated() - before
    assert linear.out_features == num_rows
    assert taken < 5 * (64 << 20)
