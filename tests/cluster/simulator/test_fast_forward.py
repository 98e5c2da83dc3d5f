"""Sequences that sleep through decode steps, and stretches of steps at once, leave everything as single steps of all
do.
"""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kvrelay.cluster.simulator.fast_forward import FairShareWithParked, FastForward, ParkedSequences, RefreshedHeadroom
from kvrelay.engine.execution.sampler import OutputProcessor
from kvrelay.engine.scheduling.fair_share import QueueRules
from kvrelay.engine.scheduling.scheduler import Scheduler, SchedulerConfig
from kvrelay.hashing import block_hashes
from kvrelay.kvcache.pool.block_pool import BlockPool
from kvrelay.plane.messages import Sampling, SequenceRequest
from kvrelay.types import FinishReason

pytestmark = pytest.mark.pure


BLOCK, WORD = 8, 7


class Bench:
    """An engine's scheduler, and tokens that are all the same."""

    def __init__(self, *, blocks=96, budget=32, running=8, headroom=1.0) -> None:
        self.parked = parked = ParkedSequences(WORD)
        fair_share = FairShareWithParked(QueueRules())
        self.sched = Scheduler(
            BlockPool(blocks, block_size=BLOCK),
            SchedulerConfig(budget, running, 64, headroom),
            fair_share=fair_share,
            headroom=RefreshedHeadroom(headroom, BLOCK, parked),
        )
        self.fast_forward = FastForward(self.sched, parked, fair_share)
        self.appender = OutputProcessor(self.sched.finish, lambda: 0.0, eos_ids=(2,), max_model_len=1 << 20)
        self.ended, self.planned = [], []

    def add(self, name, prompt, output, tenant="", *, reserve=False):
        tokens = [hash(name) % 1000 + 10] * prompt
        request = SequenceRequest(
            request_id=name,
            token_ids=tokens,
            num_prompt_tokens=prompt,
            block_hashes=list(block_hashes(tokens, BLOCK)),
            sampling=Sampling(max_tokens=output),
            tokens_per_hash=BLOCK,
            tenant=tenant,
            weight=2.0 if tenant == "gold" else 1.0,
        )
        (self.sched.add_reservation if reserve else self.sched.add)(request, 0.0)

    def grant(self):
        """As before each step: who has a reservation has its prompt at once."""
        if self.sched.reserving:
            self.parked.refresh()
        for seq in self.sched.grant_reservations():
            self.sched.activate(seq.request_id, [WORD])

    def abort(self, name):
        seq = self.sched.sequences.get(name)
        if seq is not None:
            self.parked.wake_all()
            self.sched.finish(seq, FinishReason.ABORT)

    def step(self):
        """Everybody's, planned and applied whole."""
        plan = self.sched.schedule()
        self.sched.blocks.copied()
        self.sched.advance(*plan.work)
        return self._append(plan)

    def leap(self, steps):
        """Of what `look` says, at most so many; returns how many."""
        count, wakes = self.fast_forward.look()
        if count:
            wakes &= steps >= count
            count = min(count, steps)
            self.fast_forward.passed(count - wakes)
            if not wakes:
                return count
        before = count - wakes
        plan = self.fast_forward.plan()
        if not plan.work and not self.parked:
            return 0
        self.planned.append(len(plan.work))
        self.fast_forward.advance(plan)
        self._append(plan)
        return before + 1

    def _append(self, plan):
        seqs = [item.seq for item in plan.work if item.samples]
        outputs = []
        self.appender.append_all(seqs, [WORD] * len(seqs), [None] * len(seqs), outputs)
        self.ended += [output.request_id for output in outputs if output.finish_reason is not None]
        return bool(plan.work)

    def state(self):
        """All that a step can change."""
        sched = self.sched
        self.parked.refresh()
        return (
            [
                (
                    seq.request_id,
                    list(seq.token_ids),
                    seq.num_computed,
                    seq.num_charged,
                    list(seq.blocks),
                    seq.num_hashed_blocks,
                )
                for seq in sched.running
            ],
            sched.fair_share._counters,
            sched.fair_share._credits,
            sched.fair_share.computed_tokens,
            sched.fair_share.other_tokens,
            sched.pool.counts(),
            sched.pool.cached_hashes(),
            self.ended,
            sched.preemption.num_preemptions,
            sched.admission.hit_tokens,
        )


arrivals = st.lists(
    st.tuples(
        st.integers(0, 30),
        st.integers(1, 40),
        st.integers(1, 60),
        st.sampled_from(["", "gold", "iron"]),
        st.booleans(),
        st.integers(0, 200),
    ),
    min_size=1,
    max_size=10,
)
"""Steps after the one before, prompt, output, tenant, whether its prompt is computed elsewhere, and when it is aborted,
if it is there.
"""


@pytest.mark.slow
@settings(deadline=None)
@given(arrivals, st.integers(24, 96), st.data())
def test_leaps_are_the_steps_that_they_stand_for(load, blocks, data):
    one, other = Bench(blocks=blocks), Bench(blocks=blocks)
    due, at = [], 0
    for index, (pause, prompt, output, tenant, reserve, abort) in enumerate(load):
        at += pause
        due.append((at, "add", (f"r{index}", prompt, output, tenant), reserve))
        due.append((at + abort, "abort", (f"r{index}",), False))
    due.sort(key=lambda item: item[0])
    passed = 0
    while due or one.sched.has_work:
        while due and due[0][0] <= passed:
            _, what, args, reserve = due.pop(0)
            for bench in (one, other):
                bench.add(*args, reserve=reserve) if what == "add" else bench.abort(*args)
        for bench in (one, other):
            bench.grant()
        most = due[0][0] - passed if due else 1000
        steps = one.leap(data.draw(st.integers(1, max(1, most)), label="steps"))
        for _ in range(steps):
            other.grant()
            other.step()
        if not steps:
            other.step()
        passed += max(1, steps)
        if data.draw(st.booleans(), label="look"):  # who is not looked at goes on sleeping
            assert one.state() == other.state()
            one.sched.check()
        assert passed < 5000
    assert one.state() == other.state()
    assert len(one.sched.pool.cached_hashes()) == len(other.sched.pool.cached_hashes())


def test_most_steps_of_long_outputs_are_leapt_over():
    bench = Bench(blocks=256)
    for index in range(4):
        bench.add(f"r{index}", 5, 400)
    num_leaps = num_steps = 0
    while bench.sched.has_work:
        num_steps += bench.leap(1000)
        num_leaps += 1
    assert num_steps >= 400 and num_leaps <= 3 * (
        405 // BLOCK + 4
    )  # a block is filled, the next one taken, and a stretch


def test_only_those_to_whom_something_happens_are_planned():
    bench = Bench(blocks=200)
    for index in range(6):
        bench.add(f"r{index}", 3 + index, 200)
    while bench.sched.has_work:
        bench.leap(1000)
    assert max(bench.planned) == 6  # in the first steps, and when nothing is known of them yet
    assert sum(bench.planned) < 3 * len(bench.planned)


def test_who_decodes_sleeps_while_a_prompt_is_computed_beside_it():
    bench = Bench(budget=16, running=4)
    bench.add("a", 5, 60)
    for _ in range(5):
        bench.leap(1)
    bench.add("b", 40, 5)
    bench.planned.clear()
    for _ in range(3):
        assert bench.leap(1000) == 1
    assert bench.planned == [1, 1, 1]  # 15 of its tokens each, for one is another's
    assert bench.sched.sequences["b"].num_computed == 40


def test_nothing_is_leapt_over_while_somebody_is_in_line_or_has_a_prompt_to_compute():
    bench = Bench(running=2)
    bench.add("a", 40, 50)
    assert bench.fast_forward.look()[0] == 0  # in line
    bench.step()
    assert bench.fast_forward.look()[0] == 0  # of 40 prompt tokens, 32 are computed
    for _ in range(3):
        bench.step()
    assert bench.fast_forward.look()[0] > 0
    bench.add("b", 3, 5)
    assert bench.fast_forward.look()[0] == 0


def test_whoever_is_in_line_for_a_reservation_is_looked_at_between_any_two_steps():
    bench = Bench(running=1)
    bench.add("a", 5, 50)
    for _ in range(5):
        bench.step()
    assert bench.fast_forward.look()[0] > 1
    bench.add("b", 5, 50, reserve=True)
    assert bench.fast_forward.look() == (1, False)


def test_where_somebody_may_have_to_give_way_nobody_sleeps():
    bench = Bench(blocks=12, running=4, headroom=0.0)
    for name, prompt in (("a", 4), ("b", 7)):
        bench.add(name, prompt, 80)
    slept = False
    while not bench.sched.preemption.num_preemptions:
        assert bench.leap(1000)
        slept |= bool(bench.parked)
    assert slept and not bench.parked
    while bench.sched.has_work:
        assert bench.leap(1000)
    assert sorted(bench.ended) == ["a", "b"]


def test_one_step_more_than_are_quiet_would_be_wrong():
    """The control of the above: beyond them, blocks would not be named, and outputs not end."""
    one, other = Bench(), Bench()
    for bench in (one, other):
        bench.add("r", 5, 100)
        bench.step()
        bench.step()
    steps, wakes = one.fast_forward.look()
    assert steps > 1 and wakes
    one.fast_forward.passed(steps)
    for _ in range(steps):
        other.step()
    assert one.state() != other.state()
