"""Text that comes in pieces, read by generators: each step yields when it needs more text than there is.

What a step decides depends on the text alone, never on where it was cut.
"""

from collections.abc import Generator
from typing import TypeVar

T = TypeVar("T")
Steps = Generator[None, None, T]
SPACE = " \t\r\n"


class Malformed(Exception):
    """What comes is not what was expected. Never leaves serve/chat."""


class PiecedText:
    """The text so far from `at` on; what is before has been read."""

    __slots__ = ("at", "is_over", "text")

    def __init__(self) -> None:
        self.text, self.at, self.is_over = "", 0, False

    def add(self, piece: str) -> None:
        self.text += piece

    def forget(self) -> None:
        """Drop what has been read."""
        self.text, self.at = self.text[self.at :], 0

    def more(self) -> Steps[bool]:
        """Wait for more text; False when none comes."""
        size = len(self.text)
        while len(self.text) == size:
            if self.is_over:
                return False
            yield
        return True

    def peek(self) -> Steps[str]:
        """The next character; "" at the end."""
        while self.at >= len(self.text):
            if not (yield from self.more()):
                return ""
        return self.text[self.at]

    def take(self, literal: str) -> Steps[bool]:
        """Read `literal` if it comes next."""
        while True:
            have = self.text[self.at : self.at + len(literal)]
            if have == literal:
                self.at += len(literal)
                return True
            if not literal.startswith(have) or not (yield from self.more()):
                return False

    def skip_space(self) -> Steps[None]:
        while (char := (yield from self.peek())) and char in SPACE:
            self.at += 1

    def take_loosely(self, literal: str) -> Steps[bool]:
        """Read `literal` if it comes next, with any whitespace around and between its words; else nothing is read."""
        mark = self.at
        for word in literal.split():
            yield from self.skip_space()
            if not (yield from self.take(word)):
                self.at = mark
                return False
        return True

    def until(self, end: str, *, most: int | None = None) -> Steps[str | None]:
        """The text before `end`, which is read, too; None, and nothing read, when `most` characters do not have it."""
        searched = self.at
        while (found := self.text.find(end, searched)) < 0:
            searched = max(self.at, len(self.text) - len(end) + 1)
            if (most is not None and searched - self.at > most) or not (yield from self.more()):
                return None
        if most is not None and found - self.at > most:
            return None
        before, self.at = self.text[self.at : found], found + len(end)
        return before
