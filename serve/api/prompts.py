"""From a checked body to its prompts as tokens: text or ids of a completion, messages through the chat template."""

import asyncio
import json
from functools import partial
from typing import Any

from kvrelay.errors import InvalidRequest
from kvrelay.serve.api.endpoint import Front
from kvrelay.serve.api.parameters import asked_tokens, check_token, make_sampling, output_limit
from kvrelay.serve.api.reasoning import REASONING_FIELDS, template_variables
from kvrelay.serve.api.schemas import ChatBody, Common, CompletionBody
from kvrelay.serve.api.tools import with_shown_tools
from kvrelay.serve.bodies.messages import Message, ToolCall
from kvrelay.serve.requests.generation import Prompt
from kvrelay.serve.text.tokenizer import encode_text

MAX_PROMPTS = 64  # of one completions request: as many sequences as a worker runs by default


# ---- completions


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
