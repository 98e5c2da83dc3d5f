"""POST /v1/chat/completions: from messages to chat objects, streamed or whole."""

import contextlib
from collections.abc import AsyncGenerator

from msgspec import UNSET, UnsetType
from starlette.requests import Request
from starlette.responses import Response

from kvrelay.errors import InvalidRequest
from kvrelay.plane.messages import TokenLogprob
from kvrelay.serve.api.endpoint import (
    Front,
    StreamUsage,
    collect,
    forced_path,
    new_id,
    now_unix,
    request_id_header,
    traceparent_of,
    usage_of,
    wants_explain,
)
from kvrelay.serve.api.http import (
    DONE_EVENT,
    EventStream,
    bearer_token,
    encode_event,
    json_response,
    unless_client_leaves,
)
from kvrelay.serve.api.logprobs import chat_logprobs
from kvrelay.serve.api.parameters import (
    beams_of,
    check_count,
    kv_hints,
    make_sampling,
    num_computed,
    num_sampled,
    output_limit,
    queue_rank,
    slo_of,
    template_messages,
)
from kvrelay.serve.api.replies import Chat, ChatChoice, ChatLogprobs, ChatMessage, Chunk, ChunkChoice, Delta, Usage
from kvrelay.serve.api.schemas import ChatBody
from kvrelay.serve.requests.generation import Generation, GenerationJob, Prompt
from kvrelay.serve.telemetry.observer import RequestArrival
from kvrelay.serve.text.tokenizer import TextOptions, TextPiece, encode_text


async def chat_completions(front: Front, request: Request) -> Response:
    """Raises RequestError, WorkerError, ClientLeft."""
    arrived_s = front.dispatcher.clock()
    explain = wants_explain(request, front.dispatcher.clock)
    body = await front.read(request, ChatBody)
    check_count(1, body, front.settings.router.max_inflight)
    prompt = await chat_prompt(front, body)
    job = GenerationJob(
        request_id=new_id("chatcmpl-"),
        prompts=[prompt],
        num_samples=num_sampled(body),
        beams=beams_of(body),
        options=text_options(body),
        salt=body.cache_salt or "",
        hints=await kv_hints(front.sessions, body),
        rank=queue_rank(body, front.settings.scheduler.tenant_by, bearer_token(request)),
        force=forced_path(request),
        explain=explain,
        traceparent=traceparent_of(request),
        arrival=RequestArrival(arrived_s, front.dispatcher.clock()),
        slo=slo_of(body.slo, front.settings.slo, num_computed(body), own_priority=body.priority),
    )
    generation = Generation(front.dispatcher, front.codec, job)
    reply = _ChatReply(front, body, generation)
    headers = request_id_header(request, job.request_id)
    if body.stream:
        return EventStream(reply.events(), headers)
    return json_response(await unless_client_leaves(request.receive, reply.whole()), 200, headers)


def text_options(body: ChatBody) -> TextOptions:
    return TextOptions(
        stops=tuple(body.stop or ()),
        include_stop=bool(body.include_stop_str_in_output),
        skip_special_tokens=body.skip_special_tokens is not False,
        starts_text=not body.continue_final_message,
        min_tokens=body.min_tokens or 0,
    )


async def chat_prompt(front: Front, body: ChatBody) -> Prompt:
    text = _template_text(front, body)
    token_ids = await encode_text(front.codec, text, add_special_tokens=bool(body.add_special_tokens))
    if not token_ids:
        raise InvalidRequest("messages: the prompt is empty", "messages")
    limit = output_limit(body, len(token_ids), front.max_model_len)
    return Prompt(token_ids, text, make_sampling(body, limit, front.codec.vocab_size))


def _template_text(front: Front, body: ChatBody) -> str:
    """The prompt's text; with `continue_final_message` it ends inside the last message."""
    messages = template_messages(body.messages)
    variables = {key: value for key, value in (body.chat_template_kwargs or {}).items() if key not in _RESERVED}
    if not body.continue_final_message:
        return front.codec.chat_text(
            messages, add_generation_prompt=body.add_generation_prompt is not False, **variables
        )
    final = str(messages[-1]["content"]).strip()
    text = front.codec.chat_text(messages, add_generation_prompt=False, **variables)
    if not final or final not in text:
        raise InvalidRequest("continue_final_message: the template does not keep the last message", "messages")
    return text[: text.rindex(final) + len(final)]


_RESERVED = frozenset({"messages", "add_generation_prompt", "self"})


class _ChatReply:
    """Turns a generation's pieces into one chat object or into chunks."""

    def __init__(self, front: Front, body: ChatBody, generation: Generation) -> None:
        self._codec, self._generation = front.codec, generation
        self._model, self._id, self._created = front.model.name, generation.job.request_id, now_unix()
        self._wants_logprobs, self._num_top = bool(body.logprobs), body.top_logprobs or 0
        self._stream_usage = StreamUsage(body)

    def _logprobs(self, entries: list[TokenLogprob]) -> ChatLogprobs | None:
        return chat_logprobs(self._codec, entries, self._num_top) if self._wants_logprobs else None

    async def whole(self) -> Chat:
        """The complete response."""
        count = self._generation.job.num_choices
        texts: list[list[str]] = [[] for _ in range(count)]
        entries: list[list[TokenLogprob]] = [[] for _ in range(count)]
        reasons = ["stop"] * count

        def take(index: int, piece: TextPiece) -> None:
            texts[index].append(piece.text)
            entries[index] += piece.logprobs
            reasons[index] = piece.finish_reason or reasons[index]

        await collect(self._generation, take)
        choices = [
            ChatChoice(
                index=index,
                message=ChatMessage(content="".join(texts[index])),
                logprobs=self._logprobs(entries[index]),
                finish_reason=reasons[index],
            )
            for index in range(count)
        ]
        return Chat(
            id=self._id,
            created=self._created,
            model=self._model,
            choices=choices,
            usage=usage_of(self._generation),
            kvrelay=self._generation.job.report() or UNSET,
        )

    def _chunk(self, choices: list[ChunkChoice], usage: Usage | UnsetType | None) -> Chunk:
        return Chunk(id=self._id, created=self._created, model=self._model, choices=choices, usage=usage)

    def _usage_now(self) -> Usage | UnsetType | None:
        """As in OpenAI's API: null in every chunk but the last if usage was requested, else absent."""
        if self._stream_usage.always:
            return usage_of(self._generation)
        return None if self._stream_usage.at_end else UNSET

    def _event(self, index: int, piece: TextPiece, *, is_first: bool) -> bytes:
        choice = ChunkChoice(
            index=index,
            delta=Delta(
                role="assistant" if is_first else UNSET, content=piece.text if piece.text or is_first else UNSET
            ),
            logprobs=self._logprobs(piece.logprobs),
            finish_reason=piece.finish_reason,
        )
        return encode_event(self._chunk([choice], self._usage_now()))

    async def events(self) -> AsyncGenerator[bytes, None]:
        """Server-sent events; what is ready together leaves in one piece."""
        started: set[int] = set()
        async with contextlib.aclosing(self._generation.pieces()) as batches:
            async for batch in batches:
                events = []
                for index, piece in batch:
                    if piece.text or piece.finish_reason or index not in started or self._wants_logprobs:
                        events.append(self._event(index, piece, is_first=index not in started))
                        started.add(index)
                if events:
                    yield b"".join(events)
        yield self._last_events()

    def _last_events(self) -> bytes:
        last = self._chunk([], usage_of(self._generation) if self._stream_usage.at_end else UNSET)
        report = self._generation.job.report()
        if report is not None:
            last.kvrelay = report
        is_wanted = self._stream_usage.at_end or report is not None
        return (encode_event(last) if is_wanted else b"") + DONE_EVENT
