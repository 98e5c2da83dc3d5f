"""Quantised weights in the engine: other numbers than the model's, but the same tokens however they are computed."""

import dataclasses
import logging

import pytest
import torch

from kvrelay.config import settings_from
from kvrelay.engine.checkpoints.loading import load_model
from kvrelay.engine.checkpoints.tiny import tiny_checkpoint
from kvrelay.engine.models.decoder import ExpertMlp
from kvrelay.engine.step.build import load_engine
from kvrelay.engine.step.config import EngineConfig
from kvrelay.engine.worker.kv_exchange import export_prompt, import_prompt
from kvrelay.errors import LayoutMismatch
from kvrelay.kernels.backend import AttentionBatch
from kvrelay.kernels.common.quant_scheme import Scheme, scheme_of
from kvrelay.kernels.cpu.backend import CpuBackend
from kvrelay.kernels.select import select_backend
from kvrelay.kvcache.memory.formats import KvFormat
from kvrelay.kvcache.stores.namespace import namespace_of
from tests.engine.step.test_engine import drain, prompt_of, request, tokens

INT4, INT8 = Scheme(4), Scheme(8)
pytestmark = pytest.mark.usefixtures("one_thread")
PROMPTS = [prompt_of(length) for length in (1, 8, 9, 50, 90)]


@pytest.fixture(scope="module")
def folders(tmp_path_factory):
    made = {}

    def folder(family):
        if family not in made:
            made[family] = tiny_checkpoint(family, tmp_path_factory.mktemp(family))
        return made[family]

    return folder


@pytest.fixture(scope="module")
def backend():
    return select_backend("cpu", "cpu", 1)


@pytest.fixture
def make(folders, backend):
    def build(family="llama", quantization=INT4, dtype=torch.float32, on=backend, **changes):
        config = {"block_size": 8, "kv_memory_bytes": 4 << 20, "token_budget": 24, **changes}
        return load_engine(folders(family), on, dtype, EngineConfig(quantization=quantization, **config))

    return build


def run(engine, prompts):
    """The tokens of prompts served together."""
    for index, prompt in enumerate(prompts):
        engine.add(request(str(index), prompt))
    outputs = drain(engine)
    return [tokens(outputs[str(index)]) for index in range(len(prompts))]


@pytest.mark.parametrize("family", ["llama", "gemma2", "qwen2", "deepseek_v3"])
@pytest.mark.parametrize("scheme", [INT4, INT8], ids=str)
def test_alone_batched_chunked_cached_and_handed_over_give_the_same_tokens(make, family, scheme):
    engine = make(family, scheme)
    alone = [run(engine, [prompt])[0] for prompt in PROMPTS]
    assert run(engine, PROMPTS) == alone  # cached
    assert run(make(family, scheme), PROMPTS) == alone  # batched, in chunks of 24
    assert run(make(family, scheme, token_budget=128), PROMPTS) == alone  # in one go
    assert handed_over(make(family, scheme), make(family, scheme), PROMPTS[3]) == alone[3]
    other = Scheme(12 - scheme.bits)
    assert handed_over(make(family, other), make(family, scheme), PROMPTS[3]) != alone[3], (
        "the control: other weights' KV"
    )


def handed_over(source, target, prompt):
    """The stream of a prompt that one engine computed and another goes on with."""
    source.add(request("a", prompt), hold=True, output_limit=1)
    first = drain(source)["a"][0]
    target.reserve(request("a", prompt))
    [reservation] = target.step().reservations
    held = source.scheduler.held["a"].blocks
    for index, block in enumerate(reservation.target_blocks, start=reservation.first_block):
        target.cache.storage.tensor[block] = source.cache.storage.tensor[held[index]]
    assert target.requests.activate("a", first.token_ids)
    return first.token_ids + [token for output in drain(target)["a"] for token in output.token_ids]


def hidden_states(model, backend, prompt):
    length = len(prompt)
    batch = AttentionBatch(
        query_starts=torch.tensor([0, length], dtype=torch.int32),
        context_lens=torch.tensor([length], dtype=torch.int32),
        block_tables=torch.arange(-(-length // 16), dtype=torch.int32).unsqueeze(0),
        slot_mapping=torch.arange(length),
        positions=torch.arange(length),
        num_decode=0,
        max_query_len=length,
        max_context_len=length,
    )
    shape = model.attention_shape
    kv = torch.zeros(model.spec.num_layers, batch.block_tables.shape[1], 2, 16, shape.num_kv_heads, shape.head_dim)
    return model.forward(torch.tensor(prompt), batch, backend.plan(batch, shape), list(kv))


def test_logits_leave_the_models_by_as_much_as_the_bits_allow(folders, backend):
    """And not by nothing: quantisation is on. int8 is much nearer than int4."""
    off = {}
    exact = load_model(folders("llama"), backend, torch.float32)
    expected = exact.logits(hidden_states(exact, backend, PROMPTS[3]))
    for scheme in (INT8, INT4):
        model = load_model(folders("llama"), backend, torch.float32, quantization=scheme)
        found = model.logits(hidden_states(model, backend, PROMPTS[3]))
        off[scheme.bits] = float((found - expected).norm() / expected.norm())
    assert 1e-4 < off[8] < 0.05 and 4 * off[8] < off[4] < 0.5


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_decode_steps_are_recorded_with_quantised_products(make, backend, dtype):
    if backend.compiled_kernels is None:
        pytest.skip("no compiled kernels here")
    engine = make(dtype=dtype)
    streams = run(engine, PROMPTS)
    assert engine.runner._graphs.why_not is None and engine.runner._graphs.has_captures
    plain = make(dtype=dtype)
    plain.runner._graphs = None
    assert run(plain, PROMPTS) == streams


def test_without_compiled_kernels_torch_serves(make, monkeypatch):
    monkeypatch.setenv("KVRELAY_NATIVE", "0")
    torch_only = CpuBackend(1)
    assert torch_only.compiled_kernels is None
    for on in (torch_only, select_backend("reference", "cpu")):
        assert run(make(on=on), PROMPTS[2:4]) == run(make(), PROMPTS[2:4])


def test_the_error_is_logged_at_start(make, caplog):
    with caplog.at_level(logging.INFO, "kvrelay.engine.checkpoints.loading"):
        engine = make()
        make(quantization=None)
    [told] = [record.getMessage() for record in caplog.records]
    error = engine.model.weight_error
    assert f"int4 in groups of 32: relative RMS error {100 * error.relative:.3f}%" in told
    assert 0.03 < error.relative < 0.09


def test_kv_of_other_weights_is_refused_everywhere(make):
    engines = {scheme: make(quantization=scheme) for scheme in (None, INT8, INT4, Scheme(4, 64))}
    prints = {scheme: engine.cache.fingerprint for scheme, engine in engines.items()}
    layout = engines[None].cache.memory.layout
    assert len({namespace_of(found, layout).digest for found in prints.values()}) == len(prints)
    for scheme, found in prints.items():
        for other, theirs in prints.items():
            difference = found.incompatibility(theirs, convert_dtype=True)
            if scheme == other:
                assert difference is None
            else:
                assert difference.field == "quantization" and "model.quantization" in difference.remedy
    assert dataclasses.replace(prints[INT4], quantization="none") == prints[None]
    kv = export_prompt(engines[INT8], PROMPTS[3], KvFormat.KV_2LTD)
    with pytest.raises(LayoutMismatch, match="quantization"):
        import_prompt(engines[INT4], kv)
    assert import_prompt(make(quantization=INT8), kv) == 48


def test_settings_choose_the_scheme():
    assert scheme_of(settings_from({}).model.quantization) is None
    assert scheme_of(settings_from({"model": {"quantization": "int8"}}).model.quantization) == INT8


def test_a_choice_of_experts_is_not_quantised(folders, backend):
    """The router decides in float32; the experts are quantised."""
    model = load_model(folders("deepseek_v3"), backend, torch.float32, quantization=INT8)
    mlps = [layer.mlp for layer in model.layers if isinstance(layer.mlp, ExpertMlp)]
    assert mlps
    for mlp in mlps:
        assert not hasattr(mlp.router, "error") and mlp.experts.error.num_weights == 8 * 3 * 32 * 64
