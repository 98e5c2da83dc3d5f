"""POST /v1/completions: text or token prompts, one or many, echoed or not, streamed or whole."""

import asyncio
import contextlib
from collections.abc import AsyncGenerator, Sequence

from msgspec import UNSET
from starlette.requests import Request
from starlette.responses import Response

from kvrelay.errors import InvalidRequest
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
from kvrelay.serve.api.logprobs import completion_logprobs, echo_logprobs, joined
from kvrelay.serve.api.parameters import (
    beams_of,
    check_count,
    kv_hints,
    make_sampling,
    num_computed,
    num_sampled,
    output_limit,
    prompts_of,
    queue_rank,
    ranked,
    slo_of,
)
from kvrelay.serve.api.replies import Completion, CompletionChoice, CompletionLogprobs
from kvrelay.serve.api.schemas import CompletionBody
from kvrelay.serve.requests.generation import Generation, GenerationJob, Prompt
from kvrelay.serve.telemetry.observer import RequestArrival
from kvrelay.serve.text.tokenizer import TextOptions, TextPiece, encode_text


async def completions(front: Front, request: Request) -> Response:
    """Raises RequestError, WorkerError, ClientLeft."""
    arrived_s = front.dispatcher.clock()
    explain = wants_explain(request, front.dispatcher.clock)
    body = await front.read(request, CompletionBody)
    given = prompts_of(body, front.codec.vocab_size)
    check_count(len(given), body, front.settings.router.max_inflight)
    job = GenerationJob(
        request_id=new_id("cmpl-"),
        prompts=[await completion_prompt(front, body, item) for item in given],
        num_samples=num_sampled(body),
        beams=beams_of(body),
        options=TextOptions(
            stops=tuple(body.stop or ()),
            include_stop=bool(body.include_stop_str_in_output),
            skip_special_tokens=body.skip_special_tokens is not False,
            min_tokens=body.min_tokens or 0,
        ),
        echo=bool(body.echo),
        salt=body.cache_salt or "",
        hints=await kv_hints(front.sessions, body),
        rank=queue_rank(body, front.settings.scheduler.tenant_by, bearer_token(request)),
        force=forced_path(request),
        explain=explain,
        traceparent=traceparent_of(request),
        arrival=RequestArrival(arrived_s, front.dispatcher.clock()),
        slo=slo_of(body.slo, front.settings.slo, len(given) * num_computed(body), own_priority=body.priority),
    )
    reply = _CompletionReply(front, body, Generation(front.dispatcher, front.codec, job))
    headers = request_id_header(request, job.request_id)
    if body.stream:
        return EventStream(reply.events(), headers)
    return json_response(await unless_client_leaves(request.receive, reply.whole()), 200, headers)


async def completion_prompt(front: Front, body: CompletionBody, given: str | list[int]) -> Prompt:
    if isinstance(given, str):
        token_ids = await encode_text(front.codec, given, add_special_tokens=body.add_special_tokens is not False)
        text = given
    else:
        token_ids = given
        text = await asyncio.to_thread(front.codec.decode, given) if body.echo else ""
    if not token_ids:
        raise InvalidRequest("prompt: must not be empty", "prompt")
    limit = output_limit(body, len(token_ids), front.max_model_len)
    return Prompt(token_ids, text, make_sampling(body, limit, front.codec.vocab_size), discards_output=limit == 0)


class _CompletionReply:
    """Turns a generation's pieces into one completion object or into chunks."""

    def __init__(self, front: Front, body: CompletionBody, generation: Generation) -> None:
        self._codec, self._generation = front.codec, generation
        self._model, self._id, self._created = front.model.name, generation.job.request_id, now_unix()
        self._num_top = body.logprobs
        self._num_kept = body.n or 1
        self._stream_usage = StreamUsage(body)

    def _with_echo(self, index: int, piece: TextPiece) -> str:
        """A piece's text; with `echo`, the first has the prompt before it."""
        job = self._generation.job
        if job.echo and piece.first is not None:
            return job.prompts[index // job.num_samples].text + piece.text
        return piece.text

    def _logprobs(self, index: int, piece: TextPiece) -> CompletionLogprobs | None:
        if self._num_top is None:
            return None
        own = completion_logprobs(self._codec, piece.logprobs, piece.offsets, self._num_top)
        job = self._generation.job
        if not job.echo or piece.first is None:
            return own
        prompt = job.prompts[index // job.num_samples]
        echoed = echo_logprobs(self._codec, prompt.token_ids, piece.first.prompt_logprobs, self._num_top)
        return joined([echoed, own])

    def _reply(self, choices: list[CompletionChoice]) -> Completion:
        return Completion(id=self._id, created=self._created, model=self._model, choices=choices)

    async def whole(self) -> Completion:
        """The complete response."""
        count = self._generation.job.num_choices
        texts: list[list[str]] = [[] for _ in range(count)]
        logprobs: list[list[CompletionLogprobs]] = [[] for _ in range(count)]
        reasons = ["stop"] * count
        scores = [0.0] * count

        def take(index: int, piece: TextPiece) -> None:
            texts[index].append(self._with_echo(index, piece))
            part = self._logprobs(index, piece)
            logprobs[index] += [] if part is None else [part]
            reasons[index] = piece.finish_reason or reasons[index]
            scores[index] += sum(entry.logprob for entry in piece.logprobs)

        await collect(self._generation, take)
        kept: Sequence[int] = range(count)
        if (samples := self._generation.job.num_samples) > self._num_kept:
            kept = ranked(scores, samples, self._num_kept)
        reply = self._reply(
            [
                CompletionChoice(
                    index=place,
                    text="".join(texts[index]),
                    logprobs=None if self._num_top is None else joined(logprobs[index]),
                    finish_reason=reasons[index],
                )
                for place, index in enumerate(kept)
            ]
        )
        reply.usage = usage_of(self._generation)
        if (report := self._generation.job.report()) is not None:
            reply.kvrelay = report
        return reply

    def _event(self, index: int, piece: TextPiece) -> bytes:
        choice = CompletionChoice(
            index=index,
            text=self._with_echo(index, piece),
            logprobs=self._logprobs(index, piece),
            finish_reason=piece.finish_reason,
        )
        reply = self._reply([choice])
        if self._stream_usage.always:
            reply.usage = usage_of(self._generation)
        return encode_event(reply)

    async def events(self) -> AsyncGenerator[bytes, None]:
        """Server-sent events; what is ready together leaves in one piece."""
        echo, wants_logprobs = self._generation.job.echo, self._num_top is not None
        async with contextlib.aclosing(self._generation.pieces()) as batches:
            async for batch in batches:
                events = [
                    self._event(index, piece)
                    for index, piece in batch
                    if piece.text or piece.finish_reason or wants_logprobs or (echo and piece.first is not None)
                ]
                if events:
                    yield b"".join(events)
        yield self._last_events()

    def _last_events(self) -> bytes:
        last = self._reply([])
        last.usage = usage_of(self._generation) if self._stream_usage.at_end else UNSET
        report = self._generation.job.report()
        if report is not None:
            last.kvrelay = report
        is_wanted = self._stream_usage.at_end or report is not None
        return (encode_event(last) if is_wanted else b"") + DONE_EVENT
