"""Structural tags (free text with formats in it: the tool calls of model families), parsed by xgrammar.

Importing xgrammar imports torch and transformers: 1 s to 2 s, and never in the ingress.
"""

from collections.abc import Mapping
from threading import Lock
from typing import Any

import numpy as np
import xgrammar

from kvrelay.errors import InvalidRequest
from kvrelay.grammar.masks import end_mask
from kvrelay.grammar.matcher import Masks
from kvrelay.grammar.schema import loads
from kvrelay.plane.messages import GrammarSpec


class XgrammarLibrary:
    """xgrammar over one model's vocabulary. Thread-safe.

    A special token is text to xgrammar, and detokenizing drops it; so it is a part of the vocabulary only for a tag
    that names it.
    """

    def __init__(
        self, token_bytes: list[bytes], special: Mapping[int, str], eos_ids: frozenset[int], *, num_threads: int
    ) -> None:
        self._token_bytes, self._special, self._eos_ids = token_bytes, special, eos_ids
        self._end = end_mask(eos_ids, -(-len(token_bytes) // 32))
        self._lock = Lock()
        self._compilers: dict[frozenset[int], xgrammar.GrammarCompiler] = {}
        self._batch = xgrammar.BatchGrammarMatcher(max_threads=num_threads)

    def grammar(self, spec: GrammarSpec) -> "XgrammarGrammar":
        """Raises InvalidRequest."""
        strings = " ".join(_strings(loads(spec.text, "the structural tag")))
        named = frozenset(
            token_id
            for token_id, name in self._special.items()
            if name and name in strings and token_id not in self._eos_ids
        )
        try:
            return XgrammarGrammar(self, self._compiler(named).compile_structural_tag(spec.text))
        except RuntimeError as error:
            raise InvalidRequest(
                f"the structural tag is not supported: {_reason(error)}", code="invalid_grammar"
            ) from None

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

    def allows_only_the_end(self, parser: "XgrammarParser") -> bool:
        mask = np.zeros((1, self._end.shape[0]), np.int32)
        parser.matcher.fill_next_token_bitmask(mask)
        return bool((mask[0] == self._end).all())

    def fill(self, rows: list[tuple["XgrammarParser", list[int], int]], out: Masks) -> None:
        """Masks of parsers and of the states after each of their draft tokens, in rows from the given one on."""
        depth = 0
        while rows:
            self._batch.batch_fill_next_token_bitmask(
                [parser.matcher for parser, _, _ in rows], out, [row + depth for _, _, row in rows]
            )
            going = []
            for parser, drafts, row in rows:
                if depth < len(drafts) and parser.consume([drafts[depth]]):
                    going.append((parser, drafts, row))
                elif depth:
                    parser.rollback(depth)
            rows, depth = going, depth + 1


class XgrammarGrammar:
    """A compiled structural tag."""

    def __init__(self, library: XgrammarLibrary, compiled: xgrammar.CompiledGrammar) -> None:
        self._library, self._compiled = library, compiled

    def parser(self) -> "XgrammarParser":
        """A parser at the start of an output."""
        return XgrammarParser(xgrammar.GrammarMatcher(self._compiled), self._library)


class XgrammarParser:
    """xgrammar's matcher as a GrammarParser."""

    __slots__ = ("library", "matcher")

    def __init__(self, matcher: xgrammar.GrammarMatcher, library: XgrammarLibrary) -> None:
        self.matcher, self.library = matcher, library

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
            if not self.matcher.accept_token(token_id):
                return taken
        return len(token_ids)

    def rollback(self, count: int) -> None:
        self.matcher.rollback(count)


def _strings(node: Any) -> list[str]:
    found, left = [], [node]
    while left:
        one = left.pop()
        if isinstance(one, str):
            found.append(one)
        elif isinstance(one, dict):
            left += [*one.keys(), *one.values()]
        elif isinstance(one, list):
            left += one
    return found


def _reason(error: Exception) -> str:
    """The last part of xgrammar's message, without its source lines."""
    return " ".join(str(error).split(": ", 1)[-1].split())
