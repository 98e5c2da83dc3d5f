"""News of a worker's cache: what is stored in any tier, and what has left the pool for a lower one."""

from kvrelay.kvcache.changes import CacheChange
from kvrelay.kvcache.events import EventLog

A, B, C = (bytes([i]) * 16 for i in range(3))


class Pool:
    def __init__(self):
        self.changes = []

    def drain_changes(self):
        return self.changes.pop(0) if self.changes else None


def change(stored=(), removed=()):
    return CacheChange(tuple(stored), tuple(removed))


def drained(log, pool, pool_change=None, below=()):
    if pool_change is not None:
        pool.changes.append(pool_change)
    return log.drain(pool, below)


def test_a_block_that_leaves_the_pool_for_the_host_tier_stays_stored_and_is_told_lowered():
    log, pool = EventLog(), Pool()
    assert drained(log, pool, change(stored=[A, B])).stored == [A, B]
    assert drained(log, pool, below=[change(stored=[A])]) is None
    event = drained(log, pool, change(removed=[A, B]))
    assert (event.seq, event.removed, event.lowered) == (2, [B], [A])
    assert (log.snapshot().hashes, log.snapshot().lowered) == ([A], [A])


def test_a_block_that_comes_up_again_is_raised_and_one_that_goes_below_is_removed():
    log, pool = EventLog(), Pool()
    event = drained(log, pool, below=[change(stored=[A, C])])
    assert (event.stored, event.lowered) == ([A, C], [A, C])
    event = drained(log, pool, change(stored=[A]), below=[change(removed=[C])])
    assert (event.stored, event.raised, event.removed) == ([], [A], [C])


def test_what_came_and_went_between_two_drains_is_no_news():
    log, pool = EventLog(), Pool()
    assert drained(log, pool, below=[change(stored=[A]), change(removed=[A])]) is None
    assert log.snapshot().seq == 0
