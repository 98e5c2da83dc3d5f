"""The scheduler's use of its lines: what is admitted, refused, displaced and pre-empted, and that neither line
starves.
"""

import hypothesis.strategies as st
import msgspec
import pytest
from hypothesis import example, given, settings

from kvrelay.engine.scheduling.fair_share import FairShare, QueueRules
from kvrelay.engine.scheduling.plan import StepPlan
from kvrelay.engine.scheduling.preempt import MeasuredSpeeds
from kvrelay.engine.scheduling.scheduler import Scheduler, SchedulerConfig
from kvrelay.engine.scheduling.sequence import Sequence, State
from kvrelay.engine.step.reports import StepTiming, load_report
from kvrelay.kvcache.pool.block_pool import BlockPool
from kvrelay.plane.messages import Sampling, SequenceRequest
from kvrelay.types import FinishReason

pytestmark = pytest.mark.pure


BLOCK = 4


class Run:
    """A scheduler, and requests that have nothing in common."""

    def __init__(self, blocks=64, *, budget=16, running=8, waiting=64, rules: QueueRules | None = None) -> None:
        limits = SchedulerConfig(budget, running, waiting)
        self.speeds = MeasuredSpeeds()
        self.sched = Scheduler(
            BlockPool(blocks, block_size=BLOCK), limits, fair_share=FairShare(rules or QueueRules()), speeds=self.speeds
        )
        self.count = 0

    def request(self, tenant="", *, tokens=4, max_tokens=8, **facts) -> SequenceRequest:
        self.count += 1
        ids = [1000 * self.count + index for index in range(tokens)]
        return SequenceRequest(
            request_id=f"r{self.count}",
            token_ids=ids,
            num_prompt_tokens=tokens,
            block_hashes=[],
            sampling=Sampling(max_tokens=max_tokens),
            tenant=tenant,
            **facts,
        )

    def add(self, tenant="", *, now_s=0.0, **facts) -> Sequence:
        return self.sched.add(self.request(tenant, **facts), now_s)

    def reserve(self, tenant="", *, now_s=0.0, **facts) -> Sequence:
        return self.sched.add_reservation(self.request(tenant, **facts), now_s)

    def step(self) -> StepPlan:
        plan = self.sched.schedule()
        for item in plan.work:
            samples = item.samples
            self.sched.advance(item)
            if samples:
                item.seq.token_ids.append(99)
        self.sched.blocks.copied()
        return plan


def names(plan: StepPlan) -> list[str]:
    return [item.seq.request_id for item in plan.work]


def test_the_higher_priority_is_admitted_first_to_either_queue():
    for line in ("add", "reserve"):
        run = Run(running=1)
        come = getattr(run, line)
        come(priority=1)
        high = come(priority=-1)
        run.sched.grant_reservations()
        run.step()
        assert high.state is not State.WAITING and len(run.sched.sequences) == 2


def test_decoding_comes_first_in_a_step_then_chunks_by_priority():
    run = Run(budget=16)
    low, decoding = run.add(tokens=30, priority=1), run.reserve(tokens=3, priority=5)
    run.sched.grant_reservations()
    run.sched.activate(decoding.request_id, [99])
    assert names(run.step()) == [decoding.request_id, low.request_id]
    high = run.add(tokens=30, priority=0)
    assert names(run.step()) == [decoding.request_id, high.request_id]  # `low` had begun, but is of a lower class
    assert names(run.step()) == [decoding.request_id, high.request_id]
    assert names(run.step()) == [decoding.request_id, high.request_id, low.request_id]  # now it decodes
    run.sched.check()


def test_a_prompt_that_has_begun_is_not_passed_by_its_own_class_but_for_a_tenant_that_is_owed_much():
    rules = QueueRules(credit_tokens=400)
    run = Run(budget=16, rules=rules)
    for _ in range(60):
        run.add("greedy", tokens=16, max_tokens=1)
    for _ in range(59):
        for item in run.step().work:
            run.sched.finish(item.seq, FinishReason.LENGTH)
    run.add("greedy", tokens=16, max_tokens=1)
    begun = run.add("greedy", tokens=40)
    while not begun.has_begun:
        for item in run.step().work:
            if item.seq is not begun:
                run.sched.finish(item.seq, FinishReason.LENGTH)
    same, owed = run.add("greedy", tokens=9), run.add("modest", tokens=9)
    assert [item.seq for item in run.step().work] == [owed, begun] and begun.num_passed == 1
    assert same.state is State.WAITING


def steps_to_finish(rules: QueueRules, limit: int) -> int | None:
    """A long prompt of a low class has begun; two short ones of a higher class come in every step. None: not within
    `limit`.
    """
    run = Run(budget=8, running=64, rules=rules)
    begun = run.add(tokens=24, priority=1)
    run.step()
    for count in range(limit):
        for _ in range(2):
            if len(run.sched.waiting) < 20:
                run.add(tokens=4, max_tokens=1)
        for item in run.step().work:
            if item.seq is not begun and not item.seq.num_uncomputed > 1:
                run.sched.finish(item.seq, FinishReason.LENGTH)
        if begun.num_output:
            return count
    return None


def test_a_prompt_that_has_begun_is_passed_a_few_times_and_then_no_more():
    assert steps_to_finish(QueueRules(oldest_every=8), 500) <= 8
    assert steps_to_finish(QueueRules(oldest_every=None), 500) is None


def test_the_victim_is_of_the_lowest_priority_though_others_came_later():
    run = Run(blocks=6, budget=32)
    low = run.add(tokens=7, priority=3)
    plain = run.add(tokens=7)
    while not (plan := run.step()).preempted:
        assert run.count < 20
    assert plan.preempted == (low,) and plain.state is State.RUNNING
    run.sched.check()


def test_a_high_priority_one_is_never_preempted_for_a_low_one():
    run = Run(blocks=6, budget=32)
    low, high = run.add(tokens=8, priority=3, max_tokens=1), run.add(tokens=7, priority=-1)
    run.step()
    assert low.state is high.state is State.RUNNING
    while not (plan := run.step()).preempted:
        pass
    assert plan.preempted == (low,)


def test_service_is_charged_once_for_each_computed_token_also_over_a_preemption():
    run = Run(blocks=8, budget=32, rules=QueueRules(output_weight=3.0))
    seq = run.add("a", tokens=7)
    run.step()
    run.step()
    run.sched.preemption.rewind(seq)
    run.sched.pool.reset_cache()
    for _ in range(3):
        run.step()
    assert seq.num_computed == 11
    assert run.sched.fair_share.counter("a") == 7 + 3 * 4
    assert run.sched.fair_share.computed_tokens == {"a": 8 + 11}  # the work that was done


def test_what_an_aborted_or_failed_sequence_did_not_use_is_not_charged_to_its_tenant():
    run = Run()
    seq = run.reserve("a", tokens=12)
    run.sched.grant_reservations()
    assert run.sched.fair_share.counter("a") == 12
    run.sched.blocks.unquarantine(run.sched.quarantine(seq, FinishReason.ERROR))
    again = run.reserve("a", tokens=12)
    run.sched.grant_reservations()
    run.sched.activate(again.request_id, [99])
    run.step()
    assert run.sched.fair_share.counter("a") == 12 + 2


def test_one_tenant_does_not_get_every_seat_of_one_step():
    run = Run(budget=64, running=4, rules=QueueRules(credit_tokens=0))
    for tenant in "aaaabb":
        run.add(tenant)
    run.step()
    assert sorted(seq.request.tenant for seq in run.sched.running) == ["a", "a", "b", "b"]


def backlog(run: Run, weights: dict[str, float]) -> dict[str, int]:
    """Tokens computed for each tenant in 400 steps, while all always have prompts queued; outputs are 3 tokens."""
    before = dict(run.sched.fair_share.computed_tokens)
    for _ in range(400):
        for tenant, weight in weights.items():
            while run.sched.fair_share.num_waiting[tenant] < 4:
                run.add(tenant, tokens=12, weight=weight)
        for item in run.step().work:
            if item.seq.num_output == 3:
                run.sched.finish(item.seq, FinishReason.LENGTH)
    return {tenant: run.sched.fair_share.computed_tokens[tenant] - before.get(tenant, 0) for tenant in weights}


def test_weights_of_3_to_1_are_3_to_1_of_computed_tokens_and_a_new_weight_holds_at_once():
    run = Run(budget=32, running=8, rules=QueueRules(credit_tokens=64))
    for weight in (3.0, 1.0, 3.0):  # as the file of keys has it before a reload, and after it
        computed = backlog(run, {"gold": weight, "plain": 1.0})
        assert computed["gold"] / computed["plain"] == pytest.approx(weight, rel=0.05)
    run.sched.check()


# ---- deadlines


def test_who_is_overdue_and_was_never_begun_is_turned_away():
    run = Run(running=1)
    begun = run.add(deadline_s=1.0)
    run.step()
    late, fine, late_too = run.add(deadline_s=2.0), run.add(deadline_s=9.0), run.reserve(deadline_s=0.5, now_s=1.0)
    assert run.sched.queues.next_deadline_s() == 1.5
    run.sched.reject_overdue(5.0)
    assert [reason for _, reason in run.sched.rejected] == ["deadline", "deadline"]
    assert {seq for seq, _ in run.sched.rejected} == {late, late_too} and run.sched.num_overdue == 2
    assert begun.state is State.RUNNING and fine.state is State.WAITING and late.state is State.FINISHED
    run.sched.check()


def test_what_was_preempted_is_never_overdue():
    run = Run()
    seq = run.add(deadline_s=1.0)
    run.step()
    run.sched.preemption.rewind(seq)
    run.sched.reject_overdue(100.0)
    assert not run.sched.rejected and seq.state is State.WAITING


# ---- a full line


def test_a_tenant_with_few_places_displaces_one_with_many_from_a_full_queue():
    run = Run(waiting=4)
    greedy = [run.add("greedy") for _ in range(4)]
    assert run.sched.refusal(run.request("greedy"))[0] == "full"
    wanted = run.request("modest")
    assert run.sched.refusal(wanted) is None
    modest = run.sched.add(wanted, 0.0)
    assert run.sched.rejected == [(greedy[-1], "full")] and run.sched.num_displaced == 1
    assert len(run.sched.waiting) == 4 and modest in run.sched.waiting
    run.sched.add(run.request("modest"), 0.0)  # three places against one: one more
    assert run.sched.refusal(run.request("modest"))[0] == "full"
    run.sched.check()


def test_one_tenant_alone_has_the_whole_queue():
    run = Run(waiting=4)
    for _ in range(4):
        assert run.sched.refusal(run.request()) is None
        run.add()
    assert run.sched.refusal(run.request())[0] == "full"


# ---- nobody starves, whatever comes to either line

NEWCOMER = st.tuples(
    st.sampled_from(["add", "reserve"]),
    st.integers(-2, 2),
    st.one_of(st.none(), st.floats(5.0, 50.0)),
    st.sampled_from("abc"),
    st.integers(1, 24),
)


def steps_until_admitted(rules: QueueRules, own, newcomers, *, limit: int) -> int | None:
    """Memory is tight, newcomers never end, and transfers come in as soon as they are granted. None: not within
    `limit`.
    """
    run = Run(blocks=12, budget=8, running=3, waiting=12, rules=rules)
    sched = run.sched

    def come(facts) -> Sequence | None:
        how, priority, deadline_s, tenant, tokens = facts
        request = run.request(tenant, tokens=tokens, max_tokens=4, priority=priority, deadline_s=deadline_s)
        is_crowded = len(sched.waiting) + len(sched.reserving) > 8 and facts is not own
        if is_crowded or sched.refusal(request) is not None:
            return None
        return sched.add(request, 0.0) if how == "add" else sched.add_reservation(request, 0.0)

    waiting = None
    for count in range(-10, limit):
        if count >= 0 and waiting is None:
            waiting = come(own)  # seats, blocks and lines are full of others by now
        if count < 0 or waiting is not None:  # a full line refuses it: others wait until it is taken
            for facts in newcomers:
                come(facts)
        sched.grant_reservations()
        run.step()
        if waiting is not None and waiting.has_begun:
            return count
        for name in list(sched.receiving):
            sched.activate(name, [99])
        for seq in [seq for seq in sched.running if seq.num_output >= 4]:
            sched.finish(seq, FinishReason.LENGTH)
        sched.check()
    return None


@given(own=NEWCOMER, newcomers=st.lists(NEWCOMER, min_size=1, max_size=4))
@example(  # running ones grow between the reservation and the turn of the oldest
    own=("add", 0, None, "a", 1),
    newcomers=[
        ("reserve", -1, None, "a", 11),
        ("add", 0, None, "a", 1),
        ("add", 1, None, "a", 12),
        ("add", 0, None, "a", 8),
    ],
)
@settings(max_examples=40, deadline=None)
def test_no_stream_of_newcomers_starves_anybody(own, newcomers):
    rules = QueueRules(oldest_every=4, credit_tokens=50)
    assert steps_until_admitted(rules, own, newcomers, limit=1500) is not None


@pytest.mark.parametrize("how", ["add", "reserve"])
@pytest.mark.parametrize("other", ["add", "reserve"])
def test_a_stream_of_higher_priority_would_starve_without_the_oldests_turn(how, other):
    own, newcomers = (how, 2, None, "a", 28), [(other, -2, None, "b", 12), (other, -2, None, "c", 12)]
    assert steps_until_admitted(QueueRules(oldest_every=None), own, newcomers, limit=400) is None
    assert steps_until_admitted(QueueRules(oldest_every=4), own, newcomers, limit=400) is not None


def in_order(run: Run, now_s: float) -> list[str]:
    """Who is begun first, one at a time, if all of it happened at this moment."""
    order = []
    while run.sched.waiting:
        run.sched.reject_overdue(now_s)
        [item] = run.step().work
        order.append(item.seq.request_id)
        run.sched.finish(item.seq, FinishReason.ABORT)
    return order


def wanting(ttft_target_s=1.0, *, speed=100.0, **rules) -> Run:
    """A worker of 100 tokens/s; somebody who asks for no time, and three prompts, the second of them long."""
    run = Run(running=1, budget=10, rules=QueueRules(**rules))
    run.speeds.compute_tokens_per_s = speed
    run.add(tokens=8)
    for num_tokens in (40, 90, 10):
        run.add(tokens=num_tokens, ttft_target_s=ttft_target_s)
    return run


@pytest.mark.parametrize(
    ("now_s", "order"),
    [
        (0.0, ["r1", "r2", "r3", "r4"]),
        (0.1, ["r1", "r2", "r4", "r3"]),  # the long one may take until 1.1: 90 tokens, and a step that it shares
        (0.7, ["r1", "r4", "r2", "r3"]),
        (2.0, ["r1", "r2", "r3", "r4"]),  # all are late
    ],
)
def test_who_can_have_its_first_token_in_time_goes_before_who_cannot(now_s, order):
    assert in_order(wanting(), now_s) == order


@pytest.mark.parametrize(("aged_s", "order"), [(0.8, ["r1", "r4", "r2", "r3"]), (0.7, ["r1", "r2", "r3", "r4"])])
def test_who_has_been_queued_for_long_no_longer_yields_to_those_in_time(aged_s, order):
    assert in_order(wanting(aged_s=aged_s), 0.7) == order


def test_a_reservation_that_has_outlived_its_time_is_preempted():
    """Two want the only seat; when it is free, the first of them is late."""

    def granted(ttft_target_s):
        run = Run(running=1, budget=10)
        for name in ("seated", "first", "second"):
            request = msgspec.structs.replace(run.request(tokens=20), request_id=name)
            run.sched.add_reservation(msgspec.structs.replace(request, ttft_target_s=ttft_target_s[name]), 0.0)
        order = []
        for _ in range(3):
            run.sched.reject_overdue(1.0)
            [seq] = run.sched.grant_reservations()
            order.append(seq.request_id)
            run.sched.finish(seq, FinishReason.ABORT)
        return order

    assert granted({"seated": None, "first": 0.5, "second": 2.0}) == ["seated", "second", "first"]
    assert granted({"seated": None, "first": 2.0, "second": 2.0}) == ["seated", "first", "second"]
    assert granted({"seated": None, "first": None, "second": 0.5}) == ["seated", "first", "second"]


def test_what_is_not_known_of_a_worker_makes_nothing_overdue_before_its_time():
    assert in_order(wanting(speed=0.0), 0.9) == ["r1", "r2", "r3", "r4"]


def test_who_wants_nothing_or_has_a_deadline_is_never_overdue():
    run = wanting(ttft_target_s=None)
    assert in_order(run, 50.0) == ["r1", "r2", "r3", "r4"]
    run = wanting(ttft_target_s=0.1)
    run.add(tokens=90, ttft_target_s=0.1, deadline_s=60.0)
    run.sched.reject_overdue(0.5)
    run.sched.waiting.head()
    assert in_order(run, 0.5)[0] == "r5"


def test_what_is_cached_takes_no_time():
    run = Run(running=1, budget=10)
    run.speeds.compute_tokens_per_s = 100.0
    prompt = run.request(tokens=80)
    run.sched.add(prompt, 0.0)
    for _ in range(8):
        run.step()
    run.sched.finish(run.sched.sequences["r1"], FinishReason.LENGTH)
    again = SequenceRequest(
        request_id="again",
        token_ids=[*prompt.token_ids, 1],
        num_prompt_tokens=81,
        block_hashes=[],
        sampling=prompt.sampling,
        ttft_target_s=0.5,
    )
    run.add(tokens=81, ttft_target_s=0.5)
    run.sched.add(again, 0.0)
    assert in_order(run, 0.2) == ["again", "r2"]


def test_a_report_has_what_stands_behind_what_comes():
    run = wanting()
    run.sched.reject_overdue(0.2)
    for _ in range(3):
        run.step()
        for seq in list(run.sched.running):
            run.sched.finish(seq, FinishReason.ABORT)
    assert run.sched.queues.overdue() == (1, 90)
    assert load_report(1, run.sched, StepTiming(), {}).overdue_tokens == 90


def with_decoding(*tpot_target_s: float | None, speed=1000.0) -> Run:
    """A worker of `speed` tokens/s on which sequences decode, and a prompt of 900 tokens comes."""
    run = Run(blocks=400, budget=512, running=16)
    run.speeds.compute_tokens_per_s = speed
    for wanted in tpot_target_s:
        seq = run.reserve(tokens=3, max_tokens=64, tpot_target_s=wanted)
        run.sched.grant_reservations()
        run.sched.activate(seq.request_id, [99])
    run.add(tokens=900)
    return run


@pytest.mark.parametrize(
    ("tpot_target_s", "speed", "chunk"),
    [
        ((0.2, 0.5), 1000.0, 137),  # 0.7 of 0.2 s, less the two that decode
        ((0.2, None), 1000.0, 137),
        ((0.001,), 1000.0, 64),  # an eighth of the step's tokens in any case
        ((None, None), 1000.0, 510),
        ((0.2, 0.5), 0.0, 510),  # not measured
        ((), 1000.0, 512),
    ],
)
def test_beside_those_who_decode_a_prompt_is_cut_so_that_their_tokens_come_in_time(tpot_target_s, speed, chunk):
    plan = with_decoding(*tpot_target_s, speed=speed).step()
    assert plan.work[-1].num_tokens == chunk and len(plan.work) == len(tpot_target_s) + 1
    assert plan.num_tokens == chunk + len(tpot_target_s)


def test_a_prompt_gets_the_time_of_a_step_without_prompts_however_soon_tokens_are_wanted():
    run = with_decoding(0.1, 0.1)
    run.speeds.decode_step_s = 0.2
    assert run.step().work[-1].num_tokens == 200
