"""The short ways of a step give what the long ones give: what tenants pay, which blocks are asked for, what is told of
the cache.
"""

from collections import Counter

import hypothesis.strategies as st
import pytest
from hypothesis import given, settings

from kvrelay.engine.scheduling.fair_share import FairShare, QueueRules
from kvrelay.engine.scheduling.groups import Groups
from kvrelay.engine.scheduling.scheduler import Scheduler, SchedulerConfig
from kvrelay.engine.scheduling.sequence import Scheduled, Sequence, State
from kvrelay.kvcache.index.changes import CacheChange, ChangeLog, EventLog
from kvrelay.kvcache.pool.block_pool import BlockPool
from kvrelay.plane.messages import Beams, Group, Sampling, SequenceRequest
from kvrelay.types import FinishReason

pytestmark = pytest.mark.pure


BLOCK = 4
WEIGHTS = {"b": 2.0, "c": 0.5}  # sums of such prices are exact


def request(name: str, tenant: str = "", *, tokens: int = 6, num_prompt: int | None = None, **facts) -> SequenceRequest:
    ids = [100 * int(name) + index for index in range(tokens)]
    return SequenceRequest(
        request_id=name,
        token_ids=ids,
        num_prompt_tokens=num_prompt or tokens,
        block_hashes=[],
        sampling=Sampling(max_tokens=32),
        tenant=tenant,
        weight=WEIGHTS.get(tenant, 1.0),
        **facts,
    )


def scheduler(kind: type[Scheduler] = Scheduler, *, blocks: int = 24) -> Scheduler:
    return kind(BlockPool(blocks, block_size=BLOCK), SchedulerConfig(16, 6, 64), fair_share=FairShare(QueueRules()))


class TokenByToken(Scheduler):
    """Tenants pay for each sequence's work on its own."""

    def advance(self, *work: Scheduled) -> None:
        for item in work:
            seq = item.seq
            seq.num_computed += item.num_tokens
            self.fair_share.advance(seq)
            self.fair_share.computed(seq.request.tenant, item.num_tokens)
            self.blocks.register(seq)


class PaysNothing(FairShare):
    """The mistake that this would show: tokens that are told together are forgotten."""

    def serve(self, num_outputs) -> None:
        assert num_outputs is not None


def accounts(sched: Scheduler) -> tuple[object, ...]:
    shares, running = sched.fair_share, [(seq.request_id, seq.num_charged, seq.num_paid) for seq in sched.running]
    return shares._counters, shares._credits, shares.computed_tokens, shares.other_tokens, running


def live(sched: Scheduler, acts: list[tuple[str, str, int]]):
    """Serve such arrivals, steps, pre-emptions and ends; the accounts after each step."""
    for number, (act, tenant, tokens) in enumerate(acts):
        if act == "add":
            sched.add(request(str(number), tenant, tokens=tokens, num_prompt=max(1, tokens - 2)), 0.0)
        elif act == "preempt" and len(sched.running) > 1:
            sched.preempt_group((sched.running[tokens % len(sched.running)],))
        elif act == "end" and sched.running:
            sched.finish(sched.running[tokens % len(sched.running)], FinishReason.STOP)
        plan = sched.schedule()
        samples = [item.seq for item in plan.work if item.samples]
        sched.advance(*plan.work)
        for seq in samples:
            seq.token_ids.append(99)
            if seq.num_output >= 20:
                sched.finish(seq, FinishReason.LENGTH)
        sched.blocks.copied()
        sched.check()
        yield accounts(sched)


acts = st.lists(
    st.tuples(
        st.sampled_from(["add", "add", "step", "step", "preempt", "end"]), st.sampled_from("abc"), st.integers(1, 30)
    ),
    max_size=40,
)


@settings(max_examples=60, deadline=None)
@given(acts=acts)
def test_tenants_that_pay_once_a_step_have_paid_the_same_after_every_step(acts):
    for at_once, one_by_one in zip(live(scheduler(), acts), live(scheduler(TokenByToken), acts), strict=True):
        assert at_once == one_by_one


def test_accounts_that_forget_what_is_told_together_are_found_out():
    acts = [("add", "a", 6), *[("step", "a", 1)] * 6]
    wrong, right = scheduler(), scheduler(TokenByToken)
    wrong.fair_share.__class__ = PaysNothing
    assert list(live(wrong, acts)) != list(live(right, acts))


def test_a_one_token_chunk_of_a_prompt_is_not_paid_as_output():
    sched = scheduler()
    seq = sched.add(request("1", "a", tokens=6), 0.0)
    sched.schedule()
    seq.num_charged = 5  # as after a swap in the middle of the prompt
    counter = sched.fair_share.counter("a")
    seq.num_computed = 5
    sched.advance(Scheduled(seq, 5, 1))
    assert sched.fair_share.counter("a") == counter + 1


# ---- whose block it is


def decoding(count: int) -> tuple[Scheduler, list[Sequence]]:
    """Sequences in the middle of a block that each is known to own."""
    sched = scheduler()
    seqs = [sched.add(request(str(index + 1)), 0.0) for index in range(count)]
    for _ in range(2):
        plan = sched.schedule()
        sched.advance(*plan.work)
        for seq in seqs:
            seq.token_ids.append(99)
    assert [seq.writable_until for seq in seqs] == [8] * count
    return sched, seqs


def test_the_pool_is_asked_once_for_each_block(monkeypatch):
    sched, [seq] = decoding(1)
    asked = []
    monkeypatch.setattr(sched.planner, "_has_room", lambda seq, preempted: asked.append(seq.num_computed) or True)
    for _ in range(7):
        seq.blocks.append(seq.blocks[-1])  # there is always room
        plan = sched.schedule()
        seq.num_computed = plan.work[0].start + 1
        seq.token_ids.append(99)
    assert asked == [8, 12]


@pytest.mark.parametrize("forgets", [True, False])
def test_a_fork_takes_back_what_was_known_of_the_parents_block(monkeypatch, forgets):
    sched, [seq] = decoding(1)
    asked = request("7", group=Group(beams=Beams(width=2, num_returned=1)))
    group = seq.group = sched.groups["7"] = _group(asked, seq)
    if not forgets:  # the control: both write into one block
        monkeypatch.setattr(Groups, "_fork", _fork_that_keeps(Groups._fork))
    seq.token_ids.pop()
    groups = Groups(sched.queues, sched.blocks, sched.pool, sched.finish, lambda seq: None)
    groups.go_on(group, (0, 0), (98, 99))
    plan = sched.schedule()
    assert len(plan.work) == 2
    first, second = (member.blocks[1] for member in group.members)
    assert (first != second) is forgets


def _group(asked, seq):
    from kvrelay.engine.scheduling.sequence import SequenceGroup as Live

    return Live(asked, None, members=[seq])


def _fork_that_keeps(fork):
    def forked(self, group, parent, rank):
        until = parent.writable_until
        child = fork(self, group, parent, rank)
        parent.writable_until = child.writable_until = until
        return child

    return forked


def test_a_sequence_that_left_the_batch_asks_anew():
    sched, seqs = decoding(2)
    seqs[0].plain_until = 30
    sched.preempt_group((seqs[0],))
    assert (seqs[0].state, seqs[0].writable_until, seqs[0].plain_until) == (State.WAITING, 0, 0)
    assert seqs[1].writable_until == 8


# ---- news of the cache

NAMES = [bytes([number]) * 16 for number in range(6)]


@given(st.lists(st.tuples(st.booleans(), st.lists(st.sampled_from(range(6)), unique=True, min_size=1)), max_size=8))
def test_runs_are_netted_as_hash_by_hash(runs):
    log, cached = ChangeLog(), set()
    before: Counter[bytes] = Counter()
    for is_stored, numbers in runs:
        fresh = [NAMES[number] for number in numbers if (NAMES[number] in cached) is not is_stored]
        (log.stored if is_stored else log.removed)(b"".join(fresh))
        for name in fresh:
            before[name] += 1 if is_stored else -1
        cached = cached | set(fresh) if is_stored else cached - set(fresh)
    change = log.drain() or CacheChange((), ())
    assert set(change.stored) == {name for name, count in before.items() if count > 0}
    assert set(change.removed) == {name for name, count in before.items() if count < 0}
    assert log.drain() is None


@given(st.lists(st.lists(st.sampled_from(range(6)), unique=True), max_size=8))
def test_without_a_host_tier_the_same_is_told_as_with_one_that_has_something_else(flips):
    alone, beside = EventLog(), EventLog()
    beside._host.add((bytes(16 * [99]),))  # so that every hash is looked up in both tiers
    cached: set[bytes] = set()
    for numbers in flips:
        names = {NAMES[number] for number in numbers}
        change = CacheChange(tuple(sorted(names - cached)), tuple(sorted(names & cached)))
        cached ^= names
        assert alone.number(change) == beside.number(change)
        assert set(alone.snapshot().hashes) == cached
