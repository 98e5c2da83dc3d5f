"""News of a worker's cache: what is stored in any tier, and what has left the pool for a lower one."""

import pytest

from kvrelay.hashing import HashChain, pack_tokens
from kvrelay.kvcache.index.changes import CacheChange, EventLog, parts_of
from kvrelay.kvcache.pool.block_pool import BlockPool
from kvrelay.plane.reports import BELOW_POOL, CHANGING, IN_POOL, NOWHERE

pytestmark = pytest.mark.pure


A, B, C = (bytes([i]) * 16 for i in range(3))


def change(stored=(), removed=()):
    return CacheChange(tuple(stored), tuple(removed))


def test_a_block_that_leaves_the_pool_for_the_host_tier_stays_stored_and_is_told_lowered():
    log = EventLog()
    assert log.number(change(stored=[A, B])).stored == [A, B]
    assert log.number(None, [change(stored=[A])]) is None
    event = log.number(change(removed=[A, B]))
    assert (event.seq, event.removed, event.lowered) == (2, [B], [A])
    assert (log.snapshot().hashes, log.snapshot().lowered) == ([A], [A])


def test_a_block_that_comes_up_again_is_raised_and_one_that_goes_below_is_removed():
    log = EventLog()
    event = log.number(None, [change(stored=[A, C])])
    assert (event.stored, event.lowered) == ([A, C], [A, C])
    event = log.number(change(stored=[A]), [change(removed=[C])])
    assert (event.stored, event.raised, event.removed) == ([], [A], [C])


def test_what_came_and_went_between_two_drains_is_no_news():
    log = EventLog()
    assert log.number(None, [change(stored=[A]), change(removed=[A])]) is None
    assert log.snapshot().seq == 0


def test_an_audit_says_what_the_caches_have_not_what_was_told():
    tokens = list(range(12))
    chain, pool, log = HashChain.of(tokens, 4), BlockPool(8, block_size=4), EventLog()
    blocks = pool.allocate(3)
    pool.insert(chain, blocks, 0, 3, pack_tokens(tokens, 0, 12))
    pool.release(blocks)
    first, second, third = chain.hashes()

    def audit(hashes, in_host=()):
        return log.audit(hashes, pool.cached_hashes(), in_host, is_changing=pool.has_changes)

    assert audit([first]) == (0, [CHANGING])  # the event is not drained yet
    log.number(pool.drain_changes())
    assert audit([first, A, third, B], {A, third}) == (1, [IN_POOL, BELOW_POOL, IN_POOL, NOWHERE])
    pool.reset_cache()
    assert audit([first, second, A]) == (1, [CHANGING, CHANGING, NOWHERE])
    pool.drain_changes()  # lost on the way to the log: the answer is the truth all the same
    assert audit([first, second]) == (1, [NOWHERE, NOWHERE])


@pytest.mark.parametrize("most", [1, 2, 3, 4, 9])
@pytest.mark.parametrize("num_below", [0, 1, 3])
def test_a_snapshot_s_parts_add_up_to_it(most, num_below):
    log = EventLog()
    log.number(change(stored=[A]), [change(stored=[bytes([9 + i]) * 16 for i in range(num_below)])])
    snapshot = log.snapshot()
    parts = list(parts_of(snapshot, most))
    assert [one for part in parts for one in part.hashes] == snapshot.hashes
    assert [one for part in parts for one in part.lowered] == snapshot.lowered
    assert all(set(part.lowered) <= set(part.hashes) and len(part.hashes) <= most for part in parts)
    assert [part.part for part in parts] == list(range(len(parts)))
    assert [part.is_last for part in parts] == [False] * (len(parts) - 1) + [True]
    assert {part.seq for part in parts} == {1}


def test_a_snapshot_of_nothing_is_one_part():
    assert list(parts_of(EventLog().snapshot())) == [EventLog().snapshot()]
