"""The official client, unmodified, over a real HTTP server."""

import openai
import pytest

from tests.fakes import scripted
from tests.serve.conftest import MODEL

MESSAGES = [{"role": "user", "content": "hi"}]


@pytest.fixture
async def client(make_cluster, serve_http):
    cluster = await make_cluster(script=scripted("Hello, 世界!", then_eos=True))
    url = await serve_http(cluster.app)
    async with openai.AsyncOpenAI(base_url=f"{url}/v1", api_key="none", max_retries=0) as client:
        yield client
    await cluster.all_released()


async def test_models(client):
    assert [model.id async for model in client.models.list()] == [MODEL]
    assert (await client.models.retrieve(MODEL)).owned_by == "kvrelay"


async def test_chat(client):
    answer = await client.chat.completions.create(model=MODEL, messages=MESSAGES, logprobs=True, top_logprobs=2)
    assert answer.choices[0].message.content == "Hello, 世界!"
    assert answer.choices[0].finish_reason == "stop"
    assert len(answer.choices[0].logprobs.content[0].top_logprobs) == 2
    assert answer.usage.prompt_tokens_details.cached_tokens == 0


async def test_chat_stream(client):
    text, usage = "", None
    stream = await client.chat.completions.create(
        model=MODEL, messages=MESSAGES, stream=True, stream_options={"include_usage": True}, n=2
    )
    async for chunk in stream:
        text += "".join(choice.delta.content or "" for choice in chunk.choices if choice.index == 1)
        usage = chunk.usage or usage
    assert text == "Hello, 世界!"
    assert usage.completion_tokens == 2 * (len("Hello, 世界!".encode()) + 1)


async def test_completions(client):
    answer = await client.completions.create(model=MODEL, prompt=["a", "b"], max_tokens=5, echo=True, logprobs=1)
    assert [choice.text for choice in answer.choices] == ["aHello", "bHello"]
    stream = await client.completions.create(model=MODEL, prompt="a", max_tokens=5, stream=True)
    assert "".join([choice.text async for chunk in stream for choice in chunk.choices]) == "Hello"


async def test_extra_body_fields_of_other_servers(client):
    answer = await client.chat.completions.create(
        model=MODEL, messages=MESSAGES, max_tokens=20, extra_body={"ignore_eos": True, "min_tokens": 3, "top_k": 5}
    )
    assert answer.usage.completion_tokens == 20


async def test_errors_arrive_as_the_clients_own(client):
    with pytest.raises(openai.NotFoundError) as caught:
        await client.chat.completions.create(model="gpt-9", messages=MESSAGES)
    assert (caught.value.code, caught.value.param) == ("model_not_found", "model")
    with pytest.raises(openai.BadRequestError) as bad:
        await client.chat.completions.create(model=MODEL, messages=MESSAGES, n=1000)
    assert bad.value.param == "n"
