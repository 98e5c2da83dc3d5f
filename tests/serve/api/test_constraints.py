"""Fields that limit an output's tokens, over HTTP: what workers get, and what is refused before any is asked."""

import json

import pytest

from kvrelay.plane import messages as wire
from kvrelay.plane.messages import GrammarSpec
from tests.fakes import scripted
from tests.serve.api.test_errors import error_of
from tests.serve.conftest import MODEL

CHAT = {"model": MODEL, "messages": [{"role": "user", "content": "hi"}], "max_tokens": 4}
COMPLETION = {"model": MODEL, "prompt": "hello", "max_tokens": 4}
BOTH = pytest.mark.parametrize("path", ["/v1/chat/completions", "/v1/completions"])
SCHEMA = {"type": "object", "properties": {"a": {"type": "integer"}}}
SPEC = GrammarSpec("json_schema", '{"type":"object","properties":{"a":{"type":"integer"}}}')


async def post(cluster, path, **fields):
    return await cluster.client.post(path, json=(CHAT if "chat" in path else COMPLETION) | fields)


async def sampling_of(cluster, path, **fields):
    """What the prefill worker got."""
    response = await post(cluster, path, **fields)
    assert response.status_code == 200, response.text
    return [m.request.sampling for m in cluster.prefill[0].received if isinstance(m, wire.Prefill)][-1]


@BOTH
@pytest.mark.parametrize("more", [{}, {"stream": True}, {"n": 2}])
async def test_a_grammar_is_checked_and_reaches_the_workers(make_cluster, path, more):
    cluster = await make_cluster()
    given = {"type": "json_schema", "json_schema": {"name": "x", "schema": SCHEMA, "strict": True}}
    assert (await sampling_of(cluster, path, response_format=given, **more)).grammar == SPEC
    assert cluster.checked == [SPEC]
    await cluster.all_released()


async def test_a_grammar_goes_with_best_of_and_with_a_prompt_alone(make_cluster):
    cluster = await make_cluster()
    found = await sampling_of(cluster, "/v1/completions", json_schema=json.dumps(SCHEMA), best_of=2)
    assert found.grammar == SPEC
    found = await sampling_of(cluster, "/v1/completions", regex="a", echo=True, logprobs=0, max_tokens=0)
    assert found.grammar == GrammarSpec("regex", "a")


@BOTH
async def test_a_grammar_that_does_not_compile_is_refused_before_any_worker_is_asked(make_cluster, path):
    cluster = await make_cluster()
    given = {"type": "json_schema", "json_schema": {"name": "x", "schema": {"type": "refuse me"}}}
    for more in ({}, {"stream": True}):
        error = error_of(await post(cluster, path, response_format=given, **more), 400, code="invalid_grammar")
        assert error["param"] == "response_format.json_schema.schema"
        assert error["message"] == "response_format.json_schema.schema: no such type"
    assert not any(isinstance(m, wire.Reserve | wire.Prefill) for worker in cluster.workers for m in worker.received)


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"response_format": {"type": "json_object"}}, "response_format"),
        ({"guided_choice": ["a"]}, "guided_choice"),
        ({"bad_words": ["x"]}, "bad_words"),
        ({"allowed_token_ids": [1]}, "allowed_token_ids"),
    ],
)
async def test_beams_are_not_constrained(make_cluster, fields, param):
    cluster = await make_cluster()
    response = await post(cluster, "/v1/completions", use_beam_search=True, n=2, **fields)
    error_of(response, 400, param, "unsupported_parameter")


@BOTH
async def test_bad_words_are_token_sequences_with_and_without_a_space(make_cluster, path):
    cluster = await make_cluster()
    found = await sampling_of(cluster, path, bad_words=["no", " way", "no"])
    assert found.bad_words == tuple(tuple(text.encode()) for text in ("no", " no", "way", " way"))


@BOTH
async def test_token_ids_are_limited(make_cluster, path):
    cluster = await make_cluster()
    bias = {"5": -100, "6": 100, "7": 0.5}
    found = await sampling_of(cluster, path, allowed_token_ids=[5, 9, 5], logit_bias=bias)
    assert found.allowed_token_ids == (5, 9)
    assert found.logit_bias == {5: -100.0, 6: 100.0, 7: 0.5}


@BOTH
@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"bad_words": [""]}, "bad_words[0]"),
        ({"bad_words": ["a", "  "]}, "bad_words[1]"),
        ({"bad_words": "x"}, "bad_words"),
        ({"bad_words": ["x"] * 257}, "bad_words"),
        ({"allowed_token_ids": []}, "allowed_token_ids"),
        ({"allowed_token_ids": [258]}, "allowed_token_ids"),
        ({"allowed_token_ids": [-1]}, "allowed_token_ids[0]"),
        ({"truncate_prompt_tokens": 0}, "truncate_prompt_tokens"),
        ({"truncate_prompt_tokens": -2}, "truncate_prompt_tokens"),
        ({"truncate_prompt_tokens": 513}, "truncate_prompt_tokens"),
        ({"response_format": {"type": "json_object"}, "regex": "a"}, "regex"),
        ({"prompt_logprobs": 21}, "prompt_logprobs"),
        ({"prompt_logprobs": -1}, "prompt_logprobs"),
        ({"prompt_logprobs": 1, "stream": True}, "prompt_logprobs"),
        ({"return_token_ids": 1}, "return_token_ids"),
    ],
)
async def test_a_wrong_constraint_is_named(make_cluster, path, fields, param):
    cluster = await make_cluster()
    error_of(await post(cluster, path, **fields), 400, param)


@pytest.mark.parametrize(("most", "kept"), [(3, "llo"), (5, "hello"), (512, "hello"), (-1, "hello")])
async def test_a_prompt_is_cut_to_its_last_tokens(make_cluster, most, kept):
    cluster = await make_cluster()
    response = await post(cluster, "/v1/completions", truncate_prompt_tokens=most, echo=True)
    assert response.json()["choices"][0]["text"].startswith(kept)
    assert response.json()["usage"]["prompt_tokens"] == len(kept)


async def test_a_prompt_is_cut_to_what_leaves_room_for_the_output(make_cluster):
    cluster = await make_cluster()
    response = await post(cluster, "/v1/completions", prompt="x" * 5000, truncate_prompt_tokens=-1, max_tokens=12)
    assert response.json()["usage"]["prompt_tokens"] == 500
    messages = [{"role": "user", "content": "y" * 5000}]
    body = CHAT | {"messages": messages, "truncate_prompt_tokens": -1, "max_tokens": None, "max_completion_tokens": 2}
    response = await cluster.client.post("/v1/chat/completions", json=body)
    assert response.json()["usage"]["prompt_tokens"] == 510


# ---- the prompt's log-probabilities, token ids


def prompt_of(path):
    return list(b"<user>hi\n<assistant>" if "chat" in path else b"hello")


@BOTH
@pytest.mark.parametrize("top", [0, 2])
async def test_each_token_of_the_prompt_has_its_log_probabilities(make_cluster, path, top):
    cluster = await make_cluster()
    answer = (await post(cluster, path, prompt_logprobs=top, n=2)).json()
    found = [answer] if "chat" in path else answer["choices"]
    assert len(found) == (1 if "chat" in path else 2)
    for one in found:
        first, *others = one["prompt_logprobs"]
        assert first is None
        for token, entry in zip(prompt_of(path)[1:], others, strict=True):
            expected = {str(token): {"logprob": -0.5, "rank": 1, "decoded_token": chr(token)}}
            if top:
                expected[str(token + 1)] = {"logprob": -1.5, "rank": 2, "decoded_token": chr(token + 1)}
            assert entry == expected
    assert answer["choices"][0]["logprobs"] is None
    await cluster.all_released()


async def test_an_echo_and_the_prompts_log_probabilities_go_together(make_cluster):
    cluster = await make_cluster()
    answer = (await post(cluster, "/v1/completions", prompt_logprobs=3, echo=True, logprobs=1)).json()
    (choice,) = answer["choices"]
    assert [len(entry) for entry in choice["prompt_logprobs"][1:]] == [3] * 4
    assert [len(entry) for entry in choice["logprobs"]["top_logprobs"][1:5]] == [1] * 4


@BOTH
async def test_token_ids_are_returned(make_cluster, path):
    cluster = await make_cluster(script=scripted("ab", then_eos=True))
    answer = (await post(cluster, path, return_token_ids=True, n=2)).json()
    for choice in answer["choices"]:
        assert choice["token_ids"] == [97, 98, 256]
        assert "chat" in path or choice["prompt_token_ids"] == prompt_of(path)
    assert "completions" in path and ("chat" not in path or answer["prompt_token_ids"] == prompt_of(path))
    assert "token_ids" not in (await post(cluster, path)).text


@BOTH
async def test_token_ids_are_streamed(make_cluster, path):
    cluster = await make_cluster(script=scripted("é☃!", then_eos=True))  # some tokens complete no character
    response = await post(cluster, path, return_token_ids=True, stream=True, max_tokens=20)
    chunks = [json.loads(line[6:]) for line in response.text.splitlines() if line.startswith("data: {")]
    choices = [choice for chunk in chunks for choice in chunk["choices"]]
    assert [token for choice in choices for token in choice["token_ids"]] == [*"é☃!".encode(), 256]
    holders = chunks if "chat" in path else choices
    assert [one["prompt_token_ids"] for one in holders if "prompt_token_ids" in one] == [prompt_of(path)]
    assert "prompt_token_ids" in holders[0]


# ---- unknown fields


@BOTH
@pytest.mark.parametrize("stream", [False, True])
async def test_ignored_fields_are_listed_in_a_header_and_counted(make_cluster, path, stream):
    cluster = await make_cluster()
    response = await post(cluster, path, stream=stream, zebra=1, quokka="x", user="u", store=True)
    assert response.status_code == 200
    assert response.headers["x-kvrelay-ignored"] == "zebra, quokka"
    metrics = (await cluster.client.get("/metrics")).text
    assert 'kvrelay_ignored_fields_total{field="zebra"} 1.0' in metrics
    assert "x-kvrelay-ignored" not in (await post(cluster, path, stream=stream)).headers


@BOTH
async def test_unknown_fields_can_be_refused(make_cluster, path):
    cluster = await make_cluster(serve={"unknown_fields": "refuse"})
    error_of(await post(cluster, path, zebra=1), 400, "zebra", "unknown_parameter")
    assert (await post(cluster, path, user="u", metadata={"a": "b"}, zebra=None)).status_code == 200
