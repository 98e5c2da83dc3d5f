"""The scheduler's parts, each alone."""

import pytest

from kvrelay.engine.scheduling.admit import Admission
from kvrelay.engine.scheduling.blocks import Headroom, OutputLengths, SequenceBlocks
from kvrelay.engine.scheduling.fair_share import FairShare, QueueRules
from kvrelay.engine.scheduling.preempt import MeasuredSpeeds
from kvrelay.engine.scheduling.sequence import Sequence, State
from kvrelay.engine.scheduling.waiting_queue import Queues
from kvrelay.kvcache.pool.block_pool import BlockPool
from kvrelay.plane.messages import Sampling, SequenceRequest

pytestmark = pytest.mark.pure

BLOCK = 4


def sequence(name: str, num_tokens: int, arrival: int = 1) -> Sequence:
    request = SequenceRequest(
        request_id=name,
        token_ids=list(range(num_tokens)),
        num_prompt_tokens=num_tokens,
        block_hashes=[],
        sampling=Sampling(max_tokens=8),
    )
    return Sequence(request, BLOCK, arrival)


@pytest.fixture
def queues():
    return Queues(FairShare(QueueRules()))


@pytest.fixture
def pool():
    return BlockPool(8, block_size=BLOCK)


def test_a_sequence_is_in_one_queue_and_leaves_it(queues):
    seq = sequence("a", 5)
    queues.sequences["a"] = seq
    queues.waiting.push(seq)
    queues.check()
    assert queues.num_queued == 1 and queues.has_demand and queues.queued_tokens == 5
    queues.remove_parked(seq)
    with pytest.raises(AssertionError, match="no queue"):
        queues.check()


def test_swapped_and_running_sequences_are_in_order_of_arrival(queues):
    for arrival in (2, 3, 1):
        queues.join_batch(sequence(str(arrival), 5, arrival))
        queues.push_swapped(sequence(str(arrival), 5, arrival))
    assert [seq.arrival for seq in queues.running] == [seq.arrival for seq in queues.swapped] == [1, 2, 3]


def test_admission_leaves_headroom_for_what_runs(queues, pool):
    headroom, speeds = Headroom(0.0, BLOCK), MeasuredSpeeds()
    own = SequenceBlocks(pool, queues, headroom.lengths)
    admission = Admission(queues, pool, own, headroom, speeds, None, token_budget=8, max_running=8)
    for arrival in range(4):
        running = sequence(str(arrival), 1, arrival)
        running.blocks = pool.allocate(1)
        queues.join_batch(running)
    seq = sequence("new", 3)
    assert not admission._give(seq, 1, leave_one=True) and not len(
        seq.blocks
    )  # 4 free: 1 reserved, 4 for those that run
    queues.running.pop()
    assert admission._give(seq, 0, leave_one=True) and len(seq.blocks) == 1
    assert admission.query_tokens == 3 and admission.hit_tokens == 0


def test_a_shared_block_is_copied_before_it_is_written(queues, pool):
    copies, seq = SequenceBlocks(pool, queues, OutputLengths()), sequence("a", 6)
    seq.blocks, seq.num_computed = pool.allocate(2), 6
    shared = seq.blocks[1]
    assert copies.try_own(seq) and not copies.copies  # its own already
    pool.acquire((shared,))
    assert copies.try_own(seq)
    [copy] = copies.copies
    assert (copy.source, copy.target) == (shared, seq.blocks[1])
    assert pool.num_holders(shared) == 2  # the other sequence, and the copy that is to be made
    copies.copied()
    assert pool.num_holders(shared) == 1 and not copies.copies


def test_a_probe_gets_no_blocks_while_a_sequence_is_queued(queues, pool):
    aside = SequenceBlocks(pool, queues, OutputLengths())
    queues.waiting.push(sequence("a", 5))
    assert aside.take_probe_blocks(3) == [] and not aside.aside()
    queues.waiting.remove(next(iter(queues.waiting)))
    assert len(aside.take_probe_blocks(3)) == 3 and aside.aside()


def test_kept_blocks_stay_taken_until_they_are_unquarantined(queues, pool):
    aside, blocks = SequenceBlocks(pool, queues, OutputLengths()), pool.allocate(2)
    key = aside.keep(blocks)
    pool.release(blocks)
    assert pool.counts().used == 2 and set(aside.aside()) == set(blocks)
    aside.unquarantine(key)
    assert pool.counts().used == 0 and not aside.aside()


def test_states_change_only_as_they_may():
    seq = sequence("a", 5)
    with pytest.raises(AssertionError):
        seq.move_to(State.SWAPPED)
