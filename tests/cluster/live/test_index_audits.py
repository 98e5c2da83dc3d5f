"""Audits and both depths of the index against a whole worker over the wire."""

import pytest

from kvrelay.cluster.launch.local import local_cluster
from kvrelay.config import settings_from
from kvrelay.engine.checkpoints.tiny import tiny_checkpoint
from kvrelay.hashing import block_hashes
from kvrelay.plane.messages import Sampling, SequenceRequest
from kvrelay.plane.reports import BELOW_POOL, IN_POOL, NOWHERE, KvEvents
from kvrelay.router.types import IndexState
from tests.router.index import index_cases

pytestmark = pytest.mark.alone


BLOCK = 16
PROMPT = [3 + index * 7 % 50 for index in range(100)]
HASHES = list(block_hashes(PROMPT, BLOCK))


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return tiny_checkpoint("llama", tmp_path_factory.mktemp("models") / "tiny-llama")


def started(folder):
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
            "cache": {"host_memory": "2MiB", "write_policy": "write-through"},
        }
    )
    return local_cluster(settings, folder, num_prefill=0, num_inside=1)


async def serve(cluster):
    request = SequenceRequest(
        request_id="r",
        token_ids=PROMPT,
        num_prompt_tokens=len(PROMPT),
        tokens_per_hash=BLOCK,
        block_hashes=HASHES,
        sampling=Sampling(max_tokens=2, ignore_eos=True, temperature=0.0),
    )
    async for _ in cluster.dispatcher.generate(request):
        pass


async def depths(cluster):
    """(in the pool, anywhere), after everything the worker has sent so far."""
    await cluster.dispatcher.queries.audit("inside-0", [])
    return list(index_cases.depths(cluster.dispatcher.router.index, HASHES)["inside-0"])


async def audited(cluster):
    """Audit as production does; what was found, and the worker's state once its snapshot has come, if one was asked
    for.
    """
    index = cluster.dispatcher.router.index
    await cluster.dispatcher.workers.audits.audit("inside-0", seed=5)
    await cluster.dispatcher.queries.audit("inside-0", [])
    counts = index.audit_counts("inside-0")
    return counts.wrong, counts.missed, index.state("inside-0")


async def test_the_index_is_what_the_worker_holds_and_audits_mend_it_where_it_is_not(folder):
    async with started(folder) as cluster:
        index, worker = cluster.dispatcher.router.index, cluster.inside[0]
        await serve(cluster)
        assert await depths(cluster) == [6, 6]
        answer = await cluster.dispatcher.queries.audit("inside-0", [*HASHES, b"x" * 16])
        assert answer.tiers == [IN_POOL] * 6 + [NOWHERE]
        assert await audited(cluster) == (0, 0, IndexState.EXACT)

        await worker.thread.call(lambda engine: engine.pool.reset_cache())
        lowered = await depths(cluster)
        truth = (await cluster.dispatcher.queries.audit("inside-0", HASHES)).tiers
        assert lowered == [0, 6] and truth == [BELOW_POOL] * 6

        seq = answer.seq
        member = index._members["inside-0"]
        assert member.seq >= seq
        member.store([b"w" * 16])  # as a fault of ours would
        wrong, _, state = await audited(cluster)
        assert wrong and state is IndexState.EXACT and not member.holders.mask(b"w" * 16)

        cluster.dispatcher.router.apply_events("inside-0", KvEvents(seq=member.seq + 5))  # a gap
        assert index.state("inside-0") is IndexState.STALE
        await audited(cluster)
        await audited(cluster)
        assert index.state("inside-0") is IndexState.EXACT
        assert await depths(cluster) == lowered
