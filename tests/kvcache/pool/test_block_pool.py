"""BlockPool: no block lost, none shared without a reference, leaves go first, by priority and last use."""

from array import array

import pytest

from kvrelay.hashing import NAMESPACE_END, HashChain, pack_tokens, root_hash, tenant_name
from kvrelay.kvcache.eviction.policies import EntryUsage, Lru
from kvrelay.kvcache.pool.block_pool import BlockCounts, BlockPool

pytestmark = pytest.mark.pure


SIZE = 4  # tokens of a block


def pool_of(blocks: int, **options) -> BlockPool:
    return BlockPool(blocks, block_size=SIZE, **options)


def chain_of(tokens: list[int], salt: str = "") -> HashChain:
    return HashChain.of(tokens, SIZE, salt)


def prompt(first: int, blocks: int) -> list[int]:
    """Tokens of so many blocks, unlike those of another `first`."""
    return list(range(1000 * first, 1000 * first + SIZE * blocks))


def allocate(pool: BlockPool, count: int) -> array:
    blocks = pool.allocate(count)
    assert blocks is not None
    return blocks


def run(pool: BlockPool, tokens: list[int], *, salt: str = "", priority: int = 0) -> array:
    """A sequence computes these tokens from what is cached; its blocks, held."""
    chain = chain_of(tokens, salt)
    match = pool.match(chain)
    pool.acquire(match.blocks)
    blocks = match.blocks + allocate(pool, len(chain) - len(match))
    pool.use(match, priority)
    rest = pack_tokens(tokens, len(match) * SIZE, len(chain) * SIZE)
    pool.insert(chain, blocks, len(match), len(chain), rest, priority=priority)
    return blocks


def cached_chain(pool: BlockPool, tokens: list[int], **options) -> array:
    """Blocks of a finished sequence of these tokens."""
    blocks = run(pool, tokens, **options)
    pool.release(blocks)
    pool.check()
    return blocks


def found(pool: BlockPool, tokens: list[int], salt: str = "") -> array:
    return pool.match(chain_of(tokens, salt)).blocks


# ---- states


def test_too_many_blocks_is_a_value_and_changes_nothing():
    pool = pool_of(3)
    allocate(pool, 2)
    assert pool.allocate(2) is None
    assert pool.counts() == BlockCounts(free=1, used=2, cached=0)


def test_a_released_full_block_is_found_again_by_its_hash():
    pool = pool_of(4)
    blocks = cached_chain(pool, prompt(1, 2))
    assert found(pool, prompt(1, 3)) == blocks
    assert not found(pool, prompt(2, 2))
    assert pool.counts().cached == 2


def test_free_blocks_go_before_cached_and_a_tail_before_its_head():
    pool = pool_of(4)
    head, tail = cached_chain(pool, prompt(1, 2))
    allocate(pool, 2)
    assert list(allocate(pool, 1)) == [tail]
    assert list(found(pool, prompt(1, 2))) == [head]


def test_a_held_block_is_never_evicted():
    pool = pool_of(3)
    blocks = cached_chain(pool, prompt(1, 2))
    pool.acquire(blocks)
    assert pool.allocate(2) is None
    assert found(pool, prompt(1, 2)) == blocks


def test_the_beginning_of_a_chain_may_go_once_a_later_block_that_alone_was_held_is_released():
    """A tier that copies a block holds just that one; meanwhile another prompt branches off before it."""
    pool = pool_of(8)
    blocks = cached_chain(pool, prompt(0, 4))
    pool.acquire(blocks[2:3])
    other = run(pool, [*prompt(0, 1), *prompt(50, 1)])
    pool.check()
    pool.release(other)
    pool.release(blocks[2:3])
    pool.check()
    assert pool.num_available == 8


def test_every_reuse_raises_the_generation():
    pool = pool_of(1)
    [block] = allocate(pool, 1)
    first = pool.generation(block)
    pool.release([block])
    allocate(pool, 1)
    assert pool.generation(block) == first + 1


def test_without_prefix_caching_nothing_is_cached():
    pool = pool_of(2, prefix_caching=False)
    cached_chain(pool, prompt(1, 1))
    assert pool.counts().cached == 0


@pytest.mark.parametrize("count", [1, 40])
def test_releasing_too_often_is_our_bug(count):
    pool = pool_of(count)
    blocks = allocate(pool, count)
    pool.release(blocks)
    with pytest.raises(AssertionError):
        pool.release(blocks)


def test_a_free_block_cannot_be_acquired():
    with pytest.raises(AssertionError):
        pool_of(2).acquire([0])


@pytest.mark.parametrize("count", [3, 100])
def test_many_blocks_fare_as_few_do(count):
    pool = pool_of(count + 1)
    blocks = cached_chain(pool, prompt(1, count))
    again = run(pool, prompt(1, count))
    assert again == blocks and pool.counts() == BlockCounts(free=1, used=count, cached=0)
    assert all(pool.generation(block) == 1 for block in blocks)
    pool.release(again)
    assert pool.counts() == BlockCounts(free=1, used=0, cached=count)
    pool.check()


# ---- copies of the same content


def test_a_second_copy_of_the_same_content_stays_unnamed_and_becomes_free():
    pool, tokens = pool_of(2), prompt(1, 1)
    first, second = allocate(pool, 1), allocate(pool, 1)
    for blocks in (first, second):
        pool.insert(chain_of(tokens), blocks, 0, 1, pack_tokens(tokens))
    pool.release(second)
    assert pool.counts() == BlockCounts(free=1, used=1, cached=0)
    pool.check()


def test_what_follows_a_second_copy_is_named_after_the_first_which_stays_as_long():
    pool, tokens = pool_of(6), prompt(1, 3)
    first = cached_chain(pool, tokens[: 2 * SIZE])
    second = allocate(pool, 3)  # computed at the same time: not matched
    pool.insert(chain_of(tokens), second, 0, 3, pack_tokens(tokens))
    assert found(pool, tokens) == array("i", [*first, second[2]])
    assert pool.num_available == 1  # `first` stands before a held block
    pool.release(second)
    assert pool.num_available == 6
    pool.check()


def test_a_held_copy_takes_the_name_when_the_named_one_has_gone():
    pool, tokens = pool_of(5), prompt(1, 2)
    named = cached_chain(pool, tokens)
    copy = allocate(pool, 3)  # the third holds what comes next
    pool.release(allocate(pool, 2))  # pushes the named ones out
    assert not found(pool, tokens)
    longer = [*tokens, *range(SIZE)]
    pool.insert(chain_of(longer), copy, 2, 3, pack_tokens(longer, 2 * SIZE))
    assert found(pool, longer) == copy and named != copy[:2]
    pool.check()


# ---- copy on write


def test_a_block_held_alone_is_written_in_place():
    pool = pool_of(2)
    [block] = allocate(pool, 1)
    assert pool.is_own(block) and pool.writable(block) == block


def test_who_writes_into_a_shared_block_gets_one_for_itself():
    pool = pool_of(2)
    [block] = allocate(pool, 1)
    pool.acquire([block])
    assert not pool.is_own(block)
    mine = pool.writable(block)
    assert mine is not None and mine != block
    assert (pool.num_holders(block), pool.num_holders(mine)) == (1, 1)
    assert pool.is_own(block)  # the other has it alone now


def test_a_named_block_is_not_written_even_by_its_only_holder():
    pool = pool_of(2)
    [block] = run(pool, prompt(1, 1))
    assert pool.writable(block) not in (None, block)
    assert pool.counts() == BlockCounts(free=0, used=1, cached=1)


def test_no_room_for_a_copy_changes_nothing():
    pool = pool_of(1)
    [block] = allocate(pool, 1)
    pool.acquire([block])
    assert pool.writable(block) is None and pool.num_holders(block) == 2


# ---- what goes first


def test_the_least_recently_used_goes_first_and_use_counts_until_release():
    pool = pool_of(3)
    old = run(pool, prompt(1, 1))
    pool.tick(1.0)
    young = cached_chain(pool, prompt(2, 1))
    pool.tick(2.0)
    pool.release(old)  # in use until now
    allocate(pool, 1)
    assert allocate(pool, 1) == young
    assert found(pool, prompt(1, 1)) == old


def test_higher_priority_stays_longer_whenever_it_was_used():
    pool = pool_of(2)
    dear = cached_chain(pool, prompt(1, 1), priority=1)
    pool.tick(1.0)
    cached_chain(pool, prompt(2, 1))
    allocate(pool, 1)
    assert found(pool, prompt(1, 1)) == dear and not found(pool, prompt(2, 1))


def test_the_policy_decides_among_equals():
    class MostRecentFirst(Lru):
        def score(self, usage: EntryUsage, now_s: float) -> float:
            return -usage.used_s

    pool = pool_of(2, policy=MostRecentFirst())
    cached_chain(pool, prompt(1, 1))
    pool.tick(1.0)
    cached_chain(pool, prompt(2, 1))
    allocate(pool, 1)
    assert found(pool, prompt(1, 1)) and not found(pool, prompt(2, 1))


def test_the_policy_is_told_of_all_that_happens():
    told: list[tuple[str, int, int]] = []

    class Listening(Lru):
        def inserted(self, usage: EntryUsage, now_s: float) -> None:
            told.append(("inserted", usage.num_blocks, usage.hits))

        def used(self, usage: EntryUsage, now_s: float) -> None:
            told.append(("used", usage.num_blocks, usage.hits))

        def evicted(self, usage: EntryUsage, now_s: float) -> None:
            told.append(("evicted", usage.num_blocks, usage.hits))

    pool = pool_of(4, policy=Listening())
    cached_chain(pool, prompt(1, 3))
    cached_chain(pool, prompt(1, 2))  # the third block is not used: it is cut off
    allocate(pool, 2)
    assert told == [("inserted", 3, 0), ("used", 2, 1), ("evicted", 1, 0)]


def test_only_what_a_request_matched_counts_as_used():
    pool = pool_of(4)
    cached_chain(pool, prompt(1, 3))
    pool.tick(1.0)
    cached_chain(pool, prompt(2, 1))
    pool.tick(2.0)
    pool.release(run(pool, prompt(1, 1)))
    allocate(pool, 2)
    assert found(pool, prompt(2, 1)) and len(found(pool, prompt(1, 3))) == 1


def test_entries_of_the_queue_do_not_pile_up():
    pool = pool_of(8)
    blocks = cached_chain(pool, prompt(1, 4))
    for _ in range(1000):
        pool.acquire(blocks)
        pool.release(blocks)
    assert len(pool._queue.items) < 100
    pool.check()


def test_the_coldest_blocks_are_those_that_are_evicted_next():
    pool = pool_of(12)
    trunk = prompt(1, 2)
    for first, salt in ((2, "a"), (3, "a"), (4, "")):
        cached_chain(pool, [*trunk, *prompt(first, 2)], salt=salt)
        pool.tick(pool.now_s + 1)
    cold = pool.eviction_candidates(100)
    assert len(pool.eviction_candidates(3)) == 3
    assert len(cold) == len({each.block for each in cold}) == 10  # the trunk once for each tenant
    names = {each.digest for each in cold}
    assert all(each.meta.parent in names or each.meta.end_tokens == SIZE for each in cold)
    assert {each.meta.tenant for each in cold} == {"", tenant_name(root_hash("a"))}
    allocate(pool, 2)
    assert {each.block for each in cold[:4]} == set(allocate(pool, 4))


# ---- news


def hashes_of(tokens: list[int]) -> set[bytes]:
    return set(chain_of(tokens).hashes())


def test_news_is_what_differs_from_the_last_time():
    pool = pool_of(2)
    assert pool.drain_changes() is None
    cached_chain(pool, prompt(1, 2))
    change = pool.drain_changes()
    assert change is not None and (set(change.stored), change.removed) == (hashes_of(prompt(1, 2)), ())
    pool.release(allocate(pool, 1))
    change = pool.drain_changes()
    assert change is not None and (change.stored, set(change.removed)) == ((), {chain_of(prompt(1, 2))[1]})


def test_what_comes_and_goes_between_two_times_is_no_news():
    pool = pool_of(2)
    cached_chain(pool, prompt(1, 2))
    pool.reset_cache()
    assert pool.drain_changes() is None
    cached_chain(pool, prompt(1, 2))
    pool.drain_changes()
    pool.reset_cache()
    cached_chain(pool, prompt(1, 2))
    assert pool.drain_changes() is None


def test_news_that_nobody_reads_does_not_pile_up():
    pool = pool_of(8)
    for first in range(200):
        cached_chain(pool, prompt(first, 4))
    changes = pool._changes
    assert len(changes._stored) + len(changes._removed) <= 8
    change = pool.drain_changes()
    assert change is not None and set(change.stored) == set(pool.cached_hashes()) and not change.removed


# ---- pins


def test_a_pinned_block_stays_until_its_time_is_over():
    pool = pool_of(4, pin_share=0.5)
    blocks = cached_chain(pool, prompt(1, 2))
    assert pool.pin(chain_of(prompt(1, 2)), 2, 5.0) == 2
    assert pool.counts() == BlockCounts(free=2, used=0, cached=2, pinned=2)
    assert pool.allocate(3) is None
    pool.tick(4.9)
    assert pool.num_available == 2 and found(pool, prompt(1, 2)) == blocks
    pool.tick(5.0)
    assert pool.num_available == 4
    pool.check()


def test_pinning_again_prolongs_and_costs_no_quota():
    pool = pool_of(4, pin_share=0.5)
    cached_chain(pool, prompt(1, 2))
    chain = chain_of(prompt(1, 2))
    pool.pin(chain, 2, 5.0)
    pool.tick(4.0)
    assert pool.pin(chain, 2, 5.0) == 2
    pool.tick(8.0)
    assert pool.counts().pinned == 2
    pool.tick(9.0)
    assert pool.counts().pinned == 0


def test_each_tenant_pins_within_its_own_quota_from_the_first_block_on():
    pool = pool_of(8, pin_share=0.25)
    for salt in ("a", "b"):
        blocks = cached_chain(pool, prompt(1, 3), salt=salt)
        assert pool.pin(chain_of(prompt(1, 3), salt), 3, 5.0) == 2
        assert set(blocks[:2]) <= set(pool.pinned) and blocks[2] not in pool.pinned
    pool.tick(5.0)
    assert pool.pin(chain_of(prompt(1, 3), "a"), 3, 5.0) == 2  # the quota is back
    pool.check()


def test_a_tenant_with_a_namespace_has_one_quota_over_all_its_salts_and_it_may_be_its_own():
    pool = pool_of(80, pin_share=0.25)
    chains = [chain_of(prompt(1, 2), f"secret{NAMESPACE_END}{number}") for number in range(40)]
    for number in range(40):
        cached_chain(pool, prompt(1, 2), salt=f"secret{NAMESPACE_END}{number}")
    assert sum(pool.pin(chain, 2, 5.0, 0.1) for chain in chains) == 8
    assert sum(pool.pin(chain, 2, 5.0) for chain in chains) == 20
    pool.check()


def test_forty_salts_of_one_client_pin_no_more_than_half_of_the_pool():
    pool = pool_of(80, pin_share=0.25)
    salts = [str(number) for number in range(40)]
    for salt in salts:
        cached_chain(pool, prompt(1, 2), salt=salt)
    assert sum(pool.pin(chain_of(prompt(1, 2), salt), 2, 5.0) for salt in salts) == 40
    assert pool.counts().pinned == 40 and pool.allocate(40) is not None
    pool.tick(5.0)
    assert pool.counts().pinned == 0
    pool.check()


def test_pins_end_early_when_room_is_needed_those_first_that_end_next():
    pool = pool_of(8, pin_share=0.25)
    assert pool.allocate(4) is not None
    cached_chain(pool, prompt(1, 2), salt="a")
    late = cached_chain(pool, prompt(1, 2), salt="b")
    pool.pin(chain_of(prompt(1, 2), "a"), 2, 1.0)
    pool.pin(chain_of(prompt(1, 2), "b"), 2, 9.0)
    assert pool.num_available == 0
    assert pool.unpin_for(2) and set(pool.pinned) == set(late)
    assert not pool.unpin_for(5) and not len(pool.pinned)
    pool.check()


def test_pinning_again_and_again_does_not_pile_up():
    pool = pool_of(16, pin_share=1.0)
    cached_chain(pool, prompt(1, 8))
    for _ in range(500):
        pool.pin(chain_of(prompt(1, 8)), 8, 1e6)
        pool.tick(pool.now_s + 1)
    assert len(pool._pins._pins._ends) < 200


# ---- the ledger


def test_reset_forgets_all_that_nobody_holds_pins_included():
    pool = pool_of(8, pin_share=0.5)
    held = run(pool, prompt(1, 2))
    cached_chain(pool, prompt(2, 2))
    pool.pin(chain_of(prompt(2, 2)), 2, 9.0)
    assert pool.reset_cache() == 2
    assert found(pool, prompt(1, 2)) == held and not found(pool, prompt(2, 2))
    pool.check()


def break_free(pool: BlockPool) -> None:
    pool._free.append(pool._free[0])


def break_lost(pool: BlockPool) -> None:
    pool._free.pop()


def break_refs(pool: BlockPool) -> None:
    pool._ledger.refs[pool.match(chain_of(prompt(1, 2))).blocks[0]] += 1


def break_name(pool: BlockPool) -> None:
    pool._ledger.owners[pool.match(chain_of(prompt(1, 2))).blocks[0]] = -1


def break_queue(pool: BlockPool) -> None:
    pool._queue.items.clear()


def break_lock(pool: BlockPool) -> None:
    node = pool.match(chain_of(prompt(1, 2))).node
    assert node is not None
    pool._tree.hold(node, 1)


def break_count(pool: BlockPool) -> None:
    pool._tree.num_evictable -= 1


@pytest.mark.parametrize(
    "damage", [break_free, break_lost, break_refs, break_name, break_queue, break_lock, break_count]
)
def test_the_ledger_notices(damage):
    pool = pool_of(8)
    cached_chain(pool, prompt(1, 2))
    pool.check()
    damage(pool)
    with pytest.raises(AssertionError):
        pool.check()


# ---- without tokens


@pytest.mark.parametrize("keeps_tokens", [True, False])
def test_without_tokens_whole_blocks_are_found_split_and_evicted_and_beginnings_of_blocks_are_not(keeps_tokens):
    pool = BlockPool(12, block_size=8, keeps_tokens=keeps_tokens)
    tokens = list(range(24))
    chain = HashChain.of(tokens, 8)
    blocks = allocate(pool, 3)
    pool.insert(chain, blocks, 0, 3, pack_tokens(tokens))
    pool.release(blocks)
    other = HashChain.of([*tokens[:8], *range(100, 108)], 8)
    pool.use(pool.match(other))  # the node splits
    pool.check()
    match = pool.match(other)
    assert list(match.blocks) == list(blocks[:1]) and list(pool.match(chain).blocks) == list(blocks)
    half = pack_tokens([*tokens[8:14], 99, 99])
    assert pool.partial_match(match, half) == ((blocks[1], 6) if keeps_tokens else (-1, 0))
    assert [cold.meta.end_tokens for cold in pool.eviction_candidates(3)] == [24, 16, 8]
    allocate(pool, 11)
    pool.check()
    assert list(pool.match(chain).blocks) == list(blocks[:1])
