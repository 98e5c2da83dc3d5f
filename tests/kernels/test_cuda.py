"""The CUDA backend against the reference, on a GPU; its pure parts anywhere."""

import dataclasses

import pytest
import torch

from kvrelay.errors import BackendUnavailable
from kvrelay.kernels.backend import AttentionBatch, SamplingBatch
from kvrelay.kernels.cuda import CudaBackend, paged_index
from kvrelay.kernels.cuda_graphs import DecodeGraphs, padded
from kvrelay.kernels.select import why_no_cuda
from tests.kernels.kernel_cases import Case, Step, make_step, run_attention

HALF = [torch.float16, torch.bfloat16]


@pytest.fixture(scope="module")
def cuda():
    if (why := why_no_cuda()) is not None:
        pytest.skip(why)
    return CudaBackend("cuda")


def on_gpu(step: Step) -> Step:
    return dataclasses.replace(step, q=step.q.cuda(), kv_layer=step.kv_layer.nan_to_num(0).cuda())


def random(*shape, dtype, seed=0):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed)).to(dtype)


def test_without_a_device_the_backend_says_why():
    if torch.cuda.is_available():
        pytest.skip("there is one")
    with pytest.raises(BackendUnavailable, match="no CUDA device"):
        CudaBackend("cuda")


def test_block_tables_flatten_to_the_blocks_in_use():
    index = paged_index(
        torch.tensor([1, 16, 17], dtype=torch.int32), torch.tensor([[5, 0], [7, 0], [2, 9]], dtype=torch.int32), 16
    )
    assert index.indptr.tolist() == [0, 1, 2, 4]
    assert index.indices.tolist() == [5, 7, 2, 9]
    assert index.last_page_len.tolist() == [1, 16, 1]


def test_a_decode_batch_is_padded_with_its_first_row():
    step = make_step(Case(((1, 5), (1, 20))))
    ids, batch = padded(torch.tensor([11, 12]), step.batch, 4)
    assert ids.tolist() == [11, 12, 11, 11]
    assert batch.context_lens.tolist() == [5, 20, 5, 5]
    assert batch.slot_mapping[2] == batch.slot_mapping[0] and batch.num_decode == 4
    assert batch.query_starts.tolist() == [0, 1, 2, 3, 4]


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", HALF)
@pytest.mark.parametrize("head_dim", [64, 128, 256])
@pytest.mark.parametrize("heads", [(6, 2), (4, 4), (8, 1), (9, 3)])
@pytest.mark.parametrize("window_softcap", [(None, None), (20, None), (None, 5.0), (33, 20.0)])
@pytest.mark.parametrize("block_size", [1, 16, 32])
def test_attention_equals_the_reference(cuda, reference, dtype, head_dim, heads, window_softcap, block_size):
    case = Case(
        ((1, 33), (1, 700), (1, 1), (5, 5), (16, 48), (17, 49), (40, 300)), *heads, head_dim, block_size, dtype,
        *window_softcap,
    )  # fmt: skip
    step = make_step(case)
    found = run_attention(cuda, on_gpu(step)).cpu()
    torch.testing.assert_close(found, run_attention(reference, step), atol=2e-2, rtol=2e-2)


@pytest.mark.gpu
@pytest.mark.parametrize("case", [Case(((1, 33), (9, 20)), head_dim=80), Case(((1, 33), (9, 20)))])
def test_shapes_that_flashinfer_lacks_go_through_torch(cuda, reference, case):
    step = make_step(case)
    found = run_attention(cuda, on_gpu(step)).cpu()
    torch.testing.assert_close(found, run_attention(reference, step), atol=1e-3, rtol=1e-3)


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [*HALF, torch.float32])
def test_elementwise_kernels_equal_the_reference(cuda, reference, dtype):
    fused, weight = random(7, 15 * 64, dtype=dtype), random(64, dtype=dtype, seed=1)
    heads = fused[:, 9 * 64 : 12 * 64].unflatten(1, (3, 64))
    near = {"atol": 2e-2, "rtol": 2e-2}
    for w in (weight, weight.float()):
        found = cuda.rms_norm(heads.cuda(), w.cuda(), 1e-5).cpu()
        torch.testing.assert_close(found, reference.rms_norm(heads, w, 1e-5), **near)
    x, residual = random(7, 64, dtype=dtype, seed=2), random(7, 64, dtype=dtype, seed=3)
    found, total = cuda.add_rms_norm(x.cuda(), residual.cuda(), weight.cuda(), 1e-5)
    expected, expected_total = reference.add_rms_norm(x, residual, weight, 1e-5)
    torch.testing.assert_close(found.cpu(), expected, **near)
    torch.testing.assert_close(total.cpu(), expected_total, **near)
    for kind in ("silu", "gelu_tanh"):
        found = cuda.gated_activation(fused.cuda(), kind).cpu()
        torch.testing.assert_close(found, reference.gated_activation(fused, kind), **near)
    table, positions = torch.rand(50, 64), torch.tensor([0, 3, 49, 3, 1, 2, 9])
    q = fused[:, : 9 * 64].unflatten(1, (9, 64))
    found = cuda.rope(q.cuda(), heads.cuda(), table.cuda(), positions)
    for a, b in zip(found, reference.rope(q, heads, table, positions), strict=True):
        torch.testing.assert_close(a.cpu(), b, **near)


@pytest.mark.gpu
@pytest.mark.parametrize("planned", [False, True])
def test_store_kv_writes_its_slots(cuda, planned):
    step = make_step(Case(((1, 33), (9, 20)), dtype=torch.bfloat16))
    k, v = random(10, 2, 64, dtype=torch.bfloat16), random(10, 2, 64, dtype=torch.bfloat16, seed=1)
    cache = torch.zeros_like(step.kv_layer).cuda()
    slots = step.batch.slot_mapping
    if planned:
        cuda.plan(step.batch, step.case.shape)
    cuda.store_kv(k.cuda(), v.cuda(), cache, slots if planned else slots.clone())
    assert torch.equal(cache.cpu()[slots // 16, 0, slots % 16], k)
    assert torch.equal(cache.cpu()[slots // 16, 1, slots % 16], v)


@pytest.mark.gpu
@pytest.mark.parametrize("filters", [(0, 1.0, 0.0), (50, 1.0, 0.0), (0, 0.9, 0.0), (200, 0.95, 0.02)])
def test_sampling_equals_the_reference(cuda, reference, filters):
    generator = torch.Generator().manual_seed(8)
    logits, uniform = 4 * torch.randn(24, 5000, generator=generator), torch.rand(24, generator=generator)
    top_k, top_p, min_p = filters
    batch = SamplingBatch(
        torch.tensor([0.0, 0.8] * 12), torch.full((24,), top_k), torch.full((24,), top_p), torch.full((24,), min_p),
        uniform.double(),
    )  # fmt: skip
    assert torch.equal(cuda.sample(logits.cuda(), batch), reference.sample(logits, batch))


@pytest.mark.gpu
def test_a_replayed_decode_graph_equals_running_the_step(cuda, reference):
    case = Case(((1, 33), (1, 60), (1, 5)), dtype=torch.bfloat16)
    graphs = DecodeGraphs(cuda, case.shape, max_blocks=64, sizes=(4,))
    table = random(100, 6 * 64, dtype=torch.bfloat16).cuda()
    cache = on_gpu(make_step(case)).kv_layer

    def forward(token_ids: torch.Tensor, batch: AttentionBatch, plan: object) -> torch.Tensor:
        q = table[token_ids].unflatten(1, (6, 64))
        first = cuda.attention(q, cache, plan, scale=0.125, window=None, softcap=None)
        return cuda.attention(first, cache, plan, scale=0.125, window=20, softcap=None)

    for seed, ids in ((0, [3, 4, 5]), (1, [6, 7, 8]), (2, [9, 1, 2])):
        step = make_step(case, seed)
        cache.copy_(on_gpu(step).kv_layer)
        token_ids = torch.tensor(ids)
        found = graphs.run(token_ids, step.batch, forward).clone()
        expected = forward(token_ids.cuda(), step.batch, cuda.plan(step.batch, case.shape))
        torch.testing.assert_close(found, expected, atol=1e-2, rtol=1e-2)
