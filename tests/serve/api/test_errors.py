"""Wrong input and faults: the right status and OpenAI's error object, naming the field; and nothing is held after."""

import asyncio
import json
import threading

import msgspec
import pytest

from kvrelay.plane import messages as wire
from kvrelay.serve.api.endpoint import LEAST_BODY_LIMIT_BYTES
from kvrelay.serve.text import tokenising
from kvrelay.types import Role
from tests.fakes import ByteCodec, FakeWorker
from tests.serve.conftest import MODEL

CHAT = {"model": MODEL, "messages": [{"role": "user", "content": "hi"}], "max_tokens": 8}
COMPLETION = {"model": MODEL, "prompt": "hello", "max_tokens": 8}


def error_of(response, status, param=None, code=None):
    """The error object, after checking its form."""
    assert response.status_code == status, response.text
    assert response.headers["content-type"] == "application/json"
    body = response.json()
    assert body.keys() == {"error"}
    error = body["error"]
    assert error.keys() == {"message", "type", "param", "code"}
    assert error["message"] and error["type"]
    if param is not None:
        assert error["param"] == param
    if code is not None:
        assert error["code"] == code
    return error


@pytest.mark.parametrize(
    ("changes", "param"),
    [
        ({"messages": []}, "messages"),
        ({"messages": "hi"}, "messages"),
        ({"messages": [{"content": "hi"}]}, "messages[0].role"),
        ({"messages": [{"role": "robot", "content": "hi"}]}, "messages[0].role"),
        ({"messages": [{"role": "user"}]}, "messages[0].content"),
        ({"messages": [{"role": "user", "content": 5}]}, "messages[0].content"),
        ({"messages": [{"role": "user", "content": [{"type": "image_url"}]}]}, "messages[0].content[0].type"),
        ({"max_tokens": "5"}, "max_tokens"),
        ({"max_tokens": 1.5}, "max_tokens"),
        ({"max_tokens": True}, "max_tokens"),
        ({"max_tokens": -1}, "max_tokens"),
        ({"max_tokens": 0}, "max_tokens"),
        ({"max_tokens": 10**6}, "max_tokens"),
        ({"max_tokens": 10**40}, "max_tokens"),
        ({"max_completion_tokens": 10**6}, "max_completion_tokens"),
        ({"min_tokens": 9}, "min_tokens"),
        ({"temperature": -0.1}, "temperature"),
        ({"temperature": "hot"}, "temperature"),
        ({"top_p": 1.1}, "top_p"),
        ({"top_k": -2}, "top_k"),
        ({"min_p": 2}, "min_p"),
        ({"repetition_penalty": 0}, "repetition_penalty"),
        ({"presence_penalty": 3}, "presence_penalty"),
        ({"frequency_penalty": -3}, "frequency_penalty"),
        ({"n": 0}, "n"),
        ({"n": 17}, "n"),
        ({"seed": 2**64}, "seed"),
        ({"stop": ""}, "stop[0]"),
        ({"stop": ["a"] * 17}, "stop"),
        ({"stop": [1]}, "stop[0]"),
        ({"stop_token_ids": [258]}, "stop_token_ids"),
        ({"logit_bias": {"x": 1}}, "logit_bias"),
        ({"logit_bias": {"258": 1}}, "logit_bias"),
        ({"logit_bias": {"1": 101}}, None),
        ({"logprobs": 1}, "logprobs"),
        ({"top_logprobs": 2}, "top_logprobs"),
        ({"logprobs": True, "top_logprobs": 21}, "top_logprobs"),
        ({"stream": "yes"}, "stream"),
        ({"stream_options": {"include_usage": True}}, "stream_options"),
        ({"tools": [{"type": "function", "function": {"name": "f"}}]}, "tools"),
        ({"functions": [{"name": "f"}], "tools": [{"type": "function", "function": {"name": "f"}}]}, "functions"),
        ({"best_of": 3}, "best_of"),
        ({"n": 3, "best_of": 2}, "best_of"),
        ({"length_penalty": 1.0}, "length_penalty"),
        ({"use_beam_search": True, "n": 17}, "n"),
        ({"use_beam_search": True, "n": 2, "stream": True}, "stream"),
        ({"use_beam_search": True, "n": 2, "top_p": 0.5}, "top_p"),
        ({"use_beam_search": True, "n": 2, "stop": ["x"]}, "stop"),
        ({"use_beam_search": True, "early_stopping": "sometimes"}, "early_stopping"),
        ({"tool_choice": "required"}, "tool_choice"),
        ({"function_call": {"name": "f"}}, "function_call"),
        ({"chat_template": "{{ messages }}"}, "chat_template"),
        ({"audio": {"voice": "x"}}, "audio"),
    ],
)
async def test_a_wrong_chat_field_is_named(make_cluster, changes, param):
    cluster = await make_cluster()
    error_of(await cluster.client.post("/v1/chat/completions", json=CHAT | changes), 400, param)
    assert [worker.count(wire.Reserve) + worker.count(wire.Prefill) for worker in cluster.workers] == [0, 0]


@pytest.mark.parametrize(
    "prompt",
    [
        "",
        [],
        [[]],
        [""],
        ["a", 1],
        [1, "a"],
        [1.5],
        [True],
        [-1],
        [258],
        5,
        None,
        {"a": 1},
        ["a"] * 65,
        [[1], "a", [None]],
    ],
)
async def test_a_wrong_prompt_is_refused(make_cluster, prompt):
    cluster = await make_cluster()
    error_of(await cluster.client.post("/v1/completions", json=COMPLETION | {"prompt": prompt}), 400, "prompt")


@pytest.mark.parametrize(
    ("changes", "param"),
    [({"logprobs": 21}, "logprobs"), ({"logprobs": True}, "logprobs"), ({"suffix": "x"}, "suffix")],
)
async def test_a_wrong_completion_field_is_named(make_cluster, changes, param):
    cluster = await make_cluster()
    error_of(await cluster.client.post("/v1/completions", json=COMPLETION | changes), 400, param)


async def test_a_missing_field_is_named(make_cluster):
    cluster = await make_cluster()
    error_of(await cluster.client.post("/v1/completions", json={"model": MODEL}), 400, "prompt", "missing")
    error_of(await cluster.client.post("/v1/chat/completions", json={"model": MODEL}), 400, "messages", "missing")


@pytest.mark.parametrize("value", ["NaN", "Infinity", "-Infinity", "1e999"])
async def test_numbers_must_be_finite(make_cluster, value):
    cluster = await make_cluster()
    body = json.dumps(COMPLETION).replace("}", f', "temperature": {value}}}')
    response = await cluster.client.post("/v1/completions", content=body, headers={"content-type": "application/json"})
    error_of(response, 400)


@pytest.mark.parametrize(
    "body", [b"", b"{", b"[]", b'"x"', b"null", b'{"prompt": "\xff\xfe"}', b'{"prompt": "\\ud800"}', b"[" * 5000]
)
async def test_a_malformed_body_is_refused(make_cluster, body):
    cluster = await make_cluster()
    response = await cluster.client.post("/v1/completions", content=body, headers={"content-type": "application/json"})
    error_of(response, 400)


@pytest.mark.parametrize("content_type", [None, "text/plain", "application/x-www-form-urlencoded"])
async def test_the_content_type_must_be_json(make_cluster, content_type):
    cluster = await make_cluster()
    headers = {"content-type": content_type} if content_type else {}
    response = await cluster.client.post("/v1/completions", content=json.dumps(COMPLETION).encode(), headers=headers)
    assert "application/json" in error_of(response, 400)["message"]


async def test_a_huge_body_is_refused_while_it_is_read(make_cluster):
    cluster = await make_cluster()
    sent = 0

    async def chunks():
        nonlocal sent
        for _ in range(640):  # 40 MB, without a length announced
            sent += 1 << 16
            yield b" " * (1 << 16)

    headers = {"content-type": "application/json"}
    error_of(await cluster.client.post("/v1/completions", content=b" " * 40_000_000, headers=headers), 413)
    error_of(
        await cluster.client.post("/v1/completions", content=chunks(), headers=headers), 413, code="body_too_large"
    )
    assert sent <= LEAST_BODY_LIMIT_BYTES + (2 << 20)


async def test_unknown_models_routes_and_methods(make_cluster):
    cluster = await make_cluster()
    client = cluster.client
    error_of(
        await client.post("/v1/completions", json=COMPLETION | {"model": "gpt-9"}), 404, "model", "model_not_found"
    )
    error_of(await client.get("/v1/models/gpt-9"), 404, "model", "model_not_found")
    error_of(await client.get("/v1/nothing"), 404)
    response = await client.get("/v1/completions")
    error_of(response, 405)
    assert response.headers["allow"]
    error_of(await client.delete("/v1/models"), 405)


async def test_a_prompt_longer_than_the_context_is_refused(make_cluster):
    cluster = await make_cluster()
    response = await cluster.client.post("/v1/completions", json=COMPLETION | {"prompt": "x" * 600})
    error_of(response, 400, "prompt", "context_length_exceeded")
    # the words by which litellm knows it, and raises ContextWindowExceededError
    assert "this model's maximum context length is 512 tokens" in response.json()["error"]["message"]
    messages = [{"role": "user", "content": "x" * 600}]
    response = await cluster.client.post("/v1/chat/completions", json=CHAT | {"messages": messages})
    error_of(response, 400, "messages", "context_length_exceeded")


@pytest.mark.parametrize("path", ["/v1/chat/completions", "/v1/completions", "/v1/kv/prefetch"])
async def test_json_that_is_nested_too_deep_is_the_clients_fault(make_cluster, path):
    cluster = await make_cluster()
    deep = b'{"model": "m", "messages": ' + b"[" * 100_000 + b"]" * 100_000 + b"}"
    response = await cluster.client.post(path, content=deep, headers={"content-type": "application/json"})
    error_of(response, 400, code="invalid_json")


CALL = {"function": {"name": "f"}}


@pytest.mark.parametrize(
    "messages",
    [
        [{"role": "user", "content": "x"}] * 8193,
        [{"role": "user", "content": [{"type": "text", "text": "x"}] * 8192}],
        [{"role": "assistant", "content": "x", "tool_calls": [CALL] * 4096}] * 2,
    ],
    ids=["messages", "parts", "calls"],
)
async def test_many_messages_parts_and_calls_are_refused_by_their_number_before_each_is_checked(make_cluster, messages):
    cluster = await make_cluster()
    for path in ("/v1/chat/completions", "/v1/kv/prefetch"):
        response = await cluster.client.post(path, json=CHAT | {"messages": messages})
        assert "at most 8192" in error_of(response, 400, "messages", "invalid_value")["message"]
    fewer = [{"role": "user", "content": "{" * 9000}]  # braces in a text are no messages
    response = await cluster.client.post("/v1/chat/completions", json=CHAT | {"messages": fewer})
    error_of(response, 400, "messages", "context_length_exceeded")


async def test_of_a_text_far_too_long_only_the_beginning_is_tokenised(make_cluster):
    codec, sizes = ByteCodec(), []
    codec.encode = lambda text, **how: sizes.append(len(text)) or ByteCodec.encode(codec, text, **how)
    cluster = await make_cluster(codec=codec)
    response = await cluster.client.post("/v1/completions", json=COMPLETION | {"prompt": "word " * 800_000})
    error = error_of(response, 400, "prompt", "context_length_exceeded")
    assert sum(sizes) < 8000 and f"the prompt has at least {sum(sizes)}" in error["message"]
    kept = COMPLETION | {"prompt": "word " * 20_000, "truncate_prompt_tokens": 8}
    assert (await cluster.client.post("/v1/completions", json=kept)).json()["usage"]["prompt_tokens"] == 8


async def test_more_text_than_is_tokenised_at_once_is_429(make_cluster, monkeypatch):
    monkeypatch.setattr(tokenising, "THREADS", tokenising.TextThreads(max_chars=30_000))
    codec, go = ByteCodec(), threading.Event()
    codec.encode = lambda text, **how: go.wait(30) and ByteCodec.encode(codec, text, **how)
    cluster = await make_cluster(codec=codec)
    asking = [
        asyncio.create_task(cluster.client.post("/v1/completions", json=COMPLETION | {"prompt": "x" * 10_000}))
        for _ in range(4)
    ]
    first, _ = await asyncio.wait(asking, return_when=asyncio.FIRST_COMPLETED)
    go.set()
    error_of(first.pop().result(), 429, code="overloaded")
    assert sorted([(await one).status_code for one in asking]) == [400, 400, 400, 429]
    assert (await cluster.client.post("/v1/completions", json=COMPLETION)).status_code == 200


async def test_the_smallest_worker_bounds_the_context(make_cluster):
    cluster = await make_cluster()
    small = FakeWorker("d1", Role.DECODE, max_model_len=64)
    cluster.decode.append(small)
    members = [link.member for link in cluster.dispatcher.links.members()]
    cluster.dispatcher.workers.set_members([*members, await small.start()])
    async with asyncio.timeout(10):
        await cluster.dispatcher.workers.wait_for(lambda d: len(d.live_workers()) == 3)
    response = await cluster.client.post("/v1/completions", json=COMPLETION | {"prompt": "x" * 70})
    error_of(response, 400, "prompt", "context_length_exceeded")


async def test_a_wrong_header_is_named(make_cluster):
    cluster = await make_cluster()
    response = await cluster.client.post("/v1/completions", json=COMPLETION, headers={"x-kvrelay-prefill": "moon"})
    error_of(response, 400, "x-kvrelay-prefill")


async def test_an_api_key_is_asked_for_when_set(make_cluster):
    cluster = await make_cluster(serve={"api_key": "s3cret"})
    client = cluster.client
    error_of(await client.get("/v1/models"), 401, code="invalid_api_key")
    error_of(await client.post("/v1/completions", json=COMPLETION, headers={"authorization": "Bearer no"}), 401)
    assert (await client.get("/v1/models", headers={"authorization": "bearer s3cret"})).status_code == 200
    right = {"authorization": "Bearer s3cret"}
    assert (await client.post("/v1/completions", json=COMPLETION, headers=right)).status_code == 200
    assert (await client.get("/health")).status_code == 200


# ---- the cluster's faults


@pytest.mark.parametrize("stream", [False, True])
async def test_a_full_cluster_is_429_with_retry_after(make_cluster, stream):
    cluster = await make_cluster()
    refusal = wire.Refused(request_id="", reason="full", retry_after_s=2.5)
    cluster.decode[0].answers = [lambda m: msgspec.structs.replace(refusal, request_id=m.request.request_id)] * 4
    response = await cluster.client.post("/v1/completions", json=COMPLETION | {"stream": stream})
    assert error_of(response, 429)["type"] == "rate_limit_error"
    assert int(response.headers["retry-after"]) >= 1
    await cluster.all_released()


async def test_too_many_at_once_are_429(make_cluster):
    cluster = await make_cluster(router={"max_inflight": 2})
    cluster.decode[0].pause_at = 3
    first = asyncio.create_task(cluster.client.post("/v1/chat/completions", json=CHAT))
    await cluster.decode[0].paused.wait()
    response = await cluster.client.post("/v1/chat/completions", json=CHAT | {"n": 2})
    error_of(response, 429)
    assert int(response.headers["retry-after"]) >= 1
    cluster.decode[0].resume.set()
    assert (await first).status_code == 200
    await cluster.all_released()


async def test_what_could_never_run_at_once_is_the_requests_fault(make_cluster):
    cluster = await make_cluster(router={"max_inflight": 2})
    error = error_of(await cluster.client.post("/v1/chat/completions", json=CHAT | {"n": 3}), 400, "n")
    assert "3" in error["message"] and "2" in error["message"]
    many = COMPLETION | {"prompt": ["a", "b"], "n": 2}
    assert (
        "2 prompts times n = 2"
        in error_of(await cluster.client.post("/v1/completions", json=many), 400, "prompt")["message"]
    )


@pytest.mark.parametrize("path", ["/v1/chat/completions/", "/v1/models/", "/health/"])
async def test_a_slash_too_many_is_404_and_no_redirect(make_cluster, path):
    cluster = await make_cluster()
    error_of(await cluster.client.request("GET" if "chat" not in path else "POST", path, json=CHAT), 404)


async def test_template_variables_may_have_any_name(make_cluster):
    cluster = await make_cluster()
    variables = {"self": 1, "messages": [], "add_generation_prompt": False, "enable_thinking": False}
    response = await cluster.client.post("/v1/chat/completions", json=CHAT | {"chat_template_kwargs": variables})
    assert response.status_code == 200


async def test_a_request_may_bring_its_own_template_where_the_operator_trusts_it(make_cluster):
    cluster = await make_cluster(serve={"trust_request_chat_template": True})
    template = "{% for message in messages %}<{{ message.role }}>{{ message.content }}{% endfor %}"
    response = await cluster.client.post("/v1/chat/completions", json=CHAT | {"chat_template": template})
    assert response.status_code == 200
    (request,) = [message.request for message in cluster.prefill[0].received if isinstance(message, wire.Prefill)]
    assert bytes(request.token_ids).decode() == "".join(f"<{m['role']}>{m['content']}" for m in CHAT["messages"])
    broken = await cluster.client.post("/v1/chat/completions", json=CHAT | {"chat_template": "{% for %}"})
    error_of(broken, 400, "chat_template")


@pytest.mark.parametrize("path, body", [("/v1/chat/completions", CHAT), ("/v1/completions", COMPLETION)])
async def test_the_model_is_required(make_cluster, path, body):
    cluster = await make_cluster()
    error = error_of(await cluster.client.post(path, json=body | {"model": None}), 400, "model", "missing")
    assert MODEL in error["message"]


@pytest.mark.parametrize("stream", [False, True])
async def test_no_workers_is_503_with_retry_after(make_cluster, stream):
    cluster = await make_cluster(prefill=0, decode=0)
    response = await cluster.client.post("/v1/chat/completions", json=CHAT | {"stream": stream})
    error_of(response, 503)
    assert int(response.headers["retry-after"]) >= 1


@pytest.mark.usefixtures("short_waits")
async def test_a_worker_lost_in_mid_stream_is_an_error_event_and_the_end(make_cluster):
    cluster = await make_cluster()
    cluster.decode[0].pause_at = 3
    asking = asyncio.create_task(cluster.client.post("/v1/completions", json=COMPLETION | {"stream": True}))
    await cluster.decode[0].paused.wait()
    await cluster.decode[0].kill()
    response = await asking
    assert response.status_code == 200
    lines = [json.loads(line.removeprefix("data: ")) for line in response.text.split("\n\n") if line]
    assert len("".join(chunk["choices"][0]["text"] for chunk in lines[:-1])) == 3
    assert lines[-1].keys() == {"error"} and "d0" in lines[-1]["error"]["message"]
    await cluster.prefill[0].until(lambda w: not w.holding)


@pytest.mark.usefixtures("short_waits")
async def test_a_worker_lost_before_the_first_token_is_an_http_error(make_cluster):
    cluster = await make_cluster(prefill=0)
    cluster.decode[0].pause_at = 0
    asking = asyncio.create_task(cluster.client.post("/v1/completions", json=COMPLETION | {"stream": True}))
    await cluster.decode[0].paused.wait()
    await cluster.decode[0].kill()
    error_of(await asking, 503, code="worker_failed")


async def test_one_failing_sample_ends_the_others(make_cluster):
    cluster = await make_cluster(prefill=0, retry_budget=0)
    decode = cluster.decode[0]
    decode.pause_at = 2
    decode.answers = [
        lambda m: None,
        lambda m: wire.Failed(request_id=m.request.request_id, code="engine", message="broken", retryable=True),
    ]
    error_of(await cluster.client.post("/v1/completions", json=COMPLETION | {"prompt": ["a", "b"]}), 503)
    await cluster.all_released()


async def test_a_group_that_fails_ends_as_one(make_cluster):
    cluster = await make_cluster(prefill=0, retry_budget=0)
    cluster.decode[0].answers = [
        lambda m: wire.Failed(request_id=m.request.request_id, code="engine", message="broken", retryable=True)
    ]
    error_of(await cluster.client.post("/v1/completions", json=COMPLETION | {"n": 3}), 503)
    await cluster.all_released()


async def test_an_output_beyond_its_grammars_limits_is_the_clients_error(make_cluster):
    """Not a fault of the worker: it is asked once, and a client that retries a 5xx has no reason to."""
    cluster = await make_cluster(prefill=0)
    cluster.decode[0].answers = [
        lambda m: wire.Failed(request_id=m.request.request_id, code="grammar", message="too big", retryable=False)
    ]
    error = error_of(await cluster.client.post("/v1/completions", json=COMPLETION), 400, code="invalid_grammar")
    assert "too big" in error["message"]
    await cluster.all_released()


async def test_an_error_is_told_without_a_traceback(make_cluster, caplog):
    cluster = await make_cluster()

    def broken(*args, **kwargs):
        raise RuntimeError("secret detail")

    cluster.dispatcher.open = broken
    error = error_of(await cluster.client.post("/v1/completions", json=COMPLETION), 500)
    assert "secret" not in error["message"]
    assert "secret detail" in caplog.text


@pytest.mark.parametrize(
    "params",
    [
        {"do_remote_prefill": True},
        {"do_remote_prefill": True, "remote_engine_id": "d0", "remote_block_ids": [0, 1, 2]},
        {"do_remote_decode": True, "remote_host": "203.0.113.9", "remote_port": 1},
        {"remote_block_ids": [-1, 10**9]},
        {},
        "garbage",
        None,
    ],
)
async def test_what_a_client_says_of_transfers_goes_nowhere(make_cluster, params):
    """Elsewhere such parameters of a body name hosts and blocks, and incomplete ones end the engine
    (CVE-2026-94622).
    """
    cluster = await make_cluster()
    plain = await cluster.client.post("/v1/completions", json={**COMPLETION, "seed": 1})
    sent = [worker.count(wire.Prefill) + worker.count(wire.Reserve) for worker in cluster.workers]
    answer = await cluster.client.post(
        "/v1/completions", json={**COMPLETION, "seed": 1, "kv_transfer_params": params, "ticket": "AAAA"}
    )
    assert answer.status_code == 200
    assert answer.json()["choices"] == plain.json()["choices"]
    assert [worker.count(wire.Prefill) + worker.count(wire.Reserve) for worker in cluster.workers] == [
        2 * count for count in sent
    ]
    await cluster.all_released()
