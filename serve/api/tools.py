"""Tools as a chat request asks for them: what its template shows, the grammar of its calls, and how they are read.

Only requests with tools come here.
"""

import json
from dataclasses import dataclass, replace
from typing import Any

import msgspec

from kvrelay.errors import InvalidRequest
from kvrelay.grammar.limits import in_tag
from kvrelay.plane.messages import GrammarSpec
from kvrelay.serve.api.endpoint import Front
from kvrelay.serve.api.schemas import ChatBody
from kvrelay.serve.bodies.messages import Function, ToolChoice
from kvrelay.serve.bodies.unknown_fields import unsupported
from kvrelay.serve.chat.tool_grammar import ANY_ARGUMENTS, arguments_schema, tag_begin, tool_tag
from kvrelay.serve.chat.tool_support import ToolSupport, shown_in_messages
from kvrelay.serve.requests.generation import Prompt

NO_PARAMETERS: dict[str, Any] = {"type": "object", "properties": {}}


def asks_for_tools(body: ChatBody) -> bool:
    """Whether tools may be called. With the choice `none` the model does not see them either."""
    choice = _choice(body)
    return bool(_functions(body)) and (choice is None or choice.mode != "none")


def _functions(body: ChatBody) -> list[Function]:
    """Those of `tools`, or of `functions`, which was before it."""
    return [tool.function for tool in body.tools] if body.tools else list(body.functions or ())


def _choice(body: ChatBody) -> ToolChoice | None:
    return body.tool_choice if body.tools else body.function_call


def with_shown_tools(
    front: Front, body: ChatBody, messages: list[dict[str, Any]]
) -> tuple[list[dict[str, Any]], dict[str, Any]]:
    """The messages, and the variables of the template that show the tools. Raises InvalidRequest."""
    tools = [_as_shown(function) for function in _functions(body)] if asks_for_tools(body) else []
    support = front.tools
    if support is None:
        if tools:
            raise unsupported("tools")
        return messages, {}
    if support.in_template:
        return messages, {"tools": tools} if tools else {}
    return shown_in_messages(messages, tools), {}


def _as_shown(function: Function) -> dict[str, Any]:
    described = {} if function.description is None else {"description": function.description}
    parameters = NO_PARAMETERS if function.parameters is None else function.parameters
    return {"type": "function", "function": {"name": function.name, **described, "parameters": parameters}}


@dataclass(frozen=True, slots=True)
class _Asked:
    """The choice among tools, any spelling."""

    tools: list[tuple[str, Function]]  # those that may be called, with the field of their parameters
    is_required: bool
    is_named: bool
    is_parallel: bool
    is_limited: bool  # to some of the tools

    @property
    def must_be_constrained(self) -> bool:
        return self.is_required or self.is_limited or any(function.strict for _, function in self.tools)


def _asked(body: ChatBody) -> _Asked:
    choice = _choice(body)
    names = None if choice is None else choice.names
    form = "tools[{}].function.parameters" if body.tools else "functions[{}].parameters"
    tools = [(form.format(place), function) for place, function in enumerate(_functions(body))]
    is_named = choice is not None and choice.type == "function"
    return _Asked(
        tools=[(place, function) for place, function in tools if names is None or function.name in names],
        is_required=choice is not None and choice.mode == "required",
        is_named=is_named,
        is_parallel=bool(body.tools) and body.parallel_tool_calls is not False and not is_named,
        is_limited=names is not None,
    )


async def with_tools(front: Front, body: ChatBody, prompt: Prompt) -> Prompt:
    """The prompt, its output to be searched for calls, and limited to valid ones where that was asked for.

    Raises InvalidRequest.
    """
    support, asked = front.tools, _asked(body)
    if support is None:
        raise unsupported("tools")
    spec = _spec(support, asked, prompt.sampling.grammar)
    if spec is not None:
        await _check(front, body, asked, spec)
        prompt = replace(prompt, sampling=msgspec.structs.replace(prompt.sampling, grammar=spec))
    parameters = {function.name: function.parameters or NO_PARAMETERS for _, function in asked.tools}
    output = support.output(parameters, prompt.text, is_parallel=asked.is_parallel, is_constrained=spec is not None)
    if asked.is_named:
        output = replace(output, call_reason="stop")  # as OpenAI has it
    elif not body.tools:
        output = replace(output, call_reason="function_call")
    return replace(prompt, output=output)


def _spec(support: ToolSupport, asked: _Asked, given: GrammarSpec | None) -> GrammarSpec | None:
    """The grammar of the output; None: it is free. given: that of `response_format`, which content must follow."""
    if given is not None and given.kind != "json_schema":
        raise InvalidRequest(
            f"tools: not with a constraint of kind {given.kind}", "tools", 400, "unsupported_parameter"
        )
    if not asked.must_be_constrained and given is None:
        return None
    own = support.format
    if own is None:
        message = "tool_choice: this server does not know how this model writes calls; see model.tool_parser"
        raise InvalidRequest(message, "tool_choice", 400, "unsupported_parameter")
    content = None
    if given is not None and not asked.is_required:
        content = json.loads(given.text)
    schemas = {
        function.name: arguments_schema(function.parameters, field)
        if asked.is_required or function.strict
        else ANY_ARGUMENTS
        for field, function in asked.tools
    }
    tag = tool_tag(own, schemas, is_required=asked.is_required, is_parallel=asked.is_parallel, content_schema=content)
    return GrammarSpec("structural_tag", tag)


async def _check(front: Front, body: ChatBody, asked: _Asked, spec: GrammarSpec) -> None:
    if body.use_beam_search:
        raise InvalidRequest("tools: not with use_beam_search", "tools", 400, "unsupported_parameter")
    try:
        await front.check_grammar(spec)
    except InvalidRequest as error:
        field, name = _at_fault(front, asked, error.message)
        raise InvalidRequest(f"{field}: {error.message}{name}", field, error.status, error.code) from error


def _at_fault(front: Front, asked: _Asked, message: str) -> tuple[str, str]:
    """The field of the tool whose tag a refusal names, and the tool's name in words."""
    own = front.tools.format if front.tools is not None else None
    for field, function in asked.tools:
        if own is not None and in_tag(tag_begin(own, function.name)) in message:
            return field, f" (of the tool {function.name!r})"
    return "tools", ""
