"""Reasoning on real engines: a budget is exact, usage counts what was computed.

The model is tiny and random: it never closes reasoning by itself, and stops only where something makes it.
"""

import httpx
import pytest

from tests.checkpoints import chat_checkpoint
from tests.small_cluster import CHAT_SETTINGS, small_cluster

OPENING = "{%- if add_generation_prompt %}{{- '<think>\\n' }}{%- endif %}"


@pytest.fixture(scope="module")
def opened(tmp_path_factory):
    """A Qwen 3 checkpoint whose template ends the prompt inside reasoning."""
    folder = chat_checkpoint("qwen3", tmp_path_factory.mktemp("opened"))
    template = folder / "chat_template.jinja"
    template.write_text(template.read_text() + OPENING)
    return folder


async def ask(client, **body):
    body = {"messages": [{"role": "user", "content": "Why?"}], "max_tokens": 40, "seed": 3, **body}
    response = await client.post("/v1/chat/completions", json=body)
    assert response.status_code == 200, response.text
    return response


def client_of(app):
    return httpx.AsyncClient(transport=httpx.ASGITransport(app), base_url="http://test", timeout=60)


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


async def test_reasoning_that_is_off_leaves_its_budget_at_none(opened):
    """The template has no way to close what it opens: the first token is the end marker."""
    async with small_cluster(opened) as app, client_of(app) as client:
        answer = (await ask(client, reasoning_effort="none", ignore_eos=True)).json()
    message = answer["choices"][0]["message"]
    assert "reasoning_content" not in message and message["content"]
    assert num_reasoned(answer) == 0
