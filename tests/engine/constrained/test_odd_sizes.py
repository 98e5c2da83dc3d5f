"""Constrained requests of odd sizes over HTTP; the model has two eos tokens and more ids than its tokenizer."""

import json
import re

import httpx
import pytest

from kvrelay.engine.checkpoints.tiny import tiny_checkpoint
from tests.small_cluster import small_cluster

SETTINGS = {
    "model": {"dtype": "float32", "max_model_len": 128},
    "engine": {"kv_memory": "8MiB", "num_threads": 1},
    "transfer": {"transport": "shm"},
    "router": {"local_prefill_tokens": 0},
}
EOS_IDS, B = [2, 258], 68  # B: the token of "b"
BODIES = {
    "one token": ({"regex": "[a-z]{5}", "max_tokens": 1}, "[a-z]", "length"),
    "over after one token": ({"regex": "a"}, "a", "stop"),
    "the empty text": ({"regex": ""}, "", "stop"),
    "the empty text, eos ignored": ({"regex": "", "ignore_eos": True}, "", "stop"),
    "over, eos ignored": ({"regex": "ab", "ignore_eos": True}, "ab", "stop"),
    "min_tokens beyond the grammar": ({"regex": "ab", "min_tokens": 10}, "ab", "stop"),
    "min_tokens within it": ({"regex": "[ab]*", "min_tokens": 9, "max_tokens": 30}, "[ab]{9,30}", None),
    "whitespace alone": ({"regex": "[ \\n]{1,8}"}, "[ \\n]{1,8}", "stop"),
    "one block of prompt": ({"regex": "[a-z]{5}", "prompt": "x" * 16}, "[a-z]{5}", "stop"),
    "to the context limit": ({"regex": "[a-z]{50}", "prompt": "x" * 123, "max_tokens": 5}, "[a-z]{5}", "length"),
    "a stop string inside": ({"regex": "(hello stop ){3}", "stop": ["stop"]}, "hello ", "stop"),
    "a stop token inside": ({"regex": "aaaabbb", "stop_token_ids": [B]}, "aaaa", "stop"),
    "a long constant": ({"regex": "x{80}", "max_tokens": 100}, "x{80}", "stop"),
    "characters of several tokens": ({"regex": "[🙂-🙏]{3}"}, "[🙂-🙏]{3}", "stop"),
    "n = 16": ({"regex": "[a-f]{4}", "n": 16, "temperature": 1}, "[a-f]{4}", "stop"),
    "best_of": ({"regex": "[a-f]{4}", "n": 2, "best_of": 4, "temperature": 1}, "[a-f]{4}", "stop"),
    "several prompts": ({"regex": "[a-f]{4}", "prompt": ["ab", "cd", "ef"]}, "[a-f]{4}", "stop"),
    "echo with logprobs": ({"regex": "[a-f]{4}", "echo": True, "logprobs": 2}, "abc def[a-f]{4}", "stop"),
    "cache_salt": ({"regex": "[a-f]{4}", "cache_salt": "s"}, "[a-f]{4}", "stop"),
    "bans that leave nothing": ({"regex": "a{4}", "bad_words": ["a"]}, "a{4}", "stop"),
    "allowed tokens that leave nothing": ({"regex": "[x-z]{4}", "allowed_token_ids": [B]}, "[x-z]{4}", "stop"),
}


@pytest.fixture
def folder(tmp_path):
    return tiny_checkpoint("llama", tmp_path / "tiny-llama", eos_token_id=EOS_IDS)


async def test_each_is_within_its_grammar_and_ends_as_it_should(folder):
    async with (
        small_cluster(folder, SETTINGS) as app,
        httpx.AsyncClient(transport=httpx.ASGITransport(app), base_url="http://test", timeout=60) as client,
    ):

        async def post(path, **own):
            body = {"model": "tiny", "prompt": "abc def", "temperature": 0, "max_tokens": 40} | own
            return await client.post(path, json=body)

        for name, (own, pattern, reason) in BODIES.items():
            reply = await post("/v1/completions", **own)
            assert reply.status_code == 200, (name, reply.text)
            for choice in reply.json()["choices"]:
                assert re.fullmatch(pattern, choice["text"]), (name, choice)
                assert reason in (None, choice["finish_reason"]), (name, choice)
        assert (await post("/v1/kv/prefetch", regex="a")).status_code == 200
        refused = await post("/v1/completions", regex="a", use_beam_search=True, n=2)
        assert refused.status_code == 400 and refused.json()["error"]["param"] == "regex"
        streamed = await post("/v1/completions", regex="(🙂🙃){2}", stream=True)
        events = [json.loads(line[6:]) for line in streamed.text.splitlines() if line.startswith("data: {")]
        assert "".join(choice["text"] for event in events for choice in event["choices"]) == "🙂🙃🙂🙃"
