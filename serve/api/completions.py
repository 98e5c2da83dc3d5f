"""POST /v1/completions and /v1/chat/completions: from a body to OpenAI's objects, streamed or whole."""

from starlette.requests import Request
from starlette.responses import Response

from kvrelay.serve.api import parameters
from kvrelay.serve.api.answers import ChatReply, CompletionReply
from kvrelay.serve.api.constraints import CONSTRAINTS, constrained
from kvrelay.serve.api.endpoint import (
    EventStream,
    Front,
    bearer_token,
    caller_of,
    forced_path,
    json_response,
    new_id,
    request_id_header,
    traceparent_of,
    unless_client_leaves,
)
from kvrelay.serve.api.message_reply import MessageReply
from kvrelay.serve.api.prompts import chat_prompt, completion_prompt, prompts_of
from kvrelay.serve.api.reasoning import REASONING_FIELDS, with_reasoning
from kvrelay.serve.api.schemas import ChatBody, Common, CompletionBody
from kvrelay.serve.api.tools import asks_for_tools, with_tools
from kvrelay.serve.bodies.unknown_fields import ignored_header
from kvrelay.serve.requests.generation import Generation, GenerationJob, Prompt
from kvrelay.serve.telemetry.explain import Explain
from kvrelay.serve.text.tokenizer import TextOptions


async def completions(front: Front, request: Request) -> Response:
    """Text or token prompts, one or many, echoed or not. Raises RequestError, WorkerError, ClientLeft."""
    arrived_s = front.dispatcher.clock()
    body = await front.read(request, CompletionBody)
    given = prompts_of(body, front.codec.vocab_size)
    parameters.check_count(len(given), body, front.settings.router.max_inflight)
    prompts = [await completion_prompt(front, body, item) for item in given]
    if body.model_fields_set & CONSTRAINTS:
        prompts = await constrained(front, body, prompts)
    generation = await _generation(front, request, body, prompts, arrived_s)
    return await _respond(request, body, CompletionReply(front, body, generation))


async def chat_completions(front: Front, request: Request) -> Response:
    """Raises RequestError, WorkerError, ClientLeft."""
    arrived_s = front.dispatcher.clock()
    body = await front.read(request, ChatBody)
    parameters.check_count(1, body, front.settings.router.max_inflight)
    prompt = await chat_prompt(front, body)
    if body.model_fields_set & CONSTRAINTS:
        (prompt,) = await constrained(front, body, [prompt])
    if (body.tools or body.functions) and asks_for_tools(body):
        prompt = await with_tools(front, body, prompt)
    if front.reasoning is not None or body.model_fields_set & REASONING_FIELDS:
        prompt = with_reasoning(front, body, prompt)
    generation = await _generation(front, request, body, [prompt], arrived_s)
    if prompt.output is None:
        reply = ChatReply(front, body, generation)
    else:
        reply = MessageReply(front, body, generation, prompt.output)
    return await _respond(request, body, reply)


async def _generation(
    front: Front, request: Request, body: CompletionBody | ChatBody, prompts: list[Prompt], arrived_s: float
) -> Generation:
    is_chat, caller = isinstance(body, ChatBody), caller_of(request)
    salt = caller.salt(body.cache_salt)
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
            kept_ids=next((prompt.output.kept_ids for prompt in prompts if prompt.output is not None), frozenset()),
        ),
        echo=isinstance(body, CompletionBody) and bool(body.echo),
        salt=salt,
        hints=await parameters.kv_hints(front.sessions, body, salt, caller.limits.pin_share),
        priority=body.priority or 0,
        deadline_s=body.deadline_s,
        tenant=parameters.tenant(body, front.settings.scheduler.tenant_by, bearer_token(request), caller.name),
        meter=front.access.meter(caller),
        force=forced_path(request),
        explain=Explain(received_s=arrived_s) if request.headers.get("x-kvrelay-explain") == "1" else None,
        traceparent=traceparent_of(request),
        arrival=(arrived_s, front.dispatcher.clock()),
        slo=parameters.slo_of(
            body.slo, front.slo, len(prompts) * parameters.num_computed(body), own_priority=body.priority
        ),
    )
    return Generation(front.dispatcher, front.codec, job)


async def _respond(request: Request, body: Common, reply: ChatReply | CompletionReply) -> Response:
    headers = request_id_header(request, reply.request_id)
    if body.ignored_fields:
        headers |= ignored_header(body.ignored_fields)
    if body.stream:
        return EventStream(reply.events(), headers)
    return json_response(await unless_client_leaves(request.receive, reply.whole()), 200, headers)
