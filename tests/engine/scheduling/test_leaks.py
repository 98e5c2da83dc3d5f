"""A block that a sequence does not give back is noticed by the next idle step, not by a test's timeout."""

import pytest

from kvrelay.engine.scheduling.blocks import SequenceBlocks
from kvrelay.engine.scheduling.scheduler import Scheduler, SchedulerConfig
from kvrelay.kvcache.pool.block_pool import BlockPool
from kvrelay.plane.messages import Sampling, SequenceRequest
from kvrelay.types import FinishReason

pytestmark = pytest.mark.pure


def served(num_sequences: int) -> Scheduler:
    """A scheduler that has served so many sequences, and checks each time that it is idle."""
    sched = Scheduler(BlockPool(8, block_size=4), SchedulerConfig(16, 4, 8))
    for number in range(num_sequences):
        request = SequenceRequest(
            request_id=str(number),
            token_ids=list(range(10)),
            num_prompt_tokens=10,
            block_hashes=[],
            sampling=Sampling(max_tokens=8),
        )
        seq = sched.add(request, 0.0)
        sched.advance(*sched.schedule().work)
        sched.finish(seq, FinishReason.STOP)
        sched.check_idle()
    return sched


def test_a_scheduler_that_gives_all_blocks_back_is_idle():
    assert served(9).pool.counts().used == 0


def test_a_block_that_is_not_given_back_is_an_assertion_at_once(monkeypatch):
    def forget_one(self, seq):
        self._pool.release(seq.blocks[:-1])
        seq.blocks = seq.blocks[:0]

    monkeypatch.setattr(SequenceBlocks, "_release", forget_one)
    with pytest.raises(AssertionError, match="1 blocks leaked"):
        served(1)


def test_blocks_of_a_probe_are_set_aside_and_no_leak():
    sched = served(1)
    blocks = sched.blocks.take_probe_blocks(3)
    sched.check_idle()
    sched.blocks.return_probe_blocks(blocks)
    sched.check_idle()
