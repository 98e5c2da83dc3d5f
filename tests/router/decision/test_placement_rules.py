"""Routing rules, one test each: who gets a request, and why. Time is a number that we pass."""

import pytest

from kvrelay.plane.reports import KvSnapshot, LoadReport, WorkerInfo
from kvrelay.router.decision.router import Router
from kvrelay.router.decision.snapshot import candidate_scores
from kvrelay.router.types import TERM_NAMES, TTFT_TERMS, Decision, RouteRequest, RoutingRefusal
from kvrelay.settings.router import RouterSettings
from kvrelay.types import Fingerprint

pytestmark = pytest.mark.pure


BLOCK = 16
FINGERPRINT = Fingerprint(1, "m", "bfloat16", BLOCK, 2, 2, 8, "seed")


def info(
    worker_id, role, *, epoch="e1", node="n1", num_blocks=1000, max_model_len=8192, max_running=64, block_size=BLOCK
):
    return WorkerInfo(
        worker_id=worker_id,
        role=role,
        epoch=epoch,
        host="127.0.0.1",
        port=1,
        node_id=node,
        model="m",
        fingerprint=FINGERPRINT,
        block_size=block_size,
        num_blocks=num_blocks,
        max_model_len=max_model_len,
        max_running=max_running,
        kv_bytes_per_token=23040,
        device="cpu",
        transports=["shm"],
    )


def cluster(prefill=(), decode=(), **settings):
    router = Router(RouterSettings(**settings), tokens_per_hash=BLOCK)
    for role, names in (("prefill", prefill), ("decode", decode)):
        for name in names:
            router.worker_up(info(name, role))
            router.apply_snapshot(name, KvSnapshot(seq=0, hashes=[]))
    return router


def chain(name, blocks):
    return tuple(f"{name}-{i}".encode().ljust(16) for i in range(blocks))


def ask(request_id="r1", *, tokens=1000, prompt="a", hashes=None, max_tokens=64, **rest):
    hashes = chain(prompt, tokens // BLOCK) if hashes is None else hashes
    return RouteRequest(request_id=request_id, block_hashes=hashes, num_tokens=tokens, max_tokens=max_tokens, **rest)


def holds(router, worker_id, hashes):
    router.apply_snapshot(worker_id, KvSnapshot(seq=1, hashes=list(hashes)))


def load(router, worker_id, **fields):
    fields = {"free_blocks": 1000, "total_blocks": 1000, **fields}
    router.apply_load(worker_id, LoadReport(seq=1, **fields), 0.0)


def decided(choice):
    assert isinstance(choice, Decision), choice
    return choice


def refused(choice):
    assert isinstance(choice, RoutingRefusal), choice
    return choice


# ---- the path


def test_a_long_cold_prompt_is_prefilled_apart():
    router = cluster(["p1"], ["d1"])
    choice = decided(router.select_and_reserve(ask(), 0.0))
    assert (choice.prefill, choice.decode, choice.path) == ("p1", "d1", "disaggregated")


@pytest.mark.parametrize(("tokens", "path"), [(32, "local"), (33, "disaggregated")])
def test_a_prompt_within_local_prefill_tokens_is_prefilled_on_decode(tokens, path):
    router = cluster(["p1"], ["d1"], local_prefill_tokens=32)
    assert decided(router.select_and_reserve(ask(tokens=tokens), 0.0)).path == path


def test_a_prompt_that_decode_nearly_holds_is_prefilled_there():
    router = cluster(["p1"], ["d1"])
    holds(router, "d1", chain("a", 61))  # 976 of 1000 tokens
    choice = decided(router.select_and_reserve(ask(), 0.0))
    assert (choice.path, choice.prefill, choice.cached_tokens_decode) == ("local", None, 976)


def test_a_busy_decode_worker_leaves_the_prefill_to_a_prefill_worker():
    router = cluster(["p1"], ["d1"])
    load(router, "p1", queued_tokens=2000, prefill_tokens_per_s=2000.0)
    load(router, "d1", running=32, prefill_tokens_per_s=2000.0, decode_step_s=0.03)
    assert decided(router.select_and_reserve(ask(), 0.0)).path == "disaggregated"


def test_an_idle_decode_worker_helps_when_prefill_is_far_behind():
    router = cluster(["p1"], ["d1"])
    load(router, "p1", queued_tokens=8000, prefill_tokens_per_s=2000.0)
    assert decided(router.select_and_reserve(ask(), 0.0)).path == "local"


def test_without_prefill_workers_everything_is_local():
    router = cluster([], ["d1"])
    assert decided(router.select_and_reserve(ask(), 0.0)).path == "local"


def test_one_token_needs_no_decode_worker():
    router = cluster(["p1"], [])
    choice = decided(router.select_and_reserve(ask(needs_decode=False, max_tokens=1), 0.0))
    assert (choice.prefill, choice.decode, choice.path) == ("p1", None, "prefill_only")


def test_one_token_runs_on_decode_when_there_is_no_prefill_worker():
    router = cluster([], ["d1"])
    choice = decided(router.select_and_reserve(ask(needs_decode=False, max_tokens=1), 0.0))
    assert (choice.prefill, choice.decode, choice.path) == (None, "d1", "local")


def test_force_local_and_force_remote_are_obeyed():
    router = cluster(["p1"], ["d1"])
    assert decided(router.select_and_reserve(ask("r1", force="local"), 0.0)).path == "local"
    assert decided(router.select_and_reserve(ask("r2", tokens=5, force="remote"), 0.0)).path == "disaggregated"
    one = ask("r3", needs_decode=False, max_tokens=1, force="local")
    assert decided(router.select_and_reserve(one, 0.0)).path == "local"


def test_force_remote_without_a_prefill_worker_is_refused():
    router = cluster([], ["d1"])
    assert refused(router.select_and_reserve(ask(force="remote"), 0.0)).reason == "no_prefill_worker"


# ---- the workers


def test_a_prompt_goes_where_its_prefix_is():
    router = cluster(["p1", "p2"], ["d1"])
    holds(router, "p2", chain("a", 50))
    choice = decided(router.select_and_reserve(ask(), 0.0))
    assert (choice.prefill, choice.cached_tokens_prefill) == ("p2", 800)


def test_the_last_prompt_token_is_never_cached():
    router = cluster(["p1"], ["d1"])
    holds(router, "p1", chain("a", 62))
    choice = decided(router.select_and_reserve(ask(tokens=992, force="remote"), 0.0))
    assert choice.cached_tokens_prefill == 976
    assert choice.terms["prefill_compute"] > 0


def test_a_hot_worker_loses_a_prompt_that_waits_longer_than_its_prefix_saves():
    router = cluster(["p1", "p2"], ["d1"], policy_options={"max_pressure": 0.0})
    holds(router, "p1", chain("a", 50))
    load(router, "p1", queued_tokens=700)
    assert decided(router.select_and_reserve(ask("r1"), 0.0)).prefill == "p1"
    router.on_end("r1")
    load(router, "p1", queued_tokens=900)
    assert decided(router.select_and_reserve(ask("r2"), 0.0)).prefill == "p2"


def test_when_every_prefill_worker_queues_a_prefix_is_worth_more_than_its_own_seconds():
    router = cluster(["p1", "p2"], ["d1"])
    holds(router, "p1", chain("a", 50))
    load(router, "d1", running=60)
    load(router, "p1", queued_tokens=9000, waiting=6)
    load(router, "p2", queued_tokens=8000, waiting=5)
    choice = decided(router.select_and_reserve(ask(force="remote"), 0.0))
    assert choice.prefill == "p1"
    assert choice.terms["prefill_pressure"] > 0


@pytest.mark.parametrize(("roles", "force"), [(("prefill", "decode"), "remote"), (("decode", "decode"), None)])
def test_own_seconds_count_the_more_the_fewer_workers_that_compute_prompts_are_idle(roles, force):
    """Without prefill workers these are the decode workers."""
    names = [f"w{number}" for number in range(4)]
    router = cluster(**{roles[0]: names}) if roles[0] == roles[1] else cluster(names, ["d1"])
    for number, name in enumerate(["", *names]):
        if name:
            load(router, name, waiting=1, queued_tokens=100)
        terms = decided(router.select_and_reserve(ask("r", force=force), 0.0)).terms
        assert terms["prefill_pressure"] == pytest.approx(64 * terms["prefill_compute"] * (number / 4) ** 6)
        router.on_end("r")


def test_a_prefix_that_is_about_to_be_computed_counts_as_cached_there():
    router = cluster(["p1", "p2"], ["d1"])
    shared = chain("shared", 60)
    assert decided(router.select_and_reserve(ask("r1", hashes=shared + chain("x", 2)), 0.0)).prefill == "p1"
    request = ask("r2", hashes=shared + chain("y", 2))
    work = {
        c.prefill: c.terms["prefill_compute"]
        for c in candidate_scores(decided(router.select_and_reserve(request, 0.0)))
    }
    assert (work["p1"], work["p2"]) == (0.02, 0.5)  # 40 and 1000 tokens at 2000 tokens/s
    router.on_end("r2")
    router.on_end("r1")
    work = {
        c.prefill: c.terms["prefill_compute"]
        for c in candidate_scores(decided(router.select_and_reserve(request, 1.0)))
    }
    assert (work["p1"], work["p2"]) == (0.5, 0.5)


def test_a_shared_prefix_in_flight_attracts_until_the_queue_outweighs_it():
    router = cluster(["p1", "p2"], ["d1"])
    shared = chain("shared", 60)
    counts = {"p1": 0, "p2": 0}
    for i in range(60):
        request = ask(f"r{i}", hashes=shared + chain(f"own{i}", 2), force="remote")
        counts[decided(router.select_and_reserve(request, 0.0)).prefill] += 1
    assert min(counts.values()) >= 15


def test_the_pair_is_chosen_jointly_by_node():
    router = Router(RouterSettings(), tokens_per_hash=BLOCK)
    for name, role, node in (("p1", "prefill", "n1"), ("p2", "prefill", "n2"), ("d1", "decode", "n2")):
        router.worker_up(info(name, role, node=node))
    load(router, "d1", kv_bytes=10**9, kv_seconds=10.0)  # 0.1 GB/s: the move is not hidden
    assert decided(router.select_and_reserve(ask(), 0.0)).prefill == "p2"


def test_decode_with_the_prefix_and_prefill_with_the_prefix_make_the_pair():
    router = cluster(["p1", "p2"], ["d1", "d2"])
    holds(router, "p2", chain("a", 50))
    holds(router, "d2", chain("a", 30))
    choice = decided(router.select_and_reserve(ask(), 0.0))
    assert (choice.prefill, choice.decode, choice.cached_tokens_decode) == ("p2", "d2", 480)


def test_decode_with_more_sequences_is_avoided():
    router = cluster(["p1"], ["d1", "d2"])
    load(router, "d1", running=10)
    load(router, "d2", running=2)
    assert decided(router.select_and_reserve(ask(), 0.0)).decode == "d2"


def test_decode_short_of_blocks_is_avoided():
    router = cluster(["p1"], ["d1", "d2"])
    load(router, "d1", running=4, free_blocks=10)
    load(router, "d2", running=4, free_blocks=500)
    assert decided(router.select_and_reserve(ask(), 0.0)).decode == "d2"


def test_equal_workers_take_turns():
    router = cluster(["p2", "p1"], ["d1", "d2"])
    chosen = []
    for i in range(4):
        choice = decided(router.select_and_reserve(ask(f"r{i}", prompt=f"x{i}"), 0.0))
        chosen.append((choice.prefill, choice.decode))
        router.on_first_token(f"r{i}", 0.1)
        router.on_end(f"r{i}")
    assert chosen == [("p1", "d1"), ("p2", "d2"), ("p1", "d1"), ("p2", "d2")]


def test_a_little_measuring_noise_does_not_tell_equal_workers_apart():
    router = cluster(["p1", "p2"], ["d1"])
    load(router, "p1", prefill_tokens_per_s=2010.0)
    load(router, "p2", prefill_tokens_per_s=1990.0)
    chosen = []
    for i in range(4):
        chosen.append(decided(router.select_and_reserve(ask(f"r{i}", prompt=f"x{i}"), 0.0)).prefill)
        router.on_end(f"r{i}")
    assert chosen == ["p1", "p2", "p1", "p2"]


@pytest.mark.parametrize("rate", [float("nan"), float("inf"), -1.0, 0.0])
def test_a_senseless_measurement_counts_as_none(rate):
    router = cluster(["p1"], ["d1"])
    expected = decided(cluster(["p1"], ["d1"]).select_and_reserve(ask(), 0.0)).terms
    load(router, "p1", prefill_tokens_per_s=rate)
    assert decided(router.select_and_reserve(ask(), 0.0)).terms == expected


# ---- bursts


def test_a_burst_spreads_evenly_before_any_report():
    router = cluster(["p1", "p2", "p3", "p4"], ["d1", "d2", "d3", "d4"])
    prefills, decodes = [], []
    for i in range(32):
        choice = decided(router.select_and_reserve(ask(f"r{i}", prompt=f"x{i}", force="remote"), 0.0))
        prefills.append(choice.prefill)
        decodes.append(choice.decode)
    assert {name: prefills.count(name) for name in prefills} == dict.fromkeys(("p1", "p2", "p3", "p4"), 8)
    assert {name: decodes.count(name) for name in decodes} == dict.fromkeys(("d1", "d2", "d3", "d4"), 8)


def test_a_burst_uses_the_decode_workers_too_but_leaves_half_of_it_to_prefill():
    router = cluster(["p1", "p2"], ["d1", "d2"])
    paths = [decided(router.select_and_reserve(ask(f"r{i}", prompt=f"x{i}"), 0.0)).path for i in range(12)]
    assert paths[:2] == ["disaggregated", "disaggregated"]
    assert 0 < paths.count("local") <= paths.count("disaggregated")


def test_a_report_that_shows_our_own_requests_does_not_count_them_twice():
    router = cluster(["p1"], ["d1"])
    router.select_and_reserve(ask("r1"), 0.0)
    load(router, "p1", queued_tokens=1000, running=1)
    load(router, "d1", receiving=1, leased_blocks=63, free_blocks=937)
    p1, d1 = {w.worker_id: w.load for w in router.workers()}["p1"], router.workers()[0].load
    assert (p1["queued_tokens"], p1["queued_requests"], p1["sequences"]) == (1000, 1, 1)
    assert (d1["sequences"], d1["free_blocks"]) == (1, 937)


def test_a_report_with_more_than_ours_shows_the_others_work():
    router = cluster(["p1"], ["d1"])
    router.select_and_reserve(ask("r1"), 0.0)
    load(router, "p1", queued_tokens=1700, running=1, waiting=1)
    router.on_first_token("r1", 0.5)
    view = router.workers()[1]
    assert (view.worker_id, view.load["queued_tokens"], view.load["queued_requests"]) == ("p1", 700, 1)


# ---- refusals


def test_no_worker_at_all_is_refused():
    assert refused(cluster().select_and_reserve(ask(), 0.0)).reason == "no_decode_worker"
    assert refused(cluster(["p1"]).select_and_reserve(ask(), 0.0)).reason == "no_decode_worker"


def test_excluded_workers_are_not_tried():
    router = cluster(["p1", "p2"], ["d1", "d2"])
    choice = decided(router.select_and_reserve(ask(excluded=frozenset({"p1", "d2"})), 0.0))
    assert (choice.prefill, choice.decode) == ("p2", "d1")
    no_p = decided(router.select_and_reserve(ask(excluded=frozenset({"p1", "p2"})), 0.0))
    assert no_p.path == "local"
    assert refused(router.select_and_reserve(ask(excluded=frozenset({"d1", "d2"})), 0.0)).reason == "full"


def test_what_no_decode_worker_can_ever_hold_is_too_long():
    router = Router(RouterSettings(), tokens_per_hash=BLOCK)
    router.worker_up(info("d1", "decode", num_blocks=64, max_model_len=4096))
    refusal = refused(router.select_and_reserve(ask(tokens=1000, max_tokens=100), 0.0))
    assert refusal.reason == "too_long"
    assert "1024" in refusal.message
    assert decided(router.select_and_reserve(ask(tokens=1000, max_tokens=24), 0.0))


def test_a_prompt_beyond_the_context_is_too_long():
    router = cluster(["p1"], ["d1"])
    assert refused(router.select_and_reserve(ask(tokens=8192), 0.0)).reason == "too_long"
    assert decided(router.select_and_reserve(ask(tokens=8191, max_tokens=500), 0.0))


def test_a_small_prefill_worker_is_passed_over():
    router = Router(RouterSettings(), tokens_per_hash=BLOCK)
    router.worker_up(info("p1", "prefill", num_blocks=10))
    router.worker_up(info("p2", "prefill"))
    router.worker_up(info("d1", "decode"))
    load(router, "p2", queued_tokens=300)
    assert decided(router.select_and_reserve(ask(force="remote"), 0.0)).prefill == "p2"


def test_a_decode_worker_without_room_makes_the_request_wait_in_line():
    router = cluster(["p1"], ["d1"])
    load(router, "d1", running=8, free_blocks=0, decode_step_s=0.03)
    choice = decided(router.select_and_reserve(ask(), 0.0))
    assert choice.terms["decode_wait"] > 0


def test_full_lines_everywhere_are_refused_with_a_time_to_come_back():
    router = cluster(["p1"], ["d1", "d2"])
    for name in ("d1", "d2"):
        load(router, name, running=64, waiting=256, free_blocks=0, decode_step_s=0.03)
    refusal = refused(router.select_and_reserve(ask(), 0.0))
    assert refusal.reason == "full"
    assert 1.0 <= refusal.retry_after_s <= 30.0


def test_a_burst_beyond_the_line_is_refused_before_any_report():
    router = Router(RouterSettings(), tokens_per_hash=BLOCK, max_waiting=4)
    router.worker_up(info("d1", "decode", max_running=2))
    choices = [router.select_and_reserve(ask(f"r{i}", prompt=f"x{i}"), 0.0) for i in range(7)]
    assert [isinstance(c, Decision) for c in choices] == [True] * 6 + [False]


def test_a_refusal_counts_nothing():
    router = cluster(["p1"], ["d1"])
    refused(router.select_and_reserve(ask(tokens=9000), 0.0))
    assert [(w.assigned_requests, w.assigned_tokens) for w in router.workers()] == [(0, 0), (0, 0)]


# ---- explaining


def test_the_terms_are_all_named_and_add_up():
    router = cluster(["p1", "p2"], ["d1", "d2"])
    load(router, "d1", running=3)
    choice = decided(router.select_and_reserve(ask(), 0.0))
    assert tuple(choice.terms) == TERM_NAMES
    assert choice.score == pytest.approx(sum(choice.policy_terms.values()))
    assert choice.predicted_ttft_s == pytest.approx(sum(choice.terms[name] for name in TTFT_TERMS))
    for candidate in candidate_scores(choice):
        assert candidate.score == pytest.approx(sum(candidate.terms.values()))


def test_the_choice_is_the_best_candidate_and_every_way_is_listed():
    router = cluster(["p1", "p2"], ["d1", "d2"])
    choice = decided(router.select_and_reserve(ask(), 0.0))
    candidates = {(c.prefill, c.decode) for c in candidate_scores(choice)}
    assert candidates == {("p1", "d1"), ("p1", "d2"), ("p2", "d1"), ("p2", "d2"), (None, "d1"), (None, "d2")}
    assert choice.score == min(c.score for c in candidate_scores(choice))


def test_many_workers_give_a_bounded_list_that_holds_the_best():
    router = cluster([f"p{i:03}" for i in range(100)], [f"d{i:03}" for i in range(100)])
    for i in range(100):
        load(router, f"p{i:03}", queued_tokens=100 * ((i * 37) % 100))
        load(router, f"d{i:03}", running=(i * 53) % 100)
    choice = decided(router.select_and_reserve(ask(), 0.0))
    assert (choice.prefill, choice.decode) == ("p000", "d000")
    assert len(candidate_scores(choice)) <= 16


def test_the_prediction_error_follows_what_is_observed():
    router = cluster(["p1"], ["d1"])
    choice = decided(router.select_and_reserve(ask(), 10.0))
    router.on_first_token("r1", 10.0 + choice.predicted_ttft_s + 1.0)
    router.on_first_token("r1", 99.0)  # only the first counts
    assert router.prediction_error_s == pytest.approx(0.2)


@pytest.mark.parametrize(
    ("tokens", "max_tokens", "is_taken"), [(64, 1, True), (64, 2, False), (63, 2, True), (65, 1, False)]
)
def test_a_prompt_may_fill_the_context_when_nothing_follows_it(tokens, max_tokens, is_taken):
    """Scoring with echo: one token is drawn, and none is computed after it."""
    router = Router(RouterSettings(), tokens_per_hash=BLOCK)
    router.worker_up(info("d1", "decode", num_blocks=4, max_model_len=64))
    choice = router.select_and_reserve(ask(tokens=tokens, max_tokens=max_tokens), 0.0)
    assert isinstance(choice, Decision if is_taken else RoutingRefusal)


# ---- workers with blocks of unequal sizes


def mixed(prefill_block, decode_block, **decode):
    router = Router(RouterSettings(), tokens_per_hash=BLOCK)
    for name, role, block_size, rest in (("p", "prefill", prefill_block, {}), ("d", "decode", decode_block, decode)):
        router.worker_up(info(name, role, block_size=block_size, **rest))
        router.apply_snapshot(name, KvSnapshot(seq=0, hashes=[]))
    return router


def test_cached_tokens_are_counted_in_each_workers_own_blocks():
    router, hashes = mixed(4 * BLOCK, BLOCK), chain("a", 62)
    holds(router, "p", hashes[3:40:4])  # 10 blocks of 64 tokens
    holds(router, "d", hashes[:7])
    choice = router.select_and_reserve(ask(hashes=hashes, force="remote"), 0.0)
    assert (choice.cached_tokens_prefill, choice.cached_tokens_decode) == (640, 112)


def test_the_last_token_is_computed_though_every_large_block_is_cached():
    router, hashes = mixed(4 * BLOCK, BLOCK), chain("a", 8)
    holds(router, "p", [hashes[3], hashes[7]])
    choice = router.select_and_reserve(ask(tokens=128, hashes=hashes, force="remote"), 0.0)
    assert choice.cached_tokens_prefill == 64  # of two blocks, the second holds the last token


def test_what_another_request_computes_counts_in_whole_blocks_of_that_worker():
    router, hashes = mixed(4 * BLOCK, BLOCK), chain("a", 7)
    router.select_and_reserve(ask("r1", tokens=113, hashes=hashes, force="remote"), 0.0)
    choice = router.select_and_reserve(ask("r2", tokens=113, hashes=hashes, force="remote"), 0.0)
    assert choice.cached_tokens_prefill == 64  # 112 tokens are shared, one block of 64 of them is full


def test_room_is_counted_in_the_workers_own_blocks():
    few = mixed(BLOCK, 4 * BLOCK, num_blocks=20)
    assert isinstance(few.select_and_reserve(ask(tokens=1000, max_tokens=200), 0.0), Decision)
    router = mixed(BLOCK, BLOCK, num_blocks=20)
    refusal = router.select_and_reserve(ask(tokens=1000, max_tokens=200), 0.0)
    assert isinstance(refusal, RoutingRefusal) and "the largest holds 320" in refusal.message


def test_blocks_that_a_request_will_take_are_the_decode_workers_own():
    router = mixed(BLOCK, 4 * BLOCK)
    before = next(view.load["free_blocks"] for view in router.workers() if view.worker_id == "d")
    router.select_and_reserve(ask(tokens=1000, force="remote"), 0.0)
    after = next(view.load["free_blocks"] for view in router.workers() if view.worker_id == "d")
    assert before - after == 16  # 1,001 tokens in blocks of 64
