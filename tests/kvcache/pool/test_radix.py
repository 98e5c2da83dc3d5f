"""The prefix index: runs split where chains part, merge when they part no longer, and are matched to the last common
block.
"""

from array import array

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvrelay.hashing import HashChain, pack_tokens
from kvrelay.kvcache.pool.block_pool import MIN_PARTIAL_TOKENS, BlockPool
from kvrelay.kvcache.pool.radix import RadixNode

pytestmark = pytest.mark.pure


SIZE = 8


def chain_of(tokens: list[int], salt: str = "") -> HashChain:
    return HashChain.of(tokens, SIZE, salt)


def store(pool: BlockPool, tokens: list[int], *, salt: str = "", step: int = 1000) -> array:
    """Blocks of these tokens, computed `step` blocks at a time and released; at the next second of the clock."""
    pool.tick(pool.now_s + 1)
    chain = chain_of(tokens, salt)
    match = pool.match(chain)
    pool.acquire(match.blocks)
    fresh = pool.allocate(len(chain) - len(match))
    assert fresh is not None
    pool.use(match)
    blocks = match.blocks + fresh
    for first in range(len(match), len(chain), step):
        last = min(first + step, len(chain))
        pool.insert(chain, blocks, first, last, pack_tokens(tokens, first * SIZE, last * SIZE))
        pool.check()
    pool.release(blocks)
    pool.check()
    return blocks


def runs(pool: BlockPool) -> list[int]:
    """Lengths of the nodes' runs, sorted; roots left out."""
    return sorted(len(node.blocks) for node in pool._tree.live() if node.parent is not None)


def num_above(node: RadixNode) -> int:
    """Usages that this node's keeps alive."""
    count, usage = 0, node.usage.above
    while usage is not None:
        count, usage = count + 1, usage.above
    return count


def prompt(first: int, blocks: int) -> list[int]:
    return list(range(1000 * first, 1000 * first + SIZE * blocks))


def tail_of(pool: BlockPool, tokens: list[int], salt: str = "") -> tuple[int, int]:
    match = pool.match(chain_of(tokens, salt))
    return pool.partial_match(match, pack_tokens(tokens, len(match) * SIZE))


# ---- runs


def test_what_a_sequence_computes_is_one_run_however_many_steps_it_takes():
    pool = BlockPool(64, block_size=SIZE)
    store(pool, prompt(1, 20), step=1)
    assert runs(pool) == [20]
    store(pool, [*prompt(1, 20), *prompt(2, 5)], step=2)  # the next turn
    assert runs(pool) == [25]


def test_a_run_splits_where_chains_part():
    pool = BlockPool(64, block_size=SIZE)
    trunk = prompt(1, 4)
    store(pool, [*trunk, *prompt(2, 6)])
    store(pool, [*trunk, *prompt(3, 2)])
    assert runs(pool) == [2, 4, 6]
    store(pool, [*trunk[: SIZE * 3], *prompt(4, 1)])
    assert runs(pool) == [1, 1, 2, 3, 6]


def test_two_runs_are_one_again_when_the_branch_between_them_has_gone():
    pool = BlockPool(12, block_size=SIZE)
    trunk = prompt(1, 4)
    store(pool, [*trunk, *prompt(2, 2)])
    store(pool, [*trunk, *prompt(3, 6)])
    assert runs(pool) == [2, 4, 6]
    assert pool.allocate(2) is not None  # pushes the older branch out
    pool.check()
    assert runs(pool) == [10]
    assert len(pool.match(chain_of([*trunk, *prompt(3, 6)]))) == 10


def test_a_trunk_that_others_used_later_stays_a_run_of_its_own():
    pool = BlockPool(12, block_size=SIZE)
    trunk = prompt(1, 4)
    store(pool, [*trunk, *prompt(2, 6)])
    store(pool, [*trunk, *prompt(3, 2)])
    store(pool, [*trunk, *prompt(2, 6)][: SIZE * 9])
    store(pool, trunk)  # the latest use is the trunk's alone
    assert pool.allocate(2) is not None
    pool.check()
    assert 4 in runs(pool)


def test_a_prefix_that_stays_in_use_keeps_no_usage_of_the_tails_that_were_evicted():
    pool = BlockPool(6, block_size=SIZE)
    for number in range(20):
        store(pool, prompt(1, 2) + prompt(2 + number, 3))  # the tail before it goes, and the prefix is one run with it
    assert max(map(num_above, pool._tree.live())) <= 1


def test_a_tenants_tree_goes_with_its_last_block():
    pool = BlockPool(8, block_size=SIZE)
    store(pool, prompt(1, 2), salt="a")
    store(pool, prompt(1, 2), salt="b")
    assert len(pool._tree.roots) == 2 and runs(pool) == [2, 2]
    assert not pool.match(chain_of(prompt(1, 2), "c")).blocks
    pool.reset_cache()
    pool.check()
    assert not pool._tree.roots and not list(pool._tree.live())


TOKENS = st.lists(st.integers(0, 1), min_size=0, max_size=12).map(
    lambda bits: [bit for bit in bits for _ in range(SIZE)]
)


@given(st.lists(TOKENS, min_size=1, max_size=8), TOKENS, st.integers(0, 14))
def test_a_match_is_the_longest_stored_prefix_up_to_the_limit(stored, wanted, limit):
    pool, known = BlockPool(200, block_size=SIZE), set()
    for tokens in stored:
        store(pool, tokens)
        known |= set(chain_of(tokens).hashes())
    expected = 0
    for digest in chain_of(wanted).hashes()[:limit]:
        if digest not in known:
            break
        expected += 1
    assert len(pool.match(chain_of(wanted), limit)) == expected
    assert set(pool.cached_hashes()) == known


def test_long_runs_that_part_late_are_told_apart():
    pool = BlockPool(5000, block_size=SIZE)
    tokens = prompt(1, 2000)
    blocks = store(pool, tokens)
    for at in (0, 1, 31, 32, 1998, 1999):
        other = list(tokens)
        other[at * SIZE] = 7
        assert pool.match(chain_of(other)).blocks == blocks[:at]


def test_a_beginning_that_stays_for_what_follows_alone_goes_with_it_after_a_split():
    pool, tokens = BlockPool(16, block_size=SIZE), prompt(1, 3)
    store(pool, tokens[: 2 * SIZE])
    branches = [tokens, [*tokens[: 2 * SIZE], *prompt(2, 1)]]
    copies = [pool.allocate(3) for _ in branches]  # computed at the same time: of each only the third block gets a name
    for copy, branch in zip(copies, branches, strict=True):
        assert copy is not None
        pool.insert(chain_of(branch), copy, 0, 3, pack_tokens(branch))
        pool.check()
    assert runs(pool) == [1, 1, 2]
    for copy in copies:
        pool.release(copy)
        pool.check()
    assert pool.num_available == 16


# ---- tails


def test_a_tail_is_looked_for_where_the_match_ends_within_a_run():
    pool = BlockPool(64, block_size=SIZE)
    blocks = store(pool, prompt(1, 4))
    assert tail_of(pool, [*prompt(1, 4)[: SIZE * 2 + 5], 7, 7, 7]) == (blocks[2], 5)


def test_of_all_children_that_one_is_taken_that_has_most_in_common():
    pool = BlockPool(64, block_size=SIZE)
    trunk = prompt(1, 2)
    by_length = {
        count: store(pool, [*trunk, *range(50, 50 + count), *([900 + count] * (SIZE - count))])[2]
        for count in range(SIZE)
    }
    for count in range(MIN_PARTIAL_TOKENS, SIZE):
        wanted = [*trunk, *range(50, 50 + count), 5, 5]
        block, common = tail_of(pool, wanted)
        assert common == count and block in {by_length[more] for more in range(count, SIZE)}


def test_less_than_the_minimum_is_no_tail_and_a_whole_block_neither():
    pool = BlockPool(64, block_size=SIZE)
    store(pool, prompt(1, 2))
    short = MIN_PARTIAL_TOKENS - 1
    assert tail_of(pool, [*prompt(1, 2)[: SIZE + short], 7, 7, 7, 7]) == (-1, 0)
    other = HashChain.of(prompt(1, 2), SIZE, "")  # a chain that matches nothing, over the same tokens
    other.data = bytearray(len(other.data))
    assert pool.partial_match(pool.match(other), pack_tokens(prompt(1, 1)))[1] == SIZE - 1


def test_tails_of_another_tenant_or_another_place_are_none():
    pool = BlockPool(64, block_size=SIZE)
    store(pool, [*prompt(1, 1), *prompt(2, 1)], salt="a")
    assert tail_of(pool, prompt(1, 1)[:7], "b") == (-1, 0)
    assert tail_of(pool, prompt(2, 1)[:7], "a") == (-1, 0)


def test_blocks_named_without_their_tokens_are_no_tails():
    pool = BlockPool(64, block_size=SIZE)
    blocks = pool.allocate(1)
    assert blocks is not None
    pool.insert(chain_of(prompt(1, 1)), blocks, 0, 1)
    assert tail_of(pool, prompt(1, 1)[:7]) == (-1, 0)
    assert pool.match(chain_of(prompt(1, 1))).blocks == blocks
    pool.check()


def test_the_list_of_heads_follows_the_children():
    pool = BlockPool(6, block_size=SIZE)
    for first in range(20):
        store(pool, prompt(first, 2))
        assert tail_of(pool, prompt(first, 2)[:7]) != (-1, 0)
        pool.check()
    assert tail_of(pool, prompt(0, 2)[:7]) == (-1, 0)  # long evicted
