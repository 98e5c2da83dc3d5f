"""A generation's pieces of text as OpenAI's objects: whole, or streamed as chunks."""

import contextlib
import time
from collections.abc import AsyncGenerator, Sequence
from typing import Any

from msgspec import UNSET, UnsetType

from kvrelay.serve.api import parameters, replies
from kvrelay.serve.api.endpoint import DONE_EVENT, Front, encode_event
from kvrelay.serve.api.schemas import ChatBody, CompletionBody
from kvrelay.serve.requests.generation import Generation, Prompt
from kvrelay.serve.text.tokenizer import TextPiece


class Reply:
    """Turns a generation's pieces into one object, or into chunks. The kinds differ in what a choice looks like."""

    kind = chunk_kind = ""  # the field `object`

    def __init__(self, front: Front, body: CompletionBody | ChatBody, generation: Generation) -> None:
        self._codec, self._generation, self._job = front.codec, generation, generation.job
        self.request_id, self._model, self._created = self._job.request_id, front.model.name, int(time.time())
        options = body.stream_options
        self._has_usage = bool(options and options.include_usage)  # of a stream, at its end
        self._has_usage_always = bool(self._has_usage and options and options.continuous_usage_stats)
        self._usage_between: UnsetType | None = UNSET  # in the chunks before
        self._wants_logprobs = self._shows_first = False
        self._body = body

    def choice(self, place: int, index: int, pieces: Sequence[TextPiece]) -> object:
        """Choice `index`, whole, returned in this place."""
        raise NotImplementedError

    def chunk_choice(self, index: int, piece: TextPiece) -> object:
        """A part of a choice."""
        raise NotImplementedError

    def kept(self, pieces: list[list[TextPiece]]) -> Sequence[int]:
        """The choices that are returned, in their order."""
        return range(len(pieces))

    def usage(self) -> replies.Usage:
        """Tokens so far."""
        prompt_tokens, output_tokens = self._generation.num_prompt_tokens, self._generation.num_output_tokens
        return replies.Usage(
            prompt_tokens=prompt_tokens,
            completion_tokens=output_tokens,
            total_tokens=prompt_tokens + output_tokens,
            prompt_tokens_details=replies.PromptDetails(cached_tokens=self._generation.num_cached_tokens),
        )

    def _token_ids(self, pieces: Sequence[TextPiece]) -> list[int] | UnsetType:
        return [token_id for piece in pieces for token_id in piece.token_ids] if self._body.return_token_ids else UNSET

    def _of_prompt(
        self, prompt: Prompt, pieces: Sequence[TextPiece]
    ) -> tuple[list[int] | UnsetType, replies.PromptLogprobs | UnsetType]:
        """The prompt's token ids and log-probabilities, where they were asked for and a choice begins with `pieces`."""
        if not pieces or (first := pieces[0].first) is None:
            return UNSET, UNSET
        num_top = self._body.prompt_logprobs
        return (
            prompt.token_ids if self._body.return_token_ids else UNSET,
            UNSET if num_top is None else replies.prompt_logprobs(self._codec, first.prompt_logprobs, num_top),
        )

    def _answer(self, kind: str, choices: list[Any], usage: replies.Usage | UnsetType | None) -> replies.Answer:
        return replies.Answer(
            id=self.request_id, object=kind, created=self._created, model=self._model, choices=choices, usage=usage
        )

    async def whole(self) -> replies.Answer:
        """The complete response."""
        pieces: list[list[TextPiece]] = [[] for _ in range(self._job.num_choices)]
        async with contextlib.aclosing(self._generation.pieces()) as batches:
            async for batch in batches:
                for index, piece in batch:
                    pieces[index].append(piece)
        choices = [self.choice(place, index, pieces[index]) for place, index in enumerate(self.kept(pieces))]
        answer = self._answer(self.kind, choices, self.usage())
        self.add_prompt(answer, pieces[0])
        answer.kvrelay = self._job.report() or UNSET
        return answer

    async def events(self) -> AsyncGenerator[bytes, None]:
        """Server-sent events; what is ready together leaves in one piece."""
        async with contextlib.aclosing(self._generation.pieces()) as batches:
            async for batch in batches:
                events = [event for index, piece in batch for event in self._events_of(index, piece)]
                if events:
                    yield b"".join(events)
        last = self._answer(self.chunk_kind, [], self.usage() if self._has_usage else UNSET)
        last.kvrelay = self._job.report() or UNSET
        is_wanted = self._has_usage or last.kvrelay is not UNSET
        yield (encode_event(last) if is_wanted else b"") + DONE_EVENT

    def chunks(self, index: int, piece: TextPiece) -> Sequence[object]:
        """The choices of the chunks for a piece."""
        is_first = self._shows_first and piece.first is not None
        is_shown = piece.text or piece.finish_reason or self._wants_logprobs or is_first or self._body.return_token_ids
        return (self.chunk_choice(index, piece),) if is_shown else ()

    def _events_of(self, index: int, piece: TextPiece) -> list[bytes]:
        chunks = self.chunks(index, piece)
        usage = self.usage() if self._has_usage_always else self._usage_between
        answers = [self._answer(self.chunk_kind, [choice], usage) for choice in chunks]
        if answers:
            self.add_prompt(answers[0], (piece,))
        return [encode_event(answer) for answer in answers]

    def add_prompt(self, answer: replies.Answer, pieces: Sequence[TextPiece]) -> None:
        """Add what was asked for of the prompt, where it stands beside the choices."""


def finish_reason_of(pieces: Sequence[TextPiece]) -> str:
    """Of a whole choice."""
    return next((piece.finish_reason for piece in reversed(pieces) if piece.finish_reason), "stop")


class ChatReply(Reply):
    kind, chunk_kind = "chat.completion", "chat.completion.chunk"

    def __init__(self, front: Front, body: ChatBody, generation: Generation) -> None:
        super().__init__(front, body, generation)
        self._wants_logprobs, self._num_top = bool(body.logprobs), body.top_logprobs or 0
        self._shows_first = True
        if self._has_usage:  # as in OpenAI's API: null in every chunk but the last if usage was requested, else absent
            self._usage_between = None

    def choice(self, place: int, index: int, pieces: Sequence[TextPiece]) -> replies.ChatChoice:
        entries = [entry for piece in pieces for entry in piece.logprobs]
        return replies.ChatChoice(
            index=place,
            message=replies.ChatMessage(content="".join(piece.text for piece in pieces)),
            logprobs=replies.chat_logprobs(self._codec, entries, self._num_top) if self._wants_logprobs else None,
            finish_reason=finish_reason_of(pieces),
            token_ids=self._token_ids(pieces),
        )

    def add_prompt(self, answer: replies.Answer, pieces: Sequence[TextPiece]) -> None:
        answer.prompt_token_ids, answer.prompt_logprobs = self._of_prompt(self._job.prompts[0], pieces)

    def chunk_choice(self, index: int, piece: TextPiece) -> replies.ChunkChoice:
        is_first = piece.first is not None
        delta = replies.Delta(
            role="assistant" if is_first else UNSET, content=piece.text if piece.text or is_first else UNSET
        )
        logprobs = replies.chat_logprobs(self._codec, piece.logprobs, self._num_top) if self._wants_logprobs else None
        return replies.ChunkChoice(
            index=index,
            delta=delta,
            logprobs=logprobs,
            finish_reason=piece.finish_reason,
            token_ids=self._token_ids((piece,)),
        )


class CompletionReply(Reply):
    kind = chunk_kind = "text_completion"

    def __init__(self, front: Front, body: CompletionBody, generation: Generation) -> None:
        super().__init__(front, body, generation)
        self._num_top, self._wants_logprobs = body.logprobs or 0, body.logprobs is not None
        self._num_kept, self._shows_first = body.n or 1, self._job.echo

    def kept(self, pieces: list[list[TextPiece]]) -> Sequence[int]:
        if (samples := self._job.num_samples) <= self._num_kept:
            return range(len(pieces))
        scores = [sum(entry.logprob for piece in choice for entry in piece.logprobs) for choice in pieces]
        return parameters.ranked(scores, samples, self._num_kept)

    def choice(self, place: int, index: int, pieces: Sequence[TextPiece]) -> replies.CompletionChoice:
        prompt = self._job.prompts[index // self._job.num_samples]
        token_ids, logprobs = self._of_prompt(prompt, pieces)
        return replies.CompletionChoice(
            index=place,
            text="".join(self._with_echo(prompt, piece) for piece in pieces),
            logprobs=replies.joined([self._logprobs(prompt, piece) for piece in pieces])
            if self._wants_logprobs
            else None,
            finish_reason=finish_reason_of(pieces),
            token_ids=self._token_ids(pieces),
            prompt_token_ids=token_ids,
            prompt_logprobs=logprobs,
        )

    def chunk_choice(self, index: int, piece: TextPiece) -> replies.CompletionChoice:
        choice = self.choice(index, index, (piece,))
        choice.finish_reason = piece.finish_reason
        return choice

    def _with_echo(self, prompt: Prompt, piece: TextPiece) -> str:
        """A piece's text; with `echo`, the first has the prompt before it."""
        return prompt.text + piece.text if self._job.echo and piece.first is not None else piece.text

    def _logprobs(self, prompt: Prompt, piece: TextPiece) -> replies.CompletionLogprobs:
        own = replies.completion_logprobs(self._codec, piece.logprobs, piece.offsets, self._num_top)
        if not self._job.echo or piece.first is None:
            return own
        return replies.joined(
            [replies.echo_logprobs(self._codec, prompt.token_ids, piece.first.prompt_logprobs, self._num_top), own]
        )
