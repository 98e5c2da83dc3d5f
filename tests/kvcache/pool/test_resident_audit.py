"""The sweep over cached blocks: what has changed since it was first seen is evicted, with all that continues it."""

from array import array

import pytest

from kvrelay.hashing import HashChain
from kvrelay.kvcache.pool.block_pool import BlockPool
from kvrelay.kvcache.pool.resident_audit import PERIOD_BYTES, PERIOD_S, ResidentAudit

pytestmark = pytest.mark.pure

SIZE, BLOCKS = 4, 8


class Swept:
    """A pool, the content of its blocks as numbers, and a sweep over all of them at a time, or over `most`."""

    def __init__(self, most: int = BLOCKS) -> None:
        self.pool = BlockPool(BLOCKS, block_size=SIZE)
        self.content = list(range(100, 100 + BLOCKS))
        self.audit = ResidentAudit(self.pool, PERIOD_BYTES // most, lambda blocks: [self.content[b] for b in blocks])
        self.now_s = 0.0

    def cached(self, first: int, count: int, *, is_held: bool = False) -> array:
        """Blocks of a finished sequence, or one that still runs."""
        tokens = list(range(first, first + SIZE * count))
        chain = HashChain.of(tokens, SIZE)
        blocks = self.pool.allocate(count)
        self.pool.insert(chain, blocks, 0, count)
        if not is_held:
            self.pool.release(blocks)
        return blocks

    def sweep(self) -> None:
        self.now_s += PERIOD_S
        self.audit.sweep(self.now_s)
        self.pool.check()


def test_unchanged_blocks_stay():
    swept = Swept()
    swept.cached(0, 5)
    for _ in range(5):
        swept.sweep()
    assert (swept.audit.num_corrupt, swept.pool.counts().cached) == (0, 5)


def test_a_changed_block_is_evicted_with_those_that_continue_it(caplog):
    swept = Swept()
    blocks = swept.cached(0, 5)
    swept.sweep()
    swept.content[blocks[2]] ^= 1
    swept.sweep()
    assert (swept.audit.num_corrupt, swept.pool.counts().cached) == (1, 2)
    assert f"block {blocks[2]} has changed" in caplog.text


def test_a_held_block_is_left_alone_until_it_is_released():
    swept = Swept()
    blocks = swept.cached(0, 3, is_held=True)
    swept.cached(1000, 1)
    swept.sweep()
    swept.content[blocks[0]] ^= 1  # as its sequence may
    swept.sweep()
    swept.pool.release(blocks)
    swept.sweep()
    swept.sweep()
    assert (swept.audit.num_corrupt, swept.pool.counts().cached) == (0, 4)


def test_a_block_that_holds_another_prompt_is_not_compared_with_the_last_one():
    swept = Swept()
    blocks = swept.cached(0, BLOCKS)
    swept.sweep()
    swept.pool.reset_cache()
    swept.cached(1000, BLOCKS)
    swept.content = [value + 50 for value in swept.content]
    swept.sweep()
    swept.sweep()
    assert (swept.audit.num_corrupt, swept.pool.counts().cached) == (0, len(blocks))


def test_a_sweep_takes_a_few_blocks_each_period_and_comes_round():
    swept = Swept(most=3)
    blocks = swept.cached(0, 7)
    for _ in range(3):
        swept.sweep()
    swept.content[blocks[6]] ^= 1
    for _ in range(3):
        swept.sweep()
    assert swept.audit.num_corrupt == 1


def test_nothing_is_done_before_a_period_has_passed():
    swept = Swept()
    (block,) = swept.cached(0, 1)
    swept.sweep()
    swept.content[block] ^= 1
    swept.audit.sweep(swept.now_s + PERIOD_S / 2)
    assert swept.audit.num_corrupt == 0
    swept.sweep()
    load = swept.audit.tier_load()
    assert (load.tier, load.corrupt_blocks) == ("pool", 1)
