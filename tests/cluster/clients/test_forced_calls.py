"""Forced tool calls end to end: models of random weights, at temperature 1, through prefill, transfer and decode."""

import json

import jsonschema
import openai
import pytest

from tests.checkpoints import chat_checkpoint
from tests.small_cluster import served_cluster

pytestmark = [pytest.mark.processes, pytest.mark.timeout(120)]
TOOLS = {
    "add": {
        "type": "object",
        "properties": {"a": {"type": "integer"}, "kind": {"enum": ["x", "y"]}},
        "required": ["a", "kind"],
        "additionalProperties": False,
    },
    "stop": {"type": "object", "properties": {"now": {"type": "boolean"}}, "additionalProperties": False},
}
ASKED = {
    "model": "tiny",
    "messages": [{"role": "user", "content": "Add 1 and 2."}],
    "tools": [{"type": "function", "function": {"name": name, "parameters": one}} for name, one in TOOLS.items()],
    "temperature": 1.0,
    "max_tokens": 300,
    "n": 8,
}


@pytest.fixture(scope="module", params=["qwen2.5", "llama3.1"])
def client(request, tmp_path_factory):
    folder = chat_checkpoint(request.param, tmp_path_factory.mktemp("models") / request.param)
    with served_cluster(folder) as url, openai.OpenAI(base_url=url, api_key="x", max_retries=0) as client:
        yield client


def check(call):
    jsonschema.validate(json.loads(call.function.arguments), TOOLS[call.function.name])


def answers(client, **fields):
    """Choices of several requests, with different random numbers."""
    for seed in range(4):
        answer = client.chat.completions.create(**(ASKED | {"seed": seed} | fields))
        yield from answer.choices


def test_required_calls_are_valid(client):
    found = list(answers(client, tool_choice="required", parallel_tool_calls=False))
    ended = [choice for choice in found if choice.finish_reason == "tool_calls"]
    assert len(ended) > len(found) / 4
    for choice in ended:
        assert choice.message.content is None
        (call,) = choice.message.tool_calls
        check(call)
    assert {choice.finish_reason for choice in found} <= {"tool_calls", "length"}


def test_a_named_call_is_that_one(client):
    named = {"type": "function", "function": {"name": "stop"}}
    ended = [choice for choice in answers(client, tool_choice=named) if choice.finish_reason == "stop"]
    assert ended
    for choice in ended:
        assert [call.function.name for call in choice.message.tool_calls] == ["stop"]
        check(choice.message.tool_calls[0])


def test_a_streamed_call_is_the_whole_one(client):
    fields = ASKED | {"tool_choice": "required", "seed": 3, "n": 1, "parallel_tool_calls": False}
    whole = client.chat.completions.create(**fields).choices[0].message.tool_calls or []
    with client.chat.completions.stream(**fields) as stream:
        for _ in stream:
            pass
        calls = stream.get_final_completion().choices[0].message.tool_calls or []
    assert [call.function.arguments for call in calls] == [call.function.arguments for call in whole]


def test_without_a_grammar_there_are_none(client):
    assert not any(choice.message.tool_calls for choice in answers(client))
