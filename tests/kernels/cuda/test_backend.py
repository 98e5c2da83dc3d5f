"""The CUDA backend against the reference, on a GPU; anywhere, its own logic over a fake GPU with a fake FlashInfer."""

# ruff: noqa: F811

import dataclasses
from types import SimpleNamespace

import pytest
import torch

from kvrelay.engine.checkpoints.loading import load_model
from kvrelay.engine.checkpoints.tiny import TINY_CONFIGS, tiny_checkpoint
from kvrelay.errors import BackendUnavailable
from kvrelay.kernels.backend import AttentionShape, SamplingBatch
from kvrelay.kernels.cuda.cuda_graphs import CudaGraphs, ladder, padded
from kvrelay.kernels.cuda.graph_pieces import CapturingCudaBackend
from kvrelay.kernels.cuda.plan import has_append, has_attention, paged_index
from kvrelay.kernels.oracle.grid_steps import laid_out
from kvrelay.kernels.oracle.reference import ReferenceBackend
from kvrelay.kernels.select import why_no_cuda
from tests.kernels.cpu.test_token_masks import masked, one_or_more
from tests.kernels.cuda.fake_gpu import HALF, OnHost, fake_gpu, on_host  # noqa: F401
from tests.kernels.oracle.kernel_cases import KernelCase, KernelStep, make_step, run_attention


@pytest.fixture(scope="module")
def cuda():
    if (why := why_no_cuda()) is not None:
        pytest.skip(why)
    return CapturingCudaBackend("cuda")


def on_gpu(step: KernelStep) -> KernelStep:
    return dataclasses.replace(step, kv_layer=step.kv_layer.nan_to_num(0)).to("cuda")


def random(*shape, dtype, seed=0):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed)).to(dtype)


def test_without_a_device_the_backend_says_why():
    if torch.cuda.is_available():
        pytest.skip("there is one")
    with pytest.raises(BackendUnavailable, match="no CUDA device"):
        CapturingCudaBackend("cuda")


def test_norms_that_flashinfer_cannot_build_run_in_torch_and_refuse_no_gpu(fake_gpu, reference, caplog, monkeypatch):
    """They need cublasLt.h. Built after what no model goes without, and once."""
    built = []

    def fails(*args, **kwargs):
        built.append("norms")
        raise RuntimeError("cublasLt.h: No such file or directory")

    activation = fake_gpu.gpu.silu_and_mul
    monkeypatch.setattr(fake_gpu.gpu, "silu_and_mul", lambda x: built.append("activation") or activation(x))
    monkeypatch.setattr(fake_gpu.gpu, "rmsnorm", fails)
    monkeypatch.setattr(fake_gpu.gpu, "fused_add_rmsnorm", fails)
    backend = CapturingCudaBackend("cpu:0")
    assert built == ["activation", "norms"] and caplog.text.count("norms run in torch, slower") == 1
    x, residual, weight = (random(*shape, dtype=torch.bfloat16, seed=2) for shape in ((7, 64), (7, 64), (64,)))
    expected = reference.rms_norm(x, weight, 1e-5), *reference.add_rms_norm(x, residual, weight, 1e-5)
    found = backend.rms_norm(x, weight, 1e-5), *backend.add_rms_norm(x.clone(), residual.clone(), weight, 1e-5)
    assert all(torch.equal(a, b) for a, b in zip(found, expected, strict=True)) and len(built) == 2


def test_block_tables_flatten_to_the_blocks_in_use():
    index = paged_index(
        torch.tensor([1, 16, 17], dtype=torch.int32), torch.tensor([[5, 0], [7, 0], [2, 9]], dtype=torch.int32), 16
    )
    assert index.indptr.tolist() == [0, 1, 2, 4]
    assert index.indices.tolist() == [5, 7, 2, 9]
    assert index.last_page_len.tolist() == [1, 16, 1]


def test_a_decode_batch_is_padded_with_its_shortest_row():
    step = make_step(KernelCase(((1, 20), (1, 5))))
    batch, repeated = padded(step.batch, 4)
    assert repeated == 1 and batch.context_lens.tolist() == [20, 5, 5, 5]
    assert batch.slot_mapping[2:].tolist() == [batch.slot_mapping[1]] * 2 and batch.num_decode == 4
    assert batch.query_starts.tolist() == [0, 1, 2, 3, 4]


@pytest.mark.parametrize("most", [1, 3, 64, 100, 256, 1000])
def test_the_ladder_ends_at_the_largest_batch_and_pads_little(most):
    sizes = ladder(most)
    assert list(sizes) == sorted(set(sizes)) and sizes[-1] == most
    for rows in range(1, most + 1):
        assert next(size for size in sizes if size >= rows) - rows < max(8, rows / 4)


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", HALF)
@pytest.mark.parametrize("head_dim", [64, 128, 256])
@pytest.mark.parametrize("heads", [(6, 2), (4, 4), (8, 1), (9, 3)])
@pytest.mark.parametrize("window_softcap", [(None, None), (20, None), (None, 5.0), (33, 20.0)])
@pytest.mark.parametrize("block_size", [1, 16, 32])
def test_attention_equals_the_reference(cuda, reference, dtype, head_dim, heads, window_softcap, block_size):
    case = KernelCase(
        ((1, 33), (1, 700), (1, 1), (5, 5), (16, 48), (17, 49), (40, 300)),
        *heads,
        head_dim,
        block_size,
        dtype,
        *window_softcap,
    )
    step = make_step(case)
    found = run_attention(cuda, on_gpu(step)).cpu()
    torch.testing.assert_close(found, run_attention(reference, step), atol=2e-2, rtol=2e-2)


@pytest.mark.gpu
@pytest.mark.parametrize("case", [KernelCase(((1, 33), (9, 20)), head_dim=80), KernelCase(((1, 33), (9, 20)))])
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


def test_no_rows_launch_nothing(fake_gpu):
    """The fake refuses them, as CUDA does: FlashInfer launches a block for each row."""
    x, weight = torch.empty(0, 128, dtype=torch.bfloat16), torch.ones(128, dtype=torch.bfloat16)
    heads, table = x.view(0, 2, 64), torch.rand(8, 64)
    assert fake_gpu.rms_norm(x, weight, 1e-5).shape == (0, 128)
    assert [one.shape for one in fake_gpu.add_rms_norm(x, x.clone(), weight, 1e-5)] == [(0, 128)] * 2
    assert fake_gpu.gated_activation(x, "silu").shape == fake_gpu.gated_activation(x, "gelu_tanh").shape == (0, 64)
    assert [one.shape for one in fake_gpu.rope(heads, heads.clone(), table, torch.empty(0).long())] == [(0, 2, 64)] * 2


def check_store_kv(backend, planned, dtype, wrap=lambda batch: batch, kv_layout="NHD"):
    step = make_step(KernelCase(((1, 33), (9, 20)), dtype=dtype))
    fused, device = random(10, 6, 64, dtype=dtype), backend.device
    k, v = fused[:, 2:4], fused[:, 4:]  # strided, as the model's are
    cache = laid_out(torch.zeros_like(step.kv_layer).to(device), kv_layout)
    batch, slots = wrap(step.batch), step.batch.slot_mapping
    if planned:
        backend.plan(batch, step.case.shape)
    backend.store_kv(k.to(device), v.to(device), cache, batch.slot_mapping if planned else slots.clone())
    expected = torch.zeros_like(step.kv_layer)
    expected[slots // 16, 0, slots % 16], expected[slots // 16, 1, slots % 16] = k, v
    assert torch.equal(cache.cpu(), expected)


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [*HALF, torch.float32])
@pytest.mark.parametrize("planned", [False, True])
@pytest.mark.parametrize("kv_layout", ["NHD", "HND"])
def test_store_kv_writes_its_slots(cuda, planned, dtype, kv_layout):
    check_store_kv(cuda, planned, dtype, kv_layout=kv_layout)


@pytest.mark.gpu
@pytest.mark.parametrize("filters", [(0, 1.0, 0.0), (50, 1.0, 0.0), (0, 0.9, 0.0), (200, 0.95, 0.02)])
def test_sampling_equals_the_reference(cuda, reference, filters):
    generator = torch.Generator().manual_seed(8)
    logits, uniform = 4 * torch.randn(24, 5000, generator=generator), torch.rand(24, generator=generator)
    top_k, top_p, min_p = filters
    batch = SamplingBatch(
        torch.tensor([0.0, 0.8] * 12),
        torch.full((24,), top_k),
        torch.full((24,), top_p),
        torch.full((24,), min_p),
        uniform.double(),
    )
    assert torch.equal(cuda.sample(logits.cuda(), batch), reference.sample(logits, batch))
    for share in (1e-3, 0.5):
        rows = [*range(11), -1] * 2
        constrained = masked(batch, one_or_more(generator, 11, 5000, share), rows)
        assert torch.equal(cuda.sample(logits.cuda(), constrained), reference.sample(logits, constrained))


def test_masks_hold_where_torch_draws(fake_gpu, reference):
    """Triton's kernels: test_sampling_triton.py."""
    backend, generator = CapturingCudaBackend("cpu:0"), torch.Generator().manual_seed(2)
    logits, settings = torch.randn(6, 333, generator=generator), torch.tensor([0.0, 0.8] * 3)
    batch = SamplingBatch(settings, torch.full((6,), 40), torch.full((6,), 0.9), torch.zeros(6), settings.double())
    batch = masked(batch, one_or_more(generator, 2, 333, 0.05), [0, 1, -1, 0, 1, -1])
    assert torch.equal(backend.sample(logits, batch), reference.sample(logits, batch))


@pytest.mark.gpu
@pytest.mark.parametrize("kv_layout", ["NHD", "HND"])
def test_a_replayed_step_of_a_real_model_equals_the_step(cuda, folder, kv_layout):
    with torch.inference_mode():
        assert_graphs_equal_steps(Decoder(cuda, folder, kv_layout=kv_layout))


@pytest.mark.gpu
@pytest.mark.parametrize("kv_layout", ["NHD", "HND"])
def test_a_mixed_step_of_a_real_model_equals_the_reference(cuda, reference, folder, kv_layout):
    found, expected = Decoder(cuda, folder, kv_layout=kv_layout), Decoder(reference, folder)
    token_ids, batch = found.step(((1, 33), (1, 60), (5, 5), (17, 40)), 1)
    near = {"atol": 1e-1, "rtol": 5e-2}  # bfloat16 through four layers
    with torch.inference_mode():  # as other tests of this backend: what FlashInfer plans into stays of one mode
        torch.testing.assert_close(found.plain(token_ids, batch).cpu(), expected.plain(token_ids, batch), **near)
    torch.testing.assert_close(found.kv.cpu(), expected.kv, **near)


@pytest.fixture(params=["llama", "qwen3", "gemma2"])
def folder(request, tmp_path, monkeypatch):
    """A tiny checkpoint whose heads are of a size that FlashInfer has."""
    monkeypatch.setitem(TINY_CONFIGS, request.param, TINY_CONFIGS[request.param] | {"head_dim": 64})
    return tiny_checkpoint(request.param, tmp_path)


class Decoder:
    """A model over a cache of random keys and values: 64 blocks of 16."""

    def __init__(self, backend, folder, dtype=torch.bfloat16, kv_layout="NHD"):
        self.backend = backend
        backend._graph_pool = None  # torch does not revive a pool whose graphs are gone, as those of other tests are
        self.model = load_model(folder, backend, dtype, block_size=16, kv_layout=kv_layout)
        self.shape, self.generator = self.model.attention_shape, torch.Generator().manual_seed(3)
        num_parts = 2 if self.shape.latent_dim is None else 1
        sizes = (64, self.model.spec.num_layers, num_parts, 16, self.shape.num_kv_heads, self.shape.head_dim)
        self.kv = torch.randn(*sizes, generator=self.generator).to(dtype).to(backend.device)
        if kv_layout == "HND":
            self.kv = self.kv.transpose(3, 4).contiguous().transpose(3, 4)

    def step(self, sequences, seed):
        """(token ids, batch) of these (new tokens, context) pairs."""
        batch = make_step(KernelCase(sequences, dtype=self.shape.dtype), seed).batch
        num_tokens = int(batch.query_starts[-1])
        return torch.randint(3, self.model.spec.vocab_size, (num_tokens,), generator=self.generator), batch

    def forward(self, token_ids, batch, plan):
        return self.model.forward(token_ids, batch, plan, list(self.kv.unbind(1)))

    def plain(self, token_ids, batch):
        return self.forward(token_ids.to(self.backend.device), batch, self.backend.plan(batch, self.shape))


def assert_graphs_equal_steps(decoder, wrap=lambda batch: batch):
    """Steps of changing sizes, contexts and blocks through two graphs: hidden states and caches as without."""
    graphs = CudaGraphs(decoder.backend, decoder.shape, max_blocks=8, sizes=(2, 4))
    near = {"atol": 3e-2, "rtol": 3e-2}
    for seed, contexts in enumerate(((33, 60, 5), (6, 61, 34), (80,), (1, 17), (16, 1, 90, 2), (12,))):
        token_ids, batch = decoder.step(tuple((1, context) for context in contexts), seed)
        batch, before = wrap(batch), decoder.kv.clone()
        plain, cache = decoder.plain(token_ids, batch).clone(), decoder.kv.clone()
        decoder.kv.copy_(before)
        assert graphs.fits(batch)
        replayed = graphs.run(token_ids.to(decoder.backend.device), batch, decoder.forward)
        torch.testing.assert_close(replayed, plain, **near)
        torch.testing.assert_close(decoder.kv, cache, **near)


@pytest.mark.parametrize("kv_layout", ["NHD", "HND"])
def test_a_replayed_step_of_a_real_model_equals_the_step_on_a_fake_gpu(fake_gpu, folder, kv_layout):
    assert_graphs_equal_steps(Decoder(fake_gpu, folder, kv_layout=kv_layout), on_host)
    assert fake_gpu.gpu.num_captures == 2  # one for each size


def test_sizes_captured_before_the_first_request_replay_as_well(fake_gpu, folder, caplog):
    decoder = Decoder(fake_gpu, folder)
    graphs = CudaGraphs(fake_gpu, decoder.shape, max_blocks=8, sizes=(2, 4))
    with caplog.at_level("INFO"):
        graphs.warm_up(decoder.forward)
    assert fake_gpu.gpu.num_captures == 2 and "decode steps are captured in 2 sizes" in caplog.text
    for seed, contexts in enumerate(((33, 60, 5), (6,), (80, 1, 2, 3))):
        token_ids, batch = decoder.step(tuple((1, context) for context in contexts), seed)
        before = decoder.kv.clone()
        plain, cache = decoder.plain(token_ids, batch).clone(), decoder.kv.clone()
        decoder.kv.copy_(before)
        torch.testing.assert_close(graphs.run(token_ids, batch, decoder.forward), plain, atol=3e-2, rtol=3e-2)
        torch.testing.assert_close(decoder.kv, cache, atol=3e-2, rtol=3e-2)
    assert fake_gpu.gpu.num_captures == 2


def test_a_forward_that_copies_metadata_by_itself_cannot_be_captured(fake_gpu, folder):
    decoder = Decoder(fake_gpu, folder)
    token_ids, batch = decoder.step(((1, 33), (1, 5)), 0)
    forward = decoder.forward

    def copying(token_ids, batch, plan):
        return forward(token_ids, dataclasses.replace(batch, positions=batch.positions.to(fake_gpu.device)), plan)

    graphs = CudaGraphs(fake_gpu, decoder.shape, max_blocks=8)
    with pytest.raises(RuntimeError, match="touches host memory in a capture"):
        graphs.run(token_ids, on_host(batch), copying)


@pytest.mark.parametrize("kv_layout", ["NHD", "HND"])
def test_a_mixed_step_of_a_real_model_equals_the_reference_on_a_fake_gpu(fake_gpu, reference, folder, kv_layout):
    for dtype in (torch.bfloat16, torch.float32):  # float32 goes through torch
        found, expected = Decoder(fake_gpu, folder, dtype, kv_layout), Decoder(reference, folder, dtype)
        token_ids, batch = found.step(((1, 33), (1, 60), (5, 5), (17, 40)), 1)
        near = {"atol": 3e-2, "rtol": 3e-2} if dtype == torch.bfloat16 else {"atol": 1e-4, "rtol": 1e-4}
        torch.testing.assert_close(found.plain(token_ids, on_host(batch)), expected.plain(token_ids, batch), **near)
        torch.testing.assert_close(found.kv, expected.kv, **near)


LATENT_SIZES = {"kv_lora_rank": 128, "qk_rope_head_dim": 64, "head_dim": 64}


@pytest.fixture(params=["deepseek_v2", "deepseek_v3"])
def latent_folder(request, tmp_path, monkeypatch):
    monkeypatch.setitem(TINY_CONFIGS, request.param, TINY_CONFIGS[request.param] | LATENT_SIZES)
    return tiny_checkpoint(request.param, tmp_path)


def check_latent_step(backend, reference, folder, wrap=lambda batch: batch):
    """A mixed step of a model with latent attention, hidden states and caches. Its experts may differ in bfloat16."""
    for dtype in (torch.bfloat16, torch.float32):  # float32 goes through torch
        found, expected = Decoder(backend, folder, dtype), Decoder(reference, folder, dtype)
        token_ids, batch = found.step(((1, 33), (1, 60), (5, 5), (17, 40)), 1)
        got = found.plain(token_ids, wrap(batch)).cpu().float()
        want = expected.plain(token_ids, batch).float()
        likeness = torch.nn.functional.cosine_similarity(got, want, dim=-1)
        assert likeness.median() > (0.99 if dtype == torch.bfloat16 else 0.99999)
        stored, right = found.kv[:, :2].cpu().float(), expected.kv[:, :2].float()
        if dtype == torch.bfloat16:  # single numbers of the second layer may be two roundings off
            assert (stored - right).norm() < 1e-2 * right.norm()
            torch.testing.assert_close(stored, right, atol=0.1, rtol=3e-2)
        else:
            torch.testing.assert_close(stored, right, atol=1e-4, rtol=1e-4)


def test_a_step_with_latent_attention_equals_the_reference_on_a_fake_gpu(fake_gpu, reference, latent_folder):
    check_latent_step(fake_gpu, reference, latent_folder, on_host)
    assert fake_gpu.gpu.latent_plans == 1  # a step, not a layer; none in float32


@pytest.fixture(params=[128, 512])
def dense_latent_folder(request, tmp_path, monkeypatch):
    """All of its layers are dense: experts that rounding decides would hide differences. FlashInfer appends latents of
    512.
    """
    sizes = LATENT_SIZES | {"kv_lora_rank": request.param, "first_k_dense_replace": 4}
    monkeypatch.setitem(TINY_CONFIGS, "deepseek_v3", TINY_CONFIGS["deepseek_v3"] | sizes)
    return tiny_checkpoint("deepseek_v3", tmp_path)


def test_a_replayed_step_with_latent_attention_equals_the_step_on_a_fake_gpu(fake_gpu, dense_latent_folder):
    decoder = Decoder(fake_gpu, dense_latent_folder)
    assert_graphs_equal_steps(decoder, on_host)
    assert fake_gpu.gpu.num_captures == 2  # one for each size
    assert set(fake_gpu.gpu.appended) == ({"latent"} if decoder.shape.latent_dim == 512 else set())


def test_a_graph_of_latent_attention_that_is_not_planned_anew_is_seen(fake_gpu, dense_latent_folder, monkeypatch):
    """The control: buffers that keep the captured step's blocks."""
    decoder = Decoder(fake_gpu, dense_latent_folder)
    monkeypatch.setattr(CudaGraphs, "_refill", lambda self, captured, batch: None)
    with pytest.raises(AssertionError, match="not close"):
        assert_graphs_equal_steps(decoder, on_host)


@pytest.mark.gpu
def test_a_replayed_step_with_latent_attention_equals_the_step(cuda, dense_latent_folder):
    with torch.inference_mode():
        assert_graphs_equal_steps(Decoder(cuda, dense_latent_folder))


@pytest.mark.gpu
def test_a_step_with_latent_attention_equals_the_reference(cuda, reference, latent_folder):
    with torch.inference_mode():
        check_latent_step(cuda, reference, latent_folder)


@pytest.mark.parametrize(
    "heads, latent, rope, dtype, fits",
    [(128, 512, 64, torch.bfloat16, True), (16, 512, 64, torch.float16, True), (24, 512, 64, torch.bfloat16, False),
     (16, 500, 64, torch.bfloat16, False), (16, 512, 32, torch.bfloat16, False), (16, 512, 64, torch.float32, False)],
)  # fmt: skip
def test_flashinfer_attends_over_latents_of_its_sizes(heads, latent, rope, dtype, fits):
    assert has_attention(AttentionShape(heads, 1, latent + rope, 16, dtype, latent_dim=latent)) is fits
    assert not has_attention(AttentionShape(heads, 1, latent + rope, 16, dtype))


class Handed(ReferenceBackend):
    """Computes nothing, on a device that is not the CPU; keeps what metadata it is handed."""

    def __init__(self):
        super().__init__("meta")
        self.positions, self.slots, self.token_ids = [], [], []

    def embed(self, token_ids, table, scale=1.0):
        self.token_ids.append(token_ids)
        return torch.empty(token_ids.shape[0], table.shape[1], dtype=table.dtype, device="meta")

    def rope(self, q, k, cos_sin, positions):
        self.positions.append(positions)
        return q, k

    def store_kv(self, k, v, kv_layer, slot_mapping):
        self.slots.append(slot_mapping)

    def attention(self, q, kv_layer, plan, *, scale, window, softcap):
        return torch.empty_like(q)


def test_the_model_hands_the_batchs_own_tensors_to_the_backend(folder):
    backend = Handed()
    decoder = Decoder(backend, folder)
    token_ids, batch = decoder.step(((1, 33), (5, 9)), 0)
    token_ids = token_ids.to("meta")
    decoder.model.forward(token_ids, batch, None, list(decoder.kv.unbind(1)))
    num_layers = decoder.model.spec.num_layers
    assert len(backend.positions) == len(backend.slots) == num_layers
    assert all(positions is batch.positions for positions in backend.positions)
    assert all(slots is batch.slot_mapping for slots in backend.slots)
    assert len(backend.token_ids) == 1 and backend.token_ids[0] is token_ids


def test_only_what_flashinfer_computes_is_captured():
    batch = make_step(KernelCase(((1, 5), (1, 20)))).batch
    prompt = make_step(KernelCase(((1, 5), (2, 20)))).batch

    def fits(head_dim, dtype, batch=batch, sizes=(1, 2)):
        return CudaGraphs(
            SimpleNamespace(paged=None), AttentionShape(6, 2, head_dim, 16, dtype), max_blocks=8, sizes=sizes
        ).fits(batch)

    assert fits(64, torch.bfloat16) and fits(128, torch.float16)
    assert not fits(64, torch.float32) and not fits(16, torch.bfloat16) and not fits(32, torch.bfloat16)
    assert not fits(64, torch.bfloat16, prompt) and not fits(64, torch.bfloat16, sizes=(1,))


@pytest.mark.parametrize(
    "heads, head_dim, dtype, fits",
    [(8, 128, torch.bfloat16, True), (64, 128, torch.float16, True), (65, 128, torch.float16, False),
     (33, 256, torch.bfloat16, False), (8, 64, torch.float32, False), (8, 32, torch.bfloat16, False)],
)  # fmt: skip
def test_flashinfer_appends_what_its_kernel_has_threads_for(heads, head_dim, dtype, fits):
    k, cache = torch.empty(3, heads, head_dim, dtype=dtype), torch.empty(4, 2, 16, heads, head_dim, dtype=dtype)
    assert has_append(k, cache) is fits
    assert has_append(k, cache[::2]) is fits  # blocks that lie apart, as a pool's do


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize("planned", [False, True])
@pytest.mark.parametrize("kv_layout", ["NHD", "HND"])
def test_store_kv_writes_its_slots_on_a_fake_gpu(fake_gpu, planned, dtype, kv_layout):
    check_store_kv(fake_gpu, planned, dtype, on_host, kv_layout)
    assert fake_gpu.gpu.appended == ([kv_layout] if dtype in HALF else [])
