"""Structural tags (free text with formats in it: the tool calls of model families), parsed by xgrammar.

Importing xgrammar imports torch and transformers: 1 s to 2 s, and never in the ingress.
"""

import re
from collections.abc import Callable, Mapping
from threading import Lock

import numpy as np
import xgrammar

from kvrelay.grammar.limits import FIELD, nodes
from kvrelay.grammar.masks import end_mask
from kvrelay.grammar.matcher import Masks
from kvrelay.grammar.schema import Json, check_and_rewrite, loads, refuse, subschemas
from kvrelay.plane.messages import GrammarSpec

CONTROL = re.compile(rb"[\0-\x08\x0b\x0c\x0e-\x1f]")
NOT_ENFORCED = {
    *("contains", "dependencies", "dependentRequired", "dependentSchemas", "else", "if", "multipleOf", "not", "oneOf"),
    *("then", "unevaluatedItems", "unevaluatedProperties", "uniqueItems"),
}
AMBIGUOUS = ("grammar", "plus", "repeat", "star")  # formats whose masks can take seconds
BESIDE = {"maxLength", "maximum", "minLength", "minimum", "pattern", "properties"}


class XgrammarLibrary:
    """xgrammar over one model's vocabulary. Thread-safe.

    A special token is text to xgrammar, and detokenizing drops it; so it is a part of the vocabulary only for a tag
    that names it.
    """

    def __init__(
        self, token_bytes: list[bytes], special: Mapping[int, str], eos_ids: frozenset[int], *, num_threads: int
    ) -> None:
        # it takes control characters into strings of bounded length
        self._token_bytes = [b"" if CONTROL.search(token) else token for token in token_bytes]
        self._special, self._eos_ids = special, eos_ids
        self._end = end_mask(eos_ids, -(-len(token_bytes) // 32))
        self._last_word = np.uint32((1 << (len(token_bytes) - 1) % 32 + 1) - 1).view(np.int32)
        self._lock = Lock()
        self._compilers: dict[frozenset[int], xgrammar.GrammarCompiler] = {}
        self._batch = xgrammar.BatchGrammarMatcher(max_threads=num_threads)

    def grammar(self, spec: GrammarSpec) -> Callable[[], "XgrammarParser"]:
        """What makes parsers at the start of an output. Raises InvalidRequest."""
        tag = loads(spec.text, FIELD[spec.kind])
        _check(tag)
        strings = " ".join(one for one in nodes(tag) if isinstance(one, str))
        named = frozenset(
            token_id
            for token_id, name in self._special.items()
            if name and name in strings and token_id not in self._eos_ids
        )
        try:
            compiled = self._compiler(named).compile_structural_tag(spec.text)
        except RuntimeError as error:
            refuse(f"the structural tag is not supported: {_reason(error)}")
        return lambda: XgrammarParser(xgrammar.GrammarMatcher(compiled), self, named)

    def _compiler(self, named: frozenset[int]) -> xgrammar.GrammarCompiler:
        with self._lock:
            compiler = self._compilers.get(named)
            if compiler is None:
                if len(self._compilers) >= 8:
                    self._compilers.clear()
                tokens = list(self._token_bytes)
                for token_id in named:
                    tokens[token_id] = self._special[token_id].encode()
                info = xgrammar.TokenizerInfo(
                    tokens, xgrammar.VocabType.RAW, vocab_size=len(tokens), stop_token_ids=sorted(self._eos_ids)
                )
                compiler = xgrammar.GrammarCompiler(info, max_threads=1, cache_enabled=False)
                self._compilers[named] = compiler
            return compiler

    def has_text(self, token_id: int) -> bool:
        """Whether the token is text in every tag."""
        return bool(self._token_bytes[token_id])

    def allows_only_the_end(self, parser: "XgrammarParser") -> bool:
        mask = np.zeros((1, self._end.shape[0]), np.int32)
        parser.matcher.fill_next_token_bitmask(mask)
        mask[0, -1] &= self._last_word
        return bool((mask[0] == self._end).all())

    def fill(self, rows: list[tuple["XgrammarParser", list[int], int]], out: Masks) -> None:
        """Masks of parsers and of the states after each of their draft tokens, in rows from the given one on."""
        depth = 0
        while rows:
            self._batch.batch_fill_next_token_bitmask(
                [parser.matcher for parser, _, _ in rows], out, [row + depth for _, _, row in rows]
            )
            out[[row + depth for _, _, row in rows], -1] &= self._last_word  # it sets bits past the vocabulary
            going = []
            for parser, drafts, row in rows:
                if depth < len(drafts) and parser.consume([drafts[depth]]):
                    going.append((parser, drafts, row))
                elif depth:
                    parser.rollback(depth)
            rows, depth = going, depth + 1


class XgrammarParser:
    """xgrammar's matcher as a GrammarParser."""

    __slots__ = ("library", "matcher", "named")

    def __init__(self, matcher: xgrammar.GrammarMatcher, library: XgrammarLibrary, named: frozenset[int]) -> None:
        """named: special tokens that are text here."""
        self.matcher, self.library, self.named = matcher, library, named

    @property
    def is_complete(self) -> bool:
        return bool(self.matcher.is_completed())

    @property
    def is_stopped(self) -> bool:
        return self.is_complete and self.library.allows_only_the_end(self)

    @property
    def error(self) -> str | None:
        return None

    def consume(self, token_ids: list[int]) -> int:
        for taken, token_id in enumerate(token_ids):
            has_text = self.library.has_text(token_id) or token_id in self.named  # any other would make it warn
            if not (has_text and self.matcher.accept_token(token_id)):
                return taken
        return len(token_ids)

    def rollback(self, count: int) -> None:
        self.matcher.rollback(count)


def _check(tag: Json) -> None:
    """Hold the schemas in a tag to the limits, and refuse the keys that xgrammar drops without a word."""
    for node in nodes(tag):
        if isinstance(node, dict) and node.get("type") in AMBIGUOUS and node.keys() & {"content", "grammar"}:
            refuse(f"the format {node['type']} is not supported in a structural tag")
        if isinstance(node, dict) and "json_schema" in node:
            check_and_rewrite(node["json_schema"])
            left = [node["json_schema"]]
            while left:
                if isinstance(schema := left.pop(), dict):
                    if ignored := schema.keys() & NOT_ENFORCED or _not_together(schema):
                        refuse(f"{' with '.join(sorted(ignored))} is not supported in a structural tag's json_schema")
                    left += [one for _, one in subschemas(schema)]


def _not_together(schema: dict[str, Json]) -> set[str]:
    """Keys of which xgrammar enforces but one."""
    whole = schema.keys() & {"$ref", "allOf", "anyOf", "pattern", "format"}
    beside = {"$ref", "allOf", "anyOf"} & whole and schema.keys() & BESIDE
    lengths = {"pattern", "format"} & whole and schema.keys() & {"minLength", "maxLength"}
    both = beside or lengths
    return whole | both if both or len(schema.get("allOf") or ()) > 1 else set()


def _reason(error: Exception) -> str:
    """The last part of xgrammar's message, without its source lines."""
    return " ".join(str(error).split(": ", 1)[-1].split())
