"""What a client sees of an output that cannot be continued, and what is left of it."""

import asyncio

import httpx
import pytest

from kvrelay.engine.checkpoints.tiny import tiny_checkpoint
from kvrelay.engine.execution.constraints import Constraint
from kvrelay.serve.api import app as front
from tests.small_cluster import small_cluster

SETTINGS = {
    "model": {"dtype": "float32", "max_model_len": 512},
    "engine": {"kv_memory": "8MiB", "num_threads": 1},
    "transfer": {"transport": "shm"},
    "router": {"local_prefill_tokens": 0},
}


async def any_grammar(spec) -> None:
    """Whatever its text is: the workers see to it."""


@pytest.fixture
def folder(tmp_path):
    return tiny_checkpoint("llama", tmp_path / "tiny-llama")


@pytest.fixture
def breaks(monkeypatch):
    """breaks(count): constraints have a problem once they have seen so many tokens."""
    real = Constraint.matcher_row

    def after(count: int) -> None:
        def matcher_row(self, drafts, row):
            if 0 <= count <= self.num_seen and self.problem is None:
                self.problem = "the output exceeds the grammar's limits: too many states"
            return real(self, drafts, row)

        monkeypatch.setattr(Constraint, "matcher_row", matcher_row)

    return after


async def no_blocks_used(client: httpx.AsyncClient) -> None:
    async with asyncio.timeout(60):
        while True:
            lines = (await client.get("/metrics")).text.splitlines()
            used = [line for line in lines if line.startswith("kvrelay_kv_blocks") and 'state="used"' in line]
            if len(used) == 2 and all(line.endswith((" 0", " 0.0")) for line in used):
                return
            await asyncio.sleep(0.1)


def body(text: str, **own) -> dict:
    return {"model": "tiny", "prompt": text, "max_tokens": 24, "temperature": 0, **own}


async def test_a_client_gets_a_400_or_an_error_event_and_others_their_answers(folder, breaks, monkeypatch):
    monkeypatch.setattr(front.create_app, "__defaults__", (any_grammar,))
    digits = {"regex": "[0-9]{20}"}
    async with small_cluster(folder, SETTINGS) as app:
        transport = httpx.ASGITransport(app)
        async with httpx.AsyncClient(transport=transport, base_url="http://test", timeout=60) as client:
            for count in (0, 1, 5):  # on the prefill worker, with the decode worker's first token, and later
                breaks(count)
                failed, streamed, plain = await asyncio.gather(
                    client.post("/v1/completions", json=body("a" * 90, **digits)),
                    client.post("/v1/completions", json=body("b" * 90, stream=True, **digits)),
                    client.post("/v1/completions", json=body("c" * 90, ignore_eos=True)),
                )
                assert failed.status_code == 400 and "too many states" in failed.json()["error"]["message"]
                assert "too many states" in streamed.text and "[DONE]" not in streamed.text.split("too many states")[0]
                assert plain.status_code == 200 and plain.json()["usage"]["completion_tokens"] == 24
            breaks(-1)
            refused = await client.post("/v1/completions", json=body("d", regex="(["))
            assert refused.status_code == 400 and refused.json()["error"]["code"] == "invalid_grammar"
            whole = await client.post("/v1/completions", json=body("e" * 90, **digits))
            assert len(whole.json()["choices"][0]["text"]) == 20
            await no_blocks_used(client)
