"""Grammars of every kind, parsed by llguidance."""

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import llguidance
import numpy as np
import tokenizers
from numpy.typing import NDArray

from kvrelay.errors import InvalidRequest, ModelError
from kvrelay.grammar.limits import FIELD, in_tag
from kvrelay.grammar.schema import JSON_OPTIONS, normalised
from kvrelay.grammar.tags import TagGrammar, lark_of_tag
from kvrelay.plane.messages import GrammarSpec

LIMITS: dict[str, Any] = {
    "initial_lexer_fuel": 1_000_000,
    "step_lexer_fuel": 100_000,
    "step_max_items": 50_000,
    "max_lexer_states": 50_000,
    "max_grammar_size": 100_000,
    "verbose_errors": False,  # no text of an output in an error
}

TRIAL_TOKENS = 16  # of an output that is tried out when a grammar is compiled

# A mask's time grows with the square of the parser's items where a grammar is ambiguous: 120 ms at 1,000 items, 2 ms at
# 200. A JSON schema is not: it needs 4 for each optional property, and 2,000 take 3 ms.
MOST_ITEMS = {"json_schema": 2_000, "regex": 2_000, "lark": 400, "structural_tag": 2_000}


def vocabulary(folder: Path, vocab_size: int) -> str:
    """tokenizer.json for a model of `vocab_size` tokens: added tokens without an embedding are left out."""
    source = (folder / "tokenizer.json").read_text(encoding="utf-8")
    parsed = json.loads(source)
    added = parsed.get("added_tokens") or []
    words = parsed.get("model", {}).get("vocab")
    if not isinstance(words, dict) or max([*words.values(), *(token["id"] for token in added)], default=0) < vocab_size:
        return source
    parsed["added_tokens"] = [token for token in added if token["id"] < vocab_size]
    parsed["model"]["vocab"] = {word: token_id for word, token_id in words.items() if token_id < vocab_size}
    return json.dumps(parsed, ensure_ascii=False)


class LlguidanceLibrary:
    """llguidance over one model's vocabulary. Thread-safe."""

    def __init__(self, folder: Path, vocab_size: int, eos_ids: Sequence[int], *, num_threads: int) -> None:
        """Takes 0.2 s to 0.5 s. Raises ModelError when the tokenizer's tokens cannot be mapped to bytes."""
        try:
            self._tokenizer = llguidance.LLTokenizer(
                vocabulary(folder, vocab_size), n_vocab=vocab_size, eos_token=list(eos_ids)
            )
        except Exception as error:  # ValueError, and whatever a tokenizer.json of another form leads to
            raise ModelError(str(folder), f"structured output cannot use its tokenizer: {error}") from error
        added = tokenizers.Tokenizer.from_file(str(folder / "tokenizer.json")).get_added_tokens_decoder()
        self._tokens = {  # no text to llguidance: special ones, and any <...>
            token.content: token_id
            for token_id, token in added.items()
            if token_id < vocab_size and token_id not in eos_ids
            if token.content and self._tokenizer.is_special_token(token_id)
        }
        self._special_ids = frozenset(token_id for token_id, token in added.items() if token.special)
        self._limits = {
            kind: llguidance.LLParserLimits(**LIMITS, max_items_in_row=most) for kind, most in MOST_ITEMS.items()
        }
        self._executor = llguidance.LLExecutor(num_threads)

    def grammar(self, spec: GrammarSpec) -> "LlguidanceGrammar":
        """Raises InvalidRequest."""
        tag = lark_of_tag(spec.text, self._tokens, self._special_ids) if spec.kind == "structural_tag" else None
        kind = "lark" if tag is not None and tag.is_ambiguous else spec.kind
        try:
            grammar = LlguidanceGrammar(self, kind, _source(spec, tag))
            error = grammar.base.get_error() or self._trial_error(grammar.parser())
        except ValueError as fault:
            error = str(fault)
        if error:
            raise InvalidRequest(self._schema_error(tag) or _sentence(spec, error), code="invalid_grammar")
        return grammar

    def _schema_error(self, tag: TagGrammar | None) -> str:
        """Which JSON schema of a structural tag is at fault, if one is, and in which tag it stands."""
        for begin, schema in tag.schemas if tag is not None else ():
            source = llguidance.LLMatcher.grammar_from_json_schema(schema)
            if error := self.compiled("json_schema", source).get_error():
                return _sentence(GrammarSpec("json_schema", ""), error) + in_tag(begin)
        return ""

    def compiled(self, kind: str, source: str) -> llguidance.LLMatcher:
        """A matcher at the start; releases the GIL. A fault is the matcher's error."""
        return llguidance.LLMatcher(self._tokenizer, source, log_level=0, limits=self._limits[kind])

    def _trial_error(self, parser: "LlguidanceParser") -> str:
        """What goes wrong in a short output of random tokens. It also builds lexer states that every output needs."""
        mask = np.zeros((1, -(-self._tokenizer.vocab_size // 32)), np.int32)
        random = np.random.default_rng(0)
        for step in range(TRIAL_TOKENS):
            self.fill([(parser, [], 0)], mask)
            if parser.matcher.is_stopped():
                break
            allowed = np.nonzero(np.unpackbits(mask.view(np.uint8)[0], bitorder="little"))[0]
            if not len(allowed):
                return "no output can match it" if step == 0 else ""
            parser.consume([int(random.choice(allowed))])
        return f"too complex: {parser.matcher.get_error()}" if parser.matcher.is_error() else ""

    def fill(self, rows: list[tuple["LlguidanceParser", list[int], int]], out: NDArray[np.int32]) -> None:
        """Masks of parsers and of the states after each of their draft tokens, in rows from the given one on."""
        size = out.strides[0]
        plain = [(parser.matcher, row) for parser, drafts, row in rows if not drafts]
        drafted = [(parser.matcher, row, drafts) for parser, drafts, row in rows if drafts]
        if plain:
            self._executor.unsafe_compute_mask_ptr(plain, out.ctypes.data, size, len(out))
        if drafted:
            self._executor.unsafe_compute_mask_ptr_with_draft_token(drafted, out.ctypes.data, size, len(out))


class LlguidanceGrammar:
    """A compiled grammar. Its parsers share the lexer's states, which are built as outputs need them."""

    def __init__(self, library: LlguidanceLibrary, kind: str, source: str) -> None:
        self.library, self._kind, self._source = library, kind, source
        self.base = library.compiled(kind, source)

    def parser(self) -> "LlguidanceParser":
        """A parser at the start of an output."""
        return LlguidanceParser(self.base.deep_copy(), self)

    def renew(self) -> None:
        """Start over with fresh lexer states: those that outputs share are beyond their limit."""
        self.base = self.library.compiled(self._kind, self._source)


class LlguidanceParser:
    """llguidance's matcher over the tokens of one output, eos tokens aside.

    is_complete: the text so far is a whole text of the grammar. is_stopped: no further text can follow.
    """

    __slots__ = ("_error", "_grammar", "matcher")

    def __init__(self, matcher: llguidance.LLMatcher, grammar: LlguidanceGrammar) -> None:
        self.matcher, self._grammar = matcher, grammar
        self._error: str | None = None

    @property
    def library(self) -> LlguidanceLibrary:
        return self._grammar.library

    @property
    def is_complete(self) -> bool:
        return self.matcher.is_accepting()

    @property
    def is_stopped(self) -> bool:
        return self.matcher.is_stopped()

    @property
    def error(self) -> str | None:
        if self._error is None and self.matcher.is_error():
            self._error = f"the output exceeds the grammar's limits: {' '.join(self.matcher.get_error().split())}"
            self._grammar.renew()
        return self._error

    def consume(self, token_ids: list[int]) -> int:
        return self.matcher.try_consume_tokens(token_ids)

    def rollback(self, count: int) -> None:
        self.matcher.rollback(count)


def _source(spec: GrammarSpec, tag: TagGrammar | None) -> str:
    if tag is not None:
        return llguidance.LLMatcher.grammar_from_lark(tag.lark)
    if spec.kind == "json_schema":
        overrides: Any = JSON_OPTIONS
        return llguidance.LLMatcher.grammar_from_json_schema(normalised(spec.text), overrides=overrides)
    if spec.kind == "regex":
        return llguidance.LLMatcher.grammar_from_regex(spec.text)
    return llguidance.LLMatcher.grammar_from_lark(spec.text)


def _sentence(spec: GrammarSpec, error: str) -> str:
    return f"{FIELD[spec.kind]} is not supported: {' '.join(error.split())}"
