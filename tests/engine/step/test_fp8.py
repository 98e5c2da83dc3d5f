"""fp8 KV through engines: always the same tokens, near float32's; more blocks in the same memory; pools sized by a
share.
"""

import dataclasses
from types import SimpleNamespace

import psutil
import pytest
import torch

from kvrelay import fp8, machine
from kvrelay.config import settings_from
from kvrelay.engine.checkpoints.preflight import check_fit
from kvrelay.engine.checkpoints.tiny import tiny_checkpoint
from kvrelay.engine.models.spec import ModelSpec
from kvrelay.engine.step import build
from kvrelay.engine.step.build import load_engine
from kvrelay.engine.step.config import EngineConfig
from kvrelay.errors import ConfigError
from kvrelay.kernels.select import select_backend
from kvrelay.kvcache.memory.storage import KvStorage
from kvrelay.kvtransfer.mover.copy_plan import pair
from kvrelay.plane.messages import Sampling, SequenceRequest
from kvrelay.types import KvLayout, Role
from tests.kvtransfer.copies import plan_copies

LAYOUT = KvLayout(num_layers=2, num_blocks=6, block_size=4, num_kv_heads=2, head_dim=8, dtype="fp8_e4m3")


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return tiny_checkpoint("qwen3", tmp_path_factory.mktemp("tiny") / "qwen3")


@pytest.fixture(scope="module")
def make(folder):
    def build(backend="cpu", dtype=torch.float32, **changes):
        config = {"kv_memory_bytes": 2 << 20, "token_budget": 32, "max_model_len": 160, **changes}
        return load_engine(folder, select_backend(backend, "cpu", 1), dtype, EngineConfig(**config))

    return build


def prompt_of(length):
    return torch.randint(3, 300, (length,), generator=torch.Generator().manual_seed(length)).tolist()


def run(engine, prompts, max_tokens=8):
    """(tokens, log-probabilities) of greedy decoding, all prompts in one batch."""
    for index, prompt in enumerate(prompts):
        sampling = Sampling(max_tokens=max_tokens, temperature=0.0, ignore_eos=True, logprobs=0)
        engine.add(
            SequenceRequest(
                request_id=str(index),
                token_ids=prompt,
                num_prompt_tokens=len(prompt),
                block_hashes=[],
                tokens_per_hash=engine.config.block_size,
                sampling=sampling,
            )
        )
    tokens, logprobs = [[] for _ in prompts], [[] for _ in prompts]
    while engine.scheduler.has_work:
        for output in engine.step().outputs:
            tokens[int(output.request_id)] += output.token_ids
            logprobs[int(output.request_id)] += [one.logprob for one in output.logprobs]
        engine.check()
    return tokens, logprobs


PROMPTS = [prompt_of(length) for length in (1, 15, 16, 33, 100)]


def test_over_fp8_alone_batched_cached_preempted_and_in_heads_order_give_the_same_tokens(make):
    engine = make(kv_dtype="fp8_e4m3")
    alone = [run(engine, [prompt])[0][0] for prompt in PROMPTS]
    assert run(engine, PROMPTS)[0] == alone  # cached
    assert run(make(kv_dtype="fp8_e4m3"), PROMPTS)[0] == alone  # batched
    block_bytes = engine.cache.memory.layout.block_bytes
    short = make(kv_dtype="fp8_e4m3", kv_memory_bytes=15 * block_bytes)
    assert run(short, PROMPTS, 40)[0] == run(make(kv_dtype="fp8_e4m3"), PROMPTS, 40)[0]
    assert short.scheduler.preemption.num_preemptions > 0
    for order in ("NHD", "HND"):
        assert run(make("reference", kv_dtype="fp8_e4m3", kv_layout=order), PROMPTS)[0] == alone


@pytest.mark.parametrize(("kv_dtype", "tolerance"), [("float16", 0.02), ("bfloat16", 0.1), ("fp8_e4m3", 1.0)])
def test_first_tokens_are_as_likely_as_over_float32_up_to_the_dtypes_rounding(make, kv_dtype, tolerance):
    """Of this family: its logits deviate by 1. A wrong cache is off by 3 and more."""
    exact, rounded = (run(make(kv_dtype=name), PROMPTS, 1)[1] for name in ("auto", kv_dtype))
    off = [abs(one[0] - other[0]) for one, other in zip(exact, rounded, strict=True)]
    assert 0 < max(off) < tolerance


def test_a_float16_model_runs_on_the_cpu_backend(make):
    assert run(make(dtype=torch.float16), PROMPTS)[0] == run(make("reference", torch.float16), PROMPTS)[0]


def test_fp8_holds_more_blocks_and_reports_it_in_layout_and_fingerprint(make):
    wide, small = make(dtype=torch.bfloat16), make(dtype=torch.bfloat16, kv_dtype="fp8_e4m3")
    assert small.cache.memory.layout.row_bytes == 32 + 4  # a head, and its scale
    assert small.pool.num_blocks == pytest.approx(wide.pool.num_blocks * 64 / 36, abs=1)
    assert (small.cache.fingerprint.dtype, small.cache.fingerprint.compute_dtype) == ("fp8_e4m3", "bfloat16")
    assert (
        small.cache.fingerprint.incompatibility(make(kv_dtype="fp8_e4m3").cache.fingerprint, convert_dtype=False).field
        == "compute_dtype"
    )


@pytest.mark.parametrize("order", ["NHD", "HND"])
@pytest.mark.parametrize("size", [4, 2, 8])
def test_scales_travel_with_their_vectors_between_unlike_pools(order, size):
    source, target = LAYOUT, dataclasses.replace(LAYOUT, block_size=size, order=order, num_blocks=24 // size)
    begins, lands = KvStorage(source, torch.device("cpu")), KvStorage(target, torch.device("cpu"))
    begins.fill_with_noise(range(6))
    both = pair(source, target)
    copies = both.copies(both.source.chunks(range(6)), both.target.chunks(range(24 // size)), range(2))
    for at, to, count in zip(*copies.rows(), strict=True):
        lands.memory.view[to : to + count] = begins.memory.view[at : at + count]
    for one, other in zip(begins.layers, lands.layers, strict=True):
        assert torch.equal(
            fp8.decoded(one).transpose(0, 1).flatten(1, 2), fp8.decoded(other).transpose(0, 1).flatten(1, 2)
        )
    assert plan_copies(source, source, [1], [2], range(2)).total_bytes == source.block_bytes


def test_noise_is_finite_and_no_two_regions_are_alike():
    storage = KvStorage(LAYOUT, torch.device("cpu"))
    storage.fill_with_noise([1, 4])
    regions = fp8.decoded(torch.stack(storage.layers))
    assert regions.isfinite().all() and not regions[:, 0].any()
    assert len({tuple(region.flatten().tolist()) for region in regions[:, [1, 4]].flatten(0, 1)}) == 4
    assert (regions[:, [1, 4]].abs().amax(-1) > 0.1).all()


# ---- pools sized by a share of the free memory


def test_a_share_is_of_what_is_free(make, monkeypatch):
    monkeypatch.setattr(build, "free_host_bytes", lambda: 48 << 20)
    assert build.pool_bytes(0.5, select_backend("cpu")) == 24 << 20
    engine = make(kv_memory_share=0.5 / 3)
    assert engine.config.kv_memory_bytes == 8 << 20
    assert engine.cache.memory.layout.num_bytes == pytest.approx(8 << 20, rel=0.01)


def test_too_small_a_share_is_told(make, monkeypatch):
    monkeypatch.setattr(build, "free_host_bytes", lambda: 1 << 10)
    with pytest.raises(ConfigError, match=r"engine\.kv_memory: .* at least 2 are needed"):
        make(kv_memory_share=0.5)


@pytest.mark.parametrize(("limit", "left"), [("1000", 1000 - 700 + 200), ("max", None), ("", None)])
def test_a_container_has_what_its_group_leaves_with_the_page_cache(tmp_path, limit, left):
    (tmp_path / "memory.max").write_text(f"{limit}\n")
    (tmp_path / "memory.current").write_text("700\n")
    (tmp_path / "memory.stat").write_text("anon 500\ninactive_file 200\n")
    assert machine._cgroup_left(tmp_path, "memory.max", "memory.current") == left
    assert machine._cgroup_left(tmp_path / "none", "memory.max", "memory.current") is None


def test_host_memory_is_the_least_of_what_is_told(monkeypatch):
    monkeypatch.setattr(psutil, "virtual_memory", lambda: SimpleNamespace(available=500))
    for lefts, expected in (((None, None), 500), ((300, None), 300), ((-5, 600), 0)):
        turn = iter(lefts)
        monkeypatch.setattr(machine, "_cgroup_left", lambda *names, turn=turn: next(turn))
        assert machine.free_host_bytes() == expected


def test_a_share_and_a_kv_dtype_count_in_the_check_before_anything_is_loaded(folder):
    spec = ModelSpec.from_folder(folder)
    check_fit(spec, settings_from({"engine": {"kv_memory": "50%"}}), Role.DECODE)
    two_fp8_blocks = 2 * 16 * 2 * (32 + 4) * 2 * 4
    data = {"engine": {"kv_memory": two_fp8_blocks, "kv_dtype": "fp8_e4m3"}}
    check_fit(spec, settings_from(data), Role.DECODE)
    with pytest.raises(ConfigError, match=r"engine\.kv_memory"):
        check_fit(spec, settings_from({"engine": {"kv_memory": two_fp8_blocks}}), Role.DECODE)
