"""Makes tokenizer.json for folders with older tokenizer files only: tokenizer.model, or vocab.json with merges.txt.

Builds the tokenizer as for a GGUF with the same vocabulary.
"""

import hashlib
from pathlib import Path
from typing import Any

from kvrelay.engine.checkpoints.gguf_config import Metadata
from kvrelay.engine.checkpoints.gguf_tokenizer import write_tokenizer
from kvrelay.engine.models.spec import ModelSpec, read_json
from kvrelay.errors import CheckpointCorrupt, UnsupportedModel

_CONTROL, _USER_DEFINED, _UNUSED = 3, 4, 5
_GGUF_NAMES = {"gemma3_text": "gemma3", "mistral": "llama"}  # where it differs from the architecture's name
_ID_NAMES = {"bos": "bos_token", "eos": "eos_token", "unknown": "unk_token", "padding": "pad_token"}
_USUAL_NAMES = {"bos": ("<bos>", "<s>"), "eos": ("<eos>", "</s>"), "unknown": ("<unk>",), "padding": ("<pad>",)}
_SOURCES = ("tokenizer.model", "vocab.json", "merges.txt", "tokenizer_config.json", "added_tokens.json", "config.json")


def tokenizer_key(folder: Path) -> str:
    """16 hex digits that change with the folder's path and the source files of tokenizer.json."""
    digest = hashlib.blake2b(str(folder.resolve()).encode(), digest_size=8)
    for name in _SOURCES:
        if (folder / name).is_file():
            digest.update(name.encode() + (folder / name).read_bytes())
    return digest.hexdigest()


def complete_folder(source: Path, target: Path) -> None:
    """Fill the empty `target` with links to all files of `source` and a new tokenizer.json.

    Raises UnsupportedModel, CheckpointCorrupt.
    """
    write_tokenizer(_metadata(source), target)
    for path in source.iterdir():
        if path.is_file():
            (target / path.name).unlink(missing_ok=True)  # the folder's own tokenizer_config.json goes first
            (target / path.name).symlink_to(path.resolve())


def _metadata(folder: Path) -> Metadata:
    """The vocabulary as GGUF metadata."""
    spec = ModelSpec.from_folder(folder)
    settings = read_json(folder / "tokenizer_config.json") if (folder / "tokenizer_config.json").is_file() else {}
    name = _GGUF_NAMES.get(spec.architecture, spec.architecture)
    if (folder / "tokenizer.model").is_file():
        values = _sentencepiece_values(folder / "tokenizer.model")
    else:
        values = _byte_level_values(folder, name)
    tokens, types = values["tokenizer.ggml.tokens"], values["tokenizer.ggml.token_type"]
    for index, (token, is_special) in _added(folder, settings).items():
        missing = index + 1 - len(tokens)
        tokens += [f"[UNUSED_{len(tokens) + at}]" for at in range(missing)]
        types += [_UNUSED] * max(missing, 0)
        tokens[index], types[index] = token, _CONTROL if is_special else _USER_DEFINED
    if "tokenizer.ggml.scores" in values:
        values["tokenizer.ggml.scores"] += [0.0] * (len(tokens) - len(values["tokenizer.ggml.scores"]))
    for key in ("add_bos_token", "add_eos_token"):
        if isinstance(settings.get(key), bool):
            values[f"tokenizer.ggml.{key}"] = settings[key]
    values |= {f"tokenizer.ggml.{key}_token_id": index for key, index in _special_ids(settings, tokens).items()}
    values |= {"general.architecture": name, f"{name}.context_length": spec.max_position}
    return Metadata(str(folder), values)


def _special_ids(settings: dict[str, Any], tokens: list[str]) -> dict[str, int]:
    """Special ids as tokenizer_config.json names them, else by their usual names."""
    index = {token: at for at, token in enumerate(tokens)}
    found: dict[str, int] = {}
    for key, name in _ID_NAMES.items():
        value = settings.get(name)
        name_set = value.get("content") if isinstance(value, dict) else value
        names = (name_set,) if isinstance(name_set, str) else _USUAL_NAMES[key]
        at = next((index[token] for token in names if token in index), None)
        if at is not None:
            found[key] = at
    return found


def _added(folder: Path, settings: dict[str, Any]) -> dict[int, tuple[str, bool]]:
    """id → (token, whether it is special), in order of ids, from both places that list them."""
    found: dict[int, tuple[str, bool]] = {}
    if (folder / "added_tokens.json").is_file():
        for token, index in read_json(folder / "added_tokens.json").items():
            found[int(index)] = (str(token), True)
    for index, entry in (settings.get("added_tokens_decoder") or {}).items():
        found[int(index)] = (str(entry["content"]), bool(entry.get("special")))
    return dict(sorted(found.items()))


def _byte_level_values(folder: Path, name: str) -> dict[str, Any]:
    """vocab.json and merges.txt; neither has the pre-tokenizer, so only Qwen's is supported."""
    if name not in ("qwen2", "qwen3"):
        raise UnsupportedModel(
            str(folder), "vocab.json and merges.txt do not specify the pre-tokenizer; add tokenizer.json"
        )
    vocab = read_json(folder / "vocab.json")
    tokens = sorted(vocab, key=lambda token: int(vocab[token]))
    if [vocab[token] for token in tokens] != list(range(len(tokens))):
        raise CheckpointCorrupt(str(folder / "vocab.json"), "the ids are not 0, 1, 2...")
    try:
        lines = (folder / "merges.txt").read_text(encoding="utf-8").split("\n")
    except (OSError, ValueError) as error:
        raise CheckpointCorrupt(str(folder / "merges.txt"), f"not readable: {error}") from error
    return {
        "tokenizer.ggml.model": "gpt2",
        "tokenizer.ggml.pre": "qwen2",
        "tokenizer.ggml.tokens": tokens,
        "tokenizer.ggml.token_type": [1] * len(tokens),
        "tokenizer.ggml.merges": [line for line in lines if line and not line.startswith("#version")],
    }


# ---- SentencePiece's file


def _sentencepiece_values(path: Path) -> dict[str, Any]:
    """Pieces, scores and types; only BPE without normalisation, as in the supported families."""
    from google.protobuf.message import DecodeError
    from transformers.utils.sentencepiece_model_pb2_new import ModelProto

    try:
        model = ModelProto.FromString(path.read_bytes())
        if not model.pieces:
            raise DecodeError("no pieces")
    except (OSError, DecodeError) as error:
        raise CheckpointCorrupt(
            str(path), f"not a SentencePiece model ({error}); use the folder form with tokenizer.json"
        ) from error
    if model.trainer_spec.model_type != model.trainer_spec.BPE:
        raise UnsupportedModel(str(path), "a SentencePiece model that is not BPE")
    normalizer = model.normalizer_spec
    if normalizer.precompiled_charsmap or normalizer.remove_extra_whitespaces:
        raise UnsupportedModel(str(path), "a SentencePiece model that normalises text")
    return {
        "tokenizer.ggml.model": "llama",
        "tokenizer.ggml.tokens": [piece.piece for piece in model.pieces],
        "tokenizer.ggml.scores": [piece.score for piece in model.pieces],
        "tokenizer.ggml.token_type": [piece.type for piece in model.pieces],
        "tokenizer.ggml.add_space_prefix": normalizer.add_dummy_prefix,
    }
