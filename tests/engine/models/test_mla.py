"""Latent attention in the engine: one part per block, the same tokens however computed, and what is refused by name."""

import dataclasses
import json
from functools import partial

import pytest
import torch
from safetensors.torch import load_file, save_file

from kvrelay.config import settings_from
from kvrelay.engine.checkpoints.loading import load_model
from kvrelay.engine.checkpoints.preflight import check_fit
from kvrelay.engine.checkpoints.tiny import TINY_CONFIGS, tiny_checkpoint
from kvrelay.engine.models.spec import ModelSpec
from kvrelay.engine.step.build import load_engine
from kvrelay.engine.step.config import EngineConfig
from kvrelay.engine.worker.kv_exchange import export_prompt, import_prompt
from kvrelay.errors import CheckpointCorrupt, ConfigError, LayoutMismatch, UnsupportedModel
from kvrelay.kernels.oracle.reference import ReferenceBackend
from kvrelay.kernels.select import select_backend
from kvrelay.kvcache.memory.formats import KvFormat
from kvrelay.types import Role
from tests.engine.step.test_engine import drain, prompt_of, request, tokens
from tests.engine.tiny import greedy_oracle

WIDTH, RANK = 48, 32  # of the tiny checkpoint: latent and rotary part, latent alone
BLOCK_BYTES = 4 * 8 * WIDTH * 4  # layers, tokens, numbers, bytes
pytestmark = pytest.mark.usefixtures("one_thread")


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return tiny_checkpoint("deepseek_v3", tmp_path_factory.mktemp("models") / "tiny-latent")


@pytest.fixture(scope="module")
def oracle(folder):
    return partial(greedy_oracle(folder), count=12)


@pytest.fixture(params=["reference", "cpu"])
def make(request, folder):
    backend = select_backend(request.param, "cpu", 1)

    def build(**changes):
        config = {"block_size": 8, "kv_memory_bytes": 64 * BLOCK_BYTES, "token_budget": 24, **changes}
        return load_engine(folder, backend, torch.float32, EngineConfig(**config))

    return build


@pytest.mark.parametrize("kv_layout", ["NHD", "HND"])
def test_a_pool_of_latents_has_one_part_and_says_so(folder, kv_layout):
    config = EngineConfig(block_size=8, kv_memory_bytes=64 * BLOCK_BYTES, kv_layout=kv_layout)
    engine = load_engine(folder, select_backend("reference", "cpu", 1), torch.float32, config)
    layout, found = engine.cache.memory.layout, engine.cache.fingerprint
    assert (layout.is_latent, layout.num_parts, layout.num_kv_heads, layout.head_dim) == (True, 1, 1, WIDTH)
    assert (layout.num_blocks, layout.block_bytes) == (64, BLOCK_BYTES)  # half of what keys and values would take
    assert [tuple(layer.shape) for layer in engine.cache.storage.layers] == [(64, 1, 8, 1, WIDTH)] * 4
    assert (found.num_parts, found.num_kv_heads, found.head_dim) == (1, 1, WIDTH)
    assert found.incompatibility(dataclasses.replace(found, num_parts=2), convert_dtype=False).field == "num_parts"


def test_greedy_equals_hugging_face_batched_and_chunked(make, oracle):
    prompts = [prompt_of(n) for n in (1, 8, 9, 50, 90)]
    engine = make()
    for index, prompt in enumerate(prompts):
        engine.add(request(str(index), prompt))
    together = drain(engine)
    assert [tokens(together[str(index)]) for index in range(len(prompts))] == [oracle(prompt) for prompt in prompts]


def test_a_cached_prefix_gives_the_same_tokens_and_is_not_computed_again(make, oracle):
    engine, prompt = make(), prompt_of(50)
    outputs = []
    for name in ("cold", "warm"):
        engine.add(request(name, prompt))
        outputs.append(drain(engine)[name])
    assert tokens(outputs[0]) == tokens(outputs[1]) == oracle(prompt)
    assert [out[0].cached_tokens for out in outputs] == [0, 48]


@pytest.mark.parametrize("part", ["none", "latents", "rotary parts"])
def test_blocks_handed_over_continue_the_same_stream_and_corrupt_ones_do_not(make, oracle, part):
    source, target, prompt = make(), make(), prompt_of(20)
    source.add(request("a", prompt), hold=True, output_limit=1)
    first = drain(source)["a"][0]
    target.reserve(request("a", prompt))
    [reservation] = target.step().reservations
    held = source.scheduler.held["a"].blocks
    for index, block in enumerate(reservation.target_blocks, start=reservation.first_block):
        target.cache.storage.tensor[block] = source.cache.storage.tensor[held[index]]
        if part != "none":
            of_part = slice(0, RANK) if part == "latents" else slice(RANK, WIDTH)
            target.cache.storage.tensor[block, ..., of_part] *= -1
    source.abort("a")
    assert target.requests.activate("a", first.token_ids)
    stream = first.token_ids + [token for output in drain(target)["a"] for token in output.token_ids]
    assert (stream == oracle(prompt)) is (part == "none")


def test_a_prompts_latents_leave_and_come_back_in_the_interchange_format(make, oracle):
    source, target, prompt = make(), make(), prompt_of(40)
    kv = export_prompt(source, prompt, KvFormat.KV_MLA_FMT)
    assert kv.tensors["kv"].shape == (1, 4, 40, WIDTH)
    assert import_prompt(target, kv) == 40
    target.add(request("a", prompt))
    outputs = drain(target)["a"]
    assert tokens(outputs) == oracle(prompt) and outputs[0].cached_tokens == 39
    with pytest.raises(LayoutMismatch, match="KV_MLA_FMT"):
        export_prompt(source, prompt, KvFormat.KV_2LTD)


def test_a_pool_of_fp8_latents_has_a_scale_for_each_entry_and_serves(make):
    engine, prompt = make(kv_dtype="fp8_e4m3"), prompt_of(40)
    layout = engine.cache.memory.layout
    assert (layout.dtype, layout.num_parts, layout.block_bytes) == ("fp8_e4m3", 1, 4 * 8 * (WIDTH + 4))
    streams = []
    for name in ("cold", "warm"):
        engine.add(request(name, prompt))
        streams.append(tokens(drain(engine)[name]))
    assert streams[0] == streams[1] and len(streams[0]) == 12


def test_decode_steps_with_latent_attention_are_not_recorded(make):
    assert make().runner._graphs is None


def test_latents_need_half_the_memory_of_keys_and_values():
    """fit.py counts as the engine does: what holds two latent blocks of a pool, but not of keys and values."""
    spec = ModelSpec.from_config(TINY_CONFIGS["deepseek_v3"])
    budget = {"model": {"dtype": "float32"}, "engine": {"kv_memory": str(2 * 2 * BLOCK_BYTES), "block_size": 16}}
    check_fit(spec, settings_from(budget), Role.DECODE)
    with pytest.raises(ConfigError, match="hold 1 blocks"):
        check_fit(dataclasses.replace(spec, latent=None), settings_from(budget), Role.DECODE)


# ---- what is refused

V2, V3 = TINY_CONFIGS["deepseek_v2"], TINY_CONFIGS["deepseek_v3"]


@pytest.mark.parametrize(
    ("config", "error", "words"),
    [
        (V3 | {"topk_method": "group_limited_greedy"}, UnsupportedModel, "topk_method 'group_limited_greedy'"),
        (V3 | {"scoring_func": "softmax"}, UnsupportedModel, "scoring_func 'softmax'"),
        (V3 | {"moe_layer_freq": 2}, UnsupportedModel, "moe_layer_freq"),
        (V3 | {"num_key_value_heads": 2}, UnsupportedModel, "num_key_value_heads"),
        (V3 | {"qk_rope_head_dim": 15}, CheckpointCorrupt, "qk_rope_head_dim 15 is odd"),
        (V3 | {"kv_lora_rank": None}, CheckpointCorrupt, "kv_lora_rank"),
        (V3 | {"n_group": 3}, CheckpointCorrupt, "8 experts in 3 groups"),
        (V3 | {"topk_group": 5}, CheckpointCorrupt, "5 of them chosen"),
        (V3 | {"n_group": 8}, CheckpointCorrupt, "two best"),
        (V3 | {"num_experts_per_tok": 5}, CheckpointCorrupt, "cannot choose 5"),
        (V3 | {"quantization_config": {"quant_method": "quark"}}, UnsupportedModel, "quark"),
        (V2 | {"topk_method": "noaux_tc"}, UnsupportedModel, "topk_method 'noaux_tc'"),
        (V2 | {"norm_topk_prob": True}, UnsupportedModel, "norm_topk_prob"),
        (V2 | {"num_experts_per_tok": None}, CheckpointCorrupt, "num_experts_per_tok"),
        (V2 | {"n_group": None}, CheckpointCorrupt, "n_group"),
    ],
)
def test_what_is_not_supported_is_refused_by_name(config, error, words):
    with pytest.raises(error, match=words):
        ModelSpec.from_config(config)


def test_a_model_without_experts_is_dense_throughout():
    assert ModelSpec.from_config(V3 | {"first_k_dense_replace": 4}).experts is None
    assert ModelSpec.from_config(V2 | {"n_routed_experts": None}).experts is None


@pytest.mark.parametrize(("family", "is_known"), [("deepseek_v3", True), ("deepseek_v2", False)])
def test_layers_that_predict_further_tokens_are_passed_over_where_the_family_has_them(tmp_path, family, is_known):
    folder = tiny_checkpoint(family, tmp_path)
    tensors = load_file(folder / "model.safetensors")
    save_file(tensors | {"model.layers.4.eh_proj.weight": torch.zeros(2, 2)}, folder / "model.safetensors")
    if is_known:
        assert load_model(folder, ReferenceBackend("cpu"), torch.float32).spec.num_layers == 4
    else:
        with pytest.raises(CheckpointCorrupt, match="eh_proj"):
            load_model(folder, ReferenceBackend("cpu"), torch.float32)


@pytest.mark.parametrize("change", [{"rope_interleave": False}, {"topk_group": 3}, {"routed_scaling_factor": 1.0}])
def test_what_the_config_says_matters_to_the_answer(folder, tmp_path, change):
    """Negative control of the comparisons with Hugging Face."""
    for file in folder.iterdir():
        (tmp_path / file.name).write_bytes(file.read_bytes())
    (tmp_path / "config.json").write_text(json.dumps(V3 | change))
    streams = []
    for path in (folder, tmp_path):
        config = EngineConfig(block_size=8, kv_memory_bytes=64 * BLOCK_BYTES)
        engine = load_engine(path, select_backend("reference", "cpu", 1), torch.float32, config)
        engine.add(request("a", prompt_of(30)))
        streams.append(tokens(drain(engine)["a"]))
    assert streams[0] != streams[1]
