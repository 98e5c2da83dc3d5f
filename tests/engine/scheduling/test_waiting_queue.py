"""Who is next in line: priorities, deadlines, fair shares, and that nobody starves whatever the others are."""

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


class Door:
    """One line, and sequences in order of arrival."""

    def __init__(self, rules: QueueRules = NEVER) -> None:
        self.shares = FairShare(rules)
        self.line, self.other = WaitingQueue(self.shares), WaitingQueue(self.shares)
        self.arrivals = 0

    def new(self, tenant="", *, priority=0, deadline_s=None, tokens=100, now_s=0.0) -> Sequence:
        self.arrivals += 1
        request = SequenceRequest(
            request_id=f"r{self.arrivals}", token_ids=[0] * tokens, num_prompt_tokens=tokens, block_hashes=[],
            sampling=Sampling(max_tokens=8), priority=priority, deadline_s=deadline_s, tenant=tenant,
        )  # fmt: skip
        return Sequence(request, 16, self.arrivals, arrived_s=now_s)

    def come(self, tenant="", **facts) -> Sequence:
        seq = self.new(tenant, **facts)
        self.line.push(seq)
        return seq

    def admit(self) -> Sequence | None:
        """Whoever is next, and what it costs its tenant."""
        seq = self.line.head()
        if seq is not None:
            self.line.take(seq)
            self.shares.admit(seq)
            seq.has_begun = True
        return seq

    def order(self) -> list[Sequence]:
        return [self.admit() for _ in range(len(self.line))]


def test_lower_numbers_of_priority_come_first_then_arrival():
    door = Door()
    low, plain, high, later = (door.come(priority=priority) for priority in (3, 0, -2, 0))
    assert door.order() == [high, plain, later, low]


def test_within_a_class_the_earliest_deadline_comes_first_and_those_without_last():
    door = Door()
    none, late, soon = door.come(), door.come(deadline_s=9.0), door.come(deadline_s=1.0)
    urgent = door.come(priority=-1)
    assert door.order() == [urgent, soon, late, none]


def test_tenants_take_turns_however_many_each_sends():
    door = Door()
    for _ in range(6):
        door.come("greedy")
    for _ in range(2):
        door.come("modest")
    assert [seq.request.tenant for seq in door.order()][:4] == ["greedy", "modest", "greedy", "modest"]


def test_within_a_tenant_it_is_first_come_first_served():
    door = Door()
    seqs = [door.come("a"), door.come("b"), door.come("a"), door.come("b"), door.come("a")]
    order = door.order()
    for tenant in "ab":
        assert [seq for seq in order if seq.request.tenant == tenant] == [s for s in seqs if s.request.tenant == tenant]


def test_a_tenant_with_twice_the_weight_gets_twice_the_tokens():
    door = Door(QueueRules(oldest_every=None, credit_tokens=0, tenant_weights={"gold": 2.0}))
    for _ in range(30):
        door.come("gold")
        door.come("plain")
    first = [door.admit().request.tenant for _ in range(30)]
    assert first.count("gold") == 20


def test_tokens_count_not_requests():
    door = Door()
    for _ in range(4):
        door.come("long", tokens=1000)
    for _ in range(40):
        door.come("short", tokens=100)
    first = [door.admit().request.tenant for _ in range(22)]
    assert first.count("long") == 2


@pytest.mark.parametrize(("credit", "ahead"), [(0, 0), (400, 4), (10**9, 10)])
def test_who_comes_back_from_idle_has_saved_up_the_credit_and_no_more(credit, ahead):
    door = Door(QueueRules(oldest_every=None, credit_tokens=credit))
    for _ in range(20):
        door.come("busy")
    for _ in range(10):
        door.admit()
    for _ in range(10):
        door.come("idle")
    assert door.shares.counter("idle") == max(0, 1000 - credit)
    if credit < 10**9:
        assert [seq.request.tenant for seq in door.order()].index("busy") == ahead


def test_newcomers_with_savings_do_not_come_before_one_another():
    """Each lifted to less than the one before it, they would be served last come first."""
    door = Door(QueueRules(oldest_every=None, credit_tokens=400))
    for _ in range(20):
        door.come("busy")
    for _ in range(10):
        door.admit()
    new = [door.come(f"new{number}") for number in range(5)]
    assert door.order()[:5] == new


def test_tenants_that_were_served_about_alike_come_first_come_first_served():
    door = Door(QueueRules(oldest_every=None, credit_tokens=4000))
    seqs = [door.come(tenant, tokens=100) for tenant in "abbbba"]
    assert door.order() == seqs


def test_output_costs_more_than_prompt_and_what_is_cached_nothing():
    door = Door()
    seq = door.come("a", tokens=100)
    door.line.take(seq)
    seq.num_cached = seq.num_computed = 64
    door.shares.admit(seq)
    assert door.shares.counter("a") == 36
    seq.token_ids += [1] * 5
    seq.num_computed = 105
    door.shares.advance(seq)
    assert door.shares.counter("a") == 36 + 2 * 5


def test_what_was_paid_ahead_and_never_computed_comes_back_as_credit():
    door = Door()
    seq = door.come("a", tokens=100)
    door.admit()
    seq.num_computed = 30
    door.shares.give_back(seq)
    door.come("a", tokens=80)
    door.admit()
    assert door.shares.counter("a") == 100 + 80 - 70


def test_nothing_is_paid_for_twice_when_it_is_computed_again():
    door = Door()
    seq = door.come("a", tokens=100)
    door.admit()
    for computed in (100, 40, 100):  # pre-empted at each of these, and begun anew
        seq.num_computed = computed
        door.shares.give_back(seq)
        seq.num_computed = 0
        door.line.push(seq)
        assert door.admit() is seq
    seq.num_computed = 100
    door.shares.give_back(seq)
    assert door.shares.counter("a") == 100
    door.come("a", tokens=10)
    door.admit()
    assert door.shares.counter("a") == 110  # no credit was left


def test_who_was_begun_stands_before_its_class_but_not_before_a_higher_one():
    door = Door()
    begun = door.come("a")
    door.admit()
    door.come("b", deadline_s=0.5)
    high = door.come("c", priority=-1)
    door.line.push(begun)
    assert door.order()[:2] == [high, begun]


def test_deadlines_of_a_tenant_that_leads_by_too_much_are_heeded_no_more():
    door = Door(QueueRules(oldest_every=None, credit_tokens=250))
    for _ in range(8):
        door.come("pushy", deadline_s=5.0)
    for _ in range(8):
        door.come("patient")
    assert "".join(seq.request.tenant[1] for seq in door.order()) == "uuu" + "aaa" + 5 * "ua"


def test_who_stands_back_is_passed_over_and_then_has_its_place_again():
    door = Door()
    away, next_one = door.come(), door.come()
    back = {away}
    assert door.line.head(back.__contains__) is next_one
    door.line.return_ready(back.__contains__)
    assert door.line.head(back.__contains__) is next_one
    back.clear()
    assert door.line.head(back.__contains__) is next_one  # nobody has looked again
    door.line.return_ready(back.__contains__)
    assert door.line.head(back.__contains__) is away and len(door.line) == 2


def test_late_are_those_never_begun_in_line_even_if_they_stand_back():
    door = Door()
    begun = door.come(deadline_s=1.0)
    door.admit()
    door.line.push(begun)
    away, early, fine = door.come(deadline_s=2.0), door.come(deadline_s=3.0), door.come(deadline_s=9.0)
    gone = door.come(deadline_s=2.5)
    door.line.remove(gone)
    door.line.head(lambda seq: seq is away)
    assert door.line.next_deadline_s() == 2.0
    assert door.line.past_deadline(3.0) == [away, early]
    assert door.line.past_deadline(3.0) == [] and door.line.next_deadline_s() == 9.0
    door.line.remove(fine)
    assert door.line.next_deadline_s() == math.inf


def test_the_victim_is_of_the_lowest_priority_then_the_latest_and_never_above_whom_it_is_for():
    door = Door()
    low_old, low_new, plain, high = (door.new(priority=priority) for priority in (2, 2, 0, -1))
    running = [low_old, low_new, plain, high]
    assert victim(running, high) is low_new
    assert victim([plain, high], plain) is plain
    assert victim([high, plain], high) is plain
    later = door.new()
    assert victim([plain, later], plain) is later


def test_a_full_line_is_left_by_the_last_of_whoever_takes_most_places():
    door = Door()
    first = door.come("greedy")
    assert door.shares.most_waiting("modest") is None  # one against none: nothing would be won
    second = door.come("greedy")
    assert door.shares.most_waiting("modest") == "greedy" and door.shares.most_waiting("greedy") is None
    assert last_of("greedy", door.line, door.other) is second
    low = door.come("greedy", priority=1)
    door.come("greedy")
    assert last_of("greedy", door.line) is low
    for seq in (second, low, first):
        seq.has_begun = True
    assert last_of("greedy", door.line) is not first


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
    door = Door(rules)

    def come(facts):
        priority, deadline_s, tenant, tokens = facts
        return door.come(tenant, priority=priority, deadline_s=deadline_s, tokens=tokens)

    for facts in before:
        come(facts)
    waiting, count = come(own), 0
    while count < limit:
        for facts in later:
            if len(door.line) < 40:
                come(facts)
        for _ in range(elsewhere):
            door.line.count_admission()
        admitted = door.admit()
        if admitted is waiting:
            return count
        if count % 3 == 0 and admitted is not None and admitted.arrival > waiting.arrival:
            door.line.push(admitted)  # pre-empted: it stands before its class again
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
    door = Door()
    for _ in range(3):
        for tenant in "ab":
            door.come(tenant, tokens=300)
    start = {tenant: door.shares.counter(tenant) for tenant in "ab"}
    for tenant, tokens in arrivals:
        door.admit()
        door.come(tenant, tokens=tokens)
        if not all(door.shares.num_waiting[name] for name in "ab"):
            break
        gained = {name: door.shares.counter(name) - start[name] for name in "ab"}
        assert abs(gained["a"] - gained["b"]) <= 300


# ---- against a plain list: the heaps lose nobody and answer the same

STEP = st.tuples(st.sampled_from(["come", "come", "admit", "leave", "again"]), st.integers(0, 999), ARRIVAL)


@given(st.lists(STEP, max_size=60), st.sampled_from([None, 1, 3, 7]))
@settings(max_examples=100, deadline=None)
def test_the_head_is_what_a_sorted_list_says(steps, every):
    door = Door(QueueRules(oldest_every=every, credit_tokens=math.inf))
    members, begun, since = [], [], 0
    for what, draw, (priority, deadline_s, tenant, tokens) in steps:
        if what == "come":
            since = 0 if not members else since
            members.append(door.come(tenant, priority=priority, deadline_s=deadline_s, tokens=tokens))
        elif what == "leave" and members:
            door.line.remove(members.pop(draw % len(members)))
        elif what == "again" and begun:
            since = 0 if not members else since
            members.append(begun.pop(draw % len(begun)))
            door.line.push(members[-1])
        elif what == "admit" and members:
            oldest = min(members, key=lambda seq: seq.arrival)
            head = door.line.head()
            if every is not None and since >= every - 1:
                assert head is oldest
            else:  # equal counters: any of those tenants
                assert door.line.rank(head)[:4] == min(door.line.rank(seq)[:4] for seq in members)
            assert door.admit() is head
            since = 0 if head is oldest else since + 1
            members.remove(head)
            begun.append(head)
    assert sorted(seq.arrival for seq in door.line) == sorted(seq.arrival for seq in members)
    assert sum(door.line.num_by_priority.values()) == sum(door.shares.num_waiting.values()) == len(members)


# ---- between two lines


def test_between_two_lines_the_oldests_turn_comes_before_every_rank():
    door = Door(QueueRules(oldest_every=2))
    low, high = door.come(priority=5), door.new(priority=-5)
    door.other.push(high)
    assert ranks_before(door.other, high, door.line, low) and not ranks_before(door.line, low, door.other, high)
    door.line.count_admission()
    assert ranks_before(door.line, low, door.other, high) and not ranks_before(door.other, high, door.line, low)
    door.other.count_admission()
    assert ranks_before(door.line, low, door.other, high)  # both have it: who came first


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
    door = Door()
    stays = door.come("stays", priority=8)
    for number in range(2 * MAX_IDLE):
        seq = door.come(f"t{number}")
        door.shares.computed(seq.request.tenant, 10)
        door.line.remove(seq)
    assert most_entries(door.shares) <= 2 * MAX_IDLE + 2
    assert len(door.shares.computed_tokens) == MAX_NAMED and door.shares.other_tokens == 10 * (2 * MAX_IDLE - MAX_NAMED)
    assert most_entries(door.line, but=door.shares) < 100
    assert door.line.head() is stays


@pytest.mark.parametrize("every", [None, 16])
def test_a_line_of_sequences_that_leave_keeps_no_entries_of_them(every):
    door = Door(QueueRules(oldest_every=every))
    first = door.come("a", priority=-1)
    for _ in range(3000):
        door.line.remove(door.come("a", deadline_s=5.0))
    assert most_entries(door.line) < 100
    assert door.line.head() is first


def test_who_is_late_stands_behind_the_others_of_its_tenant_and_class():
    door = Door()
    late, one, other = door.come(), door.come(), door.come()
    lower = door.come(priority=1)
    door.line.mark_overdue(late, 70)
    assert door.line.head() is one
    newest = door.come()
    assert door.order() == [one, other, newest, late, lower]


def test_the_late_ones_turn_comes_while_others_keep_coming():
    door = Door(QueueRules(oldest_every=4))
    late = door.come()
    door.line.mark_overdue(late, 70)
    admitted = []
    for _ in range(4):
        door.come()
        admitted.append(door.admit())
    assert admitted.index(late) == 3


def test_who_is_late_can_leave_the_line():
    door = Door()
    late, one = door.come(), door.come()
    door.line.mark_overdue(late, 70)
    door.line.remove(late)
    assert door.order() == [one] and door.admit() is None
