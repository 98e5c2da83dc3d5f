"""Clusters in virtual time: what a request takes, who shares what, and that the same simulation gives the same
figures.
"""

import json
import math
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvrelay import types
from kvrelay.cluster.simulator import engine as engines
from kvrelay.cluster.simulator.clock import Clock
from kvrelay.cluster.simulator.engine import Stride
from kvrelay.cluster.simulator.network import Network
from kvrelay.errors import ConfigError
from tests.cluster.simulator.simulator_cases import (
    BLOCK,
    DECODE,
    PREFILL,
    SETTINGS,
    chats,
    entry,
    everything_is_given_back,
    profile,
    simulate,
)

pytestmark = pytest.mark.pure


HOP_S = 0.001


def first_and_gaps(sim):
    return sim.tally.ttft_s[0], sim.tally.tpot_s[0]


# ---- one request


def test_an_idle_cluster_takes_what_curve_and_messages_say():
    sim = simulate([entry(0.5, 100, 21)])
    ttft_s, tpot_s = first_and_gaps(sim)
    prefill_s = PREFILL.prefill_s(100, 0, 128)
    assert ttft_s == pytest.approx(4 * HOP_S + prefill_s)  # reserve, reserved, prefill, token
    last_layers_s = 112 * 1000 / 4 / 1e7  # whole blocks
    decode_s = sum(DECODE.decode_step_s(1, 101 + step) for step in range(20))
    assert tpot_s * 20 == pytest.approx(last_layers_s + 2 * HOP_S + decode_s, rel=1e-6)


def test_a_prompt_of_many_chunks_hides_its_transfer_but_for_the_last_layers():
    slow = simulate([entry(0.0, 1280, 2)], workers=profile(link_bytes_per_s=1e8))
    fast = simulate([entry(0.0, 1280, 2)], workers=profile(link_bytes_per_s=1e12))
    exposed_s = slow.tally.tpot_s[0] - fast.tally.tpot_s[0]
    assert exposed_s == pytest.approx(128 * 1000 / 4 / 1e8, rel=1e-3)
    assert slow.network.moved_bytes == pytest.approx(1280 * 1000)


def test_blocks_travel_whole():
    """100 tokens are seven blocks of 16."""
    assert simulate([entry(0.0, 100, 2)]).network.moved_bytes == pytest.approx(112 * 1000)


def test_a_link_slower_than_the_prefill_is_waited_for():
    sim = simulate([entry(0.0, 1280, 2)], workers=profile(link_bytes_per_s=1e6))
    assert sim.tally.tpot_s[0] > 1280 * 1000 / 1e6 - PREFILL.prefill_s(1280, 0, 128)


def test_without_prefill_workers_the_decode_worker_computes_the_prompt():
    sim = simulate([entry(0.0, 100, 21)], prefill=0)
    assert sim.tally.ttft_s[0] == pytest.approx(2 * HOP_S + DECODE.prefill_s(100, 0, 128))
    assert sim.network.moved_bytes == 0


def test_without_prefill_workers_prompts_are_computed_elsewhere_where_they_would_hold_up_too_many():
    """Of each long prompt one worker holds the first half."""
    shared = list(range(70))
    entries = [
        entry(0.02 * index, 2000, 2, [*shared, *range(100 * index + 100, 100 * index + 155)])
        if index % 8 == 0
        else entry(0.02 * index, 16, 200)
        for index in range(200)
    ]

    def moved(tpot_s):
        settings = {"router": {"max_inflight": 10_000}, "slo": {"ttft_s": 5.0, "tpot_s": tpot_s, "on_miss": "queue"}}
        sim = simulate(entries, prefill=0, decode=4, settings=settings)
        assert sim.tally.outcomes == {"done": 200}
        everything_is_given_back(sim)
        return sim.network.moved_bytes

    assert moved(tpot_s=0.02) > 4 * moved(tpot_s=1.0)


def test_an_output_of_one_token_ends_at_the_prefill_worker():
    sim = simulate([entry(0.0, 100, 1)])
    assert sim.tally.outcomes == {"done": 1} and sim.network.moved_bytes < 100 * 1000
    everything_is_given_back(sim)


def test_a_prompt_that_was_there_before_is_neither_computed_nor_moved_again():
    ids = list(range(6))
    first = simulate([entry(0.0, 100, 20, ids)])
    twice = simulate([entry(0.0, 100, 20, ids), entry(5.0, 100, 20, ids)])
    assert twice.tally.cached_tokens == 96
    assert twice.tally.ttft_s[1] < twice.tally.ttft_s[0]
    assert twice.network.moved_bytes <= first.network.moved_bytes + 4 * 1000


def test_a_conversation_goes_on_where_it_was_decoded_with_what_was_said_there():
    """Of 200 tokens and 121 of output all but the last have KV: 20 blocks; the next prompt begins with them."""
    first, ids = replace(entry(0.0, 200, 121, range(13)), session="s"), [*range(12), *range(50, 70)]
    goes_on = replace(entry(10.0, 400, 4, ids[:25]), session="s")
    another = replace(goes_on, session="t")
    held = [
        simulate([first, later], prefill=1, decode=1).workers[1].engine.scheduler.admission.hit_tokens
        for later in (goes_on, another)
    ]
    assert held == [20 * BLOCK, 12 * BLOCK]


# ---- many


@pytest.mark.slow
def test_every_request_ends_and_gives_everything_back():
    sim = simulate(chats(200))
    assert sim.tally.outcomes == {"done": 200}
    assert 0.2 < sim.summary()["hit_ratio"] < 0.9
    everything_is_given_back(sim)


@pytest.mark.slow
def test_pools_that_are_too_small_for_all_pre_empt_and_still_serve(monkeypatch):
    monkeypatch.setattr("kvrelay.cluster.simulator.engine.HEADROOM_SHARE", 0.0)
    sim = simulate(chats(150, every_s=0.01, output=150), workers=profile(num_blocks=64))
    assert sum(worker.engine.scheduler.preemption.num_preemptions for worker in sim.workers) > 0
    assert sum(sim.tally.outcomes.values()) == 150 and sim.tally.outcomes["done"] > 50
    everything_is_given_back(sim)


def test_more_than_an_ingress_takes_at_once_is_refused():
    sim = simulate(chats(100, every_s=0.0001), settings={"router": {"max_inflight": 10}})
    assert sim.tally.outcomes["overloaded"] > 50
    everything_is_given_back(sim)


def test_an_ingress_of_many_workers_stands_for_several_and_takes_what_they_take():
    """Eight workers for each."""
    limit = {"router": {"max_inflight": 10}}
    refused = [
        simulate(chats(100, every_s=0.0001), prefill=8, decode=decode, settings=limit).tally.outcomes["overloaded"]
        for decode in (4, 8, 56)
    ]
    assert refused == [90, 80, 20]


@pytest.mark.slow
def test_several_ingresses_share_the_workers():
    sim = simulate(chats(200), ingress=3)
    assert sim.tally.outcomes == {"done": 200}
    everything_is_given_back(sim)
    views = [{view.worker_id: view.indexed_blocks for view in ingress.router.workers()} for ingress in sim.ingresses]
    assert views[0] == views[1] == views[2] and sum(views[0].values()) > 100


def test_routers_know_what_the_workers_hold():
    sim = simulate(chats(200))
    sim.clock.run(sim.clock.now_s + 1.0)
    for view in sim.ingresses[0].router.workers():
        worker = next(one for one in sim.workers if one.worker_id == view.worker_id)
        assert view.index_state == "exact" and view.indexed_blocks == len(worker.engine.pool.cached_hashes())


@pytest.mark.slow
def test_the_same_simulation_gives_the_same_figures_to_the_bit():
    one, other = (simulate(chats(120), noise=0.1, seed=3, ingress=2).summary() for _ in range(2))
    assert json.dumps(one) == json.dumps(other)
    assert json.dumps(one) != json.dumps(simulate(chats(120), noise=0.1, seed=4, ingress=2).summary())


def test_leaps_change_no_figure(monkeypatch):
    load = [entry(0.3 * index, 100 + 7 * index, 80 + 11 * (index % 13)) for index in range(80)]
    cluster = {
        "workers": profile(block_size=256, num_blocks=64),
        "prefill": 1,
        "decode": 1,
        "settings": {"router": {**SETTINGS["router"], "policy": "round_robin"}},
    }  # joint could prefill locally, and gets load reports at other times where steps are fast-forwarded
    forwarded = simulate(load, **cluster)
    monkeypatch.setattr(engines.FastForward, "look", lambda fast_forward: (0, False))
    stepped = simulate(load, **cluster)
    assert forwarded.clock.num_events < 0.6 * stepped.clock.num_events
    assert forwarded.tally.outcomes == stepped.tally.outcomes
    assert list(forwarded.tally.ttft_s) == pytest.approx(list(stepped.tally.ttft_s), rel=1e-6)
    assert list(forwarded.tally.tpot_s) == pytest.approx(list(stepped.tally.tpot_s), rel=1e-6)


def test_a_scenario_that_cannot_be_is_refused():
    with pytest.raises(ConfigError, match="follows 7, before it followed another"):
        simulate([entry(0.0, 32, 1, [3, 4]), entry(1.0, 32, 1, [7, 4])])
    with pytest.raises(ConfigError, match="arrives before its predecessor"):
        simulate([entry(1.0), entry(0.5)])
    with pytest.raises(ConfigError, match="crash of p2: no such target"):
        simulate([], faults=[{"kind": "crash", "at_s": 1, "target": "p2"}])


# ---- the parts


@given(st.floats(1e-4, 1.0), st.floats(0.0, 1e-3), st.integers(1, 400), st.floats(0.0, 1.0))
def test_a_stride_knows_after_which_step_it_is_how_late(first_s, more_s, count, share):
    stride = Stride(5.0, None, count, first_s, more_s)
    now_s = 5.0 + share * stride.seconds(count)
    steps = stride.steps_until(now_s)
    assert 1 <= steps <= count
    assert steps == count or stride.seconds(steps) >= now_s - 5.0
    assert steps == 1 or stride.seconds(steps - 1) < now_s - 5.0


def moved(flows, *, link=10.0):
    """(when each flow ended) of flows as (begin, source, target, bytes)."""
    clock = Clock()
    network = Network(clock, link_bytes_per_s=link, local_bytes_per_s=100.0)
    ends = [math.nan] * len(flows)
    for index, (begin_s, source, target, num_bytes) in enumerate(flows):

        def begin(index=index, source=source, target=target, num_bytes=num_bytes):
            flow = network.open(source, target, lambda: ends.__setitem__(index, clock.now_s))
            flow.close(num_bytes)

        clock.at(begin_s, begin)
    clock.run()
    return ends, network


def test_a_flow_alone_has_the_link_and_two_have_half_each():
    assert moved([(0.0, "a", "b", 100.0)])[0] == [10.0]
    assert moved([(0.0, "a", "b", 100.0), (0.0, "a", "c", 100.0)])[0] == [20.0, 20.0]
    assert moved([(0.0, "a", "b", 100.0), (0.0, "c", "b", 100.0)])[0] == [20.0, 20.0]
    assert moved([(0.0, "a", "b", 100.0), (0.0, "c", "d", 100.0)])[0] == [10.0, 10.0]
    assert moved([(0.0, "a", "a", 100.0)])[0] == [1.0]  # within a machine


def test_who_comes_later_slows_who_is_there_and_leaves_it_the_rest():
    ends, network = moved([(0.0, "a", "b", 100.0), (5.0, "a", "b", 25.0)])
    assert ends == [12.5, 10.0]
    assert network.moved_bytes == pytest.approx(125.0)


@given(
    st.lists(st.tuples(st.floats(0, 20), st.sampled_from("abc"), st.sampled_from("abc"), st.floats(0, 100)), max_size=8)
)
def test_every_byte_arrives_and_no_link_is_beyond_its_speed(flows):
    ends, network = moved(flows)
    assert not any(map(math.isnan, ends))
    assert network.moved_bytes == pytest.approx(sum(one[3] for one in flows), abs=1e-6)
    last_s = max(ends, default=0.0)
    for (_, direction), link in network._links.items():
        assert link.moved_bytes <= (100.0 if direction == "local" else 10.0) * last_s + 1e-6


def test_nothing_of_a_cancelled_flow_is_charged_to_others():
    clock = Clock()
    network = Network(clock, link_bytes_per_s=10.0, local_bytes_per_s=100.0)
    ends = []
    gone, stays = (network.open("a", "b", lambda name=name: ends.append((name, clock.now_s))) for name in "gs")
    gone.close(100.0)
    stays.close(100.0)
    clock.at(4.0, gone.cancel)
    clock.run()
    assert ends == [("s", 12.0)]


def test_it_needs_no_torch_and_no_ray():
    import subprocess
    import sys

    code = "import kvrelay.cluster.commands.simulate, sys; sys.exit(bool({'torch', 'ray'} & sys.modules.keys()))"
    assert subprocess.run([sys.executable, "-c", code], timeout=120, check=False).returncode == 0


def test_events_at_the_same_time_happen_in_order_of_their_making():
    clock, seen = Clock(), []
    for name in "abc":
        clock.at(1.0, seen.append, name)
    clock.at(0.5, seen.append, "first")
    clock.at(2.0, seen.append, "never").cancel()
    clock.run()
    assert seen == ["first", "a", "b", "c"]


def flood(policy, outcomes, **options):
    """Forty prompts a second for 20 s, where two workers can compute about eighteen: first tokens in time."""
    entries = [entry(0.025 * index, 900, 4) for index in range(800)]
    router = {"policy": policy, "policy_options": options, "max_inflight": 10_000}
    given = {"router": router}
    sim = simulate(entries, workers=profile(num_blocks=65_536, max_running=128), ttft_s=3.0, settings=given)
    assert set(sim.tally.outcomes) == outcomes
    everything_is_given_back(sim)
    return sim.tally.num_ttft_kept


@pytest.mark.slow
def test_past_saturation_who_is_begun_is_still_in_time(monkeypatch):
    monkeypatch.setattr("kvrelay.cluster.simulator.worker.RESERVE_TIMEOUT_S", 600.0)
    monkeypatch.setattr(types, "MAX_WAITING", 10_000)
    kept = flood("joint", {"done", "overloaded"}, ttft_s=3.0)  # it lasts for 20 s
    assert kept > 2.5 * flood("least_loaded", {"done"})  # control: first come, first served
