"""POST /v1/completions and /v1/chat/completions: from a body to its prompts as tokens (text or ids, messages through a
chat template), and to OpenAI's objects, streamed or whole.
"""

import asyncio
import json
from functools import partial
from typing import Any

from starlette.requests import Request
from starlette.responses import Response

from kvrelay.errors import InvalidRequest
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
from kvrelay.serve.api.parameters import asked_tokens, check_token, make_sampling, output_limit
from kvrelay.serve.api.reasoning import REASONING_FIELDS, template_variables, with_reasoning
from kvrelay.serve.api.schemas import ChatBody, Common, CompletionBody
from kvrelay.serve.api.tools import asks_for_tools, with_shown_tools, with_tools
from kvrelay.serve.bodies.messages import Message, ToolCall
from kvrelay.serve.bodies.unknown_fields import ignored_header
from kvrelay.serve.requests.generation import Generation, GenerationJob, Prompt
from kvrelay.serve.telemetry.explain import Explain
from kvrelay.serve.text.tokenizer import TextOptions, encode_text

MAX_PROMPTS = 64  # of one completions request: as many sequences as a worker runs by default


# ---- endpoints


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
    tenant, weight = parameters.tenant_share(body, front.settings.scheduler, bearer_token(request), caller)
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
        tenant=tenant,
        weight=weight,
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


# ---- prompts of completions


def prompts_of(body: CompletionBody, vocab_size: int) -> list[str | list[int]]:
    """One or several prompts, each text or token ids. Raises InvalidRequest."""
    prompt = body.prompt
    if isinstance(prompt, str) or (isinstance(prompt, list) and prompt and all(type(item) is int for item in prompt)):
        prompt = [prompt]
    if not isinstance(prompt, list) or not prompt:
        raise InvalidRequest("prompt: must be a non-empty text, list of texts, or list(s) of token ids", "prompt")
    if len(prompt) > MAX_PROMPTS:
        raise InvalidRequest(f"prompt: at most {MAX_PROMPTS} prompts", "prompt")
    for item in prompt:
        _check_prompt(item, vocab_size)
    return prompt


def _check_prompt(item: object, vocab_size: int) -> None:
    if not isinstance(item, str | list):
        raise InvalidRequest("prompt: each must be a text or a list of token ids", "prompt")
    if not item:
        raise InvalidRequest("prompt: must not be empty", "prompt")
    if isinstance(item, list):
        for token_id in item:
            if type(token_id) is not int:
                raise InvalidRequest("prompt: token ids must be integers", "prompt")
            check_token(token_id, "prompt", vocab_size)


async def completion_prompt(front: Front, body: CompletionBody, given: str | list[int]) -> Prompt:
    """One prompt, text or token ids, as tokens. Raises InvalidRequest."""
    if isinstance(given, str):
        token_ids = await _encoded(front, body, given, add_special_tokens=body.add_special_tokens is not False)
        text = given
    else:
        token_ids = given
        text = await asyncio.to_thread(front.codec.decode, given) if body.echo else ""
    if not token_ids:
        raise InvalidRequest("prompt: must not be empty", "prompt")
    if body.truncate_prompt_tokens is not None and len(kept := _truncated(front, body, token_ids)) < len(token_ids):
        token_ids, text = kept, await asyncio.to_thread(front.codec.decode, kept) if body.echo else ""
    limit = output_limit(body, len(token_ids), front.max_model_len)
    return Prompt(token_ids, text, make_sampling(body, limit, front.codec.vocab_size), discards_output=limit == 0)


async def _encoded(front: Front, body: Common, text: str, *, add_special_tokens: bool) -> list[int]:
    """The tokens of a prompt; of one that is refused for its length, enough to be."""
    most = front.max_model_len if body.truncate_prompt_tokens is None else None
    return await encode_text(front.codec, text, most_tokens=most, add_special_tokens=add_special_tokens)


def _truncated(front: Front, body: Common, token_ids: list[int]) -> list[int]:
    """The last tokens of a prompt, `truncate_prompt_tokens` of them, or with -1 as many as leave room for the output.

    Raises InvalidRequest.
    """
    field, most, limit = "truncate_prompt_tokens", body.truncate_prompt_tokens, front.max_model_len
    if most == 0 or (most or 0) > limit:
        raise InvalidRequest(f"{field}: must be -1, or 1 to {limit}, the context of this model", field)
    if most == -1:
        most = max(limit - max(asked_tokens(body)[0] or 1, 1), 1)
    return token_ids[-most:] if most else token_ids


# ---- chat


async def chat_prompt(front: Front, body: ChatBody) -> Prompt:
    """The messages through the model's template, as tokens. Raises InvalidRequest."""
    text = _template_text(front, body)
    token_ids = await _encoded(front, body, text, add_special_tokens=bool(body.add_special_tokens))
    if not token_ids:
        raise InvalidRequest("messages: the prompt is empty", "messages")
    if body.truncate_prompt_tokens is not None:
        token_ids = _truncated(front, body, token_ids)
    limit = output_limit(body, len(token_ids), front.max_model_len)
    return Prompt(token_ids, text, make_sampling(body, limit, front.codec.vocab_size))


def _template_text(front: Front, body: ChatBody) -> str:
    """The prompt's text; with `continue_final_message` it ends inside the last message."""
    messages = template_messages(body.messages)
    shown: dict[str, Any] = {}
    if (
        body.tools
        or body.functions
        or any(
            message.tool_calls or message.function_call or message.role in ("tool", "function")
            for message in body.messages
        )
    ):
        messages, shown = with_shown_tools(front, body, messages)
    variables = template_variables(front, body) if body.model_fields_set & REASONING_FIELDS else {}
    if body.documents is not None:
        variables["documents"] = body.documents
    variables |= {key: value for key, value in (body.chat_template_kwargs or {}).items() if key not in _RESERVED}
    variables |= shown
    own = body.chat_template
    render = front.codec.chat_text if own is None else partial(front.codec.own_chat_text, own)
    if not body.continue_final_message:
        return render(messages, add_generation_prompt=body.add_generation_prompt is not False, **variables)
    final = str(messages[-1]["content"]).strip()
    text = render(messages, add_generation_prompt=False, **variables)
    if not final or final not in text:
        raise InvalidRequest("continue_final_message: the template does not keep the last message", "messages")
    return text[: text.rindex(final) + len(final)]


_RESERVED = frozenset({"messages", "add_generation_prompt", "self"})


def template_messages(messages: list[Message]) -> list[dict[str, Any]]:
    """Messages as chat templates expect them: content is text, calls' arguments are objects. Raises InvalidRequest."""
    return [_template_message(message, index) for index, message in enumerate(messages)]


def _template_message(message: Message, index: int) -> dict[str, Any]:
    calls = message.tool_calls or ([] if message.function_call is None else [ToolCall(function=message.function_call)])
    if message.content is None and message.role != "assistant":
        field = f"messages[{index}].content"
        raise InvalidRequest(f"{field}: required for role {message.role}", field)
    role = {"developer": "system", "function": "tool"}.get(message.role, message.role)
    answer: dict[str, Any] = {"role": role, "content": _text_of(message, index)}
    optional = {
        "name": message.name,
        "tool_calls": [_template_call(call) for call in calls] or None,
        "tool_call_id": message.tool_call_id,
        "reasoning_content": message.reasoning if message.reasoning_content is None else message.reasoning_content,
    }
    return answer | {name: value for name, value in optional.items() if value is not None}


def _text_of(message: Message, index: int) -> str:
    content = message.content
    if not isinstance(content, list):
        return content or ""
    for place, part in enumerate(content):
        if part.type not in ("text", "refusal"):
            field = f"messages[{index}].content[{place}].type"
            raise InvalidRequest(f"{field}: {part.type!r} content is not supported", field)
    return "".join(part.text or part.refusal or "" for part in content)


def _template_call(call: ToolCall) -> dict[str, Any]:
    """A call as templates read it. Arguments that are no JSON object stay the text that they are."""
    arguments: object = call.function.arguments
    try:
        parsed = json.loads(call.function.arguments or "{}")
    except (ValueError, RecursionError):
        parsed = None
    if isinstance(parsed, dict):
        arguments = parsed
    named = {} if call.id is None else {"id": call.id}
    return {**named, "type": "function", "function": {"name": call.function.name, "arguments": arguments}}
