"""A slow sweep over the cached blocks of a pool: content that differs from what it was is evicted. Pure.

A cached block that nothing references does not change. Its checksum is noted when the sweep first meets it, and
compared whenever the sweep comes round. Changes before the first time are not found, nor in copies in lower tiers.
"""

import logging
from array import array
from collections.abc import Callable, Sequence

from kvrelay.kvcache.pool.block_pool import BlockPool
from kvrelay.plane.reports import TierLoad

logger = logging.getLogger(__name__)

PERIOD_S = 1 / 16
PERIOD_BYTES = 512 << 10  # or one block: at most 8 MiB/s, 1 GiB in two minutes of steps


class ResidentAudit:
    """Sweeps one pool. `sums`: the checksums of blocks as they are now. `num_corrupt`: blocks that had changed."""

    def __init__(self, pool: BlockPool, block_bytes: int, sums: Callable[[Sequence[int]], Sequence[int]]) -> None:
        self.num_corrupt = 0
        self._pool, self._block_bytes, self._block_sums = pool, block_bytes, sums
        self._most = max(1, PERIOD_BYTES // block_bytes)
        self._known = array("Q", [0]) * pool.num_blocks
        self._generations = array("I", [0]) * pool.num_blocks  # when the sums were noted; 0: not yet
        self._next, self._due_s = 0, 0.0

    def sweep(self, now_s: float) -> None:
        """Check the next blocks, if a period has passed. Call it while nothing computes."""
        if now_s < self._due_s:
            return
        self._due_s = now_s + PERIOD_S
        blocks, self._next = self._pool.idle_blocks(self._next, self._most)
        sums = self._block_sums(blocks)
        for block, found in zip(blocks, sums, strict=True):
            generation = self._pool.generation(block)
            if self._generations[block] != generation:
                self._known[block], self._generations[block] = found, generation
            elif self._known[block] != found and (num_dropped := self._pool.discard(block)):
                self.num_corrupt += 1
                logger.error("block %d has changed in memory; it was evicted, with %d after it", block, num_dropped - 1)

    def tier_load(self) -> TierLoad:
        """The pool as if it were a tier: to be shown once a block of it has changed."""
        size = self._block_bytes
        return TierLoad(
            tier="pool",
            num_blocks=(num_cached := self._pool.counts().cached),
            num_bytes=num_cached * size,
            capacity_bytes=self._pool.num_blocks * size,
            corrupt_blocks=self.num_corrupt,
        )
