"""What every BlockStore must do. A test file subclasses `StoreContract` as `Test…` and gives the fixture `open_store`:

    @pytest.fixture
    def open_store(self, tmp_path):
        def open_store(num_blocks: int, namespace: str = "model-a") -> BlockStore: ...started, room for so many
        blocks... yield open_store ...close what is still open...

Opening again, after close(), must find what was kept where `outlives_close` is true. No admission filter; exact codec.
"""

import contextlib
import threading
from dataclasses import replace

import numpy as np
import pytest
import xxhash

from kvrelay.hashing import block_hashes, root_hash
from kvrelay.types import BlockMeta

BLOCK_BYTES = 8192
_METAS = {}  # of each hash that `chain` has made: a caller of load() knows them, too
_UNKNOWN = BlockMeta(None, 0)


@contextlib.contextmanager
def started():
    """Starts stores, holds their ledgers against their rows at the end, and closes them."""
    stores = []

    def start(store):
        stores.append(store)
        store.start()
        return store

    yield start
    for store in stores:
        check(store)
        store.close()


def chain(count, *, salt=""):
    """Hashes of `count` blocks of one prompt, and their metas."""
    hashes = block_hashes([index for index in range(count) for _ in range(16)], 16, salt)
    metas = [
        BlockMeta(hashes[index - 1] if index else None, 16 * (index + 1), root=root_hash(salt))
        for index in range(count)
    ]
    _METAS.update(zip(hashes, metas, strict=True))
    return hashes, metas


def content(digest, version=0, num_bytes=BLOCK_BYTES):
    """The block that belongs to this hash, as the tests have it; never the same for two hashes or versions."""
    seed = int.from_bytes(digest, "little") + version
    return memoryview(np.random.default_rng(seed).integers(0, 256, num_bytes, np.uint8).tobytes())


def room(count, num_bytes=BLOCK_BYTES):
    return [memoryview(bytearray(b"\xee" * num_bytes)) for _ in range(count)]


def keep(store, hashes, metas, version=0):
    return store.store(hashes, [content(digest, version) for digest in hashes], metas)


def fetch(store, hashes, metas=()):
    """Blocks as loaded, None for those that were not."""
    into, metas = room(len(hashes)), metas or [_METAS.get(digest, _UNKNOWN) for digest in hashes]
    return [view if is_there else None for view, is_there in zip(into, store.load(hashes, into, metas), strict=True)]


def assert_right(hashes, blocks):
    """Whatever was served is what belongs to its hash; returns how many were."""
    served = [(digest, block) for digest, block in zip(hashes, blocks, strict=True) if block is not None]
    assert all(block == content(digest) for digest, block in served)
    return len(served)


def check(store):
    """AssertionError unless every row of a disk store is in exactly one state, and index and headers agree."""
    with store._visit() as volume:
        if volume is not None:
            with volume._lock:
                volume._index.check()
                for digest in volume._index.hashes():
                    assert volume._headers[digest].row == volume._index.row(digest), "a header names another row"


class StoreContract:
    outlives_close = True
    keeps_a_limit = True

    def test_what_is_stored_is_loaded_bit_for_bit(self, open_store):
        store, (hashes, metas) = open_store(32), chain(20)
        assert keep(store, hashes, metas) == [True] * 20
        assert store.contains(hashes) == [True] * 20
        assert fetch(store, hashes) == [content(digest) for digest in hashes]
        stats = store.stats()
        assert (stats.num_blocks, stats.stored_blocks, stats.loaded_blocks) == (20, 20, 20)
        assert stats.loaded_blocks == 20

    def test_what_was_never_stored_is_a_miss(self, open_store):
        store, (hashes, _) = open_store(8), chain(3)
        assert store.contains(hashes) == [False] * 3
        assert fetch(store, hashes) == [None] * 3

    def test_of_several_the_missing_ones_are_told(self, open_store):
        store, (hashes, metas) = open_store(16), chain(6)
        keep(store, hashes[::2], metas[::2])
        assert store.contains(hashes) == [True, False] * 3
        assert [block is not None for block in fetch(store, hashes)] == [True, False] * 3
        assert assert_right(hashes, fetch(store, hashes)) == 3

    def test_nothing_at_all_is_a_valid_call(self, open_store):
        store = open_store(4)
        assert store.store([], [], []) == store.load([], []) == store.contains([]) == []

    def test_a_hash_that_is_there_is_kept_as_it_is(self, open_store):
        store, (hashes, metas) = open_store(8), chain(2)
        keep(store, hashes, metas)
        assert keep(store, hashes, metas) == [True, True]
        assert store.stats().stored_blocks == 2
        assert assert_right(hashes, fetch(store, hashes)) == 2

    def test_one_hash_twice_in_a_call_is_served_twice(self, open_store):
        store, (hashes, metas) = open_store(8), chain(1)
        assert keep(store, hashes * 2, metas * 2) == [True, True]
        assert assert_right(hashes * 2, fetch(store, hashes * 2)) == 2

    def test_what_is_deleted_is_gone_and_may_come_back(self, open_store):
        store, (hashes, metas) = open_store(8), chain(4)
        keep(store, hashes, metas)
        store.delete(hashes[1:3])
        assert store.contains(hashes) == [True, False, False, True]
        store.delete(hashes[1:3])  # not there: nothing happens
        assert keep(store, hashes, metas) == [True] * 4
        assert assert_right(hashes, fetch(store, hashes)) == 4

    def test_a_prompts_beginning_is_not_given_up_for_its_end(self, open_store):
        store, (hashes, metas) = open_store(8), chain(12)
        keep(store, hashes[:6], metas[:6])
        keep(store, hashes, metas)
        assert store.contains(hashes[:6]) == [True] * 6

    def test_a_full_store_gives_up_old_blocks_for_new_ones(self, open_store):
        store = open_store(8)
        for number in range(6):
            hashes, metas = chain(4, salt=str(number))
            assert keep(store, hashes, metas) == [True] * 4
            assert assert_right(hashes, fetch(store, hashes)) == 4
        stats = store.stats()
        if self.keeps_a_limit:
            assert stats.num_blocks <= 8
            assert stats.evicted_blocks >= 16
            assert stats.num_bytes <= stats.capacity_bytes

    def test_blocks_outlive_the_process(self, open_store):
        store, (hashes, metas) = open_store(16), chain(5)
        keep(store, hashes, metas)
        store.delete(hashes[4:])
        store.close()
        again = open_store(16)
        expected = 4 if self.outlives_close else 0
        assert assert_right(hashes, fetch(again, hashes)) == expected

    def test_another_namespaces_blocks_are_never_served(self, open_store):
        store, (hashes, metas) = open_store(16), chain(3)
        keep(store, hashes, metas)
        store.close()
        other = open_store(16, namespace="model-b")
        assert other.contains(hashes) == [False] * 3
        assert fetch(other, hashes) == [None] * 3

    @pytest.mark.parametrize("is_wrong", [False, True])
    def test_a_block_is_verified_by_the_checksum_that_came_with_it(self, open_store, is_wrong):
        store, (hashes, metas) = open_store(8), chain(3)
        sums = [xxhash.xxh3_64_intdigest(content(digest)) ^ is_wrong for digest in hashes]
        keep(store, hashes, [replace(meta, checksum=each) for meta, each in zip(metas, sums, strict=True)])
        is_refused = is_wrong and store.keeps_checksums
        assert assert_right(hashes, fetch(store, hashes)) == (0 if is_refused else 3)

    def test_many_threads_never_see_a_wrong_block(self, open_store):
        store, problems = open_store(12), []
        prompts = [chain(4, salt=str(number)) for number in range(6)]

        def work(seed):
            draw = np.random.default_rng(seed)
            try:
                for _ in range(40):
                    hashes, metas = prompts[draw.integers(len(prompts))]
                    match draw.integers(6):
                        case 0 | 1:
                            keep(store, hashes, metas)
                        case 2:
                            store.delete(hashes[2:])
                        case _:
                            assert_right(hashes, fetch(store, hashes))
            except BaseException as error:
                problems.append(error)

        threads = [threading.Thread(target=work, args=(seed,)) for seed in range(4)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert problems == []
        hashes, metas = prompts[0]
        assert keep(store, hashes, metas) == [True] * 4
        assert assert_right(hashes, fetch(store, hashes)) == 4

    def test_a_closed_store_serves_nothing_and_closes_again(self, open_store):
        store, (hashes, metas) = open_store(8), chain(2)
        keep(store, hashes, metas)
        store.close()
        assert fetch(store, hashes) == [None] * 2
        assert keep(store, hashes, metas) == [False] * 2
        store.close()
