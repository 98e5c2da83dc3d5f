"""The OpenAI endpoints over fake workers: what good requests get."""

import asyncio
import json

import pytest
from prometheus_client.parser import text_string_to_metric_families

from kvrelay.plane import messages as wire
from kvrelay.plane.reports import LoadReport
from tests.fakes import scripted, until
from tests.serve.conftest import MODEL


async def post(cluster, path, body, **headers):
    return await cluster.client.post(path, json={"model": MODEL, **body}, headers=headers)


async def chat(cluster, body=None, **headers):
    body = {"messages": [{"role": "user", "content": "hi"}], "max_tokens": 8, **(body or {})}
    return await post(cluster, "/v1/chat/completions", body, **headers)


async def complete(cluster, body=None, **headers):
    return await post(cluster, "/v1/completions", {"prompt": "hello", "max_tokens": 8, **(body or {})}, **headers)


def events(response):
    """The chunks of a stream; the last line must be [DONE]."""
    assert response.status_code == 200, response.text
    assert response.headers["content-type"].startswith("text/event-stream")
    lines = [line.removeprefix("data: ") for line in response.text.split("\n\n") if line]
    assert lines.pop() == "[DONE]"
    return [json.loads(line) for line in lines]


async def test_models_are_listed(make_cluster):
    cluster = await make_cluster()
    listed = (await cluster.client.get("/v1/models")).json()
    assert listed["object"] == "list"
    assert listed["data"][0] == {
        "id": MODEL,
        "object": "model",
        "created": 1700000000,
        "owned_by": "kvrelay",
        "max_model_len": 512,
    }
    assert (await cluster.client.get(f"/v1/models/{MODEL}")).json() == listed["data"][0]


async def test_a_chat_answer_has_exactly_openais_fields(make_cluster):
    cluster = await make_cluster(script=scripted("Hello!", then_eos=True))
    answer = (await chat(cluster)).json()
    assert answer.pop("id").startswith("chatcmpl-")
    assert isinstance(answer.pop("created"), int)
    prompt_tokens = len("<user>hi\n<assistant>")
    assert answer == {
        "object": "chat.completion",
        "model": MODEL,
        "choices": [
            {
                "index": 0,
                "message": {"role": "assistant", "content": "Hello!", "refusal": None},
                "logprobs": None,
                "finish_reason": "stop",
            }
        ],
        "usage": {
            "prompt_tokens": prompt_tokens,
            "completion_tokens": 7,  # the end token counts
            "total_tokens": prompt_tokens + 7,
            "prompt_tokens_details": {"cached_tokens": 0},
        },
    }
    await cluster.all_released()


async def test_a_completion_has_exactly_openais_fields(make_cluster):
    cluster = await make_cluster(script=scripted("abc"))
    answer = (await complete(cluster)).json()
    assert answer.pop("id").startswith("cmpl-")
    assert isinstance(answer.pop("created"), int)
    assert answer == {
        "object": "text_completion",
        "model": MODEL,
        "choices": [{"index": 0, "text": "abcabcab", "logprobs": None, "finish_reason": "length"}],
        "usage": {
            "prompt_tokens": 5,
            "completion_tokens": 8,
            "total_tokens": 13,
            "prompt_tokens_details": {"cached_tokens": 0},
        },
    }


async def test_a_chat_stream_says_the_same_as_the_whole_answer(make_cluster):
    cluster = await make_cluster(script=scripted("Grüße, 世界! 🎉", then_eos=True))
    whole = (await chat(cluster, {"max_tokens": 64})).json()
    chunks = events(await chat(cluster, {"max_tokens": 64, "stream": True, "stream_options": {"include_usage": True}}))
    text = "".join(choice["delta"].get("content", "") for chunk in chunks for choice in chunk["choices"])
    assert text == whole["choices"][0]["message"]["content"] == "Grüße, 世界! 🎉"
    assert chunks[0]["choices"][0]["delta"]["role"] == "assistant"
    assert all("role" not in choice["delta"] for chunk in chunks[1:] for choice in chunk["choices"])
    reasons = [choice["finish_reason"] for chunk in chunks for choice in chunk["choices"]]
    assert reasons[-1] == "stop" and set(reasons[:-1]) == {None}
    assert chunks[-1]["choices"] == [] and chunks[-1]["usage"] == whole["usage"]
    assert all(chunk["usage"] is None for chunk in chunks[:-1])
    assert len({chunk["id"] for chunk in chunks}) == 1


async def test_without_include_usage_there_is_no_usage_field(make_cluster):
    cluster = await make_cluster()
    chunks = events(await chat(cluster, {"stream": True}))
    assert all("usage" not in chunk for chunk in chunks)
    chunks = events(await complete(cluster, {"stream": True}))
    assert all("usage" not in chunk for chunk in chunks)
    assert chunks[-1]["choices"][0]["finish_reason"] == "length"


async def test_a_completion_stream_can_tell_the_usage_in_each_chunk(make_cluster):
    cluster = await make_cluster()
    options = {"include_usage": True, "continuous_usage_stats": True}
    chunks = events(await complete(cluster, {"stream": True, "stream_options": options}))
    counts = [chunk["usage"]["completion_tokens"] for chunk in chunks]
    assert counts == sorted(counts) and counts[-1] == 8


async def test_samples_differ_are_numbered_and_can_be_repeated(make_cluster):
    cluster = await make_cluster()
    answer = (await chat(cluster, {"n": 3, "seed": 5})).json()
    assert [choice["index"] for choice in answer["choices"]] == [0, 1, 2]
    assert answer["usage"]["completion_tokens"] == 24
    [sent] = [message.request for message in cluster.prefill[0].received if isinstance(message, wire.Prefill)]
    assert sent.group.seeds[0] == 5 and len(set(sent.group.seeds)) == 3
    texts = [choice["message"]["content"] for choice in answer["choices"]]
    assert len(set(texts)) == 3
    again = (await chat(cluster, {"n": 3, "seed": 5})).json()
    assert [choice["message"]["content"] for choice in again["choices"]] == texts
    neighbour = (await chat(cluster, {"n": 3, "seed": 6})).json()
    assert not {choice["message"]["content"] for choice in neighbour["choices"]} & set(texts)


@pytest.mark.parametrize("ask", [chat, complete])
async def test_one_request_id_at_most_is_returned(make_cluster, ask):
    cluster = await make_cluster()
    answer = await ask(cluster)
    assert answer.headers["x-request-id"] == answer.json()["id"]
    # Ray Serve gives every request an id and returns it itself
    assert "x-request-id" not in (await ask(cluster, None, **{"x-request-id": "given"})).headers


async def test_streamed_samples_keep_their_indices(make_cluster):
    cluster = await make_cluster()
    whole = (await complete(cluster, {"n": 3, "seed": 5})).json()
    texts = ["", "", ""]
    for chunk in events(await complete(cluster, {"n": 3, "seed": 5, "stream": True})):
        for choice in chunk["choices"]:
            texts[choice["index"]] += choice["text"]
    assert texts == [choice["text"] for choice in whole["choices"]]


async def test_one_group_goes_to_the_workers_and_stops_choice_by_choice(make_cluster):
    cluster = await make_cluster()
    whole = (await complete(cluster, {"n": 3, "seed": 5})).json()
    texts = [choice["text"] for choice in whole["choices"]]
    stopped = (await complete(cluster, {"n": 3, "seed": 5, "stop": texts[1][2]})).json()
    ends = [text.split(texts[1][2])[0] for text in texts]
    assert [choice["text"] for choice in stopped["choices"]] == ends
    assert stopped["choices"][1]["finish_reason"] == "stop"
    assert cluster.prefill[0].count(wire.Prefill) + cluster.decode[0].count(wire.Generate) == 2
    aborts = [m for w in cluster.decode for m in w.received if isinstance(m, wire.Abort) and m.choice is not None]
    assert 1 in {abort.choice for abort in aborts} or all(text != end for text, end in zip(texts, ends, strict=True))
    await cluster.all_released()


async def test_a_group_is_continued_where_its_worker_dies(make_cluster):
    cluster = await make_cluster(decode=2)
    whole = (await complete(cluster, {"n": 3, "seed": 5})).json()
    for worker in cluster.decode:
        worker.pause_at = 4
    asking = asyncio.create_task(complete(cluster, {"n": 3, "seed": 5}))
    waits = {asyncio.create_task(worker.paused.wait()): worker for worker in cluster.decode}
    [done, *_], rest = await asyncio.wait(waits, return_when=asyncio.FIRST_COMPLETED)
    for task in rest:
        task.cancel()
    for worker in cluster.decode:
        worker.pause_at = None
    await waits[done].kill()
    answer = (await asking).json()
    assert [choice["text"] for choice in answer["choices"]] == [choice["text"] for choice in whole["choices"]]
    continued = [
        m.request.group.emitted
        for w in cluster.workers
        for m in w.received
        if isinstance(m, wire.Prefill | wire.Generate) and m.request.group.emitted
    ]
    assert len(continued) == 1 and {len(tokens) for tokens in continued[0]} <= {3, 4, 5}


async def test_best_of_answers_those_with_the_largest_summed_log_probability(make_cluster, monkeypatch):
    def likely(request: wire.SequenceRequest, position: int) -> int:
        return ord("a") + request.sampling.seed % 26

    monkeypatch.setattr("tests.fakes._logprob", lambda token, top: wire.TokenLogprob(token, -float(token)))
    cluster = await make_cluster(script=likely)
    asked = {"n": 2, "best_of": 5, "seed": 3, "max_tokens": 4}
    answer = (await complete(cluster, asked)).json()
    everyone = (await complete(cluster, asked | {"n": 5})).json()
    texts = [choice["text"] for choice in everyone["choices"]]
    order = sorted(range(5), key=lambda index: (ord(texts[index][0]), index))
    assert [choice["text"] for choice in answer["choices"]] == [texts[index] for index in order[:2]]
    assert [choice["index"] for choice in answer["choices"]] == [0, 1]
    assert answer["usage"]["completion_tokens"] == 20  # what was computed
    assert answer["choices"][0]["logprobs"] is None


@pytest.mark.parametrize("ask", [chat, complete])
async def test_a_beam_search_is_one_request_with_what_was_asked(make_cluster, ask):
    cluster = await make_cluster()
    asked = {"use_beam_search": True, "n": 2, "best_of": 4, "length_penalty": 0.5, "early_stopping": "never"}
    answer = (await ask(cluster, asked)).json()
    assert [choice["index"] for choice in answer["choices"]] == [0, 1]
    [sent] = [message.request for message in cluster.prefill[0].received if isinstance(message, wire.Prefill)]
    assert sent.group.beams == wire.Beams(width=4, num_returned=2, length_penalty=0.5, early_stopping="never")
    few = await make_cluster(info={"max_running": 3})
    assert (await ask(few, asked)).status_code == 400


async def test_several_prompts_give_choices_in_order(make_cluster):
    cluster = await make_cluster()
    prompts = ["one", "two", "three"]
    alone = [(await complete(cluster, {"prompt": p, "seed": 1})).json()["choices"][0]["text"] for p in prompts]
    batch = (await complete(cluster, {"prompt": prompts, "seed": 1})).json()
    assert [choice["text"] for choice in batch["choices"]] == alone
    assert batch["usage"]["prompt_tokens"] == len("onetwothree")


@pytest.mark.parametrize("prompt", [[104, 101, 108, 108, 111], [[104, 101, 108, 108, 111]]])
async def test_token_ids_are_a_prompt_too(make_cluster, prompt):
    cluster = await make_cluster()
    as_text = (await complete(cluster, {"seed": 1})).json()["choices"][0]["text"]
    assert (await complete(cluster, {"prompt": prompt, "seed": 1})).json()["choices"][0]["text"] == as_text


async def test_absent_limits_mean_sixteen_for_completions_and_the_context_for_chat(make_cluster):
    cluster = await make_cluster()
    completion = await post(cluster, "/v1/completions", {"prompt": "hello"})
    assert completion.json()["usage"]["completion_tokens"] == 16
    answer = (await post(cluster, "/v1/chat/completions", {"messages": [{"role": "user", "content": "hi"}]})).json()
    assert answer["usage"]["total_tokens"] == 512


async def test_max_completion_tokens_is_the_newer_name(make_cluster):
    cluster = await make_cluster()
    answer = (await chat(cluster, {"max_tokens": None, "max_completion_tokens": 3})).json()
    assert answer["usage"]["completion_tokens"] == 3


# ---- stops


@pytest.mark.parametrize("stream", [False, True])
async def test_a_stop_string_ends_the_text_before_itself(make_cluster, stream):
    cluster = await make_cluster(script=scripted("one two three four "))
    response = await complete(cluster, {"stop": ["three", "never"], "max_tokens": 64, "stream": stream})
    if stream:
        chunks = events(response)
        text = "".join(choice["text"] for chunk in chunks for choice in chunk["choices"])
        reason = chunks[-1]["choices"][0]["finish_reason"]
    else:
        choice = response.json()["choices"][0]
        text, reason = choice["text"], choice["finish_reason"]
    assert (text, reason) == ("one two ", "stop")
    await cluster.all_released()  # the workers were told to stop as well


async def test_the_usage_counts_up_to_the_stop_string(make_cluster):
    cluster = await make_cluster(script=scripted("abcdefgh"))
    for worker in cluster.decode:
        worker.tokens_per_message = 7
    answer = (await complete(cluster, {"stop": "cd"})).json()
    assert answer["choices"][0]["text"] == "ab"
    assert answer["usage"]["completion_tokens"] == 4


async def test_a_stop_string_may_be_kept_and_must_wait_for_min_tokens(make_cluster):
    cluster = await make_cluster(script=scripted("abcdefgh"))
    kept = (await complete(cluster, {"stop": "cd", "include_stop_str_in_output": True})).json()
    assert kept["choices"][0]["text"] == "abcd"
    late = (await complete(cluster, {"stop": "b", "min_tokens": 4, "max_tokens": 16})).json()
    assert late["choices"][0]["text"] == "abcdefgha"


async def test_an_unfinished_stop_string_is_shown_at_the_end(make_cluster):
    cluster = await make_cluster(script=scripted("abcdefgh"))
    answer = (await complete(cluster, {"stop": "ghz", "max_tokens": 8})).json()
    assert answer["choices"][0]["text"] == "abcdefgh"


async def test_ignore_eos_and_stop_ids_reach_the_engine(make_cluster):
    cluster = await make_cluster(script=scripted("ab", then_eos=True))
    answer = (await complete(cluster, {"ignore_eos": True, "stop_token_ids": [7], "max_tokens": 6})).json()
    assert answer["choices"][0]["text"] == "ab"  # special tokens are not text
    assert (answer["usage"]["completion_tokens"], answer["choices"][0]["finish_reason"]) == (6, "length")
    sampling = cluster.prefill[0].received[-1].request.sampling
    assert (sampling.ignore_eos, sampling.stop_token_ids) == (True, (7,))


async def test_all_sampling_fields_reach_the_engine(make_cluster):
    cluster = await make_cluster()
    fields = {
        "temperature": 0,
        "top_p": 0.5,
        "top_k": 7,
        "min_p": 0.1,
        "repetition_penalty": 1.5,
        "presence_penalty": 0.25,
        "frequency_penalty": -0.5,
        "seed": -3,
        "logit_bias": {"65": -100, "66": 5},
        "min_tokens": 2,
        "cache_salt": "acme",
    }
    assert (await complete(cluster, fields)).status_code == 200
    request = next(m.request for m in cluster.prefill[0].received if isinstance(m, wire.Prefill))
    sampling = request.sampling
    assert (sampling.temperature, sampling.top_p, sampling.top_k, sampling.min_p) == (0, 0.5, 7, 0.1)
    assert (sampling.repetition_penalty, sampling.presence_penalty, sampling.frequency_penalty) == (1.5, 0.25, -0.5)
    assert (sampling.logit_bias, sampling.min_tokens, request.salt) == ({65: -100, 66: 5}, 2, "acme")
    assert 0 <= sampling.seed < 2**63


async def test_a_salt_changes_the_block_hashes(make_cluster):
    cluster = await make_cluster()
    await complete(cluster, {"prompt": "x" * 32})
    await complete(cluster, {"prompt": "x" * 32, "cache_salt": "acme"})
    first, second = (m.request.block_hashes for m in cluster.prefill[0].received if isinstance(m, wire.Prefill))
    assert len(first) == len(second) == 2 and not set(first) & set(second)


# ---- logprobs and echo


async def test_chat_logprobs_have_openais_shape(make_cluster):
    cluster = await make_cluster(script=scripted("aé"))
    answer = (await chat(cluster, {"logprobs": True, "top_logprobs": 2, "max_tokens": 3})).json()
    entries = answer["choices"][0]["logprobs"]
    assert entries["refusal"] is None
    assert [entry["token"] for entry in entries["content"]] == ["a", "bytes:\\xc3", "bytes:\\xa9"]
    assert entries["content"][0] == {
        "token": "a",
        "logprob": -0.5,
        "bytes": [97],
        "top_logprobs": [
            {"token": "a", "logprob": -0.5, "bytes": [97]},
            {"token": "b", "logprob": -1.5, "bytes": [98]},
        ],
    }


async def test_chat_logprobs_without_top_are_empty_lists(make_cluster):
    cluster = await make_cluster()
    answer = (await chat(cluster, {"logprobs": True})).json()
    assert all(entry["top_logprobs"] == [] for entry in answer["choices"][0]["logprobs"]["content"])


async def test_streamed_logprobs_are_the_whole_answers(make_cluster):
    cluster = await make_cluster()
    body = {"logprobs": True, "top_logprobs": 1, "seed": 1}
    whole = (await chat(cluster, body)).json()["choices"][0]["logprobs"]["content"]
    chunks = events(await chat(cluster, {**body, "stream": True}))
    streamed = [entry for c in chunks for choice in c["choices"] for entry in (choice["logprobs"] or {})["content"]]
    assert streamed == whole


async def test_completion_logprobs_have_openais_shape(make_cluster):
    cluster = await make_cluster(script=scripted("abc"))
    answer = (await complete(cluster, {"logprobs": 1, "max_tokens": 3})).json()
    assert answer["choices"][0]["logprobs"] == {
        "text_offset": [0, 1, 2],
        "token_logprobs": [-0.5, -0.5, -0.5],
        "tokens": ["a", "b", "c"],
        "top_logprobs": [{"a": -0.5}, {"b": -0.5}, {"c": -0.5}],
    }


async def test_echo_with_logprobs_and_no_output_scores_the_prompt(make_cluster):
    """What lm-eval's multiple choice asks for."""
    cluster = await make_cluster()
    answer = (await complete(cluster, {"prompt": "hey", "echo": True, "logprobs": 1, "max_tokens": 0})).json()
    choice = answer["choices"][0]
    assert (choice["text"], choice["finish_reason"]) == ("hey", "length")
    assert choice["logprobs"] == {
        "text_offset": [0, 1, 2],
        "token_logprobs": [None, -0.5, -0.5],
        "tokens": ["h", "e", "y"],
        "top_logprobs": [None, {"e": -0.5}, {"y": -0.5}],
    }
    assert answer["usage"]["completion_tokens"] == 0
    await cluster.all_released()


@pytest.mark.parametrize("stream", [False, True])
async def test_echo_goes_before_the_output(make_cluster, stream):
    cluster = await make_cluster(script=scripted("abc"))
    body = {"prompt": [104, 105], "echo": True, "logprobs": 0, "max_tokens": 3, "stream": stream}
    response = await complete(cluster, body)
    choices = [c for chunk in events(response) for c in chunk["choices"]] if stream else response.json()["choices"]
    assert "".join(choice["text"] for choice in choices) == "hiabc"
    assert [token for choice in choices for token in choice["logprobs"]["tokens"]] == list("hiabc")
    assert [offset for choice in choices for offset in choice["logprobs"]["text_offset"]] == [0, 1, 2, 3, 4]


# ---- chat


async def test_content_parts_and_the_developer_role_are_understood(make_cluster):
    cluster = await make_cluster()
    messages = [
        {"role": "developer", "content": "be brief"},
        {"role": "user", "content": [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]},
        {"role": "assistant", "content": None},
        {"role": "user", "content": "c"},
    ]
    assert (await chat(cluster, {"messages": messages})).status_code == 200
    request = next(m.request for m in cluster.prefill[0].received if isinstance(m, wire.Prefill))
    assert bytes(request.token_ids).decode() == "<system>be brief\n<user>ab\n<assistant>\n<user>c\n<assistant>"


async def test_the_final_message_can_be_continued(make_cluster):
    cluster = await make_cluster()
    messages = [{"role": "user", "content": "count"}, {"role": "assistant", "content": "one, two"}]
    body = {"messages": messages, "continue_final_message": True, "add_generation_prompt": False}
    assert (await chat(cluster, body)).status_code == 200
    request = next(m.request for m in cluster.prefill[0].received if isinstance(m, wire.Prefill))
    assert bytes(request.token_ids).decode() == "<user>count\n<assistant>one, two"


async def test_harmless_and_unknown_fields_are_accepted(make_cluster):
    cluster = await make_cluster()
    body = {
        "user": "u", "metadata": {"a": "b"}, "store": False, "service_tier": "auto", "parallel_tool_calls": True,
        "reasoning_effort": "none", "response_format": {"type": "text"}, "modalities": ["text"], "tools": [],
        "not_a_field_at_all": 1, "best_of": 1, "n": None, "stop": None, "stream": None,
    }  # fmt: skip
    assert (await chat(cluster, body)).status_code == 200


# ---- explain, metrics, health


@pytest.mark.parametrize("path", ["local", "remote"])
async def test_explain_tells_the_decision_and_parts_that_sum_to_the_ttft(make_cluster, path):
    cluster = await make_cluster()
    headers = {"x-kvrelay-explain": "1", "x-kvrelay-prefill": path}
    told = (await chat(cluster, {}, **headers)).json()["kvrelay"]
    assert told["path"] == {"local": "local", "remote": "disaggregated"}[path]
    assert told["terms"] and told["candidates"]
    assert sum(told["policy_terms"].values()) == pytest.approx(told["score"])
    assert sum(told["parts_us"].values()) == told["ttft_us"] > 0
    assert told["parts_us"]["prefill_compute"] == 200 and told["parts_us"]["prefill_queue"] == 100
    assert ("transfer" in told) == (path == "remote")
    streamed = events(await chat(cluster, {"stream": True}, **headers))[-1]
    assert streamed["choices"] == [] and streamed["kvrelay"]["path"] == told["path"]


async def test_without_the_header_nothing_is_explained(make_cluster):
    cluster = await make_cluster()
    assert "kvrelay" not in (await chat(cluster)).json()


async def test_cached_tokens_are_told(make_cluster):
    cluster = await make_cluster()
    cluster.prefill[0].cached_tokens = 3
    usage = (await complete(cluster, {"n": 2})).json()["usage"]
    assert usage["prompt_tokens_details"] == {"cached_tokens": 3}


async def test_health_and_metrics(make_cluster):
    cluster = await make_cluster()
    assert (await cluster.client.get("/health")).json()["status"] == "ok"
    await complete(cluster, {"n": 2})
    families = {f.name: f for f in text_string_to_metric_families((await cluster.client.get("/metrics")).text)}
    outcomes = {s.labels["outcome"]: s.value for s in families["kvrelay_requests"].samples}
    assert outcomes["length"] == 2 and sum(outcomes.values()) == 2
    statuses = {s.labels["status"]: s.value for s in families["kvrelay_http_responses"].samples}
    assert statuses == {"200": 1, "400": 0, "429": 0, "500": 0, "503": 0}
    assert families["kvrelay_output_tokens"].samples[0].value == 16
    gaps = {s.name: s.value for s in families["kvrelay_request_itl_seconds"].samples if "le" not in s.labels}
    assert gaps["kvrelay_request_itl_seconds_count"] == 14
    workers = {s.labels["role"]: s.value for s in families["kvrelay_workers"].samples}
    assert workers == {"prefill": 1, "decode": 1}
    blocks = {(s.labels["worker"], s.labels["state"]): s.value for s in families["kvrelay_kv_blocks"].samples}
    assert blocks["d0", "free"] == 1024


async def test_blocks_by_state_add_up_where_cached_ones_are_pinned(make_cluster):
    cluster = await make_cluster()
    cluster.decode[0].say_raw(LoadReport(seq=9, free_blocks=10, cached_blocks=30, used_blocks=20, total_blocks=60))
    await until(lambda: not all(load.seq != 9 for _, load in cluster.dispatcher.workers.live_workers()))
    families = {f.name: f for f in text_string_to_metric_families((await cluster.client.get("/metrics")).text)}
    samples = families["kvrelay_kv_blocks"].samples
    states = {s.labels["state"]: s.value for s in samples if s.labels["worker"] == "d0"}
    assert (states["free"], states["cached"]) == (10, 30)


async def test_health_is_503_without_workers(make_cluster):
    cluster = await make_cluster(prefill=1, decode=0)
    assert (await cluster.client.get("/health")).status_code == 503
