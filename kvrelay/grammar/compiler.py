"""The grammars of one process: compiled once each, and kept while they are used."""

from collections import OrderedDict
from collections.abc import Iterable
from concurrent.futures import Future
from pathlib import Path
from threading import Lock
from typing import TYPE_CHECKING

from kvrelay.errors import InvalidRequest
from kvrelay.grammar.limits import check_size, digest_of
from kvrelay.grammar.matcher import Matcher
from kvrelay.plane.messages import GrammarSpec

if TYPE_CHECKING:
    from kvrelay.grammar.llguidance_parser import LlguidanceGrammar, LlguidanceLibrary

MOST_GRAMMARS = 128  # kept compiled
MOST_TEXT = 512 << 10  # characters of all kept: compiled, a JSON schema takes 50 times the memory of its text


class CompiledGrammar:
    """What outputs of one GrammarSpec are matched with."""

    __slots__ = ("_eos_ids", "_grammar")

    def __init__(self, grammar: "LlguidanceGrammar", eos_ids: frozenset[int]) -> None:
        self._grammar, self._eos_ids = grammar, eos_ids

    def matcher(self) -> Matcher:
        """A matcher at the start of an output."""
        return Matcher(self._grammar.parser(), self._eos_ids)


class GrammarCompiler:
    """Compiles grammars for one model. Thread-safe; the library is loaded with the first grammar."""

    def __init__(self, folder: Path, vocab_size: int, eos_ids: Iterable[int], *, num_threads: int = 2) -> None:
        """vocab_size: the model's, the width of its logits. num_threads: threads that compute masks."""
        self._folder, self._vocab_size, self._num_threads = folder, vocab_size, num_threads
        self._eos_ids = frozenset(token_id for token_id in eos_ids if token_id < vocab_size)
        self._lock = Lock()
        self._grammars: OrderedDict[bytes, Future[CompiledGrammar]] = OrderedDict()
        self._sizes: dict[bytes, int] = {}  # characters of each one's text
        self._loading = Lock()
        self._llguidance: LlguidanceLibrary | None = None

    @property
    def num_words(self) -> int:
        """Words of a mask: ceil(vocab_size / 32)."""
        return -(-self._vocab_size // 32)

    def compile(self, spec: GrammarSpec) -> CompiledGrammar:
        """Blocks until compiled. Concurrent calls for one grammar compile it once; a refusal is remembered, too.

        Raises InvalidRequest: the grammar is not supported, and the message names the key or the place. Raises
        ModelError: the model's tokenizer cannot be used.
        """
        check_size(spec)
        key = digest_of(spec)
        with self._lock:
            future = self._grammars.get(key)
            is_ours = future is None
            if future is None:
                future = self._keep(key, len(spec.text))
            self._grammars.move_to_end(key)
        if is_ours:
            try:
                future.set_result(CompiledGrammar(self._compiled(spec), self._eos_ids))
            except InvalidRequest as error:
                future.set_exception(error)
            except BaseException as error:
                with self._lock:
                    self._grammars.pop(key, None)
                    self._sizes.pop(key, None)
                future.set_exception(error)
        if isinstance(refusal := future.exception(), InvalidRequest):
            raise InvalidRequest(*refusal.args)  # a new one: each raise adds frames to an error
        return future.result()

    def _keep(self, key: bytes, size: int) -> Future[CompiledGrammar]:
        """A new grammar's place; those used longest ago go for it, while they are too many or too large together."""
        future = self._grammars[key] = Future()
        self._sizes[key] = size
        while len(self._grammars) > MOST_GRAMMARS or (
            len(self._grammars) > 1 and sum(self._sizes.values()) > MOST_TEXT
        ):
            del self._sizes[self._grammars.popitem(last=False)[0]]
        return future

    def load(self) -> None:
        """Load the library: 0.3 s to 0.5 s, once. Raises ModelError."""
        self._llguidance_library()

    def _compiled(self, spec: GrammarSpec) -> "LlguidanceGrammar":
        if not self._eos_ids:
            raise InvalidRequest("this model has no eos token, so an output with a grammar could not end")
        return self._llguidance_library().grammar(spec)

    def _llguidance_library(self) -> "LlguidanceLibrary":
        with self._loading:
            if self._llguidance is None:
                from kvrelay.grammar.llguidance_parser import LlguidanceLibrary

                self._llguidance = LlguidanceLibrary(
                    self._folder, self._vocab_size, sorted(self._eos_ids), num_threads=self._num_threads
                )
            return self._llguidance
