"""The access log: a line for each request, at INFO, with its status and id, and nothing that the client sent."""

import logging
import re

import pytest

from kvrelay.logs import ACCESS_LOGGER
from tests.serve.conftest import MODEL

SECRET = "the words of the prompt"
BODY = {"model": MODEL, "prompt": SECRET, "max_tokens": 4}


@pytest.fixture
def lines(caplog):
    caplog.set_level(logging.INFO, ACCESS_LOGGER)
    return lambda: [record.getMessage() for record in caplog.records if record.name == ACCESS_LOGGER]


async def test_a_request_is_a_line_with_method_path_status_time_and_id(make_cluster, lines):
    cluster = await make_cluster()
    answer = (await cluster.client.post("/v1/completions", json=BODY)).json()
    (line,) = lines()
    found = re.fullmatch(r"request (\S+): POST /v1/completions 200 (\d+\.\d) ms", line)
    assert found and float(found[2]) > 0 and found[1] == answer["id"]


async def test_the_clients_own_id_stands_beside_ours_and_cannot_forge_a_line(make_cluster, lines):
    cluster = await make_cluster()
    headers = {"x-request-id": "trace-me 7\tx" + "y" * 500}
    answer = (await cluster.client.post("/v1/completions", json=BODY, headers=headers)).json()
    (line,) = lines()
    assert line.startswith(f"request {answer['id']}: ") and line.endswith(", x-request-id=trace-me%207%09x" + "y" * 116)


async def test_a_stream_is_logged_once_its_last_byte_is_sent(make_cluster, lines):
    cluster = await make_cluster()
    async with cluster.client.stream("POST", "/v1/completions", json=BODY | {"stream": True}) as answer:
        assert [chunk async for chunk in answer.aiter_bytes()]
    (line,) = lines()
    assert re.match(r"request cmpl-\w+: POST /v1/completions 200 ", line)


async def test_a_refusal_shows_its_status_and_a_path_cannot_forge_a_line(make_cluster, lines):
    cluster = await make_cluster()
    await cluster.client.post("/v1/completions", json=BODY | {"n": 0})
    await cluster.client.get("/v1/models/a%0ab")
    first, second = lines()
    assert first.startswith("request -: POST /v1/completions 400 ")
    assert second.startswith("request -: GET /v1/models/a%0Ab 404 ")


async def test_no_line_holds_the_prompt_or_the_key(make_cluster, lines):
    cluster = await make_cluster()
    headers = {"authorization": "Bearer very-private"}
    await cluster.client.post(f"/v1/completions?note={SECRET}", json=BODY, headers=headers)
    assert lines() and not any("words" in line or "private" in line for line in lines())


async def test_above_info_nothing_is_logged(make_cluster, caplog, lines):
    caplog.set_level(logging.WARNING, ACCESS_LOGGER)
    cluster = await make_cluster()
    await cluster.client.get("/health")
    assert lines() == []
