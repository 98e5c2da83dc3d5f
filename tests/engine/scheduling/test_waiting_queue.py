"""Which sequence is next: priorities, deadlines, fair shares, and that nobody starves whatever the others are."""

import gc
import math

import hypothesis.strategies as st
import pytest
from hypothesis import given, settings

from kvrelay.engine.scheduling.fair_share import MAX_IDLE, MAX_NAMED, FairShare, QueueRules
from kvrelay.engine.scheduling.sequence import Sequence
from kvrelay.engine.scheduling.waiting_queue import WaitingQueue, last_of, ranks_before, victim
from kvrelay.plane.messages import Sampling, SequenceRequest

pytestmark = pytest.mark.pure


NEVER = QueueRules(oldest_every=None, credit_tokens=0)


class QueueWorld:
    """One queue, and sequences in order of arrival."""

    def __init__(self, rules: QueueRules = NEVER) -> None:
        self.shares = FairShare(rules)
        self.queue, self.other = WaitingQueue(self.shares), WaitingQueue(self.shares)
        self.arrivals = 0

    def new(self, tenant="", *, priority=0, deadline_s=None, tokens=100, now_s=0.0) -> Sequence:
        self.arrivals += 1
        request = SequenceRequest(
            request_id=f"r{self.arrivals}",
            token_ids=[0] * tokens,
            num_prompt_tokens=tokens,
            block_hashes=[],
            sampling=Sampling(max_tokens=8),
            priority=priority,
            deadline_s=deadline_s,
            tenant=tenant,
        )
        return Sequence(request, 16, self.arrivals, arrived_s=now_s)

    def come(self, tenant="", **facts) -> Sequence:
        seq = self.new(tenant, **facts)
        self.queue.push(seq)
        return seq

    def admit(self) -> Sequence | None:
        """Whoever is next, and what it costs its tenant."""
        seq = self.queue.head()
        if seq is not None:
            self.queue.take(seq)
            self.shares.admit(seq)
            seq.has_begun = True
        return seq

    def order(self) -> list[Sequence]:
        return [self.admit() for _ in range(len(self.queue))]


def test_lower_numbers_of_priority_come_first_then_arrival():
    world = QueueWorld()
    low, plain, high, later = (world.come(priority=priority) for priority in (3, 0, -2, 0))
    assert world.order() == [high, plain, later, low]


def test_within_a_class_the_earliest_deadline_comes_first_and_those_without_last():
    world = QueueWorld()
    none, late, soon = world.come(), world.come(deadline_s=9.0), world.come(deadline_s=1.0)
    urgent = world.come(priority=-1)
    assert world.order() == [urgent, soon, late, none]


def test_tenants_take_turns_however_many_each_sends():
    world = QueueWorld()
    for _ in range(6):
        world.come("greedy")
    for _ in range(2):
        world.come("modest")
    assert [seq.request.tenant for seq in world.order()][:4] == ["greedy", "modest", "greedy", "modest"]


def test_within_a_tenant_it_is_first_come_first_served():
    world = QueueWorld()
    seqs = [world.come("a"), world.come("b"), world.come("a"), world.come("b"), world.come("a")]
    order = world.order()
    for tenant in "ab":
        assert [seq for seq in order if seq.request.tenant == tenant] == [s for s in seqs if s.request.tenant == tenant]


def test_a_tenant_with_twice_the_weight_gets_twice_the_tokens():
    world = QueueWorld()
    world.shares.set_weight("gold", 2.0)
    for _ in range(30):
        world.come("gold")
        world.come("plain")
    first = [world.admit().request.tenant for _ in range(30)]
    assert first.count("gold") == 20


def test_tokens_count_not_requests():
    world = QueueWorld()
    for _ in range(4):
        world.come("long", tokens=1000)
    for _ in range(40):
        world.come("short", tokens=100)
    first = [world.admit().request.tenant for _ in range(22)]
    assert first.count("long") == 2


@pytest.mark.parametrize(("credit", "ahead"), [(0, 0), (400, 4), (10**9, 10)])
def test_who_comes_back_from_idle_has_saved_up_the_credit_and_no_more(credit, ahead):
    world = QueueWorld(QueueRules(oldest_every=None, credit_tokens=credit))
    for _ in range(20):
        world.come("busy")
    for _ in range(10):
        world.admit()
    for _ in range(10):
        world.come("idle")
    assert world.shares.counter("idle") == max(0, 1000 - credit)
    if credit < 10**9:
        assert [seq.request.tenant for seq in world.order()].index("busy") == ahead


def test_newcomers_with_savings_do_not_come_before_one_another():
    """Each lifted to less than the one before it, they would be served last come first."""
    world = QueueWorld(QueueRules(oldest_every=None, credit_tokens=400))
    for _ in range(20):
        world.come("busy")
    for _ in range(10):
        world.admit()
    new = [world.come(f"new{number}") for number in range(5)]
    assert world.order()[:5] == new


def test_tenants_that_were_served_about_alike_come_first_come_first_served():
    world = QueueWorld(QueueRules(oldest_every=None, credit_tokens=4000))
    seqs = [world.come(tenant, tokens=100) for tenant in "abbbba"]
    assert world.order() == seqs


def test_output_costs_more_than_prompt_and_what_is_cached_nothing():
    world = QueueWorld()
    seq = world.come("a", tokens=100)
    world.queue.take(seq)
    seq.num_cached = seq.num_computed = 64
    world.shares.admit(seq)
    assert world.shares.counter("a") == 36
    seq.token_ids += [1] * 5
    seq.num_computed = 105
    world.shares.advance(seq)
    assert world.shares.counter("a") == 36 + 2 * 5


def test_what_was_paid_ahead_and_never_computed_comes_back_as_credit():
    world = QueueWorld()
    seq = world.come("a", tokens=100)
    world.admit()
    seq.num_computed = 30
    world.shares.give_back(seq)
    world.come("a", tokens=80)
    world.admit()
    assert world.shares.counter("a") == 100 + 80 - 70


def test_nothing_is_paid_for_twice_when_it_is_computed_again():
    world = QueueWorld()
    seq = world.come("a", tokens=100)
    world.admit()
    for computed in (100, 40, 100):  # pre-empted at each of these, and begun anew
        seq.num_computed = computed
        world.shares.give_back(seq)
        seq.num_computed = 0
        world.queue.push(seq)
        assert world.admit() is seq
    seq.num_computed = 100
    world.shares.give_back(seq)
    assert world.shares.counter("a") == 100
    world.come("a", tokens=10)
    world.admit()
    assert world.shares.counter("a") == 110  # no credit was left


def test_who_was_begun_stands_before_its_class_but_not_before_a_higher_one():
    world = QueueWorld()
    begun = world.come("a")
    world.admit()
    world.come("b", deadline_s=0.5)
    high = world.come("c", priority=-1)
    world.queue.push(begun)
    assert world.order()[:2] == [high, begun]


def test_deadlines_of_a_tenant_that_leads_by_too_much_are_heeded_no_more():
    world = QueueWorld(QueueRules(oldest_every=None, credit_tokens=250))
    for _ in range(8):
        world.come("pushy", deadline_s=5.0)
    for _ in range(8):
        world.come("patient")
    assert "".join(seq.request.tenant[1] for seq in world.order()) == "uuu" + "aaa" + 5 * "ua"


def test_what_is_skipped_is_passed_over_and_then_has_its_place_again():
    world = QueueWorld()
    away, next_one = world.come(), world.come()
    back = {away}
    assert world.queue.head(back.__contains__) is next_one
    world.queue.return_ready(back.__contains__)
    assert world.queue.head(back.__contains__) is next_one
    back.clear()
    assert world.queue.head(back.__contains__) is next_one  # nobody has looked again
    world.queue.return_ready(back.__contains__)
    assert world.queue.head(back.__contains__) is away and len(world.queue) == 2


def test_overdue_are_those_never_begun_queued_even_if_they_stand_back():
    world = QueueWorld()
    begun = world.come(deadline_s=1.0)
    world.admit()
    world.queue.push(begun)
    away, early, fine = world.come(deadline_s=2.0), world.come(deadline_s=3.0), world.come(deadline_s=9.0)
    gone = world.come(deadline_s=2.5)
    world.queue.remove(gone)
    world.queue.head(lambda seq: seq is away)
    assert world.queue.next_deadline_s() == 2.0
    assert world.queue.past_deadline(3.0) == [away, early]
    assert world.queue.past_deadline(3.0) == [] and world.queue.next_deadline_s() == 9.0
    world.queue.remove(fine)
    assert world.queue.next_deadline_s() == math.inf


def test_the_victim_is_of_the_lowest_priority_then_the_latest_and_never_above_whom_it_is_for():
    world = QueueWorld()
    low_old, low_new, plain, high = (world.new(priority=priority) for priority in (2, 2, 0, -1))
    running = [low_old, low_new, plain, high]
    assert victim(running, high) is low_new
    assert victim([plain, high], plain) is plain
    assert victim([high, plain], high) is plain
    later = world.new()
    assert victim([plain, later], plain) is later


def test_a_full_queue_is_left_by_the_last_of_whoever_takes_most_places():
    world = QueueWorld()
    first = world.come("greedy")
    assert world.shares.most_waiting("modest", 1.0) is None  # one against none: nothing would be won
    second = world.come("greedy")
    assert world.shares.most_waiting("modest", 1.0) == "greedy" and world.shares.most_waiting("greedy", 1.0) is None
    assert world.shares.most_waiting("modest", 0.5) is None  # for its weight it would take twice as many
    assert last_of("greedy", world.queue, world.other) is second
    low = world.come("greedy", priority=1)
    world.come("greedy")
    assert last_of("greedy", world.queue) is low
    for seq in (second, low, first):
        seq.has_begun = True
    assert last_of("greedy", world.queue) is not first


# ---- nobody starves

ARRIVAL = st.tuples(
    st.integers(-8, 8), st.one_of(st.none(), st.floats(0.01, 100.0)), st.sampled_from("abcd"), st.integers(1, 400)
)


@st.composite
def lives(draw):
    """Who is there before, then what happens: each admission is followed by new arrivals that would all rather go
    first.
    """
    before = draw(st.lists(ARRIVAL, max_size=12))
    own = draw(ARRIVAL)
    later = draw(st.lists(ARRIVAL, min_size=1, max_size=5))
    return before, own, later


def admissions_until(rules: QueueRules, before, own, later, limit: int, *, elsewhere: int = 0) -> int:
    """How many others are admitted before `own`, with `later` coming again and again; at most `limit`."""
    world = QueueWorld(rules)

    def come(facts):
        priority, deadline_s, tenant, tokens = facts
        return world.come(tenant, priority=priority, deadline_s=deadline_s, tokens=tokens)

    for facts in before:
        come(facts)
    waiting, count = come(own), 0
    while count < limit:
        for facts in later:
            if len(world.queue) < 40:
                come(facts)
        for _ in range(elsewhere):
            world.queue.count_admission()
        admitted = world.admit()
        if admitted is waiting:
            return count
        if count % 3 == 0 and admitted is not None and admitted.arrival > waiting.arrival:
            world.queue.push(admitted)  # pre-empted: it stands before its class again
        count += 1
    return limit


@given(life=lives(), every=st.integers(1, 12), elsewhere=st.integers(0, 2))
@settings(max_examples=120, deadline=None)
def test_whoever_has_e_before_it_is_admitted_within_oldest_every_times_e_plus_one(life, every, elsewhere):
    before, own, later = life
    bound = every * (len(before) + 1)
    rules = QueueRules(oldest_every=every, credit_tokens=300)
    assert admissions_until(rules, before, own, later, bound + 1, elsewhere=elsewhere) < bound


def test_without_the_oldests_turn_a_stream_of_higher_priority_starves_the_others():
    own, later = (1, None, "a", 100), [(0, None, "b", 1)]
    assert admissions_until(NEVER, [], own, later, 5000) == 5000
    assert admissions_until(QueueRules(oldest_every=16), [], own, later, 5000) == 15


@given(life=lives())
@settings(max_examples=40, deadline=None)
def test_with_the_oldests_turn_every_time_it_is_first_come_first_served(life):
    before, own, later = life
    assert admissions_until(QueueRules(oldest_every=1), before, own, later, 1000) == len(before)


@given(st.lists(st.tuples(st.sampled_from("ab"), st.integers(1, 300)), min_size=30, max_size=60))
@settings(max_examples=30, deadline=None)
def test_two_tenants_that_always_want_more_get_equal_service_but_for_one_request(arrivals):
    """The bound of the paper: the difference is at most what one admission may add."""
    world = QueueWorld()
    for _ in range(3):
        for tenant in "ab":
            world.come(tenant, tokens=300)
    start = {tenant: world.shares.counter(tenant) for tenant in "ab"}
    for tenant, tokens in arrivals:
        world.admit()
        world.come(tenant, tokens=tokens)
        if not all(world.shares.num_waiting[name] for name in "ab"):
            break
        gained = {name: world.shares.counter(name) - start[name] for name in "ab"}
        assert abs(gained["a"] - gained["b"]) <= 300


# ---- against a plain list: the queue loses nobody and answers the same

STEP = st.tuples(st.sampled_from(["come", "come", "admit", "leave", "again"]), st.integers(0, 999), ARRIVAL)


@given(st.lists(STEP, max_size=60), st.sampled_from([None, 1, 3, 7]))
@settings(max_examples=100, deadline=None)
def test_the_head_is_what_a_sorted_list_says(steps, every):
    world = QueueWorld(QueueRules(oldest_every=every, credit_tokens=math.inf))
    members, begun, since = [], [], 0
    for what, draw, (priority, deadline_s, tenant, tokens) in steps:
        if what == "come":
            since = 0 if not members else since
            members.append(world.come(tenant, priority=priority, deadline_s=deadline_s, tokens=tokens))
        elif what == "leave" and members:
            world.queue.remove(members.pop(draw % len(members)))
        elif what == "again" and begun:
            since = 0 if not members else since
            members.append(begun.pop(draw % len(begun)))
            world.queue.push(members[-1])
        elif what == "admit" and members:
            oldest = min(members, key=lambda seq: seq.arrival)
            head = world.queue.head()
            if every is not None and since >= every - 1:
                assert head is oldest
            else:  # equal counters: any of those tenants
                assert world.queue.rank(head)[:4] == min(world.queue.rank(seq)[:4] for seq in members)
            assert world.admit() is head
            since = 0 if head is oldest else since + 1
            members.remove(head)
            begun.append(head)
    assert sorted(seq.arrival for seq in world.queue) == sorted(seq.arrival for seq in members)
    assert sum(world.queue.num_by_priority.values()) == sum(world.shares.num_waiting.values()) == len(members)


# ---- between two queues


def test_between_two_queues_the_oldests_turn_comes_before_every_rank():
    world = QueueWorld(QueueRules(oldest_every=2))
    low, high = world.come(priority=5), world.new(priority=-5)
    world.other.push(high)
    assert ranks_before(world.other, high, world.queue, low) and not ranks_before(world.queue, low, world.other, high)
    world.queue.count_admission()
    assert ranks_before(world.queue, low, world.other, high) and not ranks_before(world.other, high, world.queue, low)
    world.other.count_admission()
    assert ranks_before(world.queue, low, world.other, high)  # both have it: who came first


# ---- nothing grows without end


def most_entries(root, but=None) -> int:
    """Of the lists and dicts that an object holds, however deep, the entries of the largest; sequences are left out."""
    most, todo, seen = 0, [root], {id(but)}
    while todo:
        one = todo.pop()
        if id(one) in seen or isinstance(one, type | Sequence) or callable(one):
            continue
        seen.add(id(one))
        most = max(most, len(one) if isinstance(one, list | dict) else 0)
        todo += gc.get_referents(one)
    return most


def test_tenants_that_come_and_go_are_forgotten_and_counted_together():
    world = QueueWorld()
    stays = world.come("stays", priority=8)
    for number in range(2 * MAX_IDLE):
        seq = world.come(f"t{number}")
        world.shares.computed(seq.request.tenant, 10)
        world.queue.remove(seq)
    assert most_entries(world.shares) <= 2 * MAX_IDLE + 2
    assert len(world.shares.computed_tokens) == MAX_NAMED and world.shares.other_tokens == 10 * (
        2 * MAX_IDLE - MAX_NAMED
    )
    assert most_entries(world.queue, but=world.shares) < 100
    assert world.queue.head() is stays


@pytest.mark.parametrize("every", [None, 16])
def test_a_queue_of_sequences_that_leave_keeps_no_entries_of_them(every):
    world = QueueWorld(QueueRules(oldest_every=every))
    first = world.come("a", priority=-1)
    for _ in range(3000):
        world.queue.remove(world.come("a", deadline_s=5.0))
    assert most_entries(world.queue) < 100
    assert world.queue.head() is first


def test_an_overdue_sequence_stands_behind_the_others_of_its_tenant_and_class():
    world = QueueWorld()
    late, one, other = world.come(), world.come(), world.come()
    lower = world.come(priority=1)
    world.queue.mark_overdue(late, 70)
    assert world.queue.head() is one
    newest = world.come()
    assert world.order() == [one, other, newest, late, lower]


def test_the_overdue_ones_turn_comes_while_others_keep_coming():
    world = QueueWorld(QueueRules(oldest_every=4))
    late = world.come()
    world.queue.mark_overdue(late, 70)
    admitted = []
    for _ in range(4):
        world.come()
        admitted.append(world.admit())
    assert admitted.index(late) == 3


def test_an_overdue_sequence_that_has_been_queued_for_long_yields_no_longer():
    world = QueueWorld(QueueRules(oldest_every=None, credit_tokens=0, aged_s=15.0))
    old, younger, in_time = (world.come(now_s=now_s) for now_s in (0.0, 5.0, 10.0))
    world.queue.mark_overdue(old, 70), world.queue.mark_overdue(younger, 70)
    world.queue.restore_aged(14.9)
    assert world.queue.head() is in_time
    world.queue.restore_aged(15.0)
    assert world.order() == [old, in_time, younger] and not old.overdue_tokens


def test_an_overdue_sequence_can_leave_the_queue():
    world = QueueWorld()
    late, one = world.come(), world.come()
    world.queue.mark_overdue(late, 70)
    world.queue.remove(late)
    assert world.order() == [one] and world.admit() is None
