"""Fairness between the scheduler's lines, and what pre-emption must not leave behind."""

import pytest

from kvrelay.engine.scheduling.plan import StepPlan
from kvrelay.engine.scheduling.scheduler import Scheduler, SchedulerConfig
from kvrelay.engine.scheduling.sequence import State
from kvrelay.hashing import block_hashes
from kvrelay.kvcache.pool.block_pool import BlockPool
from kvrelay.plane.messages import Sampling, SequenceRequest
from kvrelay.types import FinishReason

pytestmark = pytest.mark.pure


BLOCK = 4


def request(name: str, tokens: int, *, first: int = 0, max_tokens: int = 8) -> SequenceRequest:
    ids = list(range(first, first + tokens))
    return SequenceRequest(
        request_id=name,
        token_ids=ids,
        num_prompt_tokens=len(ids),
        block_hashes=list(block_hashes(ids, BLOCK)),
        sampling=Sampling(max_tokens=max_tokens),
    )


def scheduler(blocks: int, *, budget: int = 16, running: int = 8) -> Scheduler:
    return Scheduler(BlockPool(blocks, block_size=BLOCK), SchedulerConfig(budget, running, 64))


def run(sched: Scheduler) -> StepPlan:
    plan = sched.schedule()
    for item in plan.work:
        samples = item.samples
        sched.advance(item)
        if samples:
            item.seq.token_ids.append(99)
    return plan


def test_a_stream_of_reservations_does_not_starve_a_sequence_that_waits_to_be_computed_here():
    sched = scheduler(8)
    for index in range(4):
        sched.add_reservation(request(f"r{index}", 7, first=100 * index), 0.0)
    receiving = [seq.request_id for seq in sched.grant_reservations()]
    assert receiving
    local = sched.add(request("local", 23, first=5000), 0.0)
    count = 4
    for _ in range(50):
        sched.add_reservation(request(f"r{count}", 7, first=100 * count), 0.0)
        count += 1
        done = receiving.pop(0) if receiving else None
        if done is not None:
            sched.finish(sched.receiving[done], FinishReason.ABORT)
        receiving += [seq.request_id for seq in sched.grant_reservations()]
        run(sched)
        if local.state is State.RUNNING:
            break
        for index in range(count):  # the line stays short: nobody is refused
            seq = sched.sequences.get(f"r{index}")
            if seq is not None and len(sched.reserving) > 8 and seq.state is State.WAITING:
                sched.finish(seq, FinishReason.ABORT)
    assert local.state is State.RUNNING
    sched.check()


def test_a_stream_of_short_prompts_does_not_starve_a_reservation():
    sched = scheduler(8)
    short = [sched.add(request("s0", 7), 0.0), sched.add(request("s1", 7, first=50), 0.0)]
    run(sched)
    big = sched.add_reservation(request("big", 23, first=5000), 0.0)
    for index in range(2, 40):
        short.append(sched.add(request(f"s{index}", 7, first=100 * index), 0.0))
        running = next((seq for seq in short if seq.state is State.RUNNING), None)
        if running is not None:
            sched.finish(running, FinishReason.STOP)
        sched.grant_reservations()
        run(sched)
        if big.state is State.RECEIVING:
            break
    assert big.state is State.RECEIVING
    sched.check()


def test_the_last_place_in_the_batch_goes_to_the_first_to_come():
    sched = scheduler(64, running=1)
    sched.add(request("first", 3), 0.0)
    sched.add_reservation(request("second", 3, first=50), 0.0)
    assert sched.grant_reservations() == []
    assert [item.seq.request_id for item in run(sched).work] == ["first"]


def test_a_long_prompt_that_came_earlier_does_not_stop_the_ones_that_are_decoding():
    sched = scheduler(64, budget=8)
    early = sched.add(request("early", 60), 0.0)
    late = sched.add_reservation(request("late", 6, first=1000), 0.0)
    sched.config = SchedulerConfig(8, 8, 64)
    sched.waiting.remove(early)  # it waits for room while the later one is served
    assert [seq.request_id for seq in sched.grant_reservations()] == ["late"]
    sched.activate("late", [99])
    sched.waiting.push(early)
    for _ in range(5):
        before = late.num_output
        plan = run(sched)
        assert late.num_output == before + 1
        assert {item.seq.request_id for item in plan.work} == {"early", "late"}
        assert plan.work[0].seq is late and plan.num_single >= 1
    assert early.num_computed > 0


def test_prompt_logprobs_of_a_preempted_prompt_start_again():
    sched = scheduler(8, budget=4)
    seq = sched.add(request("a", 12), 0.0)
    run(sched)
    seq.prompt_logprobs.append(object())  # type: ignore[arg-type]
    sched.preempt_group((seq,))
    assert seq.prompt_logprobs == []
