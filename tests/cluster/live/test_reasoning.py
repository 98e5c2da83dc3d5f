"""Reasoning on real engines: a budget is exact, a grammar binds behind reasoning, and usage counts what was computed.

The model is tiny and random: it never closes reasoning by itself, and stops only where something makes it.
"""

import json

import httpx
import pytest

from kvrelay.serve.text.tokenizer import Tokenizer
from tests.checkpoints import chat_checkpoint
from tests.small_cluster import CHAT_SETTINGS, small_cluster

OPENING = "{%- if add_generation_prompt %}{{- '<think>\\n' }}{%- endif %}"
SCHEMA = {
    "type": "object",
    "properties": {"ok": {"type": "boolean"}, "size": {"enum": ["s", "m"]}},
    "required": ["ok", "size"],
    "additionalProperties": False,
}
FORM = {"type": "json_schema", "json_schema": {"name": "answer", "strict": True, "schema": SCHEMA}}


@pytest.fixture(scope="module")
def opened(tmp_path_factory):
    """A Qwen 3 checkpoint whose template ends the prompt inside reasoning."""
    folder = chat_checkpoint("qwen3", tmp_path_factory.mktemp("opened"))
    template = folder / "chat_template.jinja"
    template.write_text(template.read_text() + OPENING)
    return folder


async def ask(client, **body):
    body = {"model": "tiny", "messages": [{"role": "user", "content": "Why?"}], "max_tokens": 40, "seed": 3, **body}
    response = await client.post("/v1/chat/completions", json=body)
    assert response.status_code == 200, response.text
    return response


def client_of(app):
    return httpx.AsyncClient(transport=httpx.ASGITransport(app), base_url="http://test", timeout=60)


def deltas_of(response):
    events = [line.removeprefix("data: ") for line in response.text.split("\n\n") if line]
    assert events.pop() == "[DONE]"
    return [choice["delta"] for event in events for choice in json.loads(event)["choices"]]


def num_reasoned(answer):
    return answer["usage"]["completion_tokens_details"]["reasoning_tokens"]


PATHS = pytest.mark.parametrize("settings", [{}, {"router": {"local_prefill_tokens": 4096}}], ids=["remote", "local"])


@PATHS
async def test_a_budget_is_exact(opened, settings):
    async with small_cluster(opened, CHAT_SETTINGS | settings) as app, client_of(app) as client:
        endless = (await ask(client, ignore_eos=True)).json()
        assert endless["choices"][0]["message"]["content"] is None and num_reasoned(endless) == 40
        for budget in (0, 1, 7):
            answer = (await ask(client, thinking_token_budget=budget, ignore_eos=True, n=2)).json()
            assert num_reasoned(answer) == 2 * budget
            assert answer["usage"]["completion_tokens"] == 2 * 40
            assert all(choice["message"]["content"] for choice in answer["choices"])


@PATHS
async def test_a_grammar_binds_behind_reasoning(opened, settings):
    async with small_cluster(opened, CHAT_SETTINGS | settings) as app, client_of(app) as client:
        for budget in (0, 7):
            body = {"thinking_token_budget": budget, "response_format": FORM, "max_tokens": 200}
            answer = (await ask(client, **body)).json()
            [choice] = answer["choices"]
            assert num_reasoned(answer) == budget and choice["finish_reason"] == "stop"
            assert set(json.loads(choice["message"]["content"])) == {"ok", "size"}
            deltas = deltas_of(await ask(client, **body, stream=True))
            for name in ("content", "reasoning_content"):
                text = "".join(delta.get(name) or "" for delta in deltas)
                assert text == (choice["message"].get(name) or "")


async def test_a_model_may_reason_before_its_grammar_or_not(tmp_path):
    """Where the prompt leaves it open, the first token decides; a bias makes this one the marker."""
    folder = chat_checkpoint("qwen3", tmp_path)
    [marker] = Tokenizer(folder).encode("<think>")
    async with small_cluster(folder) as app, client_of(app) as client:
        for bias, num_expected in (100, 5), (-100, 0):
            body = {"thinking_token_budget": 5, "response_format": FORM, "max_tokens": 200}
            answer = (await ask(client, **body, logit_bias={str(marker): bias})).json()
            assert num_reasoned(answer) == num_expected
            assert set(json.loads(answer["choices"][0]["message"]["content"])) == {"ok", "size"}


async def test_a_forced_call_comes_behind_reasoning(opened):
    function = {"name": "weigh", "parameters": SCHEMA}
    body = {"tools": [{"type": "function", "function": function}], "tool_choice": "required", "max_tokens": 200}
    async with small_cluster(opened) as app, client_of(app) as client:
        answer = (await ask(client, **body, thinking_token_budget=6)).json()
        deltas = deltas_of(await ask(client, **body, thinking_token_budget=6, stream=True))
    [choice] = answer["choices"]
    [call, *_] = choice["message"]["tool_calls"]
    assert choice["finish_reason"] == "tool_calls" and num_reasoned(answer) == 6
    assert call["function"]["name"] == "weigh" and set(json.loads(call["function"]["arguments"])) == {"ok", "size"}
    assert choice["message"]["content"] is None and choice["message"]["reasoning_content"]
    calls = [one for delta in deltas for one in delta.get("tool_calls", ()) if one["index"] == 0]
    assert "".join(one["function"]["arguments"] for one in calls) == call["function"]["arguments"]
    assert "".join(delta.get("reasoning_content", "") for delta in deltas) == choice["message"]["reasoning_content"]


async def test_reasoning_that_is_off_leaves_its_budget_at_none(opened):
    """The template has no way to close what it opens: the first token is the end marker."""
    async with small_cluster(opened) as app, client_of(app) as client:
        answer = (await ask(client, reasoning_effort="none", ignore_eos=True)).json()
    message = answer["choices"][0]["message"]
    assert "reasoning_content" not in message and message["content"]
    assert num_reasoned(answer) == 0
