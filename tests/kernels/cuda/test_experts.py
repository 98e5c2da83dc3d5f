"""Experts on a GPU: the arithmetic of indices on any device, the kernels on a GPU."""

import pytest
import torch

from kvrelay.kernels.common.experts import ExpertLoop
from kvrelay.kernels.cuda import experts as cuda_experts
from kvrelay.kernels.cuda.experts import CudaExperts, grouped_product, has_grouped_products, sum_gathered, sum_sorted
from kvrelay.kernels.oracle.reference import ReferenceBackend, ReferenceLinear
from tests.kernels.cpu.test_experts import choices, make_weights, random

REFERENCE = ReferenceBackend("cpu")
BF16 = torch.bfloat16


@pytest.fixture(scope="module", autouse=True)
def one_thread():
    """Idle torch threads that spin take more time than such small products need."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


def gate(x):
    return REFERENCE.gated_activation(x, "silu")


def slow_product(rows, weights, ends):
    """A grouped product, group by group."""
    out, begin = torch.zeros(rows.shape[0], weights.shape[1], dtype=rows.dtype), 0
    for weight, end in zip(weights, ends.tolist(), strict=True):
        out[begin:end] = rows[begin:end] @ weight.T
        begin = end
    assert begin == rows.shape[0]
    return out


def stacked(num_experts, hidden, ffn, dtype):
    gate_ups, downs = zip(*make_weights(num_experts, hidden, ffn, dtype), strict=True)
    return torch.stack(gate_ups), torch.stack(downs)


def loop(gate_up, down):
    pairs = zip(gate_up, down, strict=True)
    return ExpertLoop(((ReferenceLinear(up, None), ReferenceLinear(low, None)) for up, low in pairs), gate)


def crowded(num_tokens, k):
    """Every token on the same experts, which are the last ones."""
    return torch.rand(num_tokens, k), (7 - torch.arange(k)).repeat(num_tokens, 1)


@pytest.mark.parametrize("product", [slow_product, grouped_product])
@pytest.mark.parametrize("num_tokens", [0, 1, 3, 40])
@pytest.mark.parametrize("make", [lambda tokens: choices(tokens, 8, 3), lambda tokens: crowded(tokens, 3)])
def test_sorted_rows_equal_the_loop(product, num_tokens, make):
    gate_up, down = stacked(8, 32, 16, BF16)
    x, (shares, chosen) = random(num_tokens, 32, dtype=BF16), make(num_tokens)
    found = sum_sorted(x, shares, chosen, gate_up, down, gate, product)
    torch.testing.assert_close(found, loop(gate_up, down)(x, shares, chosen), atol=2e-2, rtol=2e-2)


@pytest.mark.parametrize("num_tokens", [0, 1, 5])
def test_gathered_weights_equal_the_loop(num_tokens):
    gate_up, down = stacked(8, 32, 16, torch.float32)
    x, (shares, chosen) = random(num_tokens, 32), choices(num_tokens, 8, 3)
    found = sum_gathered(x, shares, chosen, gate_up, down, gate)
    torch.testing.assert_close(found, loop(gate_up, down)(x, shares, chosen), atol=1e-5, rtol=1e-5)


def test_nothing_of_the_sorted_form_depends_on_data():
    """It runs on tensors without contents: no size is read from a choice."""
    with torch.device("meta"):
        x, gate_up, down = (
            torch.empty(5, 32, dtype=BF16),
            torch.empty(8, 32, 32, dtype=BF16),
            torch.empty(8, 32, 16, dtype=BF16),
        )
        shares, chosen = torch.empty(5, 3), torch.empty(5, 3, dtype=torch.int64)
        found = sum_sorted(x, shares, chosen, gate_up, down, gate, grouped_product)
        assert found.shape == (5, 32)
        with pytest.raises((RuntimeError, NotImplementedError)):  # negative control: the loop must look
            loop(gate_up, down)(x, shares, chosen)


@pytest.mark.parametrize("is_grouped", [True, False])
@pytest.mark.parametrize("num_tokens", [2, 40])  # few rows, and too many to copy weights for
def test_every_path_gives_the_same_result(monkeypatch, is_grouped, num_tokens):
    monkeypatch.setattr(cuda_experts, "has_grouped_products", lambda *found: is_grouped)
    weights = make_weights(8, 32, 16, BF16)
    experts, oracle = CudaExperts(iter(weights), gate, torch.device("cpu")), loop(*zip(*weights, strict=True))
    x, base, logits = (
        random(num_tokens, 32, dtype=BF16),
        random(num_tokens, 32, dtype=BF16, seed=4),
        random(num_tokens, 1),
    )
    shares, chosen = choices(num_tokens, 8, 3)
    for extra in ((), (base,), (base, logits)):
        found = experts(x, shares, chosen, *extra)
        assert found.dtype == BF16
        torch.testing.assert_close(found, oracle(x, shares, chosen, *extra), atol=3e-2, rtol=3e-2)


def test_grouped_products_are_for_what_torch_has_in_one_kernel(monkeypatch):
    capability = [(9, 0)]
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: capability[0])
    gpu = torch.device("cuda", 0)
    assert has_grouped_products(gpu, BF16, 2048, 768)
    assert not has_grouped_products(gpu, torch.float16, 2048, 768)
    assert not has_grouped_products(gpu, BF16, 2048, 764)
    assert not has_grouped_products(torch.device("cpu"), BF16, 2048, 768)
    capability[0] = (8, 6)
    assert not has_grouped_products(gpu, BF16, 2048, 768)


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [BF16, torch.float16, torch.float32])
def test_experts_on_a_gpu_equal_the_reference(dtype):
    weights, device = make_weights(16, 128, 64, dtype), torch.device("cuda")
    experts, oracle = CudaExperts(iter(weights), gate, device), loop(*zip(*weights, strict=True))
    for num_tokens in (1, 4, 100):
        x, (shares, chosen) = random(num_tokens, 128, dtype=dtype), choices(num_tokens, 16, 4)
        found = experts(*(tensor.to(device) for tensor in (x, shares, chosen))).cpu()
        torch.testing.assert_close(found, oracle(x, shares, chosen), atol=2e-2, rtol=2e-2)


@pytest.mark.gpu
def test_grouped_experts_can_be_captured_and_follow_another_choice():
    device = torch.device("cuda")
    weights = make_weights(16, 128, 64, BF16)
    experts, oracle = CudaExperts(iter(weights), gate, device), loop(*zip(*weights, strict=True))
    if not experts.is_grouped:
        pytest.skip("no grouped product on this device")
    x, (shares, chosen) = random(8, 128, dtype=BF16), choices(8, 16, 4)
    inputs = [tensor.to(device) for tensor in (x, shares, chosen)]
    experts(*inputs)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = experts(*inputs)
    for seed in (3, 4):
        changed = (random(8, 128, dtype=BF16, seed=seed), *choices(8, 16, 4, seed=seed))
        for target, source in zip(inputs, changed, strict=True):
            target.copy_(source)
        graph.replay()
        torch.testing.assert_close(out.cpu(), oracle(*changed), atol=2e-2, rtol=2e-2)
