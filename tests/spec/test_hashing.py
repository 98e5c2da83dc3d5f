"""Block hashes name a whole prefix, alike in every process, and differ between tenants."""

import subprocess
import sys

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvrelay.hashing import HASH_BYTES, block_hashes, next_hash, root_hash

TOKENS = st.lists(st.integers(0, 200_000), max_size=70)


def test_only_full_blocks_have_a_hash():
    assert [len(block_hashes(range(n), 16)) for n in (0, 1, 15, 16, 17, 31, 32)] == [0, 0, 0, 1, 1, 1, 2]


def test_hashes_are_sixteen_bytes():
    assert {len(h) for h in block_hashes(range(64), 16)} == {HASH_BYTES} == {16}


@given(TOKENS, st.sampled_from([1, 4, 16]))
def test_the_chain_is_next_hash_applied_again_and_again(tokens, block_size):
    parent, chain = root_hash("tenant"), []
    for start in range(0, len(tokens) - block_size + 1, block_size):
        parent = next_hash(parent, tokens[start : start + block_size])
        chain.append(parent)
    assert block_hashes(tokens, block_size, "tenant") == chain


@given(TOKENS, TOKENS)
def test_equal_hashes_mean_equal_prefixes(one, other):
    for i, (mine, theirs) in enumerate(zip(block_hashes(one, 4), block_hashes(other, 4), strict=False)):
        assert (mine == theirs) == (one[: 4 * (i + 1)] == other[: 4 * (i + 1)])


def test_a_change_in_the_first_token_changes_every_later_hash():
    one, other = block_hashes(range(64), 16), block_hashes([7, *range(1, 64)], 16)
    assert not set(one) & set(other)


def test_the_same_block_elsewhere_has_another_hash():
    first, second = block_hashes([5] * 32, 16)
    assert first != second


def test_tenants_share_nothing():
    assert not set(block_hashes(range(64), 16, "a")) & set(block_hashes(range(64), 16, "b"))
    assert root_hash() != root_hash("a")


def test_another_block_size_gives_other_hashes():
    assert not set(block_hashes(range(64), 16)) & set(block_hashes(range(64), 32))


@pytest.mark.parametrize("container", [tuple, list, range])
def test_any_sequence_of_tokens_will_do(container):
    tokens = range(32) if container is range else container(range(32))
    assert block_hashes(tokens, 16) == block_hashes(list(range(32)), 16)


def test_hashes_never_change_between_releases():
    """Cached blocks outlive a process: a change here needs a new HASH_SEED."""
    assert block_hashes(range(16), 16)[0].hex() == "f068db65cd02ad4359c2fc26ac57092c"


@pytest.mark.slow
def test_another_process_agrees():
    code = "from kvrelay.hashing import block_hashes; print(block_hashes(range(40), 16)[-1].hex())"
    runs = [subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True) for _ in range(2)]
    assert {run.stdout.strip() for run in runs} == {block_hashes(range(40), 16)[-1].hex()}
