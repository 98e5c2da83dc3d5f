"""How long requests may queue: who is refused at once, who must not be passed any more, and who has waited too long."""

import pytest

from kvrelay.plane.reports import AssignedByOthers
from kvrelay.router.decision.deferral import FORGET_S, LEAST_WAITS, QUEUED_PER_WORKER, Surplus, in_turn
from kvrelay.router.types import Deferred, RoutingRefusal
from tests.router.decision.test_deferral import BLOCKS, LONG, cluster, counted, late
from tests.router.decision.test_placement_rules import ask, decided, load, refused

pytestmark = pytest.mark.pure

NO_TARGETS = {"policy": "least_loaded", "policy_options": {}}
NUM_STARTED = 12


def starting(*, left, tenant="", every_s=1.0, **settings):
    """A cluster that has started one prompt in `every_s`, as long as twelve of them took; `left` are queued now."""
    router = cluster(**settings)
    for number in range(NUM_STARTED + left):
        decided(router.select_and_reserve(ask(f"x{number}", tokens=100, hashes=(), tenant=tenant), 0.0))
    for number in range(NUM_STARTED):
        router.on_first_token(f"x{number}", every_s * (number + 1))
        router.on_end(f"x{number}")
    return router


def new(router, request_id="new", now_s=NUM_STARTED, **fields):
    fields = {"tokens": 100, "hashes": (), "is_new": True, "may_wait": True} | fields
    return router.select_and_reserve(ask(request_id, **fields), float(now_s))


def long(router, request_id, now_s, **fields):
    """Four seconds of work: overdue, whoever is there."""
    return router.select_and_reserve(late(request_id, is_new=True, **fields), float(now_s))


# ---- refused at once


@pytest.mark.parametrize("settings", [{}, NO_TARGETS])
def test_who_would_queue_for_longer_than_allowed_is_refused_at_once(settings):
    router = starting(left=31, **settings)
    before = counted(router)
    refusal = refused(new(router))
    assert (refusal.reason, refusal.retry_after_s) == ("full", 30.0)
    assert refusal.message == "the cluster is full: it would be queued for about 31 s, at most 30 s are allowed"
    assert counted(router) == before and not router.num_deferred


@pytest.mark.parametrize(("settings", "kind"), [({}, Deferred), (NO_TARGETS, object)])
def test_who_would_not_may_queue(settings, kind):
    assert isinstance(new(starting(left=30, **settings)), kind)


def test_the_bound_is_a_setting():
    assert isinstance(new(starting(left=31, max_queue_s=32.0)), Deferred)
    refusal = refused(new(starting(left=6, max_queue_s=5.0)))
    assert refusal.retry_after_s == 6.0, "by then all that is queued now has started"


def full(*, left, now_s=NUM_STARTED, every_s=1.0):
    """A new request, in time or not, after one had to be refused; then `left` are queued."""
    router = starting(left=31, every_s=every_s, policy_options={"ttft_s": 10.0})
    refused(new(router))
    for number in range(NUM_STARTED, NUM_STARTED + 31 - left):
        router.on_end(f"x{number}")
    return new(router, "next", now_s)


def test_after_a_refusal_new_ones_may_queue_for_a_part_of_their_target_only():
    assert refused(full(left=7)).message.endswith("for about 7 s, at most 6 s are allowed")
    decided(full(left=6))


def test_until_none_was_refused_for_as_long_as_requests_may_queue():
    refused(full(left=7, now_s=NUM_STARTED + 29.9))
    decided(full(left=7, now_s=NUM_STARTED + 30.0))
    router = starting(left=61)
    for after_s in (0.0, 29.0, 58.0, 87.0):
        refused(new(router, now_s=NUM_STARTED + after_s))
        assert new(router, "older", NUM_STARTED + after_s, is_new=False), "it was admitted"


def test_a_tenant_s_refusal_bounds_no_other_tenant_and_no_other_priority():
    router = starting(left=100, tenant="greedy")
    refused(new(router, tenant="greedy"))
    assert isinstance(new(router, tenant="modest"), Deferred)
    for number in range(NUM_STARTED, NUM_STARTED + 90):
        router.on_end(f"x{number}")
    refused(new(router, tenant="greedy"))
    assert isinstance(new(router, tenant="greedy", priority=-1), Deferred)


def test_workers_that_have_little_to_do_take_a_prompt_however_long_it_takes_them():
    busy = 2 * QUEUED_PER_WORKER
    refused(full(left=busy, every_s=5.0))
    decided(full(left=busy - 1, every_s=5.0))


def test_who_was_admitted_before_is_not_refused():
    decided(new(starting(left=200), is_new=False, may_wait=False))


def test_before_any_wait_was_seen_nobody_is_refused():
    router = cluster(**NO_TARGETS)
    for number in range(300):
        decided(new(router, f"r{number}"))


def test_waits_behind_few_prompts_say_nothing_of_what_the_workers_can_do():
    router = cluster(**NO_TARGETS)
    for number in range(50):
        for name in [f"r{number}-{place}" for place in range(QUEUED_PER_WORKER * 2 - 1)]:
            decided(new(router, name))
            router.on_first_token(name, NUM_STARTED + 20.0)
            router.on_end(name)
    for number in range(100):
        decided(new(router, f"burst{number}"))


def test_the_rate_follows_what_the_workers_can_do_now():
    router = starting(left=31, every_s=10.0, policy_options={"ttft_s": 10.0})
    refused(new(router))
    for number in range(400):
        router.select_and_reserve(ask(f"y{number}", tokens=100, hashes=()), 0.0)
        router.on_first_token(f"y{number}", 0.32)  # the last of 32: ten in a second
        router.on_end(f"y{number}")
    decided(new(router))


def test_what_the_workers_could_do_a_minute_ago_is_forgotten():
    router = starting(left=31)
    refused(new(router, now_s=NUM_STARTED + 60.0))
    decided(new(router, now_s=NUM_STARTED + 60.1))


def test_another_tenant_is_not_refused_for_what_one_has_queued():
    router = starting(left=100, tenant="greedy")
    refused(new(router, tenant="greedy"))
    assert isinstance(new(router, tenant="modest"), Deferred)


def test_of_other_tenants_only_as_many_go_first_as_the_own_one_has_and_one():
    queued = {"a": 10, "b": 3, "c": 1}
    assert [in_turn(queued, tenant) for tenant in ("a", "b", "c", "new")] == [14, 8, 5, 3]


def test_deferred_requests_of_a_lower_priority_go_later():
    router = starting(left=8)
    for number in range(20):
        assert isinstance(long(router, f"r{number}", NUM_STARTED), Deferred)
    assert isinstance(long(router, "more", NUM_STARTED), Deferred)
    for number in range(20, 30):
        long(router, f"r{number}", NUM_STARTED)
    refused(long(router, "same", NUM_STARTED))
    assert isinstance(long(router, "first", NUM_STARTED, priority=-1), Deferred)


# ---- several ingresses


def others(router, *, prompts, num_others=1):
    router.apply_others("p1", AssignedByOthers(num_others, True, tokens=100 * prompts, prompts=prompts))


def test_what_other_ingresses_have_queued_at_the_workers_counts():
    router = starting(left=10)
    assert isinstance(new(router, "one"), Deferred)
    router.on_end("one")
    others(router, prompts=21)
    refused(new(router))


def test_other_ingresses_are_taken_to_have_as_many_deferred():
    """Ten here and ten there are at the workers, so every other start is ours: six deferred ones take twelve."""

    def with_deferred(**foreign):
        router = starting(left=10)
        for number in range(6):
            assert isinstance(long(router, f"r{number}", NUM_STARTED), Deferred)
        others(router, **foreign)
        return long(router, "one more", NUM_STARTED)

    refused(with_deferred(prompts=10))
    assert isinstance(with_deferred(prompts=10, num_others=0), Deferred)
    assert isinstance(with_deferred(prompts=0), Deferred)


def test_an_ingress_has_its_share_of_the_workers_however_much_others_have_there():
    router = starting(left=6)
    assert isinstance(new(router), Deferred)
    others(router, prompts=40)
    for number in range(4):
        assert router.take_ready() is None
        router.on_end(f"x{NUM_STARTED + number}")
    assert router.take_ready() == "new", "two of its own, and as many of the other's, are 4 s"


# ---- in order of arrival


def with_one_deferred(**settings):
    """`there` is computed, `waits` has been deferred since 0 s, and the workers say that who comes may go first."""
    router = cluster(**settings)
    decided(long(router, "there", 0.0))
    assert isinstance(long(router, "waits", 0.0), Deferred)
    load(router, "p1", free_blocks=BLOCKS, prefill_tokens_per_s=2000.0, overdue=1, overdue_tokens=LONG)
    return router


def test_who_is_in_time_passes_until_the_oldest_has_waited_for_half_of_the_bound():
    router = with_one_deferred()
    decided(new(router, "passes", 14.9))
    assert isinstance(new(router, "behind", 15.0), Deferred)
    router.on_first_token("there", 16.0), router.on_first_token("passes", 16.0)
    assert router.take_ready() == "waits"
    decided(long(router, "waits", 16.0))
    router.on_first_token("waits", 17.0)
    assert router.take_ready() == "behind"
    decided(new(router, "behind", 17.0))


def test_or_until_so_much_is_queued_that_the_last_would():
    router = starting(left=0)
    decided(long(router, "there", NUM_STARTED))
    for number in range(13):
        assert isinstance(long(router, f"r{number}", NUM_STARTED), Deferred)
    load(router, "p1", free_blocks=BLOCKS, prefill_tokens_per_s=2000.0, overdue=1, overdue_tokens=LONG)
    decided(new(router, "passes"))
    router.on_end("passes")
    assert isinstance(long(router, "r13", NUM_STARTED), Deferred)
    assert isinstance(new(router, "behind"), Deferred)


def test_who_may_not_wait_here_still_passes():
    """A deadline, a forced path: their turn comes at the worker."""
    decided(new(with_one_deferred(), now_s=20.0, may_wait=False))


def test_who_has_waited_for_as_long_as_allowed_is_refused():
    router = with_one_deferred()
    assert isinstance(second := long(router, "second", 3.0), Deferred) and second.longest_s == 30.0
    refusal = refused(long(router, "waits", 30.0))
    assert (refusal.reason, refusal.retry_after_s) == ("full", 30.0)
    assert refusal.message.startswith("the cluster is full: it has been queued for 30 s")
    assert router.num_deferred == 1
    assert isinstance(second := long(router, "second", 31.0), Deferred), "it is early"
    assert second.longest_s == pytest.approx(2.0)


def test_whose_turn_has_come_is_placed_however_long_it_has_waited():
    router = with_one_deferred()
    router.on_first_token("there", 29.9)
    assert router.take_ready() == "waits"
    decided(long(router, "waits", 30.5))


def test_who_was_called_late_counts_as_overdue_at_its_worker():
    """So that the next one waits until its prompt is computed, although the worker's queue looks short."""
    router = cluster()
    decided(long(router, "there", 0.0))
    assert isinstance(long(router, "r1", 0.0), Deferred) and isinstance(long(router, "r2", 0.0), Deferred)
    router.on_first_token("there", 10.0)
    assert router.take_ready() == "r1"
    decided(new(router, "r1", 10.0, tokens=LONG))
    assert router.take_ready() is None


def test_while_many_are_queued_at_the_workers_none_is_called():
    """Whatever they wait for there: 600 prompt tokens are 0.3 s of work, and take six seconds to start."""
    router = starting(left=6)
    assert isinstance(new(router), Deferred)
    assert router.take_ready() is None
    router.on_end(f"x{NUM_STARTED}")
    assert router.take_ready() == "new"


# ---- overdue requests


def with_overdue_waits(wait_s, *, count=LEAST_WAITS, queued=4, queued_tokens=100, **settings):
    """A cluster in which `count` overdue prompts, each alone at its worker, had their first tokens after `wait_s`;
    `queued` shorter prompts are there now.
    """
    router = cluster(**settings)
    for number in range(count):
        decided(long(router, f"o{number}", number))
        router.on_first_token(f"o{number}", number + wait_s)
        router.on_end(f"o{number}")
    for number in range(queued):
        decided(new(router, f"x{number}", count, may_wait=False, tokens=queued_tokens))
    return router


def test_a_long_overdue_prompt_is_refused_whose_first_token_would_take_much_too_long():
    router = with_overdue_waits(13.0)
    before = counted(router)
    refusal = refused(long(router, "late", LEAST_WAITS))
    assert (refusal.reason, refusal.retry_after_s) == ("full", pytest.approx(13.0 - 2 * LONG / 2000, abs=0.2))
    assert refusal.message == "the cluster is full: its first token would take about 13 s, at most 8 s are allowed"
    assert counted(router) == before and not router.num_deferred
    decided(new(router, "in time", LEAST_WAITS))


@pytest.mark.parametrize(
    ("made", "fields"),
    [
        ({"wait_s": 8.2}, {}),
        ({"wait_s": 13.0, "count": LEAST_WAITS - 1}, {}),  # not known well enough
        ({"wait_s": 13.0, "queued": 3}, {}),  # it may be the only one that its worker has to compute
        ({"wait_s": 13.0, "max_queue_s": 60.0}, {}),
        ({"wait_s": 13.0}, {"priority": -1}),
        ({"wait_s": 13.0}, {"tokens": 2 * LONG, "prompt": "x" * 20, "is_new": False}),  # it was admitted before
        ({"wait_s": 13.0, "policy_options": {"ttft_s": 1000.0}}, {}),
    ],
)
def test_any_other_is_not(made, fields):
    choice = with_overdue_waits(**made).select_and_reserve(late("late", **({"is_new": True} | fields)), LEAST_WAITS)
    assert not isinstance(choice, RoutingRefusal), choice


@pytest.mark.parametrize(("others", "is_refused"), [(100, True), (900, False)])
def test_only_prompts_of_twice_the_mean_are_refused(others, is_refused):
    router = with_overdue_waits(130.0, queued=60, queued_tokens=others)
    choice = long(router, "late", LEAST_WAITS, tokens=1100)  # 17 s are expected
    assert isinstance(choice, RoutingRefusal) == is_refused, choice


def test_a_prompt_that_takes_long_by_itself_may_wait_for_as_long_again():
    router = with_overdue_waits(1.4 * LONG / 2000)
    decided(long(router, "long", LEAST_WAITS, tokens=4 * LONG))  # 16 s on an idle worker, 23 s are expected
    router = with_overdue_waits(2.1 * LONG / 2000)
    refused(long(router, "long", LEAST_WAITS, tokens=4 * LONG))


def test_more_is_expected_behind_other_overdue_prompts_of_the_same_tenant():
    for tenant, is_refused in (("", True), ("other", False)):
        router = with_overdue_waits(6.0)
        decided(long(router, "before", LEAST_WAITS))
        choice = long(router, "late", LEAST_WAITS, tenant=tenant)
        assert isinstance(choice, RoutingRefusal) == is_refused, (tenant, choice)


def test_what_was_learned_is_forgotten():
    router = with_overdue_waits(13.0)
    for number in range(4):
        router.on_first_token(f"x{number}", LEAST_WAITS + 1.0)
        router.on_end(f"x{number}")
    for number in range(4):
        decided(new(router, f"y{number}", LEAST_WAITS + 2 + FORGET_S, may_wait=False))
    assert not isinstance(long(router, "late", LEAST_WAITS + 2 + FORGET_S), RoutingRefusal)


# ---- an overload that lasts


def spans_with_a_surplus(come, started, seconds=20.0):
    """After so many seconds of so many a second, as functions of the time; of five seconds each."""
    surplus = Surplus(5.0)
    for tenth in range(round(10 * seconds) + 1):
        surplus.observe(tenth / 10, come=come(tenth / 10), started=started(tenth / 10))
    return surplus.num_spans


def test_a_surplus_is_counted_while_more_come_than_are_started():
    assert spans_with_a_surplus(lambda _: 6, lambda _: 4) == 4
    assert spans_with_a_surplus(lambda _: 5, lambda _: 5) == 0
    assert spans_with_a_surplus(lambda now_s: 6 if now_s < 14 else 0, lambda _: 4) == 0


def test_neither_a_burst_nor_clients_that_wait_for_their_answers_are_a_lasting_surplus():
    assert spans_with_a_surplus(lambda now_s: 500 if now_s == 1 else 3, lambda _: 4) == 0
    assert spans_with_a_surplus(lambda now_s: 64 if now_s == 0 else 1, lambda now_s: 1, 9.9) == 1
    assert spans_with_a_surplus(lambda now_s: 64 if now_s == 0 else 1, lambda now_s: 1) == 0


def test_after_a_time_without_anything_it_begins_anew():
    surplus = Surplus(5.0)
    for now_s in (0.0, 1.0, 5.0, 9.0, 10.0):
        surplus.observe(now_s, come=12)
    assert surplus.num_spans == 2
    surplus.observe(30.0, come=12)
    assert surplus.num_spans == 0


def test_a_span_is_longer_where_few_requests_come():
    def num_spans(come, started):
        return spans_with_a_surplus(lambda now_s: come * (now_s % 1 == 0), lambda now_s: started * (now_s % 1 == 0), 32)

    assert num_spans(come=2, started=1) == 2, "each of about twelve seconds"
    assert num_spans(come=1, started=0.5) == 2, "each of fifteen seconds"


def lasting(*, each_s):
    """So many new requests in every second, all of them overdue, and none is started."""
    router = starting(left=5, every_s=0.4)
    for now_s in range(12, 28):
        for number in range(each_s):
            assert not isinstance(new(router, f"r{now_s}.{number}", now_s), RoutingRefusal)
    return router


def test_while_an_overload_lasts_who_would_be_late_is_refused():
    router = lasting(each_s=4)
    refusal = refused(new(router, now_s=28))
    assert refusal.message.endswith("for about 28 s, and more come than can be started")
    assert refusal.reason == "full" and refusal.retry_after_s > 10.0
    assert isinstance(new(router, "urgent", 28, priority=-1), Deferred)
    assert isinstance(new(router, "known", 28, is_new=False), Deferred), "it was admitted"
    assert isinstance(new(lasting(each_s=2), now_s=28), Deferred), "the control: too few to tell"


def test_until_none_was_refused_for_as_long_as_requests_may_queue_though_less_come():
    router = lasting(each_s=4)
    for now_s in (28, 57, 86):
        refused(new(router, now_s=now_s))
    assert isinstance(new(router, now_s=116), Deferred)
