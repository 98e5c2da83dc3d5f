"""A GGUF file becomes the same model that it was written from: weights, config and tokens."""

import json
import unicodedata
from collections.abc import Callable
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest
import torch
import transformers
from gguf.quants import quantize
from tokenizers.pre_tokenizers import ByteLevel
from torch import Tensor
from transformers.modeling_gguf_pytorch_utils import load_gguf_checkpoint

from kvrelay.engine.checkpoints.checkpoint import prepare_checkpoint
from kvrelay.engine.checkpoints.gguf_convert import GgufFile, tensor_names
from kvrelay.engine.checkpoints.loading import load_model
from kvrelay.engine.models.spec import ModelSpec
from kvrelay.errors import CheckpointCorrupt, ModelError, UnsupportedModel
from kvrelay.kernels.backend import AttentionBatch
from kvrelay.kernels.oracle.reference import ReferenceBackend
from kvrelay.settings.engine import ModelSettings

F32, Q8 = gguf.GGMLQuantizationType.F32, gguf.GGMLQuantizationType.Q8_0
NORMAL, UNKNOWN, CONTROL, USER_DEFINED, BYTE = 1, 2, 3, 4, 6
TEXTS = (
    "Hello, world! It's 2024.",
    "1234 + 5678 = 6912",
    "the  theme\n\n\tof the\nthem",
    "Привет, мир",
    "日本語のテスト",
    "naïve cafe\u0301 🙂👩‍👩‍👧",
    "עברית العربية हिन्दी",
)

# ---- vocabularies


def byte_level_vocab() -> dict[str, Any]:
    """Every byte, a few merges that digits and words can reach, and ChatML's tokens."""
    letters = sorted(ByteLevel.alphabet())
    merges = [
        ("t", "h"),
        ("th", "e"),
        ("Ġ", "the"),
        ("1", "2"),
        ("12", "3"),
        ("l", "l"),
        ("'", "s"),
        ("e", "Ì"),
        ("Ã", "¯"),
    ]
    special = ["<|endoftext|>", "<|im_start|>", "<|im_end|>"]
    tokens = special + letters + [a + b for a, b in merges] + ["<think>"]
    return {
        "model": "gpt2",
        "tokens": tokens,
        "token_type": [CONTROL] * 3 + [NORMAL] * (len(letters) + len(merges)) + [USER_DEFINED],
        "merges": [f"{a} {b}" for a, b in merges],
        "bos": 1,
        "eos": 2,
        "pad": 0,
    }


def sentencepiece_vocab(is_gemma: bool) -> dict[str, Any]:
    """Control tokens, bytes, then pieces whose scores fall with their ids (Gemma's user-defined ones: -1000)."""
    control = ["<pad>", "<eos>", "<bos>", "<unk>", "<end_of_turn>"] if is_gemma else ["<unk>", "<s>", "</s>"]
    kinds = [UNKNOWN if token == "<unk>" else CONTROL for token in control]
    runs = ["\n\n", "  ", "   "] if is_gemma else []
    pieces = ["th", "▁the", "he", "▁th", "ll", "lo", "▁H", "ello", "em", "me", "▁▁"]
    pieces = [piece for piece in pieces if not (is_gemma and piece == "▁▁")]
    letters = ["▁", *"\nabcdefghijklmnopqrstuvwxyzH.,!'0123456789"]
    tokens = [*control, *(f"<0x{byte:02X}>" for byte in range(256)), *runs, *pieces, *letters]
    types = [*kinds, *[BYTE] * 256, *[USER_DEFINED] * len(runs), *[NORMAL] * (len(pieces) + len(letters))]
    scores = [-1000.0 if kind == USER_DEFINED else -float(at) for at, kind in enumerate(types)]
    ids = {"bos": 2, "eos": 1, "pad": 0, "unk": 3} if is_gemma else {"bos": 1, "eos": 2, "unk": 0}
    return {"model": "llama", "tokens": tokens, "token_type": types, "scores": scores, **ids}


# ---- files

SIZES: dict[str, Any] = {
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 128,
    "pad_token_id": 0,
}
LLAMA3 = {
    "rope_type": "llama3",
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 8192,
    "rope_theta": 500000.0,
}
CASES: dict[str, tuple[str, Callable[[int], transformers.PretrainedConfig]]] = {
    "llama": ("llama", lambda v: transformers.LlamaConfig(**SIZES, vocab_size=v)),
    "llama-tied-biased": (
        "llama",
        lambda v: transformers.LlamaConfig(**SIZES, vocab_size=v, tie_word_embeddings=True, attention_bias=True),
    ),
    "llama3-rope": (
        "llama",
        lambda v: transformers.LlamaConfig(**SIZES, vocab_size=v, head_dim=32, rope_parameters=LLAMA3),
    ),
    "qwen2": ("qwen2", lambda v: transformers.Qwen2Config(**SIZES, vocab_size=v, tie_word_embeddings=True)),
    "qwen3": ("qwen3", lambda v: transformers.Qwen3Config(**SIZES, vocab_size=v, head_dim=32)),
    "qwen3moe": (
        "qwen3moe",
        lambda v: transformers.Qwen3MoeConfig(
            **SIZES,
            vocab_size=v,
            head_dim=32,
            moe_intermediate_size=64,
            num_experts=6,
            num_experts_per_tok=2,
            norm_topk_prob=True,
        ),
    ),
    "gemma2": (
        "gemma2",
        lambda v: transformers.Gemma2Config(
            **SIZES, vocab_size=v, head_dim=32, query_pre_attn_scalar=32, sliding_window=6
        ),
    ),
    "gemma3": (
        "gemma3",
        lambda v: transformers.Gemma3TextConfig(
            **(SIZES | {"num_hidden_layers": 7}), vocab_size=v, head_dim=32, query_pre_attn_scalar=32, sliding_window=6
        ),
    ),
}


def random_model(config: transformers.PretrainedConfig) -> torch.nn.Module:
    torch.manual_seed(0)
    model = transformers.AutoModelForCausalLM.from_config(config, attn_implementation="eager", dtype=torch.float32)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            scale = 0.2 if parameter.ndim == 1 else 0.7 * parameter.shape[-1] ** -0.5
            offset = 1.0 if "norm" in name and "gemma" not in config.model_type else 0.0
            parameter.copy_(torch.randn_like(parameter) * scale + offset)
    return model.eval()


def interleaved(weight: np.ndarray, heads: int) -> np.ndarray:
    """llama.cpp's order of Llama's q and k rows, as its converter writes it."""
    half = weight.shape[0] // heads // 2
    return weight.reshape(heads, 2, half, *weight.shape[1:]).swapaxes(1, 2).reshape(weight.shape)


def gguf_tensors(model: torch.nn.Module, arch: str) -> dict[str, np.ndarray]:
    config = model.config
    name_map = gguf.get_tensor_name_map(
        next(key for key, value in gguf.MODEL_ARCH_NAMES.items() if value == arch), config.num_hidden_layers
    )
    tensors: dict[str, np.ndarray] = {}
    for name, tensor in model.state_dict().items():
        if name == "lm_head.weight" and config.tie_word_embeddings:
            continue
        values = tensor.float().numpy()
        if ".mlp.experts." in name:
            tensors |= expert_tensors(name, values)
            continue
        stem, suffix = name.rsplit(".", 1)
        if arch == "llama" and "q_proj" in name:
            values = interleaved(values, config.num_attention_heads)
        if arch == "llama" and "k_proj" in name:
            values = interleaved(values, config.num_key_value_heads)
        if arch.startswith("gemma") and "norm" in name:
            values = values + 1.0
        tensors[f"{name_map.get_name(stem)}.{suffix}"] = np.ascontiguousarray(values)
    return tensors


def expert_tensors(name: str, values: np.ndarray) -> dict[str, np.ndarray]:
    """GGUF's tensors of all experts of a layer, from those that transformers fuses."""
    at = f"blk.{name.split('.')[2]}"
    if name.endswith("down_proj"):
        return {f"{at}.ffn_down_exps.weight": values}
    gate, up = (np.ascontiguousarray(half) for half in np.split(values, 2, axis=1))
    return {f"{at}.ffn_gate_exps.weight": gate, f"{at}.ffn_up_exps.weight": up}


def llama3_divisors(config: transformers.PretrainedConfig) -> np.ndarray:
    from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

    plain = 1.0 / (config.rope_parameters["rope_theta"] ** (torch.arange(0, config.head_dim, 2) / config.head_dim))
    scaled, _ = ROPE_INIT_FUNCTIONS["llama3"](config, torch.device("cpu"))
    return (plain / scaled).float().numpy()


def write_gguf(
    path: Path,
    arch: str,
    model: torch.nn.Module,
    vocab: dict[str, Any],
    *,
    pre: str | None = "smollm",
    extra: Callable[[gguf.GGUFWriter], object] | None = None,
    quantised: bool = False,
) -> Path:
    config = model.config
    writer = gguf.GGUFWriter(path, arch)
    writer.add_context_length(config.max_position_embeddings)
    writer.add_embedding_length(config.hidden_size)
    writer.add_block_count(config.num_hidden_layers)
    writer.add_feed_forward_length(config.intermediate_size)
    writer.add_head_count(config.num_attention_heads)
    writer.add_head_count_kv(config.num_key_value_heads)
    writer.add_layer_norm_rms_eps(config.rms_norm_eps)
    head_dim = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
    writer.add_key_length(head_dim)
    writer.add_value_length(head_dim)
    rope = config.rope_parameters
    writer.add_rope_freq_base(rope.get("full_attention", rope)["rope_theta"])
    if arch in ("gemma2", "gemma3"):
        writer.add_sliding_window(config.sliding_window)
    if arch == "gemma2":
        writer.add_attn_logit_softcapping(config.attn_logit_softcapping)
        writer.add_final_logit_softcapping(config.final_logit_softcapping)
    if arch == "qwen3moe":
        writer.add_expert_count(config.num_experts)
        writer.add_expert_used_count(config.num_experts_per_tok)
        writer.add_expert_feed_forward_length(config.moe_intermediate_size)
    if rope.get("rope_type") == "llama3":
        writer.add_tensor("rope_freqs.weight", llama3_divisors(config))
    add_vocab(writer, vocab, pre)
    if extra is not None:
        extra(writer)
    for name, values in gguf_tensors(model, arch).items():
        if quantised and values.ndim > 1:
            writer.add_tensor(name, quantize(values, Q8), raw_dtype=Q8)
        else:
            writer.add_tensor(name, values)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def add_vocab(writer: gguf.GGUFWriter, vocab: dict[str, Any], pre: str | None) -> None:
    writer.add_tokenizer_model(vocab["model"])
    if pre is not None:
        writer.add_tokenizer_pre(pre)
    writer.add_token_list(vocab["tokens"])
    writer.add_token_types(vocab["token_type"])
    if "scores" in vocab:
        writer.add_token_scores(vocab["scores"])
    if "merges" in vocab:
        writer.add_token_merges(vocab["merges"])
    writer.add_bos_token_id(vocab["bos"])
    writer.add_eos_token_id(vocab["eos"])
    if "pad" in vocab:
        writer.add_pad_token_id(vocab["pad"])
    if "unk" in vocab:
        writer.add_unk_token_id(vocab["unk"])


def vocab_for(arch: str) -> dict[str, Any]:
    return sentencepiece_vocab(is_gemma=True) if arch.startswith("gemma") else byte_level_vocab()


def prepare(path: Path) -> Path:
    return prepare_checkpoint(ModelSettings(source=str(path)))


def make(tmp_path: Path, case: str, **kwargs: Any) -> tuple[torch.nn.Module, Path]:
    arch, config = CASES[case]
    vocab = vocab_for(arch)
    model = random_model(config(len(vocab["tokens"])))
    pre = "default" if arch.startswith("gemma") else "qwen2" if arch.startswith("qwen") else "smollm"
    return model, write_gguf(tmp_path / f"{case}.gguf", arch, model, vocab, **({"pre": pre} | kwargs))


def our_logits(folder: Path, token_ids: list[int]) -> Tensor:
    backend = ReferenceBackend("cpu")
    model = load_model(folder, backend, torch.float32)
    count, shape = len(token_ids), model.attention_shape
    blocks = -(-count // 16)
    kv = [torch.zeros(blocks, 2, 16, shape.num_kv_heads, shape.head_dim) for _ in range(model.spec.num_layers)]
    batch = AttentionBatch(
        query_starts=torch.tensor([0, count], dtype=torch.int32),
        context_lens=torch.tensor([count], dtype=torch.int32),
        block_tables=torch.arange(blocks, dtype=torch.int32)[None],
        slot_mapping=torch.arange(count),
        positions=torch.arange(count),
        num_decode=0,
        max_query_len=count,
        max_context_len=count,
    )
    with torch.inference_mode():
        return model.logits(model.forward(torch.tensor(token_ids), batch, backend.plan(batch, shape), kv))


PROMPT = [(17 * i + 5) % 250 for i in range(40)]


@pytest.mark.parametrize("case", CASES)
def test_the_converted_model_computes_what_the_original_does(case: str, tmp_path: Path) -> None:
    model, path = make(tmp_path, case)
    folder = prepare(path)
    with torch.inference_mode():
        expected = model(torch.tensor([PROMPT])).logits[0]
        reloaded = transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
        theirs = reloaded(torch.tensor([PROMPT])).logits[0]
    torch.testing.assert_close(our_logits(folder, PROMPT), expected, atol=1e-4, rtol=1e-4)
    torch.testing.assert_close(theirs, expected, atol=1e-4, rtol=1e-4)


@pytest.mark.parametrize("case", ["llama", "llama-tied-biased", "qwen2", "qwen3", "qwen3moe", "gemma2", "gemma3"])
def test_quantised_weights_equal_what_transformers_reads(case: str, tmp_path: Path) -> None:
    """Bit for bit, rows re-ordered before they are dequantised."""
    model, path = make(tmp_path, case, quantised=True)
    folder = prepare(path)
    theirs = load_gguf_checkpoint(str(path), return_tensors=True, model_to_load=model)["tensors"]
    from safetensors.torch import load_file

    ours = load_file(folder / "model.safetensors")
    theirs = {part: row for name, tensor in theirs.items() for part, row in one_by_one(name, tensor)}
    assert ours.keys() == set(theirs)
    for name, tensor in theirs.items():
        torch.testing.assert_close(ours[name].float(), tensor.float(), atol=0, rtol=0)


def one_by_one(name: str, tensor: Tensor) -> list[tuple[str, Tensor]]:
    """A tensor of all experts as one tensor for each."""
    if ".experts." not in name:
        return [(name, tensor)]
    at, part = name.removesuffix(".weight").rsplit(".", 1)
    parts = ("gate_proj", "up_proj") if part == "gate_up_proj" else (part,)
    return [
        (f"{at}.{index}.{piece}.weight", rows)
        for index, expert in enumerate(tensor)
        for piece, rows in zip(parts, expert.chunk(len(parts)), strict=True)
    ]


def test_an_original_and_a_quantised_model_are_not_the_same(tmp_path: Path) -> None:
    """Negative control for the two tests above."""
    model, path = make(tmp_path, "llama", quantised=True)
    with torch.inference_mode():
        expected = model(torch.tensor([PROMPT])).logits[0]
    assert (our_logits(prepare(path), PROMPT) - expected).abs().max() > 1e-3


def test_wide_and_narrow_types_keep_their_bits(tmp_path: Path) -> None:
    values = np.random.default_rng(0).standard_normal((4, 64)).astype(np.float32)
    writer = gguf.GGUFWriter(tmp_path / "t.gguf", "llama")
    kinds = {"F32": F32, "F16": gguf.GGMLQuantizationType.F16, "BF16": gguf.GGMLQuantizationType.BF16}
    for name, kind in kinds.items():
        writer.add_tensor(name, quantize(values, kind), raw_dtype=kind)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    file = GgufFile(tmp_path / "t.gguf")
    read = {name: torch.tensor(file.rows(name, slice(1, 3))) for name in kinds}
    rows = torch.from_numpy(values[1:3])
    assert torch.equal(read["F32"], rows)
    assert torch.equal(read["F16"], rows.half().float())
    assert torch.equal(read["BF16"], rows.bfloat16().float())


# ---- tokenizers


def tokenizer_of(tmp_path: Path, arch: str = "llama", **kwargs: Any) -> Any:
    vocab = kwargs.pop("vocab", None) or vocab_for(arch)
    case = {"llama": "llama", "qwen2": "qwen2", "gemma3": "gemma3"}[arch]
    model = random_model(CASES[case][1](len(vocab["tokens"])))
    path = write_gguf(tmp_path / "t.gguf", arch, model, vocab, **kwargs)
    return transformers.AutoTokenizer.from_pretrained(prepare(path))


@pytest.mark.parametrize(
    "pre", ["smollm", "qwen2", "llama-bpe", "tekken", "gpt-2", "command-r", "default", "deepseek-coder"]
)
def test_byte_level_text_comes_back_whole(pre: str, tmp_path: Path) -> None:
    tokenizer = tokenizer_of(tmp_path, pre=pre)
    for text in TEXTS:
        ids = tokenizer.encode(text, add_special_tokens=False)
        assert tokenizer.decode(ids) == (text if pre != "qwen2" else unicodedata.normalize("NFC", text))


@pytest.mark.parametrize(
    ("pre", "pieces"),
    [
        ("smollm", ["1", "2", "3", "4"]),
        ("starcoder", ["1", "2", "3", "4"]),
        ("command-r", ["1", "2", "3", "4"]),
        ("qwen2", ["1", "2", "3", "4"]),
        ("tekken", ["1", "2", "3", "4"]),
        ("llama-bpe", ["123", "4"]),
        ("gpt-2", ["123", "4"]),
    ],
)
def test_digits_are_cut_as_the_pre_tokenizer_says(pre: str, pieces: list[str], tmp_path: Path) -> None:
    tokenizer = tokenizer_of(tmp_path, pre=pre)
    assert tokenizer.convert_ids_to_tokens(tokenizer.encode("1234", add_special_tokens=False)) == pieces


@pytest.mark.parametrize("pre", ["qwen2", "llama-bpe", "tekken", "gpt-2"])
def test_ids_equal_those_of_transformers_where_its_loader_is_right(pre: str, tmp_path: Path) -> None:
    ours = tokenizer_of(tmp_path, pre=pre)
    theirs = transformers.PreTrainedTokenizerFast.from_pretrained(tmp_path, gguf_file="t.gguf")
    for text in TEXTS[: None if pre != "qwen2" else 5]:  # its loader forgets Qwen's NFC
        assert ours.encode(text, add_special_tokens=False) == theirs.encode(text, add_special_tokens=False)


@pytest.mark.parametrize("arch", ["gemma3", "llama"])
def test_sentencepiece_ids_equal_those_of_transformers(arch: str, tmp_path: Path) -> None:
    vocab = sentencepiece_vocab(is_gemma=arch == "gemma3")
    no_prefix = (lambda w: w.add_add_space_prefix(False)) if arch == "gemma3" else None
    ours = tokenizer_of(tmp_path, arch, vocab=vocab, pre="default", extra=no_prefix)
    theirs = transformers.PreTrainedTokenizerFast.from_pretrained(tmp_path, gguf_file="t.gguf")
    for text in TEXTS:
        assert ours.encode(text) == theirs.encode(text)
        assert ours.decode(ours.encode(text), skip_special_tokens=True) == text
    assert ours.encode("the")[0] == ours.bos_token_id


def test_the_best_score_merges_first(tmp_path: Path) -> None:
    """ "▁the" outranks "he" and "▁th"; a Llama text starts with a dummy space."""
    tokenizer = tokenizer_of(tmp_path, vocab=sentencepiece_vocab(is_gemma=False), pre="default")
    assert tokenizer.tokenize("the them") == ["▁the", "▁the", "m"]


def test_runs_of_spaces_are_one_token_in_gemma(tmp_path: Path) -> None:
    tokenizer = tokenizer_of(tmp_path, "gemma3", pre="default", extra=lambda w: w.add_add_space_prefix(False))
    assert tokenizer.tokenize("a  b\n\nc") == ["a", "▁▁", "b", "\n\n", "c"]


def test_bos_and_eos_are_added_as_the_file_says(tmp_path: Path) -> None:
    plain = tokenizer_of(tmp_path)
    assert plain.encode("the") == plain.encode("the", add_special_tokens=False)

    def both(writer: gguf.GGUFWriter) -> None:
        writer.add_add_bos_token(True)
        writer.add_add_eos_token(True)

    wrapped = tokenizer_of(tmp_path, extra=both)
    inner = plain.encode("the")
    assert wrapped.encode("the") == [1, *inner, 2]
    assert wrapped.encode("the", "the") == [1, *inner, 2, 1, *inner, 2]


def test_special_tokens_stay_whole_and_are_skipped_and_think_is_not(tmp_path: Path) -> None:
    tokenizer = tokenizer_of(tmp_path)
    ids = tokenizer.encode("<|im_start|><think>the<|im_end|>")
    assert (ids[0], ids[-1], len(ids)) == (1, 2, 4)
    assert tokenizer.decode(ids, skip_special_tokens=True) == "<think>the"


def test_every_end_of_turn_is_an_eos(tmp_path: Path) -> None:
    _, path = make(tmp_path, "llama")
    assert json.loads((prepare(path) / "generation_config.json").read_text())["eos_token_id"] == [2, 0]
    _, path = make(tmp_path, "gemma3")
    assert json.loads((prepare(path) / "generation_config.json").read_text())["eos_token_id"] == [1, 4]


def test_the_chat_template_is_kept(tmp_path: Path) -> None:
    template = "{% for m in messages %}<|im_start|>{{ m.content }}<|im_end|>{% endfor %}"
    tokenizer = tokenizer_of(tmp_path, extra=lambda w: w.add_chat_template(template))
    assert (
        tokenizer.apply_chat_template([{"role": "user", "content": "x"}], tokenize=False) == "<|im_start|>x<|im_end|>"
    )


# ---- refusals


def test_an_unknown_pre_tokenizer_is_refused_not_guessed(tmp_path: Path) -> None:
    for pre in ("brand-new", None):
        _, path = make(tmp_path, "llama", pre=pre)
        with pytest.raises(UnsupportedModel, match=r"tokenizer\.ggml\.pre"):
            prepare(path)


def test_an_unknown_architecture_is_named(tmp_path: Path) -> None:
    writer = gguf.GGUFWriter(tmp_path / "m.gguf", "mamba")
    writer.add_tensor("token_embd.weight", np.zeros((4, 32), dtype=np.float32))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    with pytest.raises(UnsupportedModel, match=r"'mamba'.*llama, qwen2"):
        prepare(tmp_path / "m.gguf")


def test_foreign_rope_frequencies_are_refused(tmp_path: Path) -> None:
    strange = np.linspace(1, 8, 8, dtype=np.float32)
    _, path = make(tmp_path, "llama", extra=lambda w: w.add_tensor("rope_freqs.weight", strange))
    with pytest.raises(UnsupportedModel, match="rope_freqs"):
        prepare(path)


@pytest.mark.parametrize("share", [0.0, 0.001, 0.01, 0.3, 0.999])
def test_a_truncated_file_is_refused_and_leaves_nothing_behind(share: float, tmp_path: Path) -> None:
    _, path = make(tmp_path, "llama")
    whole = path.read_bytes()
    path.write_bytes(whole[: int(len(whole) * share)])
    with pytest.raises(CheckpointCorrupt, match=path.name):
        prepare(path)
    left = {entry.suffix for entry in (tmp_path / "cache" / "checkpoints").iterdir()}
    assert left == {".lock"}


def test_random_bytes_never_give_anything_but_a_model_error(tmp_path: Path) -> None:
    _, path = make(tmp_path, "llama")
    whole = bytearray(path.read_bytes())
    random = np.random.default_rng(7)
    for _ in range(60):
        broken = bytearray(whole)
        for at in random.integers(0, 9000, size=3):
            broken[at] = random.integers(0, 256)
        path.write_bytes(broken)
        try:
            prepare(path)
        except ModelError:
            continue


def test_every_known_tensor_name_maps_to_one_that_the_decoder_has() -> None:
    def names(case: str) -> dict[str, tuple[str, ...]]:
        arch, config = CASES[case]
        return tensor_names(ModelSpec.from_config(config(300).to_dict()), arch)

    assert names("llama")["blk.1.ffn_norm.weight"] == ("model.layers.1.post_attention_layernorm.weight",)
    assert names("gemma3")["blk.3.ffn_norm.weight"] == ("model.layers.3.pre_feedforward_layernorm.weight",)
    assert names("llama")["output.weight"] == ("lm_head.weight",) and "output.weight" not in names("qwen2")
    assert "blk.0.ffn_gate_exps.weight" not in names("llama")
    experts = tuple(f"model.layers.0.mlp.experts.{index}.gate_proj.weight" for index in range(6))
    assert names("qwen3moe")["blk.0.ffn_gate_exps.weight"] == experts
