"""A group (n, best_of, beams) is one request and as many sequences as it is wide: what the router counts for it."""

import pytest

from kvrelay.plane.reports import LoadReport
from kvrelay.router.types import RoutingRefusal
from tests.router.decision.test_placement_rules import ask, cluster, decided
from tests.router.slo.test_slo import Cluster, decoding, verdict, wants

pytestmark = pytest.mark.pure


def view(router, worker_id):
    return next(view for view in router.workers() if view.worker_id == worker_id)


def report(router, worker_id, **fields):
    router.apply_load(worker_id, LoadReport(seq=1, free_blocks=1000, total_blocks=1000, **fields), 0.0)


# ---- accounts and score


def test_a_group_has_a_seat_for_each_of_its_sequences_and_its_prompt_counts_once():
    router = cluster(["p"], ["d"])
    router.select_and_reserve(ask("g", width=8), 0.0)
    assert (view(router, "p").load["sequences"], view(router, "p").load["queued_tokens"]) == (1, 1000)
    assert view(router, "d").load["sequences"] == 8
    assert view(router, "d").assigned_requests == 1
    router.on_first_token("g", 1.0)
    assert (view(router, "p").load["sequences"], view(router, "d").load["sequences"]) == (0, 8)
    router.on_end("g")
    assert view(router, "d").load["sequences"] == view(router, "d").assigned_requests == 0


def test_the_next_request_goes_where_there_is_no_wide_group():
    router = cluster(["p"], ["d1", "d2"])
    wide = decided(router.select_and_reserve(ask("g", prompt="g", width=8), 0.0)).decode
    apart = [ask(f"r{i}", prompt=f"r{i}", force="remote") for i in range(4)]
    others = [decided(router.select_and_reserve(request, 0.0)).decode for request in apart]
    assert wide not in others


def test_the_blocks_that_its_members_will_need_count():
    """Twenty members, a copy of the partial block each at once, and sixteen blocks of output each later."""
    router = cluster(["p"], ["d"])
    for width, wanted in ((1, 63), (20, 63 + 19)):
        router.select_and_reserve(ask("g", width=width), 0.0)
        assert 1000 - view(router, "d").load["free_blocks"] == wanted
        router.on_end("g")
    free = {"free_blocks": 400, "total_blocks": 1000}
    router.apply_load("d", LoadReport(seq=1, **free), 0.0)
    one, twenty = (decided(router.select_and_reserve(ask("g", max_tokens=256, width=w), 0.0)) for w in (1, 20))
    assert one.terms["decode_memory"] < 0.25 * twenty.terms["decode_memory"]


def test_choices_that_have_ended_have_no_seat_any_more():
    router = cluster(["p"], ["d"])
    router.select_and_reserve(ask("g", width=8), 0.0)
    router.on_narrowed("g", 5)
    assert view(router, "d").load["sequences"] == 5
    router.on_first_token("g", 1.0)
    for width in (3, 3, 4, 0, -1):
        router.on_narrowed("g", width)
    assert view(router, "d").load["sequences"] == 3
    router.on_end("g")
    router.on_narrowed("g", 1)
    assert view(router, "d").load["sequences"] == 0


@pytest.mark.parametrize(("has_first", "shown"), [(False, {"receiving": 1}), (True, {"running": 8})])
def test_what_other_routers_sent_is_told_apart_from_a_group_of_our_own(has_first, shown):
    """Until its prompt is there, the worker reports a group as one sequence; five more are somebody else's."""
    router = cluster(["p"], ["d"])
    router.select_and_reserve(ask("g", width=8), 0.0)
    if has_first:
        router.on_first_token("g", 1.0)
    report(router, "d", waiting=5, **shown)
    assert view(router, "d").load["sequences"] == 8 + 5


# ---- forecast and admission


def test_a_group_is_admitted_as_wide_as_it_is():
    cluster = Cluster()
    one, group = (cluster.send(cluster.ask(16, slo=wants(tpot_s=0.025), width=width)) for width in (1, 20))
    assert verdict(one) == "admitted"
    assert isinstance(group, RoutingRefusal) and group.verdict.missed == ("tpot",)


def test_a_group_that_decodes_slows_the_next_one_by_all_of_its_sequences():
    cluster = Cluster()
    (group,) = decoding(cluster, 1, max_tokens=100_000, width=20)
    forecast = cluster.send(cluster.ask(16)).forecast
    assert forecast.batch == pytest.approx(21, rel=0.1)
    assert forecast.tpot_s == pytest.approx(0.031, rel=0.1)
    cluster.router.on_narrowed(group.request_id, 5)
    assert cluster.send(cluster.ask(16)).forecast.batch == pytest.approx(5 + 2, rel=0.1)


def test_a_group_that_comes_slows_the_next_one_too_and_its_prompt_is_computed_once():
    cluster = Cluster()
    cluster.send(cluster.ask(2000, max_tokens=100_000, width=20))
    forecast = cluster.send(cluster.ask(1000)).forecast
    assert forecast.batch == pytest.approx(21, rel=0.1)
    assert forecast.ttft_s == pytest.approx(3.0, rel=0.05)


def test_a_step_that_reads_a_shared_prompt_for_each_member_is_learned_as_such(monkeypatch):
    """Held once, read twenty times: the context that a step's time is held against."""
    cluster = Cluster()
    decoding(cluster, 1, max_tokens=100_000, width=20)
    worker = cluster.router.forecast._workers["d"]
    assert worker.shared_tokens() == 19 * 16
    seen = []
    monkeypatch.setattr(type(worker), "learn_step", lambda self, features, *rest: seen.append(features))
    cluster.load("d", decode_step_s=0.5, running=20, used_blocks=2)
    assert seen == [(1.0, 20.0, 2 * 16 + 19 * 16)]


def test_a_group_is_hopeless_only_if_it_would_miss_alone():
    cluster = Cluster()
    alone = cluster.send(cluster.ask(16, slo=wants(tpot_s=0.025), width=20))
    assert alone.verdict.is_hopeless
    decoding(cluster, 20, max_tokens=100)
    beside = cluster.send(cluster.ask(16, slo=wants(tpot_s=0.025), width=5))
    assert not beside.verdict.is_hopeless and beside.retry_after_s < 60


def test_nothing_of_a_group_is_left_when_it_ends():
    cluster = Cluster()
    groups = decoding(cluster, 3, width=7)
    for group in groups:
        cluster.router.on_narrowed(group.request_id, 2)
        cluster.router.on_end(group.request_id)
    assert cluster.send(cluster.ask(16)).forecast.batch == pytest.approx(1, rel=0.1)
