"""One decode worker and a peer that knows the secret but not the rules: a refusal, and the worker lives."""

import asyncio
import contextlib
import math

import pytest

from kvrelay.engine.checkpoints.tiny import tiny_checkpoint
from kvrelay.engine.worker.ingresses import IngressLink
from kvrelay.hashing import block_hashes
from kvrelay.kvtransfer.protocol.messages import TransferResult
from kvrelay.plane import messages as wire
from kvrelay.plane.messages import Manifest, Sampling, SequenceRequest
from tests.cluster.live.one_worker import worker_and_peers

pytestmark = pytest.mark.alone


NAN = math.nan


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return tiny_checkpoint("llama", tmp_path_factory.mktemp("models") / "tiny-llama")


@contextlib.asynccontextmanager
async def started(folder):
    async with worker_and_peers(folder, 1) as (worker, (connection,)):
        yield worker, connection


def request(name: str, length: int = 40, **sampling) -> SequenceRequest:
    ids = [3 + index % 200 for index in range(length)]
    return SequenceRequest(
        request_id=name,
        token_ids=ids,
        num_prompt_tokens=length,
        block_hashes=list(block_hashes(ids, 16)),
        sampling=Sampling(**{"max_tokens": 4, "temperature": 0.0, "ignore_eos": True, **sampling}),
    )


async def hear(connection, *kinds):
    async with asyncio.timeout(60):
        while True:
            message = wire.decode_from_worker(await connection.receive())
            if isinstance(message, kinds):
                return message


async def finish(connection, name: str) -> list[int]:
    tokens: list[int] = []
    while True:
        message = await hear(connection, wire.Tokens, wire.Refused, wire.Failed)
        assert isinstance(message, wire.Tokens), message
        for output in message.outputs:
            if output.request_id == name:
                tokens += output.token_ids
                if output.finish_reason is not None:
                    return tokens


async def blocks_used(worker) -> int:
    await worker.thread.call(lambda engine: engine.check())
    return await worker.thread.call(lambda engine: engine.pool.counts().used)


@pytest.mark.parametrize("kind", [wire.Generate, wire.Reserve])
async def test_nonsense_is_refused_and_the_next_request_is_served(folder, kind):
    hostile = [
        {"top_k": 2**63},
        {"logit_bias": {99_999: 1.0}},
        {"min_tokens": 3, "stop_token_ids": (99_999,)},
        {"logprobs": 99_999},
        {"prompt_logprobs": -2},
        {"temperature": NAN},
    ]
    async with started(folder) as (worker, connection):
        for index, sampling in enumerate(hostile):
            wait = {"timeout_s": 5.0} if kind is wire.Reserve else {}
            connection.send_nowait(wire.encode(kind(request=request(f"bad{index}", **sampling), **wait)))
            refused = await hear(connection, wire.Refused, wire.Tokens, wire.Reserved, wire.Failed)
            assert isinstance(refused, wire.Refused) and refused.reason == "invalid"
        connection.send_nowait(wire.encode(wire.Generate(request=request("good"))))
        assert len(await finish(connection, "good")) == 4
        assert worker.healthy() and not len(worker.requests) and await blocks_used(worker) == 0


async def test_a_second_reserve_of_a_running_sequence_does_not_end_it(folder):
    async with started(folder) as (worker, connection):
        connection.send_nowait(wire.encode(wire.Generate(request=request("a", max_tokens=200))))
        await hear(connection, wire.Tokens)
        connection.send_nowait(wire.encode(wire.Reserve(request=request("a"), timeout_s=0.0)))
        duplicate = await hear(connection, wire.Refused)
        assert duplicate.reason == "duplicate"
        await finish(connection, "a")
        assert not worker.ends.target._incoming and await blocks_used(worker) == 0


@pytest.mark.parametrize("timeout_s", [NAN, -1.0, math.inf])
async def test_any_timeout_is_survived(folder, timeout_s):
    async with started(folder) as (worker, connection):
        connection.send_nowait(wire.encode(wire.Reserve(request=request("a"), timeout_s=timeout_s)))
        await hear(connection, wire.Refused, wire.Reserved)
        connection.send_nowait(wire.encode(wire.Abort(request_id="a")))
        connection.send_nowait(wire.encode(wire.Generate(request=request("b"))))
        assert len(await finish(connection, "b")) == 4
        assert await blocks_used(worker) == 0


async def test_a_grant_that_is_not_possible_is_a_refusal_and_leaks_nothing(folder, monkeypatch):
    async with started(folder) as (worker, connection):

        def grant(*args, **kwargs):
            raise ValueError("a still holds the blocks of an earlier grant")

        monkeypatch.setattr(worker.ends.target.plane, "grant", grant)
        connection.send_nowait(wire.encode(wire.Reserve(request=request("a"), timeout_s=5.0)))
        refused = await hear(connection, wire.Refused)
        assert refused.reason == "duplicate"
        assert not worker.ends.target._incoming and not len(worker.requests)
        assert await blocks_used(worker) == 0


@pytest.mark.parametrize("token_ids", [[10**6], [-1], [5, 6], []])
async def test_a_first_token_that_cannot_be_is_a_failed_transfer(folder, token_ids):
    async with started(folder) as (worker, connection):
        connection.send_nowait(wire.encode(wire.Reserve(request=request("a"), timeout_s=5.0)))
        await hear(connection, wire.Reserved)
        manifest = Manifest(request_id="a", num_tokens=40, position=0, token_ids=token_ids)
        worker.ends.target._on_commit("a", wire.encode(manifest), TransferResult("shm", 3, 1, 0.1, 0.1))
        failed = await hear(connection, wire.Failed, wire.Transferred)
        assert isinstance(failed, wire.Failed) and failed.retryable
        connection.send_nowait(wire.encode(wire.Generate(request=request("b"))))
        assert len(await finish(connection, "b")) == 4
        assert worker.healthy() and await blocks_used(worker) == 0


async def heard_positions(connection, name: str) -> list[tuple[int, list[int]]]:
    heard = []
    while True:
        message = await hear(connection, wire.Tokens)
        for output in message.outputs:
            assert output.request_id == name
            heard.append((output.position, output.token_ids))
            if output.finish_reason is not None:
                return heard


@pytest.mark.parametrize("at_once", [True, False])
async def test_tokens_past_the_loop_are_those_that_the_loop_sends(folder, monkeypatch, at_once):
    """Each once and in order, whoever sends them; the loop hears of those in a stream's middle only if it must."""
    if not at_once:
        monkeypatch.setattr(IngressLink, "send_from_thread", lambda self, message: False)
    async with started(folder) as (worker, connection):
        told, real = [], worker.thread._on_step
        worker.thread._on_step = lambda result: (told.extend(result.outputs), real(result))
        connection.send_nowait(wire.encode(wire.Generate(request=request("r", max_tokens=12))))
        heard = await heard_positions(connection, "r")
        assert [position for position, _ in heard] == list(range(12))
        assert all(len(tokens) == 1 for _, tokens in heard)
        assert not len(worker.requests), "the last token came before the books were closed"
        assert len(told) == (1 if at_once else 12)
        assert await blocks_used(worker) == 0
