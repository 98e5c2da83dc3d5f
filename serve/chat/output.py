"""One choice of a chat reply: its text, piece by piece, becomes parts of a message. Pure.

The text passes two stages: reasoning is split off first, and what is left is searched for tool calls. Either may be
absent. Both give the same parts however the text is cut into pieces, adjacent ones joined.
"""

from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol

from kvrelay.plane.messages import TokenLogprob
from kvrelay.serve.chat.reasoning import ReasoningSplitter, Stage
from kvrelay.serve.text.tokenizer import TextPiece


@dataclass(frozen=True, slots=True)
class Reasoning:
    """More text of `message.reasoning_content`."""

    text: str


@dataclass(frozen=True, slots=True)
class Content:
    """More text of `message.content`."""

    text: str


@dataclass(frozen=True, slots=True)
class ToolCallStart:
    """A call begins: the one at `index` in `message.tool_calls`."""

    index: int
    id: str
    name: str


@dataclass(frozen=True, slots=True)
class ToolArguments:
    """More text of the arguments, which are JSON, of the call at `index`."""

    index: int
    text: str


AfterReasoning = Content | ToolCallStart | ToolArguments
Part = Reasoning | AfterReasoning


class ToolParser(Protocol):
    """Finds the tool calls in one choice's text."""

    def push(self, text: str) -> list[AfterReasoning]:
        """The parts that are certain with `text`."""

    def flush(self) -> list[AfterReasoning]:
        """The text ended: what was held back."""


@dataclass(frozen=True, slots=True)
class OutputFormat:
    """What a chat request's choices may hold besides content; there is none for a request without either stage.

    kept_ids: special tokens that are markers of a stage: they stay in the text that it gets.
    """

    splitter: Callable[[], ReasoningSplitter] | None = None
    parser: Callable[[], ToolParser] | None = None
    shows_reasoning: bool = True
    kept_ids: frozenset[int] = frozenset()
    call_reason: str = "tool_calls"  # the finish reason of a choice with calls that ended by itself


class ChoiceOutput:
    """Takes a choice's pieces in order; that with a finish reason is the last."""

    def __init__(self, form: OutputFormat) -> None:
        self.num_reasoning_tokens = 0  # without the markers
        self.has_calls = False
        self._shows_reasoning = form.shows_reasoning
        self._splitter = None if form.splitter is None else form.splitter()
        self._parser = None if form.parser is None else form.parser()
        # tokens: where their text begins, whether they have none of their own
        self._undecided: deque[tuple[int, bool, TokenLogprob | None]] = deque()

    def push(self, piece: TextPiece) -> list[Part]:
        """The parts that are certain with this piece. Its log-probabilities become those of tokens after reasoning."""
        reasoning, content = "", piece.text
        if self._splitter is not None:
            reasoning, content = self._splitter.push(content)
            if piece.finish_reason is not None:
                rest = self._splitter.flush()
                reasoning, content = reasoning + rest[0], content + rest[1]
            self._assign_tokens(self._splitter, piece)
        parts: list[Part] = [Reasoning(reasoning)] if reasoning and self._shows_reasoning else []
        return parts + self._after_reasoning(content, is_last=piece.finish_reason is not None)

    def _after_reasoning(self, content: str, *, is_last: bool) -> list[AfterReasoning]:
        if self._parser is None:
            return [Content(content)] if content else []
        parts = self._parser.push(content) if content else []
        if is_last:
            parts = parts + self._parser.flush()
        self.has_calls = self.has_calls or any(isinstance(part, ToolCallStart) for part in parts)
        return parts

    def _assign_tokens(self, splitter: ReasoningSplitter, piece: TextPiece) -> None:
        """Count the tokens of reasoning; of the others but the markers, keep the log-probabilities."""
        entries: list[TokenLogprob | None] = [*piece.logprobs] or [None] * len(piece.offsets)
        for index, (offset, entry) in enumerate(zip(piece.offsets, entries, strict=True)):
            self._undecided.append((offset, index in piece.silent, entry))
        piece.logprobs = []
        while self._undecided:
            offset, is_silent, entry = self._undecided[0]
            if (stage := splitter.stage_at(offset, is_silent=is_silent)) is None:
                break
            self._undecided.popleft()
            if stage is Stage.REASONING:
                self.num_reasoning_tokens += 1
            elif stage is Stage.CONTENT and entry is not None:
                piece.logprobs.append(entry)
