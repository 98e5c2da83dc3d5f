"""How the model that is served calls tools: its format, and how its prompts show tools, past calls and results.

A template that knows no tools gets them in the first message, and calls and results as text, in Hermes' form: so a
model that was not trained for tools sees what it may call.
"""

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

from kvrelay.errors import InvalidRequest
from kvrelay.serve.chat.families import DEFAULT_FORMAT, TOOL_FORMATS, ToolFormat, detect_tool_format
from kvrelay.serve.chat.output import OutputFormat
from kvrelay.serve.chat.response_template import TemplateParser
from kvrelay.serve.chat.tool_calls import ToolCallParser
from kvrelay.serve.text.chat_template import ChatTemplate
from kvrelay.serve.text.tokenizer import Tokenizer

Message = dict[str, Any]

_PROBE = {"type": "function", "function": {"name": "probe_of_tools", "description": "", "parameters": {}}}


@dataclass(frozen=True, slots=True)
class ToolSupport:
    """Of the model that is served. format: None where calls are parsed in no form that is known."""

    format: ToolFormat | None
    in_template: bool  # the chat template shows tools itself
    kept_ids: frozenset[int] = frozenset()  # special tokens whose text a parser must see
    response_template: Mapping[str, Any] | None = None  # transformers' description of outputs, of the checkpoint

    def output(
        self, parameters: Mapping[str, Any], prompt: str, *, is_parallel: bool, is_constrained: bool
    ) -> OutputFormat:
        """How outputs of a request with these tools are read. Those of a grammar are in our own format."""
        if self.response_template is not None and not is_constrained:
            tools = [{"function": {"name": name, "parameters": schema}} for name, schema in parameters.items()]
            parser = partial(TemplateParser, self.response_template, tools, prompt, is_parallel=is_parallel)
            return OutputFormat(parser=parser, kept_ids=self.kept_ids)
        if self.format is None:
            message = "this server does not know how this model writes tool calls; see its setting model.tool_parser"
            raise InvalidRequest(f"tools: {message}", "tools", 400, "unsupported_parameter")
        own = partial(ToolCallParser, self.format, parameters, is_parallel=is_parallel)
        return OutputFormat(parser=own, kept_ids=self.kept_ids)


def find_tools(name: str, codec: Tokenizer) -> ToolSupport | None:
    """As the setting model.tool_parser has it. None: tools are refused."""
    template = codec.tool_template
    if name == "none" or template is None:
        return None
    in_template = _shows_tools(template)
    found = detect_tool_format(template.source) if in_template else DEFAULT_FORMAT
    if name != "auto":
        found = name
    own = None if found is None else TOOL_FORMATS[found]
    support = ToolSupport(own, in_template, response_template=codec.response_template if name == "auto" else None)
    markers = " ".join(own.markers) if own is not None else ""
    if support.response_template is not None:
        markers += json.dumps(support.response_template, ensure_ascii=False)
    return replace(support, kept_ids=frozenset(i for i, text in codec.special_tokens() if text in markers))


def _shows_tools(template: ChatTemplate) -> bool:
    messages = [{"role": "user", "content": "Hello"}]
    try:
        return str(_PROBE["function"]["name"]) in template.render(messages, tools=[_PROBE])  # type: ignore[index]
    except InvalidRequest:
        return "tools" in template.variables


def shown_in_messages(messages: Sequence[Message], tools: Sequence[Mapping[str, Any]]) -> list[Message]:
    """The messages for a template that knows no tools."""
    own = TOOL_FORMATS[DEFAULT_FORMAT]
    answer: list[Message] = []
    for message in messages:
        content = str(message.get("content") or "")
        role = message["role"]
        if calls := message.get("tool_calls"):
            each = [_written(own, call["function"]) for call in calls]
            content = "\n".join([content, *each] if content else each)
        elif role == "tool":
            role, content = "user", f"<tool_response>\n{content}\n</tool_response>"
            if answer and answer[-1].get("is_result"):
                answer[-1]["content"] += "\n" + content
                continue
        answer.append({"role": role, "content": content, "is_result": message["role"] == "tool"})
    for message in answer:
        del message["is_result"]
    if tools and answer:
        first = answer[0]
        texts = [first["content"], _description(tools)]
        first["content"] = "\n\n".join(texts if first["role"] == "system" else reversed(texts))
    return answer


def _written(own: ToolFormat, function: Mapping[str, Any]) -> str:
    arguments = function["arguments"]
    text = arguments if isinstance(arguments, str) else json.dumps(arguments, ensure_ascii=False)
    return own.call_begin(function["name"]) + text + own.call_end


def _description(tools: Sequence[Mapping[str, Any]]) -> str:
    signatures = "\n".join(json.dumps(tool["function"], ensure_ascii=False) for tool in tools)
    return (
        f"These functions can be called:\n<tools>\n{signatures}\n</tools>\n"
        "To call one, write its name and its arguments as a JSON object between tags, one pair of tags per call:\n"
        '<tool_call>\n{"name": <name of the function>, "arguments": <its arguments as an object>}\n</tool_call>'
    )
