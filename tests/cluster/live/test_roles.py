"""Workers whose roles differ: each runs with its own section, and serves the same tokens from its own blocks."""

import asyncio
import contextlib
import secrets

import pytest

from kvrelay.cluster.launch.local import make_worker
from kvrelay.config import settings_from
from kvrelay.engine.checkpoints.tiny import tiny_checkpoint
from kvrelay.errors import ConfigError
from kvrelay.hashing import block_hashes
from kvrelay.plane import connection as plane
from kvrelay.plane import messages as wire
from kvrelay.plane.messages import Sampling, SequenceRequest
from kvrelay.types import Role

pytestmark = pytest.mark.alone


PROMPT = [3 + 7 * index % 200 for index in range(70)]
COMMON = {
    "model": {"dtype": "float32"},
    "engine": {"kv_memory": "4MiB", "num_threads": 1, "backend": "reference", "token_budget": 128},
    "transfer": {"transport": "shm"},
}


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return tiny_checkpoint("llama", tmp_path_factory.mktemp("models") / "tiny-llama")


@contextlib.asynccontextmanager
async def started(folder, role, **sections):
    """A worker of this role, what it says of itself, and a connection to it."""
    secret = secrets.token_bytes(32)
    worker = make_worker(role, settings_from(COMMON | sections), folder, secret, "w0", None)
    info = await worker.start()
    connection = await plane.connect("127.0.0.1", info.port, secret)
    try:
        yield worker, info, connection
    finally:
        await connection.aclose()
        await worker.aclose()


async def generate(connection, name, *, tokens_per_hash, count=8):
    """(tokens, cached prompt tokens) of PROMPT, hashed by so many tokens."""
    request = SequenceRequest(
        request_id=name,
        token_ids=PROMPT,
        num_prompt_tokens=len(PROMPT),
        block_hashes=list(block_hashes(PROMPT, tokens_per_hash)),
        sampling=Sampling(max_tokens=count, temperature=0.0, ignore_eos=True),
        tokens_per_hash=tokens_per_hash,
    )
    connection.send_nowait(wire.encode(wire.Generate(request=request)))
    tokens, cached = [], None
    async with asyncio.timeout(60):
        while len(tokens) < count:
            message = wire.decode_from_worker(await connection.receive())
            assert not isinstance(message, wire.Refused | wire.Failed), message
            for output in message.outputs if isinstance(message, wire.Tokens) else []:
                tokens += output.token_ids
                cached = output.cached_tokens if cached is None else cached
    return tokens, cached


async def test_each_role_runs_with_its_own_section(folder):
    sections = {"prefill": {"block_size": 32, "kv_memory": "2MiB", "max_running": 3}, "decode": {"kv_layout": "HND"}}
    async with started(folder, Role.PREFILL, **sections) as (worker, info, _):
        layout = worker.thread.engine.cache.memory.layout
        assert (info.block_size, info.max_running, layout.order) == (32, 3, "NHD")
        assert layout.num_bytes <= 2 << 20
    async with started(folder, Role.DECODE, **sections) as (worker, info, _):
        layout = worker.thread.engine.cache.memory.layout
        assert (info.block_size, info.max_running, layout.order) == (16, 64, "HND")
        assert 2 << 20 < layout.num_bytes <= 4 << 20
        assert (
            info.fingerprint == worker.thread.engine.cache.fingerprint and worker.status()["info"]["block_size"] == 16
        )


async def test_a_worker_reports_its_sizes_and_a_context_that_the_pool_cuts(folder):
    async with started(folder, Role.DECODE) as (worker, _, _):
        [line] = worker.status()["sizes"]
        assert line.startswith("KV pool 4 MiB (engine.kv_memory), 128 tokens a step, 64 sequences")
    async with started(folder, Role.DECODE, decode={"kv_memory": "512KiB"}) as (worker, info, _):
        _, notice = worker.status()["sizes"]
        assert f"cut from 2,048 to {info.max_model_len:,} tokens" in notice and "engine.kv_memory" in notice


async def test_larger_blocks_and_another_order_give_the_same_tokens_and_hit_the_same_prefix(folder):
    async with started(folder, Role.DECODE) as (_, _, connection):
        expected, _ = await generate(connection, "plain", tokens_per_hash=16)
    own = {"block_size": 32, "kv_layout": "HND"}
    async with started(folder, Role.DECODE, decode=own) as (worker, _, connection):
        assert await generate(connection, "cold", tokens_per_hash=16) == (expected, 0)
        assert await generate(connection, "warm", tokens_per_hash=16) == (expected, 64)
        snapshot = await worker.thread.call(lambda engine: engine.reports.snapshot())
        assert set(snapshot.hashes) == set(block_hashes(PROMPT, 16)[1::2])
        await worker.thread.call(lambda engine: engine.check())


async def test_a_kv_layout_that_the_backend_cannot_read_ends_the_start(folder):
    sections = {"prefill": {"kv_layout": "HND", "backend": "cpu"}}
    with pytest.raises(ConfigError, match=r"prefill\.kv_layout: the cpu backend takes NHD, not HND"):
        async with started(folder, Role.PREFILL, **sections):
            pass


async def test_kv_memory_that_is_too_small_is_told_by_the_roles_key(folder):
    with pytest.raises(ConfigError, match=r"decode\.kv_memory: 1024 bytes hold 0 blocks"):
        async with started(folder, Role.DECODE, decode={"kv_memory": "1KiB"}):
            pass
