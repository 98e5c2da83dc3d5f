"""The policies of other projects, each against numbers worked out by hand from its source's formula; then what holds for all of them."""

import math
from dataclasses import fields, replace
from itertools import pairwise

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kvrelay.errors import ConfigError
from kvrelay.plane.messages import KvEvents
from kvrelay.router.policies.base import MAX_CANDIDATES, Candidate, RoutingContext, WorkerTable
from kvrelay.router.policies.dynamo import Dynamo
from kvrelay.router.policies.least_loaded import LeastLoaded
from kvrelay.router.policies.llm_d import LlmD
from kvrelay.router.policies.mooncake import Mooncake
from kvrelay.router.policies.picking import best_rows, draws, unit
from kvrelay.router.policies.power_of_two import PowerOfTwo, two_by_two
from kvrelay.router.policies.prefix_affinity import PrefixAffinity
from kvrelay.router.policies.queue_plus_prefill import QueuePlusPrefill
from kvrelay.router.policies.random_choice import RandomChoice
from kvrelay.router.policies.registry import POLICIES as REGISTERED
from kvrelay.router.policies.round_robin import RoundRobin
from kvrelay.router.policies.session import Session
from kvrelay.router.policies.sglang import Sglang
from kvrelay.router.types import Decision, RouteRequest
from tests.router.decision.test_placement_rules import chain, cluster

pytestmark = pytest.mark.pure


BLOCK = 16
KINDS = (
    RandomChoice, RoundRobin, LeastLoaded, PowerOfTwo, Session, PrefixAffinity,
    Sglang, Dynamo, Mooncake, LlmD, QueuePlusPrefill,
)  # fmt: skip
POLICIES = {kind.name: kind for kind in KINDS}
BY_CHANCE = {"random", "power_of_two"}

DEFAULTS = {
    "nodes": 0, "held": 0, "expected": 0, "in_any_tier": 0, "queued_tokens": 0, "queued_requests": 0, "sequences": 0, "waiting": 0,
    "free_blocks": 1000, "num_blocks": 1000, "block_size": BLOCK, "prefill_tokens_per_s": 1000.0, "decode_step_s": 0.02, "recent_step_s": 0.02,
    "kv_bytes_per_s": 1e9, "kv_bytes_per_token": 1000, "turn": 0, "age_s": 0.0, "output_tokens": 0.0,
}  # fmt: skip


def side(count=None, *, prefix="w", **columns):
    """A side; columns left out are idle workers with empty caches. What a worker holds, it also holds further down."""
    if "held" in columns:
        columns.setdefault("expected", columns["held"])
        columns.setdefault("in_any_tier", columns["held"])
    count = count if count is not None else len(next(iter(columns.values())))
    arrays = {}
    for name, default in DEFAULTS.items():
        kind = np.int64 if isinstance(default, int) else np.float64
        arrays[name] = np.array(columns.pop(name, [default] * count), dtype=kind)
        arrays[name].flags.writeable = False
    assert not columns
    return WorkerTable(names=tuple(f"{prefix}{row}" for row in range(count)), **arrays)


def ask(tokens=160, *, draw=0.5, stored=0, **rest):
    request = RouteRequest(request_id="r1", block_hashes=(), num_tokens=tokens, max_tokens=64, **rest)
    return RoutingContext(request, draw, now_s=0.0, stored=stored)


def best(policy, prefills, decodes=None, **rest):
    return policy.rank(ask(**rest), prefills, side(1) if decodes is None else decodes)[0]


def prefill_of(policy, prefills, **rest):
    return best(policy, prefills, **rest).prefill


def decode_of(policy, decodes, **rest):
    return best(policy, side(1), decodes, **rest).decode


def parts_of(policy, way):
    return dict(zip(policy.term_names, way.parts, strict=True))


# ---- one rule each


def test_random_names_every_worker_equally_often_and_the_roles_independently():
    counts, prefills, decodes = np.zeros((4, 4)), side(4), side(4)
    for number in range(2000):
        way = best(RandomChoice({}), prefills, decodes, draw=number / 2000)
        counts[way.prefill, way.decode] += 1
    assert counts.sum(axis=0) == pytest.approx([500] * 4, abs=90)
    assert counts.sum(axis=1) == pytest.approx([500] * 4, abs=90)
    assert counts.ravel() == pytest.approx([125] * 16, abs=50)


def test_round_robin_takes_whoever_was_chosen_longest_ago():
    way = best(RoundRobin({}), side(turn=[7, 3, 9], queued_tokens=[0, 5000, 0]), side(turn=[4, 8, 2]))
    assert (way.prefill, way.decode) == (1, 2)


def test_round_robin_goes_around():
    turns, chosen = [0, 0, 0], []
    for number in range(1, 7):
        row = prefill_of(RoundRobin({}), side(turn=turns))
        chosen.append(row)
        turns[row] = number
    assert chosen == [0, 1, 2, 0, 1, 2]


def test_least_loaded_counts_prompt_tokens_or_requests_on_the_prefill_side():
    loads = side(queued_tokens=[300, 100], sequences=[1, 5])
    assert prefill_of(LeastLoaded({}), loads) == 1
    assert prefill_of(LeastLoaded({"by": "requests"}), loads) == 0
    assert decode_of(LeastLoaded({}), side(sequences=[3, 2])) == 1
    assert prefill_of(LeastLoaded({}), side(turn=[2, 1])) == 1


def test_power_of_two_takes_the_less_loaded_of_each_two_that_chance_names():
    load = np.arange(10)
    for number in range(50):
        request = ask(draw=number / 50)
        keys = draws(request.draw, 10, 1)
        named = np.argsort(keys).reshape(5, 2)
        rows = two_by_two(request, load, 1).reshape(5, 2)
        assert (np.sort(rows) == np.sort(named)).all()
        assert (load[rows[:, 0]] < load[rows[:, 1]]).all()


def test_power_of_two_never_takes_the_most_loaded_but_often_not_the_least():
    chosen = {prefill_of(PowerOfTwo({}), side(sequences=[0, 1, 2, 9]), draw=n / 100) for n in range(100)}
    assert chosen == {0, 1, 2}
    by_tokens = PowerOfTwo({"by": "tokens"})
    assert {prefill_of(by_tokens, side(queued_tokens=[9, 0], sequences=[0, 9]), draw=n / 20) for n in range(20)} == {1}


def test_a_session_stays_where_it_was_whatever_its_workers_have_to_do():
    workers = side(sequences=[0, 1, 2, 3, 4])
    first = prefill_of(Session({}), workers, session="s", draw=0.1)
    busy = replace(workers, sequences=np.array([90] * 5))
    assert prefill_of(Session({}), busy, session="s", draw=0.9) == first


def test_a_lost_worker_moves_its_own_sessions_only():
    before, after = side(8), side(7)  # the last one is gone
    moved = 0
    for number in range(400):
        was = prefill_of(Session({}), before, session=f"s{number}")
        now = prefill_of(Session({}), after, session=f"s{number}")
        assert now == was or was == 7
        moved += was != now
    assert 20 < moved < 90


def test_a_request_without_a_session_goes_by_its_own_id():
    def chosen(request_id):
        request = RouteRequest(request_id=request_id, block_hashes=(), num_tokens=10, max_tokens=2)
        return Session({}).rank(RoutingContext(request, 0.5, 0.0), side(8), side(8))[0].prefill

    assert len({chosen(f"r{n}") for n in range(60)}) == 8


def test_ray_takes_the_longest_prefix_from_a_tenth_of_the_prompt_on_and_of_equals_the_less_loaded():
    policy = PrefixAffinity({})
    assert prefill_of(policy, side(held=[16, 0], sequences=[900, 0]), tokens=160) == 0
    assert (
        prefill_of(policy, side(held=[16, 0], turn=[2, 1]), tokens=161) == 1
    )  # below a tenth: whoever was chosen longest ago
    assert prefill_of(policy, side(held=[32, 64, 64], sequences=[0, 5, 4])) == 2
    assert prefill_of(policy, side(held=[0, 0], turn=[3, 3], sequences=[2, 1])) == 1
    assert prefill_of(policy, side(held=[0, 0], turn=[2, 1], sequences=[0, 5])) == 1
    assert prefill_of(policy, side(held=[0, 0], turn=[2, 1], sequences=[0, 5]), needs_decode=False) == 1
    assert decode_of(policy, side(held=[0, 64])) == 1


def test_ray_falls_back_to_two_random_ones_beyond_the_threshold_that_it_has_none_of_by_default():
    policy = PrefixAffinity({"imbalanced_threshold": 10})
    uneven = side(held=[0, 160, 0], sequences=[0, 11, 0])
    assert {prefill_of(policy, uneven, draw=n / 50) for n in range(50)} == {0, 2}
    assert prefill_of(policy, side(held=[0, 160, 0], sequences=[0, 10, 0])) == 1


def test_sglang_follows_a_prefix_of_more_than_three_tenths():
    policy = Sglang({})
    assert prefill_of(policy, side(held=[0, 64], sequences=[0, 60]), tokens=160) == 1
    assert prefill_of(policy, side(held=[0, 48], sequences=[0, 60]), tokens=160) == 0  # exactly three tenths
    assert decode_of(policy, side(held=[0, 64], sequences=[0, 60])) == 1
    assert prefill_of(policy, side(held=[0, 0], turn=[2, 1])) == 1


@pytest.mark.parametrize(
    ("load", "is_uneven"), [([0, 64], False), ([0, 65], True), ([130, 200], True), ([140, 205], False)]
)
def test_sglang_takes_the_shortest_queue_when_load_is_uneven_by_both_measures(load, is_uneven):
    assert prefill_of(Sglang({}), side(held=[0, 160], sequences=load)) == (0 if is_uneven else 1)


def test_sglang_can_be_told_another_decode_policy():
    policy = Sglang({"decode": "power_of_two"})
    assert decode_of(policy, side(held=[160, 0], sequences=[9, 1])) == 1
    assert prefill_of(policy, side(held=[160, 0], sequences=[9, 1])) == 0


def test_dynamo_adds_queue_and_prompt_and_takes_off_what_is_cached():
    policy = Dynamo({})
    way = best(policy, side(held=[80, 0], queued_tokens=[64, 0]), tokens=160)  # 14 - 5 = 9 blocks against 10
    assert (way.prefill, way.score) == (0, 9 + 10)  # and the decode worker's blocks with this prompt
    assert parts_of(policy, way)["prefill_blocks"] == 14
    assert parts_of(policy, way)["overlap_credit"] == -5
    assert prefill_of(policy, side(held=[80, 0], queued_tokens=[96, 0])) == 1  # 16 - 5 = 11 against 10


def test_dynamos_credit_of_four_follows_the_cache_further_but_never_below_zero():
    policy = Dynamo({"credit": 4})
    way = best(policy, side(held=[80, 0], queued_tokens=[96, 0]))
    assert (way.prefill, way.score) == (0, 10)
    assert parts_of(policy, way)["overlap_credit"] == -16


def test_dynamo_credits_lower_tiers_and_a_shared_cache_less():
    lower = side(held=[80], in_any_tier=[160])
    assert best(Dynamo({}), lower).score - 10 == pytest.approx(10 - 5 - 0.75 * 5)
    shared = Dynamo({"shared_cache_multiplier": 0.5})
    assert best(shared, side(held=[80]), stored=160).score - 10 == pytest.approx(10 - 5 - 0.5 * 5)
    assert best(Dynamo({}), side(held=[80]), stored=160).score - 10 == 5


def test_dynamo_counts_announced_blocks_only_unless_told_to_predict():
    expected = side(held=[0, 0], expected=[160, 0], in_any_tier=[0, 0], queued_tokens=[16, 0])
    assert prefill_of(Dynamo({}), expected) == 1
    assert prefill_of(Dynamo({"predicted": True}), expected) == 0


def test_dynamo_scales_the_prefill_load_after_the_credit_and_lets_the_credit_decay():
    assert best(Dynamo({"prefill_load_scale": 3}), side(held=[80])).score - 10 == 15
    decaying = Dynamo({"credit_decay": 1})
    way = best(decaying, side(held=[80, 80], queued_tokens=[160, 0]))
    assert (way.prefill, way.score - 10) == (1, 5)
    candidates = decaying.rank(ask(), side(held=[80, 80], queued_tokens=[160, 0]), side(1))
    assert candidates[1].score - 10 == 20 - 0.5 * 5  # 10 blocks more in line than the other: as long as the prompt


def test_dynamo_chooses_the_decode_worker_by_blocks_in_use_alone():
    decodes = side(held=[160, 0], free_blocks=[500, 600], sequences=[0, 50])
    assert decode_of(Dynamo({}), decodes) == 1
    assert decode_of(Dynamo({"decode_active_request_weight": 3}), decodes) == 0  # 500 against 400 + 150


def test_dynamo_without_prefill_workers_adds_both_costs():
    decodes = side(held=[160, 0], free_blocks=[990, 1000])
    candidates = Dynamo({}).rank(ask(), side(0), decodes)
    assert [(way.decode, way.score) for way in candidates] == [(0, 0 + 20), (1, 10 + 10)] or [
        (way.decode, way.score) for way in candidates
    ] == [(1, 10 + 10), (0, 0 + 20)]
    assert Dynamo({}).rank(ask(), side(0), side(held=[160, 0], free_blocks=[991, 1000]))[0].decode == 0


def test_dynamos_temperature_draws_from_the_softmax_of_the_costs_over_their_range():
    policy = Dynamo({"temperature": 0.5})
    workers = side(held=[80, 0])
    share = np.mean([prefill_of(policy, workers, draw=n / 2000) == 0 for n in range(2000)])
    assert share == pytest.approx(1 / (1 + math.exp(-1 / 0.5)), abs=0.03)
    assert {prefill_of(Dynamo({}), side(held=[80, 0]), draw=n / 100) for n in range(100)} == {0}


def test_mooncake_computes_what_nobody_has_more_of():
    policy = Mooncake({})
    way = best(policy, side(held=[80, 80], queued_tokens=[0, 100]))
    assert way.prefill == 0
    assert parts_of(policy, way) == pytest.approx(
        {"transfer_s": 0, "queue_s": 0, "prefill_s": 0.08, "decode_share": 0.01}
    )


def test_mooncake_fetches_where_the_queue_is_longer_than_the_transfer():
    policy = Mooncake({})
    workers = side(held=[160, 0], queued_tokens=[1000, 0], kv_bytes_per_token=[10**5] * 2)  # 16 MB at 1 GB/s
    way = best(policy, workers, tokens=161)
    assert way.prefill == 1
    assert parts_of(policy, way) == pytest.approx(
        {"transfer_s": 0.016, "queue_s": 0, "prefill_s": 0.001, "decode_share": 0.011}
    )
    assert prefill_of(policy, replace(workers, queued_tokens=np.array([10, 0])), tokens=161) == 0


def test_mooncake_fetches_only_where_somebody_has_more_by_the_threshold():
    workers = side(held=[160, 16], queued_tokens=[100, 0])
    assert prefill_of(Mooncake({}), workers, tokens=161) == 1  # 0.001 + 0.000144 against 0.101
    assert prefill_of(Mooncake({"balancing_threshold": 10.0}), workers, tokens=161) == 0  # 0.145 against 0.101
    never = Mooncake({"balancing_threshold": float("inf")})
    with_nothing = side(held=[160, 0], queued_tokens=[155, 0])
    assert (
        prefill_of(Mooncake({"balancing_threshold": 10.0}), with_nothing, tokens=161) == 1
    )  # fetched: ten times nothing
    assert prefill_of(never, with_nothing, tokens=161) == 0


def test_mooncake_knows_lower_tiers_the_clusters_store_and_slow_links():
    policy = Mooncake({})
    near = best(policy, side(held=[0, 0], in_any_tier=[160, 0], queued_tokens=[500, 0]), tokens=161)
    far = best(policy, side(held=[0, 0], in_any_tier=[160, 0], queued_tokens=[500, 0], nodes=[0, 1]), tokens=161)
    assert near.prefill == far.prefill == 1
    assert far.parts[0] == pytest.approx(4 * near.parts[0])
    store = best(policy, side(1), tokens=161, stored=160)
    assert store.parts[0] == pytest.approx(4 * near.parts[0])
    assert parts_of(policy, store)["prefill_s"] == pytest.approx(0.001)


def test_mooncake_rejects_what_would_be_late():
    prefills, decodes = side(queued_tokens=[1000]), side(decode_step_s=[0.05])
    assert best(Mooncake({"ttft_slo_s": 1.2, "tbt_slo_s": 0.06}), prefills, decodes)
    assert Mooncake({"ttft_slo_s": 1.1}).rank(ask(), prefills, decodes) == []
    assert Mooncake({"tbt_slo_s": 0.04}).rank(ask(), prefills, decodes) == []


def test_mooncake_balances_the_decode_workers_memory():
    assert decode_of(Mooncake({}), side(free_blocks=[500, 100], num_blocks=[1000, 120], sequences=[0, 9])) == 1


def test_llm_d_weighs_prefix_twice_and_queue_once():
    policy = LlmD({})
    # 2 * 0.5 + 1 * 0 = 1 against 0 + 1: equal; one block more decides
    assert prefill_of(policy, side(held=[96, 0], waiting=[8, 0])) == 0
    assert prefill_of(policy, side(held=[64, 0], waiting=[8, 0])) == 1
    way = best(policy, side(held=[96, 0, 0], waiting=[8, 0, 4]))
    assert parts_of(policy, way) == pytest.approx(
        {
            "decode_prefix": 2, "decode_queue": 0, "decode_kv_utilization": 0,
            "prefill_prefix": 0.8, "prefill_queue": 1, "prefill_kv_utilization": 0,
        }
    )  # fmt: skip


def test_llm_d_sees_the_first_256_blocks_unless_precise():
    long = side(held=[256 * BLOCK, 512 * BLOCK], waiting=[0, 1])
    assert prefill_of(LlmD({}), long, tokens=1000 * BLOCK) == 0
    assert prefill_of(LlmD({"precise": True, "queue_weight": 0.1}), long, tokens=1000 * BLOCK) == 1
    half = side(held=[256 * BLOCK, 120 * BLOCK], waiting=[1, 0])  # 1 against 2 * 136 / 256
    assert prefill_of(LlmD({}), half, tokens=1000 * BLOCK) == 0


def test_llm_d_has_the_decode_worker_compute_what_is_short():
    def way(held, **options):
        return best(LlmD(options), side(1), side(held=[held]))

    assert way(160).prefill is None  # it lacks nothing
    assert way(144).prefill == 0  # it lacks 16 tokens
    assert way(144, non_cached_tokens=17).prefill is None
    assert way(0, non_cached_tokens=0).prefill is None  # never
    assert best(LlmD({}), side(1), side(1), tokens=15).prefill is None
    assert best(LlmD({}), side(1), side(held=[160]), force="remote").prefill == 0


def test_llm_d_chooses_the_decode_worker_first():
    decodes = side(held=[160, 128], waiting=[0, 1])
    candidates = LlmD({}).rank(ask(), side(held=[160, 0]), decodes)
    assert [(way.prefill, way.decode) for way in candidates] == [(None, 0), (0, 1), (1, 1)]


def test_llm_d_weighs_free_memory_when_told_to():
    decodes = side(free_blocks=[100, 900], turn=[0, 1])
    assert decode_of(LlmD({"kv_utilization_weight": 1}), decodes) == 1


def test_queue_plus_prefill_charges_the_own_prefill_sixteen_times():
    workers = side(held=[80, 0], queued_tokens=[1000, 0])
    assert prefill_of(QueuePlusPrefill({}), workers) == 0  # 1 + 16 * 0.08 = 2.28 s against 2.56 s
    assert prefill_of(QueuePlusPrefill({"weight": 1}), workers) == 1
    assert best(QueuePlusPrefill({}), workers).score == pytest.approx(2.28)
    assert prefill_of(QueuePlusPrefill({}), side(held=[0, 0], expected=[0, 80], in_any_tier=[0, 0])) == 1
    assert best(QueuePlusPrefill({}), side(held=[160])).score == pytest.approx(16 * 0.016)  # the last block is computed


# ---- options


@pytest.mark.parametrize("name", POLICIES)
def test_unknown_options_are_refused(name):
    with pytest.raises(ConfigError, match=f"router.policy_options of {name}: there is no option nonsense"):
        POLICIES[name]({"nonsense": 1})


@pytest.mark.parametrize(
    ("name", "options", "message"),
    [
        ("dynamo", {"credits": 2}, "did you mean credit"),
        ("dynamo", {"credit": "4"}, "credit: "),
        ("dynamo", {"credit": -1}, "credit: "),
        ("dynamo", {"predicted": 1}, "predicted: "),
        ("sglang", {"balance_abs_threshold": 1.5}, "balance_abs_threshold: "),
        ("llm_d", {"non_cached_tokens": True}, "non_cached_tokens: "),
        ("least_loaded", {"by": "luck"}, "by: "),
        ("random", {"seed": 1}, "it has none"),
    ],
)
def test_wrong_options_are_named(name, options, message):
    with pytest.raises(ConfigError, match=message):
        POLICIES[name](options)


# ---- what holds for all of them

STRICT = settings(max_examples=25, deadline=None)


@st.composite
def sides(draw, least=0, most=24):
    count = draw(st.integers(least, most))

    def column(low, high):
        return draw(st.lists(st.integers(low, high), min_size=count, max_size=count))

    held = np.array(column(0, 10), dtype=np.int64)
    expected, in_any_tier = held + column(0, 3), held + column(0, 3)
    columns = {"held": held, "expected": expected, "in_any_tier": in_any_tier}
    return side(
        count,
        **{name: np.minimum(blocks, 10) * BLOCK for name, blocks in columns.items()},
        nodes=column(0, 2), queued_tokens=column(0, 5000), sequences=column(0, 200), waiting=column(0, 20),
        free_blocks=column(1, 1000), turn=column(0, 50), prefill_tokens_per_s=column(1, 9000), kv_bytes_per_token=column(1, 99999),
    )  # fmt: skip


asks = st.builds(
    ask,
    st.integers(160, 400),
    draw=st.floats(0, 1, exclude_max=True),
    stored=st.sampled_from([0, 80, 160]),
    needs_decode=st.booleans(),
    force=st.sampled_from([None, "local", "remote"]),
    session=st.sampled_from(["", "s"]),
)


def check_contract(policy, request, prefills, decodes):
    """What base.Policy asks for."""
    candidates = policy.rank(request, prefills, decodes)
    assert candidates == policy.rank(request, prefills, decodes), "a decision can be told again"
    assert len(candidates) <= MAX_CANDIDATES
    assert len({(way.prefill, way.decode) for way in candidates}) == len(candidates)
    assert all(one.score <= other.score for one, other in pairwise(candidates))
    for way in candidates:
        assert len(way.parts) == len(policy.term_names)
        assert math.isfinite(way.score) and all(map(math.isfinite, way.parts))
        assert way.prefill is None or 0 <= way.prefill < len(prefills)
        assert way.decode is None or 0 <= way.decode < len(decodes)
    force, needs_decode = request.request.force, request.request.needs_decode
    if force == "local" or (not len(prefills) and force is None):
        assert all(way.prefill is None and way.decode is not None for way in candidates)
        assert bool(candidates) == bool(len(decodes))
    elif not needs_decode:
        assert all(way.prefill is not None and way.decode is None for way in candidates)
        assert bool(candidates) == bool(len(prefills))
    else:
        assert all(way.decode is not None for way in candidates)
        assert force != "remote" or all(way.prefill is not None for way in candidates)
        assert bool(candidates) == bool(len(prefills) and len(decodes))


@pytest.mark.parametrize("name", POLICIES)
def test_every_policy_keeps_the_contract(name):
    @STRICT
    @given(asks, sides(), sides())
    def holds(request, prefills, decodes):
        check_contract(POLICIES[name]({}), request, prefills, decodes)

    holds()


def permuted(one, order):
    columns = {field.name: getattr(one, field.name)[order] for field in fields(one) if field.name != "names"}
    return WorkerTable(names=tuple(one.names[row] for row in order), **columns)


def check_order(policy, request, workers, order):
    """The best score stays, and so does who has it, unless others have it too."""
    candidates, again = policy.rank(request, workers, side(1)), policy.rank(request, permuted(workers, order), side(1))
    assert again[0].score == pytest.approx(candidates[0].score)
    if sum(way.score == pytest.approx(candidates[0].score) for way in candidates) == 1:
        assert order[again[0].prefill] == candidates[0].prefill


@pytest.mark.parametrize("name", sorted(set(POLICIES) - BY_CHANCE))
def test_the_order_of_the_rows_decides_between_equals_only(name):
    @STRICT
    @given(st.data())
    def holds(data):
        workers = data.draw(sides(least=1, most=14))
        order = np.array(data.draw(st.permutations(range(len(workers)))))
        check_order(POLICIES[name]({}), ask(force="remote"), workers, order)

    holds()


def with_a_better_one(workers, row):
    """`row` idle, never chosen, holding the whole prompt; all others worse in everything."""
    better = np.zeros(len(workers), dtype=bool)
    better[row] = True
    return replace(
        workers,
        held=np.where(better, 160, np.minimum(workers.held, 96)),
        expected=np.where(better, 160, np.minimum(workers.expected, 96)),
        in_any_tier=np.where(better, 160, np.minimum(workers.in_any_tier, 96)),
        queued_tokens=np.where(better, 0, workers.queued_tokens + 200),
        sequences=np.where(better, 0, workers.sequences + 1),
        waiting=np.where(better, 0, workers.waiting + 1),
        free_blocks=np.where(better, 1000, np.minimum(workers.free_blocks, 900)),
        turn=np.where(better, 0, workers.turn + 1),
        prefill_tokens_per_s=np.full(len(workers), 1000.0),
        kv_bytes_per_token=np.full(len(workers), 10**6),
    )


@pytest.mark.parametrize("name", sorted(set(POLICIES) - BY_CHANCE - {"session"}))
@pytest.mark.parametrize("role", ["prefill", "decode"])
def test_a_worker_that_is_better_in_everything_wins(name, role):
    @STRICT
    @given(st.data())
    def holds(data):
        workers = data.draw(sides(least=1))
        row = data.draw(st.integers(0, len(workers) - 1))
        better = with_a_better_one(workers, row)
        request = ask(200, draw=data.draw(st.floats(0, 1, exclude_max=True)))
        policy = POLICIES[name]({})
        if role == "prefill":
            assert policy.rank(request, better, side(1))[0].prefill == row
        else:
            assert policy.rank(request, side(1), better)[0].decode == row

    holds()


@given(st.lists(st.integers(0, 5), min_size=1, max_size=60), st.integers(0, 9))
def test_the_best_rows_are_those_of_a_full_sort(score, seed):
    score, tie = np.array(score), draws(seed / 10, len(score), 1)
    assert best_rows(score, tie).tolist() == np.lexsort((tie, score))[:MAX_CANDIDATES].tolist()


def test_numbers_of_one_draw_are_spread_evenly():
    numbers = unit(draws(0.25, 10_000, 1))
    assert numbers.min() > 0 and numbers.max() < 1
    assert unit(np.array([0], dtype=np.uint64))[0] > 0 and unit(np.array([2**64 - 1], dtype=np.uint64))[0] < 1
    assert np.histogram(numbers, bins=10, range=(0, 1))[0] == pytest.approx([1000] * 10, abs=130)
    assert len(set(draws(0.25, 1000, 1)) & set(draws(0.25, 1000, 2))) == 0
    assert len(set(draws(0.25, 1000, 1)) & set(draws(0.2500001, 1000, 1))) == 0


@pytest.mark.parametrize("name", POLICIES)
def test_every_policy_serves_through_the_router(name):
    assert REGISTERED[name] is POLICIES[name]
    router, served = cluster(["p0", "p1", "p2"], ["d0", "d1", "d2"], policy=name), []
    for number in range(30):
        prompt = chain(f"s{number % 4}", 8 + number)
        request = RouteRequest(f"r{number}", prompt, len(prompt) * BLOCK, max_tokens=64, session=f"s{number % 4}")
        decision = router.select_and_reserve(request, now_s=float(number))
        assert isinstance(decision, Decision)
        assert (decision.policy, tuple(decision.policy_terms)) == (name, POLICIES[name].term_names)
        computing = decision.prefill or decision.decode
        served.append(computing)
        router.apply_events(computing, KvEvents(seq=served.count(computing), stored=list(prompt), removed=[]))
        router.on_first_token(request.request_id, number + 0.5)
        if number > 5:
            router.on_end(f"r{number - 5}")
    assert len(set(served)) > 1


# ---- controls: the checks above can fail


class Stubborn:
    """Always the first pair."""

    name, term_names = "stubborn", ()

    def __init__(self, options):
        self.calls = 0

    def rank(self, request, prefills, decodes):
        return [Candidate(0, 0, 0.0, ())]


class Forgetful(Stubborn):
    """Another pair each time."""

    def rank(self, request, prefills, decodes):
        self.calls += 1
        return [Candidate(self.calls % 2, 0, 0.0, ())]


class ByRow(Stubborn):
    """The queue, but of the first row as if it were empty."""

    def rank(self, request, prefills, decodes):
        queue = np.array(prefills.queued_tokens, dtype=float)
        queue[0] = -1.0
        return [Candidate(int(row), 0, float(queue[row]), ()) for row in np.argsort(queue)]


def test_the_contracts_check_sees_a_forced_request_that_goes_elsewhere():
    with pytest.raises(AssertionError):
        check_contract(Stubborn({}), ask(force="local"), side(2), side(2))


def test_the_contracts_check_sees_a_policy_that_remembers():
    with pytest.raises(AssertionError, match="told again"):
        check_contract(Forgetful({}), ask(), side(2), side(2))


def test_the_orders_check_sees_a_policy_that_prefers_a_row():
    with pytest.raises(AssertionError):
        check_order(ByRow({}), ask(), side(queued_tokens=[50, 10, 30]), np.array([1, 2, 0]))
