"""Tiers below the pools of a simulated cluster: what they save, what that costs, and whose links it takes."""

import pytest

from kvrelay.cluster.simulator.engine import SimulatedEngine
from tests.cluster.simulator.simulator_cases import (
    BLOCK,
    SETTINGS,
    chats,
    entry,
    everything_is_given_back,
    profile,
    simulate,
)

pytestmark = pytest.mark.pure


BLOCK_BYTES = BLOCK * 1000


def cached(slots=4096, **fields):
    """Settings with a host tier of so many blocks under each pool."""
    cache = {"host_memory": str(slots * BLOCK_BYTES)} | fields
    return SETTINGS | {"cache": cache, "store": {"memory": "1KiB"}}  # its nodes hold nothing


SHARED = {"remote": "cluster", "prefetch": "wait"}
HERE = {"prefill": 1, "decode": 1}
WORKERS = {"num_blocks": 48, "load_bytes_per_s": {"host": 1e9}}  # too few for two prompts of 640 tokens
FIRST, OTHER = range(100, 140), range(200, 240)


def twice_with_another_between(**fields):
    load = [entry(0.0, 640, 4, FIRST), entry(3.0, 640, 4, OTHER), entry(6.0, 640, 4, FIRST)]
    return simulate(load, workers=profile(**WORKERS), **HERE, **fields)


def test_what_the_pool_let_go_of_comes_back_from_the_host_tier():
    without, with_tier = twice_with_another_between(), twice_with_another_between(settings=cached())
    left = without.tally.cached_tokens
    assert left < 10 * BLOCK
    assert with_tier.tally.cached_tokens == 39 * BLOCK  # never the last token
    assert with_tier.tally.tier_tokens == 39 * BLOCK - left
    assert with_tier.tally.ttft_s[2] < without.tally.ttft_s[2] / 3
    summary = with_tier.summary()
    assert summary["tiers"]["loaded_blocks"] >= 39 - left // BLOCK
    assert summary["hit_ratio_by_tier"]["lower_tiers"] > summary["hit_ratio_by_tier"]["pool"] > 0
    everything_is_given_back(with_tier)


def test_a_slow_host_tier_is_waited_for():
    fast = twice_with_another_between(settings=cached())
    workers = WORKERS | {"load_bytes_per_s": {"host": 1e6}}
    load = [entry(0.0, 640, 4, FIRST), entry(3.0, 640, 4, OTHER), entry(6.0, 640, 4, FIRST)]
    slow = simulate(load, workers=profile(**workers), **HERE, settings=cached())
    assert slow.tally.ttft_s[2] > fast.tally.ttft_s[2] + 0.5
    assert slow.tally.ttft_s[2] == pytest.approx(slow.tally.tier_tokens * 1000 / 1e6, rel=0.2)


def test_a_worker_gets_from_another_what_that_one_holds_and_the_network_carries_it():
    """Round robin sends the same prompt to both prefill workers in turn."""
    load = [entry(0.0, 640, 4, FIRST), entry(3.0, 640, 4, FIRST)]
    rule = {"router": SETTINGS["router"] | {"policy": "round_robin"}}
    own = simulate(load, settings=cached() | rule)
    shared = simulate(load, settings=cached(**SHARED) | rule)
    assert own.tally.cached_tokens == 0
    assert shared.tally.cached_tokens == 39 * BLOCK and shared.tally.tier_tokens == 39 * BLOCK
    assert shared.summary()["tiers"]["fetched_blocks"] >= 39
    more = shared.network.moved_bytes - own.network.moved_bytes
    saved = 640 * 1000  # the decode worker has fetched the prompt, too: it need not be sent
    assert more == pytest.approx(shared.summary()["tiers"]["fetched_blocks"] * BLOCK_BYTES - saved, rel=0.01)
    everything_is_given_back(shared)


def test_fetching_over_a_link_slower_than_computing_is_tried_and_then_left():
    load = [
        entry(2.0 * index, 640, 4, range(100 * name, 100 * name + 40))
        for index, name in enumerate([0, 1, 1, 0, 2, 3, 3, 2])
    ]
    rule = {"router": SETTINGS["router"] | {"policy": "round_robin"}}

    def fetched(bytes_per_s):
        sim = simulate(load, settings=cached(remote="cluster") | rule, workers=profile(link_bytes_per_s=bytes_per_s))
        stores = [worker.engine.tiers.store for worker in sim.workers if worker.role == "prefill"]
        return [store.stats().loaded_blocks // 39 for store in stores]

    assert fetched(1e9) == [2, 2]
    assert fetched(2e6) == [1, 1]  # each has measured it once


def test_the_stores_own_nodes_hold_what_all_workers_have_let_go_of():
    load = [
        entry(0.0, 640, 4, FIRST),
        *(entry(3.0 + 3 * k, 640, 4, range(1000 * k, 1000 * k + 40)) for k in range(1, 5)),
    ]
    load.append(entry(30.0, 640, 4, FIRST))
    node = {"store": {"memory": str(1000 * BLOCK_BYTES), "replicas": 1}}
    small = cached(slots=60, **SHARED)
    without = simulate(load, workers=profile(**WORKERS), **HERE, settings=small | {"store": {"memory": "1KiB"}})
    with_node = simulate(load, workers=profile(**WORKERS), **HERE, settings=small | node)
    assert with_node.tally.cached_tokens > without.tally.cached_tokens
    kept = sum(len(node.hashes()) for node in with_node.world.sources.nodes.values())
    assert with_node.summary()["tiers"]["stored_blocks"] == kept > 100  # what is there already is not stored again
    everything_is_given_back(with_node)


def test_a_crashed_worker_lends_nothing_any_more():
    load = [entry(0.0, 640, 4, FIRST), entry(6.0, 640, 4, FIRST)]
    rule = {"router": SETTINGS["router"] | {"policy": "round_robin"}}
    back = [{"kind": "crash", "at_s": 3.0, "target": who, "for_s": 1.0} for who in ("p0", "p1", "d0", "d1")]
    sim = simulate(load, settings=cached(**SHARED) | rule, faults=back, detect_s=0.0)
    assert sim.tally.outcomes == {"done": 2} and sim.tally.cached_tokens == 0
    assert {name for holders in sim.world.sources.workers.values() for name in holders} <= {
        one.worker_id for one in sim.fleet.live_workers()
    }


@pytest.mark.slow
def test_a_busy_cluster_with_tiers_gives_everything_back_and_is_the_same_each_time():
    fields = {"settings": cached(slots=256, **SHARED), "workers": profile(num_blocks=160)}
    sim = simulate(chats(200, every_s=0.03), **fields)
    assert sim.tally.outcomes == {"done": 200}
    summary = sim.summary()
    assert summary == simulate(chats(200, every_s=0.03), **fields).summary()
    assert summary["tiers"]["fetched_blocks"] > 0 and summary["hit_ratio_by_tier"]["lower_tiers"] > 0
    sim.clock.run(sim.clock.now_s + 5.0)
    everything_is_given_back(sim)


def test_tiers_are_production_s():
    engine = simulate([entry(0.0)], settings=cached()).workers[0].engine
    assert isinstance(engine, SimulatedEngine) and engine.tiers is not None
    assert type(engine.tiers.lower.controller).__module__ == "kvrelay.kvcache.tiers.controller"
