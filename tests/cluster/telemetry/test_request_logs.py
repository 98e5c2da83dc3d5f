"""One request's way through the logs of ingress, prefill and decode worker, found by its id alone."""

import ast
import logging
from pathlib import Path

import httpx
import pytest

from kvrelay.engine.checkpoints.tiny import tiny_checkpoint
from tests.small_cluster import small_cluster

pytestmark = pytest.mark.processes

ROOT = Path(__file__).resolve().parents[3]
SETTINGS = {
    "model": {"dtype": "float32", "max_model_len": 1024},
    "engine": {"kv_memory": "4MiB", "num_threads": 1, "backend": "reference"},
    "transfer": {"transport": "shm"},
    "router": {"local_prefill_tokens": 0},
}


async def test_the_whole_path_of_a_request_is_found_by_its_id(tmp_path, caplog):
    caplog.set_level(logging.DEBUG, "kvrelay")
    folder = tiny_checkpoint("llama", tmp_path / "tiny")
    headers = {"x-kvrelay-prefill": "remote", "x-request-id": "the-clients-own"}
    async with (
        small_cluster(folder, SETTINGS) as app,
        httpx.AsyncClient(transport=httpx.ASGITransport(app), base_url="http://test", timeout=60) as client,
    ):
        body = {"model": "tiny", "prompt": "one word after another " * 4, "max_tokens": 4, "ignore_eos": True}
        ids = [(await client.post("/v1/completions", json=body, headers=headers)).json()["id"] for _ in range(2)]
    found = [record.getMessage() for record in caplog.records if ids[1] in record.getMessage()]
    assert all(line.startswith(f"request {ids[1]}") for line in found)
    path = [
        "arrived",
        "routed, path=disaggregated, prefill=prefill-0, decode=decode-0",
        "decode-0: arrived",
        "decode-0: kv transfer begins",
        "reserved, worker=decode-0",
        "prefill-0: arrived",
        "prefill-0: prefill begins, decode_worker=decode-0",
        "first token, worker=prefill-0",
        "prefill-0: kv send begins",
        "decode-0: kv transfer ends, path=shm, blocks=1, bytes=",
        "decode-0: decode begins",
        "KV transferred",
        "decode-0: ended",
        "ended, outcome=length, tokens=4",
        "POST /v1/completions 200 ",
    ]
    missing = [what for what in path if not any(f": {what}" in line for line in found)]
    assert not missing, "\n".join(found)
    assert found[-1].endswith(", x-request-id=the-clients-own")
    assert not any("one word" in record.getMessage() for record in caplog.records)


def calls_about_requests():
    """(file, line, format) of every call of a logger with a request's id among its arguments."""
    for room in ("serve", "engine", "prefill", "decode", "kvtransfer"):
        for path in (ROOT / room).rglob("*.py"):
            for node in ast.walk(ast.parse(path.read_text())):
                if isinstance(node, ast.Call) and is_log(node.func) and any(map(names_a_request, node.args[1:])):
                    yield path.relative_to(ROOT), node.lineno, ast.unparse(node.args[0])


def is_log(function):
    owner = function.value if isinstance(function, ast.Attribute) else None
    return isinstance(owner, ast.Name) and owner.id in ("logger", "access_logger")


def names_a_request(argument):
    return any(getattr(node, "id", getattr(node, "attr", "")) == "request_id" for node in ast.walk(argument))


def test_every_line_with_a_requests_id_begins_with_it():
    calls = list(calls_about_requests())
    assert len(calls) >= 9
    assert [call for call in calls if not call[2].startswith("'request %s: ")] == []
