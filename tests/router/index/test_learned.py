"""What is learned of workers that tell nothing: for a time, bounded, until they tell; and where the router switches it
on.
"""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvrelay.plane.messages import KvEvents, KvSnapshot, WorkerInfo
from kvrelay.router.decision.router import Router
from kvrelay.router.index.indexed_worker import LearnedPrefixes
from kvrelay.router.index.prefix_index import LEARNED_S, SILENT_S, PrefixIndex
from kvrelay.router.types import IndexState, RouteRequest
from kvrelay.settings.router import RouterSettings
from kvrelay.types import Fingerprint
from tests.router.index.index_cases import depths, match

pytestmark = pytest.mark.pure


BLOCK = 16
CHAIN = tuple(f"h{i}".encode().ljust(16) for i in range(8))
OTHER = tuple(f"o{i}".encode().ljust(16) for i in range(8))


def index_of(**options):
    index = PrefixIndex(learned_s=10.0)
    index.add_worker("w", max_blocks=100, **options)
    return index


def silent(**options):
    """It has sent nothing for so long that what was learned of it counts."""
    index = index_of(**options)
    index.learn("w", (), -SILENT_S)
    index.learn("w", (), 0.0)
    assert index.state("w") is IndexState.APPROXIMATE
    return index


def test_what_was_computed_there_is_a_hit_for_a_time():
    index = silent()
    index.learn("w", CHAIN[:4], 0.0)
    index.learn("w", OTHER[:2], 6.0)
    assert depths(index, CHAIN) == {"w": (4, 4)}
    index.expire(9.9)
    assert (match(index, CHAIN), match(index, OTHER)) == ({"w": 4}, {"w": 2})
    index.expire(10.0)
    assert (match(index, CHAIN), match(index, OTHER)) == ({}, {"w": 2})
    index.expire(100.0)
    assert (len(index), index.num_blocks("w")) == (0, 0)


def test_what_is_computed_again_stays_longer():
    index = silent()
    index.learn("w", CHAIN[:4], 0.0)
    index.learn("w", CHAIN[:2], 5.0)
    index.expire(12.0)
    assert match(index, CHAIN) == {"w": 2}


def test_the_ends_of_the_longest_unused_chains_make_room():
    index = silent(max_learned=6)
    index.learn("w", CHAIN[:4], 0.0)
    index.learn("w", OTHER[:4], 1.0)
    assert (match(index, CHAIN), match(index, OTHER), index.num_blocks("w")) == ({"w": 2}, {"w": 4}, 6)
    index.learn("w", CHAIN, 2.0)
    assert (match(index, CHAIN), match(index, OTHER), index.num_blocks("w")) == ({"w": 6}, {}, 6)


@given(
    st.lists(st.tuples(st.sampled_from([CHAIN, OTHER]), st.integers(1, 6), st.floats(0, 8)), max_size=12),
    st.integers(1, 6),
)
def test_what_is_remembered_is_bounded_in_number_and_time(prompts, limit):
    learned, noted, now_s = LearnedPrefixes(limit, 10.0), {}, 0.0
    for chain, length, wait_s in prompts:
        now_s += wait_s
        chain = chain[: min(length, limit)]
        forgotten = learned.note(chain, now_s) + learned.expired(now_s)
        noted.update(dict.fromkeys(chain, now_s))
        assert not set(forgotten) & set(chain)
        for block_hash in forgotten:
            del noted[block_hash]
        assert len(learned) == len(noted) <= limit
        assert all(now_s - at_s < 10.0 for at_s in noted.values())


def test_a_worker_with_larger_blocks_is_learned_by_its_own_hashes():
    index = silent(stride=2)
    index.learn("w", CHAIN[:5], 0.0)
    assert (match(index, CHAIN), index.num_blocks("w")) == ({"w": 4}, 2)


def test_auto_believes_what_it_learned_only_of_those_that_stay_silent():
    index = index_of()
    index.learn("w", CHAIN[:4], 0.0)
    assert (index.state("w"), match(index, CHAIN)) == (IndexState.STALE, {})
    index.learn("w", CHAIN[:4], SILENT_S)
    assert (index.state("w"), match(index, CHAIN)) == (IndexState.APPROXIMATE, {"w": 4})


@pytest.mark.parametrize("silent_s", [0.0, SILENT_S])
def test_auto_takes_a_worker_s_own_word_from_the_first_on(silent_s):
    index = index_of()
    index.learn("w", CHAIN[:4], 0.0)
    index.learn("w", CHAIN[:4], silent_s)
    assert index.apply_events("w", 1, [], []) is False
    assert (index.state("w"), index.num_blocks("w")) == (IndexState.STALE, 0)
    index.apply_snapshot("w", 1, CHAIN[:1])
    index.learn("w", CHAIN, 99.0)
    assert (index.state("w"), match(index, CHAIN)) == (IndexState.EXACT, {"w": 1})


def info(worker_id, role, epoch="e"):
    return WorkerInfo(
        worker_id=worker_id,
        role=role,
        epoch=epoch,
        host="h",
        port=1,
        node_id="n",
        model="m",
        fingerprint=Fingerprint(1, "m", "bfloat16", BLOCK, 2, 2, 8, "seed"),
        block_size=BLOCK,
        num_blocks=100,
        max_model_len=1600,
        max_running=8,
        kv_bytes_per_token=100,
        device="cpu",
        transports=[],
    )


def router_with_two():
    router = Router(RouterSettings(), tokens_per_hash=BLOCK)
    for worker_id, role in (("p", "prefill"), ("d", "decode")):
        router.worker_up(info(worker_id, role))
    return router


def served(router, request_id, now_s, *, has_first_token=True):
    request = RouteRequest(request_id, CHAIN, len(CHAIN) * BLOCK + 1, 4, force="remote")
    decision = router.select_and_reserve(request, now_s)
    if has_first_token:
        router.on_first_token(request_id, now_s)
    router.on_end(request_id)
    return decision.cached_tokens_prefill, decision.cached_tokens_decode


def test_the_router_learns_from_first_tokens_alone():
    router = router_with_two()
    assert served(router, "r1", 0.0, has_first_token=False) == (0, 0)
    assert served(router, "r2", SILENT_S) == (0, 0)
    assert served(router, "r3", 2 * SILENT_S) == (0, 0)
    assert served(router, "r4", 2 * SILENT_S + 1) == (128, 128)
    assert served(router, "r5", 3 * SILENT_S + LEARNED_S) == (0, 0)


def test_by_itself_the_router_learns_of_the_silent_worker_and_hears_the_other():
    router = router_with_two()
    router.apply_snapshot("p", KvSnapshot(seq=0, hashes=list(CHAIN[:2])))
    assert served(router, "r1", 0.0) == (32, 0)
    assert served(router, "r2", 6.0) == (32, 0)
    assert served(router, "r3", 7.0) == (32, 128)
    router.apply_events("p", KvEvents(seq=1, stored=list(CHAIN[2:3])))
    assert served(router, "r4", 8.0) == (48, 128)


def test_a_first_token_of_an_earlier_life_teaches_nothing():
    router = router_with_two()
    served(router, "r1", 0.0)
    router.select_and_reserve(RouteRequest("r", CHAIN, len(CHAIN) * BLOCK + 1, 4, force="remote"), SILENT_S)
    router.worker_up(info("p", "prefill", "e2"))
    router.on_first_token("r", SILENT_S + 1)
    assert match(router.index, CHAIN) == {"d": 8}
