"""One choice's text and log-probabilities, from token outputs to what the client is shown. Pure.

Detokenises, looks for stop strings, and forms OpenAI's two kinds of logprobs objects.
"""

from dataclasses import dataclass, field

from kvrelay.plane.messages import TokenLogprob, TokenOutput
from kvrelay.serve.api.replies import ChatLogprob, ChatLogprobs, CompletionLogprobs, TopLogprob
from kvrelay.serve.text.stop import StopMatcher
from kvrelay.serve.text.tokenizer import TextCodec


@dataclass(frozen=True, slots=True)
class TextOptions:
    """What of a request concerns the text."""

    stops: tuple[str, ...] = ()
    include_stop: bool = False
    skip_special_tokens: bool = True
    starts_text: bool = False  # the answer is a text of its own, not a prompt's continuation
    min_tokens: int = 0  # stop strings count only after so many tokens


@dataclass(slots=True)
class Piece:
    """What one or several tokens added. `offsets` are characters of the choice's text before each token."""

    text: str
    num_tokens: int
    finish_reason: str | None = None
    logprobs: list[TokenLogprob] = field(default_factory=list)
    offsets: list[int] = field(default_factory=list)
    first: TokenOutput | None = None  # the output with the sequence's first token


class ChoiceText:
    """Feed it outputs in order; after a piece with a finish reason there is nothing more."""

    def __init__(self, codec: TextCodec, options: TextOptions, *, start: int = 0) -> None:
        """`start`: characters that stand before the first token (an echoed prompt)."""
        self.num_tokens = 0
        self._detokenizer = codec.detokenizer(
            skip_special_tokens=options.skip_special_tokens, starts_text=options.starts_text
        )
        self._options = options
        self._matcher = StopMatcher(options.stops, include=options.include_stop) if options.stops else None
        self._num_chars = start

    def add(self, output: TokenOutput) -> Piece:
        """The text that `output` makes certain, with its finish reason if it has ended."""
        piece = Piece("", 0, output.finish_reason, first=output if self.num_tokens == 0 else None)
        texts: list[str] = []
        last = len(output.token_ids) - 1
        for index, token_id in enumerate(output.token_ids):
            ends = index == last and output.finish_reason is not None
            is_stop_token = ends and output.stop_token == token_id
            piece.offsets.append(self._num_chars)
            fragment = "" if is_stop_token and not self._options.include_stop else self._detokenizer.push(token_id)
            piece.num_tokens += 1
            self.num_tokens += 1
            texts.append(self._shown(fragment))
            if self._matcher is not None and self._matcher.stopped is not None:
                piece.finish_reason = "stop"
                break
        if piece.finish_reason is not None:
            texts.append(self._rest())
        piece.text = "".join(texts)
        piece.logprobs = output.logprobs[: piece.num_tokens]
        return piece

    def _shown(self, fragment: str) -> str:
        self._num_chars += len(fragment)
        if self._matcher is None or self.num_tokens <= self._options.min_tokens:
            return fragment
        return self._matcher.push(fragment)

    def _rest(self) -> str:
        """What was held back, now that nothing follows."""
        left = self._detokenizer.flush()
        if self._matcher is None:
            return left
        return self._matcher.push(left) + self._matcher.flush()


def token_text(codec: TextCodec, token_id: int) -> str:
    """A token as logprobs name it; a part of a character as `bytes:\\xe2\\x80`, so that names stay distinct."""
    data = codec.token_bytes(token_id)
    try:
        return data.decode()
    except UnicodeDecodeError:
        return "bytes:" + "".join(f"\\x{byte:02x}" for byte in data)


def chat_logprobs(codec: TextCodec, logprobs: list[TokenLogprob], num_top: int) -> ChatLogprobs:
    """Chat's form: one entry per token, each with its `num_top` alternatives."""
    return ChatLogprobs(content=[_chat_logprob(codec, entry, num_top) for entry in logprobs])


def _chat_logprob(codec: TextCodec, entry: TokenLogprob, num_top: int) -> ChatLogprob:
    return ChatLogprob(
        token=token_text(codec, entry.token_id),
        logprob=_finite(entry.logprob),
        bytes=list(codec.token_bytes(entry.token_id)),
        top_logprobs=[
            TopLogprob(token=token_text(codec, token), logprob=_finite(value), bytes=list(codec.token_bytes(token)))
            for token, value in entry.top[:num_top]
        ],
    )


def completion_logprobs(
    codec: TextCodec, logprobs: list[TokenLogprob], offsets: list[int], num_top: int
) -> CompletionLogprobs:
    """Completions' form. The sampled token is always among `top_logprobs`, as OpenAI has it."""
    answer = CompletionLogprobs(text_offset=list(offsets), token_logprobs=[], tokens=[], top_logprobs=[])
    for entry in logprobs:
        name, value = token_text(codec, entry.token_id), _finite(entry.logprob)
        top = {token_text(codec, token): _finite(alternative) for token, alternative in entry.top[:num_top]}
        answer.tokens.append(name)
        answer.token_logprobs.append(value)
        answer.top_logprobs.append(top | {name: value})
    return answer


def _finite(logprob: float) -> float:
    """JSON has no infinity; clients know -9999 as "impossible"."""
    return max(logprob, -9999.0)


def echo_logprobs(
    codec: TextCodec, prompt: list[int], logprobs: list[TokenLogprob], num_top: int
) -> CompletionLogprobs:
    """The prompt's own tokens: the first has no log-probability. `logprobs` is for prompt[1:]."""
    detokenizer, offsets, num_chars = codec.detokenizer(starts_text=True), [], 0
    for token_id in prompt:
        offsets.append(num_chars)
        num_chars += len(detokenizer.push(token_id))
    answer = completion_logprobs(codec, logprobs, offsets, num_top)
    answer.tokens.insert(0, token_text(codec, prompt[0]))
    answer.token_logprobs.insert(0, None)
    answer.top_logprobs.insert(0, None)
    if len(answer.tokens) != len(prompt):
        raise ValueError(f"{len(logprobs)} log-probabilities for a prompt of {len(prompt)} tokens")
    return answer


def joined(parts: list[CompletionLogprobs]) -> CompletionLogprobs:
    """Several stretches of one choice as one."""
    answer = CompletionLogprobs(text_offset=[], token_logprobs=[], tokens=[], top_logprobs=[])
    for part in parts:
        answer.text_offset += part.text_offset
        answer.token_logprobs += part.token_logprobs
        answer.tokens += part.tokens
        answer.top_logprobs += part.top_logprobs
    return answer
