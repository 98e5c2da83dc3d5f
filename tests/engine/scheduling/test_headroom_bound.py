"""Where there is plenty of room, output lengths are not looked at: who is admitted when is the same as if they were."""

import math

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kvrelay.engine.execution.sampler import OutputProcessor
from kvrelay.engine.scheduling.blocks import Headroom
from kvrelay.engine.scheduling.scheduler import Scheduler, SchedulerConfig
from kvrelay.hashing import block_hashes
from kvrelay.kvcache.pool.block_pool import BlockPool
from kvrelay.plane.messages import Sampling, SequenceRequest
from tests.scale import scaled

pytestmark = pytest.mark.pure


BLOCK, WORD = 8, 7


class CountedHeadroom(Headroom):
    num_looks = 0

    def expected_growth(self, *args):
        self.num_looks += 1
        return super().expected_growth(*args)


class Bench:
    def __init__(self, blocks, *, always_looks):
        headroom = CountedHeadroom(1.0, BLOCK)
        self.sched = Scheduler(BlockPool(blocks, block_size=BLOCK), SchedulerConfig(32, 6, 64, 1.0), headroom=headroom)
        self.appender = OutputProcessor(self.sched.finish, lambda: 0.0, eos_ids=(2,), max_model_len=1 << 20)
        self.headroom, self.admitted = headroom, []
        if always_looks:
            headroom.at_most = lambda num_others: math.inf

    @property
    def num_looks(self):
        return self.headroom.num_looks

    def add(self, name, prompt, output, *, reserve):
        tokens = [hash(name) % 1000 + 10] * prompt
        request = SequenceRequest(
            request_id=name,
            token_ids=tokens,
            num_prompt_tokens=prompt,
            block_hashes=list(block_hashes(tokens, BLOCK)),
            sampling=Sampling(max_tokens=output),
            tokens_per_hash=BLOCK,
        )
        (self.sched.add_reservation if reserve else self.sched.add)(request, 0.0)

    def step(self):
        for seq in self.sched.grant_reservations():
            self.sched.activate(seq.request_id, [WORD])
        plan = self.sched.schedule()
        self.sched.blocks.copied()
        self.sched.advance(*plan.work)
        seqs = [item.seq for item in plan.work if item.samples]
        self.appender.append_all(seqs, [WORD] * len(seqs), [None] * len(seqs), [])
        self.admitted.append([seq.request_id for seq in self.sched.running])
        self.sched.check()


loads = st.lists(
    st.tuples(st.integers(0, 8), st.integers(1, 40), st.integers(1, 50), st.booleans()), min_size=1, max_size=9
)
"""Steps after the one before, prompt, output, whether its prompt is computed elsewhere."""


def both(load, blocks):
    benches = Bench(blocks, always_looks=False), Bench(blocks, always_looks=True)
    for bench in benches:
        for number, (pause, prompt, output, reserve) in enumerate(load):
            for _ in range(pause):
                bench.step()
            bench.add(f"r{number}", prompt, output, reserve=reserve)
        for _ in range(400):
            bench.step()
    return benches


@pytest.mark.slow
@settings(deadline=None, max_examples=scaled(60))
@given(loads, st.integers(14, 120))
def test_the_same_are_admitted_at_the_same_steps(load, blocks):
    one, other = both(load, blocks)
    assert one.admitted == other.admitted and one.num_looks <= other.num_looks


def test_with_plenty_of_room_nobody_looks_and_with_little_somebody_does():
    load = [(1, 20, 40, False)] * 6
    roomy, looking = both(load, 400)
    assert roomy.num_looks == 0 and looking.num_looks > 0
    short, _ = both(load, 24)
    assert short.num_looks > 0
    assert max(map(len, short.admitted)) < max(map(len, roomy.admitted)) == 6
