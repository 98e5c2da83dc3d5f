"""Many quiet decode steps at once leave everything as they do one by one."""

from hypothesis import given
from hypothesis import strategies as st

from kvrelay.engine.appending import Appender
from kvrelay.engine.leap import leap, quiet_steps
from kvrelay.engine.scheduler import Scheduler, SchedulerLimits
from kvrelay.engine.shares import LineRules
from kvrelay.hashing import block_hashes
from kvrelay.kvcache.block_pool import BlockPool
from kvrelay.wire import Sampling, SequenceRequest

BLOCK, WORD = 8, 7


class Bench:
    """An engine's scheduler, and tokens that are all the same."""

    def __init__(self, *, blocks=96, budget=32, running=8) -> None:
        self.sched = Scheduler(
            BlockPool(blocks, block_size=BLOCK), BLOCK, SchedulerLimits(budget, running, 64, 1.0),
            LineRules(tenant_weights={"gold": 2.0}),
        )  # fmt: skip
        self.appender = Appender(self.sched.finish, lambda: 0.0, eos_ids=(2,), max_model_len=1 << 20)
        self.ended = []

    def add(self, name, prompt, output, tenant=""):
        tokens = [hash(name) % 1000 + 10] * prompt
        request = SequenceRequest(
            request_id=name, token_ids=tokens, num_prompt_tokens=prompt, block_hashes=list(block_hashes(tokens, BLOCK)),
            sampling=Sampling(max_tokens=output), tokens_per_hash=BLOCK, tenant=tenant,
        )  # fmt: skip
        self.sched.add(request, 0.0)

    def step(self):
        plan = self.sched.schedule()
        self.sched.copied()
        self.sched.advance(*plan.work)
        seqs = [item.seq for item in plan.work if item.samples]
        outputs = []
        self.appender.append_all(seqs, [WORD] * len(seqs), [None] * len(seqs), outputs)
        self.ended += [output.request_id for output in outputs if output.finish_reason is not None]
        return bool(plan.work)

    def state(self):
        """All that a step can change."""
        sched = self.sched
        return (
            [
                (seq.request_id, list(seq.token_ids), seq.num_computed, seq.num_charged, list(seq.blocks), seq.num_hashed_blocks)
                for seq in sched.running
            ],
            sched.shares._counters, sched.shares._credits, sched.shares.computed_tokens, sched.shares.other_tokens,
            sched.pool.counts(), sched.pool.cached_hashes(), self.ended, sched.num_preemptions, sched.hit_tokens,
        )  # fmt: skip


loads = st.lists(
    st.tuples(st.integers(1, 40), st.integers(1, 60), st.sampled_from(["", "gold", "iron"])), min_size=1, max_size=10
)


@given(loads, st.data())
def test_a_leap_is_the_steps_that_it_stands_for(load, data):
    one, other = Bench(), Bench()
    for index, (prompt, output, tenant) in enumerate(load):
        one.add(f"r{index}", prompt, output, tenant)
        other.add(f"r{index}", prompt, output, tenant)
    for _ in range(2000):
        if not one.sched.has_work:
            break
        quiet = quiet_steps(one.sched)
        if quiet:
            count = data.draw(st.integers(1, quiet), label="steps")
            leap(one.sched, count, WORD)
            for _ in range(count):
                other.step()
        else:
            one.step()
            other.step()
        assert one.state() == other.state()
        one.sched.check()
    assert len(one.ended) == len(load)


def test_most_steps_of_long_outputs_are_quiet():
    bench = Bench()
    for index in range(4):
        bench.add(f"r{index}", 5, 400)
    single = 0
    while bench.sched.has_work:
        if count := quiet_steps(bench.sched):
            leap(bench.sched, count, WORD)
        else:
            single += bench.step()
    assert single <= 4 * (405 // BLOCK + 1) * 2


def test_nothing_is_quiet_while_somebody_is_in_line_or_has_a_prompt_to_compute():
    bench = Bench(running=2)
    bench.add("a", 40, 50)
    assert quiet_steps(bench.sched) == 0  # in line
    bench.step()
    assert quiet_steps(bench.sched) == 0  # of 40 prompt tokens, 32 are computed
    for _ in range(3):
        bench.step()
    assert quiet_steps(bench.sched) > 0
    bench.add("b", 3, 5)
    assert quiet_steps(bench.sched) == 0


def test_one_step_more_than_are_quiet_would_be_wrong():
    """The control of the above: beyond them, blocks would not be named, and outputs not end."""
    one, other = Bench(), Bench()
    for bench in (one, other):
        bench.add("r", 5, 100)
        bench.step()
        bench.step()
    quiet = quiet_steps(one.sched)
    assert quiet > 0
    leap(one.sched, quiet + 1, WORD)
    for _ in range(quiet + 1):
        other.step()
    assert one.state() != other.state()
