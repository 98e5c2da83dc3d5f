"""One output's place in its grammar: which tokens may follow, taking tokens and taking them back.

llguidance parses (llguidance_parser.py); what ends an output is decided here: an eos token is never a part of a
grammar's text, and is allowed exactly where the text is complete.
"""

from collections.abc import Sequence
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

if TYPE_CHECKING:
    from kvrelay.grammar.llguidance_parser import LlguidanceParser

Masks = NDArray[np.int32]  # [rows, ceil(vocabulary / 32)]: bit i % 32 of word i // 32 is token i, set when allowed


class Matcher:
    """Follows one output. Not thread-safe; matchers of one grammar may be used by different threads.

    parser, eos_ids: for fill_masks.
    """

    __slots__ = ("_num_ends", "_num_tokens", "eos_ids", "parser")

    def __init__(self, parser: "LlguidanceParser", eos_ids: frozenset[int]) -> None:
        self.parser = parser
        self.eos_ids = eos_ids
        self._num_tokens = 0  # that the parser has
        self._num_ends = 0  # eos tokens after them

    @property
    def problem(self) -> str | None:
        """Why this output cannot be continued (the grammar's limits were exceeded); None while all is well."""
        return self.parser.error

    @property
    def has_ended(self) -> bool:
        """Whether an eos token was accepted."""
        return self._num_ends > 0

    @property
    def is_over(self) -> bool:
        """Whether only an eos token may follow."""
        return self._num_ends > 0 or self.parser.is_stopped

    def num_before_end(self, token_ids: Sequence[int]) -> int:
        return next((i for i, token_id in enumerate(token_ids) if token_id in self.eos_ids), len(token_ids))

    def accept(self, token_ids: Sequence[int]) -> int:
        """Take tokens in order, up to the first that is not allowed. Returns how many were taken.

        After an eos token only further eos tokens are taken.
        """
        num_text = self.num_before_end(token_ids)
        taken = 0
        if num_text and self._num_ends == 0:
            taken = self.parser.consume(list(token_ids[:num_text]))
            self._num_tokens += taken
        if taken < num_text or (self._num_ends == 0 and num_text < len(token_ids) and not self.parser.is_complete):
            return taken
        for token_id in token_ids[num_text:]:
            if token_id not in self.eos_ids:
                break
            self._num_ends += 1
            taken += 1
        return taken

    def valid_prefix(self, token_ids: Sequence[int]) -> int:
        """How many of these tokens, in order, would be accepted. The state stays as it is."""
        taken = self.accept(token_ids)
        self.rollback(taken)
        return taken

    def rollback(self, count: int) -> None:
        """Take back the last `count` accepted tokens, eos tokens included.

        Raises ValueError when fewer were accepted.
        """
        if count > self._num_tokens + self._num_ends:
            raise ValueError(f"cannot take back {count} tokens of {self._num_tokens + self._num_ends}")
        ends = min(count, self._num_ends)
        self._num_ends -= ends
        if count > ends:
            self.parser.rollback(count - ends)
            self._num_tokens -= count - ends
