"""Sequence-numbered news of a worker's prefix cache. Pure."""

from kvrelay.kvcache.block_pool import BlockPool
from kvrelay.types import BlockHash
from kvrelay.wire import KvEvents, KvSnapshot


class EventLog:
    """Numbers the changes of one pool. A subscriber starts from `snapshot` and applies what follows."""

    def __init__(self) -> None:
        self._seq = 0
        self._hashes: set[BlockHash] = set()

    def drain(self, pool: BlockPool) -> KvEvents | None:
        """The next event, or None when nothing changed."""
        change = pool.drain_changes()
        if change is None:
            return None
        self._seq += 1
        self._hashes.difference_update(change.removed)
        self._hashes.update(change.stored)
        return KvEvents(seq=self._seq, stored=list(change.stored), removed=list(change.removed))

    def snapshot(self) -> KvSnapshot:
        """All that the events so far add up to."""
        return KvSnapshot(seq=self._seq, hashes=list(self._hashes))
