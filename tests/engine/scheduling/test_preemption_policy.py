"""What becomes of a pre-empted sequence: the choice, the swapped queue, the headroom, and that all of it ends."""

import hypothesis.strategies as st
import msgspec
import numpy as np
import pytest
from hypothesis import given, settings

from kvrelay.engine.scheduling.blocks import OutputLengths, growth_blocks
from kvrelay.engine.scheduling.plan import StepPlan
from kvrelay.engine.scheduling.preempt import MeasuredSpeeds, PreemptionMode, VictimGroup, choose, costs
from kvrelay.engine.scheduling.scheduler import Scheduler, SchedulerConfig
from kvrelay.engine.scheduling.sequence import Sequence, State
from kvrelay.hashing import block_hashes
from kvrelay.kvcache.memory.swap import SwapArea, SwapLoad
from kvrelay.kvcache.pool.block_pool import BlockPool
from kvrelay.plane.messages import Sampling, SequenceRequest
from kvrelay.types import FinishReason

pytestmark = pytest.mark.pure


BLOCK = 4
RATES = MeasuredSpeeds(
    save_bytes_per_s=1e9,
    load_bytes_per_s=1e9,
    compute_tokens_per_s=1e4,
    remote_tokens_per_s=1e4,
    transfer_bytes_per_s=1e9,
    transfer_latency_s=0.01,
)


# ---- the choice


def test_a_swap_that_moves_little_beats_computing_much_and_the_other_way_round():
    little = VictimGroup(1000, swap_bytes=1 << 20, can_swap=True)
    much = VictimGroup(1000, swap_bytes=1 << 30, can_swap=True)
    assert (choose(little, RATES), choose(much, RATES)) == (PreemptionMode.SWAP, PreemptionMode.RECOMPUTE)


def test_what_others_hold_or_a_tier_has_need_not_be_computed():
    stake = VictimGroup(1000, swap_bytes=40 << 20, can_swap=True)
    found_again = VictimGroup(
        1000, shared_tokens=500, tier_tokens=480, tier_bytes=1 << 20, swap_bytes=40 << 20, can_swap=True
    )
    assert (choose(stake, RATES), choose(found_again, RATES)) == (PreemptionMode.SWAP, PreemptionMode.RECOMPUTE)


def test_a_return_to_prefill_pays_when_many_would_wait_for_the_computing_here():
    def way(num_others: int) -> PreemptionMode:
        return choose(VictimGroup(1000, transfer_bytes=1 << 20, num_others=num_others, can_return=True), RATES)

    assert (way(0), way(8)) == (PreemptionMode.RECOMPUTE, PreemptionMode.RETURN_TO_PREFILL)


def test_an_unmeasured_mode_is_not_chosen_over_a_measured_one_and_without_any_swap_comes_first():
    stake = VictimGroup(100, swap_bytes=1 << 20, transfer_bytes=1 << 20, can_swap=True, can_return=True)
    assert choose(stake, MeasuredSpeeds(compute_tokens_per_s=1.0)) is PreemptionMode.RECOMPUTE
    assert choose(stake, MeasuredSpeeds(save_bytes_per_s=1.0, load_bytes_per_s=1.0)) is PreemptionMode.SWAP
    assert choose(stake, MeasuredSpeeds()) is PreemptionMode.SWAP


@pytest.mark.parametrize("only", list(PreemptionMode))
def test_a_mode_that_is_asked_for_is_taken_where_it_can_be(only):
    assert (
        choose(VictimGroup(10, swap_bytes=1, transfer_bytes=1, can_swap=True, can_return=True), RATES, only=only)
        is only
    )
    assert choose(VictimGroup(10), RATES, only=only) is PreemptionMode.RECOMPUTE


@given(
    tokens=st.integers(1, 10**6),
    others=st.integers(0, 500),
    swap_bytes=st.integers(0, 10**11),
    transfer_bytes=st.integers(0, 10**11),
)
def test_no_other_mode_costs_less_than_the_chosen_one(tokens, others, swap_bytes, transfer_bytes):
    stake = VictimGroup(
        tokens, swap_bytes=swap_bytes, transfer_bytes=transfer_bytes, num_others=others, can_swap=True, can_return=True
    )
    chosen, found = choose(stake, RATES), costs(stake, RATES)
    assert all(found[chosen] <= cost for cost in found.values())


def crossover_tokens(rates, *, bytes_per_token, block_tokens, num_others=0):
    """The least number of tokens from which on a swap is cheaper than computing again; None: up to 2^17 it never is."""

    def swaps(num_tokens):
        num_blocks = -(-num_tokens // block_tokens)
        num_bytes = int(num_blocks * block_tokens * bytes_per_token)
        victims = VictimGroup(num_tokens, swap_bytes=num_bytes, num_others=num_others, can_swap=True)
        return choose(victims, rates) is PreemptionMode.SWAP

    return next((num_tokens for num_tokens in _lengths(block_tokens) if swaps(num_tokens)), None)


def _lengths(block_tokens):
    """Every one up to four blocks, then whole blocks: the cost of a swap grows by blocks."""
    few = list(range(1, 4 * block_tokens))
    return few + [4 * block_tokens + step * block_tokens for step in range(0, (1 << 17) // block_tokens, 1)]


def test_the_crossover_is_where_the_choice_turns():
    """A swap copies whole blocks: of a few tokens computing is quicker."""
    rates = MeasuredSpeeds(save_bytes_per_s=1e6, load_bytes_per_s=1e6, compute_tokens_per_s=100.0)
    at = crossover_tokens(rates, bytes_per_token=1000.0, block_tokens=16)
    assert at == 4  # 16 kB there and back: 32 ms; 4 tokens: 40 ms
    assert crossover_tokens(rates, bytes_per_token=1e6, block_tokens=16) is None


# ---- headroom


def test_the_most_that_is_needed_at_once_counts_what_others_will_have_given_back():
    def blocks(*pairs: tuple[int, int]) -> float:
        left, own = zip(*pairs, strict=True)
        return growth_blocks(np.asarray(left, float), np.asarray(own, float), BLOCK)

    assert blocks((40, 5)) == 10
    assert blocks((40, 5), (40, 5)) == 20
    assert blocks((40, 5), (8, 5)) == 5  # two of each by then; later 10 less the 5 that came back
    assert blocks((0, 5), (4, 5)) == 0
    assert growth_blocks(np.zeros(0), np.zeros(0), BLOCK) == 0


def remaining(lengths: OutputLengths, so_far: int, most: int) -> float:
    return float(lengths.remaining(np.asarray([so_far], float), np.asarray([most], float))[0])


def test_what_an_output_will_still_have_follows_from_those_that_lasted_longer():
    lengths = OutputLengths()
    assert remaining(lengths, 0, 10**6) > 0  # nothing seen yet: something is assumed
    for length in [10, 20, 30, 40] * 4:
        lengths.observe(length)
    assert remaining(lengths, 0, 10**6) == 25
    assert remaining(lengths, 20, 10**6) == 15  # 30 and 40 lasted longer
    assert remaining(lengths, 50, 10**6) == 50  # longer than all: half-way
    assert remaining(lengths, 0, 7) == 7 and remaining(lengths, 9, 7) == 0


# ---- the scheduler


class FakeSlab:
    """Remembers what was saved as (block, what was in it)."""

    num_layers, block_bytes = 2, 64

    def __init__(self, num_rows: int) -> None:
        self.num_rows = num_rows
        self.content: dict[int, int] = {}
        self.pool: dict[int, int] = {}  # block -> content

    def save(self, blocks, slots):
        for block, slot in zip(blocks, slots, strict=True):
            self.content[slot] = self.pool.get(block, 0)
        return self.checksums(slots)

    def checksums(self, slots):
        return [self.content.get(slot, 0) for slot in slots]

    def load(self, slots, blocks, layers):
        for slot, block in zip(slots, blocks, strict=True):
            self.pool[block] = self.content[slot]


class ByHand:
    """Runs a job when it is told to."""

    def __init__(self, name, num_threads, queue, wake):
        self.jobs, self.ended, self.is_closed = [], [], False

    def start(self):
        self.is_closed = False

    def put(self, job):
        self.jobs.append(job)
        return not self.is_closed

    def run(self):
        for job in self.jobs:
            self.ended.append((job, job.work()))
        self.jobs.clear()

    def finished(self):
        ended, self.ended = self.ended, []
        return ended

    @property
    def is_idle(self):
        return not self.jobs and not self.ended

    def close(self):
        self.is_closed = True


class Swapping:
    """A scheduler with a swap area whose copies are made by hand; blocks' contents are numbers."""

    def __init__(
        self,
        blocks: int,
        *,
        slots: int = 64,
        only: PreemptionMode | None = PreemptionMode.SWAP,
        headroom: float = 0.0,
        **limits,
    ):
        chosen = {"token_budget": 64, "max_running": 32, "max_waiting": 256, **limits}
        self.slab = FakeSlab(slots)
        self.threads: list[ByHand] = []

        def make_threads(*args) -> ByHand:
            self.threads.append(ByHand(*args))
            return self.threads[-1]

        self.area = SwapArea(
            self.slab, is_checked=True, wake=lambda: None, clock=lambda: 0.0, make_threads=make_threads
        )
        config = SchedulerConfig(headroom=headroom, preemption=only or "auto", **chosen)
        self.sched = Scheduler(BlockPool(blocks, block_size=BLOCK), config, area=self.area)
        self.done: dict[str, list[int]] = {}

    def add(self, name: str, tokens: int | list[int], *, max_tokens: int = 8) -> Sequence:
        start = sum(map(ord, name)) * 1000
        ids = list(range(start, start + tokens)) if isinstance(tokens, int) else tokens
        request = SequenceRequest(
            request_id=name,
            token_ids=ids,
            num_prompt_tokens=len(ids),
            block_hashes=list(block_hashes(ids, BLOCK)),
            sampling=Sampling(max_tokens=max_tokens),
        )
        assert self.sched.refusal(request) is None
        return self.sched.add(request, 0.0)

    def step(self) -> StepPlan:
        """As the engine's: copies are made, every sampled sequence gets the next token; what has all of them ends."""
        self.area.poll()
        self.sched.grant_reservations()
        plan = self.sched.schedule()
        for threads in self.threads:
            threads.run()
        for item in plan.work:
            seq = item.seq
            if isinstance(seq.load, SwapLoad) and not seq.load.wait_verified():
                self.sched.preemption.rewind(seq)
                continue
            self.sched.advance(item)
            seq.load = None
            self.write(item.seq, item.start, item.start + item.num_tokens)
            if item.samples:
                seq.token_ids.append(1000 + seq.num_output)
                if seq.num_output >= seq.max_output:
                    self.done[seq.request_id] = seq.token_ids[seq.request.num_prompt_tokens :]
                    self.sched.finish(seq, FinishReason.LENGTH)
        self.sched.blocks.copied()
        self.sched.check()
        return plan

    def write(self, seq: Sequence, start: int, end: int) -> None:
        """The content of a block stands for the tokens in it."""
        for index in range(start // BLOCK, -(-end // BLOCK)):
            if index < len(seq.blocks):
                self.slab.pool[seq.blocks[index]] = hash(tuple(seq.token_ids[: min(end, (index + 1) * BLOCK)]))

    def content(self, seq: Sequence) -> list[int]:
        return [self.slab.pool[block] for block in seq.blocks[: seq.blocks_for(seq.num_computed)]]

    def until_swapped(self, seq: Sequence) -> list[int]:
        """Steps until it is; what its blocks held before."""
        for _ in range(60):
            before = self.content(seq)
            self.step()
            if seq.state is State.SWAPPED:
                return before
        raise AssertionError("never pre-empted")


def two(**options) -> tuple[Swapping, Sequence, Sequence]:
    """Two sequences for which there is not enough room."""
    world = Swapping(6, **options)
    old, young = world.add("old", 7, max_tokens=16), world.add("young", 7, max_tokens=16)
    return world, old, young


def test_a_swapped_sequence_holds_no_block_and_comes_back_with_what_it_had():
    world, old, young = two()
    before = world.until_swapped(young)
    assert not young.blocks and young.num_computed > 0 and len(world.area.held) == len(before)
    world.sched.finish(old, FinishReason.STOP)
    world.slab.pool = dict.fromkeys(world.slab.pool, -1)  # the pool was used for something else
    num_computed = young.num_computed
    world.sched.pool.reset_cache()
    plan = world.sched.schedule()
    assert [(item.seq, item.start) for item in plan.work] == [(young, num_computed)]
    world.threads[0].run()
    assert world.content(young)[: len(before)] == before
    world.area.poll()
    assert len(world.area.held) == 0 and world.area.num_free == 64


def test_those_that_are_swapped_go_before_new_ones_and_by_arrival():
    world, old, young = two()
    world.until_swapped(young)
    world.add("new", 2)
    world.sched.add_reservation(msgspec.structs.replace(young.request, request_id="reserved"), 0.0)
    while old.state is State.RUNNING:
        world.step()
        if young.state is State.SWAPPED:
            assert not world.sched.receiving and world.sched.sequences["new"].state is State.WAITING
    world.step()
    assert young.state in (State.RUNNING, State.FINISHED)


def test_a_swap_for_which_there_is_no_room_is_a_recompute():
    world, _, young = two(slots=1)
    for _ in range(20):
        world.step()
        if young.state is State.WAITING:
            break
    assert young.state is State.WAITING and len(world.area.held) == 0
    assert world.sched.preemption.num_by_mode == {PreemptionMode.RECOMPUTE: 1}


def test_a_group_goes_all_together_or_not_at_all():
    for slots, way in ((64, PreemptionMode.SWAP), (3, PreemptionMode.RECOMPUTE)):
        world = Swapping(16, slots=slots)
        group = tuple(world.add(name, 7) for name in ("a", "b"))
        world.step()
        assert world.sched.preempt_group(group) is way
        assert {seq.state for seq in group} == {State.SWAPPED if way is PreemptionMode.SWAP else State.WAITING}
        line = world.sched.swapped if way is PreemptionMode.SWAP else world.sched.waiting
        assert tuple(line) == group
        assert len(world.area.held) == (4 if way is PreemptionMode.SWAP else 0)
        world.sched.check()


def test_a_swapped_block_that_rotted_leads_to_computing_and_costs_nothing_else():
    world, old, young = two()
    world.until_swapped(young)
    world.slab.content = {slot: number + 1 for slot, number in world.slab.content.items()}
    world.sched.finish(old, FinishReason.STOP)
    world.sched.pool.reset_cache()
    world.step()
    assert young.state is State.WAITING and young.num_computed == 0
    world.step()
    assert world.area.stats.corrupt > 0 and world.area.num_free == 64
    while young.state is not State.FINISHED:
        world.step()
    assert world.done["young"] == [1000 + i for i in range(16)]


@pytest.mark.parametrize("when", ["swapped", "coming back"])
def test_an_end_while_swapped_or_on_the_way_back_leaks_nothing(when):
    world, old, young = two()
    world.until_swapped(young)
    world.sched.finish(old, FinishReason.STOP)
    if when == "coming back":
        world.sched.schedule()
        assert young.load is not None
        world.threads[0].run()
    world.sched.finish(young, FinishReason.ABORT)
    world.area.poll()
    world.sched.check()
    assert world.area.num_free == 64 and world.sched.pool.counts().used == 0 and not world.sched.sequences


def test_a_lost_slot_is_noticed():
    world, _, young = two()
    world.until_swapped(young)
    young.swapped = None
    with pytest.raises(AssertionError):
        world.sched.check()


def test_blocks_that_others_hold_are_not_copied_and_when_they_are_gone_all_is_computed():
    for keep in (True, False):
        world = Swapping(12)
        ids = list(range(9))
        first = world.add("first", ids)
        world.step()
        second = world.add("second", ids)
        world.step()
        world.sched.preempt_group((second,))
        assert second.swapped is not None and second.swapped.first_block == 2
        if not keep:
            world.sched.finish(first, FinishReason.STOP)
            world.sched.pool.reset_cache()
        world.step()
        assert second.num_computed > 8 and (world.sched.preemption.recomputed_tokens == 0) is keep


def test_a_returned_sequence_ends_here_and_only_so_often():
    world = Swapping(8, only=PreemptionMode.RETURN_TO_PREFILL)
    seq = world.add("a", 7)
    seq.prefill_tokens_per_s = 1.0
    world.step()
    assert world.sched.preempt_group((seq,)) is PreemptionMode.RETURN_TO_PREFILL
    assert seq.state is State.FINISHED and world.sched.preemption.returned == [seq] and not world.sched.sequences
    again = world.add("b", 7)
    world.step()
    assert world.sched.preempt_group((again,)) is PreemptionMode.RECOMPUTE  # no prefill worker computed it


# ---- at twice what fits


@pytest.mark.parametrize("only", [None, PreemptionMode.SWAP, PreemptionMode.RECOMPUTE])
@pytest.mark.parametrize("headroom", [0.0, 1.0])
@pytest.mark.parametrize("slots", [64, 5])
def test_twice_what_fits_completes_and_each_step_makes_progress(only, headroom, slots):
    """The measure: tokens computed for the first time. It grows in every step but those that compute a dropped prefix
    again.
    """
    world = Swapping(20, only=only, headroom=headroom, slots=slots)
    names = [f"r{i}" for i in range(10)]  # 4 blocks each at the end: twice the pool
    for name in names:
        world.add(name, 5, max_tokens=11)
    best = dict.fromkeys(names, 0)
    steps_without = 0
    for _ in range(400):
        if not world.sched.has_work:
            break
        plan = world.step()
        before = sum(best.values())
        for item in plan.work:
            best[item.seq.request_id] = max(best[item.seq.request_id], item.seq.num_tokens)
        steps_without = 0 if sum(best.values()) > before else steps_without + 1
        assert steps_without <= 1
    assert world.done == {name: [1000 + i for i in range(11)] for name in names}
    world.area.poll()
    assert world.sched.pool.counts().used == 0 and world.area.num_free == slots


def test_headroom_makes_preemption_rare():
    def preemptions(headroom: float) -> int:
        world = Swapping(40, headroom=headroom)
        for index in range(30):
            world.add(f"r{index}", 8, max_tokens=24)
        while world.sched.has_work:
            world.step()
        assert len(world.done) == 30
        return world.sched.preemption.num_preemptions

    without, with_it = preemptions(0.0), preemptions(1.0)
    assert with_it == 0 < 10 < without


@given(
    lengths=st.lists(st.tuples(st.integers(1, 20), st.integers(1, 16)), min_size=2, max_size=12),
    aborted=st.sets(st.integers(0, 11), max_size=3),
    only=st.sampled_from([None, PreemptionMode.SWAP]),
    slots=st.integers(0, 40),
    headroom=st.sampled_from([0.0, 1.0]),
)
@settings(max_examples=40, deadline=None)
def test_whatever_comes_ends_with_its_tokens_and_nothing_leaks(lengths, aborted, only, slots, headroom):
    world = Swapping(10, only=only, slots=slots, headroom=headroom, token_budget=16)
    for index, (prompt, output) in enumerate(lengths):
        world.add(f"r{index}", prompt, max_tokens=output)
    for step in range(2000):
        if not world.sched.has_work:
            break
        world.step()
        if step in aborted and (seq := world.sched.sequences.get(f"r{step}")) is not None:
            world.sched.finish(seq, FinishReason.ABORT)
    for index, (_, output) in enumerate(lengths):
        if index not in aborted:
            assert len(world.done[f"r{index}"]) == output
    world.area.poll()
    assert not world.sched.sequences and world.sched.pool.counts().used == 0 and world.area.num_free == slots


def test_the_latency_of_a_swap_leaves_short_sequences_to_be_computed():
    rates = MeasuredSpeeds(save_bytes_per_s=1e9, load_bytes_per_s=1e9, compute_tokens_per_s=1e4, swap_latency_s=0.01)
    at = crossover_tokens(rates, bytes_per_token=1000.0, block_tokens=16)
    assert at is not None and at > 100  # 100 tokens take 10 ms


class Ticking(FakeSlab):
    """Copies that take a second for a call, and one for each block."""

    def __init__(self, num_rows: int) -> None:
        super().__init__(num_rows)
        self.now_s = 0.0

    def save(self, blocks, slots):
        self.now_s += 1 + len(blocks)
        return super().save(blocks, slots)

    def load(self, slots, blocks, layers):
        self.now_s += 1 + len(blocks)


def test_speeds_are_measured_before_the_first_swap_and_by_large_ones_after_it():
    slab = Ticking(64)
    area = SwapArea(slab, is_checked=True, wake=lambda: None, clock=lambda: slab.now_s, make_threads=ByHand)
    area.probe(range(100))
    assert area.save_bytes_per_s == 16 * 64 / 17 and area.load_bytes_per_s == 16 * 64 / 34  # two layers
    assert area.latency_s == 6.0
    small = area.save(0, [1])
    assert small is not None and area.save_bytes_per_s == 16 * 64 / 17
    area.save(0, list(range(32)))
    assert area.save_bytes_per_s > 16 * 64 / 17


def test_a_prefill_workers_sequence_whose_blocks_a_transfer_reads_is_not_moved():
    world = Swapping(8)
    seq = world.add("a", 7)
    seq.hold = True
    world.step()
    assert world.sched.preempt_group((seq,)) is PreemptionMode.RECOMPUTE


def test_nothing_is_taken_for_probes_while_a_sequence_is_swapped():
    world, old, young = two()
    world.until_swapped(young)
    world.sched.preempt_group((old,))
    world.sched.pool.reset_cache()
    assert world.sched.pool.counts().free > 2 and world.sched.blocks.take_probe_blocks(1) == []


def test_a_block_whose_copy_is_not_made_yet_is_saved_from_where_its_content_is():
    world = Swapping(12)
    seq = world.add("a", 6)
    world.step()
    world.sched.pool.acquire(shared := list(seq.blocks))  # as a second sample would
    before = world.content(seq)
    assert world.sched.blocks.try_own(seq) and seq.blocks[1] != shared[1]
    world.sched.preempt_group((seq,))
    assert seq.swapped is not None and [world.slab.content[slot] for slot in seq.swapped.rows] == before[-1:]
    world.sched.blocks.copied()
    world.sched.pool.release(shared)
    world.sched.check()
