"""Tools in chat, over fake workers: prompts, grammars for the workers, replies whole and streamed, clients."""

import json

import httpx
import openai
import pytest
from pydantic import BaseModel

from kvrelay.serve.text.chat_template import ChatTemplate
from tests.fakes import ByteCodec, scripted
from tests.serve.api.test_api import chat, events
from tests.serve.api.test_errors import error_of
from tests.serve.api.test_reasoning_replies import joined, prompt_of, sent
from tests.serve.conftest import MODEL

QWEN = """{%- if tools %}<tools>{% for tool in tools %}{{ tool | tojson }}{% endfor %}</tools>{% endif %}
{%- for message in messages %}<{{ message.role }}>{{ message.content }}
{%- for call in message.tool_calls or [] %}<tool_call>
{"name": "{{ call.function.name }}", "arguments": {{ call.function.arguments | tojson }}}
</tool_call>{% endfor %}
{% endfor %}{% if add_generation_prompt %}<assistant>{% endif %}"""
PLAIN = "{%- for message in messages %}<{{ message.role }}>{{ message.content }}\n{% endfor %}<assistant>"
MISTRAL = "{% if tools %}{{ tools | tojson }}{% endif %}[TOOL_CALLS][ARGS]" + PLAIN
WEATHER = {
    "type": "function",
    "function": {
        "name": "get_weather",
        "description": "The weather of a city.",
        "parameters": {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]},
    },
}
NOW = {"type": "function", "function": {"name": "now"}}
NAMED = {"type": "function", "function": {"name": "now"}}
CALL = '<tool_call>\n{"name": "get_weather", "arguments": {"city": "東京 }"}}\n</tool_call>'
CALLS = f'Let me see.\n\n{CALL}\n<tool_call>\n{{"name": "now", "arguments": {{}}}}\n</tool_call>'


def with_tools(source, response_template=None):
    """A codec of bytes with this chat template."""
    template = ChatTemplate(source, {})

    class Codec(ByteCodec):
        def chat_text(self, messages, *, add_generation_prompt=True, **variables):
            return template.render(messages, add_generation_prompt=add_generation_prompt, **variables)

    Codec.template = Codec.tool_template = template
    Codec.response_template, Codec.max_model_len = response_template, 4096
    return Codec()


@pytest.fixture
def caller(make_cluster):
    """`await caller(text, template)`: a cluster whose model says the text, and then ends."""

    async def make(text=CALLS, template=QWEN, response_template=None, **sections):
        script = scripted(text, then_eos=True)
        codec = with_tools(template, response_template)
        return await make_cluster(script=script, codec=codec, info={"max_model_len": 4096}, **sections)

    return make


def body(**fields):
    return {"max_tokens": 400, "tools": [WEATHER, NOW], **fields}


async def test_calls_are_an_answers_tool_calls(caller):
    cluster = await caller()
    choice = (await chat(cluster, body())).json()["choices"][0]
    assert choice["finish_reason"] == "tool_calls"
    message = choice["message"]
    assert message["content"] == "Let me see."
    assert [call["type"] for call in message["tool_calls"]] == ["function", "function"]
    assert len({call["id"] for call in message["tool_calls"]}) == 2
    assert message["tool_calls"][0]["function"] == {"name": "get_weather", "arguments": '{"city": "東京 }"}'}
    assert message["tool_calls"][1]["function"] == {"name": "now", "arguments": "{}"}
    assert "index" not in message["tool_calls"][0]
    await cluster.all_released()


async def test_content_is_null_where_there_are_only_calls(caller):
    message = (await chat(await caller(CALL), body())).json()["choices"][0]["message"]
    assert message["content"] is None
    assert len(message["tool_calls"]) == 1


async def test_no_call_is_content(caller):
    choice = (await chat(await caller("Hello <tool_call>{no"), body())).json()["choices"][0]
    assert choice["message"] == {"role": "assistant", "content": "Hello <tool_call>{no", "refusal": None}
    assert choice["finish_reason"] == "stop"


async def test_a_stream_has_openais_deltas(caller):
    chunks = events(await chat(await caller(), body(stream=True)))
    deltas = [choice["delta"] for chunk in chunks for choice in chunk["choices"]]
    assert deltas[0] == {"role": "assistant", "content": ""}
    assert all("role" not in delta for delta in deltas[1:])
    assert joined(chunks, "content") == "Let me see."
    calls = [call for delta in deltas for call in delta.get("tool_calls", [])]
    begun = [call for call in calls if "id" in call]
    assert [(call["index"], call["type"], call["function"]) for call in begun] == [
        (0, "function", {"name": "get_weather", "arguments": ""}),
        (1, "function", {"name": "now", "arguments": ""}),
    ]
    rest = [call for call in calls if "id" not in call]
    assert all(call.keys() == {"index", "function"} and call["function"].keys() == {"arguments"} for call in rest)
    assert "".join(call["function"]["arguments"] for call in rest if call["index"] == 0) == '{"city": "東京 }"}'
    assert len(rest) > 5
    assert [choice["finish_reason"] for chunk in chunks for choice in chunk["choices"]][-1] == "tool_calls"


async def test_a_call_that_is_cut_off_ends_with_length(caller):
    choice = (await chat(await caller(CALL), body(max_tokens=55))).json()["choices"][0]
    assert choice["finish_reason"] == "length"
    assert '{"city": "東京 }"}'.startswith(choice["message"]["tool_calls"][0]["function"]["arguments"])


async def test_one_call_without_parallel_calls(caller):
    message = (await chat(await caller(), body(parallel_tool_calls=False))).json()["choices"][0]["message"]
    assert len(message["tool_calls"]) == 1


async def test_choices_and_usage_are_as_ever(caller):
    answer = (await chat(await caller(), body(n=2, logprobs=True))).json()
    assert [len(choice["message"]["tool_calls"]) for choice in answer["choices"]] == [2, 2]
    assert answer["usage"]["completion_tokens"] == 2 * (len(CALLS.encode()) + 1)


# ---- prompts


async def test_the_template_shows_tools_calls_and_results(caller):
    cluster = await caller()
    history = [
        {"role": "user", "content": "hi"},
        {"role": "assistant", "content": None, "tool_calls": [
            {"id": "call_1", "type": "function", "function": {"name": "now", "arguments": '{"a": 1}'}},
        ]},
        {"role": "tool", "tool_call_id": "call_1", "content": [{"type": "text", "text": "noon"}]},
    ]  # fmt: skip
    await chat(cluster, body(messages=history))
    shown = prompt_of(cluster)
    assert shown.startswith('<tools>{"type": "function", "function": {"name": "get_weather", "description": "The weat')
    assert '{"name": "now", "arguments": {"a": 1}}' in shown
    assert "<tool>noon" in shown
    assert '"parameters": {"type": "object", "properties": {}}' in shown


async def test_with_none_there_are_no_tools(caller):
    cluster = await caller()
    message = (await chat(cluster, body(tool_choice="none"))).json()["choices"][0]["message"]
    assert message["content"] == CALLS
    assert "tool_calls" not in message
    assert "<tools>" not in prompt_of(cluster)
    assert sent(cluster).sampling.grammar is None


async def test_a_template_without_tools_gets_them_in_the_first_message(caller):
    cluster = await caller(template=PLAIN)
    history = [
        {"role": "user", "content": "hi"},
        {"role": "assistant", "content": "Well.", "tool_calls": [
            {"id": "call_1", "type": "function", "function": {"name": "now", "arguments": "{}"}},
            {"id": "call_2", "type": "function", "function": {"name": "now", "arguments": "{}"}},
        ]},
        {"role": "tool", "tool_call_id": "call_1", "content": "noon"},
        {"role": "tool", "tool_call_id": "call_2", "content": "one"},
    ]  # fmt: skip
    answer = (await chat(cluster, body(messages=history))).json()
    assert len(answer["choices"][0]["message"]["tool_calls"]) == 2
    shown = prompt_of(cluster)
    assert shown.startswith("<user>These functions can be called:")
    assert '{"name": "get_weather", "description": "The weather of a city.", "parameters": {' in shown
    call = '<tool_call>\n{"name": "now", "arguments": {}}\n</tool_call>'
    assert f"hi\n<assistant>Well.\n{call}\n{call}\n<user><tool_response>\nnoon\n</tool_response>\n<tool_res" in shown
    system = [{"role": "system", "content": "Be brief."}, *history[:1]]
    await chat(cluster, body(messages=system))
    assert prompt_of(cluster).startswith("<system>Be brief.\n\nThese functions")


# ---- what is forced


def tag_of(cluster):
    grammar = sent(cluster).sampling.grammar
    assert grammar.kind == "structural_tag"
    assert cluster.checked[-1] == grammar
    return json.loads(grammar.text)["format"]


async def test_auto_is_free_unless_a_tool_is_strict(caller):
    cluster = await caller()
    await chat(cluster, body(tool_choice="auto"))
    assert sent(cluster).sampling.grammar is None
    strict = {"type": "function", "function": WEATHER["function"] | {"strict": True}}
    await chat(cluster, body(tools=[strict, NOW]))
    tag = tag_of(cluster)
    assert (tag["type"], tag["triggers"]) == ("triggered_tags", ["<tool_call>"])
    assert [one["content"]["json_schema"].get("required") for one in tag["tags"]] == [["city"], None]


async def test_required_and_named_calls_have_a_grammar(caller):
    cluster = await caller()
    required = (await chat(cluster, body(tool_choice="required"))).json()["choices"][0]
    assert required["finish_reason"] == "tool_calls"
    calls = tag_of(cluster)["elements"][1]
    assert (calls["at_least_one"], calls["stop_after_first"], len(calls["tags"])) == (True, False, 2)
    named = (await chat(cluster, body(tool_choice=NAMED))).json()["choices"][0]
    assert named["finish_reason"] == "stop"
    assert len(named["message"]["tool_calls"]) == 1
    calls = tag_of(cluster)["elements"][1]
    assert [one["begin"] for one in calls["tags"]] == ['<tool_call>\n{"name": "now", "arguments": ']
    assert calls["stop_after_first"]
    allowed = {"type": "allowed_tools", "allowed_tools": {"mode": "auto", "tools": [NAMED]}}
    await chat(cluster, body(tool_choice=allowed))
    assert [one["begin"] for one in tag_of(cluster)["tags"]] == ['<tool_call>\n{"name": "now", "arguments": ']


async def test_an_answers_format_and_tools_go_together(caller):
    cluster = await caller()
    answer = {"type": "json_schema", "json_schema": {"name": "x", "schema": {"type": "object", "properties": {}}}}
    await chat(cluster, body(response_format=answer))
    assert [one["type"] for one in tag_of(cluster)["elements"]] == ["sequence", "json_schema"]
    await chat(cluster, body(response_format=answer, tool_choice="required"))
    assert tag_of(cluster)["type"] == "sequence"
    error_of(await chat(cluster, body(regex="a")), 400, "tools")


async def test_what_cannot_be_enforced_is_refused_by_name(caller):
    cluster = await caller()
    loose = {"type": "function", "function": {"name": "f", "parameters": {"type": "object", "title": "refuse me"}}}
    assert (await chat(cluster, body(tools=[NOW, loose]))).status_code == 200
    for choice in ("required", {"type": "function", "function": {"name": "f"}}):
        response = await chat(cluster, body(tools=[NOW, loose], tool_choice=choice))
        error = error_of(response, 400, "tools[1].function.parameters", "invalid_grammar")
        assert "no such type" in error["message"] and "'f'" in error["message"]
    array = {"type": "function", "function": {"name": "g", "parameters": {"type": "array"}}}
    response = await chat(cluster, body(tools=[array], tool_choice="required"))
    error_of(response, 400, "tools[0].function.parameters", "invalid_grammar")
    answer = {"type": "json_schema", "json_schema": {"name": "x", "schema": {"title": "refuse me"}}}
    error_of(await chat(cluster, body(response_format=answer)), 400, code="invalid_grammar")


async def test_tools_can_be_switched_off_and_formats_named(caller):
    cluster = await caller(model={"tool_parser": "none"})
    error_of(await chat(cluster, body()), 400, "tools", "unsupported_parameter")
    text = '[TOOL_CALLS]now[ARGS]{"a": 1}'
    cluster = await caller(text, MISTRAL)
    (call,) = (await chat(cluster, body())).json()["choices"][0]["message"]["tool_calls"]
    assert call["function"] == {"name": "now", "arguments": '{"a": 1}'}
    assert len(call["id"]) == 9
    cluster = await caller(text, QWEN, model={"tool_parser": "mistral_args"})
    assert len((await chat(cluster, body())).json()["choices"][0]["message"]["tool_calls"]) == 1


async def test_a_template_with_tools_in_an_unknown_form_is_said(caller):
    cluster = await caller(template="{{ tools | tojson if tools }}" + PLAIN)
    error = error_of(await chat(cluster, body()), 400, "tools", "unsupported_parameter")
    assert "model.tool_parser" in error["message"]


async def test_a_checkpoints_own_description_of_outputs_is_used(caller):
    own = {
        "defaults": {"role": "assistant"},
        "start_anchor": "<assistant>",
        "fields": {
            "content": {"content": "text"},
            "tool_calls": {
                "open": "((", "close": "))", "content": "json", "repeats": True,
                "transform": {"type": "function", "function": {"name": "{content.n}", "arguments": "{content.a}"}},
            },
        },
    }  # fmt: skip
    text = 'Well. (({"n": "now", "a": {"x": 1}}))'
    cluster = await caller(text, "{{ tools | tojson if tools }}" + PLAIN, own)
    message = (await chat(cluster, body())).json()["choices"][0]["message"]
    assert message["content"].strip() == "Well."
    assert message["tool_calls"][0]["function"] == {"name": "now", "arguments": '{"x": 1}'}
    cluster = await caller("Well. ((no json)) more", "{{ tools | tojson if tools }}" + PLAIN, own)
    message = (await chat(cluster, body())).json()["choices"][0]["message"]
    assert "no json" in message["content"]


async def test_functions_of_before_there_were_tools(caller):
    cluster = await caller(CALL + CALL)
    old = {"max_tokens": 400, "functions": [WEATHER["function"], NOW["function"]]}
    choice = (await chat(cluster, old)).json()["choices"][0]
    assert choice["finish_reason"] == "function_call"
    assert choice["message"]["function_call"] == {"name": "get_weather", "arguments": '{"city": "東京 }"}'}
    assert "tool_calls" not in choice["message"]
    assert "<tools>" in prompt_of(cluster)
    chunks = events(await chat(cluster, old | {"stream": True, "function_call": {"name": "get_weather"}}))
    calls = [c["delta"]["function_call"] for chunk in chunks for c in chunk["choices"] if "function_call" in c["delta"]]
    assert calls[0] == {"name": "get_weather", "arguments": ""}
    assert "".join(call["arguments"] for call in calls) == '{"city": "東京 }"}'
    assert len(tag_of(cluster)["elements"][1]["tags"]) == 1
    await chat(cluster, old | {"function_call": "none"})
    assert "<tools>" not in prompt_of(cluster)


# ---- clients


class GetWeather(BaseModel):
    city: str


@pytest.fixture
async def client(caller, serve_http):
    text = '<tool_call>\n{"name": "GetWeather", "arguments": {"city": "Paris"}}\n</tool_call>'
    cluster = await caller(text)
    async with openai.AsyncOpenAI(base_url=f"{await serve_http(cluster.app)}/v1", api_key="x", max_retries=0) as one:
        yield one
    await cluster.all_released()


async def test_openais_client_parses_calls(client):
    asked = {"model": MODEL, "messages": [{"role": "user", "content": "hi"}], "max_tokens": 100}
    tools = [openai.pydantic_function_tool(GetWeather)]
    answer = await client.chat.completions.parse(**asked, tools=tools)
    (call,) = answer.choices[0].message.tool_calls
    assert call.function.parsed_arguments == GetWeather(city="Paris")
    async with client.chat.completions.stream(**asked, tools=tools, tool_choice="required") as stream:
        kinds = [event.type async for event in stream]
        final = await stream.get_final_completion()
    assert "tool_calls.function.arguments.delta" in kinds
    assert kinds.count("tool_calls.function.arguments.done") == 1
    (call,) = final.choices[0].message.tool_calls
    assert call.function.parsed_arguments == GetWeather(city="Paris")


async def test_langchain_binds_tools_and_reads_structured_answers(client):
    from langchain_openai import ChatOpenAI

    async with httpx.AsyncClient() as http:
        model = ChatOpenAI(
            model=MODEL,
            base_url=str(client.base_url),
            api_key="x",
            max_retries=0,
            max_tokens=100,
            http_async_client=http,
        )
        (call,) = (await model.bind_tools([GetWeather]).ainvoke("hi")).tool_calls
        assert (call["name"], call["args"]) == ("GetWeather", {"city": "Paris"})
        structured = model.with_structured_output(GetWeather, method="function_calling")
        assert await structured.ainvoke("hi") == GetWeather(city="Paris")
