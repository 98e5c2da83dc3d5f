"""GGUF files with the very metadata that llama.cpp's converter writes for each family, prepared and compared with HF.

Source of keys and values: ggml-org/llama.cpp, conversion/*.py and gguf-py/gguf/constants.py.
"""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest
import torch
import transformers
from gguf.quants import dequantize, quantize
from tokenizers.pre_tokenizers import ByteLevel

from kvrelay.engine.models.spec import ModelSpec
from kvrelay.serve.text.tokenizer import Tokenizer
from tests.engine.checkpoints.test_gguf import (
    BYTE,
    CONTROL,
    NORMAL,
    PROMPT,
    UNKNOWN,
    USER_DEFINED,
    gguf_tensors,
    interleaved,
    llama3_divisors,
    our_logits,
    prepare,
    random_model,
)

UNUSED = 5
Writer = gguf.GGUFWriter
Kind = gguf.GGMLQuantizationType
TEMPLATE = "{{ bos_token }}{% for m in messages %}[{{ m['role'] }}]{{ m['content'] }}{% endfor %}"
SIZES: dict[str, Any] = {
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 512,
}
LLAMA32_ROPE = {
    "rope_type": "llama3",
    "factor": 32.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 8192,
    "rope_theta": 500000.0,
}
GEMMA_4B_ROPE = {
    "full_attention": {"rope_type": "linear", "factor": 8.0, "rope_theta": 1e6},
    "sliding_attention": {"rope_type": "default", "rope_theta": 1e4},
}
GEMMA_1B_ROPE = GEMMA_4B_ROPE | {"full_attention": {"rope_type": "default", "rope_theta": 1e6}}


def byte_level(writer: Writer, pre: str, special: list[str], num_padding: int) -> int:
    """gpt2 vocabulary: letters, merges, then special tokens and padding at the end, as Qwen and Llama 3 have it."""
    letters = sorted(ByteLevel.alphabet())
    merges = [("t", "h"), ("th", "e"), ("Ġ", "the"), ("1", "2"), ("12", "3"), ("l", "l")]
    tokens = [*letters, *(a + b for a, b in merges), *special]
    types = [NORMAL] * (len(letters) + len(merges)) + [CONTROL] * len(special)
    tokens += [f"[PAD{len(tokens) + at}]" for at in range(num_padding)]
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre(pre)
    writer.add_token_list(tokens)
    writer.add_token_types(types + [UNUSED] * num_padding)
    writer.add_token_merges([f"{a} {b}" for a, b in merges])
    return len(letters) + len(merges)


def qwen(writer: Writer) -> None:
    first = byte_level(writer, "qwen2", ["<|endoftext|>", "<|im_start|>", "<|im_end|>"], 24)
    writer.add_eos_token_id(first + 2)
    writer.add_pad_token_id(first)
    writer.add_bos_token_id(first)
    writer.add_add_bos_token(False)


def llama3(writer: Writer) -> None:
    first = byte_level(writer, "llama-bpe", ["<|begin_of_text|>", "<|end_of_text|>", "<|eom_id|>", "<|eot_id|>"], 0)
    writer.add_bos_token_id(first)
    writer.add_eos_token_id(first + 3)


def sentencepiece(writer: Writer, control: list[str], user: list[str], *, by_id: bool) -> None:
    pieces = ["th", "he", "the", "▁the", "▁▁▁", "ll", "▁H"] + ([] if by_id else ["▁▁"])
    letters = ["▁", *"\nabcdefghijklmnopqrstuvwxyzH.,!'0123456789"]
    tokens = [*control, *user, *(f"<0x{byte:02X}>" for byte in range(256)), *pieces, *letters]
    kinds = [UNKNOWN if token == "<unk>" else CONTROL for token in control] + [USER_DEFINED] * len(user)
    types = [*kinds, *[BYTE] * 256, *[NORMAL] * (len(pieces) + len(letters))]
    writer.add_tokenizer_model("llama")
    writer.add_tokenizer_pre("default")
    writer.add_token_list(tokens)
    writer.add_token_scores([-1000.0 if kind == USER_DEFINED else -float(at) for at, kind in enumerate(types)])
    writer.add_token_types(types)


def gemma(writer: Writer) -> None:
    control = ["<pad>", "<eos>", "<bos>", "<unk>", "<mask>", "<start_of_turn>", "<end_of_turn>"]
    sentencepiece(writer, control, ["\n\n", "▁▁", "<table>"], by_id=True)
    writer.add_bos_token_id(2)
    writer.add_eos_token_id(1)
    writer.add_unk_token_id(3)
    writer.add_pad_token_id(0)
    writer.add_eot_token_id(6)
    writer.add_add_bos_token(True)
    writer.add_add_eos_token(False)
    writer.add_add_space_prefix(False)


def mistral(writer: Writer) -> None:
    sentencepiece(writer, ["<unk>", "<s>", "</s>", "[INST]", "[/INST]"], [], by_id=False)
    writer.add_bos_token_id(1)
    writer.add_eos_token_id(2)
    writer.add_unk_token_id(0)
    writer.add_add_bos_token(True)
    writer.add_add_eos_token(False)


def llama_keys(writer: Writer, config: Any) -> None:
    writer.add_vocab_size(config.vocab_size)
    writer.add_rope_dimension_count(config.head_dim)


def head_dims(writer: Writer, config: Any) -> None:
    writer.add_key_length(config.head_dim)
    writer.add_value_length(config.head_dim)


def gemma_keys(writer: Writer, config: Any) -> None:
    head_dims(writer, config)
    writer.add_sliding_window(config.sliding_window)
    full = config.rope_parameters["full_attention"]
    if full["rope_type"] == "linear":
        writer.add_rope_scaling_type(gguf.RopeScalingType.LINEAR)
        writer.add_rope_scaling_factor(full["factor"])


def gemma_new_keys(writer: Writer, config: Any) -> None:
    gemma_keys(writer, config)
    writer.add_rope_freq_base_swa(10000.0)


def no_keys(writer: Writer, config: Any) -> None:
    """Qwen2 names no head size."""


Family = tuple[str, Callable[..., Any], Callable[[Writer], None], Callable[[Writer, Any], None]]
FAMILIES: dict[str, Family] = {
    "qwen2.5": (
        "qwen2",
        lambda v: transformers.Qwen2Config(
            **SIZES, vocab_size=v, tie_word_embeddings=True, rope_parameters={"rope_type": "default", "rope_theta": 1e6}
        ),
        qwen,
        no_keys,
    ),
    "qwen3": (
        "qwen3",
        lambda v: transformers.Qwen3Config(
            **SIZES,
            vocab_size=v,
            head_dim=32,
            tie_word_embeddings=True,
            rope_parameters={"rope_type": "default", "rope_theta": 1e6},
        ),
        qwen,
        head_dims,
    ),
    "llama3.2": (
        "llama",
        lambda v: transformers.LlamaConfig(
            **SIZES, vocab_size=v, head_dim=64, tie_word_embeddings=True, rope_parameters=LLAMA32_ROPE
        ),
        llama3,
        llama_keys,
    ),
    "mistral": (
        "llama",
        lambda v: transformers.MistralConfig(
            **SIZES,
            vocab_size=v,
            head_dim=16,
            sliding_window=None,
            rope_parameters={"rope_type": "default", "rope_theta": 1e6},
        ),
        mistral,
        llama_keys,
    ),
    "gemma3-1b": (
        "gemma3",
        lambda v: transformers.Gemma3TextConfig(
            **(SIZES | {"num_hidden_layers": 13}),
            vocab_size=v,
            head_dim=32,
            query_pre_attn_scalar=32,
            sliding_window=9,
            rope_parameters=GEMMA_1B_ROPE,
        ),
        gemma,
        gemma_keys,
    ),
}
FAMILIES["gemma3-4b"] = (
    "gemma3",
    lambda v: transformers.Gemma3TextConfig(
        **(SIZES | {"num_hidden_layers": 7}),
        vocab_size=v,
        head_dim=32,
        query_pre_attn_scalar=32,
        sliding_window=9,
        rope_parameters=GEMMA_4B_ROPE,
    ),
    gemma,
    gemma_new_keys,
)


def write(path: Path, name: str, quantiser: Callable[[str, np.ndarray], Any] | None = None) -> torch.nn.Module:
    """A random model of that family, written as the converter would; returns the model."""
    arch, make_config, add_vocab, add_keys = FAMILIES[name]
    probe = Writer(path, arch)
    add_vocab(probe)
    size = len(probe.kv_data[0]["tokenizer.ggml.tokens"].value)
    model = random_model(make_config(size))
    config = model.config
    writer = Writer(path, arch)
    writer.add_type("model")
    writer.add_name(name)
    writer.add_file_type(gguf.LlamaFileType.MOSTLY_F16)
    writer.add_quantization_version(gguf.GGML_QUANT_VERSION)
    writer.add_block_count(config.num_hidden_layers)
    writer.add_context_length(config.max_position_embeddings)
    writer.add_embedding_length(config.hidden_size)
    writer.add_feed_forward_length(config.intermediate_size)
    writer.add_head_count(config.num_attention_heads)
    writer.add_head_count_kv(config.num_key_value_heads)
    rope = config.rope_parameters
    writer.add_rope_freq_base(rope.get("full_attention", rope)["rope_theta"])
    writer.add_layer_norm_rms_eps(config.rms_norm_eps)
    add_keys(writer, config)
    add_vocab(writer)
    writer.add_chat_template(TEMPLATE)
    if rope.get("rope_type") == "llama3":
        writer.add_tensor("rope_freqs.weight", llama3_divisors(config))
    for tensor, values in gguf_tensors(model, arch).items():
        if quantiser is None or values.ndim == 1:
            writer.add_tensor(tensor, values)
        else:
            raw, kind = quantiser(tensor, values)
            writer.add_tensor(tensor, raw, raw_dtype=kind)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return model


@pytest.mark.parametrize("name", FAMILIES)
def test_a_file_as_the_converter_writes_it_is_the_same_model(name: str, tmp_path: Path) -> None:
    model = write(tmp_path / "model.gguf", name)
    folder = prepare(tmp_path / "model.gguf")
    with torch.inference_mode():
        expected = model(torch.tensor([PROMPT])).logits[0]
    torch.testing.assert_close(our_logits(folder, PROMPT), expected, atol=1e-4, rtol=1e-4)
    assert ModelSpec.from_folder(folder).is_tied is model.config.tie_word_embeddings


@pytest.mark.parametrize("name", FAMILIES)
def test_its_tokenizer_is_one_for_transformers_and_for_us(name: str, tmp_path: Path) -> None:
    write(tmp_path / "model.gguf", name)
    folder = prepare(tmp_path / "model.gguf")
    theirs, ours = transformers.AutoTokenizer.from_pretrained(folder), Tokenizer(folder)
    for text in ("the theme 1234", " a  b   c\n\n", "naïve 你好 🙂", "x<unk>[INST] y<|im_end|><end_of_turn>z"):
        assert ours.encode(text) == theirs.encode(text)
        assert ours.decode(ours.encode(text)) == theirs.decode(ours.encode(text), skip_special_tokens=True)
    messages = [{"role": "user", "content": "the"}]
    prompt = theirs.apply_chat_template(messages, tokenize=True, return_dict=False)
    assert ours.encode(ours.chat_text(messages), add_special_tokens=False) == prompt


@pytest.mark.parametrize(
    ("name", "first", "ends"),
    [
        ("qwen2.5", None, ("<|im_end|>", "<|endoftext|>")),
        ("llama3.2", "<|begin_of_text|>", ("<|eot_id|>", "<|end_of_text|>", "<|eom_id|>")),
        ("mistral", "<s>", ("</s>",)),
        ("gemma3-1b", "<bos>", ("<eos>", "<end_of_turn>")),
    ],
)
def test_bos_and_every_end_are_the_familys(name: str, first: str | None, ends: tuple[str, ...], tmp_path: Path) -> None:
    write(tmp_path / "model.gguf", name)
    folder = prepare(tmp_path / "model.gguf")
    theirs, ours = transformers.AutoTokenizer.from_pretrained(folder), Tokenizer(folder)
    expected = {theirs.convert_tokens_to_ids(token) for token in ends}
    assert ours.eos_ids == expected == set(ModelSpec.from_folder(folder).eos_ids)
    begin = theirs.convert_ids_to_tokens(ours.encode("the"))[0]
    assert begin == (first or "the")


@pytest.mark.parametrize(("name", "factor"), [("gemma3-1b", 1.0), ("gemma3-4b", 8.0)])
def test_gemma3_slides_five_times_in_six_with_its_own_rope(name: str, factor: float, tmp_path: Path) -> None:
    """Neither the pattern nor, in older files, the local rope's base is in the metadata."""
    write(tmp_path / "model.gguf", name)
    spec = ModelSpec.from_folder(prepare(tmp_path / "model.gguf"))
    assert spec.layer_windows[:7] == (9, 9, 9, 9, 9, None, 9)
    assert spec.layer_ropes[:7] == (1, 1, 1, 1, 1, 0, 1)
    full, local = spec.ropes
    assert (full.theta, full.factor, local.theta, local.factor, local.kind) == (1e6, factor, 1e4, 1.0, "default")


def test_mistrals_instruction_mark_is_followed_by_one_space(tmp_path: Path) -> None:
    """Its tokenizer.json puts the dummy space before a text's first token only; the template spells the others."""
    write(tmp_path / "model.gguf", "mistral")
    tokenizer = Tokenizer(prepare(tmp_path / "model.gguf"))
    ids = tokenizer.encode("<s>[INST] the[/INST]", add_special_tokens=False)
    assert ids == tokenizer.encode("<s>[INST]", add_special_tokens=False) + tokenizer.encode("the")[1:] + [4]


# ---- quantised types


def k_blocks(kind: Kind, shape: tuple[int, ...], rng: np.random.Generator) -> np.ndarray:
    """Random blocks of a K type with small scales: every bit pattern of their fields is a legal one."""
    size, num_bytes = gguf.GGML_QUANT_SIZES[kind]
    blocks = rng.integers(0, 256, (int(np.prod(shape)) // size, num_bytes), dtype=np.uint8)
    scales = np.array([2e-4, 1e-3], dtype="<f2").view(np.uint8)
    if kind == Kind.Q6_K:
        blocks[:, -2:] = scales[:2]
    else:
        blocks[:, :4] = scales
    return blocks.reshape(shape[0], -1)


MIXES = {
    "Q4_0": (Kind.Q4_0, Kind.Q8_0),
    "Q4_1": (Kind.Q4_1, Kind.Q8_0),
    "Q5_0": (Kind.Q5_0, Kind.Q8_0),
    "Q8_0": (Kind.Q8_0, Kind.Q8_0),
    "F16": (Kind.F16, Kind.F16),
    "BF16": (Kind.BF16, Kind.BF16),
    "Q4_K_M": (Kind.Q4_K, Kind.Q6_K),
    "Q5_K_M": (Kind.Q5_K, Kind.Q6_K),
    "Q6_K": (Kind.Q6_K, Kind.Q8_0),
}


@pytest.mark.parametrize("mix", MIXES)
@pytest.mark.parametrize("name", ["llama3.2", "gemma3-1b", "qwen2.5"])
def test_every_common_quantisation_computes_what_its_weights_say(
    mix: str, name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Against Hugging Face with the weights that gguf's own code dequantises; mixes as llama-quantize makes them."""
    for key, value in (("hidden_size", 256), ("intermediate_size", 256), ("num_attention_heads", 8)):
        monkeypatch.setitem(SIZES, key, value)
    rng = np.random.default_rng(0)
    weights: dict[str, np.ndarray] = {}

    def quantiser(tensor: str, values: np.ndarray) -> tuple[np.ndarray, Kind]:
        kind = MIXES[mix][any(part in tensor for part in ("token_embd", "attn_v", "ffn_down"))]
        is_k = kind.name.endswith("_K")
        raw = k_blocks(kind, values.shape, rng) if is_k else quantize(values, kind)
        weights[tensor] = dequantize(raw, kind)
        return raw, kind

    model = write(tmp_path / "model.gguf", name, quantiser)
    arch, config = FAMILIES[name][0], model.config
    names = gguf.get_tensor_name_map(
        next(key for key, value in gguf.MODEL_ARCH_NAMES.items() if value == arch), config.num_hidden_layers
    )
    state = model.state_dict()
    for key, parameter in state.items():
        values = weights.get(f"{names.get_name(key.removesuffix('.weight'))}.weight")
        if values is not None:
            parameter.copy_(torch.from_numpy(straight(values, key, config) if arch == "llama" else values))
    with torch.inference_mode():
        expected = model(torch.tensor([PROMPT])).logits[0]
    ours = our_logits(prepare(tmp_path / "model.gguf"), PROMPT)
    torch.testing.assert_close(ours, expected, atol=1e-3, rtol=1e-3)
    assert expected.std() > 1e-3


def straight(values: np.ndarray, key: str, config: Any) -> np.ndarray:
    """q and k rows out of llama.cpp's order: `interleaved` undone by where it sends each row."""
    heads = {"q_proj": config.num_attention_heads, "k_proj": config.num_key_value_heads}
    count = next((count for part, count in heads.items() if part in key), None)
    if count is None:
        return values
    order = interleaved(np.arange(values.shape[0]), count)
    result = np.empty_like(values)
    result[order] = values
    return result


def test_the_prepared_configs_name_what_transformers_would_build(tmp_path: Path) -> None:
    for name in FAMILIES:
        path = tmp_path / f"{name}.gguf"
        model = write(path, name)
        folder = prepare(path)
        config = transformers.AutoConfig.from_pretrained(folder)
        ours = ModelSpec.from_config(json.loads((folder / "config.json").read_text()))
        theirs = ModelSpec.from_config(model.config)
        assert (ours.layer_windows, ours.layer_ropes, ours.ropes) == (
            theirs.layer_windows,
            theirs.layer_ropes,
            theirs.ropes,
        )
        assert config.vocab_size == model.config.vocab_size
