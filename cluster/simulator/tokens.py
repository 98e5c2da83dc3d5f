"""A sequence's tokens when only their number matters. Pure.

Prompts of traces are lengths and block names; two lists of a hundred thousand token ids for each sequence would cost a
large simulation gigabytes. Slices are empty: cached blocks are found by name, partial blocks are not found.
"""

from collections.abc import Sequence
from typing import Any, Self, cast


class CountedTokens:
    """Stands in for a list of token ids."""

    __slots__ = ("_count", "_last")

    def __init__(self, count: int, last: int = 0) -> None:
        self._count, self._last = count, last

    def __len__(self) -> int:
        return self._count

    def __getitem__(self, place: int | slice) -> Any:
        if isinstance(place, slice):
            return []
        if place != -1:
            raise IndexError("only the last of counted tokens is known")
        return self._last

    def append(self, token: int) -> None:
        self._count += 1
        self._last = token

    def extend(self, tokens: Sequence[int]) -> None:
        if tokens:
            self._count += len(tokens)
            self._last = tokens[-1]

    def __iadd__(self, tokens: Sequence[int]) -> Self:
        if tokens:
            self._count += len(tokens)
            self._last = tokens[-1]
        return self

    def copy(self) -> "CountedTokens":
        return CountedTokens(self._count, self._last)


def counted(count: int) -> list[int]:
    """`count` tokens for a SequenceRequest."""
    return cast("list[int]", CountedTokens(count))
