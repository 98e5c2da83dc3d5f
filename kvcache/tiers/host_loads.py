"""Blocks on their way from the host tier up to the pool. Engine's thread; an I/O thread copies the bytes. Pure."""

import logging
from collections.abc import Sequence

from kvrelay.kvcache.memory.jobs import IoJob, Threads, Urgency
from kvrelay.kvcache.memory.loads import Load
from kvrelay.kvcache.tiers.host_tier import HostTier
from kvrelay.kvcache.tiers.rules import TierStats
from kvrelay.types import BlockHash, BlockId

logger = logging.getLogger(__name__)


class HostLoads:
    """Loads sequences' blocks layer by layer, from rows that are held and verified first."""

    def __init__(self, host: HostTier, threads: Threads, stats: TierStats, *, is_checked: bool) -> None:
        self._host, self._threads, self._stats, self._is_checked = host, threads, stats, is_checked
        self._loads: set[Load] = set()

    def load(self, hashes: Sequence[BlockHash], blocks: Sequence[BlockId]) -> Load:
        """Load these blocks, all of which are in the host tier, into `blocks`, which the caller holds meanwhile."""
        rows = self._host.hold(hashes)
        load = Load(hashes, rows, blocks)
        self._loads.add(load)
        expected = self._host.checksums(rows)
        slab, clock, is_checked = self._host.slab, self._host.now_s, self._is_checked

        def work() -> float:
            began_s = clock()
            try:
                found = slab.checksums(rows) if is_checked else expected
                is_good = [one == other for one, other in zip(found, expected, strict=True)]
                load.verified([digest for digest, good in zip(hashes, is_good, strict=True) if not good])
                for layer in range(slab.num_layers if all(is_good) else 0):
                    slab.load(rows, blocks, range(layer, layer + 1))
                    load.arrived(layer + 1)
            finally:
                load.over()
            return clock() - began_s

        job = IoJob(Urgency.LOAD, len(blocks) * slab.block_bytes, work, lambda result: self._loaded(load, result))
        if not self._threads.put(job):  # the worker is shutting down
            load.over()
            self._loaded(load, None)
        return load

    def _loaded(self, load: Load, result: object) -> None:
        load.over()
        self._loads.discard(load)
        if load.corrupt:
            logger.error("%d blocks in the host tier failed their checksums; they are recomputed", len(load.corrupt))
            self._stats.corrupt += len(load.corrupt)
        if isinstance(result, float) and not load.corrupt:
            self._stats.loaded += len(load.blocks)
            self._stats.load_s += result
        else:
            self.discard(load)
        self._host.unhold(load.rows)

    def discard(self, load: Load) -> None:
        """Forget the blocks that this load, which is over, did not bring, so that no other request tries them."""
        missed = set(load.corrupt or load.hashes)
        rows = zip(load.hashes, load.rows, strict=True)
        self._host.forget([digest for digest, row in rows if digest in missed and self._host.row(digest) == row])
