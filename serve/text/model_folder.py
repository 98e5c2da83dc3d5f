"""What a prepared model folder's files have for the tokenizer: special tokens, chat template, vocabulary size."""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from kvrelay.errors import ModelError

_SPECIAL_NAMES = ("bos_token", "eos_token", "unk_token", "sep_token", "pad_token", "cls_token", "mask_token")


def read_json(path: Path) -> dict[str, Any]:
    """A JSON object, {} when the file is absent. Raises ModelError on anything else."""
    if not path.is_file():
        return {}
    try:
        data = json.loads(path.read_bytes())
    except (OSError, ValueError) as error:
        raise ModelError(str(path), f"cannot be read: {error}") from error
    if not isinstance(data, dict):
        raise ModelError(str(path), "is not a JSON object")
    return data


def special_tokens(*sources: Mapping[str, Any]) -> dict[str, str]:
    """The special tokens' names as templates see them; later sources win."""
    found: dict[str, str] = {}
    for source in sources:
        for name in _SPECIAL_NAMES:
            value = source.get(name)
            text = value.get("content") if isinstance(value, dict) else value
            if isinstance(text, str):
                found[name] = text
    return found


def template_source(folder: Path, config: Mapping[str, Any], name: str = "default") -> str | None:
    """The chat template of this name; None where there is none. Without a name, a template is the default."""
    is_default = name == "default"
    path = folder / ("chat_template.jinja" if is_default else f"additional_chat_templates/{name}.jinja")
    if path.is_file():
        return path.read_text(encoding="utf-8")
    template = config.get("chat_template") or read_json(folder / "chat_template.json").get("chat_template")
    if isinstance(template, list):  # several named ones
        template = next((entry["template"] for entry in template if entry.get("name") == name), None)
        is_default = True
    return template if isinstance(template, str) and is_default else None


def template_file(path: str) -> str:
    """An operator's own chat template. Raises ModelError."""
    try:
        return Path(path).read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        why = getattr(error, "strerror", None) or error
        raise ModelError(path, f"the chat template cannot be read: {why}") from error


def ids_of(value: Any) -> frozenset[int]:
    if isinstance(value, list):
        return frozenset(int(item) for item in value)
    return frozenset() if value is None else frozenset((int(value),))


def checked_vocab_size(tokenizer: Any, folder: Path, config: Mapping[str, Any]) -> int:
    """The model's vocabulary; a tokenizer whose own words do not fit into it is another model's.

    Added tokens aside, even where its vocabulary lists them too: Gemma 3's text models lack the image token.
    """
    own = int(tokenizer.get_vocab_size(with_added_tokens=False))
    text_config = config.get("text_config")
    size = config.get("vocab_size") or (text_config or {}).get("vocab_size")
    if size is None:
        return int(tokenizer.get_vocab_size(with_added_tokens=True))
    if own > size:
        added = tokenizer.get_added_tokens_decoder()
        own = 1 + max(set(tokenizer.get_vocab(with_added_tokens=False).values()) - added.keys(), default=-1)
    if own > size:
        raise ModelError(str(folder), f"wrong tokenizer: it has {own} tokens, the model has {size}")
    return int(size)
