"""Fields that are not known: refused where they would change the answer, else ignored, reported and counted."""

import json
import time
from collections import Counter

import pytest

from kvrelay.errors import InvalidRequest
from kvrelay.serve.api.schemas import ChatBody, CompletionBody, parse
from kvrelay.serve.bodies.unknown_fields import (
    MAX_COUNTED,
    MAX_UNKNOWN,
    REFUSED,
    WITHOUT_EFFECT,
    count_ignored,
    ignored_header,
)

pytestmark = pytest.mark.pure


def chat(**fields):
    return parse(ChatBody, json.dumps({"messages": [{"role": "user", "content": "hi"}]} | fields).encode())


def refusal(**fields):
    with pytest.raises(InvalidRequest) as caught:
        chat(**fields)
    return caught.value


@pytest.mark.parametrize(
    ("name", "meant"),
    [
        ("tempurature", "temperature"), ("Temperature", "temperature"), ("maxTokens", "max_tokens"),
        ("max-tokens", "max_tokens"), ("topP", "top_p"), ("topk", "top_k"), ("stops", "stop"), ("tool", "tools"),
        ("frequency_penality", "frequency_penalty"), ("reponse_format", "response_format"), ("logprob", "logprobs"),
        ("structured_output", "structured_outputs"), ("max_token", "max_tokens"), ("steam", "stream"),
    ],
)  # fmt: skip
def test_a_misspelt_field_is_refused_with_what_was_meant(name, meant):
    error = refusal(**{name: 1})
    assert (error.param, error.code) == (name, "unknown_parameter")
    assert f"did you mean {meant}?" in error.message


@pytest.mark.parametrize("name", sorted(REFUSED))
def test_a_field_that_would_change_the_answer_is_refused_by_name(name):
    error = refusal(**{name: ["x"]})
    assert (error.param, error.code) == (name, "unsupported_parameter")


def test_neutral_values_of_refused_fields_are_taken_silently():
    neutral = {name: values[0] for name, values in REFUSED.items()} | {"vllm_xargs": {}, "lora_path": None}
    assert chat(**neutral).ignored_fields == ()
    assert refusal(separate_reasoning=False).param == "separate_reasoning"
    assert refusal(verbosity="low").param == "verbosity"


def test_fields_without_effect_are_taken_silently():
    assert chat(user="u", **dict.fromkeys(WITHOUT_EFFECT, "x")).ignored_fields == ()


@pytest.mark.parametrize(("name", "value"), [("echo", True), ("prompt", "x")])
def test_a_field_of_the_other_endpoint_is_refused(name, value):
    assert refusal(**{name: value}).param == name
    with pytest.raises(InvalidRequest):
        parse(CompletionBody, b'{"prompt": "x", "messages": [{}]}')
    assert parse(CompletionBody, b'{"prompt": "x", "tools": []}').ignored_fields == ()


def test_other_fields_are_ignored_and_listed_in_order():
    assert chat(zebra=1, aardvark=None, quokka=False).ignored_fields == ("zebra", "quokka")


def test_a_header_of_ignored_fields_is_short_and_clean():
    names = ("plain", "a\r\nset-cookie: x", "é", "x" * 100, *map(str, range(30)))
    header = ignored_header(names)["x-kvrelay-ignored"]
    assert header.startswith(f"plain, a??set-cookie??x, ?, {'x' * 64}, 0, ")
    assert header.endswith(", 11, ...")


def test_counts_of_ignored_fields_are_bounded():
    counts = Counter()
    for number in range(200):
        count_ignored((f"field{number}", "field0"), counts)
    assert len(counts) == MAX_COUNTED + 1
    assert counts["field0"] == 201 and counts["other"] == 200 - MAX_COUNTED


def test_many_unknown_fields_cost_little_and_are_refused():
    body = {f"unheard_of_{number}": 1 for number in range(50_000)}
    started_s = time.process_time()
    assert f"more than {MAX_UNKNOWN}" in refusal(**body).message
    assert time.process_time() - started_s < 5
