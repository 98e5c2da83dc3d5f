"""What the files that add rows to `kvrelay verify` know of the report."""

from collections.abc import Sequence
from typing import Protocol


class Row(Protocol):
    """One line of the report."""

    def count(self, case: str, expected: Sequence[int], got: Sequence[int]) -> None: ...
    def claim(self, *, holds: bool, note: str) -> None: ...
