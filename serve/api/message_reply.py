"""Chat replies whose choices hold more than content: reasoning and tool calls, whole or as deltas."""

from collections.abc import Sequence

from msgspec import UNSET

from kvrelay.serve.api import replies
from kvrelay.serve.api.answers import ChatReply, finish_reason_of
from kvrelay.serve.api.endpoint import Front
from kvrelay.serve.api.schemas import ChatBody
from kvrelay.serve.chat.output import ChoiceOutput, Content, OutputFormat, Part, Reasoning, ToolArguments, ToolCallStart
from kvrelay.serve.requests.generation import Generation
from kvrelay.serve.text.tokenizer import TextPiece


class MessageReply(ChatReply):
    """Each choice's pieces pass through its ChoiceOutput; every part that comes out is a chunk of a stream."""

    def __init__(self, front: Front, body: ChatBody, generation: Generation, form: OutputFormat) -> None:
        super().__init__(front, body, generation)
        self._outputs = [ChoiceOutput(form) for _ in range(generation.job.num_choices)]
        self._call_reason, self._has_functions = form.call_reason, bool(body.functions)
        self._has_reasoning, self._stats = form.splitter is not None, front.dispatcher.stats

    def usage(self) -> replies.Usage:
        usage = super().usage()
        if self._has_reasoning:
            count = sum(output.num_reasoning_tokens for output in self._outputs)
            usage.completion_tokens_details = replies.CompletionDetails(reasoning_tokens=count)
        return usage

    def choice(self, place: int, index: int, pieces: Sequence[TextPiece]) -> replies.ChatChoice:
        output = self._outputs[index]
        parts = [part for piece in pieces for part in self._parts(index, piece)]
        choice = super().choice(place, index, pieces)
        choice.message = _message(parts, is_answer=not output.num_reasoning_tokens)
        choice.finish_reason = self._finish_reason(index, finish_reason_of(pieces))
        if self._has_functions:
            _as_function_call(choice.message)
        return choice

    def chunks(self, index: int, piece: TextPiece) -> Sequence[replies.ChunkChoice]:
        deltas = [replies.Delta(role="assistant", content="")] if piece.first is not None else []
        deltas += [_delta(part) for part in self._parts(index, piece)]
        if not deltas and (piece.finish_reason is not None or piece.logprobs or self._body.return_token_ids):
            deltas = [replies.Delta()]
        if self._has_functions:
            for delta in deltas:
                _as_function_call(delta)
        choices = [replies.ChunkChoice(index=index, delta=delta) for delta in deltas]
        if choices:
            last = choices[-1]
            if piece.finish_reason is not None:
                last.finish_reason = self._finish_reason(index, piece.finish_reason)
            last.token_ids = self._token_ids((piece,))
            if self._wants_logprobs and piece.logprobs:
                last.logprobs = replies.chat_logprobs(self._codec, piece.logprobs, self._num_top)
        return choices

    def _parts(self, index: int, piece: TextPiece) -> list[Part]:
        output = self._outputs[index]
        num_counted = output.num_reasoning_tokens
        parts = output.push(piece)
        self._stats.reasoning_tokens += output.num_reasoning_tokens - num_counted
        return parts

    def _finish_reason(self, index: int, reason: str) -> str:
        return self._call_reason if reason == "stop" and self._outputs[index].has_calls else reason


def _delta(part: Part) -> replies.Delta:
    if isinstance(part, Content):
        return replies.Delta(content=part.text)
    if isinstance(part, Reasoning):
        return replies.Delta(reasoning_content=part.text, reasoning=part.text)
    if isinstance(part, ToolCallStart):
        called = _called(part, "")
        called.index = part.index
        return replies.Delta(tool_calls=[called])
    function = replies.FunctionReply(arguments=part.text)
    return replies.Delta(tool_calls=[replies.ToolCallReply(index=part.index, function=function)])


def _message(parts: list[Part], *, is_answer: bool) -> replies.ChatMessage:
    """The whole message. Its content is null when it has none but calls, or but reasoning (not `is_answer`)."""
    content = "".join(part.text for part in parts if isinstance(part, Content))
    reasoning = "".join(part.text for part in parts if isinstance(part, Reasoning))
    starts = [part for part in parts if isinstance(part, ToolCallStart)]
    arguments: dict[int, list[str]] = {start.index: [] for start in starts}
    for part in parts:
        if isinstance(part, ToolArguments):
            arguments[part.index].append(part.text)
    message = replies.ChatMessage(content=content or ("" if is_answer and not starts else None))
    if reasoning:
        message.reasoning_content = message.reasoning = reasoning
    if starts:
        message.tool_calls = [_called(start, "".join(arguments[start.index])) for start in starts]
    return message


def _as_function_call(message: replies.ChatMessage | replies.Delta) -> None:
    """The call in the form of before there were tools."""
    if message.tool_calls is not UNSET:
        message.function_call, message.tool_calls = message.tool_calls[0].function, UNSET


def _called(start: ToolCallStart, arguments: str) -> replies.ToolCallReply:
    function = replies.FunctionReply(name=start.name, arguments=arguments)
    return replies.ToolCallReply(id=start.id, type="function", function=function)
