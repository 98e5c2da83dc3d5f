"""Guessing the next tokens of a sequence from its own text: prompt lookup. Pure.

What a model says often repeats what it was given or has said: the tokens that followed the last few ones where they stood
before are the guess. It needs no second model and no state beyond the tokens, so it goes on the same on any worker.
Source: prompt lookup decoding (Saxena, 2023); Yang et al., Inference with Reference, 2023.
"""

from collections.abc import Sequence

from kvrelay.hashing import pack_tokens

LONGEST, SHORTEST = 4, 2  # tokens that must be the same; longer ones are looked for first
_ITEM = 4  # bytes of a packed token


class PromptLookup:
    """One sequence's text, packed so that looking for a few tokens is one search for bytes."""

    def __init__(self, longest: int = LONGEST, shortest: int = SHORTEST) -> None:
        self._longest, self._shortest = longest, shortest
        self._packed = bytearray()

    def draft(self, token_ids: Sequence[int], most: int) -> list[int]:
        """Up to `most` tokens that may follow; empty: the last ones stand nowhere else. `token_ids` only ever grows."""
        self._packed += pack_tokens(token_ids, len(self._packed) // _ITEM)
        if most <= 0:
            return []
        for size in range(min(self._longest, len(token_ids) - 1), self._shortest - 1, -1):
            if (after := self._after_last(size)) is not None:
                return self._continued(token_ids, after, most)
        return []

    def _after_last(self, size: int) -> int | None:
        """Where the text goes on after the last earlier place of its own last `size` tokens."""
        packed = self._packed
        wanted, end = packed[-size * _ITEM :], len(packed) - 1
        while (found := packed.rfind(wanted, 0, end)) >= 0:
            if found % _ITEM == 0:
                return found // _ITEM + size
            end = found + len(wanted) - 1
        return None

    @staticmethod
    def _continued(token_ids: Sequence[int], after: int, most: int) -> list[int]:
        """From there on; at the end of the text it goes round: what has a period is expected to go on with it."""
        length = len(token_ids)
        return [token_ids[after + index % (length - after)] for index in range(most)]
