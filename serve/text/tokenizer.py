"""Text to tokens and back for one prepared model folder: tokenizer, incremental detokenizer, and each choice's text
from its token outputs.

Reads tokenizer.json, tokenizer_config.json, chat_template.jinja, config.json and generation_config.json. Imports
tokenizers and jinja2, never torch or transformers.

A token is a run of bytes; the incremental decoder works in constant time per token and emits characters once they are
complete. Two families of vocabularies map to bytes exactly: byte-level BPE, and SentencePiece-like with byte fallback.
Others use the tokenizer's own streaming decoder.
"""

import codecs
import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Protocol

import tokenizers

from kvrelay.errors import InvalidRequest, ModelError, ModelNotFound
from kvrelay.plane.messages import TokenLogprob, TokenOutput
from kvrelay.serve.text import tokenising
from kvrelay.serve.text.chat_template import ChatTemplate, template_of_request
from kvrelay.serve.text.model_folder import (
    checked_vocab_size,
    ids_of,
    read_json,
    special_tokens,
    template_file,
    template_source,
)
from kvrelay.serve.text.stop import StopMatcher

LONG_TEXT_CHARS = 4096  # longer text is tokenised on a thread
REPLACEMENT = "\N{REPLACEMENT CHARACTER}"


class Detokenizer(Protocol):
    """One sequence's text."""

    def push(self, token_id: int) -> str:
        """The characters that this token completes; often none for a part of a character."""

    def flush(self) -> str:
        """An incomplete rest, as replacement characters."""


class ByteDetokenizer:
    """For vocabularies whose tokens are bytes. `bytes_of` gives None for a token to be skipped.

    strip: most spaces to drop at the very start of the text.
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
    """For any other vocabulary: decodes a moving window with the tokenizer itself."""

    def __init__(self, decode: Callable[[list[int]], str]) -> None:
        self._decode = decode
        self._window: list[int] = []
        self._emitted = ""

    def push(self, token_id: int) -> str:
        self._window.append(token_id)
        text = self._decode(self._window)
        if text.endswith(REPLACEMENT) or len(text) <= len(self._emitted) or not text.startswith(self._emitted):
            return ""
        new = text[len(self._emitted) :]
        self._window = self._window[-4:]
        self._emitted = self._decode(self._window)
        return new

    def flush(self) -> str:
        text = self._decode(self._window)
        new = text[len(self._emitted) :] if text.startswith(self._emitted) else ""
        self._window, self._emitted = [], ""
        return new


def _byte_level_table() -> dict[str, int]:
    """The printable stand-ins that byte-level BPE uses for bytes, as in GPT-2."""
    plain = [*range(ord("!"), ord("~") + 1), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    table = {chr(byte): byte for byte in plain}
    others = [byte for byte in range(256) if byte not in set(plain)]
    return table | {chr(256 + index): byte for index, byte in enumerate(others)}


_BYTE_OF_CHAR = _byte_level_table()


def byte_level_bytes(token: str) -> bytes:
    """A byte-level token's bytes; a token with any other character is its own UTF-8."""
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
    """Number of spaces that the `decoder` of a tokenizer.json strips at a text's start: the encoder's dummy prefix."""
    parts = (decoder or {}).get("decoders", [])
    strips = [part for part in parts if part.get("type") == "Strip" and part.get("content") == " "]
    return sum(int(part.get("start", 0)) for part in strips)


def bytes_function(decoder: dict[str, Any] | None) -> Callable[[str], bytes] | None:
    """The function for the `decoder` of a tokenizer.json; None when neither fits."""
    parts = decoder.get("decoders", []) if decoder and decoder.get("type") == "Sequence" else [decoder or {}]
    kinds = {part.get("type") for part in parts}
    if kinds == {"ByteLevel"}:
        return byte_level_bytes
    if kinds <= {"Replace", "ByteFallback", "Fuse", "Strip"} and "ByteFallback" in kinds:
        replaced = [part for part in parts if part.get("type") == "Replace"]
        if all(part.get("pattern") == {"String": "\u2581"} and part.get("content") == " " for part in replaced):
            return sentencepiece_bytes
    return None


class Tokenizer:
    """A prepared folder's tokenizer. Safe to use from threads."""

    def __init__(self, folder: Path, chat_template: str | None = None) -> None:
        """chat_template: a file instead of the model's own template.

        Raises ModelNotFound (no such folder or no tokenizer.json), ModelError (unreadable or incompatible).
        """
        path = folder / "tokenizer.json"
        if not path.is_file():
            raise ModelNotFound(str(folder), "has no tokenizer.json")
        try:
            source = path.read_text(encoding="utf-8")
            self._tokenizer = tokenizers.Tokenizer.from_str(source)
            decoder = json.loads(source).get("decoder")
        except Exception as error:  # tokenizers raises bare Exception
            raise ModelError(str(path), f"is not a tokenizer: {error}") from error
        self._tokenizer.no_truncation()
        self._tokenizer.no_padding()
        self._bytes_function = bytes_function(decoder)
        self._leading_spaces = leading_spaces(decoder)
        config = read_json(folder / "config.json")
        self.vocab_size = checked_vocab_size(self._tokenizer, folder, config)
        tokenizer_config = read_json(folder / "tokenizer_config.json")
        self.eos_ids = ids_of(
            read_json(folder / "generation_config.json").get("eos_token_id", config.get("eos_token_id"))
        )
        special = special_tokens(read_json(folder / "special_tokens_map.json"), tokenizer_config)
        template, tool_template = (
            template_source(folder, tokenizer_config, name) if chat_template is None else template_file(chat_template)
            for name in ("default", "tool_use")
        )
        place = chat_template or str(folder / "chat_template.jinja")
        self._special_tokens = special
        self.template = None if template is None else ChatTemplate(template, special, place)
        self.tool_template = self.template if tool_template is None else ChatTemplate(tool_template, special, place)
        self.response_template: dict[str, Any] | None = tokenizer_config.get("response_template")
        self._special_ids = frozenset(
            token_id for token_id, token in self._tokenizer.get_added_tokens_decoder().items() if token.special
        )
        self._bytes: dict[int, bytes] = {}

    def encode(self, text: str, *, add_special_tokens: bool = True) -> list[int]:
        """Token ids of `text`. Raises InvalidRequest when it names a special token that the model lacks."""
        # a batch of one: unlike `encode`, it releases the GIL
        ids: list[int] = self._tokenizer.encode_batch_fast([text], add_special_tokens=add_special_tokens)[0].ids
        if ids and max(ids) >= self.vocab_size:
            name = self._tokenizer.id_to_token(max(ids))
            raise InvalidRequest(f"the text holds {name}, a token without an embedding in this model")
        return ids

    def chat_text(
        self, messages: Sequence[Mapping[str, Any]], *, add_generation_prompt: bool = True, **variables: Any
    ) -> str:
        """The prompt's text; encode it without special tokens. Raises InvalidRequest."""
        template = self.tool_template if variables.get("tools") else self.template
        if template is None:
            raise InvalidRequest("no chat template: use /v1/completions, or set model.chat_template", "messages")
        return template.render(messages, add_generation_prompt=add_generation_prompt, **variables)

    def own_chat_text(self, source: str, messages: Sequence[Mapping[str, Any]], **variables: Any) -> str:
        """`chat_text` by a request's own template. Raises InvalidRequest."""
        return template_of_request(source, tuple(self._special_tokens.items())).render(messages, **variables)

    def decode(self, token_ids: Sequence[int], *, skip_special_tokens: bool = True) -> str:
        """Text of a whole sequence."""
        text: str = self._tokenizer.decode(list(token_ids), skip_special_tokens=skip_special_tokens)
        return text

    def token_bytes(self, token_id: int) -> bytes:
        """A token's bytes, special tokens as their names; empty for an id without a token."""
        known = self._bytes.get(token_id)
        if known is None:
            known = self._bytes[token_id] = self._compute_bytes(token_id)
        return known

    def _compute_bytes(self, token_id: int) -> bytes:
        token = self._tokenizer.id_to_token(token_id)
        if token is None:
            return b""
        if token_id in self._special_ids:
            return str(token).encode()
        if self._bytes_function is not None:
            return self._bytes_function(token)
        return self.decode([token_id], skip_special_tokens=False).encode()

    def special_tokens(self) -> list[tuple[int, str]]:
        """Ids and names of special tokens, whose text outputs do not show unless they are kept."""
        return [(token_id, str(self._tokenizer.id_to_token(token_id))) for token_id in sorted(self._special_ids)]

    def detokenizer(
        self, *, skip_special_tokens: bool = True, starts_text: bool = False, kept_ids: frozenset[int] = frozenset()
    ) -> Detokenizer:
        """A new sequence's detokenizer. At a text's start a dummy space goes, as in `decode`; in its middle it is real.

        A text of tokens from its middle on keeps its first space, so that prompt + completion is the whole text.

        kept_ids: special tokens that are not skipped.
        """
        skipped = self._special_ids if skip_special_tokens else frozenset()
        skipped = skipped - kept_ids if kept_ids else skipped
        if self._bytes_function is not None:
            return ByteDetokenizer(
                lambda token_id: None if token_id in skipped else self.token_bytes(token_id),
                strip=self._leading_spaces if starts_text else 0,
            )
        return WindowDetokenizer(
            lambda ids: self.decode([one for one in ids if one not in skipped], skip_special_tokens=False)
        )


async def encode_text(
    codec: Tokenizer, text: str, *, most_tokens: int | None = None, add_special_tokens: bool = True
) -> list[int]:
    """Tokens of `text`; of one with more than `most_tokens` perhaps only the first, but more than that and a margin.

    A long text is tokenised on a thread, so that the event loop is not blocked. Raises InvalidRequest, Overloaded.
    """
    if len(text) <= LONG_TEXT_CHARS:
        return codec.encode(text, add_special_tokens=add_special_tokens)
    return await tokenising.THREADS.encode(codec.encode, text, most_tokens, add_special_tokens=add_special_tokens)


# ---- a choice's text


@dataclass(frozen=True, slots=True)
class TextOptions:
    """The request's options for its output text."""

    stops: tuple[str, ...] = ()
    include_stop: bool = False
    skip_special_tokens: bool = True
    starts_text: bool = False  # the output is a new text, not the prompt's continuation
    min_tokens: int = 0  # stop strings are ignored before that many tokens
    kept_ids: frozenset[int] = frozenset()  # markers: tokens that are never skipped, and whose offset is exact


@dataclass(slots=True)
class TextPiece:
    """The text of one or several tokens. `offsets` are characters of the choice's text before each token."""

    text: str
    num_tokens: int
    finish_reason: str | None = None
    logprobs: list[TokenLogprob] = field(default_factory=list)
    offsets: list[int] = field(default_factory=list)
    silent: list[int] = field(default_factory=list)  # indices of the tokens that completed no text
    token_ids: list[int] = field(default_factory=list)
    first: TokenOutput | None = None  # the output with the sequence's first token


class ChoiceText:
    """Takes outputs in order; a piece with a finish reason is the last."""

    def __init__(self, codec: Tokenizer, options: TextOptions, *, start: int = 0) -> None:
        """start: characters before the first token (an echoed prompt)."""
        self.num_tokens = 0
        self._codec = codec
        self._detokenizer = codec.detokenizer(
            skip_special_tokens=options.skip_special_tokens, starts_text=options.starts_text, kept_ids=options.kept_ids
        )
        self._options = options
        self._matcher = StopMatcher(options.stops, include=options.include_stop) if options.stops else None
        self._num_chars = start

    def add(self, output: TokenOutput) -> TextPiece:
        """The text that is complete with `output`, and the finish reason if it has ended."""
        piece = TextPiece("", 0, output.finish_reason, first=output if self.num_tokens == 0 else None)
        texts: list[str] = []
        last = len(output.token_ids) - 1
        for index, token_id in enumerate(output.token_ids):
            ends = index == last and output.finish_reason is not None
            is_stop_token = ends and output.stop_token == token_id
            piece.offsets.append(self._num_chars)
            fragment = "" if is_stop_token and not self._options.include_stop else self._detokenizer.push(token_id)
            if not fragment:
                piece.silent.append(index)
            if token_id in self._options.kept_ids:  # a character left incomplete before it may be in the fragment
                piece.offsets[-1] += max(0, len(fragment) - len(self._codec.token_bytes(token_id).decode()))
            piece.num_tokens += 1
            self.num_tokens += 1
            texts.append(self._after_stops(fragment))
            if self._matcher is not None and self._matcher.stopped is not None:
                piece.finish_reason = "stop"
                break
        if piece.finish_reason is not None:
            texts.append(self._rest())
        piece.text = "".join(texts)
        piece.logprobs = output.logprobs[: piece.num_tokens]
        piece.token_ids = output.token_ids[: piece.num_tokens]
        return piece

    def _after_stops(self, fragment: str) -> str:
        self._num_chars += len(fragment)
        if self._matcher is None or self.num_tokens <= self._options.min_tokens:
            return fragment
        return self._matcher.push(fragment)

    def _rest(self) -> str:
        """The text that was held back, at the end."""
        left = self._detokenizer.flush()
        if self._matcher is None:
            return left
        return self._matcher.push(left) + self._matcher.flush()
