"""bench/router/live_routing.py: what it calls a fault of the index is one, what it calls late is not, and its oracle is
what pools could give.
"""

import pytest

from bench.router.hit_figures import Recent, Tally, looked
from bench.router.index_watch import IndexWatch
from kvrelay.cluster.launch.local import local_cluster
from kvrelay.config import settings_from
from kvrelay.engine.checkpoints.tiny import tiny_checkpoint
from kvrelay.hashing import block_hashes
from kvrelay.plane.messages import CHANGING, IN_POOL, NOWHERE, Sampling, SequenceRequest
from kvrelay.router.types import RouteRequest

pytestmark = pytest.mark.alone


BLOCK = 16
PROMPT = [3 + index * 7 % 50 for index in range(100)]
HASHES = list(block_hashes(PROMPT, BLOCK))


@pytest.mark.parametrize(
    ("claimed", "told", "tiers", "fault", "late"),
    [
        (2, 2, [IN_POOL, IN_POOL, NOWHERE], 0, 0),
        (1, 2, [IN_POOL, IN_POOL, NOWHERE], 0, -1),  # one was stored, and the news of it came after the decision
        (3, 2, [IN_POOL, IN_POOL, NOWHERE], 0, 1),
        (3, 3, [IN_POOL, IN_POOL, NOWHERE], 1, 0),  # all the news is in
        (2, 1, [IN_POOL, IN_POOL, NOWHERE], -1, 0),
        (2, 2, [IN_POOL, NOWHERE, IN_POOL], 1, 0),  # nothing is found behind a hole
        (2, 2, [IN_POOL, CHANGING, NOWHERE], 0, 1),  # given up, and not told yet
        (0, 0, [IN_POOL, CHANGING], -1, 0),
    ],
)
def test_what_differs_with_all_news_in_is_a_fault_what_only_was_claimed_is_late(claimed, told, tiers, fault, late):
    one = looked(claimed, told, tiers)
    assert (one.fault, one.late) == (fault, late)


def test_a_pool_gives_beginnings_and_loses_ends_first():
    pool = Recent(3)
    pool.add([b"a", b"b"])
    pool.add([b"c", b"d"])
    assert [pool.depth(chain) for chain in ([b"a", b"b"], [b"c", b"d"], [b"d"])] == [1, 2, 1]


def started(folder):
    settings = settings_from(
        {
            "model": {"source": str(folder), "dtype": "float32"},
            "engine": {"kv_memory": "2MiB", "block_size": BLOCK, "num_threads": 1, "backend": "reference"},
            "router": {"audit_s": 0},
        }
    )
    return local_cluster(settings, folder, num_prefill=0, num_inside=1)


async def serve(cluster):
    request = SequenceRequest(
        request_id="r", token_ids=PROMPT, num_prompt_tokens=len(PROMPT), tokens_per_hash=BLOCK, block_hashes=HASHES,
        sampling=Sampling(max_tokens=2, ignore_eos=True, temperature=0.0),
    )  # fmt: skip
    async for _ in cluster.dispatcher.generate(request):
        pass
    await cluster.dispatcher.queries.audit("inside-0", [])  # its events are in


async def counted(cluster, watch):
    """(decisions, faults and late claims) of one more decision, on a worker that holds all of the prompt."""
    cluster.dispatcher.placer.place(RouteRequest("again", tuple(HASHES), len(PROMPT), 4))
    cluster.dispatcher.router.on_end("again")
    await watch.settled()
    tally = Tally(BLOCK)
    tally.claimed(list(watch.found.pop("again").values()))
    return [tally.claims, *tally.faults.cells("").values(), *tally.late.cells("").values(), tally.is_sound]


async def test_a_real_worker_is_watched_and_what_its_index_has_wrong_is_counted(tmp_path):
    decisions, arrivals = [], []
    async with started(tiny_checkpoint("llama", tmp_path / "tiny-llama")) as cluster:
        watch = IndexWatch(cluster.dispatcher, decisions.append, arrivals.append)
        await serve(cluster)
        assert [one.request_id for one in decisions] == ["r"] and watch.found["r"]["inside-0"].held == 0
        assert await counted(cluster, watch) == [1, "0 (0)", "0 (0)", "0 (0)", "0 (0)", True]
        member = cluster.dispatcher.router.index._members["inside-0"]
        member.drop(HASHES[4:5])  # as a fault of ours would
        assert await counted(cluster, watch) == [1, "0 (0)", "1 (32)", "0 (0)", "0 (0)", False]
        member.store(HASHES[4:5])
        await cluster.inside[0].thread.call(lambda engine: engine.pool.reset_cache())
        member.seq += 1  # the news of it will be taken for old
        assert await counted(cluster, watch) == [1, "1 (96)", "0 (0)", "0 (0)", "0 (0)", False]
        assert not arrivals  # nothing came from a prefill worker
