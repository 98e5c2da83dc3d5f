"""Pairs that no KV can travel between are never chosen, and a cluster without any that fits serves nothing."""

import pytest

from kvrelay.plane.reports import KvSnapshot, LoadReport, WorkerInfo
from kvrelay.router.decision.router import Router
from kvrelay.router.decision.snapshot import candidate_scores
from kvrelay.router.fleet.ledger import unpaired_workers
from kvrelay.router.policies.joint import SHORTLIST
from kvrelay.router.types import Decision, RouteRequest, RoutingRefusal
from kvrelay.settings.router import RouterSettings

pytestmark = pytest.mark.pure


BLOCK = 16


def cluster(prefill, decode, misfits=(), **settings):
    router = Router(RouterSettings(local_prefill_tokens=32, **settings), tokens_per_hash=BLOCK)
    for role, names in (("prefill", prefill), ("decode", decode)):
        for name in names:
            info = WorkerInfo(
                worker_id=name,
                role=role,
                epoch="e",
                host="h",
                port=1,
                node_id="n",
                model="m",
                fingerprint="f",
                block_size=BLOCK,
                num_blocks=1000,
                max_model_len=8192,
                max_running=64,
                kv_bytes_per_token=1,
                device="cpu",
                transports=["shm"],
            )
            router.worker_up(info)
            router.apply_snapshot(name, KvSnapshot(seq=0, hashes=[]))
    router.set_incompatible_pairs({pair: f"{pair[0]} -> {pair[1]}: dtype" for pair in misfits})
    return router


def route(router, tokens=1000, **rest):
    hashes = tuple(bytes([i]) * 16 for i in range(tokens // BLOCK))
    return router.select_and_reserve(RouteRequest("r", hashes, tokens, 64, **rest), 0.0)


def test_a_pair_that_misfits_is_not_chosen_and_shows_among_the_reasons():
    router = cluster(["p1", "p2"], ["d1", "d2"], [("p1", "d1"), ("p2", "d2")])
    for _ in range(8):
        choice = route(router)
        assert isinstance(choice, Decision) and choice.path == "disaggregated"
        assert (choice.prefill, choice.decode) in {("p1", "d2"), ("p2", "d1")}
        assert choice.incompatible_pairs["p1", "d1"] == "p1 -> d1: dtype"
        assert all((c.prefill, c.decode) not in {("p1", "d1"), ("p2", "d2")} for c in candidate_scores(choice))


def test_without_misfits_nothing_is_left_out():
    choice = route(cluster(["p1"], ["d1"]))
    assert isinstance(choice, Decision) and choice.incompatible_pairs == {}


@pytest.mark.parametrize("request_", [{}, {"tokens": 10}, {"force": "local"}, {"force": "remote"}])
def test_when_no_pair_fits_nothing_is_served_and_the_reason_is_told(request_):
    refusal = route(cluster(["p1"], ["d1", "d2"], [("p1", "d1"), ("p1", "d2")]), **request_)
    assert isinstance(refusal, RoutingRefusal) and refusal.reason == "incompatible"
    assert refusal.message == "p1 -> d1: dtype; p1 -> d2: dtype"


def test_when_no_pair_fits_one_token_is_not_served_by_the_prefill_worker_either():
    refusal = route(cluster(["p1"], ["d1"], [("p1", "d1")]), needs_decode=False)
    assert isinstance(refusal, RoutingRefusal) and refusal.reason == "incompatible"


def test_a_short_prompt_is_still_prefilled_on_decode_while_pairs_work():
    choice = route(cluster(["p1", "p2"], ["d1"], [("p1", "d1")]), tokens=10)
    assert isinstance(choice, Decision) and choice.path == "local"


def test_a_worker_that_fits_nobody_takes_nothing_not_even_what_it_could_do_alone():
    router = cluster(["p1"], ["d1", "d2"], [("p1", "d2")])
    router.apply_load("d1", LoadReport(seq=1, running=50, free_blocks=500, total_blocks=1000), 0.0)
    for tokens in (10, 1000):
        choice = route(router, tokens)
        assert isinstance(choice, Decision) and choice.decode == "d1"


def test_a_prefill_worker_that_fits_nobody_is_not_asked_for_one_token():
    router = cluster(["p1", "p2"], ["d1"], [("p1", "d1")])
    choice = route(router, needs_decode=False)
    assert isinstance(choice, Decision) and choice.prefill == "p2"


def test_with_the_prefill_workers_gone_decode_serves_alone_as_ever():
    router = cluster(["p1"], ["d1"], [("p1", "d1")])
    router.worker_down("p1")
    assert isinstance(route(router), Decision)


def test_the_one_pair_that_fits_is_found_among_many():
    """Shortlists of the cheapest could hold misfits alone."""
    prefill, decode = [f"p{i}" for i in range(2 * SHORTLIST)], [f"d{i}" for i in range(2 * SHORTLIST)]
    only = (prefill[-1], decode[-1])
    fits = {only, *((p, decode[0]) for p in prefill[:1])}
    router = cluster(prefill, decode, [(p, d) for p in prefill for d in decode if (p, d) not in fits])
    router.apply_load(decode[0], LoadReport(seq=1, waiting=300, free_blocks=0, total_blocks=1000), 0.0)
    choice = route(router, force="remote")
    assert isinstance(choice, Decision) and (choice.prefill, choice.decode) == only


def test_isolated_workers_are_those_that_fit_nobody():
    misfits = {("p1", "d1"): "", ("p1", "d2"): "", ("p2", "d1"): ""}
    assert unpaired_workers(["p1", "p2"], ["d1", "d2"], misfits) == {"p1", "d1"}
    assert unpaired_workers(["p1"], ["d1", "d2"], misfits) == {"p1", "d1", "d2"}
    assert (
        unpaired_workers([], ["d1"], misfits)
        == unpaired_workers(["p1"], [], misfits)
        == unpaired_workers(["p1"], ["d1"], {})
        == set()
    )
