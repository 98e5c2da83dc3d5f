"""Other projects' policies, each against numbers worked out by hand from its source's formula."""

import math
from dataclasses import replace

import numpy as np
import pytest

from bench.router.levels import CONTENDERS
from bench.router.peer_policies.dynamo import Dynamo
from bench.router.peer_policies.llm_d import LlmD
from bench.router.peer_policies.mooncake import Mooncake
from bench.router.peer_policies.queue_plus_prefill import QueuePlusPrefill
from bench.router.peer_policies.sglang import Sglang
from kvrelay.errors import ConfigError
from kvrelay.router.policies.base import CostModel
from kvrelay.router.policies.selection import build_policy
from kvrelay.settings.router import RouterSettings
from tests.router.policies.policy_cases import (
    BLOCK,
    ask,
    best,
    check_a_better_worker_wins,
    check_keeps_the_contract,
    check_row_order_decides_between_equals_only,
    check_serves_through_the_router,
    decode_of,
    parts_of,
    prefill_of,
    side,
)

pytestmark = pytest.mark.pure

POLICIES = {policy.name: policy for policy in (Sglang, Dynamo, Mooncake, LlmD, QueuePlusPrefill)}


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


def is_local(prefills, decodes, *, tokens=10_000, force=None, **options):
    """Whether Dynamo has a decode worker compute the prompt."""
    return best(Dynamo(options), prefills, decodes, tokens=tokens, force=force).prefill is None


def test_dynamo_disaggregates_always_unless_told_otherwise():
    assert not is_local(side(1), side(held=[9984]))
    assert is_local(side(1), side(held=[9984]), conditional="isl_bounding")
    assert not is_local(side(1), side(held=[9984]), conditional="isl_bounding", force="remote")


@pytest.mark.parametrize(
    ("held", "tokens", "expected"),
    [
        (7968, 10_000, True),  # lacks 2,032 tokens, a fifth
        (7952, 10_000, False),  # 2,048
        (320, 1000, True),  # lacks 680, 68 %
        (288, 1000, False),  # 71 %
    ],
)
def test_dynamos_isl_bounding_asks_for_few_tokens_and_a_small_share(held, tokens, expected):
    free = side(held=[held], free_blocks=[5000], num_blocks=[5000])
    assert is_local(side(1), free, tokens=tokens, conditional="isl_bounding") is expected
    assert is_local(side(1), free, tokens=tokens, conditional="isl_or_load") is expected
    assert not is_local(side(1), free, tokens=tokens, conditional="prefill_load")


@pytest.mark.parametrize("policy", ["prefill_load", "isl_or_load"])
def test_dynamos_prefill_load_looks_at_the_queue_of_the_prefill_worker_that_would_be_chosen(policy):
    def local(queued, **more):
        prefills = side(queued_tokens=queued)
        return is_local(prefills, side(1), conditional=policy, max_num_batched_tokens=1000, **more)

    assert not local([4000, 9000], prefill_busy_threshold=4)  # the first would be chosen, with four batches
    assert local([4001, 9000], prefill_busy_threshold=4)
    assert not local([10**9])  # there is no default


def test_dynamo_leaves_decode_workers_alone_that_would_be_too_full():
    def local(free, **more):
        return is_local(side(1), side(held=[160], free_blocks=[free]), tokens=160, conditional="isl_bounding", **more)

    assert local(10, decode_busy_threshold=1.0) and local(110, decode_busy_threshold=0.9)
    assert not local(109, decode_busy_threshold=0.9)  # 891 blocks in use and 10 of the prompt, of 1,000
    assert local(0)  # there is no default


def test_dynamos_local_choice_follows_both_costs():
    decodes = side(held=[9984, 9984], queued_tokens=[50_000, 0], free_blocks=[1000, 900])
    candidates = Dynamo({"conditional": "isl_bounding"}).rank(ask(10_000), side(1), decodes)
    assert [(way.prefill, way.decode) for way in candidates] == [(None, 1), (None, 0)]


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
            "decode_prefix": 2,
            "decode_queue": 0,
            "decode_kv_utilization": 0,
            "prefill_prefix": 0.8,
            "prefill_queue": 1,
            "prefill_kv_utilization": 0,
        }
    )


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
    ],
)
def test_wrong_options_are_named(name, options, message):
    with pytest.raises(ConfigError, match=message):
        POLICIES[name](options)


# ---- what holds for all of them


@pytest.mark.parametrize("name", POLICIES)
def test_every_policy_keeps_the_contract(name):
    check_keeps_the_contract(POLICIES[name]({}))


@pytest.mark.parametrize("name", sorted(POLICIES))
def test_the_order_of_the_rows_decides_between_equals_only(name):
    check_row_order_decides_between_equals_only(POLICIES[name]({}))


@pytest.mark.parametrize("name", sorted(POLICIES))
@pytest.mark.parametrize("role", ["prefill", "decode"])
def test_a_worker_that_is_better_in_everything_wins(name, role):
    check_a_better_worker_wins(POLICIES[name]({}), role)


@pytest.mark.parametrize("name", POLICIES)
def test_every_policy_serves_through_the_router(name):
    path = f"{POLICIES[name].__module__}:{POLICIES[name].__qualname__}"
    check_serves_through_the_router(path, POLICIES[name])


@pytest.mark.parametrize("name", CONTENDERS)
def test_every_contender_of_the_bench_is_a_policy(name):
    one = CONTENDERS[name]
    for own in one.own or ({},):
        options = (one.options or {}) | own
        assert build_policy(RouterSettings(policy=one.policy, policy_options=options), CostModel()).name
