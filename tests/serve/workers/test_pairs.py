"""Who is asked to pair with whom, when again, and what the answers mean. Time is a number that we pass."""

import pytest

from kvrelay.plane.reports import PairReport, PathReport, WorkerInfo
from kvrelay.serve.workers.pairs import ANSWER_S, LAST_BACKOFF_S, PairBook, Verdict

pytestmark = pytest.mark.pure


def info(worker_id, role=None, *, epoch="e1", kv_port=7):
    role = role or {"p": "prefill", "d": "decode"}[worker_id[0]]
    return WorkerInfo(
        worker_id=worker_id,
        role=role,
        epoch=epoch,
        host=f"host-of-{worker_id}",
        port=1,
        node_id="n",
        model="m",
        fingerprint="f",
        block_size=16,
        num_blocks=9,
        max_model_len=9,
        max_running=9,
        kv_bytes_per_token=1,
        device="cpu",
        transports=[],
        kv_port=kv_port if role == "decode" else 0,
    )


def book(*names):
    made = PairBook()
    for name in names:
        made.worker_up(info(name), 0.0)
    return made


def path(name="shm", *, is_chosen=True, speed=1e9, problem=""):
    return PathReport(path=name, why="w", is_chosen=is_chosen, bytes_per_s=speed, latency_s=1e-5, problem=problem)


def good(source, target, *paths, epoch="e1"):
    return PairReport(source=source, target=target, target_epoch=epoch, ok=True, paths=list(paths or [path()]))


def bad(source, target, reason="fingerprint", epoch="e1"):
    return PairReport(
        source=source,
        target=target,
        target_epoch=epoch,
        ok=False,
        reason=reason,
        detail="dtype: 'a' != 'b'",
        remedy="set it alike",
    )


def keys(pairs):
    return {pair.key for pair in pairs}


def verdicts(made):
    return {pair.key: pair.verdict for pair in made.pairs}


def test_every_prefill_worker_is_paired_with_every_decode_worker_as_they_join():
    made = book("p1", "d1", "p2", "d2")
    assert keys(made.pairs) == {("p1", "d1"), ("p1", "d2"), ("p2", "d1"), ("p2", "d2")}
    assert set(verdicts(made).values()) == {Verdict.UNKNOWN}


def test_a_decode_worker_that_tells_no_kv_port_is_not_paired():
    made = book("p1")
    made.worker_up(info("d1", kv_port=0), 0.0)
    assert made.pairs == [] and made.is_settled()


def test_no_worker_is_in_two_questions_at_once():
    made = book("p1", "p2", "d1", "d2")
    first = keys(made.due(0.0))
    assert first in ({("p1", "d1"), ("p2", "d2")}, {("p1", "d2"), ("p2", "d1")})
    assert made.due(0.0) == []
    made.answered(good(*sorted(first)[0]), 0.0)
    assert made.due(0.0) == []  # each of the two left has a busy worker
    made.answered(good(*sorted(first)[1]), 0.0)
    assert keys(made.due(0.0)) == keys(made.pairs) - first


def test_a_good_pair_is_not_asked_about_again():
    made = book("p1", "d1")
    made.due(0.0)
    made.answered(good("p1", "d1"), 1.0)
    assert made.due(1e9) == [] and made.wait_s(1.0) is None
    assert made.is_settled() and made.blocked() is None and made.incompatible_pairs() == {}


@pytest.mark.parametrize("reason", ["fingerprint", "PeerLost"])
def test_one_that_is_not_good_is_asked_about_again_after_twice_as_long_each_time_and_is_well_once_it_is(reason):
    made, now_s, waits = book("p1", "d1"), 0.0, []
    for _ in range(8):
        assert keys(made.due(now_s)) == {("p1", "d1")}
        made.answered(bad("p1", "d1", reason), now_s)
        waits.append(made.wait_s(now_s))
        assert made.due(now_s + waits[-1] - 0.01) == []
        now_s += waits[-1]
    assert waits == [1, 2, 4, 8, 16, 32, LAST_BACKOFF_S, LAST_BACKOFF_S]
    made.due(now_s)
    made.answered(good("p1", "d1"), now_s)
    assert verdicts(made) == {("p1", "d1"): Verdict.OK} and made.wait_s(now_s) is None


@pytest.mark.parametrize("reason", ["fingerprint", "transport", "checksum", "bad_mac", "malformed"])
def test_a_misfit_is_barred_with_its_field_and_remedy(reason):
    made = book("p1", "d1")
    made.answered(bad("p1", "d1", reason), 0.0)
    line = f"p1 -> d1: {reason}: dtype: 'a' != 'b' (set it alike)"
    assert verdicts(made) == {("p1", "d1"): Verdict.INCOMPATIBLE}
    assert made.incompatible_pairs() == {("p1", "d1"): line} and made.blocked() == line


@pytest.mark.parametrize("reason", ["PeerLost", "TimeoutError", "stale_epoch", "LeaseExpired", "lost"])
def test_a_passing_fault_bars_nothing(reason):
    made = book("p1", "d1")
    made.answered(bad("p1", "d1", reason), 0.0)
    assert verdicts(made) == {("p1", "d1"): Verdict.FAILING}
    assert made.incompatible_pairs() == {} and made.blocked() is None and made.is_settled()


def test_a_misfit_stays_one_until_it_is_found_to_fit():
    made = book("p1", "d1")
    made.answered(bad("p1", "d1"), 0.0)
    made.answered(bad("p1", "d1", "PeerLost"), 1.0)
    assert verdicts(made) == {("p1", "d1"): Verdict.INCOMPATIBLE} and "fingerprint" in made.blocked()
    made.answered(good("p1", "d1"), 2.0)
    assert verdicts(made) == {("p1", "d1"): Verdict.OK}


def test_all_is_blocked_only_when_no_pair_may_fit():
    made = book("p1", "d1", "d2")
    assert made.blocked() is None
    made.answered(bad("p1", "d1"), 0.0)
    assert made.blocked() is None  # the other is not known yet
    made.answered(bad("p1", "d2"), 0.0)
    assert made.blocked() is not None
    made.answered(good("p1", "d2"), 0.0)
    assert made.blocked() is None and keys(made.pairs) - set(made.incompatible_pairs()) == {("p1", "d2")}


def test_a_prefill_worker_that_cannot_even_connect_does_not_leave_decode_to_serve_alone():
    made = book("d1")
    made.reject(info("p1"), "block_size: 24")
    assert made.blocked() == "p1 is rejected: block_size: 24" == made.rejected()[0]
    made.reject(info("d2"), "model")
    made.worker_up(info("p2"), 0.0)
    assert made.blocked() is None and len(made.view()["rejected"]) == 2
    made.worker_down("p2")
    made.worker_up(info("p1"), 0.0)  # it has been put right
    assert made.blocked() is None and made.rejected() == ["d2 is rejected: model"]
    made.worker_down("p1")
    made.worker_down("d2")
    assert made.blocked() is None and made.rejected() == []


def test_a_cluster_without_prefill_workers_is_never_blocked():
    assert book("d1").blocked() is None and book("d1").is_settled()


def test_pairs_go_with_their_workers_and_a_restarted_worker_begins_anew():
    made = book("p1", "d1", "d2")
    made.answered(bad("p1", "d1"), 0.0)
    made.answered(good("p1", "d2"), 0.0)
    made.worker_down("d2")
    assert made.blocked() is not None
    made.worker_up(info("d1", epoch="e2"), 5.0)
    assert verdicts(made) == {("p1", "d1"): Verdict.UNKNOWN} and made.blocked() is None
    assert made.answered(bad("p1", "d1", epoch="e1"), 5.0) is None  # of its former life
    assert made.answered(good("p1", "d9"), 5.0) is None
    (asked,) = made.due(5.0)
    assert (asked.target.epoch, asked.target.host, asked.target.kv_port) == ("e2", "host-of-d1", 7)


def test_a_question_without_an_answer_counts_as_failed_and_is_put_again():
    made = book("p1", "d1")
    made.due(0.0)
    assert made.wait_s(0.0) == ANSWER_S and not made.is_settled()
    assert made.due(ANSWER_S) == []
    assert verdicts(made) == {("p1", "d1"): Verdict.FAILING}
    assert keys(made.due(ANSWER_S + 1.0)) == {("p1", "d1")}


def test_a_pair_none_of_whose_paths_works_is_measured_anew():
    made = book("p1", "d1")
    made.due(0.0)
    made.answered(good("p1", "d1", path(problem="x"), path("tcp", is_chosen=False, problem="y")), 0.0)
    assert verdicts(made) == {("p1", "d1"): Verdict.FAILING} and made.incompatible_pairs() == {}
    (asked,) = made.due(1.0)
    assert asked.is_probe_wanted


def test_on_demand_every_pair_is_measured_anew_and_settles_when_the_answers_are_here():
    made = book("p1", "p2", "d1")
    for pair in [("p1", "d1"), ("p2", "d1")]:
        made.due(0.0)
        made.answered(good(*pair), 0.0)
    assert made.is_settled()
    made.measure_all(5.0)
    assert not made.is_settled()
    for _ in range(2):
        (asked,) = made.due(5.0)
        assert asked.is_probe_wanted and not made.is_settled()
        made.answered(good(*asked.key), 6.0)
    assert made.is_settled() and made.due(6.0) == []


def test_what_decode_workers_see_keeps_the_speeds_fresh_but_decides_nothing():
    made = book("p1", "d1")
    made.seen(good("p1", "d1"))
    assert verdicts(made) == {("p1", "d1"): Verdict.UNKNOWN}
    made.answered(good("p1", "d1"), 0.0)
    made.seen(good("p1", "d1", path(speed=2e9)))
    made.seen(good("p1", "d1", path(speed=9e9), epoch="e0"))
    made.seen(good("p9", "d1"))
    assert [pair.path.bytes_per_s for pair in made.pairs] == [2e9]
    made.answered(bad("p1", "d1"), 1.0)
    made.seen(good("p1", "d1"))
    assert verdicts(made) == {("p1", "d1"): Verdict.INCOMPATIBLE}


def test_the_view_tells_all_of_it():
    made = book("p1", "d1", "d2")
    made.answered(good("p1", "d1"), 0.0)
    made.answered(bad("p1", "d2"), 0.0)
    view = made.view()
    assert (view["prefill"], view["decode"], view["is_settled"]) == (1, 2, True)
    first, second = view["pairs"]
    assert (first["verdict"], first["line"], first["paths"][0]["bytes_per_s"]) == ("ok", "", 1e9)
    assert (second["verdict"], second["reason"], second["remedy"]) == ("incompatible", "fingerprint", "set it alike")
