"""KV in and out of pools in LMCache's formats: where a number lies, in every order and dtype, and through engines and
files.
"""

import dataclasses

import pytest
import torch

from kvrelay import fp8
from kvrelay.engine.checkpoints.tiny import tiny_checkpoint
from kvrelay.engine.step.build import load_engine
from kvrelay.engine.step.config import EngineConfig
from kvrelay.engine.worker.kv_exchange import PromptKv, export_prompt, import_prompt, load, save
from kvrelay.errors import CheckpointCorrupt, InvalidRequest, LayoutMismatch
from kvrelay.kernels.select import select_backend
from kvrelay.kvcache.memory.formats import KvFormat, export_kv, import_kv, shape_of
from kvrelay.kvcache.memory.storage import KvStorage
from kvrelay.plane.messages import Sampling, SequenceRequest
from kvrelay.types import KvLayout

CPU = torch.device("cpu")
LAYOUT = KvLayout(num_layers=3, num_blocks=7, block_size=4, num_kv_heads=2, head_dim=8, dtype="float32")
LATENT = dataclasses.replace(LAYOUT, num_kv_heads=1, is_latent=True)
BLOCKS, TOKENS = [5, 0, 3], 10
POOLS = [(dtype, order) for dtype in ("float32", "bfloat16", "float16", "fp8_e4m3") for order in ("NHD", "HND")]


def pool(layout, seed=None):
    """A storage with random numbers in it, or zeros."""
    storage = KvStorage(layout, CPU)
    if seed is not None:
        shape = (*storage.tensor.shape[:-1], layout.head_dim)
        noise = torch.randn(shape, generator=torch.Generator().manual_seed(seed))
        storage.tensor.copy_(fp8.stored(noise, storage.tensor.dtype))
    return storage


def number(storage, layer, part, token, head):
    """The head's vector of one token, looked up in the pool by hand."""
    block, offset = BLOCKS[token // 4], token % 4
    return fp8.loaded(storage.layers[layer][block, part, offset, head]).float()


@pytest.mark.parametrize(("dtype", "order"), POOLS)
def test_every_vector_goes_where_the_format_has_it(dtype, order):
    storage = pool(dataclasses.replace(LAYOUT, dtype=dtype, order=order), seed=1)
    whole = export_kv(storage, BLOCKS, TOKENS, KvFormat.KV_2LTD)
    layered = export_kv(storage, BLOCKS, TOKENS, KvFormat.KV_2TD, layer=2)
    by_token = export_kv(storage, BLOCKS, TOKENS, KvFormat.KV_T2D, layer=2)
    assert (whole.shape, layered.shape, by_token.shape) == ((2, 3, 10, 16), (2, 10, 16), (10, 2, 16))
    assert whole.dtype == (torch.bfloat16 if dtype == "fp8_e4m3" else getattr(torch, dtype))
    for part, token, head in ((0, 0, 0), (1, 3, 1), (0, 4, 1), (1, 9, 0)):
        place, vector = slice(8 * head, 8 * head + 8), number(storage, 2, part, token, head)
        assert torch.equal(whole[part, 2, token, place].float(), vector)
        assert torch.equal(layered[part, token, place].float(), vector)
        assert torch.equal(by_token[token, part, place].float(), vector)


@pytest.mark.parametrize("fmt", [KvFormat.KV_2LTD, KvFormat.KV_T2D, KvFormat.KV_2TD])
@pytest.mark.parametrize(("dtype", "order"), POOLS)
def test_what_went_out_of_one_pool_comes_into_another_unchanged_and_touches_nothing_else(dtype, order, fmt):
    source = pool(dataclasses.replace(LAYOUT, dtype=dtype, block_size=2), seed=2)
    target = pool(dataclasses.replace(LAYOUT, dtype=dtype, order=order))
    for layer in range(3) if fmt.is_layerwise else [None]:
        kv = export_kv(source, [6, 1, 2, 0, 4], TOKENS, fmt, layer=layer)
        import_kv(target, BLOCKS, kv, fmt, layer=layer)
        assert torch.equal(export_kv(target, BLOCKS, TOKENS, fmt, layer=layer), kv)
    rows = torch.stack(target.layers)
    assert not rows[:, [1, 2, 4, 6]].any() and not rows[:, 3, :, 2:].any()
    assert rows[:, 3, :, :2].any()


@pytest.mark.parametrize("dtype", ["float32", "fp8_e4m3"])
def test_latent_kv_has_a_format_of_its_own(dtype):
    source, target = (pool(dataclasses.replace(LATENT, dtype=dtype), seed) for seed in (3, None))
    kv = export_kv(source, BLOCKS, TOKENS, KvFormat.KV_MLA_FMT)
    assert kv.shape == (1, 3, 10, 8)
    assert torch.equal(kv[0, 1, 9].float(), number(source, 1, 0, 9, 0))
    import_kv(target, BLOCKS, kv, KvFormat.KV_MLA_FMT)
    assert torch.equal(export_kv(target, BLOCKS, TOKENS, KvFormat.KV_MLA_FMT), kv)
    with pytest.raises(LayoutMismatch, match="latent KV: KV_MLA_FMT"):
        export_kv(source, BLOCKS, TOKENS, KvFormat.KV_2LTD)
    with pytest.raises(LayoutMismatch, match="keys and values"):
        shape_of(LAYOUT, TOKENS, KvFormat.KV_MLA_FMT)


def test_the_first_tokens_may_be_left_as_they_are():
    source, target = pool(LAYOUT, seed=4), pool(LAYOUT)
    import_kv(target, BLOCKS, export_kv(source, BLOCKS, TOKENS, KvFormat.KV_2LTD), KvFormat.KV_2LTD, first=4)
    assert not target.tensor[5].any() and torch.equal(target.tensor[0], source.tensor[0])


def test_what_a_float16_pool_cannot_hold_becomes_its_largest():
    target = pool(dataclasses.replace(LAYOUT, dtype="float16"))
    import_kv(target, [0], torch.full((2, 3, 1, 16), 1e9), KvFormat.KV_2LTD)
    assert target.layers[0][0, 0, 0].unique().tolist() == [65504.0]


@pytest.mark.parametrize(
    ("kv", "fmt", "layer", "error"),
    [
        (torch.zeros(2, 3, 10, 15), KvFormat.KV_2LTD, None, LayoutMismatch),
        (torch.zeros(2, 4, 10, 16), KvFormat.KV_2LTD, None, LayoutMismatch),
        (torch.zeros(2, 3, 10, 16, dtype=torch.int32), KvFormat.KV_2LTD, None, LayoutMismatch),
        (torch.zeros(16), KvFormat.KV_2TD, 0, LayoutMismatch),
        (torch.zeros(2, 3, 13, 16), KvFormat.KV_2LTD, None, ValueError),
        (torch.zeros(2, 3, 10, 16), KvFormat.KV_2LTD, 0, ValueError),
        (torch.zeros(10, 2, 16), KvFormat.KV_T2D, None, ValueError),
        (torch.zeros(10, 2, 16), KvFormat.KV_T2D, 3, ValueError),
    ],
)
def test_what_does_not_fit_is_refused_and_nothing_is_written(kv, fmt, layer, error):
    target = pool(LAYOUT)
    with pytest.raises(error):
        import_kv(target, BLOCKS, kv + 1, fmt, layer=layer)
    assert not target.tensor.any()


# ---- engines and files


@pytest.fixture(scope="module")
def folders(tmp_path_factory):
    root = tmp_path_factory.mktemp("tiny")
    return {family: tiny_checkpoint(family, root / family) for family in ("llama", "qwen3", "deepseek_v2")}


@pytest.fixture(scope="module")
def make(folders):
    def build(family="llama", backend="cpu", **changes):
        config = EngineConfig(kv_memory_bytes=4 << 20, token_budget=32, max_model_len=160, **changes)
        return load_engine(folders[family], select_backend(backend, "cpu", 1), torch.float32, config)

    return build


PROMPT = torch.randint(3, 300, (71,), generator=torch.Generator().manual_seed(5)).tolist()


def generate(engine, prompt=PROMPT):
    """(tokens, cached prompt tokens) of greedy decoding."""
    engine.add(
        SequenceRequest(
            request_id="r",
            token_ids=prompt,
            num_prompt_tokens=len(prompt),
            block_hashes=[],
            tokens_per_hash=engine.config.block_size,
            sampling=Sampling(max_tokens=8, temperature=0.0, ignore_eos=True),
        )
    )
    tokens, cached = [], 0
    while engine.scheduler.has_work:
        for output in engine.step().outputs:
            tokens, cached = tokens + output.token_ids, output.cached_tokens or cached
    engine.check()
    return tokens, cached


@pytest.mark.parametrize(
    ("family", "fmt"),
    [
        ("llama", KvFormat.KV_2LTD),
        ("llama", KvFormat.KV_T2D),
        ("llama", KvFormat.KV_2TD),
        ("deepseek_v2", KvFormat.KV_MLA_FMT),
    ],
)
def test_another_engine_goes_on_from_a_file_without_computing_the_prompt(make, tmp_path, family, fmt):
    path = tmp_path / "kv.safetensors"
    source = make(family)
    expected, _ = generate(source)
    save(export_prompt(source, PROMPT, fmt), path)
    source.check()
    target = make(family, block_size=8, **({"backend": "reference", "kv_layout": "HND"} if family == "llama" else {}))
    assert import_prompt(target, load(path)) == 64
    target.check()
    assert generate(target) == (expected, 64)
    assert import_prompt(target, load(path)) == 64  # what is there already is left as it is


def test_changed_numbers_change_the_answer(make):
    source = make()
    expected, _ = generate(source)
    kv = export_prompt(source, PROMPT, KvFormat.KV_2LTD)
    target = make()
    import_prompt(target, dataclasses.replace(kv, tensors={"kv": kv.tensors["kv"].flip(2)}))
    assert generate(target) != (expected, 64)


def test_kv_of_another_model_or_without_a_layer_is_refused_and_holds_no_block(make):
    kv = export_prompt(make(), PROMPT, KvFormat.KV_2TD)
    other = make("qwen3")
    with pytest.raises(LayoutMismatch, match="not the same model"):
        import_prompt(other, kv)
    target = make()
    with pytest.raises(LayoutMismatch, match=r"there is no kv\.3"):
        import_prompt(target, dataclasses.replace(kv, tensors={f"kv.{i}": kv.tensors[f"kv.{i}"] for i in range(3)}))
    for wrong in (torch.zeros(2, 71, 3), kv.tensors["kv.0"][:, :-1]):  # of another width, and of fewer tokens
        with pytest.raises(LayoutMismatch, match="shape"):
            import_prompt(target, dataclasses.replace(kv, tensors={f"kv.{i}": wrong for i in range(4)}))
    assert target.pool.counts().used == other.pool.counts().used == 0
    target.check()


def test_a_prompt_that_cannot_be_taken_is_refused(make):
    engine = make()
    for count in (0, 160, 159):
        with pytest.raises(InvalidRequest):
            export_prompt(engine, [5] * count, KvFormat.KV_2LTD)
    with pytest.raises(LayoutMismatch):
        export_prompt(engine, PROMPT, KvFormat.KV_MLA_FMT)
    engine.check()
    assert engine.pool.counts().used == 0 and not engine.scheduler.has_work


def test_a_file_of_something_else_is_told(tmp_path):
    (tmp_path / "text").write_text("no KV at all, only text that goes on for a while")
    save(PromptKv(KvFormat.KV_2LTD, [1], {"kv": torch.zeros(2, 1, 1, 1)}, {}), tmp_path / "kv")
    assert load(tmp_path / "kv").token_ids == [1]
    torn = (tmp_path / "kv").read_bytes()[:-3]
    (tmp_path / "torn").write_bytes(torn)
    for name in ("text", "torn", "missing"):
        with pytest.raises(CheckpointCorrupt, match="kvrelay kv export"):
            load(tmp_path / name)
