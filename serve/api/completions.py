"""POST /v1/completions and /v1/chat/completions: from a body to OpenAI's objects, streamed or whole."""

import contextlib
import time
from collections.abc import AsyncGenerator, Sequence
from typing import Any

from msgspec import UNSET, UnsetType
from starlette.requests import Request
from starlette.responses import Response

from kvrelay.serve.api import parameters, replies
from kvrelay.serve.api.endpoint import (
    DONE_EVENT,
    EventStream,
    Front,
    bearer_token,
    encode_event,
    forced_path,
    json_response,
    new_id,
    request_id_header,
    traceparent_of,
    unless_client_leaves,
)
from kvrelay.serve.api.prompts import chat_prompt, completion_prompt, prompts_of
from kvrelay.serve.api.schemas import ChatBody, CompletionBody
from kvrelay.serve.requests.generation import Generation, GenerationJob, Prompt
from kvrelay.serve.telemetry.explain import Explain
from kvrelay.serve.text.tokenizer import TextOptions, TextPiece


async def completions(front: Front, request: Request) -> Response:
    """Text or token prompts, one or many, echoed or not. Raises RequestError, WorkerError, ClientLeft."""
    arrived_s = front.dispatcher.clock()
    body = await front.read(request, CompletionBody)
    given = prompts_of(body, front.codec.vocab_size)
    parameters.check_count(len(given), body, front.settings.router.max_inflight)
    prompts = [await completion_prompt(front, body, item) for item in given]
    generation = await _generation(front, request, body, prompts, arrived_s)
    return await _respond(request, _CompletionReply(front, body, generation), is_stream=bool(body.stream))


async def chat_completions(front: Front, request: Request) -> Response:
    """Raises RequestError, WorkerError, ClientLeft."""
    arrived_s = front.dispatcher.clock()
    body = await front.read(request, ChatBody)
    parameters.check_count(1, body, front.settings.router.max_inflight)
    generation = await _generation(front, request, body, [await chat_prompt(front, body)], arrived_s)
    return await _respond(request, _ChatReply(front, body, generation), is_stream=bool(body.stream))


async def _generation(
    front: Front, request: Request, body: CompletionBody | ChatBody, prompts: list[Prompt], arrived_s: float
) -> Generation:
    is_chat = isinstance(body, ChatBody)
    job = GenerationJob(
        request_id=new_id("chatcmpl-" if is_chat else "cmpl-"),
        prompts=prompts,
        num_samples=parameters.num_sampled(body),
        beams=parameters.beams_of(body),
        options=TextOptions(
            stops=tuple(body.stop or ()),
            include_stop=bool(body.include_stop_str_in_output),
            skip_special_tokens=body.skip_special_tokens is not False,
            starts_text=isinstance(body, ChatBody) and not body.continue_final_message,
            min_tokens=body.min_tokens or 0,
        ),
        echo=isinstance(body, CompletionBody) and bool(body.echo),
        salt=body.cache_salt or "",
        hints=await parameters.kv_hints(front.sessions, body),
        priority=body.priority or 0,
        deadline_s=body.deadline_s,
        tenant=parameters.tenant(body, front.settings.scheduler.tenant_by, bearer_token(request)),
        force=forced_path(request),
        explain=Explain(received_s=arrived_s) if request.headers.get("x-kvrelay-explain") == "1" else None,
        traceparent=traceparent_of(request),
        arrival=(arrived_s, front.dispatcher.clock()),
        slo=parameters.slo_of(
            body.slo, front.slo, len(prompts) * parameters.num_computed(body), own_priority=body.priority
        ),
    )
    return Generation(front.dispatcher, front.codec, job)


async def _respond(request: Request, reply: "_ChatReply | _CompletionReply", *, is_stream: bool) -> Response:
    headers = request_id_header(request, reply.request_id)
    if is_stream:
        return EventStream(reply.events(), headers)
    return json_response(await unless_client_leaves(request.receive, reply.whole()), 200, headers)


# ---- replies


class _Reply:
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

    def choice(self, place: int, index: int, pieces: Sequence[TextPiece]) -> object:
        """Choice `index`, whole, returned in this place."""
        raise NotImplementedError

    def chunk_choice(self, index: int, piece: TextPiece) -> object:
        """A part of a choice."""
        raise NotImplementedError

    def kept(self, pieces: list[list[TextPiece]]) -> Sequence[int]:
        """The choices that are returned, in their order."""
        return range(len(pieces))

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
        answer = self._answer(self.kind, choices, usage_of(self._generation))
        answer.kvrelay = self._job.report() or UNSET
        return answer

    async def events(self) -> AsyncGenerator[bytes, None]:
        """Server-sent events; what is ready together leaves in one piece."""
        async with contextlib.aclosing(self._generation.pieces()) as batches:
            async for batch in batches:
                events = [self._event(index, piece) for index, piece in batch if self._is_shown(piece)]
                if events:
                    yield b"".join(events)
        last = self._answer(self.chunk_kind, [], usage_of(self._generation) if self._has_usage else UNSET)
        last.kvrelay = self._job.report() or UNSET
        is_wanted = self._has_usage or last.kvrelay is not UNSET
        yield (encode_event(last) if is_wanted else b"") + DONE_EVENT

    def _is_shown(self, piece: TextPiece) -> bool:
        is_first = self._shows_first and piece.first is not None
        return bool(piece.text or piece.finish_reason or self._wants_logprobs or is_first)

    def _event(self, index: int, piece: TextPiece) -> bytes:
        usage = usage_of(self._generation) if self._has_usage_always else self._usage_between
        return encode_event(self._answer(self.chunk_kind, [self.chunk_choice(index, piece)], usage))


def usage_of(generation: Generation) -> replies.Usage:
    """Tokens so far."""
    prompt_tokens, output_tokens = generation.num_prompt_tokens, generation.num_output_tokens
    return replies.Usage(
        prompt_tokens=prompt_tokens,
        completion_tokens=output_tokens,
        total_tokens=prompt_tokens + output_tokens,
        prompt_tokens_details=replies.PromptDetails(cached_tokens=generation.num_cached_tokens),
    )


def _finish_reason(pieces: Sequence[TextPiece]) -> str:
    return next((piece.finish_reason for piece in reversed(pieces) if piece.finish_reason), "stop")


class _ChatReply(_Reply):
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
            finish_reason=_finish_reason(pieces),
        )

    def chunk_choice(self, index: int, piece: TextPiece) -> replies.ChunkChoice:
        is_first = piece.first is not None
        delta = replies.Delta(
            role="assistant" if is_first else UNSET, content=piece.text if piece.text or is_first else UNSET
        )
        logprobs = replies.chat_logprobs(self._codec, piece.logprobs, self._num_top) if self._wants_logprobs else None
        return replies.ChunkChoice(index=index, delta=delta, logprobs=logprobs, finish_reason=piece.finish_reason)


class _CompletionReply(_Reply):
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
        return replies.CompletionChoice(
            index=place,
            text="".join(self._with_echo(prompt, piece) for piece in pieces),
            logprobs=replies.joined([self._logprobs(prompt, piece) for piece in pieces])
            if self._wants_logprobs
            else None,
            finish_reason=_finish_reason(pieces),
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
