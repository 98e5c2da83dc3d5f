"""Mixtures of experts in the engine: the same tokens however computed, recorded steps, and what configs may say."""

import pytest
import torch
from transformers import AutoModelForCausalLM

from kvrelay.engine.checkpoints.files import expected_shapes, parts_of, plain_name, stored_name
from kvrelay.engine.checkpoints.tiny import TINY_CONFIGS, tiny_checkpoint
from kvrelay.engine.models.spec import ModelSpec
from kvrelay.engine.step.build import load_engine
from kvrelay.engine.step.config import EngineConfig
from kvrelay.errors import CheckpointCorrupt, UnsupportedModel
from kvrelay.kernels.common.quant_scheme import Scheme
from kvrelay.kernels.select import select_backend
from tests.engine.step.test_engine import drain, prompt_of, request, tokens

QWEN3, QWEN2, MIXTRAL = (TINY_CONFIGS[family] for family in ("qwen3_moe", "qwen2_moe", "mixtral"))


@pytest.fixture(scope="module", autouse=True)
def one_thread():
    """Idle torch threads that spin take more time than such small products need."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return tiny_checkpoint("qwen3_moe", tmp_path_factory.mktemp("models") / "tiny-experts")


@pytest.fixture(scope="module")
def oracle(folder):
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    model.generation_config.eos_token_id = None

    def generate(prompt):
        ids = torch.tensor([prompt])
        mask = torch.ones_like(ids)
        out = model.generate(ids, attention_mask=mask, max_new_tokens=12, do_sample=False, pad_token_id=0)
        return out[0, len(prompt) :].tolist()

    return generate


def engine_of(folder, backend="cpu", quantization=None):
    config = EngineConfig(block_size=8, kv_memory_bytes=4 << 20, token_budget=24, quantization=quantization)
    return load_engine(folder, select_backend(backend, "cpu", 1), torch.float32, config)


@pytest.mark.parametrize("backend", ["reference", "cpu"])
def test_greedy_equals_hugging_face_batched_and_chunked(folder, oracle, backend):
    prompts = [prompt_of(n) for n in (1, 9, 50, 90)]
    engine = engine_of(folder, backend)
    for index, prompt in enumerate(prompts):
        engine.add(request(str(index), prompt))
    together = drain(engine)
    assert [tokens(together[str(index)]) for index in range(len(prompts))] == [oracle(prompt) for prompt in prompts]


@pytest.mark.parametrize("quantization", [None, Scheme(8), Scheme(4)], ids=str)
def test_decode_steps_with_experts_are_recorded(folder, quantization):
    """Which experts run is no part of a recording: the tokens of recorded steps are those of steps that are not."""
    engine = engine_of(folder, quantization=quantization)
    graphs = engine.runner._graphs
    if graphs is None:
        pytest.skip("no compiled kernels here")
    plain = engine_of(folder, quantization=quantization)
    plain.runner._graphs = None
    outputs = []
    for each in (engine, plain):
        for index in range(3):
            each.add(request(str(index), prompt_of(20 + index)))
        outputs.append({name: tokens(outputs) for name, outputs in drain(each).items()})
    assert outputs[0] == outputs[1] and len(outputs[0]) == 3
    assert graphs.why_not is None and graphs.has_captures


# ---- names


@pytest.mark.parametrize("config", [QWEN3, QWEN2, MIXTRAL])
def test_names_of_published_checkpoints_lead_back_to_ours(config):
    spec = ModelSpec.from_config(config)
    for name in expected_shapes(spec):
        stored = stored_name(name, spec.architecture)
        assert plain_name(stored).removeprefix("model.") == name
    stored = stored_name("layers.0.mlp.experts.3.down_proj.weight", spec.architecture)
    own_name = "block_sparse_moe.experts.3.w2" if config is MIXTRAL else "mlp.experts.3.down_proj"
    assert stored == f"model.layers.0.{own_name}.weight"


def test_a_fused_tensor_is_many_in_the_order_of_its_memory():
    fused = parts_of("model.layers.1.mlp.experts.gate_up_proj", (2, 6, 5))
    assert [(name.split("experts.")[1], shape) for name, shape in fused] == [
        ("0.gate_proj.weight", (3, 5)),
        ("0.up_proj.weight", (3, 5)),
        ("1.gate_proj.weight", (3, 5)),
        ("1.up_proj.weight", (3, 5)),
    ]
    assert [shape for _, shape in parts_of("model.layers.1.mlp.experts.down_proj", (2, 6, 5))] == [(6, 5)] * 2
    assert parts_of("model.layers.1.mlp.down_proj.weight", (6, 5)) == [("model.layers.1.mlp.down_proj.weight", (6, 5))]


# ---- configs


def test_which_layers_have_experts():
    def layers(config):
        return sorted(ModelSpec.from_config(config).experts.layers)

    assert layers(QWEN3) == [0, 1, 3]
    assert layers(QWEN2) == [1, 3]
    assert layers(QWEN3 | {"decoder_sparse_step": 2, "mlp_only_layers": [3]}) == [1]
    assert ModelSpec.from_config(QWEN3 | {"decoder_sparse_step": 5}).experts is None
    assert ModelSpec.from_config(QWEN3 | {"num_experts": 0}).experts is None


def test_transformers_5_has_another_name_for_the_number_of_experts():
    renamed = {key: value for key, value in QWEN3.items() if key != "num_experts"} | {"num_local_experts": 8}
    assert ModelSpec.from_config(renamed) == ModelSpec.from_config(QWEN3)


@pytest.mark.parametrize(
    ("config", "error", "words"),
    [
        (QWEN3 | {"num_experts_per_tok": 9}, CheckpointCorrupt, "cannot choose 9"),
        (QWEN3 | {"moe_intermediate_size": 0}, CheckpointCorrupt, "moe_intermediate_size"),
        (QWEN2 | {"use_sliding_window": True}, UnsupportedModel, "use_sliding_window"),
        (QWEN2 | {"qkv_bias": False}, UnsupportedModel, "qkv_bias"),
        (MIXTRAL | {"num_local_experts": None}, CheckpointCorrupt, "num_local_experts"),
    ],
)
def test_what_is_not_supported_is_refused_by_name(config, error, words):
    with pytest.raises(error, match=words):
        ModelSpec.from_config(config)
