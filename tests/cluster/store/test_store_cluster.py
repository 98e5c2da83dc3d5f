"""Workers that share KV: what one has computed another brings from the cluster's store, or from that worker's
memory.
"""

import asyncio

import pytest
import torch

from kvrelay.cluster.launch.local import HOST, local_cluster
from kvrelay.config import settings_from
from kvrelay.engine.checkpoints.tiny import tiny_checkpoint
from kvrelay.hashing import block_hashes
from kvrelay.kvtransfer.slabs.server import SlabServer
from kvrelay.plane.messages import Sampling, SequenceRequest
from kvrelay.serve.workers.worker_link import Member

pytestmark = [pytest.mark.slow, pytest.mark.processes]

LENGTH = 200


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return tiny_checkpoint("llama", tmp_path_factory.mktemp("models") / "tiny-llama")


def settings(*, is_sealed=False):
    return settings_from(
        {
            "model": {"dtype": "float32", "max_model_len": 512},
            "engine": {"kv_memory": "8MiB", "token_budget": 64, "num_threads": 1},
            "cache": {"host_memory": "8MiB", "remote": "cluster", "prefetch": "wait", "sealed": is_sealed},
            "store": {"memory": "32MiB"},
            "cluster": {"prefill": 0},
        }
    )


def request(name):
    ids = torch.randint(3, 250, (LENGTH,), generator=torch.Generator().manual_seed(1)).tolist()
    sampling = Sampling(max_tokens=12, temperature=0.0, ignore_eos=True)
    hashes = list(block_hashes(ids, 16))
    return SequenceRequest(
        request_id=name, token_ids=ids, num_prompt_tokens=LENGTH, block_hashes=hashes, sampling=sampling
    )


async def tokens(cluster, index, name):
    """From this worker alone, and how many prompt tokens it did not compute."""
    worker = cluster.inside[index]
    cluster.dispatcher.workers.set_members([Member(worker.worker_id, str(worker.role), HOST, worker.info.port)])
    async with asyncio.timeout(60.0):
        await cluster.dispatcher.workers.wait_for(
            lambda d: [i.worker_id for i, _ in d.live_workers()] == [worker.worker_id]
        )
        found, cached = [], 0
        async for output in cluster.dispatcher.generate(request(name)):
            found += output.token_ids
            cached = output.cached_tokens if output.cached_tokens is not None else cached
    return found, cached


def store_of(worker):
    (store,) = worker.cluster_store._made
    return store


async def until_stored(cluster):
    store, hashes = store_of(cluster.inside[0]), request("x").block_hashes
    async with asyncio.timeout(60.0):
        while not all(await asyncio.to_thread(store.contains, hashes)):
            await asyncio.sleep(0.02)
    return store, hashes


@pytest.mark.parametrize("is_sealed", [False, True], ids=["plain", "sealed"])
async def test_what_one_worker_computed_another_brings_from_the_store_and_from_its_memory(folder, is_sealed):
    chosen = settings(is_sealed=is_sealed)
    async with local_cluster(chosen, folder, num_prefill=0, num_inside=3, num_stores=2) as cluster:
        expected, cached = await tokens(cluster, 0, "first")
        assert (len(expected), cached) == (12, 0)
        store, hashes = await until_stored(cluster)
        assert store.keeps_checksums is not is_sealed  # of what it is given; what is sealed verifies itself

        assert await tokens(cluster, 1, "from the store") == (expected, LENGTH // 16 * 16)
        (loaded,) = [tier for tier in cluster.inside[1].load().tiers if tier.tier == "cluster"]
        assert loaded.loaded_blocks == len(hashes)

        await asyncio.to_thread(store.delete, hashes)
        assert not any(
            await asyncio.to_thread(lambda: store._wait(store._client.exist([store.key(h) for h in hashes])))
        )
        assert await tokens(cluster, 2, "from a worker") == (expected, LENGTH // 16 * 16)
        lent = [store_of(worker)._client.peer_blocks.num_leased for worker in cluster.inside]
        assert sum(lent) == len(hashes), lent
        assert lent[2] == 0


async def test_without_the_store_and_without_lending_it_would_have_computed_all_of_it(folder, monkeypatch):
    """The negative control of the test above."""

    async def refuse(self, port=0):
        """Nobody can reach it."""

    monkeypatch.setattr(SlabServer, "start", refuse)  # of this process's workers; the store's nodes are others
    async with local_cluster(settings(), folder, num_prefill=0, num_inside=2) as cluster:
        expected, _ = await tokens(cluster, 0, "first")
        store, hashes = await until_stored(cluster)
        await asyncio.to_thread(store.delete, hashes)
        assert await tokens(cluster, 1, "second") == (expected, 0)
