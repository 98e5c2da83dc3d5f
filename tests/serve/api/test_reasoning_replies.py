"""Reasoning in chat replies, over fake workers: fields, streams, usage, and what travels to the workers."""

from functools import partial

import openai
import pytest

from kvrelay.plane import messages as wire
from kvrelay.serve.text.chat_template import ChatTemplate
from tests.fakes import EOS, ByteCodec, scripted
from tests.serve.api.test_api import chat, complete, events
from tests.serve.conftest import MODEL

SWITCHED = """{%- for message in messages %}<{{ message.role }}>{{ message.reasoning_content }}{{ message.content }}
{% endfor %}{% if add_generation_prompt %}<assistant>{% if enable_thinking is defined and not enable_thinking %}<think>

</think>

{% endif %}{% endif %}"""
OPENED = """{%- for message in messages %}<{{ message.role }}>{{ message.content.split('</think>')[-1] }}
{% endfor %}{% if add_generation_prompt %}<assistant><think>
{% endif %}"""
EFFORT = SWITCHED.replace("{%- for", "effort {{ reasoning_effort or 'unset' }}\n{%- for", 1)
TEXT = "<think>\nbecause it is\n</think>\n\nYes. <think>"


def with_template(source):
    """A codec of bytes with this chat template."""
    template = ChatTemplate(source, {})

    class Codec(ByteCodec):
        def chat_text(self, messages, *, add_generation_prompt=True, **variables):
            return template.render(messages, add_generation_prompt=add_generation_prompt, **variables)

    Codec.template = template
    return Codec()


@pytest.fixture
def reasoner(make_cluster):
    """`await reasoner(text, template)`: a cluster whose model says the text, and then ends."""

    async def make(text=TEXT, template=SWITCHED, **sections):
        script = scripted(text, then_eos=True)
        return await make_cluster(
            script=script, codec=None if template is None else with_template(template), **sections
        )

    return make


def sent(cluster):
    """The last request that a prefill worker got."""
    return [message.request for message in cluster.prefill[0].received if isinstance(message, wire.Prefill)][-1]


def prompt_of(cluster):
    request = sent(cluster)
    return bytes(request.token_ids[: request.num_prompt_tokens]).decode()


def joined(chunks, field):
    return "".join(choice["delta"].get(field) or "" for chunk in chunks for choice in chunk["choices"])


async def test_reasoning_is_a_field_of_the_message_and_counted_in_tokens(reasoner):
    cluster = await reasoner()
    answer = (await chat(cluster, {"max_tokens": 99})).json()
    [choice] = answer["choices"]
    assert choice["message"] == {
        "role": "assistant",
        "content": "Yes. <think>",
        "refusal": None,
        "reasoning_content": "because it is",
        "reasoning": "because it is",
    }
    assert choice["finish_reason"] == "stop"
    assert answer["usage"]["completion_tokens"] == len(TEXT) + 1
    assert answer["usage"]["completion_tokens_details"] == {"reasoning_tokens": len("\nbecause it is\n")}
    assert "kvrelay_reasoning_tokens_total 15.0" in (await cluster.client.get("/metrics")).text
    assert sent(cluster).sampling.thinking is None
    await cluster.all_released()


async def test_a_stream_brings_the_same_in_deltas(reasoner):
    cluster = await reasoner()
    body = {"max_tokens": 99, "stream": True, "stream_options": {"include_usage": True}}
    *chunks, last = events(await chat(cluster, body))
    assert chunks[0]["choices"][0]["delta"] == {"role": "assistant", "content": ""}
    assert joined(chunks, "reasoning_content") == joined(chunks, "reasoning") == "because it is"
    assert joined(chunks, "content") == "Yes. <think>"
    deltas = [choice["delta"] for chunk in chunks for choice in chunk["choices"]]
    assert all(len(delta.keys() & {"content", "reasoning_content"}) <= 1 for delta in deltas)
    reasons = [chunk["choices"][0]["finish_reason"] for chunk in chunks]
    assert reasons[-1] == "stop" and set(reasons[:-1]) == {None}
    assert last["usage"]["completion_tokens_details"] == {"reasoning_tokens": 15}


async def test_usage_in_every_chunk_counts_the_reasoning_so_far(reasoner):
    cluster = await reasoner("<think>abc")
    body = {"max_tokens": 10, "stream": True, "stream_options": {"include_usage": True, "continuous_usage_stats": True}}
    usages = [chunk["usage"] for chunk in events(await chat(cluster, body))]
    counts = [usage["completion_tokens_details"]["reasoning_tokens"] for usage in usages]
    assert counts == sorted(counts) and counts[-1] == 3
    assert all(max(usage["completion_tokens"] - 7, 0) == count for usage, count in zip(usages, counts, strict=True))


async def test_reasoning_that_is_cut_leaves_no_content(reasoner):
    cluster = await reasoner()
    answer = (await chat(cluster, {"max_tokens": 15})).json()
    [choice] = answer["choices"]
    assert choice["message"]["content"] is None and choice["message"]["reasoning_content"] == "because"
    assert choice["finish_reason"] == "length"
    assert answer["usage"]["completion_tokens_details"] == {"reasoning_tokens": 8}


async def test_a_prompt_that_opens_reasoning_needs_no_marker(reasoner):
    cluster = await reasoner("because\n</think>\n\nYes.", OPENED)
    message = (await chat(cluster, {"max_tokens": 99})).json()["choices"][0]["message"]
    assert (message["reasoning_content"], message["content"]) == ("because", "Yes.")
    cut = (await chat(cluster, {"max_tokens": 7})).json()["choices"][0]["message"]
    assert (cut["reasoning_content"], cut["content"]) == ("because", None)


async def test_every_choice_is_split_and_all_are_counted(reasoner):
    cluster = await reasoner()
    answer = (await chat(cluster, {"max_tokens": 99, "n": 3})).json()
    assert [choice["message"]["content"] for choice in answer["choices"]] == ["Yes. <think>"] * 3
    assert answer["usage"]["completion_tokens_details"] == {"reasoning_tokens": 45}


async def test_reasoning_can_be_left_out_of_the_reply(reasoner):
    cluster = await reasoner()
    answer = (await chat(cluster, {"max_tokens": 99, "include_reasoning": False})).json()
    assert answer["choices"][0]["message"] == {"role": "assistant", "content": "Yes. <think>", "refusal": None}
    assert answer["usage"]["completion_tokens_details"] == {"reasoning_tokens": 15}
    chunks = events(await chat(cluster, {"max_tokens": 99, "include_reasoning": False, "stream": True}))
    assert (joined(chunks, "content"), joined(chunks, "reasoning_content")) == ("Yes. <think>", "")


async def test_logprobs_are_those_of_the_tokens_after_reasoning(reasoner):
    cluster = await reasoner("<think>a</think>bc")
    body = {"max_tokens": 99, "logprobs": True}
    whole = (await chat(cluster, body)).json()["choices"][0]["logprobs"]["content"]
    assert [entry["token"] for entry in whole] == ["b", "c", f"<|{EOS}|>"]
    chunks = events(await chat(cluster, {**body, "stream": True}))
    listed = [choice["logprobs"] for chunk in chunks for choice in chunk["choices"] if choice["logprobs"]]
    assert [entry["token"] for logprobs in listed for entry in logprobs["content"]] == ["b", "c", f"<|{EOS}|>"]


async def test_stop_strings_match_the_whole_text_reasoning_and_markers_included(reasoner):
    cluster = await reasoner()
    message = (await chat(cluster, {"max_tokens": 99, "stop": ["it is"]})).json()["choices"][0]["message"]
    assert (message["reasoning_content"], message["content"]) == ("because ", None)
    message = (await chat(cluster, {"max_tokens": 99, "stop": ["</think>"]})).json()["choices"][0]["message"]
    assert (message["reasoning_content"], message["content"]) == ("because it is", None)


# ---- what a request asks


@pytest.mark.parametrize(
    "off",
    [
        {"reasoning_effort": "none"},
        {"enable_thinking": False},
        {"chat_template_kwargs": {"enable_thinking": False}},
        {"chat_template_kwargs": {"thinking": False}},
    ],
)
async def test_a_template_with_a_switch_closes_reasoning_in_the_prompt(reasoner, off):
    cluster = await reasoner("Yes. </think>")
    answer = (await chat(cluster, {"max_tokens": 99, **off})).json()
    assert answer["choices"][0]["message"] == {"role": "assistant", "content": "Yes. </think>", "refusal": None}
    assert prompt_of(cluster).endswith("<think>\n\n</think>\n\n")
    assert sent(cluster).sampling.thinking is None


async def test_without_a_switch_reasoning_is_closed_by_a_budget_of_none(reasoner):
    cluster = await reasoner("</think>Yes.", OPENED)
    assert (await chat(cluster, {"max_tokens": 99, "reasoning_effort": "none"})).status_code == 200
    thinking = sent(cluster).sampling.thinking
    assert (thinking.start, thinking.end) == (tuple(b"<think>"), tuple(b"</think>"))
    assert (thinking.is_open, thinking.budget) == (True, 0)


@pytest.mark.parametrize("budget", [{"thinking_token_budget": 5}, {"chat_template_kwargs": {"thinking_budget": 5}}])
async def test_a_budget_travels_with_the_markers(reasoner, budget):
    cluster = await reasoner()
    assert (await chat(cluster, {"max_tokens": 99, **budget})).status_code == 200
    thinking = sent(cluster).sampling.thinking
    assert (thinking.start, thinking.end) == (tuple(b"<think>"), tuple(b"</think>"))
    assert (thinking.is_open, thinking.budget) == (False, 5)


async def test_a_grammar_closes_reasoning_whose_marker_is_several_tokens(reasoner):
    """It could not bind in the middle of a token that ends the marker."""
    cluster = await reasoner(template=OPENED)
    body = {"max_tokens": 99, "response_format": {"type": "json_object"}, "thinking_token_budget": 7}
    assert (await chat(cluster, body)).status_code == 200
    sampling = sent(cluster).sampling
    assert sampling.grammar is not None and sampling.thinking.budget == 0


async def test_an_effort_reaches_the_template_that_knows_it(reasoner):
    cluster = await reasoner(template=EFFORT)
    assert (await chat(cluster, {"max_tokens": 99, "reasoning_effort": "high"})).status_code == 200
    assert prompt_of(cluster).startswith("effort high<user>")


async def test_reasoning_of_the_history_reaches_the_template(reasoner):
    cluster = await reasoner()
    past = {"role": "assistant", "content": "4", "reasoning_content": "2+2"}
    messages = [{"role": "user", "content": "2+2?"}, past, {"role": "user", "content": "sure?"}]
    assert (await chat(cluster, {"max_tokens": 99, "messages": messages})).status_code == 200
    assert "<assistant>2+24\n" in prompt_of(cluster)


@pytest.mark.parametrize(
    ("text", "message", "reasoning", "content"),
    [
        (" b</think>c", "<think>a", "b", "c"),
        ("b</think>c", "<think>a</think>", None, "b</think>c"),
        ("<think>b", "a", None, "<think>b"),
    ],
)
async def test_a_continued_message_reasons_only_if_it_had_begun_to(reasoner, text, message, reasoning, content):
    cluster = await reasoner(text, SWITCHED)
    messages = [{"role": "user", "content": "?"}, {"role": "assistant", "content": message}]
    body = {"messages": messages, "continue_final_message": True, "add_generation_prompt": False, "max_tokens": 99}
    got = (await chat(cluster, body)).json()["choices"][0]["message"]
    assert ((got.get("reasoning_content") or "").strip() or None, got["content"]) == (reasoning, content)


@pytest.mark.parametrize(
    ("body", "field"),
    [
        ({"thinking_token_budget": 5}, "thinking_token_budget"),
        ({"chat_template_kwargs": {"thinking_budget": 0}}, "chat_template_kwargs.thinking_budget"),
        ({"reasoning_effort": "low"}, "reasoning_effort"),
        ({"enable_thinking": True}, "enable_thinking"),
        ({"chat_template_kwargs": {"thinking": True}}, "chat_template_kwargs.thinking"),
    ],
)
async def test_a_model_that_does_not_reason_refuses_to(reasoner, body, field):
    cluster = await reasoner(template=None)
    error = (await chat(cluster, body)).json()["error"]
    assert (error["param"], error["code"]) == (field, "unsupported_parameter")


@pytest.mark.parametrize(
    "body",
    [
        {"reasoning_effort": "none"},
        {"enable_thinking": False},
        {"include_reasoning": True},
        {"chat_template_kwargs": {"thinking_budget": -1}},
    ],
)
async def test_a_model_that_does_not_reason_need_not_be_stopped(reasoner, body):
    cluster = await reasoner(template=None)
    answer = await chat(cluster, {"max_tokens": 99, **body})
    assert answer.json()["choices"][0]["message"]["content"] == TEXT
    assert "completion_tokens_details" not in answer.json()["usage"]


@pytest.mark.parametrize(
    ("body", "field"),
    [
        ({"thinking_token_budget": -1}, "thinking_token_budget"),
        ({"chat_template_kwargs": {"thinking_budget": "many"}}, "chat_template_kwargs.thinking_budget"),
        ({"thinking_token_budget": 5, "use_beam_search": True, "best_of": 2}, "thinking_token_budget"),
        ({"reasoning_effort": "extreme"}, "reasoning_effort"),
    ],
)
async def test_what_cannot_be_is_refused_by_name(reasoner, body, field):
    cluster = await reasoner()
    answer = await chat(cluster, body)
    assert (answer.status_code, answer.json()["error"]["param"]) == (400, field)


@pytest.mark.parametrize(("parser", "reasons"), [("none", False), ("mistral", False), ("qwen3", True)])
async def test_the_setting_overrides_the_template(reasoner, parser, reasons):
    cluster = await reasoner(model={"reasoning_parser": parser})
    message = (await chat(cluster, {"max_tokens": 99})).json()["choices"][0]["message"]
    assert ("reasoning_content" in message) == reasons


async def test_an_assumed_block_needs_neither_the_prompt_nor_a_marker(reasoner):
    cluster = await reasoner("because</think>Yes.", template=None, model={"reasoning_parser": "deepseek_r1"})
    message = (await chat(cluster, {"max_tokens": 99})).json()["choices"][0]["message"]
    assert (message["reasoning_content"], message["content"]) == ("because", "Yes.")


async def test_completions_are_raw_text(reasoner):
    cluster = await reasoner()
    assert (await complete(cluster, {"max_tokens": 99})).json()["choices"][0]["text"] == TEXT


async def test_the_official_client_reads_reasoning_and_sends_it_back(reasoner, serve_http):
    cluster = await reasoner()
    messages = [{"role": "user", "content": "Is it?"}]
    url = await serve_http(cluster.app)
    async with openai.AsyncOpenAI(base_url=f"{url}/v1", api_key="none", max_retries=0) as client:
        ask = partial(client.chat.completions.create, model=MODEL, max_tokens=99, reasoning_effort="high")
        answer = await ask(messages=messages)
        message = answer.choices[0].message
        assert (message.reasoning_content, message.content) == ("because it is", "Yes. <think>")
        assert answer.usage.completion_tokens_details.reasoning_tokens == 15
        messages += [message.model_dump(exclude_none=True), {"role": "user", "content": "Sure?"}]
        async with client.chat.completions.stream(
            model=MODEL, max_tokens=99, messages=messages, extra_body={"thinking_token_budget": 50}
        ) as stream:
            final = (await stream.get_final_completion()).choices[0].message
        assert (final.reasoning_content, final.content) == ("because it is", "Yes. <think>")
    assert "<assistant>because it isYes. <think>\n" in prompt_of(cluster)
    assert sent(cluster).sampling.thinking.budget == 50
