"""Tokens to text as they come: UTF-8 safe, constant work per token.

A token is a run of bytes; an incremental decoder shows characters once they are whole. Two
families of vocabularies map to bytes exactly: byte-level BPE and SentencePiece-like with byte
fallback. Others go through the tokenizer's own streaming decoder. Imports no torch.
"""

import codecs
from collections.abc import Callable
from typing import Any, Protocol

REPLACEMENT = "\N{REPLACEMENT CHARACTER}"


class Detokenizer(Protocol):
    """One sequence's text."""

    def push(self, token_id: int) -> str:
        """The characters that this token completes; often none for a part of a character."""

    def flush(self) -> str:
        """What was left incomplete, as replacement characters."""


class ByteDetokenizer:
    """For vocabularies whose tokens are bytes. `bytes_of` gives None for a token to be skipped.

    strip: spaces to drop at the text's very start, as far as it has them.
    """

    __slots__ = ("_bytes_of", "_decode", "_strip")

    def __init__(self, bytes_of: Callable[[int], bytes | None], *, strip: int = 0) -> None:
        self._bytes_of, self._strip = bytes_of, strip
        self._decode = codecs.getincrementaldecoder("utf-8")("replace").decode

    def push(self, token_id: int) -> str:
        data = self._bytes_of(token_id)
        text = self._decode(data) if data else ""
        return self._stripped(text) if self._strip and text else text

    def _stripped(self, text: str) -> str:
        shorter = text.lstrip(" ")
        cut = min(len(text) - len(shorter), self._strip)
        self._strip = 0 if cut < len(text) else self._strip - cut
        return text[cut:]

    def flush(self) -> str:
        return self._decode(b"", True)


class WindowDetokenizer:
    """For any other vocabulary: the tokenizer's own decoding of a window that moves with the text."""

    def __init__(self, decode: Callable[[list[int]], str]) -> None:
        self._decode = decode
        self._window: list[int] = []
        self._shown = ""

    def push(self, token_id: int) -> str:
        self._window.append(token_id)
        text = self._decode(self._window)
        if text.endswith(REPLACEMENT) or len(text) <= len(self._shown) or not text.startswith(self._shown):
            return ""
        new = text[len(self._shown) :]
        self._window = self._window[-4:]
        self._shown = self._decode(self._window)
        return new

    def flush(self) -> str:
        text = self._decode(self._window)
        new = text[len(self._shown) :] if text.startswith(self._shown) else ""
        self._window, self._shown = [], ""
        return new


def _byte_level_table() -> dict[str, int]:
    """The printable stand-ins that byte-level BPE uses for bytes, as in GPT-2."""
    plain = [*range(ord("!"), ord("~") + 1), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    table = {chr(byte): byte for byte in plain}
    others = [byte for byte in range(256) if byte not in set(plain)]
    return table | {chr(256 + index): byte for index, byte in enumerate(others)}


_BYTE_OF_CHAR = _byte_level_table()


def byte_level_bytes(token: str) -> bytes:
    """A byte-level token's bytes; one with any other character in it stands for itself."""
    try:
        return bytes(_BYTE_OF_CHAR[char] for char in token)
    except KeyError:
        return token.encode()


def sentencepiece_bytes(token: str) -> bytes:
    """A SentencePiece token's bytes: `<0x0A>` is a byte, the low line U+2581 a space."""
    if len(token) == 6 and token.startswith("<0x") and token.endswith(">"):
        try:
            return bytes([int(token[3:5], 16)])
        except ValueError:
            pass
    return token.replace("\u2581", " ").encode()


def leading_spaces(decoder: dict[str, Any] | None) -> int:
    """How many spaces the `decoder` of a tokenizer.json drops at a text's start: the encoder's dummy one."""
    parts = (decoder or {}).get("decoders", [])
    strips = [part for part in parts if part.get("type") == "Strip" and part.get("content") == " "]
    return sum(int(part.get("start", 0)) for part in strips)


def bytes_function(decoder: dict[str, Any] | None) -> Callable[[str], bytes] | None:
    """Which of the two fits the `decoder` of a tokenizer.json, or None when neither does."""
    parts = decoder.get("decoders", []) if decoder and decoder.get("type") == "Sequence" else [decoder or {}]
    kinds = {part.get("type") for part in parts}
    if kinds == {"ByteLevel"}:
        return byte_level_bytes
    if kinds <= {"Replace", "ByteFallback", "Fuse", "Strip"} and "ByteFallback" in kinds:
        replaced = [part for part in parts if part.get("type") == "Replace"]
        if all(part.get("pattern") == {"String": "\u2581"} and part.get("content") == " " for part in replaced):
            return sentencepiece_bytes
    return None
