"""The disk tier on real files: the contract of all stores, and its own rules of admission, limits, quotas and
folders.
"""

import logging
import mmap
import os
import re
import threading

import numpy as np
import pytest

from kvrelay.errors import StoreError
from kvrelay.kvcache.stores.codecs import LosslessCodec
from kvrelay.kvcache.stores.disk.format import PAGE_BYTES, smallest_limit
from kvrelay.kvcache.stores.disk.tier import DiskOptions, DiskStore
from kvrelay.kvcache.stores.namespace import Namespace
from kvrelay.types import BlockMeta
from tests.kvcache.stores.store_contract import (
    BLOCK_BYTES,
    StoreContract,
    assert_right,
    chain,
    content,
    fetch,
    keep,
    room,
    started,
)

SLOT_BYTES = BLOCK_BYTES + PAGE_BYTES


@pytest.fixture
def open_disk(tmp_path):
    """Opens started stores in one folder, closes them at the end, and holds their ledgers against their rows."""
    with started() as start:

        def open_disk(
            num_blocks=16,
            *,
            model="model-a",
            codec=None,
            clock=lambda: 0.0,
            dtype="bfloat16",
            block_bytes=BLOCK_BYTES,
            **options,
        ):
            limit = smallest_limit(0) + num_blocks * (PAGE_BYTES + block_bytes)
            store = DiskStore(
                tmp_path / "kv",
                limit,
                block_bytes,
                Namespace.of({"model": model, "dtype": dtype}),
                codec=codec,
                options=DiskOptions(**{"is_admission_on": False, "segment_bytes": 16 * SLOT_BYTES, **options}),
                clock=clock,
            )
            return start(store)

        yield open_disk


class TestDiskStore(StoreContract):
    @pytest.fixture(params=["direct", "buffered"])
    def open_store(self, request, open_disk):
        direct = {"direct": None, "buffered": False}[request.param]
        return lambda num_blocks, namespace="model-a": open_disk(num_blocks, model=namespace, is_direct=direct)


class TestDiskStoreWithLosslessBlocks(StoreContract):
    @pytest.fixture
    def open_store(self, open_disk):
        return lambda num_blocks, namespace="model-a": open_disk(
            num_blocks, model=namespace, codec=LosslessCodec("bfloat16")
        )


def test_aligned_and_unaligned_memory_hold_the_same_blocks(open_disk):
    """Aligned memory goes to the disk and back without a copy between."""
    hashes, metas = chain(4)
    mapping = memoryview(mmap.mmap(-1, 4 * BLOCK_BYTES + PAGE_BYTES))
    for start in (0, 8):
        blocks = [mapping[start + i * BLOCK_BYTES : start + (i + 1) * BLOCK_BYTES] for i in range(4)]
        store = open_disk(model=f"model-{start}")
        for block, digest in zip(blocks, hashes, strict=True):
            block[:] = content(digest)
        assert store.store(hashes, blocks, metas) == [True] * 4
        assert assert_right(hashes, fetch(store, hashes)) == 4
        mapping[:] = bytes(len(mapping))
        assert store.load(hashes, blocks) == [True] * 4
        assert assert_right(hashes, blocks) == 4


def test_everything_in_the_folder_stays_within_the_limit(open_disk, tmp_path):
    store = open_disk(10, segment_bytes=3 * SLOT_BYTES)
    for number in range(8):
        keep(store, *chain(4, salt=str(number)))
    used = sum(path.stat().st_blocks * 512 for path in (tmp_path / "kv" / "worker-0").iterdir())
    assert store.stats().num_blocks == 10
    assert 10 * SLOT_BYTES <= used <= store.limit_bytes


def test_a_prompts_last_blocks_go_before_its_first(open_disk):
    store, (old, old_metas), (new, new_metas) = open_disk(6), chain(6, salt="old"), chain(2, salt="new")
    keep(store, old, old_metas)
    keep(store, new, new_metas)
    assert store.contains(old) == [True] * 4 + [False] * 2


def test_a_block_is_written_when_it_is_offered_again(open_disk):
    store, (hashes, metas) = open_disk(is_admission_on=True), chain(3)
    assert keep(store, hashes, metas) == [False] * 3
    assert store.stats().rejected_blocks == 3
    assert keep(store, hashes, metas) == [True] * 3


def test_a_block_with_a_priority_is_written_at_once(open_disk):
    store, (hashes, _) = open_disk(is_admission_on=True), chain(1)
    assert keep(store, hashes, [BlockMeta(None, 16, priority=1)]) == [True]


def test_a_tenant_over_its_quota_replaces_its_own_blocks(open_disk):
    store = open_disk(12, quota=lambda tenant: 4 * SLOT_BYTES)
    other, other_metas = chain(4, salt="other")
    keep(store, other, other_metas)
    for number in range(3):
        hashes, metas = chain(3, salt=str(number))
        keep(store, hashes, [BlockMeta(meta.parent, meta.end_tokens, tenant="mine") for meta in metas])
    assert store.contains(other) == [True] * 4
    assert store.stats().num_blocks == 8


def test_a_quota_that_shrinks_takes_a_tenants_blocks_and_they_do_not_come_back_after_a_restart(open_disk):
    most = {"mine": 4 * SLOT_BYTES}
    store = open_disk(12, quota=most.get)
    for tenant in ("mine", "other"):
        hashes, metas = chain(4, salt=tenant)
        keep(store, hashes, [BlockMeta(meta.parent, meta.end_tokens, tenant=tenant) for meta in metas])
    most["mine"] = SLOT_BYTES
    store.trim()
    mine, other = chain(4, salt="mine")[0], chain(4, salt="other")[0]
    for _ in range(2):
        assert store.contains(mine) == [True, False, False, False] and store.contains(other) == [True] * 4
        store.close()
        store = open_disk(12, quota=most.get)


def test_pinned_blocks_stay_until_their_time(open_disk):
    now = [0.0]
    store, (hashes, metas) = open_disk(8, clock=lambda: now[0]), chain(4)
    keep(store, hashes, metas)
    assert store.pin(hashes, 10.0) == 4
    for number in range(4):
        keep(store, *chain(4, salt=str(number)))
    assert store.contains(hashes) == [True] * 4
    now[0] = 11.0
    for number in range(4):
        keep(store, *chain(4, salt=f"later {number}"))
    assert store.contains(hashes) == [False] * 4


def test_a_pin_ends_before_its_time_when_told_and_what_is_to_be_pinned_is_admitted_at_once(open_disk):
    store, (hashes, metas) = open_disk(8, is_admission_on=True), chain(4)
    assert keep(store, hashes[:2], metas[:2]) == [False, False]
    wanted = [BlockMeta(meta.parent, meta.end_tokens, pin_s=10.0) for meta in metas]
    assert keep(store, hashes, wanted) == [True] * 4
    store.pin(hashes, 10.0)
    store.pin(hashes, 0.0)
    for number in range(4):
        keep(store, *chain(4, salt=str(number)))
        keep(store, *chain(4, salt=str(number)))
    assert store.contains(hashes) == [False] * 4


def test_tenant_priority_and_parents_come_back_after_a_restart(open_disk):
    store, (hashes, _) = open_disk(4), chain(2)
    metas = [BlockMeta(None, 16, 0, "mine"), BlockMeta(hashes[0], 32, 7, "mine")]
    keep(store, hashes, metas)
    store.close()
    again = open_disk(4, quota=lambda tenant: 2 * SLOT_BYTES)
    more, _ = chain(1, salt="more")
    assert keep(again, more, [BlockMeta(None, 16, 9, "mine")]) == [True]
    assert again.contains([*hashes, *more]) == [True, False, True]  # the leaf went, within the tenant's quota


def test_workers_on_one_node_have_subfolders_of_their_own_and_find_them_again(open_disk, tmp_path):
    first, second = open_disk(), open_disk()
    (ours, our_metas), (theirs, their_metas) = chain(2, salt="ours"), chain(3, salt="theirs")
    keep(first, ours, our_metas)
    keep(second, theirs, their_metas)
    assert second.contains(ours) == [False] * 2
    assert sorted(path.name for path in (tmp_path / "kv").iterdir()) == ["worker-0", "worker-1"]
    first.close()
    second.close()
    assert [open_disk().stats().num_blocks, open_disk().stats().num_blocks] == [2, 3]


def test_folder_and_files_are_for_their_owner_alone_also_those_of_earlier_versions(open_disk, tmp_path):
    store = open_disk()
    keep(store, *chain(2))
    mine = [tmp_path / "kv", tmp_path / "kv" / "worker-0", *(tmp_path / "kv" / "worker-0").iterdir()]
    assert {path.name for path in mine} > {"lock", "manifest.json"} and len(mine) > 4
    for _ in range(2):
        assert [path.stat().st_mode & 0o777 for path in mine] == [0o700 if path.is_dir() else 0o600 for path in mine]
        store.close()
        for path in mine[1:]:
            path.chmod(0o755 if path.is_dir() else 0o644)
        store = open_disk()


def test_a_smaller_limit_drops_blocks_and_a_larger_one_keeps_them(open_disk):
    store, (hashes, metas) = open_disk(8, segment_bytes=2 * SLOT_BYTES), chain(8)
    keep(store, hashes, metas)
    store.close()
    smaller = open_disk(3, segment_bytes=2 * SLOT_BYTES)
    assert assert_right(hashes, fetch(smaller, hashes)) == 3
    smaller.close()
    larger = open_disk(8, segment_bytes=2 * SLOT_BYTES)
    assert assert_right(hashes, fetch(larger, hashes)) == 3
    assert keep(larger, hashes, metas) == [True] * 8


# ---- folders of others


@pytest.mark.parametrize(
    ("change", "field"), [({"model": "other"}, "model"), ({"dtype": "float32"}, "dtype"), ({"version": 1}, "format")]
)
def test_a_folder_of_another_model_dtype_or_version_is_left_alone_and_logged_by_name(
    open_disk, tmp_path, monkeypatch, caplog, change, field
):
    store, (hashes, metas) = open_disk(), chain(3)
    keep(store, hashes, metas)
    store.close()
    if change.pop("version", None):
        monkeypatch.setattr("kvrelay.kvcache.stores.disk.tier.FORMAT_VERSION", 99)
    with caplog.at_level(logging.WARNING):
        other = open_disk(**change)
    assert re.search(rf"another namespace \({field} is .*rm -r {tmp_path}/kv/worker-0", caplog.text)
    assert other.contains(hashes) == [False] * 3
    other.close()
    monkeypatch.undo()
    assert open_disk().contains(hashes) == [True] * 3  # nothing was harmed


def test_blocks_under_a_manifest_that_cannot_be_read_are_discarded(open_disk, tmp_path):
    store, (hashes, metas) = open_disk(), chain(2)
    keep(store, hashes, metas)
    store.close()
    (tmp_path / "kv" / "worker-0" / "manifest.json").write_text('{"fields": {"mod')
    again = open_disk()
    assert again.contains(hashes) == [False] * 2
    assert keep(again, hashes, metas) == [True] * 2


def test_a_limit_that_holds_no_block_is_refused_with_one_that_does(tmp_path):
    namespace = Namespace.of({"model": "m"})
    least = smallest_limit(BLOCK_BYTES)
    with pytest.raises(StoreError, match=rf"set cache.disk_size to {least} or more"):
        DiskStore(tmp_path, least - 1, BLOCK_BYTES, namespace).start()
    store = DiskStore(tmp_path, least, BLOCK_BYTES, namespace, options=DiskOptions(is_admission_on=False))
    store.start()
    assert keep(store, *chain(1)) == [True]
    store.close()


def test_a_path_that_cannot_be_a_folder_is_refused_with_a_remedy(tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.raises(StoreError, match=r"not usable: .*set cache\.disk_path"):
        DiskStore(tmp_path / "file" / "kv", 1 << 20, BLOCK_BYTES, Namespace.of({})).start()


# ---- blocks that differ in size


def half_empty(digest, num_bytes=BLOCK_BYTES):
    """A block whose exponents are all alike: losslessly about half as large."""
    numbers = np.frombuffer(content(digest, num_bytes=num_bytes), np.uint16) & 0x807F | 0x3F80
    return memoryview(numbers.tobytes())


def test_slots_have_the_size_that_blocks_have_once_compressed(open_disk):
    size = 64 << 10
    store, (hashes, metas) = open_disk(8, codec=LosslessCodec("bfloat16"), block_bytes=size), chain(12)
    blocks = [half_empty(digest, size) for digest in hashes]
    assert store.store(hashes, blocks, metas) == [True] * 12  # in the room of eight uncompressed
    stats = store.stats()
    assert stats.stored_blocks * size == 12 * size > 1.4 * stats.num_bytes
    into = room(12, size)
    assert store.load(hashes, into) == [True] * 12
    assert into == blocks
    store.close()
    assert open_disk(8, codec=LosslessCodec("bfloat16"), block_bytes=size).load(hashes, into) == [True] * 12
    assert into == blocks


def test_blocks_that_outgrow_the_slots_are_refused_until_slots_are_made_anew(open_disk):
    store, (small, metas) = open_disk(8, codec=LosslessCodec("bfloat16")), chain(4)
    store.store(small, [half_empty(digest) for digest in small], metas)
    kept = []
    for number in range(20):
        hashes, metas = chain(4, salt=str(number))
        kept.append(all(keep(store, hashes, metas)))
    assert not any(kept[:16]) and all(kept[16:])
    assert store.stats().rejected_blocks == 64
    assert store.contains(small) == [False] * 4
    assert assert_right(hashes, fetch(store, hashes)) == 4


# ---- nothing leaks


def test_closing_gives_back_threads_and_files(open_disk):
    def held():
        return len(os.listdir("/proc/self/fd")), threading.active_count()

    before = held()
    store = open_disk(segment_bytes=2 * SLOT_BYTES)
    keep(store, *chain(12))
    fetch(store, chain(12)[0])
    assert held() > before
    store.close()
    assert held() == before
