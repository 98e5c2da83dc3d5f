"""Prompt lookup: drafts from a sequence's own text, whose last tokens occurred before. Pure."""

from collections.abc import Sequence

from kvrelay.hashing import pack_tokens

LONGEST, SHORTEST = 4, 2  # tokens that must match; longer matches are tried first
_ITEM = 4  # bytes of a packed token


class PromptLookup:
    """One sequence's text, packed so that finding a few tokens is one search for bytes."""

    def __init__(self, longest: int = LONGEST, shortest: int = SHORTEST) -> None:
        self._longest, self._shortest = longest, shortest
        self._packed = bytearray()

    def draft(self, token_ids: Sequence[int], most: int) -> list[int]:
        """Up to `most` tokens that may follow; empty: no earlier occurrence. `token_ids` only ever grows."""
        self._packed += pack_tokens(token_ids, len(self._packed) // _ITEM)
        if most <= 0:
            return []
        for size in range(min(self._longest, len(token_ids) - 1), self._shortest - 1, -1):
            if (after := self._after_last(size)) is not None:
                return self._continued(token_ids, after, most)
        return []

    def _after_last(self, size: int) -> int | None:
        """Position after the latest earlier occurrence of the last `size` tokens."""
        packed = self._packed
        wanted, end = packed[-size * _ITEM :], len(packed) - 1
        while (found := packed.rfind(wanted, 0, end)) >= 0:
            if found % _ITEM == 0:
                return found // _ITEM + size
            end = found + len(wanted) - 1
        return None

    @staticmethod
    def _continued(token_ids: Sequence[int], after: int, most: int) -> list[int]:
        """Tokens from there on; at the end of the text it wraps around, which continues periodic text."""
        length = len(token_ids)
        return [token_ids[after + index % (length - after)] for index in range(most)]
