"""The mover in C and in Python: the same bytes and the same hashes, from this process's memory and from another's."""

import contextlib
import ctypes
import errno
import mmap
import os
import shutil
import subprocess
import sys
from types import SimpleNamespace

import numpy as np
import pytest
import xxhash
from hypothesis import example, given, settings
from hypothesis import strategies as st

from kvrelay.kvtransfer.mover import mover, process_memory
from kvrelay.kvtransfer.mover.mover import Receipt, move, xxh3_atoms, xxh3_regions
from kvrelay.kvtransfer.mover.process_memory import NONCE_BYTES, NotTheSource, Place
from kvrelay.kvtransfer.plans.copy_plan import CopyList
from kvrelay.kvtransfer.transports.base import TransportError
from kvrelay.kvtransfer.transports.copying import place_of
from kvrelay.native.build import XXH3_HEADERS, XXH3_SOURCES, load_native

WAYS = ["native", "python"]
NONCE = ctypes.create_string_buffer(b"a nonce of 16 by", NONCE_BYTES)


@contextlib.contextmanager
def way(name):
    """The mover is this one meanwhile."""
    with pytest.MonkeyPatch.context() as patch:
        if name == "python":
            patch.setattr(mover, "library", lambda: None)
        elif mover.library() is None:
            pytest.skip("no compiled mover here")
        yield


@pytest.fixture(params=WAYS)
def each_way(request):
    with way(request.param):
        yield request.param


def noise(num_bytes, seed=0):
    return np.random.default_rng(seed).integers(0, 256, num_bytes, dtype=np.uint8)


def foreign(array):
    """The same memory, read as another process's would be."""
    return Place(array.ctypes.data, array.nbytes, os.getpid(), ctypes.addressof(NONCE), NONCE.raw)


PLACES = {"here": place_of, "another process": foreign}


# ---- hashing


@given(size=st.integers(1, 5000), start=st.integers(0, 130), seed=st.integers(0, 9))
@example(size=240, start=1, seed=0)
@example(size=241, start=1, seed=0)
@example(size=1024, start=0, seed=0)
@example(size=1025, start=63, seed=0)
@example(size=32 << 10, start=0, seed=0)
@example(size=(1 << 20) + 17, start=5, seed=0)
@settings(deadline=None)
@pytest.mark.parametrize("name", WAYS)
def test_every_size_at_every_alignment_hashes_as_the_library_does(name, size, start, seed):
    data = noise(start + size, seed)
    with way(name):
        (found,) = xxh3_regions(memoryview(data), np.array([start]), size)
    assert found == xxhash.xxh3_64_intdigest(data[start:].tobytes())


@given(size=st.integers(241, 3000), bit=st.integers(0, 8 * 241 - 1), from_end=st.booleans())
@settings(deadline=None)
def test_one_flipped_bit_anywhere_changes_the_native_hash(size, bit, from_end):
    data = noise(size)
    with way("native"):
        before = xxh3_regions(memoryview(data), np.array([0]), size)
        byte = bit // 8
        data[size - 1 - byte if from_end else byte] ^= 1 << bit % 8
        assert xxh3_regions(memoryview(data), np.array([0]), size) != before


def test_regions_are_hashed_in_the_order_asked_for_and_none_outside_the_pool(each_way):
    data = noise(64 << 10)
    offsets = np.array([40 << 10, 0, 8 << 10, 0])
    expected = [xxhash.xxh3_64_intdigest(data[start : start + 4096].tobytes()) for start in offsets]
    assert xxh3_regions(memoryview(data), offsets, 4096).tolist() == expected
    assert len(xxh3_regions(memoryview(data), offsets[:0], 4096)) == 0
    for outside in (-1, (60 << 10) + 1):
        with pytest.raises(ValueError, match="outside"):
            xxh3_regions(memoryview(data), np.array([0, outside]), 4096)


@given(each=st.integers(1, 5), piece=st.integers(1, 700), num_atoms=st.integers(0, 9), seed=st.integers(0, 99))
@settings(deadline=None)
@pytest.mark.parametrize("name", WAYS)
def test_an_atom_of_several_pieces_hashes_as_the_whole_would(name, each, piece, num_atoms, seed):
    data = noise(8000, seed)
    pieces = np.random.default_rng(seed).integers(0, 8000 - piece, (num_atoms, each))
    with way(name):
        found = xxh3_atoms(memoryview(data), pieces, piece)
    wholes = [b"".join(data[start : start + piece].tobytes() for start in starts) for starts in pieces]
    assert found.tolist() == [xxhash.xxh3_64_intdigest(whole) for whole in wholes]


# ---- moving


@st.composite
def moves(draw):
    """(copies, source, target's size, where to pause): rows of any length that do not overlap in the target."""
    repeats = draw(st.integers(0, 3))
    sizes = draw(st.lists(st.integers(0, 3000), min_size=0, max_size=12))
    gaps = draw(st.lists(st.integers(0, 40), min_size=len(sizes), max_size=len(sizes)))
    starts = np.cumsum([0, *(size + gap for size, gap in zip(sizes, gaps, strict=True))])
    order = draw(st.permutations(range(len(sizes))))
    target_offset = np.array([starts[i] for i in order], np.int64)
    num_bytes = np.array([sizes[i] for i in order], np.int64)
    stride = int(starts[-1])
    source_offset = np.array([draw(st.integers(0, 5000)) for _ in order], np.int64)
    source_stride = draw(st.integers(0, 900))
    copies = CopyList(source_offset, target_offset, num_bytes, repeats, source_stride, stride)
    pauses = draw(st.lists(st.integers(0, copies.total_bytes), max_size=3).map(sorted))
    return copies, noise(8000 + repeats * 900, 1), max(stride * repeats, 1), pauses


def carried_out(copies, source, target_bytes):
    target = np.zeros(target_bytes, np.uint8)
    for start, to, size in zip(*(row.tolist() for row in copies.expanded()), strict=True):
        target[to : to + size] = source[start : start + size]
    return target


@given(moves())
@settings(deadline=None)
@pytest.mark.parametrize("name", WAYS)
@pytest.mark.parametrize("place", PLACES)
def test_the_rows_arrive_and_no_other_byte_is_written_however_often_it_pauses(name, place, given_move):
    copies, source, target_bytes, pauses = given_move
    target = np.zeros(target_bytes, np.uint8)
    receipt = Receipt()
    with way(name):
        moving = move(PLACES[place](source), place_of(target), copies, receipt)
        for pause in pauses:
            moving.run(pause)
            assert receipt.num_landed == pause
        moving.run()
    assert receipt.num_landed == copies.total_bytes
    assert np.array_equal(target, carried_out(copies, source, target_bytes))


@pytest.mark.parametrize("place", PLACES)
@pytest.mark.parametrize("shift", [0, 1, 31, 32, 63])
@pytest.mark.parametrize("is_hashed", [False, True], ids=["unchecked", "checked"])
def test_large_reads_at_odd_addresses(each_way, place, shift, is_hashed):
    """Large enough for the way past the caches; rows of many regions and many rows in a system call."""
    region, count = 5 << 10, 700
    rng = np.random.default_rng(2)
    source, target = noise(region * 1000, 3), np.zeros(region * 1000 + shift, np.uint8)
    to = rng.permutation(1000)[:count] * region
    copies = CopyList(rng.permutation(1000)[:count] * region, to + shift, np.full(count, region, np.int64))
    receipt = Receipt((to + shift)[:, None], region) if is_hashed else Receipt()
    move(PLACES[place](source), place_of(target), copies, receipt).run()
    assert np.array_equal(target, carried_out(copies, source, target.nbytes))
    if is_hashed:
        assert np.array_equal(receipt.found, xxh3_regions(memoryview(source), copies.source_offset, region))
        assert receipt.hash_s > 0


@pytest.mark.parametrize("place", PLACES)
@pytest.mark.parametrize("region", [64, 700, 300 << 10], ids=["short", "small", "larger than a piece"])
def test_what_is_hashed_is_what_lies_in_the_target(each_way, place, region):
    """Rows of several regions, hashed one by one; unchecked ones are left out."""
    source, target = noise(8 * region), np.zeros(8 * region, np.uint8)
    copies = CopyList(np.array([3 * region, 0]), np.array([0, 5 * region]), np.array([5 * region, 3 * region]))
    offsets, is_checked = np.arange(8) * region, np.arange(8) % 3 != 1
    receipt = Receipt(offsets[:, None], region, is_checked)
    moving = move(PLACES[place](source), place_of(target), copies, receipt)
    moving.run(2 * region + region // 2)
    assert np.flatnonzero(receipt.found).tolist() == [0]  # 1 is not checked, 2 is not complete
    moving.run()
    expected = xxh3_regions(memoryview(target), offsets, region)
    assert np.array_equal(receipt.found, np.where(is_checked, expected, 0))
    source[0] ^= 1  # a control: the hash is of the bytes
    assert xxh3_regions(memoryview(source), np.array([0]), region) != expected[5]


@pytest.mark.parametrize("place", PLACES)
@pytest.mark.parametrize("piece", [16, 1000], ids=["short", "long"])
def test_atoms_of_several_pieces_are_hashed_as_their_last_piece_lands(each_way, place, piece):
    """K and V of two heads each, say, that lie apart in the target."""
    source, target = noise(60 * piece), np.zeros(60 * piece, np.uint8)
    pieces = np.random.default_rng(4).permutation(60)[:40].reshape(10, 4) * piece
    copies = CopyList(np.arange(40) * piece, pieces.ravel(), np.full(40, piece, np.int64))
    receipt = Receipt(pieces, piece)
    moving = move(PLACES[place](source), place_of(target), copies, receipt)
    moving.run(7 * piece)
    assert np.flatnonzero(receipt.found).tolist() == [0]
    moving.run()
    assert np.array_equal(receipt.found, xxh3_regions(memoryview(source), np.arange(10) * 4 * piece, 4 * piece))


@pytest.mark.parametrize(
    ("source_offset", "target_offset", "size", "repeats", "stride"),
    [
        (-1, 0, 10, 1, 0),
        (0, -1, 10, 1, 0),
        (0, 0, -1, 1, 0),
        (991, 0, 10, 1, 0),
        (0, 991, 10, 1, 0),
        (0, 0, 10, 3, 496),
        (0, 0, 10, 2, 2**62),
        (2**62, 0, 10, 1, 0),
    ],
)
def test_a_row_outside_either_pool_is_refused_before_a_byte_moves(
    each_way, source_offset, target_offset, size, repeats, stride
):
    source, target = np.ones(1000, np.uint8), np.zeros(1000, np.uint8)
    rows = [np.array([0, value]) for value in (source_offset, target_offset, size)]
    rows[2][0] = 5
    copies = CopyList(*rows, repeats, stride, stride)
    with pytest.raises(TransportError, match="outside the pool"):
        move(place_of(source), place_of(target), copies, Receipt()).run()
    assert not target.any()


def test_no_more_lands_than_the_rows_hold(each_way):
    source, target = np.ones(1000, np.uint8), np.zeros(1000, np.uint8)
    copies = CopyList(np.array([0]), np.array([0]), np.array([10]))
    with pytest.raises(TransportError, match="outside the pool"):
        move(place_of(source), place_of(target), copies, Receipt()).run(11)
    assert not target.any()


# ---- another process's memory

_SQUATTER = """
import ctypes, sys
libc = ctypes.CDLL(None, use_errno=True)
libc.mmap.restype = ctypes.c_void_p
libc.mmap.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int, ctypes.c_int, ctypes.c_int, ctypes.c_long]
address, size, content, nonce = int(sys.argv[1]), int(sys.argv[2]), int(sys.argv[3]), bytes.fromhex(sys.argv[4])
got = libc.mmap(address, size, 3, 0x22 | 0x100000, -1, 0)  # private, anonymous, at this address and no other
assert got == address, (got, ctypes.get_errno())
ctypes.memset(address, content, size)
ctypes.memmove(address, nonce, len(nonce))
print("ready", flush=True)
sys.stdin.read()
"""
_ADDRESS, _SIZE = 0x7E0000000000, 8 << 20


@contextlib.contextmanager
def squatter(content, nonce, size=None):
    """A process with a pool at the one address, its nonce at the pool's beginning."""
    process = subprocess.Popen(
        [sys.executable, "-c", _SQUATTER, str(_ADDRESS), str(size or _SIZE), str(content), nonce.hex()],
        stdin=subprocess.PIPE, stdout=subprocess.PIPE,
    )  # fmt: skip
    with process:
        assert process.stdout.readline() == b"ready\n"
        yield process
        process.stdin.close()


def whole_pool(pid):
    """A read of everything behind the nonce, and where it goes."""
    target = np.zeros(_SIZE, np.uint8)
    rows = np.arange(NONCE_BYTES, _SIZE, 64 << 10)
    sizes = np.diff(np.append(rows, _SIZE))
    place = Place(_ADDRESS, _SIZE, pid, _ADDRESS, NONCE.raw)
    return move(place, place_of(target), CopyList(rows, rows, sizes), Receipt()), target


@pytest.mark.slow
def test_a_process_with_the_nonce_is_read_and_another_one_under_its_pid_is_not(each_way):
    with squatter(7, NONCE.raw) as source, squatter(9, b"another nonce...") as stranger:
        reading, target = whole_pool(source.pid)
        reading.run()
        assert (target[NONCE_BYTES:] == 7).all()
        reading, _ = whole_pool(stranger.pid)  # what the pid of a dead source may have become
        with pytest.raises(NotTheSource, match=f"process {stranger.pid} is not the source"):
            reading.run()


@pytest.mark.slow
def test_a_source_killed_in_the_middle_of_a_read_ends_it(each_way):
    with squatter(7, NONCE.raw) as source:
        reading, target = whole_pool(source.pid)
        reading.run(1 << 20)
        source.kill()
        source.wait()
        with pytest.raises(ProcessLookupError) as error:
            reading.run()
        assert error.value.errno == errno.ESRCH
        assert not target[NONCE_BYTES + (1 << 20) :].any()


def test_memory_that_cannot_be_read_is_a_fault_and_not_a_short_read(each_way):
    """The pool's last page is closed, so that the kernel stops in the middle of the last row."""
    page, libc = mmap.PAGESIZE, ctypes.CDLL(None)
    with mmap.mmap(-1, 4 * page) as mapping:
        pool = np.frombuffer(mapping, np.uint8)
        last = ctypes.c_void_p(pool.ctypes.data + 3 * page), ctypes.c_size_t(page)
        copies = CopyList(*(np.array([0, 2 * page]) for _ in range(2)), np.array([2 * page, 2 * page]))
        target = np.zeros(pool.nbytes, np.uint8)
        move(foreign(pool), place_of(target), copies, Receipt()).run()  # a control
        assert libc.mprotect(*last, 0) == 0
        with pytest.raises(OSError) as error:
            move(foreign(pool), place_of(target), copies, Receipt()).run()
        assert libc.mprotect(*last, mmap.PROT_READ | mmap.PROT_WRITE) == 0
        del pool
    assert error.value.errno == errno.EFAULT


_SHORT = """
#define _GNU_SOURCE
#include <sys/uio.h>
static int num_calls;
static ssize_t readv_a_little(pid_t pid, const struct iovec *to, unsigned long n, const struct iovec *from,
                              unsigned long m, unsigned long flags)
{
    struct iovec ours[1024], theirs[1024];
    size_t left = 1000 + 777 * (num_calls++ % 3);
    for (unsigned long i = 0; i < n; i++) {
        ours[i] = to[i], theirs[i] = from[i];
        if (ours[i].iov_len > left) ours[i].iov_len = theirs[i].iov_len = left;
        left -= ours[i].iov_len;
    }
    return process_vm_readv(pid, ours, n, theirs, m, flags);
}
#define process_vm_readv readv_a_little
#include "MOVE"
"""


def short_calls(name, monkeypatch, folder):
    """System calls that bring at most a few kilobytes each, cut anywhere."""
    if name == "native":
        source = folder / "short.c"
        source.write_text(_SHORT.replace("MOVE", str(mover._FOLDER / "move.c")))
        headers = [*mover._FOLDER.glob("*.[ch]"), *XXH3_HEADERS]
        lib = load_native("short", [source, *XXH3_SOURCES], headers)
        lib.kt_move.argtypes, lib.kt_move.restype = [ctypes.c_void_p, ctypes.c_int64], ctypes.c_int
        monkeypatch.setattr(mover, "library", lambda: lib)
        return
    libc = process_memory._libc

    def readv_a_little(pid, ours, n, theirs, _m, flags):
        left = 1777
        for mine, other in zip(ours, theirs, strict=True):
            mine.size = other.size = min(mine.size, left)
            left -= mine.size
        return libc.process_vm_readv(pid, ours, n, theirs, n, flags)

    monkeypatch.setattr(process_memory, "_libc", SimpleNamespace(process_vm_readv=readv_a_little))


def test_short_reads_go_on_where_they_stopped(each_way, monkeypatch, tmp_path):
    short_calls(each_way, monkeypatch, tmp_path)
    source, target = noise(30_000), np.zeros(30_000, np.uint8)
    copies = CopyList(np.array([5, 9000, 20_000]), np.array([0, 12_000, 7000]), np.array([6999, 11_000, 5000]))
    receipt = Receipt(np.array([[0], [12_000]]), 5000)
    move(foreign(source), place_of(target), copies, receipt).run()
    assert np.array_equal(target, carried_out(copies, source, target.nbytes))
    assert receipt.found[0] == xxhash.xxh3_64_intdigest(target[:5000].tobytes())


@pytest.mark.slow
def test_a_stranger_is_no_source_even_where_it_has_less_memory(each_way):
    with squatter(9, b"another nonce...", 96 << 10) as stranger:
        reading, _ = whole_pool(stranger.pid)
        with pytest.raises(NotTheSource):
            reading.run()


def test_a_nonce_that_goes_during_a_call_is_noticed(each_way):
    """The read itself overwrites it."""
    target = np.zeros(4096, np.uint8)
    target[64 : 64 + NONCE_BYTES] = np.frombuffer(NONCE.raw, np.uint8)
    source = noise(4096)
    place = Place(source.ctypes.data, 4096, os.getpid(), target.ctypes.data + 64, NONCE.raw)
    before, over = CopyList(*[np.array([n]) for n in (0, 0, 64)]), CopyList(*[np.array([n]) for n in (0, 0, 65)])
    move(place, place_of(target), before, Receipt()).run()
    with pytest.raises(NotTheSource):
        move(place, place_of(target), over, Receipt()).run()


def test_a_withdrawn_nonce_ends_a_read(each_way):
    nonce = ctypes.create_string_buffer(b"a nonce of 16 by", NONCE_BYTES)
    source, target = noise(2 << 20), np.zeros(2 << 20, np.uint8)
    place = Place(source.ctypes.data, source.nbytes, os.getpid(), ctypes.addressof(nonce), nonce.raw)
    reading = move(place, place_of(target), CopyList(*(np.array([n]) for n in (0, 0, source.nbytes))), Receipt())
    reading.run(1 << 20)
    nonce.raw = bytes(NONCE_BYTES)
    with pytest.raises(NotTheSource):
        reading.run()
    assert np.array_equal(target[: 1 << 20], source[: 1 << 20])


# ---- without a compiler


@pytest.fixture
def forgotten():
    """The library is looked for anew, now and afterwards."""
    mover.library.cache_clear()
    yield
    mover.library.cache_clear()


@pytest.mark.parametrize("why", ["switched off", "no compiler"])
def test_without_a_compiled_mover_there_is_the_other(forgotten, monkeypatch, why):
    if why == "switched off":
        monkeypatch.setenv("KVRELAY_NATIVE", "0")
    else:
        monkeypatch.setattr(shutil, "which", lambda name: None)
    assert mover.library() is None
    source, target = noise(1 << 20), np.zeros(1 << 20, np.uint8)
    receipt = Receipt(np.array([[0]]), 1 << 20)
    rows = [np.array([n]) for n in (0, 0, 1 << 20)]
    moving = move(place_of(source), place_of(target), CopyList(*rows), receipt)
    assert isinstance(moving, mover.PythonMove)
    moving.run()
    assert receipt.found.tolist() == [xxhash.xxh3_64_intdigest(source.tobytes())]


@pytest.mark.skipif(not shutil.which("cc"), reason="no C compiler")
def test_with_a_compiler_the_mover_is_the_compiled_one():
    rows = [np.array([n]) for n in (0, 0, 8)]
    source, target = noise(8), np.zeros(8, np.uint8)
    assert isinstance(move(place_of(source), place_of(target), CopyList(*rows), Receipt()), mover.NativeMove)
