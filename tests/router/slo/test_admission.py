"""Of the ways that the router ranked, the cheapest that keeps to the SLO: pure, predictions are given."""

import pytest

from kvrelay.plane.reports import KvSnapshot
from kvrelay.router.decision.snapshot import candidate_scores
from kvrelay.router.slo.admission import MAX_TRIED, choose_candidate
from kvrelay.router.types import Decision, Prediction, RoutingRefusal, SloRequirement, SloTarget
from kvrelay.serve.telemetry.explain import Explain
from tests.router.slo.test_slo import Cluster, info, verdict, wants

pytestmark = pytest.mark.pure


CHAT, BATCH = SloTarget("chat", 1.0, 0.02), SloTarget("batch", 60.0, 0.1)


def seen(tpot_s, *, ttft_s=0.1, **rest):
    return Prediction(ttft_s, tpot_s, 1.0, 1.0, 0.0, 9.0, raw_tpot_s=tpot_s, **rest)


def chosen(predictions, *, candidates=None, ask=None, clears=None, spare=None):
    """(index of the way that is taken, the verdict, indices that were predicted)."""
    looked = []
    candidates = candidates or [("p", f"d{i}") for i in range(len(predictions))]

    def predict(index):
        looked.append(index)
        return predictions[index]

    clears_in_s = (clears or {}).get
    index, verdict = choose_candidate(
        ask or SloRequirement((CHAT,)), candidates, predict, lambda i, _: clears_in_s(i), spare
    )
    return index, verdict, looked


def test_the_cheapest_is_taken_when_it_fits_and_no_other_is_looked_at():
    index, verdict, looked = chosen([seen(0.01), seen(0.001)])
    assert (index, verdict.kind, verdict.rejected_candidates, looked) == (0, "admitted", (), [0])


def test_the_first_that_fits_is_taken_and_those_before_it_are_told():
    index, verdict, looked = chosen([seen(0.05), seen(0.03), seen(0.01), seen(0.01)])
    assert (index, verdict.kind, looked) == (2, "admitted", [0, 1, 2])
    assert [(decode, one.missed, one.prediction.tpot_s) for (_, decode), one in verdict.rejected_candidates] == [
        ("d0", ("tpot",), 0.05),
        ("d1", ("tpot",), 0.03),
    ]


def test_the_own_class_elsewhere_is_better_than_a_lesser_one_on_the_cheapest():
    ask = SloRequirement((CHAT, BATCH))
    assert chosen([seen(0.05), seen(0.01)], ask=ask)[:2][0] == 1
    index, verdict, _ = chosen([seen(0.5), seen(0.05), seen(0.04)], ask=ask)
    assert (index, verdict.kind, verdict.target) == (1, "degraded", BATCH)


def test_who_waits_waits_on_the_cheapest():
    index, verdict, _ = chosen([seen(0.05), seen(0.04)], ask=SloRequirement((CHAT,), "queue"))
    assert (index, verdict.kind, verdict.target) == (0, "queued", None)


def test_a_refusal_tells_when_the_first_of_them_is_free():
    index, verdict, _ = chosen([seen(0.05), seen(0.05), seen(0.05)], clears={0: 15.0, 1: 4.0, 2: 8.0})
    assert (index, verdict.kind, verdict.retry_after_s) == (1, "refused", 4.0)


def test_a_worker_that_has_been_silent_is_tried_when_no_other_fits():
    index, verdict, _ = chosen([seen(0.05), seen(0.05, is_tpot_stale=True)])
    assert (index, verdict.kind) == (1, "probe")
    assert chosen([seen(0.05, is_tpot_stale=True), seen(0.01)])[1].kind == "admitted"


def test_no_other_prefill_worker_is_taken_and_no_batch_looked_at_twice():
    candidates = [("p1", "d1"), ("p2", "d1"), (None, "d2"), ("p1", "d1"), ("p1", "d2")]
    index, _, looked = chosen([seen(0.05), seen(0.01), seen(0.01), seen(0.01), seen(0.01)], candidates=candidates)
    assert (index, looked) == (4, [0, 4])
    assert chosen([seen(0.01, ttft_s=9.0), seen(0.01)], candidates=[("p1", "d1"), ("p2", "d2")])[1].kind == "refused"


def test_where_a_decode_worker_that_would_compute_the_prompt_misses_a_target_others_are_tried():
    candidates = [(None, "d1"), (None, "d2"), ("p1", "d1"), ("p1", "d3"), ("p2", "d4")]
    index, verdict, looked = chosen([seen(0.05), seen(0.05), seen(0.01), seen(0.05), seen(0.01)], candidates=candidates)
    assert (index, verdict.kind, looked) == (4, "admitted", [0, 1, 3, 4])
    assert chosen([seen(0.01, ttft_s=9.0), *[seen(0.01)] * 4], candidates=candidates)[0] == 1
    late = [seen(0.01, ttft_s=9.0)] * 5
    assert chosen(late, candidates=candidates)[1].kind == "refused"  # control: all miss it


def test_who_would_be_refused_is_served_without_a_promise_where_it_holds_up_nobody():
    late = [seen(0.01, ttft_s=9.0), seen(0.01, ttft_s=8.0)]
    candidates = [("p1", "d1"), ("p2", "d1")]
    index, verdict, _ = chosen(late, candidates=candidates, spare=1)
    assert (index, verdict.kind, verdict.target, verdict.missed) == (1, "queued", None, ("ttft",))
    assert chosen(late, candidates=candidates)[1].kind == "refused"
    breaking = [late[0], seen(0.01, ttft_s=8.0, crowded_tpot_s=0.01)]
    assert chosen(breaking, candidates=candidates, spare=1)[1].kind == "refused"
    assert chosen([seen(0.01), seen(0.01)], candidates=candidates, spare=1)[:2][0] == 0  # nobody need be helped


def test_not_more_than_a_few_are_looked_at():
    _, verdict, looked = chosen([seen(0.05)] * 40)
    assert len(looked) == MAX_TRIED and len(verdict.rejected_candidates) == MAX_TRIED - 1


# ---- in the router


class Two(Cluster):
    """As Cluster, with a second decode worker; the first is the one that the score prefers."""

    def __init__(self):
        super().__init__()
        self.router.worker_up(info("e", "decode"))
        self.router.apply_snapshot("e", KvSnapshot(seq=0, hashes=[]))
        for batch in range(1, 41):
            self.load("e", decode_step_s=0.01 + 0.001 * batch, running=batch, used_blocks=batch)
        self.load("e", decode_step_s=0.011)


def slowed(cluster, worker_id):
    """Its steps take ten times as long as its batch and the router's account of it say."""
    for batch in range(1, 41):
        cluster.load(worker_id, decode_step_s=0.1 + 0.01 * batch, running=batch, used_blocks=batch)
    cluster.load(worker_id, decode_step_s=0.011, running=1)


@pytest.mark.parametrize("is_slow", [False, True])
def test_a_request_goes_to_the_decode_worker_where_it_keeps_to_its_slo(is_slow):
    cluster = Two()
    plain = cluster.send(cluster.ask(16))
    cluster.router.on_end(plain.request_id)
    first = plain.decode
    other = {"d": "e", "e": "d"}[first]
    if is_slow:
        slowed(cluster, first)
        cluster.load(other, decode_step_s=0.012, running=2, used_blocks=2)
    choice = cluster.send(cluster.ask(16, slo=wants(tpot_s=0.03)))
    assert isinstance(choice, Decision) and verdict(choice) == "admitted"
    assert choice.decode == (other if is_slow else candidate_scores(choice)[0].decode)
    told = Explain(0.0)
    told.decisions.append(choice)
    rejected_candidates = told.report().get("rejected_candidates", [])
    assert [(way["prefill"], way["decode"], way["missed"]) for way in rejected_candidates] == [
        ("p", first, ["tpot"])
    ] * is_slow
    view = {view.worker_id: view.load["sequences"] for view in cluster.router.workers()}
    assert view[choice.decode] >= 1
    cluster.router.on_end(choice.request_id)
    assert len(cluster.router.forecast) == 0


def test_when_both_miss_nothing_is_counted_for_it():
    cluster = Two()
    for worker_id in ("d", "e"):
        slowed(cluster, worker_id)
    choice = cluster.send(cluster.ask(16, slo=wants(tpot_s=0.03)))
    assert isinstance(choice, RoutingRefusal) and len(choice.verdict.rejected_candidates) == 1
    assert len(cluster.router.forecast) == 0
