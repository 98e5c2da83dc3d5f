"""Block hashes name a whole prefix, alike in every process, and differ between tenants."""

import hashlib
import os
import subprocess
import sys
from array import array

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvrelay import hashing
from kvrelay.hashing import (
    HASH_BYTES,
    NAMESPACE_END,
    TENANT_CHARS,
    HashChain,
    account_of,
    block_hashes,
    pack_tokens,
    root_hash,
    salt_name,
    tenant_name,
)

pytestmark = pytest.mark.pure


TOKENS = st.lists(st.integers(0, 200_000), max_size=70)


def next_hash(parent, tokens):
    """The definition of a block's hash."""
    data = b"".join(token.to_bytes(4, "little") for token in tokens)
    return hashlib.blake2b(parent + data, digest_size=16).digest()


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


# ---- in C and in Python


@pytest.fixture(params=["native", "python"])
def library(request, monkeypatch):
    """Hashing and packing in C and in Python."""
    if request.param == "python":
        monkeypatch.setattr(hashing, "hash_extension", lambda: None)
    elif hashing.hash_extension() is None:
        pytest.skip("no C compiler")
    return request.param


@pytest.mark.parametrize("block_size", [1, 4, 16, 28, 29, 32, 60, 61, 64, 256])
def test_either_way_gives_rfc_7693s_digests(library, block_size):
    tokens = [(7919 * i) % 200_003 for i in range(4 * block_size - 1 if block_size > 1 else 3)]
    packed = b"".join(token.to_bytes(4, "little") for token in tokens)
    parent, width = bytes(root_hash()), 4 * block_size
    for digest, start in zip(block_hashes(tokens, block_size), range(0, 3 * width, width), strict=True):
        parent = hashlib.blake2b(parent + packed[start : start + width], digest_size=16).digest()
        assert digest == parent


def test_either_way_packs_tokens_alike(library):
    tokens = [0, 1, 255, 256, 2**31 - 1, -1, -(2**31), *range(300)]
    assert pack_tokens(tokens) == array("i", tokens).tobytes()
    assert pack_tokens(tokens, 5, 9) == array("i", tokens[5:9]).tobytes()
    assert pack_tokens(tokens, 300, 999) == array("i", tokens[300:]).tobytes()
    assert pack_tokens(tokens, 9, 5) == b""


def test_either_way_takes_whatever_is_an_integer(library):
    tokens = [True, np.int64(-3), 2**30 - 1, 2**30, 1 - 2**30, -(2**30), *range(200)]
    assert pack_tokens(tokens) == array("i", map(int, tokens)).tobytes()


def test_a_list_that_changes_while_it_is_packed_does_no_harm(library):
    class Emptying:
        def __index__(self) -> int:
            tokens.clear()
            return 7

    tokens = [1, 2, Emptying(), *range(300)]
    if library == "python":  # array() takes what it was given
        assert len(pack_tokens(tokens)) == 4 * 303
    else:
        with pytest.raises(IndexError):
            pack_tokens(tokens)


def test_a_chain_begins_with_sixteen_bytes_and_blocks_are_not_empty():
    native = hashing.hash_extension()
    if native is None:
        pytest.skip("no C compiler")
    for parent, width in ((b"short", 64), (bytes(16), 0), (bytes(16), -4)):
        with pytest.raises(ValueError):
            native.chain(parent, bytes(128), width)
    with pytest.raises(ValueError):
        native.pack([1, 2, 3], -1, 2)
    with pytest.raises(IndexError):
        native.pack([1, 2, 3], 0, 4)


@pytest.mark.parametrize("bad", [2**31, -(2**31) - 1, 2**70])
def test_either_way_refuses_what_is_no_int32(library, bad):
    with pytest.raises(OverflowError):
        pack_tokens([*range(200), bad])


@pytest.mark.parametrize("bad", ["7", None, 1.5])
def test_either_way_refuses_what_is_no_int(library, bad):
    with pytest.raises(TypeError):
        pack_tokens([*range(200), bad])


def test_long_prompts_hash_the_same_while_other_threads_run(library):
    tokens = list(range(70_000))  # more than _RELEASE_BYTES
    assert block_hashes(tokens, 16)[-1].hex() == "fbe19fa6d6590eca993c0b44360726f8"


@pytest.mark.slow
def test_without_native_code_the_digests_are_the_same():
    code = "from kvrelay import hashing; "
    code += "print(hashing.block_hashes(list(range(4000)), 16)[-1].hex()); "
    code += "assert hashing.hash_extension() is None"
    run = subprocess.run(
        [sys.executable, "-c", code],
        capture_output=True,
        text=True,
        check=True,
        env={**os.environ, "KVRELAY_NATIVE": "0"},
    )
    assert run.stdout.strip() == block_hashes(list(range(4000)), 16)[-1].hex()


# ---- chains


@given(TOKENS, st.integers(0, 70))
def test_a_chain_grows_as_if_it_had_been_made_at_once(tokens, cut):
    cut = cut // 4 * 4
    chain = HashChain.of(tokens[:cut], 4, "s")
    chain.extend(pack_tokens(tokens, len(chain) * 4), 4)
    assert chain.hashes() == block_hashes(tokens, 4, "s")
    assert len(chain) == len(tokens) // 4 and chain.last == (chain.hashes() or [root_hash("s")])[-1]


def test_all_salts_of_a_namespace_have_one_account_and_roots_of_their_own():
    roots = [root_hash(f"secret{NAMESPACE_END}{salt}") for salt in ("", "a", "b")]
    assert len(set(roots)) == 3 and {len(root) for root in roots} == {HASH_BYTES}
    assert len({account_of(root) for root in roots}) == len({tenant_name(root) for root in roots}) == 1
    others = [root_hash(salt) for salt in ("", "a", "secret", f"other{NAMESPACE_END}a")]
    assert not {account_of(root) for root in roots} & {account_of(root) for root in others}


def test_a_salts_name_differs_for_each_and_begins_with_its_tenants():
    salts = ["a", "b", f"secret{NAMESPACE_END}", f"secret{NAMESPACE_END}a"]
    names = [salt_name(salt) for salt in salts]
    assert len(set(names)) == 4 and salt_name("") == ""
    assert [name[:TENANT_CHARS] for name in names] == [tenant_name(root_hash(salt)) for salt in salts]


def test_a_tenants_name_gives_neither_salt_nor_root_away():
    assert tenant_name(root_hash()) == ""
    names = {tenant_name(root_hash(salt)) for salt in ("a", "b")}
    assert len(names) == 2 and not any(root_hash(salt).hex()[:16] in names for salt in ("a", "b"))
