"""Our policy's own terms, one rule each: what it knows beyond the common cost, and what it does with that."""

from functools import partial

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvrelay.config import settings_from
from kvrelay.errors import ConfigError
from kvrelay.plane.reports import KvSnapshot, LoadReport
from kvrelay.router.decision.router import Router
from kvrelay.router.decision.snapshot import FADE_S, MAX_COUNTED, PrefixPopularity, candidate_scores
from kvrelay.router.fleet.account import RECENT_STEP_WINDOW_S, StepTime
from kvrelay.router.policies.base import CostModel, RoutingContext
from kvrelay.router.policies.cost import UNSET_SHARE, CommonCost, prefix_source, row_of, rows_of
from kvrelay.router.policies.joint import OWN_TERMS, SHORTLIST, Joint
from kvrelay.router.types import TERM_NAMES, SloRequirement, SloTarget
from kvrelay.settings.router import RouterSettings
from tests.router.decision.test_placement_rules import BLOCK, ask, chain, cluster, decided, holds, info, load
from tests.router.policies.policy_cases import side

pytestmark = pytest.mark.pure


def asked(request=None, **rest):
    return RoutingContext(request or ask(), 0.5, 0.0, **rest)


def terms(way):
    return dict(zip(Joint.term_names, way.parts, strict=True))


def ranked(request, prefills, decodes, **rest):
    return Joint({}).rank(asked(request, **rest), prefills, decodes)


def local(candidates):
    return next(way for way in candidates if way.prefill is None)


# ---- the order of candidates


@given(st.lists(st.tuples(st.integers(0, 4), st.integers(0, 3)), min_size=1, max_size=40))
def test_the_candidates_are_the_head_of_the_sorted_list(keys):
    prefills = side(queued_tokens=[1000 * queue for queue, _ in keys], turn=[turn for _, turn in keys])
    found = ranked(ask(needs_decode=False), prefills, side(0))
    assert [one.prefill for one in found] == sorted(range(len(keys)), key=lambda row: (*keys[row], row))[:SHORTLIST]


@pytest.mark.parametrize(("speed", "first"), [(1000.0 + 1e-7, 0), (1000.0 + 1e-2, 1)])
def test_scores_that_differ_by_less_than_a_microsecond_tie(speed, first):
    prefills = side(turn=[0, 1], prefill_tokens_per_s=[1000.0, speed])
    assert ranked(ask(needs_decode=False), prefills, side(0))[0].prefill == first


# ---- where the prompt's beginning comes from


def test_what_lies_in_a_lower_tier_is_loaded_where_that_is_quicker_than_computing():
    candidates = ranked(ask(force="remote"), side(2, prefix="p", in_any_tier=[0, 800]), side(1))
    assert (candidates[0].prefill, terms(candidates[0])["prefill_compute"]) == (1, 0.2)
    assert terms(candidates[0])["prefill_load"] == pytest.approx(800 * 1000 / CostModel().tier_bytes_per_s)


def test_a_tier_that_is_slower_than_computing_is_left_alone():
    policy = Joint({"tier_bytes_per_s": 1e5})
    candidates = policy.rank(asked(ask(force="remote")), side(2, prefix="p", in_any_tier=[0, 800]), side(1))
    assert {terms(way)["prefill_load"] for way in candidates} == {0.0}
    assert {terms(way)["prefill_compute"] for way in candidates} == {1.0}


def test_the_clusters_store_serves_every_worker_behind_what_it_has_itself():
    workers = rows_of(side(3, expected=[0, 320, 960], in_any_tier=[160, 320, 960]))
    found = [prefix_source(asked(stored_tokens=900), worker, CostModel()) for worker in workers]
    assert [one.cached for one in found] == [0, 320, 960]
    assert [one.loaded for one in found] == [896, 576, 0]  # whole blocks
    assert found[0].load_s > found[1].load_s > found[2].load_s == 0


tokens = st.integers(0, 70)


@given(st.integers(1, 1200), st.lists(st.tuples(tokens, tokens), min_size=1, max_size=4), st.integers(0, 1200))
def test_a_prompt_is_cached_loaded_or_computed_and_its_last_token_always_computed(num_tokens, columns, stored):
    hashes = chain("a", num_tokens // BLOCK)
    expected = [BLOCK * min(one, num_tokens // BLOCK) for one, _ in columns]
    in_any_tier = [
        max(have, BLOCK * min(more, num_tokens // BLOCK)) for have, (_, more) in zip(expected, columns, strict=True)
    ]
    workers = side(len(columns), expected=expected, in_any_tier=in_any_tier)
    for worker in rows_of(workers):
        context = asked(ask(tokens=num_tokens, hashes=hashes), stored_tokens=stored)
        found = prefix_source(context, worker, CostModel())
        assert num_tokens - found.cached - found.loaded >= 1 and found.loaded >= 0
        assert found.load_s <= found.loaded / worker.prefill_tokens_per_s


@pytest.mark.parametrize("has_store", [True, False])
def test_with_a_store_of_the_clusters_every_worker_can_load_what_one_has_computed(has_store):
    router = Router(RouterSettings(), tokens_per_hash=BLOCK, has_store=has_store)
    for name, role in (("p1", "prefill"), ("p2", "prefill"), ("d1", "decode")):
        router.worker_up(info(name, role))
        router.apply_snapshot(name, KvSnapshot(seq=0, hashes=[]))
    holds(router, "p1", chain("a", 50))
    load(router, "p1", queued_tokens=3000)
    choice = decided(router.select_and_reserve(ask(force="remote"), 0.0))
    assert (choice.prefill, choice.loaded_tokens_prefill) == ("p2", 800 if has_store else 0)
    assert (choice.terms["prefill_load"] > 0) == has_store


@pytest.mark.parametrize(
    ("cache", "is_shared"),
    [({"remote": "cluster"}, True), ({}, False), ({"remote": "cluster", "write_policy": "write-back"}, False)],
)
def test_a_store_is_counted_on_where_everything_goes_there(cache, is_shared):
    assert settings_from({"cache": {"host_memory": "1GiB", **cache}}).cache.is_shared == is_shared


def test_what_is_loaded_is_no_prompt_token_in_the_queue():
    router = cluster(["p1"], ["d1"])
    index = router._snapshots.held
    router._snapshots.held = lambda request: {
        role: held._replace(in_any_tier=held.in_any_tier + 800 * (role == "prefill"))
        for role, held in index(request).items()
    }
    choice = decided(router.select_and_reserve(ask(force="remote"), 0.0))
    assert (choice.cached_tokens_prefill, choice.loaded_tokens_prefill) == (0, 800)
    assert next(view for view in router.workers() if view.worker_id == "p1").load["queued_tokens"] == 200


# ---- decode workers that compute prompts


def test_a_stall_costs_the_more_the_less_slack_the_sequences_have():
    def stall(recent_step_s, sequences, queued=0, num_prefills=1, slo=None, other_holds=0):
        loads = {"recent_step_s": [recent_step_s] * 2, "sequences": [sequences] * 2, "queued_tokens": [queued] * 2}
        decodes = side(2, expected=[0, other_holds], **loads)
        return CommonCost(asked(ask(slo=slo)), side(num_prefills), decodes, CostModel()).stall(row_of(decodes, 0))

    assert stall(0.02, 8) < stall(0.06, 8) < stall(0.09, 8)
    assert stall(0.02, 0) < stall(0.02, 8) < stall(0.02, 16)
    assert stall(0.02, 8, queued=3000) > stall(0.02, 8)
    alone = stall(0.02, 8, num_prefills=0)
    assert stall(0.02, 8, queued=3000, num_prefills=0) == alone, "there is no other way to compute it"
    assert alone - stall(0.02, 8) == pytest.approx(CostModel().stall_weight * 8), (
        "a second of prefill; then few workers compute most"
    )
    default = SloRequirement((SloTarget("default"),))
    kept = (CostModel().stall_weight * 8 + CostModel().next_stall_weight) * 1.0
    assert stall(0.02, 8, slo=default) == stall(0.09, 8, slo=default) == pytest.approx(kept), (
        "no step misses its target"
    )
    under_slo = partial(stall, 0.02, 8, num_prefills=0, slo=default)
    assert under_slo() == 0.0, "where none holds it, it harms none"
    tokens = ask().num_tokens
    assert under_slo(other_holds=tokens) == stall(0.02, 8), "what is missed says enough"
    assert under_slo(other_holds=tokens // 4) == pytest.approx(stall(0.02, 8) / 4)
    assert stall(0.02, 0) == pytest.approx(CostModel().next_stall_weight * 1.0)  # only who comes meanwhile waits


def test_a_second_of_prefill_costs_no_more_than_it_would_on_a_decode_worker():
    def pressure_s(sequences, decodes=0, **fields):
        """Of a second, while all workers that compute prompts have some."""
        prefills, both = side(2, queued_requests=[1, 1], decodes=[decodes] * 2), side(2, sequences=sequences)
        terms = CommonCost(asked(ask(**fields)), prefills, both, CostModel()).terms(
            row_of(prefills, 0), row_of(both, 0)
        )
        return terms[TERM_NAMES.index("prefill_pressure")]

    default = SloRequirement((SloTarget("default"),))
    assert pressure_s([0, 40], slo=default) == CostModel().next_stall_weight, "the one that is idle could compute it"
    assert pressure_s([0, 40]) == 2 * CostModel().next_stall_weight, "and nothing says what its sequences will need"
    assert pressure_s([0, 40]) < pressure_s([20, 40]) < pressure_s([400, 400]) == CostModel().max_pressure
    kept = CostModel().stall_weight * 20 + CostModel().next_stall_weight
    assert pressure_s([20, 40], slo=default) > kept, "with what would miss its target, though steps are held to it"
    assert pressure_s([0, 40], force="remote") == pressure_s([0, 40], decodes=1) == CostModel().max_pressure


def test_where_all_workers_do_both_a_prompt_is_sent_only_away_from_a_much_fuller_one():
    """Whichever computes it stalls its sequences, and a second copy of the KV takes room."""

    def placed(sequences, decodes=1):
        workers = side(2, sequences=sequences, held=[320, 0], decodes=[decodes] * 2, free_blocks=[500, 500])
        best = ranked(ask(), workers, workers)[0]
        return best.prefill, best.decode

    assert placed([8, 8]) == (None, 0), "the one with the prefix"
    assert placed([40, 0]) == (None, 1)
    assert placed([8, 8], decodes=0)[0] == 0, "the control: a prefill worker, which stalls none"


def test_where_all_workers_do_both_sequences_are_balanced_under_an_slo_as_far_as_no_worker_holds_the_prompt():
    """The rest may be full of sequences: steps that are held to a target would leave its prompts no room."""
    model = CostModel(decode_load_weight=0.01, expected_output_tokens=200)
    workers = {"sequences": [10, 0], "decode_step_s": [0.02, 0.02]}

    def load_steps(held, slo, decodes=1):
        decoding = side(2, held=[0, held], **workers)
        cost = CommonCost(asked(ask(tokens=1600, slo=slo)), side(2, decodes=[decodes] * 2), decoding, model)
        return cost.decode(row_of(decoding, 0))[0] / 0.02 / 10

    some = SloRequirement((SloTarget("some", 5.0, 0.1),))
    assert [load_steps(held, some) for held in (0, 800, 1600)] == pytest.approx([2.0, 1.05, 0.1])
    assert [load_steps(held, None) for held in (0, 800, 1600)] == pytest.approx([0.1] * 3)
    assert [load_steps(held, slo, decodes=0) for held in (0, 1600) for slo in (some, None)] == pytest.approx([2.0] * 4)


def test_an_slo_is_not_missed_for_steps_with_prompts_that_workers_will_hold_to_it():
    router = Router(RouterSettings(), tokens_per_hash=BLOCK)
    router.worker_up(info("w", "both"))
    router.apply_snapshot("w", KvSnapshot(seq=0, hashes=[]))
    for second, steps in enumerate((100, 110, 120)):
        report = LoadReport(seq=1, free_blocks=900, total_blocks=1000, running=4, decode_step_s=0.02, steps=steps)
        router.apply_load("w", report, float(second))

    def missed_s(slo):
        return decided(router.select_and_reserve(ask(slo=slo), 2.0)).policy_terms["slo_miss"]

    assert missed_s(SloRequirement((SloTarget("some", 50.0, 0.04),))) == 0.0
    assert missed_s(SloRequirement((SloTarget("tight", 50.0, 0.02),))) > 0.0
    assert missed_s(None) > 0.0, "the control: 100 ms a step, as of late"


def test_a_decode_worker_out_of_pace_computes_no_prompt_while_a_prefill_worker_can():
    def path(recent_step_s):
        decodes = side(1, prefix="d", recent_step_s=[recent_step_s], sequences=[10])
        return ranked(ask(), side(1, prefix="p", queued_tokens=[2400]), decodes)[0].prefill

    assert path(0.02) is None
    assert path(0.09) == 0


def reports(*samples):
    """A worker's pace after reports of (seconds passed, steps made, running before)."""
    pace, steps = StepTime(0.03), 0
    for passed_s, made, running in samples:
        before = LoadReport(seq=1, steps=steps, running=running)
        steps += made
        pace.observe(before, LoadReport(seq=2, steps=steps, running=1), passed_s, 0.0)
    return pace.recent_s


def test_pace_is_what_a_step_took_while_the_worker_was_busy():
    assert reports() == 0.0
    assert reports((1.0, 20, 4)) == pytest.approx(0.05)
    assert reports((1.0, 20, 4), (1.0, 5, 4)) == pytest.approx(2.0 / 25, rel=0.1)
    assert reports((1.0, 20, 4), (2.0, 1, 0)) == pytest.approx(0.05)  # idle in between
    assert reports((1.0, 20, 4), (1.0, -20, 4)) == pytest.approx(0.05)  # it was restarted
    assert reports((1.0, 20, 4), *[(RECENT_STEP_WINDOW_S / 10, 4, 4)] * 60) == pytest.approx(0.25, rel=0.02)


def test_the_pace_that_reports_show_is_a_column():
    router = cluster(["p1"], ["d1"])
    for seq in range(3):
        report = LoadReport(seq=seq, running=4, steps=10 * seq, decode_step_s=0.02, free_blocks=1000, total_blocks=1000)
        router.apply_load("d1", report, float(seq))
    columns = router._workers.columns("decode")
    assert columns.floats[2, 0] == pytest.approx(0.1)


# ---- targets


def test_a_request_goes_where_its_own_target_is_kept():
    prefills = side(2, prefix="p", held=[800, 0], queued_tokens=[2500, 1800], queued_requests=[2, 2])
    strict = SloRequirement((SloTarget("c", ttft_s=3.0),))
    lax = SloRequirement((SloTarget("c", ttft_s=60.0),))
    wanted = [ranked(ask(force="remote", slo=slo), prefills, side(1))[0] for slo in (strict, lax)]
    assert [terms(way)["slo_miss"] > 0 for way in wanted] == [True, False]
    assert terms(ranked(ask(force="remote"), prefills, side(1))[0])["slo_miss"] == 0.0  # 5 s, where none is named


def test_sequences_go_to_decode_workers_that_keep_their_pace():
    decodes = side(2, prefix="d", recent_step_s=[0.12, 0.03], sequences=[1, 9])
    best = ranked(ask(force="remote"), side(1), decodes)[0]
    assert best.decode == 1
    assert terms(best)["slo_miss"] == 0.0


@pytest.mark.parametrize(("output_tokens", "decodes", "chosen"), [(300.0, 0, 1), (30.0, 0, 0), (300.0, 1, 0)])
def test_a_prefix_is_worth_its_transfer_and_more_sequences_cost_their_whole_outputs(output_tokens, decodes, chosen):
    """But where all workers do both (the last case), a few are to have most sequences."""
    targets = side(
        2,
        prefix="d",
        held=[144, 0],
        sequences=[20, 4],
        output_tokens=[output_tokens] * 2,
        kv_bytes_per_token=[10_000_000] * 2,
    )
    assert ranked(ask(force="remote"), side(1, prefix="p", decodes=[decodes]), targets)[0].decode == chosen


def test_a_decision_says_how_soon_tokens_are_wanted():
    first_token, both = (SloRequirement((SloTarget("c", ttft_s=3.0, tpot_s=tpot_s),)) for tpot_s in (None, 0.2))
    for policy, request, wanted in (
        ("joint", ask(), (5.0, UNSET_SHARE * 0.1)),
        ("joint", ask(slo=first_token), (3.0, UNSET_SHARE * 0.1)),
        ("joint", ask(slo=both), (3.0, 0.2)),
        ("least_loaded", ask(), (None, None)),
    ):
        choice = decided(cluster(["p1"], ["d1"], policy=policy).select_and_reserve(request, 0.0))
        assert (choice.ttft_target_s, choice.tpot_target_s) == wanted


@pytest.mark.parametrize(("overdue_tokens", "chosen"), [(900, "p1"), (8500, "p2")])
def test_who_is_late_at_a_worker_is_ahead_of_nobody_but_much_of_it_keeps_others_away(overdue_tokens, chosen):
    router = cluster(["p1", "p2"], ["d1"])
    load(router, "p1", queued_tokens=500 + overdue_tokens, waiting=9, overdue=8, overdue_tokens=overdue_tokens)
    load(router, "p2", queued_tokens=2000, waiting=2)
    choice = decided(router.select_and_reserve(ask(force="remote"), 0.0))
    late = next(one for one in candidate_scores(choice) if one.prefill == "p1")
    assert choice.prefill == chosen
    assert late.terms["prefill_queue"] == pytest.approx(0.25)


# ---- hot prefixes


def test_a_prefix_for_which_too_many_come_is_computed_by_a_second_worker_ahead_of_the_queue():
    prefills = side(2, prefix="p", held=[800, 0], queued_tokens=[600, 0])
    request = ask(force="remote")
    assert ranked(request, prefills, side(1))[0].prefill == 0
    hot = ranked(request, prefills, side(1), arrivals_per_s=20.0)
    assert hot[0].prefill == 1
    assert terms(hot[0])["replica"] < 0 and terms(next(w for w in hot if w.prefill == 0))["replica"] == 0.0


def test_while_its_holders_can_serve_all_who_come_nothing_is_copied():
    prefills = side(3, prefix="p", held=[800, 800, 0], queued_tokens=[600, 600, 0])
    for rate in (0.0, 4.0, 9.9):  # 0.2 s each, two holders
        assert {
            terms(way)["replica"] for way in ranked(ask(force="remote"), prefills, side(1), arrivals_per_s=rate)
        } == {0.0}
    beyond = ranked(ask(force="remote"), prefills, side(1), arrivals_per_s=11.0)
    assert min(terms(way)["replica"] for way in beyond) < 0


@pytest.mark.parametrize(("gap_s", "is_hot"), [(0.01, True), (2.0, False)])
def test_the_router_knows_how_fast_siblings_come(gap_s, is_hot):
    router = cluster(["p1", "p2"], ["d1"])
    holds(router, "p1", chain("shared", 60))
    for i in range(40):
        request = ask(f"r{i}", tokens=1600, hashes=chain("shared", 60) + chain(f"own{i}", 40), force="remote")
        choice = decided(router.select_and_reserve(request, gap_s * i))
        router.on_end(f"r{i}")
    others = next(candidate for candidate in candidate_scores(choice) if candidate.prefill == "p2")
    assert (others.terms["replica"] < -0.01) == is_hot


def test_arrivals_of_a_shared_beginning_and_of_one_conversation_are_told_apart():
    heat = PrefixPopularity()
    for i in range(100):
        heat.observe(chain("system", 4) + chain(f"talk{i}", 12), 0.1 * i)
    prompt = chain("system", 4) + chain("talk7", 12)
    assert heat.arrivals_per_s(prompt, 4, 10.0) == pytest.approx(6.3, rel=0.1)  # 10 a second, of which 1/e has faded
    assert heat.arrivals_per_s(prompt, 16, 10.0) < 0.1
    assert heat.arrivals_per_s(prompt, 4, 10.0 + 10 * FADE_S) < 0.001
    assert heat.arrivals_per_s(prompt, 0, 10.0) == heat.arrivals_per_s((), 9, 10.0) == 0.0


def test_what_is_counted_is_bounded():
    heat = PrefixPopularity()
    for i in range(MAX_COUNTED + 500):
        heat.observe((i.to_bytes(16, "big"),), float(i))
    assert len(heat) == MAX_COUNTED
    assert heat.arrivals_per_s(((MAX_COUNTED + 499).to_bytes(16, "big"),), 1, float(MAX_COUNTED + 499)) > 0


# ---- tenants


def test_who_has_more_than_its_share_queued_pays_for_the_queue_it_makes():
    router = cluster(["p1", "p2"], ["d1"])
    for i in range(6):
        router.select_and_reserve(ask(f"a{i}", prompt=f"a{i}", tenant="greedy", force="remote"), 0.0)
    router.select_and_reserve(ask("b", prompt="b", tenant="modest", force="remote"), 0.0)
    greedy, modest = (
        decided(router.select_and_reserve(ask(f"x{name}", prompt=name, tenant=name, force="remote"), 0.0))
        for name in ("greedy", "modest")
    )
    assert greedy.policy_terms["tenant"] > 0 and modest.policy_terms["tenant"] == 0.0
    for name in [*(f"a{i}" for i in range(6)), "b", "xgreedy", "xmodest"]:
        router.on_end(name)
    assert router._ledger.excess("greedy") == 0.0 and not router._ledger._queued


def test_a_tenant_that_is_alone_pays_nothing():
    router = cluster(["p1"], ["d1"])
    for i in range(6):
        choice = decided(router.select_and_reserve(ask(f"a{i}", prompt=f"a{i}", tenant="t", force="remote"), 0.0))
    assert choice.policy_terms["prefill_pressure"] > 0 and choice.policy_terms["tenant"] == 0.0


# ---- several ingress replicas


def replicas(count, *, age_s=0.0, running=8):
    """Routers that have all seen the same reports, in which most is somebody else's work."""
    routers = [Router(RouterSettings(), tokens_per_hash=BLOCK) for _ in range(count)]
    for router in routers:
        for i in range(16):
            router.worker_up(info(f"p{i:02}", "prefill"))
            router.apply_load(f"p{i:02}", LoadReport(seq=1, running=running), 10.0 - age_s)
        router.worker_up(info("d1", "decode"))
    return routers


def spread_over(routers):
    return len(
        {
            decided(one.select_and_reserve(ask(f"r{i}", prompt=f"x{i}", force="remote"), 10.0)).prefill
            for i, one in enumerate(routers)
        }
    )


def test_routers_with_the_same_old_reports_do_not_all_choose_the_same_worker():
    assert spread_over(replicas(16, age_s=0.2)) >= 6


def test_a_router_that_is_alone_takes_turns_and_draws_nothing():
    """Control of the above."""
    assert spread_over(replicas(16, age_s=0.2, running=0)) == 1
    assert spread_over(replicas(16, age_s=0.0)) == 1  # nothing can have come since


def test_the_draw_is_never_worth_more_than_what_others_can_have_sent():
    ages = side(4, prefix="p", age_s=[0.0, 0.1, 0.2, 50.0])
    candidates = ranked(ask(force="remote"), ages, side(1), unreported_share=0.5)
    drawn = {way.prefill: terms(way)["spread"] for way in candidates}
    assert drawn[0] == 0.0 and all(0 < drawn[row] <= 0.025 for row in (1, 2, 3))


def test_a_draw_does_not_send_a_request_past_its_cached_prefix():
    for one in replicas(8, age_s=0.2):
        holds(one, "p05", chain("a", 50))
        assert decided(one.select_and_reserve(ask(force="remote"), 10.0)).prefill == "p05"


# ---- all of it


def test_every_term_is_shown_and_the_score_is_their_sum():
    router = cluster(["p1", "p2"], ["d1", "d2"])
    load(router, "p1", queued_tokens=9000, waiting=3)
    choice = decided(router.select_and_reserve(ask(), 0.0))
    assert tuple(choice.policy_terms) == TERM_NAMES + OWN_TERMS
    for candidate in candidate_scores(choice):
        assert candidate.score == pytest.approx(sum(candidate.terms.values()))


@pytest.mark.parametrize("options", [{"missed_s": -1.0}, {"tpot_s": 0.0}, {"missed": 1.0}, {"missed_s": "1"}])
def test_options_that_cannot_be_are_refused(options):
    with pytest.raises(ConfigError, match="policy_options"):
        Joint(options)


@given(st.permutations(range(5)))
def test_the_order_of_the_rows_changes_nothing_but_ties(order):
    held, queued = np.array([0, 160, 320, 480, 640]), np.array([0, 50, 310, 220, 700])
    names = [f"w{row}" for row in range(5)]
    best = ranked(ask(force="remote"), side(5, held=held, queued_tokens=queued), side(1))[0]
    turned = ranked(ask(force="remote"), side(5, held=held[list(order)], queued_tokens=queued[list(order)]), side(1))[0]
    assert names[best.prefill] == names[order[turned.prefill]]
