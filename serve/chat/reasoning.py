"""Reasoning in a choice's text: each family's markers, and the splitter that takes reasoning out. Pure."""

import enum

from kvrelay.serve.text.stop import overlap


class Stage(enum.Enum):
    """What a place in the text belongs to."""

    REASONING = 1
    MARKER = 2
    CONTENT = 3


class ReasoningSplitter:
    """Splits one choice's text into reasoning and content, incrementally.

    Reasoning is one block at the text's beginning, from `start` to `end`; after it, and after any other text, markers
    are content. A text whose prompt ends inside reasoning (`is_open`) needs no `start`, and is reasoning to its end
    when `end` never comes. Newlines next to the markers belong to neither side, but `is_exact` keeps those of the
    content, which a grammar has put there.
    """

    def __init__(self, start: str, end: str, *, is_open: bool = False, is_exact: bool = False) -> None:
        self._start, self._end = start, end
        self._is_open, self._is_exact = is_open, is_exact
        self._held = ""  # text that may belong to a marker
        self._held_at = 0  # its place: characters before it
        self._begun: int | None = None  # places at which reasoning begins, ends, and content begins
        self._ended: int | None = None
        self._content_at: int | None = None
        self._trims = False  # the newlines that come next
        self._is_over = False

    def push(self, text: str) -> tuple[str, str]:
        """(reasoning, content) that are certain with `text`."""
        self._held += text
        if self._begun is None and self._content_at is None and not self._find_start():
            return "", ""
        reasoning = self._take_reasoning() if self._content_at is None else ""
        return reasoning, "" if self._content_at is None else self._take(len(self._held))

    def flush(self) -> tuple[str, str]:
        """The text ended: the rest that was held back."""
        self._is_over = True
        if self._begun is None and self._content_at is None:
            self._open_at(0)
        rest = self._take(len(self._held))
        return ("", rest) if self._content_at is not None else (rest.rstrip("\n"), "")

    def stage_at(self, place: int) -> Stage | None:
        """What the character after the first `place` belongs to; None: not certain yet."""
        if place >= self._held_at and not self._is_over:
            return None
        if self._content_at is not None and place >= self._content_at:
            return Stage.CONTENT
        if self._begun is None or place < self._begun or (self._ended is not None and place >= self._ended):
            return Stage.MARKER
        return Stage.REASONING

    def _find_start(self) -> bool:
        """Whether it is certain what the text begins with; then a marker at its beginning is gone."""
        found = self._held.lstrip()
        if found.startswith(self._start):
            self._take(len(self._held) - len(found) + len(self._start))
            self._begun, self._trims = self._held_at, True
            return True
        if self._start.startswith(found):
            return False
        self._open_at(0)
        return True

    def _open_at(self, place: int) -> None:
        """A text that does not begin with the marker."""
        if self._is_open:
            self._begun, self._trims = place, True
        else:
            self._content_at = place

    def _take_reasoning(self) -> str:
        at = self._held.find(self._end)
        size = at if at >= 0 else len(self._held) - overlap(self._held, self._end)
        while size and self._held[size - 1] == "\n":
            size -= 1
        reasoning = self._take(size)
        if at >= 0:
            self._trims = False
            newlines = at - size
            self._take(newlines)
            self._ended = self._held_at
            self._take(len(self._end))
            self._content_at, self._trims = self._held_at, not self._is_exact
        return reasoning

    def _take(self, size: int) -> str:
        """The first `size` characters that were held, without newlines where they are dropped."""
        text, self._held = self._held[:size], self._held[size:]
        self._held_at += size
        if self._trims:
            text = text.lstrip("\n")
            self._trims = not text
        return text
