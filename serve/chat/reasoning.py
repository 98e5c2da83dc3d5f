"""Reasoning in a choice's text: each family's markers, and the splitter that takes reasoning out. Pure."""

import enum
from collections.abc import Mapping
from dataclasses import dataclass

from kvrelay.serve.text.stop import overlap
from kvrelay.serve.text.tokenizer import Tokenizer


@dataclass(frozen=True, slots=True)
class ReasoningFormat:
    """The markers around reasoning. is_assumed: outputs begin with reasoning even where the prompt does not open it."""

    start: str
    end: str
    is_assumed: bool = False

    def is_open(self, prompt: str) -> bool | None:
        """Whether the prompt ends inside reasoning; False: right behind it; None: the model may begin it."""
        end = prompt[-MAX_TAIL_CHARS:].rstrip()
        if end.endswith(self.end.rstrip()):
            return False
        return True if self.is_assumed or end.endswith(self.start.rstrip()) else None

    def is_open_in(self, message: str) -> bool:
        """Whether a message that the model continues ends inside reasoning."""
        return message.rfind(self.start.rstrip()) > message.rfind(self.end.rstrip())


MAX_TAIL_CHARS = 256  # of a prompt, in which a marker at its end lies

_THINK = ("<think>", "</think>")
REASONING_FORMATS: Mapping[str, ReasoningFormat] = {
    "mistral": ReasoningFormat("[THINK]", "[/THINK]"),
    "seed_oss": ReasoningFormat("<seed:think>", "</seed:think>"),
    "kimi": ReasoningFormat("◁think▷", "◁/think▷"),
    "gemma4": ReasoningFormat("<|channel>thought\n", "<channel|>"),
    "granite": ReasoningFormat("Here is my thought process:", "Here is my response:"),
    "qwen3": ReasoningFormat(*_THINK),  # of most families
    "deepseek_r1": ReasoningFormat(*_THINK, is_assumed=True),  # for templates that do not open it
}


@dataclass(frozen=True, slots=True)
class ReasoningMarkers:
    """A model's format, and its markers in the model's tokens."""

    form: ReasoningFormat
    start: tuple[int, ...]
    end: tuple[int, ...]
    kept_ids: frozenset[int]  # tokens whose text a splitter must see, though they may be special
    start_like: tuple[tuple[int, ...], ...] = ()  # as in Thinking, for markers of several tokens
    end_like: tuple[tuple[int, ...], ...] = ()


def reasoning_format(parser: str, template: str) -> ReasoningFormat | None:
    """The format that the setting model.reasoning_parser names; with auto that whose markers the template has."""
    if parser != "auto":
        return REASONING_FORMATS.get(parser)
    fits = (one for one in REASONING_FORMATS.values() if one.end in template or one.start.rstrip() in template)
    return next(fits, None)


def find_markers(parser: str, codec: Tokenizer) -> ReasoningMarkers | None:
    """Those of the model that is served; None: it does not reason, or in no way that is known."""
    form = reasoning_format(parser, "" if codec.template is None else codec.template.source)
    if form is None:
        return None
    start, end = (codec.encode(marker, add_special_tokens=False) for marker in (form.start, form.end))
    singles = {ids[0] for ids in (start, end) if len(ids) == 1}
    special = {token for token in (*start, *end) if not codec.decode([token])}
    likes = [_like(codec, ids) if len(ids) > 1 else () for ids in (start, end)]
    return ReasoningMarkers(form, tuple(start), tuple(end), frozenset(singles | special), *likes)


def _like(codec: Tokenizer, marker: list[int]) -> tuple[tuple[int, ...], ...]:
    """For each token of a marker, those that may stand for it: its first and last may be parts of longer tokens."""
    head, tail = codec.token_bytes(marker[0]), codec.token_bytes(marker[-1])
    texts = [(token, codec.token_bytes(token)) for token in range(codec.vocab_size)]
    heads = tuple(token for token, text in texts if text.endswith(head))
    tails = tuple(token for token, text in texts if text.startswith(tail))
    return heads, *((token,) for token in marker[1:-1]), tails


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

    def stage_at(self, place: int, *, is_silent: bool = False) -> Stage | None:
        """What the character after the first `place` belongs to; None: not certain yet.

        is_silent: a token without text of its own is there: next to reasoning, it is of reasoning.
        """
        if place >= self._held_at and not self._is_over:
            return None
        if is_silent and place == self._ended:
            return Stage.REASONING
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
        size = len(self._held[:size].rstrip("\n"))
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
