"""BlockPool: no block lost, none shared without a reference, the least recently used goes first."""

import hypothesis.strategies as st
import pytest
from hypothesis import settings
from hypothesis.stateful import Bundle, RuleBasedStateMachine, consumes, invariant, rule

from kvrelay.hashing import block_hashes
from kvrelay.kvcache.block_pool import BlockCounts, BlockPool
from kvrelay.kvcache.events import EventLog
from kvrelay.types import BlockHash, BlockId


def allocate(pool: BlockPool, count: int) -> list[BlockId]:
    blocks = pool.allocate(count)
    assert blocks is not None
    return blocks


def cached_chain(pool: BlockPool, tokens: list[int]) -> list[BlockId]:
    """Blocks of a finished sequence of these tokens (block size 2), cached and released."""
    hashes = block_hashes(tokens, 2)
    blocks = allocate(pool, len(hashes))
    for block, digest in zip(blocks, hashes, strict=True):
        pool.cache(block, digest)
    pool.release(blocks)
    return blocks


def test_too_many_blocks_is_a_value_and_changes_nothing():
    pool = BlockPool(3)
    allocate(pool, 2)
    assert pool.allocate(2) is None
    assert pool.counts() == BlockCounts(free=1, used=2, cached=0)


def test_a_released_full_block_is_found_again_by_its_hash():
    pool = BlockPool(4)
    blocks = cached_chain(pool, [1, 2, 3, 4])
    assert pool.match(block_hashes([1, 2, 3, 4, 5, 6], 2)) == blocks
    assert pool.match(block_hashes([9, 2, 3, 4], 2)) == []
    assert pool.counts().cached == 2


def test_free_blocks_go_before_cached_and_a_tail_before_its_head():
    pool = BlockPool(4)
    head, tail = cached_chain(pool, [1, 2, 3, 4])
    allocate(pool, 2)
    assert allocate(pool, 1) == [tail]
    assert pool.match(block_hashes([1, 2, 3, 4], 2)) == [head]


def test_a_held_block_is_never_evicted():
    pool = BlockPool(3)
    blocks = cached_chain(pool, [1, 2, 3, 4])
    pool.acquire(blocks)
    assert pool.allocate(2) is None
    assert pool.match(block_hashes([1, 2, 3, 4], 2)) == blocks


def test_every_reuse_raises_the_generation():
    pool = BlockPool(1)
    [block] = allocate(pool, 1)
    first = pool.generation(block)
    pool.release([block])
    allocate(pool, 1)
    assert pool.generation(block) == first + 1


def test_a_second_copy_of_the_same_content_stays_unnamed_and_becomes_free():
    pool = BlockPool(2)
    digest = block_hashes([1, 2], 2)[0]
    first, second = allocate(pool, 1), allocate(pool, 1)
    pool.cache(first[0], digest)
    pool.cache(second[0], digest)
    pool.release(second)
    assert pool.counts() == BlockCounts(free=1, used=1, cached=0)
    pool.check()


def test_without_prefix_caching_nothing_is_cached():
    pool = BlockPool(2, prefix_caching=False)
    cached_chain(pool, [1, 2])
    assert pool.counts().cached == 0


def test_releasing_too_often_is_our_bug():
    pool = BlockPool(1)
    blocks = allocate(pool, 1)
    pool.release(blocks)
    with pytest.raises(AssertionError):
        pool.release(blocks)


def test_the_ledger_notices_a_block_that_is_in_two_states():
    pool = BlockPool(2)
    [block] = allocate(pool, 1)
    pool._free.append(block)
    with pytest.raises(AssertionError):
        pool.check()


class Pool(RuleBasedStateMachine):
    """Random life of a pool; events must add up to the index, and counts to the total."""

    held = Bundle("held")

    def __init__(self) -> None:
        super().__init__()
        self.pool, self.log = BlockPool(12), EventLog()
        self.mirror: set[bytes] = set()
        self.holders = 0

    @rule(target=held, tokens=st.lists(st.integers(0, 2), min_size=2, max_size=10))
    def start(self, tokens):
        hashes = block_hashes(tokens, 2)
        hit = self.pool.match(hashes)
        self.pool.acquire(hit)
        fresh = self.pool.allocate(len(hashes) - len(hit))
        if fresh is None:
            self.pool.release(hit)
            return []
        for block, digest in zip(fresh, hashes[len(hit) :], strict=True):
            self.pool.cache(block, digest)
        return hit + fresh

    @rule(blocks=consumes(held))
    def end(self, blocks):
        self.pool.release(blocks)

    @rule()
    def publish(self):
        event = self.log.drain(self.pool)
        if event is not None:
            assert not set(event.stored) & set(event.removed)
            assert set(event.removed) <= self.mirror
            self.mirror = (self.mirror - set(event.removed)) | set(event.stored)
        assert self.mirror == set(self.pool.cached_hashes()) == set(self.log.snapshot().hashes)

    @rule()
    def reset(self):
        self.pool.reset_cache()

    @invariant()
    def adds_up(self):
        self.pool.check()
        counts = self.pool.counts()
        assert counts.free + counts.used + counts.cached == 12
        for digest in self.pool.cached_hashes():
            assert self.pool.match([BlockHash(digest)])


TestPool = Pool.TestCase
TestPool.settings = settings(max_examples=60, stateful_step_count=40, deadline=None)
