"""One choice's text, from token outputs to what the client gets: detokenises and looks for stop strings. Pure."""

from dataclasses import dataclass, field

from kvrelay.plane.messages import TokenLogprob, TokenOutput
from kvrelay.serve.text.stop import StopMatcher
from kvrelay.serve.text.tokenizer import TextCodec


@dataclass(frozen=True, slots=True)
class TextOptions:
    """The request's options for its output text."""

    stops: tuple[str, ...] = ()
    include_stop: bool = False
    skip_special_tokens: bool = True
    starts_text: bool = False  # the output is a new text, not the prompt's continuation
    min_tokens: int = 0  # stop strings are ignored before that many tokens


@dataclass(slots=True)
class TextPiece:
    """The text of one or several tokens. `offsets` are characters of the choice's text before each token."""

    text: str
    num_tokens: int
    finish_reason: str | None = None
    logprobs: list[TokenLogprob] = field(default_factory=list)
    offsets: list[int] = field(default_factory=list)
    first: TokenOutput | None = None  # the output with the sequence's first token


class ChoiceText:
    """Takes outputs in order; a piece with a finish reason is the last."""

    def __init__(self, codec: TextCodec, options: TextOptions, *, start: int = 0) -> None:
        """start: characters before the first token (an echoed prompt)."""
        self.num_tokens = 0
        self._detokenizer = codec.detokenizer(
            skip_special_tokens=options.skip_special_tokens, starts_text=options.starts_text
        )
        self._options = options
        self._matcher = StopMatcher(options.stops, include=options.include_stop) if options.stops else None
        self._num_chars = start

    def add(self, output: TokenOutput) -> TextPiece:
        """The text that is complete with `output`, and the finish reason if it has ended."""
        piece = TextPiece("", 0, output.finish_reason, first=output if self.num_tokens == 0 else None)
        texts: list[str] = []
        last = len(output.token_ids) - 1
        for index, token_id in enumerate(output.token_ids):
            ends = index == last and output.finish_reason is not None
            is_stop_token = ends and output.stop_token == token_id
            piece.offsets.append(self._num_chars)
            fragment = "" if is_stop_token and not self._options.include_stop else self._detokenizer.push(token_id)
            piece.num_tokens += 1
            self.num_tokens += 1
            texts.append(self._after_stops(fragment))
            if self._matcher is not None and self._matcher.stopped is not None:
                piece.finish_reason = "stop"
                break
        if piece.finish_reason is not None:
            texts.append(self._rest())
        piece.text = "".join(texts)
        piece.logprobs = output.logprobs[: piece.num_tokens]
        return piece

    def _after_stops(self, fragment: str) -> str:
        self._num_chars += len(fragment)
        if self._matcher is None or self.num_tokens <= self._options.min_tokens:
            return fragment
        return self._matcher.push(fragment)

    def _rest(self) -> str:
        """The text that was held back, at the end."""
        left = self._detokenizer.flush()
        if self._matcher is None:
            return left
        return self._matcher.push(left) + self._matcher.flush()
