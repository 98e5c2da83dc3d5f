"""Folders with an older tokenizer form only get a tokenizer.json, in the cache; the folder stays as it is."""

import json
import struct
from pathlib import Path
from typing import Any

import pytest
import transformers

from kvrelay.engine.checkpoints.checkpoint import prepare_checkpoint
from kvrelay.engine.checkpoints.tiny import tiny_checkpoint
from kvrelay.errors import CheckpointCorrupt, ModelError, UnsupportedModel
from kvrelay.serve.text.tokenizer import Tokenizer
from kvrelay.settings.engine import ModelSettings

NORMAL, UNKNOWN, CONTROL, USER_DEFINED, BYTE = 1, 2, 3, 4, 6
PIECES = ["th", "he", "the", "▁the", "ll", "▁H", "▁▁▁"]
LETTERS = ["▁", *"abcdefghijklmnopqrstuvwxyzH.,!"]


def varint(value: int) -> bytes:
    out = b""
    while value > 0x7F:
        out, value = out + bytes([value & 0x7F | 0x80]), value >> 7
    return out + bytes([value])


def field(number: int, value: bytes | int | float) -> bytes:
    """One field of a protobuf message."""
    if isinstance(value, float):
        return varint(number << 3 | 5) + struct.pack("<f", value)
    if isinstance(value, int):
        return varint(number << 3) + varint(value)
    return varint(number << 3 | 2) + varint(len(value)) + value


def sentencepiece_model(
    control: list[str], user: list[str], *, dummy_prefix: bool, kind: int = 2, charsmap: bytes = b"", squeeze: int = 0
) -> bytes:
    tokens = [*control, *user, *(f"<0x{byte:02X}>" for byte in range(256)), *PIECES, *LETTERS]
    types = [UNKNOWN if token == "<unk>" else CONTROL for token in control] + [USER_DEFINED] * len(user)
    types += [BYTE] * 256 + [NORMAL] * (len(PIECES) + len(LETTERS))
    model = b""
    for at, (token, piece_type) in enumerate(zip(tokens, types, strict=True)):
        piece = field(1, token.encode()) + field(2, -float(at))
        model += field(1, piece + (field(3, piece_type) if piece_type != NORMAL else b""))
    normalizer = field(1, b"identity") + (field(2, charsmap) if charsmap else b"")
    normalizer += field(3, int(dummy_prefix)) + field(4, squeeze)
    return model + field(2, field(3, kind) + field(35, 1)) + field(3, normalizer)


def without_tokenizer(folder: Path, family: str, settings: dict[str, Any]) -> Path:
    tiny_checkpoint(family, folder)
    (folder / "tokenizer.json").unlink()
    (folder / "tokenizer_config.json").write_text(json.dumps(settings))
    return folder


def prepare(folder: Path) -> Path:
    return prepare_checkpoint(ModelSettings(source=str(folder)))


def gemma(tmp_path: Path) -> Path:
    control = ["<pad>", "<eos>", "<bos>", "<unk>", "<mask>"]
    settings = {"bos_token": "<bos>", "eos_token": "<eos>", "unk_token": "<unk>", "add_bos_token": True}
    added = {"5": {"content": "<start_of_turn>", "special": True}, "6": {"content": "\n\n", "special": False}}
    folder = without_tokenizer(tmp_path / "gemma", "gemma3", settings | {"added_tokens_decoder": added})
    model = sentencepiece_model(control, ["<start_of_turn>", "\n\n", "▁▁"], dummy_prefix=False)
    (folder / "tokenizer.model").write_bytes(model)
    return folder


def mistral(tmp_path: Path) -> Path:
    settings = {"bos_token": "<s>", "eos_token": "</s>", "add_bos_token": True, "add_eos_token": False}
    folder = without_tokenizer(tmp_path / "mistral", "mistral", settings)
    model = sentencepiece_model(["<unk>", "<s>", "</s>", "[INST]", "[/INST]"], [], dummy_prefix=True)
    (folder / "tokenizer.model").write_bytes(model)
    return folder


def names(tokenizer: Tokenizer, folder: Path, text: str) -> list[str]:
    vocab = {
        index: token for token, index in json.loads((folder / "tokenizer.json").read_text())["model"]["vocab"].items()
    }
    return [vocab[token] for token in tokenizer.encode(text)]


def test_gemmas_tokenizer_model_is_enough(tmp_path: Path) -> None:
    folder = prepare(gemma(tmp_path))
    tokenizer = Tokenizer(folder)
    assert names(tokenizer, folder, "the the\n\n   x") == ["<bos>", "the", "▁the", "\n\n", "▁▁▁", "x"]
    assert names(tokenizer, folder, "<start_of_turn>é") == ["<bos>", "<start_of_turn>", "<0xC3>", "<0xA9>"]
    assert tokenizer.decode(tokenizer.encode("<start_of_turn> the 🙂")) == " the 🙂"
    assert transformers.AutoTokenizer.from_pretrained(folder).encode("the 🙂") == tokenizer.encode("the 🙂")


def test_mistrals_tokenizer_model_is_enough(tmp_path: Path) -> None:
    folder = prepare(mistral(tmp_path))
    tokenizer = Tokenizer(folder)
    assert names(tokenizer, folder, "the Hll") == ["<s>", "▁the", "▁H", "ll"]
    assert names(tokenizer, folder, "[INST] the[/INST]") == ["<s>", "[INST]", "▁the", "[/INST]"]
    assert tokenizer.decode(tokenizer.encode("the the")) == "the the"


def test_the_folder_itself_is_not_touched_and_its_other_files_count(tmp_path: Path) -> None:
    source = gemma(tmp_path)
    before = {path.name: path.read_bytes() for path in source.iterdir()}
    folder = prepare(source)
    assert {path.name: path.read_bytes() for path in source.iterdir()} == before
    assert folder != source
    assert {name: (folder / name).read_bytes() for name in before} == before
    assert prepare(source) == folder
    (source / "tokenizer.model").write_bytes(before["tokenizer.model"].replace(b"<mask>", b"<task>"))
    assert prepare(source) != folder


def test_a_folder_with_tokenizer_json_is_served_as_it_is(tmp_path: Path) -> None:
    folder = tiny_checkpoint("llama", tmp_path / "llama")
    (folder / "tokenizer.model").write_bytes(b"not looked at")
    assert prepare(folder) == folder.resolve()


def test_qwens_vocab_and_merges_are_enough(tmp_path: Path) -> None:
    from tokenizers.pre_tokenizers import ByteLevel

    added = {"258": {"content": "<|im_end|>", "special": True}}
    folder = without_tokenizer(
        tmp_path / "qwen", "qwen2", {"eos_token": "<|im_end|>", "bos_token": None, "added_tokens_decoder": added}
    )
    tokens = [*sorted(ByteLevel.alphabet()), "th", "the"]
    (folder / "vocab.json").write_text(json.dumps({token: at for at, token in enumerate(tokens)}))
    (folder / "merges.txt").write_text("#version: 0.2\nt h\nth e\n")
    tokenizer = Tokenizer(prepare(folder))
    assert tokenizer.encode("the<|im_end|>") == [257, 258]
    assert tokenizer.decode(tokenizer.encode("the 🙂 e\u0301")) == "the 🙂 é"


@pytest.mark.parametrize(
    ("change", "output"),
    [({"kind": 1}, "not BPE"), ({"charsmap": b"\x01\x02"}, "normalises text"), ({"squeeze": 1}, "normalises text")],
)
def test_other_sentencepiece_models_are_refused(change: dict[str, Any], output: str, tmp_path: Path) -> None:
    folder = mistral(tmp_path)
    (folder / "tokenizer.model").write_bytes(sentencepiece_model(["<unk>"], [], dummy_prefix=True, **change))
    with pytest.raises(UnsupportedModel, match=output):
        prepare(folder)


def test_a_damaged_or_foreign_file_is_reported(tmp_path: Path) -> None:
    folder = mistral(tmp_path)
    whole = (folder / "tokenizer.model").read_bytes()
    for content in (b"IQ== 0\nIg== 1\n", b"", whole[:-3], whole[: len(whole) // 2]):
        (folder / "tokenizer.model").write_bytes(content)
        with pytest.raises(ModelError):
            prepare(folder)
    (folder / "tokenizer.model").write_bytes(b"IQ== 0\nIg== 1\n")
    with pytest.raises(CheckpointCorrupt, match=r"tokenizer\.json"):
        prepare(folder)


def test_a_vocabulary_that_says_not_how_to_cut_is_refused(tmp_path: Path) -> None:
    folder = without_tokenizer(tmp_path / "llama", "llama", {})
    (folder / "vocab.json").write_text("{}")
    with pytest.raises(UnsupportedModel, match=r"add tokenizer\.json"):
        prepare(folder)
