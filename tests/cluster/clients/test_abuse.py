"""Requests meant to hurt: grammars that cost too much to compile, and bodies that make no sense.

Who sends one gets a 400 soon; nobody else loses a token. `pytest -s` prints how long the refusals took and what the
other streams' time per token was meanwhile.
"""

import asyncio
import json
import time
from statistics import median

import httpx
import openai
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from tests.checkpoints import chat_checkpoint
from tests.scale import scaled
from tests.small_cluster import served_cluster

pytestmark = [pytest.mark.alone, pytest.mark.timeout(180)]

MESSAGES = [{"role": "user", "content": "Say something."}]
REPLY_S = 3.0  # a refusal takes less than 1 s where nothing else runs; CI's machines are busy
TOKENS, STREAMS = 600, 8


def nested(depth, leaf):
    for _ in range(depth):
        leaf = {"type": "array", "items": leaf, "minItems": 900, "maxItems": 1000}
    return leaf


def doubling(key, depth=40):
    """Every definition refers to the next one twice: 2^depth schemas when written out."""
    two = {f"d{i}": {key: [{"$ref": f"#/$defs/d{i + 1}"}, {"$ref": f"#/$defs/d{i + 1}"}]} for i in range(depth)}
    return {"$defs": two | {f"d{depth}": {"type": "string"}}, "$ref": "#/$defs/d0"}


def schema(one):
    return {"response_format": {"type": "json_schema", "json_schema": {"name": "x", "schema": one, "strict": True}}}


def tool(parameters):
    function = {"name": "f", "parameters": parameters, "strict": True}
    return {"tools": [{"type": "function", "function": function}], "tool_choice": "required"}


def tag(content):
    form = {"type": "tag", "begin": "<a>", "content": content, "end": "</a>"}
    return {"response_format": {"type": "structural_tag", "format": form}}


BOUNDED = {"type": "string", "minLength": 9000, "maxLength": 10_000}
WIDE = {"type": "object", "properties": {f"p{i}": BOUNDED for i in range(400)}, "additionalProperties": False}
DOUBLED = {"$ref": "#/$defs/d0"}
BOMBS = {
    "nested bounded strings": schema(nested(6, BOUNDED)),
    "many bounded strings": schema(WIDE),
    "1 MB of enum": schema({"enum": [f"value {i:06}" * 4 for i in range(23_000)]}),
    "1 MB of properties": schema({"type": "object", "properties": {f"key {i:09}": {} for i in range(45_000)}}),
    "depth": schema(json.loads('{"items":' * 900 + "true" + "}" * 900)),
    "doubling allOf": schema(doubling("allOf")),
    "doubling anyOf": schema(doubling("anyOf")),
    "doubling oneOf": schema(doubling("oneOf")),
    "a reference to itself": schema({"$ref": "#"}),
    "pattern": schema({"type": "string", "pattern": "^((a{1,99}){1,99}){1,99}$"}),
    "exponential regex": {"structured_outputs": {"regex": "(a|b|ab)*(x?){4000}x{4000}"}},
    "repeated regex": {"structured_outputs": {"regex": "(((\\w{1,500}){1,500}){1,500}){1,500}"}},
    "determinised regex": {"structured_outputs": {"regex": "(a|b)*a(a|b){2000}c"}},
    "many choices": {"structured_outputs": {"choice": [f"choice {i}" for i in range(90_000)]}},
    "ambiguous grammar": {"structured_outputs": {"grammar": 'start: start start | "a" start "a" | "a"+'}},
    "many rules": {
        "structured_outputs": {
            "grammar": "start: r0\n" + "".join(f"r{i}: r{i + 1} r{i + 1}\n" for i in range(5000)) + 'r5000: "a"'
        }
    },
    "tag with bounded strings": tag({"type": "json_schema", "json_schema": nested(5, BOUNDED)}),
    "tag with a doubling schema": tag({"type": "json_schema", "json_schema": doubling("anyOf")}),
    "tag with a regex": tag({"type": "regex", "pattern": "((a{1,999}){1,999}){1,999}"}),
    "tool with bounded strings": tool({"type": "object", "properties": {"a": nested(5, BOUNDED)}}),
    "tool with a doubling schema": tool(doubling("anyOf") | {"type": "object", "properties": {"a": DOUBLED}}),
}


@pytest.fixture(scope="module")
def url(tmp_path_factory):
    with served_cluster(chat_checkpoint("qwen2.5", tmp_path_factory.mktemp("models") / "qwen2.5")) as url:
        yield url


async def plain_stream(client, seed):
    """A stream of TOKENS tokens; its seconds per token."""
    stream = await client.chat.completions.create(
        model="tiny",
        messages=MESSAGES,
        max_tokens=TOKENS,
        seed=seed,
        stream=True,
        stream_options={"include_usage": True},
        extra_body={"ignore_eos": True},
    )
    times, usage, reason = [], None, None
    async for chunk in stream:
        times.append(time.perf_counter())
        usage = chunk.usage or usage
        reason = next((choice.finish_reason for choice in chunk.choices if choice.finish_reason), reason)
    assert (usage.completion_tokens, reason) == (TOKENS, "length")
    return (times[-1] - times[0]) / TOKENS


async def bomb(http, body):
    start_s = time.perf_counter()
    answer = await http.post("/chat/completions", json={"model": "tiny", "messages": MESSAGES, "max_tokens": 40} | body)
    return answer.status_code, time.perf_counter() - start_s, answer.text


async def test_grammars_that_cost_too_much_hurt_only_who_sends_them(url):
    async with (
        openai.AsyncOpenAI(base_url=url, api_key="none", max_retries=0, timeout=120) as client,
        httpx.AsyncClient(base_url=url, timeout=60) as http,
    ):
        for body in (schema({"type": "integer"}), tag({"type": "regex", "pattern": "a"})):  # loads the libraries
            assert (await bomb(http, body))[0] == 200
        await asyncio.gather(*(plain_stream(client, seed) for seed in range(STREAMS)))
        before = await asyncio.gather(*(plain_stream(client, seed) for seed in range(STREAMS)))
        async with asyncio.TaskGroup() as group:
            streams = [group.create_task(plain_stream(client, seed)) for seed in range(STREAMS)]
            await asyncio.sleep(0.2)
            alone = {name: await bomb(http, body) for name, body in BOMBS.items()}
            together = await asyncio.gather(*(bomb(http, body) for body in BOMBS.values()))
            still_running = sum(not stream.done() for stream in streams)
        during = [stream.result() for stream in streams]
    for name, (status, reply_s, text) in alone.items():
        print(f"{name:30} {status} after {reply_s:.2f} s: {text[:120]}")
    print(f"{len(together)} at once: the last after {max(reply_s for _, reply_s, _ in together):.2f} s")
    print(
        f"per token of {STREAMS} plain streams: {1e3 * median(before):.2f} ms, meanwhile {1e3 * median(during):.2f} ms"
    )
    print(f"{still_running} streams were still running at the end")
    slow = {name: reply_s for name, (_, reply_s, _) in alone.items() if reply_s > REPLY_S}
    assert not slow
    assert {status for status, _, _ in [*alone.values(), *together]} <= {200, 400, 413, 429}
    for name in ("1 MB of enum", "1 MB of properties", "depth", "exponential regex", "repeated regex", "many choices"):
        assert alone[name][0] in (400, 413), (name, alone[name])


SCALARS = (
    st.none()
    | st.booleans()
    | st.integers(-5, 5)
    | st.floats(allow_nan=False, allow_infinity=False)
    | st.text(max_size=6)
)
WORDS = st.sampled_from(
    (
        "type",
        "json_schema",
        "json_object",
        "schema",
        "name",
        "function",
        "parameters",
        "strict",
        "object",
        "string",
        "properties",
        "required",
        "anyOf",
        "$ref",
        "#",
        "auto",
        "none",
        "regex",
        "choice",
        "grammar",
        "structural_tag",
        "format",
        "begin",
        "end",
        "triggers",
        "tags",
        "content",
        "enum",
        "items",
        "pattern",
        "[",
        "(",
        "ebnf",
        "json",
    )
)
JSON = st.recursive(
    SCALARS | WORDS,
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(WORDS | st.text(max_size=3), inner, max_size=4),
    max_leaves=12,
)
FIELDS = (
    "response_format",
    "tools",
    "tool_choice",
    "parallel_tool_calls",
    "structured_outputs",
    "guided_json",
    "guided_regex",
    "guided_choice",
    "regex",
    "ebnf",
    "structural_tag",
    "logit_bias",
    "bad_words",
    "allowed_token_ids",
    "chat_template_kwargs",
    "reasoning_effort",
    "thinking_token_budget",
    "truncate_prompt_tokens",
    "prompt_logprobs",
    "messages",
)
SHAPED = st.fixed_dictionaries(
    {"type": st.just("json_schema"), "json_schema": st.fixed_dictionaries({"name": st.just("x"), "schema": JSON})}
)
TOOL = st.fixed_dictionaries(
    {"type": st.just("function"), "function": st.fixed_dictionaries({"name": st.just("f"), "parameters": JSON})}
)
BODIES = st.one_of(
    st.dictionaries(st.sampled_from(FIELDS), JSON, min_size=1, max_size=2),
    st.fixed_dictionaries({"response_format": SHAPED}),
    st.fixed_dictionaries({"tools": st.lists(TOOL, min_size=1, max_size=2), "tool_choice": WORDS | JSON}),
    st.fixed_dictionaries({"tools": st.lists(TOOL, min_size=1, max_size=2), "tool_choice": st.just("required")}),
)


@settings(max_examples=scaled(600), deadline=None, suppress_health_check=list(HealthCheck))
@given(body=BODIES)
def test_no_body_makes_the_server_fail(body, url):
    answer = httpx.post(
        f"{url}/chat/completions", json={"model": "tiny", "messages": MESSAGES, "max_tokens": 3} | body, timeout=20
    )
    assert answer.status_code < 500, (body, answer.text)
    if answer.status_code != 200:
        assert answer.json()["error"]["message"]
