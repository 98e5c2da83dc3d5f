"""Messages and tools as clients send them: what is refused and where, and what chat templates get."""

import json

import pytest

from kvrelay.errors import InvalidRequest
from kvrelay.serve.api.completions import template_messages
from kvrelay.serve.api.schemas import ChatBody, parse
from kvrelay.serve.bodies.messages import MAX_TOOLS, check_tools

pytestmark = pytest.mark.pure

WEATHER = {"name": "get_weather", "description": "of a city", "parameters": {"type": "object", "properties": {}}}
TOOLS = [{"type": "function", "function": WEATHER}, {"type": "function", "function": {"name": "stop"}}]
USER = {"role": "user", "content": "hi"}


def body_of(**fields):
    return parse(ChatBody, json.dumps({"messages": [USER]} | fields).encode())


def refused(**fields):
    """The field at fault."""
    with pytest.raises(InvalidRequest) as caught:
        body = body_of(**fields)
        check_tools(body.tools or [], body.tool_choice)
    return caught.value.param


@pytest.mark.parametrize(
    ("choice", "mode", "names"),
    [
        ("none", "none", None),
        ("auto", "auto", None),
        ("required", "required", None),
        ({"type": "function", "function": {"name": "stop"}}, "required", ("stop",)),
        (
            {"type": "allowed_tools", "allowed_tools": {"mode": "auto", "tools": [{"function": {"name": "stop"}}]}},
            "auto",
            ("stop",),
        ),
    ],
)
def test_a_choice_of_tools_is_a_mode_and_names(choice, mode, names):
    chosen = body_of(tools=TOOLS, tool_choice=choice).tool_choice
    assert (chosen.mode, chosen.names) == (mode, names)


@pytest.mark.parametrize(
    ("call", "mode", "names"), [("none", "none", None), ({"name": "get_weather"}, "required", ("get_weather",))]
)
def test_a_function_call_is_a_choice_too(call, mode, names):
    chosen = body_of(functions=[WEATHER], function_call=call).function_call
    assert (chosen.mode, chosen.names) == (mode, names)


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"tools": [{"type": "function"}]}, "tools[0].function"),
        ({"tools": [{"type": "custom", "custom": {"name": "f"}}]}, "tools[0].type"),
        ({"tools": [{"function": WEATHER}]}, "tools[0].type"),
        ({"tools": [{"type": "function", "function": {"name": "a b"}}]}, "tools[0].function.name"),
        ({"tools": [{"type": "function", "function": {"name": "x" * 65}}]}, "tools[0].function.name"),
        ({"tools": [{"type": "function", "function": WEATHER | {"parameters": "x"}}]}, "tools[0].function.parameters"),
        ({"tools": [TOOLS[0], TOOLS[0]]}, "tools[1].function.name"),
        ({"tools": [TOOLS[0]] * (MAX_TOOLS + 1)}, "tools"),
        ({"tool_choice": "required"}, "tool_choice"),
        ({"tools": TOOLS, "tool_choice": "any"}, "tool_choice.type"),
        ({"tools": TOOLS, "tool_choice": {"type": "function"}}, "tool_choice"),
        ({"tools": TOOLS, "tool_choice": {"type": "function", "function": {"name": "other"}}}, "tool_choice"),
        ({"tools": TOOLS, "tool_choice": 5}, "tool_choice"),
        ({"messages": [{"role": "assistant", "tool_calls": [{"id": "1"}]}]}, "messages[0].tool_calls[0].function"),
        ({"thinking_token_budget": -1}, "thinking_token_budget"),
        ({"reasoning_effort": "much"}, "reasoning_effort"),
    ],
)
def test_a_wrong_tool_is_named(fields, param):
    assert refused(**fields) == param


def call_of(arguments, **more):
    return {"type": "function", "function": {"name": "get_weather", "arguments": arguments}} | more


def test_templates_get_arguments_as_objects_and_the_reasoning():
    messages = [
        USER,
        {"role": "assistant", "content": None, "reasoning": "hm", "tool_calls": [call_of('{"city": "Oslo"}', id="c1")]},
        {"role": "tool", "tool_call_id": "c1", "content": [{"type": "text", "text": "rain"}]},
        {"role": "assistant", "function_call": {"name": "get_weather", "arguments": ""}},
        {"role": "function", "name": "get_weather", "content": "sun"},
    ]
    assert template_messages(body_of(messages=messages).messages) == [
        {"role": "user", "content": "hi"},
        {
            "role": "assistant",
            "content": "",
            "tool_calls": [call_of({"city": "Oslo"}, id="c1")],
            "reasoning_content": "hm",
        },
        {"role": "tool", "content": "rain", "tool_call_id": "c1"},
        {"role": "assistant", "content": "", "tool_calls": [call_of({})]},
        {"role": "tool", "content": "sun", "name": "get_weather"},
    ]


@pytest.mark.parametrize("arguments", ["{", "[1]", "5", "[" * 100_000])
def test_arguments_that_are_no_object_stay_text(arguments):
    messages = body_of(messages=[USER, {"role": "assistant", "tool_calls": [call_of(arguments)]}]).messages
    assert template_messages(messages)[1]["tool_calls"][0]["function"]["arguments"] == arguments
