"""The step scheduler: first come first served, within the budget, nothing lost however a sequence ends."""

import hypothesis.strategies as st
import pytest
from hypothesis import settings
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from kvrelay.engine.scheduling.plan import StepPlan
from kvrelay.engine.scheduling.scheduler import Scheduler, SchedulerConfig
from kvrelay.engine.scheduling.sequence import Sequence, State
from kvrelay.hashing import HashChain, block_hashes
from kvrelay.kvcache.pool.block_pool import BlockPool
from kvrelay.plane.messages import KvHints, Sampling, SequenceRequest
from kvrelay.types import FinishReason

pytestmark = pytest.mark.pure


BLOCK = 4


def request(name: str, tokens: int | list[int], *, max_tokens: int = 8) -> SequenceRequest:
    ids = list(range(tokens)) if isinstance(tokens, int) else tokens
    return SequenceRequest(
        request_id=name,
        token_ids=ids,
        num_prompt_tokens=len(ids),
        block_hashes=list(block_hashes(ids, BLOCK)),
        sampling=Sampling(max_tokens=max_tokens),
    )


def scheduler(blocks: int = 16, *, budget: int = 16, running: int = 8, waiting: int = 8) -> Scheduler:
    return Scheduler(BlockPool(blocks, block_size=BLOCK), SchedulerConfig(budget, running, waiting))


def run(sched: Scheduler, plan: StepPlan | None = None) -> StepPlan:
    """Pretend to compute a step: every sampled sequence gets token 99."""
    plan = plan or sched.schedule()
    for item in plan.work:
        samples = item.samples
        sched.advance(item)
        if samples:
            item.seq.token_ids.append(99)
    return plan


def shape(plan: StepPlan) -> list[tuple[str, int, int]]:
    return [(item.seq.request_id, item.start, item.num_tokens) for item in plan.work]


def hashed_by(step: int, name: str, ids: list[int]) -> SequenceRequest:
    """A request with a hash for every `step` tokens, BLOCK or a part of it."""
    return SequenceRequest(
        request_id=name,
        token_ids=ids,
        num_prompt_tokens=len(ids),
        block_hashes=list(block_hashes(ids, step)),
        sampling=Sampling(max_tokens=8),
        tokens_per_hash=step,
    )


def test_blocks_larger_than_a_hash_are_named_by_the_hash_that_ends_them():
    sched, ids = scheduler(), list(range(15))
    sched.add(hashed_by(2, "a", ids), 0.0)
    run(sched)
    change = sched.pool.drain_changes()
    assert change is not None and list(change.stored) == block_hashes(ids, 2)[1:6:2]  # 3 blocks of 4 tokens


def test_output_extends_the_chain_by_the_hashes_own_step():
    sched, ids = scheduler(), list(range(6))
    sched.add(hashed_by(2, "a", ids), 0.0)
    for _ in range(3):  # 6 tokens, then two more: the second block is full
        run(sched)
    seq = sched.sequences["a"]
    assert seq.block_chain().hashes() == block_hashes([*ids, 99, 99], 2)[1::2]
    assert seq.block_chain().hashes() != block_hashes([*ids, 99, 99], BLOCK)


def test_a_block_that_is_yet_to_be_copied_goes_to_nobody_in_the_same_step():
    """Who gets it may have it written at once, by a load from below the pool."""
    sched = Scheduler(BlockPool(9, block_size=8), SchedulerConfig(99, 8, 8))

    def add(name: str, ids: list[int], *, priority: int = 0) -> None:
        one = SequenceRequest(
            request_id=name,
            token_ids=ids,
            num_prompt_tokens=len(ids),
            sampling=Sampling(max_tokens=1),
            block_hashes=list(block_hashes(ids, 8)),
            hints=KvHints(priority=priority),
        )
        sched.add(one, 0.0)

    for name, ids, priority in (("a", list(range(17)), 0), ("x", list(range(30, 47)), 1)):
        add(name, ids, priority=priority)
        run(sched)
        sched.finish(sched.sequences[name], FinishReason.ABORT)
    add("b", [*range(14), 50, 51])  # goes on in a copy of the second block of "a", which is the first to be evicted
    add("c", list(range(60, 98)))  # needs more than what is free
    plan = sched.schedule()
    [copy] = plan.copies
    assert len(sched.running) == 2
    assert copy.source not in [block for seq in sched.running for block in seq.blocks]
    sched.check()
    sched.blocks.copied()
    assert sched.pool.num_holders(copy.source) == 0


def test_a_prefix_is_found_by_requests_with_the_same_step_only():
    sched, ids = scheduler(), list(range(13))
    sched.add(hashed_by(2, "a", ids), 0.0)
    run(sched)
    sched.add(hashed_by(2, "b", ids), 0.0)
    sched.add(hashed_by(BLOCK, "c", ids), 0.0)
    run(sched)
    assert (sched.sequences["b"].num_cached, sched.sequences["c"].num_cached) == (12, 0)


def test_a_long_prompt_is_cut_at_the_token_budget_and_goes_on_where_it_stopped():
    sched = scheduler(budget=16)
    sched.add(request("a", 40), 0.0)
    assert [shape(run(sched)) for _ in range(3)] == [[("a", 0, 16)], [("a", 16, 16)], [("a", 32, 8)]]
    assert shape(run(sched)) == [("a", 40, 1)]


def test_running_sequences_come_before_new_ones_and_single_tokens_first():
    sched = scheduler(budget=16)
    sched.add(request("a", 5), 0.0)
    run(sched)
    sched.add(request("b", [7] * 30), 0.0)
    plan = run(sched)
    assert shape(plan) == [("a", 5, 1), ("b", 0, 15)]
    assert plan.num_single == 1


def test_only_what_is_not_cached_is_computed_but_always_the_last_token():
    sched = scheduler()
    first = sched.add(request("a", 8), 0.0)
    run(sched)
    sched.finish(first, FinishReason.STOP)
    sched.add(request("b", 8), 0.0)
    assert shape(run(sched)) == [("b", 4, 4)]


def test_a_request_that_can_never_fit_is_refused_and_a_full_queue_too():
    sched = scheduler(blocks=2, waiting=1)
    assert sched.refusal(request("a", 8)) is not None
    assert sched.refusal(request("a", 7)) is None
    sched.add(request("a", 7), 0.0)
    assert (sched.refusal(request("a", 3)) or ("",))[0] == "duplicate"
    assert (sched.refusal(request("b", 3)) or ("",))[0] == "full"


def test_the_latest_arrival_is_preempted_and_is_computed_again_whole():
    sched = scheduler(blocks=5, budget=32)
    old = sched.add(request("old", 7), 0.0)
    young = sched.add(request("young", [5] * 7), 0.0)
    run(sched)
    steps = 0
    while young.state is State.RUNNING:
        plan = run(sched)
        steps += 1
        assert steps < 20
    assert plan.preempted == (young,)
    assert old.state is State.RUNNING and not young.blocks
    sched.finish(old, FinishReason.LENGTH)
    plan = run(sched)
    assert young.num_computed == young.num_tokens - 1
    sched.check()


def test_a_held_sequence_keeps_its_blocks_until_it_is_released():
    sched = scheduler()
    seq = sched.add(request("a", 6), 0.0, hold=True, output_limit=1)
    run(sched)
    sched.finish(seq, FinishReason.LENGTH)
    assert seq.state is State.HELD and sched.pool.counts().used == len(seq.blocks) > 0
    sched.finish(seq, FinishReason.ABORT)
    assert sched.pool.counts().used == 0
    sched.check()


def test_a_reservation_waits_for_room_and_holds_what_is_cached():
    sched = scheduler(blocks=4)
    first = sched.add(request("a", 9), 0.0)
    run(sched)
    sched.add_reservation(request("b", 12), 0.0)
    assert sched.grant_reservations() == []
    sched.finish(first, FinishReason.STOP)
    [granted] = sched.grant_reservations()
    assert (granted.num_held_blocks, len(granted.blocks)) == (2, 4)
    seq = sched.activate("b", [99])
    assert seq is granted and shape(run(sched)) == [("b", 12, 1)]


def test_blocks_in_quarantine_are_not_handed_out():
    sched = scheduler(blocks=4)
    sched.add_reservation(request("a", 12), 0.0)
    [seq] = sched.grant_reservations()
    key = sched.quarantine(seq, FinishReason.ERROR)
    assert sched.pool.num_available == 0 and "a" not in sched.sequences
    sched.check()
    sched.blocks.unquarantine(key)
    assert sched.pool.num_available == 4
    sched.check()


def test_only_free_blocks_are_taken_for_probes_and_one_is_left_for_each_running_sequence():
    sched = scheduler(blocks=8)
    sched.add(request("cached", 8), 0.0)
    run(sched)
    sched.finish(sched.sequences["cached"], FinishReason.STOP)
    sched.add(request("a", [5] * 4), 0.0)
    run(sched)
    before = sched.pool.counts()
    assert (before.cached, before.free) == (2, 4)
    lent = sched.blocks.take_probe_blocks(100)
    assert len(lent) == 3 and sched.pool.counts().cached == 2
    sched.check()
    for _ in range(5):
        run(sched)  # "a" grows into the block that was left
    assert sched.preemption.num_preemptions == 0
    sched.blocks.return_probe_blocks(lent)
    assert sched.pool.counts().free == 3
    sched.check()


def test_nothing_is_taken_for_probes_while_a_sequence_is_queued_and_what_is_back_admits_it():
    sched = scheduler(blocks=4)
    lent = sched.blocks.take_probe_blocks(2)
    sched.add_reservation(request("a", 12), 0.0)
    assert sched.grant_reservations() == [] and sched.blocks.take_probe_blocks(1) == []
    sched.blocks.return_probe_blocks(lent)
    assert [seq.request_id for seq in sched.grant_reservations()] == ["a"]


def test_a_probe_block_that_is_lost_is_noticed():
    sched = scheduler(blocks=4)
    sched.blocks.take_probe_blocks(2)
    sched.check()
    sched.blocks.probe_blocks.pop()
    with pytest.raises(AssertionError):
        sched.check()


class Life(RuleBasedStateMachine):
    """Random arrivals, steps, reservations and ends: the ledger holds after every one, and all of it ends."""

    def __init__(self) -> None:
        super().__init__()
        self.sched = scheduler(blocks=10, budget=12, running=4, waiting=6)
        self.count = 0
        self.keys: list[int] = []
        self.lent: list[list[int]] = []

    def live(self) -> list[Sequence]:
        return list(self.sched.sequences.values())

    @rule(tokens=st.lists(st.integers(0, 1), min_size=1, max_size=24), how=st.sampled_from(["add", "hold", "reserve"]))
    def arrive(self, tokens, how):
        self.count += 1
        wanted = request(f"r{self.count}", tokens)
        if self.sched.refusal(wanted) is not None:
            return
        if how == "reserve":
            self.sched.add_reservation(wanted, 0.0)
        else:
            self.sched.add(wanted, 0.0, hold=how == "hold", output_limit=1 if how == "hold" else None)

    @rule()
    def step(self):
        self.sched.grant_reservations()
        plan = self.sched.schedule()
        assert plan.num_tokens <= 12
        run(self.sched, plan)
        for item in plan.work:
            seq = item.seq
            if seq.state is State.RUNNING and (seq.num_output >= seq.max_output or seq.num_tokens >= 36):
                self.sched.finish(seq, FinishReason.LENGTH)

    @precondition(lambda self: self.sched.receiving)
    @rule(data=st.data(), commits=st.booleans())
    def transfer_ends(self, data, commits):
        name = data.draw(st.sampled_from(sorted(self.sched.receiving)))
        if commits:
            self.sched.activate(name, [99])
        else:
            self.keys.append(self.sched.quarantine(self.sched.receiving[name], FinishReason.ERROR))

    @precondition(lambda self: self.keys)
    @rule()
    def transport_lets_go(self):
        self.sched.blocks.unquarantine(self.keys.pop())

    @rule(count=st.integers(1, 4))
    def lend(self, count):
        before = self.sched.pool.counts()
        self.lent.append(self.sched.blocks.take_probe_blocks(count))
        assert self.sched.pool.counts().cached == before.cached

    @precondition(lambda self: self.lent)
    @rule()
    def take_back(self):
        self.sched.blocks.return_probe_blocks(self.lent.pop())

    @precondition(lambda self: self.sched.sequences)
    @rule(data=st.data())
    def abort(self, data):
        self.sched.finish(data.draw(st.sampled_from(self.live())), FinishReason.ABORT)

    @invariant()
    def adds_up(self):
        self.sched.check()
        assert len(self.sched.waiting) + len(self.sched.reserving) <= 6 + 4

    def teardown(self):
        for key in self.keys:
            self.sched.blocks.unquarantine(key)
        for blocks in self.lent:
            self.sched.blocks.return_probe_blocks(blocks)
        for _ in range(400):
            if not self.sched.sequences:
                break
            self.step()
            for name in list(self.sched.receiving):
                self.sched.activate(name, [99])
            for seq in list(self.sched.held.values()):
                self.sched.finish(seq, FinishReason.ABORT)
        assert not self.sched.sequences, "something starved"
        assert self.sched.pool.counts().used == 0


TestLife = Life.TestCase
TestLife.settings = settings(max_examples=80, stateful_step_count=40, deadline=None)


# ---- what is shared, copied, kept

TAIL = 8  # a block of these tests: long enough for a tail that is worth copying


def tail_scheduler(blocks: int, **options) -> Scheduler:
    pool = BlockPool(blocks, block_size=TAIL, **options)
    return Scheduler(pool, SchedulerConfig(token_budget=64, max_running=8, max_waiting=8))


def tail_request(name: str, ids: list[int], *, salt: str = "", **hints) -> SequenceRequest:
    return SequenceRequest(
        request_id=name,
        token_ids=ids,
        num_prompt_tokens=len(ids),
        block_hashes=list(block_hashes(ids, TAIL, salt)),
        sampling=Sampling(max_tokens=8),
        salt=salt,
        hints=KvHints(**hints),
    )


def finished(sched: Scheduler, name: str, ids: list[int], **options) -> list[int]:
    """Its blocks, after it has come and gone."""
    seq = sched.add(tail_request(name, ids, **options), 0.0)
    run(sched)
    blocks = list(seq.blocks)
    sched.finish(seq, FinishReason.STOP)
    sched.check()
    return blocks


def test_a_block_that_begins_alike_is_copied_and_the_rest_computed():
    sched, ids = tail_scheduler(8), list(range(20))
    blocks = finished(sched, "a", ids[:16])
    seq = sched.add(tail_request("b", [*ids[:13], 77, 78, 79]), 0.0)
    plan = sched.schedule()
    assert shape(plan) == [("b", 13, 3)] and seq.num_cached == 13
    [copy] = plan.copies
    assert (copy.source, copy.target) == (blocks[1], seq.blocks[1]) and copy.source != copy.target
    assert seq.blocks[0] == blocks[0]
    run(sched, plan)
    sched.blocks.copied()
    sched.check()


def test_the_whole_prompt_again_costs_one_token():
    sched, ids = tail_scheduler(8), list(range(16))
    finished(sched, "a", ids)
    sched.add(tail_request("b", ids), 0.0)
    assert shape(run(sched)) == [("b", 15, 1)]


def test_few_tokens_alike_are_not_worth_a_copy_and_another_tenants_are_none():
    for salt, ids in (("", [0, 1, 2, 70, 71, 72, 73, 74, 75]), ("b", list(range(15)))):
        sched = tail_scheduler(8)
        finished(sched, "a", list(range(16)))
        seq = sched.add(tail_request("b", ids, salt=salt), 0.0)
        assert sched.schedule().copies == () and seq.num_cached == 0


def test_a_copy_for_which_there_is_no_room_is_not_made():
    sched, ids = tail_scheduler(3), [*range(15), *range(70, 78)]
    finished(sched, "a", list(range(16)))
    seq = sched.add(tail_request("b", ids), 0.0)  # needs all blocks: the one that it would copy, too
    plan = run(sched)
    assert plan.copies == () and shape(plan) == [("b", 8, 15)] and len(seq.blocks) == 3
    sched.check()


def test_a_sequence_about_to_write_into_a_shared_block_gets_a_copy():
    sched = tail_scheduler(8)
    seq = sched.add(tail_request("a", list(range(12))), 0.0)
    run(sched)
    other = list(seq.blocks)
    sched.pool.acquire(other)  # as a second sample would
    plan = sched.schedule()
    [copy] = plan.copies
    assert (copy.seq, copy.source) == (seq, other[1]) and seq.blocks[1] == copy.target
    run(sched, plan)
    sched.blocks.copied()
    assert sched.schedule().copies == ()  # from now on the block is its own
    sched.pool.release(other)
    sched.blocks.copied()
    sched.check()


def test_what_is_not_to_be_kept_is_free_at_the_end():
    sched = tail_scheduler(8)
    finished(sched, "a", list(range(16)), keep=False)
    assert sched.pool.counts().free == 8


def test_a_prompt_is_pinned_from_when_it_is_full_and_its_output_is_not():
    sched = tail_scheduler(8, pin_share=0.5)
    seq = sched.add(tail_request("a", list(range(17)), pin_s=5.0), 0.0)
    run(sched)
    for _ in range(8):
        run(sched)
    blocks = list(seq.blocks)
    sched.finish(seq, FinishReason.STOP)
    assert set(sched.pool.pinned) == set(blocks[:2]) and sched.pool.counts().used == 0
    sched.check()
    sched.pool.tick(5.0)
    assert not len(sched.pool.pinned)


def test_pins_end_early_when_nothing_else_would_ever_let_a_request_in():
    sched = tail_scheduler(4, pin_share=0.5)
    finished(sched, "a", list(range(16)), pin_s=1e9)
    assert sched.pool.num_available == 2
    seq = sched.add(tail_request("b", list(range(100, 128))), 0.0)
    assert shape(run(sched)) == [("b", 0, 28)] and seq.state is State.RUNNING
    assert not len(sched.pool.pinned)
    sched.check()


def test_pins_stand_as_long_as_others_will_make_room():
    sched = tail_scheduler(4, pin_share=0.5)
    finished(sched, "a", list(range(16)), pin_s=1e9)
    sched.add(tail_request("b", list(range(50, 56))), 0.0)
    run(sched)
    late = sched.add(tail_request("c", list(range(100, 128))), 0.0)
    run(sched)
    assert late.state is State.WAITING and len(sched.pool.pinned) == 2


def test_priority_decides_whose_blocks_go():
    sched = tail_scheduler(6)
    dear = finished(sched, "dear", list(range(16)), priority=1)
    finished(sched, "cheap", list(range(50, 66)))
    finished(sched, "new", list(range(100, 116)))
    assert list(sched.pool.match(HashChain.of(list(range(16)), TAIL)).blocks) == dear[:2]
