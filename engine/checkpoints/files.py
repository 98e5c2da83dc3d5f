"""Checks a checkpoint folder: every tensor with its shape, complete files, a matching tokenizer.

The decoder's names are those of separate experts, as Qwen and DeepSeek store them (`layers.0.mlp.experts.7.gate_proj`);
Mixtral has other names, and some checkpoints fuse all experts of a layer.

Reads headers only. Pure Python: imports no torch, so a bad folder is refused before any worker starts.
"""

import json
import math
import re
from collections.abc import Iterator, Mapping
from hashlib import blake2b
from pathlib import Path
from typing import Any

from kvrelay.engine.checkpoints.stored_tensors import ITEMSIZES, KV_SCALES, PARTS, PLAIN, StoredTensor, check_parts
from kvrelay.engine.models.quantization import WeightFormat
from kvrelay.engine.models.spec import ModelSpec, read_json
from kvrelay.engine.models.spec_parts import ExpertSpec, LatentSpec
from kvrelay.errors import CheckpointCorrupt, ModelNotFound

_PREFIXES = ("language_model.model.", "model.language_model.", "language_model.", "model.", "")
_IGNORED = re.compile(
    r"^(model\.)?(vision_tower|vision_model|multi_modal_projector|visual|audio_tower)\.|rotary_emb\.inv_freq$"
)
_LAYER = re.compile(r"^model\.layers\.(\d+)\.")
_INDEX = "model.safetensors.index.json"
_DIGEST_SAMPLES, _SAMPLE_BYTES = 64, 4096


Shapes = dict[str, tuple[int, ...]]  # by tensor, under Hugging Face's name without prefix


def safetensors_files(folder: Path) -> list[Path]:
    """The folder's weight files, in order. Raises ModelNotFound, CheckpointCorrupt with the missing file."""
    if (folder / _INDEX).exists():
        names = sorted(set(read_json(folder / _INDEX).get("weight_map", {}).values()))
        missing = [name for name in names if not (folder / name).is_file()]
        if missing or not names:
            raise CheckpointCorrupt(str(folder), f"{_INDEX} names {missing[0] if missing else 'no file'}: not there")
        return [folder / name for name in names]
    single = folder / "model.safetensors"
    files = [single] if single.is_file() else sorted(folder.glob("*.safetensors"))
    if not files:
        raise ModelNotFound(str(folder), "no *.safetensors file in it")
    return files


def read_header(path: Path) -> dict[str, Any]:
    """The entries of a safetensors header, data_offsets from the start of the file, checked against its size."""
    try:
        size = path.stat().st_size
        with path.open("rb") as file:
            length = int.from_bytes(file.read(8), "little")
            if size < 8 or length > size - 8:
                raise CheckpointCorrupt(str(path), f"truncated: {size} bytes cannot hold a header of {length}")
            header = json.loads(file.read(length))
        entries = {name: entry for name, entry in header.items() if name != "__metadata__"}
        ends = [8 + length]
        for entry in entries.values():
            begin, end = (8 + length + int(offset) for offset in entry["data_offsets"])
            if begin > end or math.prod(entry["shape"]) * ITEMSIZES.get(entry["dtype"], 0) not in (0, end - begin):
                raise ValueError("a tensor's bytes do not match its shape")
            entry["data_offsets"] = [begin, end]
            ends.append(end)
    except (OSError, ValueError, KeyError, TypeError, AttributeError, IndexError) as error:
        raise CheckpointCorrupt(str(path), f"not a safetensors file: {error}") from error
    if size != max(ends):
        raise CheckpointCorrupt(str(path), f"{size} bytes long, its header says {max(ends)}")
    return entries


def locate_tensors(folder: Path, spec: ModelSpec) -> dict[str, StoredTensor]:
    """The location of each expected tensor; of a quantised weight, of its parts ("layers.0.mlp.up_proj.weight_scale").

    Raises ModelNotFound, CheckpointCorrupt: a file is damaged, a tensor missing, unknown, doubled or of a wrong shape.
    """
    shapes = expected_shapes(spec)
    found: dict[str, StoredTensor] = {}
    for path in safetensors_files(folder):
        for stored, entry in read_header(path).items():
            for name, shape, begin, end in _contents(stored, entry, shapes):
                _place(found, shapes, name, StoredTensor(path, stored, entry["dtype"], shape, begin, end), spec)
    quantised = _check_quantised(str(folder), spec, shapes, found)
    if missing := shapes.keys() - found.keys() - quantised:
        raise CheckpointCorrupt(str(folder), f"tensor {min(missing)} is missing ({len(missing)} in all)")
    return found


def _check_quantised(folder: str, spec: ModelSpec, shapes: Shapes, found: Mapping[str, StoredTensor]) -> set[str]:
    """The quantised weights among `shapes`. Raises CheckpointCorrupt."""
    modules = {name.rpartition(".")[0] for name, it in found.items() if it.dtype not in PLAIN or name not in shapes}
    for module in modules:
        parts = {part: found[at] for part in ("weight", *PARTS) if (at := f"{module}.{part}") in found}
        check_parts(folder, module, format_of(spec, module), shapes[f"{module}.weight"], parts)
    return {f"{module}.weight" for module in modules}


def format_of(spec: ModelSpec, module: str) -> WeightFormat | None:
    """The format of the decoder's linear module by the checkpoint's quantization_config; None: plain."""
    stored = stored_name(f"{module}.weight", spec.architecture).removesuffix(".weight")
    names = (stored, *(prefix + module for prefix in _PREFIXES))
    return None if spec.quantization is None else spec.quantization.format_of(*names)


def _contents(
    stored: str, entry: Mapping[str, Any], shapes: Shapes
) -> Iterator[tuple[str | None, tuple[int, ...], int, int]]:
    """(the decoder's name, shape, begin, end) of the consecutive tensors that a stored one holds."""
    parts = parts_of(stored, tuple(entry["shape"]))
    begin, end = entry["data_offsets"]
    size = (end - begin) // len(parts)
    for index, (name, shape) in enumerate(parts):
        ours = _plain_name(name, shapes) or _plain_part(name, shapes)
        yield ours, shape, begin + index * size, begin + (index + 1) * size


def _place(
    found: dict[str, StoredTensor], shapes: Shapes, name: str | None, tensor: StoredTensor, spec: ModelSpec
) -> None:
    """Add a tensor under its name. Raises CheckpointCorrupt."""
    path, stored = str(tensor.path), tensor.name
    if name is None:
        is_empty = spec.quantization is not None and stored.endswith(".bias") and tensor.is_zero()  # AutoGPTQ's
        if not is_empty and not _is_passed_over(stored, spec):
            raise CheckpointCorrupt(path, f"tensor {stored} has no place in a {spec.architecture} model")
        return
    is_linear = name != "embed_tokens.weight" and name.endswith(".weight") and len(tensor.shape) == 2
    if name in shapes and tensor.dtype not in PLAIN and not is_linear:
        raise CheckpointCorrupt(path, f"tensor {stored} is {tensor.dtype}: not plain floating point")
    if name in found:
        raise CheckpointCorrupt(path, f"tensor {stored} is also in {found[name].path.name}")
    if name in shapes and tensor.shape != shapes[name]:
        raise CheckpointCorrupt(path, f"tensor {stored} has shape {list(tensor.shape)}, expected {list(shapes[name])}")
    found[name] = tensor


def _is_passed_over(name: str, spec: ModelSpec) -> bool:
    """Whether an unused tensor is allowed: other modalities, duplicates, multi-token prediction layers."""
    if _IGNORED.search(name) or (spec.is_tied and name.rpartition(".")[0].endswith("lm_head")):
        return True
    if spec.quantization is not None and KV_SCALES.search(name):
        return True
    layer = _LAYER.search(name) if spec.architecture == "deepseek_v3" else None
    return layer is not None and int(layer[1]) >= spec.num_layers


def _plain_name(name: str, shapes: Shapes) -> str | None:
    """The name without its prefix if the decoder has such a tensor."""
    for prefix in _PREFIXES:
        if name.startswith(prefix) and name.removeprefix(prefix) in shapes:
            return name.removeprefix(prefix)
    return None


def _plain_part(name: str, shapes: Shapes) -> str | None:
    """The name, without its prefix, of a part of a quantised weight that the decoder has."""
    module, _, part = name.rpartition(".")
    weight = _plain_name(f"{module}.weight", shapes) if part in PARTS else None
    return None if weight is None or len(shapes[weight]) != 2 else weight.removesuffix("weight") + part


def check_folder(folder: Path) -> None:
    """Refuse a folder that cannot be served. Raises ModelNotFound, CheckpointCorrupt, UnsupportedModel."""
    spec = ModelSpec.from_folder(folder)
    locate_tensors(folder, spec)
    _check_tokenizer(folder, spec)


def _check_tokenizer(folder: Path, spec: ModelSpec) -> None:
    """Check that a tokenizer exists and its vocabulary (without added tokens: Gemma 3 has one too many) fits the
    model.
    """
    path = folder / "tokenizer.json"
    if not path.exists():
        if (folder / "tokenizer.model").exists() or (folder / "vocab.json").exists():
            return
        raise ModelNotFound(str(folder), "no tokenizer in it (tokenizer.json or tokenizer.model)")
    tokenizer = read_json(path)
    vocab = (tokenizer.get("model") or {}).get("vocab") or {}
    ids = vocab.values() if isinstance(vocab, dict) else range(len(vocab))
    added = {entry.get("id") for entry in tokenizer.get("added_tokens") or ()}
    largest = max((index for index in ids if index not in added), default=-1)
    if largest >= spec.vocab_size:
        raise CheckpointCorrupt(
            str(path), f"token id {largest} is outside the model's vocabulary of {spec.vocab_size}: another model's?"
        )


def model_digest(folder: Path) -> str:
    """32 hex digits over the config, every weight file's header and size, and samples of its bytes.

    Equal folders on two machines give equal digests. Takes milliseconds, since it reads samples only.
    """
    digest = blake2b(digest_size=16)
    digest.update(json.dumps(read_json(folder / "config.json"), sort_keys=True).encode())
    for path in safetensors_files(folder):
        size = path.stat().st_size
        digest.update(f"{path.name} {size} ".encode())
        with path.open("rb") as file:
            start = 8 + int.from_bytes(file.read(8), "little")
            digest.update(file.read(start - 8))
            for sample in range(_DIGEST_SAMPLES):
                file.seek(start + (size - start) * sample // _DIGEST_SAMPLES)
                digest.update(file.read(_SAMPLE_BYTES))
    return digest.hexdigest()


# ---- layouts of experts

_MIXTRAL = (
    (".mlp.", ".block_sparse_moe."), (".gate_proj.", ".w1."), (".down_proj.", ".w2."), (".up_proj.", ".w3."),
)  # fmt: skip
_FUSED = re.compile(r"(.*layers\.\d+\.mlp\.experts)\.(gate_up_proj|down_proj)")


def stored_name(name: str, architecture: str) -> str:
    """The name of the decoder's tensor `name` in published checkpoints of this architecture."""
    if name == "lm_head.weight":
        return name
    for ours, theirs in _MIXTRAL if architecture == "mixtral" else ():
        name = name.replace(ours, theirs)
    return f"model.{name}"


def plain_name(name: str) -> str:
    """The decoder's name of a tensor that may have Mixtral's name."""
    for ours, theirs in _MIXTRAL if ".block_sparse_moe." in name else ():
        name = name.replace(theirs, ours)
    return name


def parts_of(name: str, shape: tuple[int, ...]) -> list[tuple[str, tuple[int, ...]]]:
    """The tensors, in order, that a stored one holds; more than one where it is fused over all experts.

    gate_up_proj is [experts, 2 ffn, hidden], gate before up; down_proj [experts, hidden, ffn]. Hugging Face writes them
    with save_original_format=False.
    """
    match = _FUSED.fullmatch(name)
    if match is None or len(shape) != 3 or shape[1] % 2:
        return [(plain_name(name), shape)]
    names = ("gate_proj", "up_proj") if match[2] == "gate_up_proj" else ("down_proj",)
    of_one = (shape[1] // len(names), shape[2])
    return [(f"{match[1]}.{index}.{part}.weight", of_one) for index in range(shape[0]) for part in names]


# ---- shapes


def expected_shapes(spec: ModelSpec) -> Shapes:
    """By name."""
    shapes: Shapes = {"embed_tokens.weight": (spec.vocab_size, spec.hidden_size), "norm.weight": (spec.hidden_size,)}
    if not spec.is_tied:
        shapes["lm_head.weight"] = (spec.vocab_size, spec.hidden_size)
    for layer in range(spec.num_layers):
        shapes.update({f"layers.{layer}.{name}": shape for name, shape in _layer_shapes(spec, layer).items()})
    return shapes


def _layer_shapes(spec: ModelSpec, layer: int) -> Shapes:
    has_experts = spec.experts is not None and layer in spec.experts.layers
    attention = _head_attention(spec) if spec.latent is None else _latent_attention(spec, spec.latent)
    mlp = _experts(spec, spec.experts) if spec.experts and has_experts else _mlp(spec, "mlp", spec.ffn_size)
    norms = ["input_layernorm", "post_attention_layernorm"]
    if spec.sandwich_norms:
        norms += ["pre_feedforward_layernorm", "post_feedforward_layernorm"]
    return attention | mlp | {f"{name}.weight": (spec.hidden_size,) for name in norms}


def _linear(name: str, out_size: int, in_size: int, *, has_bias: bool = False) -> Shapes:
    shapes: Shapes = {f"{name}.weight": (out_size, in_size)}
    return shapes | ({f"{name}.bias": (out_size,)} if has_bias else {})


def _head_attention(spec: ModelSpec) -> Shapes:
    hidden, dim = spec.hidden_size, spec.head_dim
    wide, narrow = spec.num_heads * dim, spec.num_kv_heads * dim
    shapes: Shapes = {}
    for name, size in (("q", wide), ("k", narrow), ("v", narrow)):
        shapes |= _linear(f"self_attn.{name}_proj", size, hidden, has_bias=spec.has_qkv_bias)
    shapes |= _linear("self_attn.o_proj", hidden, wide, has_bias=spec.has_o_bias)
    if spec.has_qk_norm:
        shapes |= {f"self_attn.{name}.weight": (dim,) for name in ("q_norm", "k_norm")}
    return shapes


def _latent_attention(spec: ModelSpec, latent: LatentSpec) -> Shapes:
    hidden, heads, bias = spec.hidden_size, spec.num_heads, latent.has_bias
    if latent.query_rank is None:
        shapes = _linear("self_attn.q_proj", heads * latent.query_dim, hidden)
    else:
        shapes = _linear("self_attn.q_a_proj", latent.query_rank, hidden, has_bias=bias)
        shapes |= _linear("self_attn.q_b_proj", heads * latent.query_dim, latent.query_rank)
        shapes |= {"self_attn.q_a_layernorm.weight": (latent.query_rank,)}
    shapes |= _linear("self_attn.kv_a_proj_with_mqa", latent.width, hidden, has_bias=bias)
    shapes |= {"self_attn.kv_a_layernorm.weight": (latent.kv_rank,)}
    shapes |= _linear("self_attn.kv_b_proj", heads * (latent.nope_dim + latent.value_dim), latent.kv_rank)
    return shapes | _linear("self_attn.o_proj", hidden, heads * latent.value_dim, has_bias=bias)


def _mlp(spec: ModelSpec, name: str, ffn: int, *, has_bias: bool | None = None) -> Shapes:
    bias = spec.has_mlp_bias if has_bias is None else has_bias
    shapes: Shapes = {}
    for part in ("gate", "up"):
        shapes |= _linear(f"{name}.{part}_proj", ffn, spec.hidden_size, has_bias=bias)
    return shapes | _linear(f"{name}.down_proj", spec.hidden_size, ffn, has_bias=bias)


def _experts(spec: ModelSpec, experts: ExpertSpec) -> Shapes:
    shapes = _linear("mlp.gate", experts.choice.num_experts, spec.hidden_size)
    if experts.choice.scoring == "sigmoid":
        shapes["mlp.gate.e_score_correction_bias"] = (experts.choice.num_experts,)
    for index in range(experts.choice.num_experts):
        shapes |= _mlp(spec, f"mlp.experts.{index}", experts.ffn_size, has_bias=False)
    if experts.shared_ffn_size:
        shapes |= _mlp(spec, f"mlp.{shared_name(experts)}", experts.shared_ffn_size)
    if experts.has_shared_gate:
        shapes |= _linear("mlp.shared_expert_gate", 1, spec.hidden_size)
    return shapes


def shared_name(experts: ExpertSpec) -> str:
    """Qwen has one shared expert, DeepSeek several stacked in one tensor."""
    return "shared_expert" if experts.has_shared_gate else "shared_experts"
