"""The disk tier under bad disks and sudden death: nothing wrong is ever served, and the store stays usable."""

import errno
import logging
import os
import shutil
import subprocess
import sys
import threading
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from types import SimpleNamespace

import pytest

from kvrelay.errors import StoreError
from kvrelay.kvcache.stores.disk import folder as disk_folder
from kvrelay.kvcache.stores.disk.format import HEADER_BYTES, PAGE_BYTES, smallest_limit
from kvrelay.kvcache.stores.disk.tier import DiskOptions, DiskStore
from kvrelay.kvcache.stores.disk.volume import Volume
from kvrelay.kvcache.stores.namespace import Namespace
from tests.kvcache.stores import disk_writer
from tests.kvcache.stores.store_contract import BLOCK_BYTES, assert_right, chain, check, content, fetch, keep, started

SLOT_BYTES = BLOCK_BYTES + PAGE_BYTES
ROOT = Path(__file__).resolve().parents[3]


@pytest.fixture
def open_disk(tmp_path):
    with started() as start:

        def open_disk(num_blocks=8, *, clock=lambda: 0.0, folder="kv", **options):
            store = DiskStore(
                tmp_path / folder,
                smallest_limit(0) + num_blocks * SLOT_BYTES,
                BLOCK_BYTES,
                Namespace.of({"model": "m"}),
                options=DiskOptions(**{"is_admission_on": False, "segment_bytes": 16 * SLOT_BYTES, **options}),
                clock=clock,
            )
            return start(store)

        yield open_disk


def segment(tmp_path):
    (path,) = (tmp_path / "kv" / "worker-0").glob("segment-*.kv")
    return path


def flip(path, position, bit):
    with open(path, "r+b") as file:
        file.seek(position)
        byte = file.read(1)[0]
        file.seek(position)
        file.write(bytes([byte ^ 1 << bit]))


# ---- bits that flip


def flips():
    """Every byte of a header, and the payload from end to end."""
    header = [(position, position % 8) for position in range(HEADER_BYTES)]
    payload = [(PAGE_BYTES + position, position % 8) for position in range(0, BLOCK_BYTES, 61)]
    return [*header, *payload, (PAGE_BYTES, 0), (SLOT_BYTES - 1, 7)]


def test_a_flipped_bit_anywhere_makes_a_miss_while_the_store_is_open(open_disk, tmp_path):
    store, (hashes, metas) = open_disk(1), chain(1)
    for number, (position, bit) in enumerate(flips()):
        assert keep(store, hashes, metas) == [True]
        flip(segment(tmp_path), position, bit)
        assert fetch(store, hashes) == [None], f"bit {bit} of byte {position}"
        assert store.contains(hashes) == [False]
        assert store.stats().corrupt_blocks == number + 1


def test_a_flipped_bit_anywhere_makes_a_miss_after_a_restart(open_disk, tmp_path):
    store, (hashes, metas) = open_disk(1), chain(1)
    keep(store, hashes, metas)
    store.close()
    for position, bit in flips()[::3]:
        flip(segment(tmp_path), position, bit)
        whole = segment(tmp_path).read_bytes()
        again = open_disk(1)
        assert fetch(again, hashes) == [None], f"bit {bit} of byte {position}"
        again.close()
        segment(tmp_path).write_bytes(whole)
        flip(segment(tmp_path), position, bit)
    assert fetch(open_disk(1), hashes) == [content(hashes[0])]  # only the bits were at fault


def test_without_checksums_the_flipped_block_would_be_served(open_disk, tmp_path, monkeypatch):
    monkeypatch.setattr("kvrelay.kvcache.stores.disk.records.payload_checksum", lambda data: 0)
    store, (hashes, metas) = open_disk(1), chain(1)
    keep(store, hashes, metas)
    flip(segment(tmp_path), PAGE_BYTES + 100, 3)
    (block,) = fetch(store, hashes)
    assert block is not None and block != content(hashes[0])


def test_without_payload_checksums_a_flipped_hash_would_be_believed(open_disk, tmp_path, monkeypatch):
    monkeypatch.setattr("kvrelay.kvcache.stores.disk.format.payload_checksum", lambda body: 0)
    store, (hashes, metas) = open_disk(1), chain(1)
    keep(store, hashes, metas)
    store.close()
    place = segment(tmp_path).read_bytes().index(hashes[0])
    flip(segment(tmp_path), place, 0)
    wrong = type(hashes[0])(bytes([hashes[0][0] ^ 1]) + hashes[0][1:])
    assert fetch(open_disk(1), [wrong]) == [content(hashes[0])]


def test_a_slot_that_lies_in_anothers_place_is_not_believed(open_disk, tmp_path):
    store, (hashes, metas) = open_disk(2), chain(2)
    keep(store, hashes, metas)
    store.close()
    data = segment(tmp_path).read_bytes()
    segment(tmp_path).write_bytes(data[SLOT_BYTES:] + data[:SLOT_BYTES])
    assert fetch(open_disk(2), hashes) == [None, None]


# ---- writes that stop half-way


def test_a_write_torn_at_any_sector_leaves_the_old_block_the_new_one_or_a_miss(open_disk, tmp_path):
    """Both orders of arrival, over a row that held another block."""
    store, (old, old_metas), (new, new_metas) = open_disk(1), chain(1, salt="old"), chain(1, salt="new")
    keep(store, old, old_metas)
    before = segment(tmp_path).read_bytes()
    keep(store, new, new_metas)
    after = segment(tmp_path).read_bytes()
    store.close()
    seen = set()
    for cut in range(0, SLOT_BYTES + 1, 512):
        for image in (after[:cut] + before[cut:], before[:cut] + after[cut:]):
            segment(tmp_path).write_bytes(image)
            again = open_disk(1)
            found = tuple(fetch(again, [*old, *new]))
            assert_right([*old, *new], found)
            seen.add(tuple(block is not None for block in found))
            again.close()
    assert seen == {(True, False), (False, True), (False, False)}


def test_a_segment_cut_short_is_made_whole_and_what_is_left_is_served(open_disk, tmp_path):
    store, (hashes, metas) = open_disk(4), chain(4)
    keep(store, hashes, metas)
    store.close()
    os.truncate(segment(tmp_path), 2 * SLOT_BYTES + 100)
    again = open_disk(4)
    assert assert_right(hashes, fetch(again, hashes)) == 2
    assert keep(again, hashes, metas) == [True] * 4


def test_nothing_wrong_is_served_after_kill_9_in_the_middle_of_writes(tmp_path):
    number, num_served = 0, 0
    for round_number in range(4):
        child = subprocess.Popen(
            [sys.executable, disk_writer.__file__, str(tmp_path), str(number)],
            stdout=subprocess.PIPE,
            env={**os.environ, "PYTHONPATH": str(ROOT)},
        )
        with child:
            for _ in range(3 + 5 * round_number):
                assert child.stdout is not None
                number = int(child.stdout.readline()) + 1
            child.kill()
        store = DiskStore(
            tmp_path, disk_writer.LIMIT_BYTES, BLOCK_BYTES, disk_writer.NAMESPACE, options=disk_writer.OPTIONS
        )
        store.start()
        number += 40  # it may have gone on after the last line that we read
        for past in range(max(0, number - 100), number):
            hashes, _ = disk_writer.prompt(past)
            num_served += assert_right(hashes, fetch(store, hashes))
        check(store)
        assert store.stats().failures == 0
        store.close()
    assert num_served >= 4 * 20


# ---- disks that refuse


def failing(monkeypatch, call, code):
    """Let `os.<call>` raise this error."""

    def fail(*args):
        raise OSError(code, os.strerror(code))

    monkeypatch.setattr(os, call, fail)


def test_a_full_disk_stops_no_one_and_is_told_once_a_minute(open_disk, monkeypatch, caplog):
    now = [0.0]
    store = open_disk(8, clock=lambda: now[0], segment_bytes=2 * SLOT_BYTES)
    hashes, metas = chain(4)
    assert keep(store, hashes[:2], metas[:2]) == [True] * 2
    failing(monkeypatch, "posix_fallocate", errno.ENOSPC)
    other, other_metas = chain(4, salt="other")
    assert keep(store, other, other_metas) == [True, True, False, False]  # in the one segment that there is
    for number in range(5):
        keep(store, *chain(4, salt=str(number)))
    assert caplog.text.count("No space left") == 1 and "lower cache.disk_size" in caplog.text
    assert store.stats().failures == 1 and store.stats().num_blocks == 2
    monkeypatch.undo()
    now[0] = 61.0
    assert keep(store, hashes, metas) == [True] * 4
    assert assert_right(hashes, fetch(store, hashes)) == 4


def disk_with(monkeypatch, num_bytes):
    """Let every disk have this room: what statvfs shows, and what can be allocated."""
    real, left = os.posix_fallocate, [num_bytes]

    def allocate(fd, offset, size):
        if size > left[0]:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        left[0] -= size
        real(fd, offset, size)

    monkeypatch.setattr(os, "posix_fallocate", allocate)
    monkeypatch.setattr(os, "statvfs", lambda path: SimpleNamespace(f_bavail=left[0] // 512, f_frsize=512))


@pytest.mark.parametrize("segment_bytes", [None, 16 * SLOT_BYTES])
def test_a_disk_with_less_room_than_a_segment_keeps_what_it_has_room_for(open_disk, monkeypatch, segment_bytes):
    disk_with(monkeypatch, 9 * SLOT_BYTES)
    store, (hashes, metas) = open_disk(1000, segment_bytes=segment_bytes), chain(16)
    assert sum(keep(store, hashes, metas)) >= 8
    assert assert_right(hashes, fetch(store, hashes)) >= 8


def test_a_folder_without_segments_takes_their_size_from_the_room_at_this_start(open_disk, monkeypatch):
    open_disk(64).close()  # its manifest says 16 rows a segment
    disk_with(monkeypatch, 9 * SLOT_BYTES)
    store, (hashes, metas) = open_disk(64), chain(4)
    assert keep(store, hashes, metas) == [True] * 4
    store.close()
    disk_with(monkeypatch, 1000 * SLOT_BYTES)
    assert assert_right(hashes, fetch(open_disk(64), hashes)) == 4  # now there are segments, and their size stays


def test_a_disk_without_room_for_a_single_block_keeps_nothing(open_disk, monkeypatch):
    disk_with(monkeypatch, SLOT_BYTES - 1)
    store, (hashes, metas) = open_disk(), chain(4)
    assert keep(store, hashes, metas) == [False] * 4
    assert fetch(store, hashes) == [None] * 4
    assert store.stats().rejected_blocks == 4


@pytest.mark.parametrize("call", ["_claim", "write_manifest"])
@pytest.mark.parametrize("code", [errno.ENOSPC, errno.EDQUOT, errno.EACCES])
def test_a_disk_that_is_full_at_the_start_is_used_once_it_has_room(open_disk, monkeypatch, caplog, call, code):
    """A worker that starts then serves without it."""

    def fail(*args):
        raise OSError(code, os.strerror(code))

    now, (hashes, metas) = [0.0], chain(4)
    with monkeypatch.context() as patch:
        patch.setattr(disk_folder if call == "_claim" else disk_folder.WorkerFolder, call, fail)
        if code == errno.EACCES:
            with pytest.raises(StoreError, match=r"(?i)permission|writ"):
                open_disk(clock=lambda: now[0])
            return
        store = open_disk(clock=lambda: now[0])
        assert keep(store, hashes, metas) == [False] * 4
        assert "disk tier: " in caplog.text and store.stats().num_blocks == 0
    now[0] = 61.0
    assert keep(store, hashes, metas) == [True] * 4
    assert assert_right(hashes, fetch(store, hashes)) == 4


@pytest.mark.parametrize("code", [errno.ENOSPC, errno.EROFS, errno.EIO])
def test_a_write_that_fails_is_no_block_and_the_next_one_is(open_disk, monkeypatch, caplog, code):
    store, (hashes, metas) = open_disk(), chain(4)
    with monkeypatch.context() as patch, caplog.at_level(logging.ERROR):
        failing(patch, "pwritev", code)
        for _ in range(3):
            assert keep(store, hashes, metas) == [False] * 4
    assert store.stats().failures == 3 and len(caplog.records) == 1
    assert fetch(store, hashes) == [None] * 4
    assert keep(store, hashes, metas) == [True] * 4
    assert assert_right(hashes, fetch(store, hashes)) == 4


def test_a_bad_place_on_the_disk_costs_its_own_block_only(open_disk, monkeypatch):
    store, (hashes, metas) = open_disk(io_depth=1), chain(4)  # a single request for all four
    keep(store, hashes, metas)
    real, asked = os.preadv, []

    def preadv(fd, buffers, offset):
        size = sum(buffer.nbytes for buffer in buffers)
        asked.append(size // SLOT_BYTES)
        if offset <= SLOT_BYTES + PAGE_BYTES < offset + size:  # in the second block
            raise OSError(errno.EIO, os.strerror(errno.EIO))
        return real(fd, buffers, offset)

    with monkeypatch.context() as patch:
        patch.setattr(os, "preadv", preadv)
        assert [block is not None for block in fetch(store, hashes)] == [True, False, True, True]
    assert asked == [4, 1, 1, 1, 1]
    assert store.contains(hashes) == [True, False, True, True]
    assert store.stats().failures == 1


def test_an_older_copy_whose_slot_was_never_written_again_does_not_come_back_from_the_dead(open_disk, monkeypatch):
    store, (unwanted, metas) = open_disk(4), chain(1, salt="unwanted")
    keep(store, unwanted, metas)
    for number in range(3):
        keep(store, *chain(1, salt=str(number)))
    with monkeypatch.context() as patch:  # evicts it and one more, and writes nothing in their place
        failing(patch, "pwritev", errno.EIO)
        keep(store, *chain(2, salt="lost"))
    assert store.contains(unwanted) == [False]
    assert keep(store, unwanted, metas) == [True]  # in the other row
    store.delete(unwanted)
    store.close()
    assert open_disk(4).contains(unwanted) == [False]


# ---- while something is under way


def paused(monkeypatch, call):
    """The next `os.<call>` sets the first event, then waits for the second."""
    real, began, go = getattr(os, call), threading.Event(), threading.Event()

    def pause(*args):
        if not began.is_set():
            began.set()
            assert go.wait(30)
        return real(*args)

    monkeypatch.setattr(os, call, pause)
    return began, go


def test_a_block_that_is_being_read_is_not_overwritten(open_disk, monkeypatch):
    store, (hashes, metas) = open_disk(4), chain(1)
    keep(store, hashes, metas)
    began, go = paused(monkeypatch, "preadv")
    with ThreadPoolExecutor(1) as pool:
        loading = pool.submit(fetch, store, hashes)
        assert began.wait(30)
        for number in range(4):
            keep(store, *chain(3, salt=str(number)))
        go.set()
        assert loading.result() == [content(hashes[0])]
    assert store.stats().corrupt_blocks == 0


def test_a_block_that_is_deleted_while_it_is_read_is_read_to_the_end_and_gone(open_disk, monkeypatch):
    store, (hashes, metas) = open_disk(1), chain(1)
    keep(store, hashes, metas)
    began, go = paused(monkeypatch, "preadv")
    with ThreadPoolExecutor(1) as pool:
        loading = pool.submit(fetch, store, hashes)
        assert began.wait(30)
        store.delete(hashes)
        assert keep(store, *chain(1, salt="no room yet")) == [False]  # its row is not free before the read is over
        go.set()
        assert loading.result() in ([content(hashes[0])], [None])
    assert store.contains(hashes) == [False]
    assert keep(store, *chain(1, salt="room now")) == [True]


def test_who_stores_what_another_is_writing_waits_for_it(open_disk, monkeypatch):
    store, (hashes, metas) = open_disk(4), chain(2)
    real, waiting = Volume._wait_for_writes, threading.Event()

    def wait_for_writes(volume, concern):
        if concern():
            waiting.set()
        real(volume, concern)

    monkeypatch.setattr(Volume, "_wait_for_writes", wait_for_writes)
    began, go = paused(monkeypatch, "pwritev")
    with ThreadPoolExecutor(2) as pool:
        first = pool.submit(keep, store, hashes, metas)
        assert began.wait(30)
        second = pool.submit(keep, store, hashes, metas)
        assert waiting.wait(30) and not second.done()
        go.set()
        assert first.result() == second.result() == [True, True]
    assert store.stats().stored_blocks == 2


def test_closing_waits_for_what_is_being_written(open_disk, monkeypatch):
    store, (hashes, metas) = open_disk(4), chain(2)
    began, go = paused(monkeypatch, "pwritev")
    with ThreadPoolExecutor(2) as pool:
        storing = pool.submit(keep, store, hashes, metas)
        assert began.wait(30)
        closing = pool.submit(store.close)
        go.set()
        assert storing.result() == [True, True]
        closing.result()
    assert assert_right(hashes, fetch(open_disk(4), hashes)) == 2


@pytest.mark.slow
def test_a_real_disk_that_is_full_or_read_only(tmp_path):
    script = Path(__file__).with_name("full_disk.py")
    done = subprocess.run(
        ["unshare", "-rm", sys.executable, str(script), str(tmp_path)],
        capture_output=True,
        text=True,
        env={**os.environ, "PYTHONPATH": str(ROOT)},
    )
    if done.returncode == 77 or "unshare:" in done.stderr:
        pytest.skip(f"no mounts here: {done.stdout}{done.stderr}")
    assert done.stdout == "held\n", done.stderr


# ---- folders that vanish


def test_a_folder_removed_while_in_use_is_let_go_and_made_anew(open_disk, tmp_path, caplog):
    now = [0.0]
    store, (hashes, metas) = open_disk(clock=lambda: now[0]), chain(4)
    keep(store, hashes, metas)
    shutil.rmtree(tmp_path / "kv")
    assert fetch(store, hashes) == [None] * 4
    assert "was removed" in caplog.text
    assert not [link for link in open_files() if str(tmp_path) in link and "(deleted)" in link]
    now[0] = 61.0
    assert keep(store, hashes, metas) == [True] * 4
    assert assert_right(hashes, fetch(store, hashes)) == 4


def open_files():
    found = []
    for name in os.listdir("/proc/self/fd"):
        try:
            found.append(os.readlink(f"/proc/self/fd/{name}"))
        except FileNotFoundError:
            continue
    return found


def test_a_folder_that_another_process_clears_meanwhile_is_not_claimed_half_gone(open_disk, tmp_path, monkeypatch):
    """Between our opening of the lock and our locking it, somebody deletes the folder."""
    open_disk().close()
    real = disk_folder.fcntl.flock

    def flock(fd, how):
        shutil.rmtree(tmp_path / "kv" / "worker-0", ignore_errors=True)
        monkeypatch.undo()
        real(fd, how)

    monkeypatch.setattr(disk_folder.fcntl, "flock", flock)
    store, (hashes, metas) = open_disk(), chain(2)
    assert keep(store, hashes, metas) == [True] * 2
    assert assert_right(hashes, fetch(store, hashes)) == 2
