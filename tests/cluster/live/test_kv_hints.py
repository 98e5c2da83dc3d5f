"""Hints from the dispatcher over the wire to a whole worker, whose disk has the prompt after a restart."""

import asyncio
import operator

import pytest

from kvrelay.cluster.launch.local import local_cluster
from kvrelay.config import settings_from
from kvrelay.engine.checkpoints.tiny import tiny_checkpoint
from kvrelay.hashing import block_hashes
from kvrelay.plane.messages import EndPins, KvHints, Sampling, SequenceRequest

pytestmark = pytest.mark.alone


BLOCK = 16
PROMPT = [3 + index * 7 % 50 for index in range(100)]


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return tiny_checkpoint("llama", tmp_path_factory.mktemp("models") / "tiny-llama")


def started(folder, tmp_path):
    settings = settings_from(
        {
            "model": {"source": str(folder), "dtype": "float32"},
            "engine": {
                "kv_memory": "2MiB",
                "block_size": BLOCK,
                "num_threads": 1,
                "backend": "reference",
                "token_budget": 64,
            },
            "cache": {
                "host_memory": "2MiB",
                "disk_path": str(tmp_path / "kv"),
                "disk_size": "8MiB",
                "write_policy": "selective",
                "prefetch": "wait",
            },
        }
    )
    return local_cluster(settings, folder, num_prefill=0, num_inside=1)


def request(name, prompt=PROMPT, **hints):
    return SequenceRequest(
        request_id=name,
        token_ids=prompt,
        num_prompt_tokens=len(prompt),
        tokens_per_hash=BLOCK,
        block_hashes=list(block_hashes(prompt, BLOCK)),
        sampling=Sampling(max_tokens=4, ignore_eos=True, temperature=0.0),
        hints=KvHints(**hints),
    )


async def say(cluster, name, prompt=PROMPT, **hints):
    """(tokens, cached tokens)."""
    tokens, cached = [], 0
    async for output in cluster.dispatcher.generate(request(name, prompt, **hints)):
        tokens += output.token_ids
        cached = output.cached_tokens or cached
    return tokens, cached


async def pinned(cluster):
    """(blocks in the pool, in the host tier), after everything sent before."""
    await cluster.dispatcher.queries.status("inside-0")
    thread = cluster.inside[0].thread
    return await thread.call(lambda e: (e.pool.counts().pinned, e.tiers.controller.host.counts().pinned))


async def test_prefetch_and_pins_over_the_wire(folder, tmp_path):
    async with started(folder, tmp_path) as cluster:
        said = [await say(cluster, f"r{index}") for index in range(3)]
        assert await cluster.pool_leaks() == []
    async with started(folder, tmp_path) as cluster:
        worker_id, answer = await cluster.dispatcher.prefetch(request("p"), 30.0)
        assert worker_id == "inside-0"
        assert (answer.problem, answer.pool_tokens, answer.coming_tokens) == ("", 0, 96)
        assert await say(cluster, "r") == (said[0][0], 96)
        before = await pinned(cluster)
        await say(cluster, "s", PROMPT[::-1], pin_s=60.0, session="s")
        async with asyncio.timeout(60):  # blocks are copied to host memory behind the step
            while not all(map(operator.gt, await pinned(cluster), before)):
                await asyncio.sleep(0.02)
        cluster.dispatcher.links.send_to_all(EndPins(session="s"))
        assert await pinned(cluster) == before
        _, again = await cluster.dispatcher.prefetch(request("p2"), 30.0)
        assert again.pool_tokens == 96
        await cluster.inside[0].drain(0.0)
        _, refused = await cluster.dispatcher.prefetch(request("p3"), 30.0)
        assert refused.problem == "draining"
        assert await cluster.pool_leaks() == []
