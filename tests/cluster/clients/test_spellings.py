"""Every spelling of structured output, asked of real engines that compute a tiny random model, holds for the output."""

import json
import re
from itertools import pairwise, product

import httpx

from kvrelay.engine.checkpoints.tiny import tiny_checkpoint
from tests.small_cluster import CHAT_SETTINGS, small_cluster

PATHS = ("remote", "local")
SETTINGS = CHAT_SETTINGS | {"model": {"dtype": "float32", "max_model_len": 512}}
BOUNDED = {"type": "integer", "minimum": 10, "maximum": 99}
SCHEMA = {"type": "object", "properties": {"a": BOUNDED}, "required": ["a"], "additionalProperties": False}
CONSTANT = {"type": "const_string", "value": "<f>"}
TAG = {"type": "sequence", "elements": [CONSTANT, {"type": "json_schema", "json_schema": SCHEMA}]}
JSON = r'\{\s*"a"\s*:\s*[1-9][0-9]\s*\}'
CASES = [
    ({"response_format": {"type": "json_schema", "json_schema": {"name": "x", "schema": SCHEMA}}}, JSON),
    ({"structured_outputs": {"json": SCHEMA, "disable_any_whitespace": True}}, r'\{"a":[1-9][0-9]\}'),
    ({"guided_json": json.dumps(SCHEMA)}, JSON),
    ({"guided_regex": "[ab]{3}c"}, "[ab]{3}c"),
    ({"guided_choice": ["yes", "no", 'é "q"\n']}, 'yes|no|é "q"\n'),
    ({"ebnf": 'root ::= "<" digit digit ">"\ndigit ::= [0-9]\n'}, "<[0-9]{2}>"),
    ({"grammar": 'start: "q" /[0-9]/'}, "q[0-9]"),
    ({"response_format": {"type": "structural_tag", "format": TAG}}, f"<f>{JSON}"),
]
# ids of tokens that limit the output without a grammar
LIMITS = [
    ({"allowed_token_ids": [70, 71]}, {70, 71}),
    ({"logit_bias": {"70": 100, "71": -100}}, {70}),
    ({"logit_bias": {"70": 100, "71": 100}, "bad_words": ["e", "dd"]}, None),
]


async def test_every_spelling_holds_for_the_output(tmp_path):
    folder = tiny_checkpoint("llama", tmp_path / "tiny")
    async with (
        small_cluster(folder, SETTINGS) as app,
        httpx.AsyncClient(transport=httpx.ASGITransport(app), base_url="http://test", timeout=60) as client,
    ):
        for path, (fields, pattern) in product(PATHS, CASES):
            headers = {"x-kvrelay-prefill": path}
            body = {
                "model": "tiny",
                "prompt": "hello",
                "max_tokens": 100,
                "temperature": 1.0,
                "seed": 1,
                "n": 2,
                **fields,
            }
            response = await client.post("/v1/completions", json=body, headers=headers)
            assert response.status_code == 200, response.text
            for choice in response.json()["choices"]:
                assert re.fullmatch(pattern, choice["text"]), (fields, choice["text"])
                assert choice["finish_reason"] == "stop"
        for path, (fields, allowed) in product(PATHS, LIMITS):
            headers = {"x-kvrelay-prefill": path}
            body = {
                "model": "tiny",
                "prompt": "hello",
                "max_tokens": 12,
                "return_token_ids": True,
                "ignore_eos": True,
                **fields,
            }
            (choice,) = (await client.post("/v1/completions", json=body, headers=headers)).json()["choices"]
            assert len(choice["token_ids"]) == 12
            assert allowed is None or set(choice["token_ids"]) <= allowed
            if "bad_words" in fields:  # tokens, as some ids of this vocabulary have no text
                pairs = set(pairwise(choice["token_ids"]))
                assert 71 not in choice["token_ids"] and (70, 70) not in pairs and any(70 in pair for pair in pairs)
