"""Groups in the scheduler: room that is owed to them, their order in the batch, and what their tenants pay."""

import pytest

from kvrelay.engine.scheduling.fair_share import FairShare, QueueRules
from kvrelay.engine.scheduling.groups import Groups, merge_group
from kvrelay.engine.scheduling.scheduler import Scheduler, SchedulerConfig
from kvrelay.engine.scheduling.sequence import State
from kvrelay.kvcache.pool.block_pool import BlockPool
from kvrelay.plane.messages import Group, Sampling, SequenceRequest
from kvrelay.types import FinishReason

pytestmark = pytest.mark.pure


BLOCK = 4


class Run:
    """A scheduler whose steps are computed at once."""

    def __init__(self, *, blocks=64, running=8, budget=32) -> None:
        limits = SchedulerConfig(budget, running, 64)
        self.sched = Scheduler(
            BlockPool(blocks, block_size=BLOCK), limits, fair_share=FairShare(QueueRules(output_weight=3.0))
        )
        self.groups = Groups(self.sched.queues, self.sched.blocks, self.sched.pool, self.sched.finish, lambda seq: None)
        self.count = 0

    def request(self, group: Group | None = None, *, tokens=5, max_tokens=8, **facts) -> SequenceRequest:
        self.count += 1
        ids = [1000 * self.count + index for index in range(tokens)]
        return SequenceRequest(
            request_id=f"r{self.count}",
            token_ids=ids,
            num_prompt_tokens=tokens,
            block_hashes=[],
            tenant="a",
            sampling=Sampling(max_tokens=max_tokens),
            group=group,
            **facts,
        )

    def step(self) -> None:
        plan = self.sched.schedule()
        seqs = [item.seq for item in plan.work if item.samples]
        for item in plan.work:
            self.sched.advance(item)
        for _, seq in self.groups.rows_of(seqs):
            seq.token_ids.append(99)
            if seq.num_output >= seq.max_output:
                self.sched.finish(seq, FinishReason.LENGTH)
        self.groups.settle([seq for seq in seqs if seq.group is not None and seq is seq.group.leader])
        self.sched.blocks.copied()
        self.sched.check()


def test_members_that_were_continued_from_another_worker_run_while_others_are_queued():
    run = Run(budget=6)
    run.sched.add(run.request(Group(seeds=(1, 2), emitted=[[7, 8, 9], [7, 8, 9]])), 0.0)
    run.step()
    assert [seq.num_uncomputed for seq in run.sched.running] == [3, 3]
    run.sched.add(run.request(), 0.0)
    run.step()
    assert all(seq.num_uncomputed == 1 for seq in run.sched.running)


def test_a_group_is_not_starved_by_single_sequences_in_the_other_queue():
    """As many singles as there are seats but one, and a new one whenever one ends: all seats of the group have to be
    left.
    """
    run = Run(running=4)
    for _ in range(3):
        run.sched.add_reservation(run.request(), 0.0)
        for seq in run.sched.grant_reservations():
            run.sched.activate(seq.request_id, [99])
        run.step()
    leader = run.sched.add(run.request(Group(seeds=(1, 2, 3))), 0.0)
    for _ in range(20):
        run.sched.add_reservation(run.request(), 0.0)
        for seq in run.sched.grant_reservations():
            run.sched.activate(seq.request_id, [99])
        run.step()
        if leader.has_begun:
            break
    assert leader.has_begun and leader.state is State.FINISHED  # it has parted


def test_what_a_group_said_is_not_charged_again_when_it_comes_back():
    run = Run()
    run.sched.add(run.request(Group(seeds=(1, 2))), 0.0)
    for _ in range(4):
        run.step()
    members = list(run.sched.running)
    leader, _ = merge_group(members[0].group, run.sched.queues, run.sched.blocks)
    run.sched.waiting.push(leader)
    run.sched.pool.reset_cache()
    paid = run.sched.fair_share.counter("a")
    assert paid == 5 + 2 * 3 * 3
    run.step()  # the prompt
    run.step()  # what both had said
    assert [seq.num_computed for seq in run.sched.running] == [9, 9]
    assert run.sched.fair_share.counter("a") == paid + 2 * 3 * 1
