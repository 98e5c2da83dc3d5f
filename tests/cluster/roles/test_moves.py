"""A sequence moves from one decode worker to another with its KV: any worker can be the source of a transfer."""

import asyncio
import contextlib
import secrets

import pytest

from kvrelay.cluster.launch.local import HOST, make_worker
from kvrelay.config import settings_from
from kvrelay.engine.checkpoints.tiny import tiny_checkpoint
from kvrelay.hashing import block_hashes
from kvrelay.plane import connection as plane
from kvrelay.plane import messages as wire
from kvrelay.plane.messages import Sampling, SequenceRequest
from kvrelay.types import Role

pytestmark = pytest.mark.alone

PROMPT = [3 + 7 * index % 200 for index in range(70)]
NUM_TOKENS = 40
SETTINGS = {
    "model": {"dtype": "float32", "max_model_len": 1024},
    "engine": {"kv_memory": "4MiB", "num_threads": 1, "backend": "reference"},
    "transfer": {"transport": "shm"},
}


class Peer:
    """An ingress's connection to one worker, and what came over it."""

    def __init__(self, connection):
        self.connection, self.tokens, self.others = connection, {}, []

    def send(self, message):
        self.connection.send_nowait(wire.encode(message))

    async def read(self):
        message = wire.decode_from_worker(await self.connection.receive())
        if isinstance(message, wire.Tokens):
            for output in message.outputs:
                self.tokens.setdefault(output.request_id, []).extend(output.token_ids)
        else:
            self.others.append(message)

    async def until(self, condition):
        async with asyncio.timeout(60):
            while not condition():
                await self.read()

    async def answer(self, kind):
        await self.until(lambda: any(isinstance(one, kind) for one in self.others))
        return next(one for one in self.others if isinstance(one, kind))


def sequence(name, token_ids, **sampling):
    return SequenceRequest(
        request_id=name,
        token_ids=list(token_ids),
        num_prompt_tokens=len(PROMPT),
        block_hashes=list(block_hashes(token_ids, 16)),
        sampling=Sampling(max_tokens=NUM_TOKENS, ignore_eos=True, **sampling),
        tokens_per_hash=16,
    )


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return tiny_checkpoint("llama", tmp_path_factory.mktemp("models") / "tiny-llama")


@contextlib.asynccontextmanager
async def two_decode_workers(folder):
    secret = secrets.token_bytes(32)
    workers = [make_worker(Role.DECODE, settings_from(SETTINGS), folder, secret, f"d{i}", None) for i in (1, 2)]
    async with contextlib.AsyncExitStack() as stack:
        peers = []
        for worker in workers:
            info = await worker.start()
            stack.push_async_callback(worker.aclose)
            peers.append(Peer(await plane.connect(HOST, info.port, secret)))
            stack.push_async_callback(peers[-1].connection.aclose)
        yield workers, peers


async def used_blocks(worker):
    def counts(engine):
        engine.check()
        return engine.pool.counts().used

    async with asyncio.timeout(60):
        while used := await worker.thread.call(counts):
            await asyncio.sleep(0.01)
    return used


@pytest.mark.parametrize("sampling", [{"temperature": 0.0}, {"temperature": 1.0, "seed": 7}], ids=["greedy", "seeded"])
async def test_a_running_sequence_moves_between_decode_workers_with_its_kv(folder, sampling):
    async with two_decode_workers(folder) as (workers, (first, second)):
        first.send(wire.Generate(request=sequence("whole", PROMPT, **sampling)))
        await first.until(lambda: len(first.tokens.get("whole", [])) == NUM_TOKENS)
        expected = first.tokens["whole"]

        first.send(wire.Generate(request=sequence("r", PROMPT, **sampling)))
        await first.until(lambda: len(first.tokens.get("r", [])) >= 21)
        so_far = first.tokens["r"][:21]
        move = sequence("r~1", PROMPT + so_far, **sampling)
        second.send(wire.Reserve(request=move, timeout_s=10.0))
        ticket = (await second.answer(wire.Reserved)).ticket
        workers[0].requests.is_draining = True  # a worker that shuts down still sends its sequences away
        first.send(wire.Prefill(request=move, ticket=ticket, moves="r"))
        first.send(wire.Abort(request_id="r"))
        await first.until(lambda: "r~1" in first.tokens)
        moved = await second.answer(wire.Transferred)
        await second.until(lambda: len(second.tokens.get("r~1", [])) == NUM_TOKENS - 22)
        assert so_far + first.tokens["r~1"] + second.tokens["r~1"] == expected
        assert moved.blocks == 6 and moved.transport == "shm"  # of (70 + 21) tokens
        assert [await used_blocks(worker) for worker in workers] == [0, 0]


async def test_new_requests_are_refused_by_role_and_may_be_tried_elsewhere(folder):
    async with two_decode_workers(folder) as (workers, (first, _)):
        workers[0].requests.role = "prefill"
        for index, message in enumerate((wire.Generate, wire.Reserve)):
            more = {"timeout_s": 1.0} if message is wire.Reserve else {}
            first.send(message(request=sequence(f"r{index}", PROMPT), **more))
        await first.until(lambda: sum(isinstance(one, wire.Refused) for one in first.others) == 2)
        refusals = [one for one in first.others if isinstance(one, wire.Refused)]
        assert {one.reason for one in refusals} == {"draining"}
        assert refusals[0].message == "d1 takes no decode requests: it is prefill"
        first.send(wire.Prefill(request=sequence("r2", PROMPT)))
        await first.until(lambda: first.tokens.get("r2"))


async def test_an_idle_end_costs_no_thread_and_no_exporter(folder):
    """A decode worker's pool is made readable for its first transfer."""
    async with two_decode_workers(folder) as (workers, _):
        source = workers[0].ends.source.plane
        assert source.transports == [] and not source.links
        assert workers[0].info.transports == ["shm"]
