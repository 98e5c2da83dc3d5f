"""A real worker's snapshot over the wire: in parts, all else it has to say between them."""

import asyncio
from functools import partial

import pytest

from kvrelay.engine.checkpoints.tiny import tiny_checkpoint
from kvrelay.engine.worker import ingresses
from kvrelay.hashing import block_hashes
from kvrelay.kvcache.index.changes import parts_of
from kvrelay.plane import messages as wire
from kvrelay.plane.reports import KvSnapshot, LoadReport
from tests.cluster.live.one_worker import worker_and_peers

pytestmark = pytest.mark.alone


BLOCK = 16
PROMPT = [3 + index * 7 % 50 for index in range(100)]


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return tiny_checkpoint("llama", tmp_path_factory.mktemp("models") / "tiny-llama")


async def until(connection, is_wanted):
    """All messages up to this one."""
    messages = []
    async with asyncio.timeout(60):
        while not messages or not is_wanted(messages[-1]):
            messages.append(wire.decode_from_worker(await connection.receive()))
    return messages


def snapshots(messages):
    return [one for one in messages if isinstance(one, KvSnapshot)]


async def served(connection, hashes):
    request = wire.SequenceRequest(
        request_id="r",
        token_ids=PROMPT,
        num_prompt_tokens=len(PROMPT),
        tokens_per_hash=BLOCK,
        block_hashes=hashes,
        sampling=wire.Sampling(max_tokens=2, ignore_eos=True, temperature=0.0),
    )
    connection.send_nowait(wire.encode(wire.Generate(request=request)))
    await until(connection, lambda one: isinstance(one, wire.Tokens) and one.outputs[-1].ends_request)


async def test_parts_come_in_order_after_the_first_one_and_add_up(folder, monkeypatch):
    monkeypatch.setattr(ingresses, "parts_of", partial(parts_of, max_hashes=1))
    async with worker_and_peers(folder, 2) as (_worker, (one, other)):
        hashes = list(block_hashes(PROMPT, BLOCK))
        await served(one, hashes)
        other.send_nowait(wire.encode(wire.Subscribe()))
        messages = await until(other, lambda message: isinstance(message, KvSnapshot) and message.is_last)
        parts = snapshots(messages)
        assert [part.part for part in parts] == list(range(6))
        assert [name for part in parts for name in part.hashes] == hashes
        assert {part.seq for part in parts} == {parts[0].seq} and parts[0].seq > 0
        assert any(isinstance(message, LoadReport) for message in messages), "a report waits for all parts"


async def test_who_asks_twice_hears_the_second_snapshot_whole(folder, monkeypatch):
    monkeypatch.setattr(ingresses, "parts_of", partial(parts_of, max_hashes=1))
    async with worker_and_peers(folder, 2) as (_worker, (one, other)):
        await served(one, list(block_hashes(PROMPT, BLOCK)))
        for _ in range(2):
            other.send_nowait(wire.encode(wire.Subscribe()))
        other.send_nowait(wire.encode(wire.StatusQuery(query_id=1)))
        parts = []
        while [part.part for part in parts].count(0) < 2 or not parts[-1].is_last:
            parts += snapshots(await until(other, lambda message: isinstance(message, KvSnapshot)))
        numbers = [part.part for part in parts]
        second = len(numbers) - 1 - numbers[::-1].index(0)
        assert numbers[second:] == list(range(6)) and numbers[:second] == list(range(second))
