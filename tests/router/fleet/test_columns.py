"""The columns say what the accounts say, whatever happens; and what a policy is shown, and of whom."""

from dataclasses import fields
from statistics import median_low

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kvrelay.errors import ConfigError
from kvrelay.plane.reports import AssignedByOthers, LoadReport
from kvrelay.router.decision.router import Router
from kvrelay.router.decision.snapshot import candidate_scores
from kvrelay.router.fleet.ledger import compatible_sets
from kvrelay.router.policies.base import CostModel, RoutingPolicy, WorkerTable
from kvrelay.router.policies.joint import Joint
from kvrelay.router.policies.selection import POLICIES
from kvrelay.router.types import TERM_NAMES, Candidate, Decision, SloRequirement, SloTarget
from kvrelay.serve.telemetry.explain import Explain
from kvrelay.settings.router import RouterSettings
from kvrelay.types import WORKER_ROLES, Role, sides
from tests.router.decision.test_placement_rules import BLOCK, ask, chain, cluster, decided, holds, info, load, refused

pytestmark = pytest.mark.pure


SLO = SloRequirement((SloTarget("fast", ttft_s=1.0),))


class Spy(RoutingPolicy):
    """Takes the first of each role, and keeps what it was shown."""

    name, term_names, weighs_both = "spy", ("only",), True

    def __init__(self):
        self.seen = []

    def rank(self, ask, prefills, decodes):
        copies = tuple(
            WorkerTable(side.names, *(np.copy(getattr(side, f.name)) for f in fields(side) if f.name != "names"))
            for side in (prefills, decodes)
        )
        self.seen.append((ask, *copies))
        return [Candidate(0, 0, 7.0, (7.0,))] if len(prefills) and len(decodes) else []


def spied(prefill, decode):
    spy = Spy()
    router = Router(RouterSettings(), tokens_per_hash=BLOCK, policy=spy)
    for role, names in (("prefill", prefill), ("decode", decode)):
        for name in names:
            router.worker_up(info(name, role))
    return router, spy


def rows(side):
    """By worker, what the columns say of its load."""
    speeds = (side.prefill_tokens_per_s, side.decode_step_s, side.kv_bytes_per_s)
    counts = (side.queued_tokens, side.queued_requests, side.sequences, side.waiting, side.free_blocks, side.turn)
    return {
        name: (*(int(column[i]) for column in counts), *(float(column[i]) for column in speeds))
        for i, name in enumerate(side.names)
    }


def accounts(router, role, rate):
    """The same, from the accounts."""
    model = CostModel()
    views = [view for view in router.workers() if role in sides(view.role)]
    measured = [view.load["prefill_tokens_per_s"] for view in views if view.load["prefill_tokens_per_s"]]
    rate = median_low(measured) if measured else rate
    return {
        view.worker_id: (
            load["queued_tokens"],
            load["queued_requests"],
            load["sequences"],
            load["waiting"],
            load["free_blocks"],
            load["turn"],
            load["prefill_tokens_per_s"] or rate,
            load["decode_step_s"] or model.default_decode_step_s,
            load["kv_bytes_per_s"] or model.default_kv_bytes_per_s,
        )
        for view in views
        if (load := view.load)
    }


names = st.sampled_from(["p1", "p2", "p3", "d1", "d2"])
happenings = st.one_of(
    st.tuples(st.just("up"), names, st.integers(0, 2)),
    st.tuples(st.just("down"), names, st.just(0)),
    st.tuples(st.just("role"), names, st.integers(0, 3)),
    st.tuples(st.just("load"), names, st.integers(0, 3)),
    st.tuples(st.just("others"), names, st.integers(0, 3)),
    st.tuples(st.sampled_from(["ask", "first", "end", "narrow"]), st.just(""), st.integers(0, 5)),
)


@settings(max_examples=150, deadline=None)
@given(st.lists(happenings, max_size=40))
def test_the_columns_are_the_accounts_whatever_happened(events):
    router, spy = spied([], [])
    for now_s, (what, name, number) in enumerate(events):
        if what == "up":
            router.worker_up(info(name, "prefill" if name[0] == "p" else "decode", epoch=f"e{number}"))
        elif what == "down":
            router.worker_down(name)
        elif what == "role":
            router.role_changed(name, (*WORKER_ROLES, "changing")[number])
        elif what == "load":
            report = {"running": 3 * number, "queued_tokens": 500 * number, "waiting": number, "free_blocks": 900}
            speed = {"prefill_tokens_per_s": 1000.0 * number**2, "decode_step_s": 0.01 * number}
            router.apply_load(name, LoadReport(seq=1, total_blocks=1000, **report, **speed), float(now_s))
        elif what == "others":
            router.apply_others(name, AssignedByOthers(number, True, tokens=70 * number, prompts=2 * number))
        elif what == "ask":
            router.select_and_reserve(ask(f"r{number}", prompt=f"x{number}", width=1 + number), float(now_s))
        elif what == "first":
            router.on_first_token(f"r{number}", float(now_s))
        elif what == "narrow":
            router.on_narrowed(f"r{number}", 1)
        else:
            router.on_end(f"r{number}")
        router.select_and_reserve(ask("probe"), float(now_s))
        router.on_end("probe")
        router.select_and_reserve(ask("probe"), float(now_s))
        router.on_end("probe")
        live = router._workers
        assert live.num_foreign_prompts == sum(one.foreign_prompts for one in live.accounts.values())
        if spy.seen:
            _, prefills, decodes = spy.seen[-1]
            before = router.prefill_tokens_per_s(None) or router._workers.prefill_rate
            told = {**rows(prefills), **rows(decodes)}
            expected = {**accounts(router, "prefill", before), **accounts(router, "decode", before)}
            chosen = {prefills.names[0], decodes.names[0]} if len(prefills) and len(decodes) else set()
            assert {n: v for n, v in told.items() if n not in chosen} == {
                n: pytest.approx(v) for n, v in expected.items() if n not in chosen
            }


def test_a_row_that_is_not_written_would_be_seen(monkeypatch):
    """Control of the above."""
    router, spy = spied(["p1"], ["d1"])
    router.select_and_reserve(ask("r1"), 0.0)
    monkeypatch.setattr("kvrelay.router.fleet.account.WorkerAccount.write_load", lambda self, columns, row: None)
    router.select_and_reserve(ask("r2"), 0.0)
    router.select_and_reserve(ask("r3"), 0.0)
    _, prefills, _ = spy.seen[-1]
    assert rows(prefills) != accounts(router, "prefill", 2000.0)


def test_rows_are_in_the_order_of_the_ids_and_machines_are_numbered_across_roles():
    router, spy = spied([], [])
    for name, role, node in (("p2", "prefill", "n9"), ("p1", "prefill", "n1"), ("d1", "decode", "n9")):
        router.worker_up(info(name, role, node=node))
    router.select_and_reserve(ask(), 0.0)
    _, prefills, decodes = spy.seen[-1]
    assert (prefills.names, decodes.names) == (("p1", "p2"), ("d1",))
    assert prefills.nodes[1] == decodes.nodes[0] != prefills.nodes[0]


def test_only_those_that_can_take_it_are_shown():
    router, spy = spied(["p1", "p2", "p3", "p4"], ["d1"])
    router.worker_up(info("p0", "prefill", num_blocks=10))  # too small
    load(router, "p1", waiting=256)  # its line is full
    holds(router, "p3", chain("a", 8))
    router.select_and_reserve(ask(excluded=frozenset({"p2", "nobody"})), 0.0)
    _, prefills, _ = spy.seen[-1]
    assert (prefills.names, prefills.held.tolist()) == (("p3", "p4"), [8 * BLOCK, 0])


@pytest.mark.parametrize("gone", ["p0", "p2"])
def test_what_is_on_the_way_stays_with_its_worker_when_another_goes_or_comes(gone):
    router, spy = spied(["p1"], ["d1"])
    holds(router, "p1", [])
    decided(router.select_and_reserve(ask("first"), 0.0))
    router.worker_up(info("p0", "prefill"))
    router.worker_up(info("p2", "prefill"))
    router.select_and_reserve(ask("sibling"), 0.0)
    _, prefills, _ = spy.seen[-1]
    assert (prefills.names, prefills.expected.tolist()) == (("p0", "p1", "p2"), [0, 62 * BLOCK, 0])
    router.on_end("sibling")
    router.worker_down(gone)
    router.select_and_reserve(ask("another"), 0.0)
    _, prefills, _ = spy.seen[-1]
    assert dict(zip(prefills.names, prefills.expected.tolist(), strict=True))["p1"] == 62 * BLOCK


def test_a_workers_report_ages_and_before_the_first_it_is_endlessly_old():
    router, spy = spied(["p1", "p2"], ["d1"])
    router.apply_load("p1", LoadReport(seq=1), 10.0)
    router.select_and_reserve(ask(), 12.5)
    assert spy.seen[-1][1].age_s.tolist() == [2.5, float("inf")]


def test_a_worker_that_has_not_measured_is_as_fast_as_the_others():
    router, spy = spied(["p1", "p2"], ["d1"])
    for _ in range(60):
        load(router, "p1", prefill_tokens_per_s=8000.0)
    router.select_and_reserve(ask(), 0.0)
    speeds = spy.seen[-1][1].prefill_tokens_per_s
    assert speeds[1] == pytest.approx(speeds[0], rel=0.01) and speeds[0] > 7000


def test_workers_that_measured_about_the_same_are_equally_fast_and_others_as_they_measured():
    names = ["p1", "p2", "p3", "p4", "p5"]
    router, spy = spied(names, ["d1"])
    for name, rate in zip(names, (8000.0, 11000.0, 9000.0, 4000.0, 20000.0), strict=True):
        load(router, name, prefill_tokens_per_s=rate)
    router.select_and_reserve(ask(), 0.0)
    usual, *alike, slow, fast = spy.seen[-1][1].prefill_tokens_per_s
    assert alike == [usual] * 2 == pytest.approx([9000.0] * 2, rel=0.13)
    assert (slow, fast) == (pytest.approx(4000.0, rel=0.13), pytest.approx(20000.0, rel=0.13))


def test_a_draw_is_of_the_request():
    def draws(prefix):
        spy = Spy()
        router = Router(RouterSettings(), tokens_per_hash=BLOCK, policy=spy)
        router.worker_up(info("p1", "prefill"))
        router.worker_up(info("d1", "decode"))
        for i in range(200):
            router.select_and_reserve(ask(f"{prefix}{i}"), 0.0)
            router.on_end(f"{prefix}{i}")
        return [seen[0].draw for seen in spy.seen]

    assert draws("r") == draws("r") != draws("s")
    assert all(0 <= draw < 1 for draw in draws("r")) and 0.4 < sum(draws("r")) / 200 < 0.6


# ---- any policy


def test_any_policys_way_becomes_a_decision_with_the_common_terms():
    router, _ = spied(["p1"], ["d1"])
    holds(router, "p1", chain("a", 50))
    load(router, "p1", queued_tokens=900)
    own = cluster(["p1"], ["d1"])
    holds(own, "p1", chain("a", 50))
    load(own, "p1", queued_tokens=900)
    choice, expected = (decided(one.select_and_reserve(ask(force="remote"), 0.0)) for one in (router, own))
    assert (choice.policy, choice.score, choice.policy_terms) == ("spy", 7.0, {"only": 7.0})
    assert tuple(choice.terms) == TERM_NAMES and choice.terms == pytest.approx(expected.terms)
    assert choice.predicted_ttft_s == pytest.approx(expected.predicted_ttft_s)
    assert choice.cached_tokens_prefill == expected.cached_tokens_prefill == 800
    assert [(c.prefill, c.decode, c.terms) for c in candidate_scores(choice)] == [("p1", "d1", {"only": 7.0})]


@pytest.mark.parametrize("way", [Candidate(0, None, 1.0, (1.0,)), Candidate(None, 0, 1.0, (1.0,))])
def test_ways_with_one_worker_have_the_common_terms_too(way):
    router, spy = spied(["p1"], ["d1"])
    spy.rank = lambda *_: [way]
    same = {"needs_decode": False, "max_tokens": 1, "force": "local" if way.prefill is None else None}
    choice = decided(router.select_and_reserve(ask(**same), 0.0))
    expected = decided(cluster(["p1"], ["d1"]).select_and_reserve(ask(**same), 0.0))
    assert (choice.path, choice.terms) == (expected.path, pytest.approx(expected.terms))


def test_a_policy_that_finds_no_way_refuses():
    router, spy = spied(["p1"], ["d1"])
    spy.rank = lambda *_: []
    assert refused(router.select_and_reserve(ask(), 0.0)).reason == "full"


def test_the_settings_name_the_policy():
    assert decided(cluster(["p1"], ["d1"], policy="joint").select_and_reserve(ask(), 0.0)).policy == "joint"
    with pytest.raises(ConfigError, match="did you mean joint"):
        Router(RouterSettings(policy="joit"), tokens_per_hash=BLOCK)
    with pytest.raises(ConfigError, match="no option colour"):
        Router(RouterSettings(policy_options={"colour": 1}), tokens_per_hash=BLOCK)
    assert POLICIES["joint"]({}).name == "joint"


# ---- regret


def test_the_regret_is_what_the_best_holder_has_more_than_the_chosen_one():
    router = cluster(["p1", "p2"], ["d1"])
    holds(router, "p1", chain("a", 50))
    holds(router, "p2", chain("a", 10))
    load(router, "p1", queued_tokens=9000)
    choice = decided(router.select_and_reserve(ask(force="remote"), 0.0))
    assert choice.prefill == "p2"
    assert (choice.regret.worker, choice.regret.tokens) == ("p1", 640)
    assert choice.regret.seconds == pytest.approx(640 / 2000.0)
    told = Explain(received_s=0.0, decisions=[choice]).report()
    assert told["regret"] == {"worker": "p1", "tokens": 640, "us": 320_000}
    assert told["policy"] == "joint" and sum(told["policy_terms"].values()) == pytest.approx(told["score"])


def test_who_holds_the_most_and_is_chosen_has_nothing_to_regret():
    router = cluster(["p1", "p2"], ["d1"])
    holds(router, "p1", chain("a", 50))
    choice = decided(router.select_and_reserve(ask(force="remote"), 0.0))
    assert (choice.regret.worker, choice.regret.tokens, choice.regret.seconds) == ("p1", 0, 0.0)


def test_a_holder_that_may_not_compute_is_no_regret():
    router = cluster(["p1"], ["d1"])
    holds(router, "d1", chain("a", 50))
    assert decided(router.select_and_reserve(ask("r1", force="remote"), 0.0)).regret.tokens == 0
    router.on_end("r1")
    load(router, "d1", running=60, decode_step_s=0.09)
    assert decided(router.select_and_reserve(ask("r2"), 0.0)).regret.tokens == 800


# ---- circles


pairs = st.sets(st.tuples(st.sampled_from("pqr"), st.sampled_from("xyz")))


@given(pairs)
def test_circles_have_every_pair_that_fits_once_and_no_other(misfits):
    found = [
        ("pqr"[p], "xyz"[d])
        for senders, targets in compatible_sets("pqr", "xyz", dict.fromkeys(misfits, "why"))
        for p in senders
        for d in targets
    ]
    assert sorted(found) == sorted((p, d) for p in "pqr" for d in "xyz" if (p, d) not in misfits)


def test_the_joint_policy_needs_no_router():
    """A decision can be told again from what the policy was shown."""
    router, spy = spied(["p1", "p2"], ["d1"])
    load(router, "p1", queued_tokens=4000)
    router.select_and_reserve(ask(), 0.0)
    again = [Joint({}).rank(*spy.seen[0])[0] for _ in range(2)]
    assert again[0] == again[1] and spy.seen[0][1].names[again[0].prefill] == "p2"
    assert isinstance(router.select_and_reserve(ask("r2"), 0.0), Decision) and Role.PREFILL == "prefill"


# ---- roles


def test_a_worker_of_both_roles_takes_a_prompt_itself_instead_of_sending_it_to_itself():
    router, _ = spied(["w1"], [])
    router.role_changed("w1", "both")
    holds(router, "w1", chain("a", 1000 // BLOCK))
    decision = decided(router.select_and_reserve(ask("r1", slo=SLO), 0.0))  # the spy ranks nothing but (w1, w1)
    assert (decision.prefill, decision.decode, decision.path) == (None, "w1", "local")
    router.on_end("r1")


@pytest.mark.parametrize(
    ("weighs_both", "slo", "num_held"), [(True, SLO, 2), (True, SLO, 1), (True, None, 4), (False, SLO, 4)]
)
def test_a_policy_that_weighs_it_shares_prompts_with_an_slo_that_a_worker_holds_where_all_workers_do_both(
    weighs_both, slo, num_held, monkeypatch
):
    monkeypatch.setattr(Spy, "weighs_both", weighs_both)
    router, spy = spied(["p1"], ["d1"])
    holds(router, "p1", chain("x", num_held))
    for worker in (None, "p1", "d1"):
        if worker is not None:
            router.role_changed(worker, "both")
        hashes = chain("x", num_held) + chain(f"after {worker}", 4 - num_held)
        router.select_and_reserve(ask(f"r {worker}", hashes=hashes, tokens=4 * BLOCK, slo=slo), 0.0)
    p1_alone, p1_does_both, all_do = ([side.names for side in shown[1:]] for shown in spy.seen)
    assert p1_alone == [("p1",), ("d1",)]
    assert p1_does_both == [("p1",), ("d1", "p1")]
    assert all_do == [("d1", "p1") if weighs_both and slo and num_held == 2 else (), ("d1", "p1")]


def test_a_changed_role_keeps_load_and_index_and_moves_between_the_tables():
    router, spy = spied(["p1", "p2"], ["d1"])
    decided(router.select_and_reserve(ask("r1"), 0.0))
    holds(router, "p1", chain("x", 3))
    router.role_changed("p1", "changing")
    decided(router.select_and_reserve(ask("r2"), 1.0))
    assert [side.names for side in spy.seen[-1][1:]] == [("p2",), ("d1",)]
    router.role_changed("p1", "decode")
    router.select_and_reserve(ask("r3", hashes=chain("x", 3)), 2.0)
    _, prefills, decodes = spy.seen[-1]
    assert (prefills.names, decodes.names) == (("p2",), ("d1", "p1"))
    assert decodes.held.tolist() == [0, 3 * BLOCK]
    assert rows(decodes)["p1"] == accounts(router, "decode", 2000.0)["p1"] and rows(decodes)["p1"][0] > 0
