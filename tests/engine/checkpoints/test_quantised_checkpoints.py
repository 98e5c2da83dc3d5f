"""Published quantised formats load as what they mean: greedy tokens are Hugging Face's over the same plain weights."""

import functools
import json
import logging

import pytest
import torch
import transformers
from safetensors.torch import load_file, save_file

from kvrelay.engine.checkpoints.files import check_folder
from kvrelay.engine.checkpoints.loading import load_model
from kvrelay.engine.checkpoints.tiny import TINY_CONFIGS, tiny_checkpoint
from kvrelay.engine.models.quantization import quantization_of
from kvrelay.engine.models.spec import ModelSpec
from kvrelay.engine.step.build import load_engine
from kvrelay.engine.step.config import EngineConfig
from kvrelay.errors import CheckpointCorrupt, UnsupportedModel
from kvrelay.kernels.common.quant_scheme import Scheme
from kvrelay.kernels.cpu.native_kernels import NativeExperts, NativeQuantLinear
from kvrelay.kernels.select import select_backend
from tests.engine.checkpoints.quantised_folders import DYNAMIC, FORMATS, GPTQ, INT4, quantised_folder, scheme
from tests.engine.step.test_engine import drain, prompt_of, request, tokens

pytestmark = pytest.mark.usefixtures("one_thread")
PROMPTS = [prompt_of(length) for length in (9, 40)]
NUM_TOKENS = 12
KEPT = ("int8", "int8 packed", "int4", "int4 with zeros", "int4 channels", "gptq", "gptq v2", "gptq 8 bits", "awq")
INEXACT = ("int4 with zeros", "gptq", "gptq v2", "awq")  # the compiled kernels' offsets are half floats


@pytest.fixture(scope="module")
def folders(tmp_path_factory):
    """(quantised, plain) folders of a family in a format; `change` spoils the former."""
    source = functools.cache(lambda family: tiny_checkpoint(family, tmp_path_factory.mktemp(family)))

    @functools.cache
    def find(family, kind, change=lambda tensors: None):
        return quantised_folder(source(family), tmp_path_factory.mktemp("made") / "x", kind, change)

    return find


@functools.cache
def backend_of(name):
    return select_backend(name, "cpu", 1)


@functools.cache
def ours(folder, backend="reference"):
    config = EngineConfig(block_size=8, kv_memory_bytes=4 << 20, token_budget=64)
    engine = load_engine(folder, backend_of(backend), torch.float32, config)
    for index, prompt in enumerate(PROMPTS):
        engine.add(request(str(index), prompt, max_tokens=NUM_TOKENS))
    outputs = drain(engine)
    return [tokens(outputs[str(index)]) for index in range(len(PROMPTS))]


def theirs(folder):
    model = transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    model.generation_config.eos_token_id, found = None, []
    for prompt in PROMPTS:
        ids = torch.tensor([prompt])
        out = model.generate(ids, attention_mask=torch.ones_like(ids), max_new_tokens=NUM_TOKENS, do_sample=False)
        found.append(out[0, len(prompt) :].tolist())
    return found


CASES = [
    *(("llama", kind) for kind in FORMATS),
    ("deepseek_v3", "fp8 blocks"), ("qwen3_moe", "awq"), ("mixtral", "int4"), ("gemma3", "fp8 channels"),
    ("qwen2", "int8"),
]  # fmt: skip


@pytest.mark.parametrize(("family", "kind"), CASES)
def test_greedy_tokens_equal_hugging_faces_over_the_same_numbers(folders, family, kind):
    quantised, plain = folders(family, kind)
    check_folder(quantised)
    expected = theirs(plain)
    assert ours(quantised) == expected
    if kind in KEPT and kind not in INEXACT:
        assert ours(quantised, "cpu") == expected


@pytest.mark.parametrize("kind", FORMATS)
def test_the_cpu_keeps_integers_and_tells_its_error(folders, kind, caplog):
    """Integers stay in the compiled kernels' format; fp8 and MXFP4 become the model's dtype."""
    quantised, plain = folders("llama", kind)
    backend = backend_of("cpu")
    with caplog.at_level(logging.INFO, "kvrelay.engine.checkpoints.loading"):
        model = load_model(quantised, backend, torch.float32)
    [told] = [record.getMessage() for record in caplog.records]
    error, num_weights = (
        model.weight_error,
        sum(w.numel() for name, w in load_file(plain / "model.safetensors").items() if "_proj" in name),
    )
    assert error.num_weights == num_weights
    assert (0 < error.relative < 5e-4) if kind in INEXACT else error.relative == 0
    if backend.compiled_kernels is not None:
        assert isinstance(model.layers[0].attention.o, NativeQuantLinear) == (kind in KEPT)
        assert (error.num_bytes < 2 * num_weights) == (kind in KEPT)
    assert f"relative RMS error {100 * error.relative:.3f}%" in told and FORMATS[kind][0]["quant_method"] in told
    half = load_model(quantised, backend, torch.bfloat16)
    assert half.weight_error.relative < (5e-4 if kind in KEPT else 0.005)


def test_experts_of_integers_are_packed_as_they_are(folders):
    backend = backend_of("cpu")
    if backend.compiled_kernels is None:
        pytest.skip("no compiled kernels here")
    experts = load_model(folders("mixtral", "int4")[0], backend, torch.float32).layers[0].mlp.experts
    assert isinstance(experts, NativeExperts) and experts.error.relative == 0
    assert experts.error.num_bytes < experts.error.num_weights


@pytest.mark.parametrize("kind", ["fp8", "fp8 blocks", "awq", "mxfp4"])
def test_the_setting_quantises_anew_and_its_error_is_told(folders, kind):
    quantised, plain = folders("llama", kind)
    backend, schemes = backend_of("cpu"), (Scheme(8), Scheme(4))
    errors = [load_model(quantised, backend, torch.float32, quantization=it).weight_error.relative for it in schemes]
    anew = [load_model(plain, backend, torch.float32, quantization=it).weight_error.relative for it in schemes]
    assert errors == pytest.approx(anew) and errors[0] < 0.3 * anew[1]


def first(tensors, end):
    return next(name for name in sorted(tensors) if name.endswith(end))


def swap_nibbles(tensors):
    """Of every packed weight, two neighbouring 4-bit numbers for each other."""
    for name in [name for name in tensors if name.endswith((".weight_packed", ".qweight"))]:
        codes = tensors[name].contiguous().view(torch.uint8)
        tensors[name] = (codes << 4 | codes >> 4).view(tensors[name].dtype)


def turn_scales(tensors):
    """Every scale off by one column, or row."""
    for name in [name for name in tensors if name.endswith((".weight_scale", ".weight_scale_inv", ".scales"))]:
        tensors[name] = tensors[name].roll(1, 0 if tensors[name].shape[-1] == 1 else -1)


def shift_zeros(tensors):
    for name in [name for name in tensors if name.endswith(("qzeros", "zero_point"))]:
        tensors[name] = tensors[name] ^ 0x11111111


@pytest.mark.parametrize(
    ("kind", "change"),
    [
        *((kind, swap_nibbles) for kind in ("int4", "int4 with zeros", "int4 channels", "gptq", "awq", "mxfp4")),
        *((kind, turn_scales) for kind in ("fp8 blocks", "fp8 channels", "int8", "int4", "gptq", "awq", "mxfp4")),
        *((kind, shift_zeros) for kind in ("int4 with zeros", "gptq", "gptq v2", "awq")),
    ],
)  # fmt: skip
def test_the_control_a_wrong_nibble_scale_or_zero_point_changes_tokens(folders, kind, change):
    assert ours(folders("llama", kind, change)[0]) != ours(folders("llama", kind)[0])


def test_an_ignored_module_is_plain_and_a_target_by_name_wins(folders, tmp_path):
    """As llm-compressor writes mixed schemes: names before patterns before Linear."""
    fp8, int4 = FORMATS["fp8 channels"][0]["config_groups"]["group_0"], FORMATS["int4"][0]["config_groups"]["group_0"]
    groups = {
        "a": int4 | {"format": "pack-quantized"},
        "b": fp8 | {"targets": [r"re:.*self_attn.*"], "format": "float-quantized"},
        "c": int4 | {"targets": ["model.layers.0.self_attn.o_proj"], "format": "pack-quantized"},
    }
    config = scheme({}, "mixed-precision", config_groups=groups, ignore=["lm_head", "re:.*layers.1.mlp.*"])
    found = quantization_of({"quantization_config": config}, "llama").format_of
    assert found("model.layers.0.mlp.up_proj").packing == "int32"
    assert found("model.layers.0.self_attn.q_proj").packing == "fp8"
    assert found("model.layers.0.self_attn.o_proj").packing == "int32"
    assert found("model.layers.1.mlp.up_proj") is None and found("lm_head") is None

    def mix(tensors):
        """Attention of fp8 channels, the second layer's MLP plain."""
        other, plain = (load_file(folder / "model.safetensors") for folder in folders("llama", "fp8 channels"))
        for name in [name for name in tensors if "self_attn" in name and "layers.0.self_attn.o_proj" not in name]:
            del tensors[name]
        for name in [name for name in tensors if "layers.1.mlp" in name]:
            del tensors[name]
        tensors |= {
            name: other[name] for name in other if "self_attn" in name and "layers.0.self_attn.o_proj" not in name
        }
        tensors |= {name: plain[name] for name in plain if "layers.1.mlp" in name}

    source = tmp_path / "source"
    tiny_checkpoint("llama", source)
    mixed, expected = quantised_folder(source, tmp_path / "x", "int4", mix)
    raw = json.loads((mixed / "config.json").read_text())
    (mixed / "config.json").write_text(json.dumps(raw | {"quantization_config": config}))
    numbers = load_file(expected / "model.safetensors")
    of_fp8 = load_file(folders("llama", "fp8 channels")[1] / "model.safetensors")
    for name in numbers:
        if ("self_attn" in name and "layers.0.self_attn.o_proj" not in name) or "layers.1.mlp" in name:
            numbers[name] = of_fp8[name]
    save_file(numbers, expected / "model.safetensors", metadata={"format": "pt"})
    assert ours(mixed) == theirs(expected)


def dropped(end):
    return lambda tensors: tensors.pop(first(tensors, end))


def replaced(end, make):
    return lambda tensors: tensors.update({first(tensors, end): make(tensors[first(tensors, end)])})


def added(name, tensor):
    return lambda tensors: tensors.update({name: tensor})


FIRST_COLUMN, TO_FLOAT, ZEROS = (lambda x: x[:, :1].clone()), (lambda x: x.float()), torch.zeros(64, dtype=torch.int32)
BROKEN = {
    "no scale": ("fp8", dropped(".weight_scale"), r"weight_scale or .*_scale_inv is missing: the weights are fp8"),
    "no weight": ("int4", dropped("down_proj.weight_packed"), r"down_proj\.weight_packed is missing"),
    "no zeros": ("awq", dropped(".qzeros"), r"qzeros is missing: the weights are AWQ int4 in groups of 32"),
    "another block's scales": (
        "fp8 blocks", replaced(".weight_scale_inv", FIRST_COLUMN), r"inv is F32 \[4, 1\], expected .*\[4, 8\]",
    ),
    "other groups' scales": (
        "gptq", replaced(".scales", lambda x: x[:1].clone()), r"scales is F16 \[1, 64\], expected .* \[4, 64\]",
    ),
    "integers as floats": ("int4", replaced(".weight_packed", TO_FLOAT), r"weight_packed is F32 .*, expected I32"),
    "fp8 as int8": (
        "fp8", replaced("k_proj.weight", lambda x: x.view(torch.int8)), r"k_proj\.weight is I8 .*, expected F8_E4M3",
    ),
    "act order": ("int4", added("model.layers.0.mlp.up_proj.weight_g_idx", ZEROS), "activation order"),
    "scale of a plain weight": ("fp8", replaced("k_proj.weight", TO_FLOAT), r"k_proj\.weight is F32 .*, expected F8"),
    "scale of nothing": ("fp8", added("model.layers.9.mlp.up_proj.weight_scale", ZEROS), "no place"),
    "fp8 embeddings": (
        "fp8", replaced("embed_tokens.weight", lambda x: x.to(torch.float8_e4m3fn)), "not plain floating point",
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", BROKEN)
def test_a_wrong_tensor_is_refused_by_name(folders, name):
    kind, change, words = BROKEN[name]
    broken, _ = folders("llama", kind, change)
    with pytest.raises(CheckpointCorrupt, match=words):
        check_folder(broken)


def test_groups_by_activation_order_that_the_config_denies_are_refused(folders, tmp_path):
    broken, _ = quantised_folder(
        folders("llama", "gptq")[1], tmp_path / "x", "gptq", replaced(".g_idx", lambda x: x.flip(0))
    )
    with pytest.raises(CheckpointCorrupt, match="activation order"):
        load_model(broken, backend_of("reference"), torch.float32)


def test_scales_of_a_kv_cache_are_passed_over_and_it_is_said_once(folders, tmp_path, caplog):
    def add(tensors):
        tensors["model.layers.0.self_attn.k_scale"] = torch.ones(1)
        tensors["model.layers.0.self_attn.v_proj.output_scale"] = torch.ones(1)

    folder, _ = quantised_folder(folders("llama", "fp8 channels")[1], tmp_path / "x", "fp8 channels", add)
    raw = json.loads((folder / "config.json").read_text())
    raw["quantization_config"]["kv_cache_scheme"] = {"num_bits": 8, "type": "float"}
    (folder / "config.json").write_text(json.dumps(raw))
    with caplog.at_level(logging.INFO, "kvrelay.engine.checkpoints.loading"):
        assert ours(folder) == ours(folders("llama", "fp8 channels")[0])
    assert [record.getMessage() for record in caplog.records if "kv_cache_scheme" in record.getMessage()] == [
        "kv_cache_scheme of the checkpoint is ignored: an fp8 cache has a scale for each vector here"
    ]


def test_biases_of_zeros_that_a_model_has_no_place_for_are_passed_over(folders):
    """Old AutoGPTQ writes one for every linear layer. One with numbers would change the model."""
    name = "model.layers.0.mlp.up_proj.bias"
    empty, _ = folders("llama", "gptq", added(name, torch.zeros(128)))
    assert ours(empty) == ours(folders("llama", "gptq")[0])
    full, _ = folders("llama", "gptq", added(name, torch.ones(128)))
    with pytest.raises(CheckpointCorrupt, match=r"up_proj\.bias has no place"):
        check_folder(full)


INT = {"num_bits": 4, "type": "int", "group_size": 32}
REFUSED = {
    "bitsandbytes": {"quant_method": "bitsandbytes", "load_in_4bit": True},
    "quark": {"quant_method": "quark"},
    "hqq": {"quant_method": "hqq"},
    "mxfp4": {"quant_method": "mxfp4"},
    "unknown": {"bits": 4},
    r"gptq with desc_act \(groups by activation order\)": GPTQ | {"desc_act": True},
    "gptq with 3 bits": GPTQ | {"bits": 3},
    "gptq with 4 bits in checkpoint_format marlin": GPTQ | {"checkpoint_format": "marlin"},
    "gptq with dynamic": GPTQ | {"dynamic": {"+:.*down.*": {"bits": 8}}},
    "awq with version gemv": {"quant_method": "awq", "bits": 4, "version": "GEMV"},
    "modelopt with quant_algo NVFP4": {"quant_method": "modelopt", "quant_algo": "NVFP4"},
    "format nvfp4-pack-quantized": scheme({"num_bits": 4, "type": "float", "group_size": 16}, "nvfp4-pack-quantized"),
    "int weights of 3 bits": scheme(INT | {"num_bits": 3}, "pack-quantized"),
    "actorder group": scheme(INT | {"actorder": "group"}, "pack-quantized"),
    "format marlin-24": scheme(INT, "marlin-24"),
    "sparsity dense or transform_config": scheme(
        INT, "pack-quantized", transform_config={"config_groups": {"u": {"type": "hadamard"}}}
    ),
    "sparsity sparse-24-bitmask": scheme(INT, "pack-quantized", sparsity_config={"format": "sparse-24-bitmask"}),
}


@pytest.mark.parametrize("words", REFUSED)
def test_what_is_not_supported_is_refused_by_name_with_a_way_out(words):
    with pytest.raises(
        UnsupportedModel, match=f"quantised by .*{words}.* use an fp8, int8, int4.*GGUF.*bf16"
    ) as caught:
        ModelSpec.from_config(TINY_CONFIGS["llama"] | {"quantization_config": REFUSED[words]})
    assert "llama" in str(caught.value)


@pytest.mark.parametrize(
    "config",
    [
        GPTQ | {"group_size": -2},
        GPTQ | {"group_size": "big"},
        {"quant_method": "gptq"},
        {"quant_method": "fp8", "weight_block_size": [128]},
        {"quant_method": "fp8", "weight_block_size": [0, 128]},
        {"quant_method": "compressed-tensors"},
        scheme(None, "pack-quantized"),
        scheme({"num_bits": 8, "type": "float"}, "float-quantized", ignore=["re:("]),
    ],
)
def test_a_malformed_quantization_config_is_refused(config):
    with pytest.raises(CheckpointCorrupt, match=r"quantization_config \(.*\) is malformed"):
        ModelSpec.from_config(TINY_CONFIGS["llama"] | {"quantization_config": config})


@pytest.mark.parametrize(
    ("config", "words"),
    [
        ({"quant_method": "fbgemm_fp8", "activation_scale_ub": 1200.0}, "fp8 (fbgemm_fp8)"),
        ({"quant_method": "modelopt", "quant_algo": "FP8"}, "fp8 (modelopt)"),
        ({"quant_method": "fp8", "weight_block_size": [128, 128]}, "fp8 in blocks of 128 x 128 (fp8)"),
        ({"quant_method": "awq", "w_bit": 4, "q_group_size": 64}, "AWQ int4 in groups of 64 (awq)"),
        (scheme(INT4 | {"actorder": "static"}, "pack-quantized", DYNAMIC), "int4 in groups of 32 (compressed-tensors)"),
        (scheme({"num_bits": 8, "type": "float", "block_structure": "128x128"}, "float-quantized"), "128 x 128"),
    ],
)
def test_other_dialects_mean_the_same_formats(config, words):
    assert words in str(ModelSpec.from_config(TINY_CONFIGS["llama"] | {"quantization_config": config}).quantization)
    nested = TINY_CONFIGS["gemma3"] | {"quantization_config": config}
    outer = {"architectures": ["Gemma3ForConditionalGeneration"], "text_config": nested}
    assert words in str(ModelSpec.from_config(outer).quantization)
