"""The mover in C and in Python: the same bytes and the same hashes."""

import contextlib
import shutil

import numpy as np
import pytest
import xxhash
from hypothesis import example, given, settings
from hypothesis import strategies as st

from kvrelay.errors import TransportError
from kvrelay.kvtransfer.mover import mover
from kvrelay.kvtransfer.mover.copy_plan import CopyList
from kvrelay.kvtransfer.mover.mover import Receipt, move, xxh3_chunks, xxh3_regions
from kvrelay.kvtransfer.transports.memory import place_of

WAYS = ["native", "python"]


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


@given(each=st.integers(1, 5), piece=st.integers(1, 700), num_chunks=st.integers(0, 9), seed=st.integers(0, 99))
@settings(deadline=None)
@pytest.mark.parametrize("name", WAYS)
def test_an_chunk_of_several_pieces_hashes_as_the_whole_would(name, each, piece, num_chunks, seed):
    data = noise(8000, seed)
    pieces = np.random.default_rng(seed).integers(0, 8000 - piece, (num_chunks, each))
    with way(name):
        found = xxh3_chunks(memoryview(data), pieces, piece)
    wholes = [b"".join(data[start : start + piece].tobytes() for start in starts) for starts in pieces]
    assert found.tolist() == [xxhash.xxh3_64_intdigest(whole) for whole in wholes]


# ---- moving


@st.composite
def moves(draw):
    """(copies, source, target's size): rows of any length that do not overlap in the target."""
    sizes = draw(st.lists(st.integers(0, 3000), min_size=0, max_size=12))
    gaps = draw(st.lists(st.integers(0, 40), min_size=len(sizes), max_size=len(sizes)))
    starts = np.cumsum([0, *(size + gap for size, gap in zip(sizes, gaps, strict=True))])
    order = draw(st.permutations(range(len(sizes))))
    target_offset = np.array([starts[i] for i in order], np.int64)
    num_bytes = np.array([sizes[i] for i in order], np.int64)
    source_offset = np.array([draw(st.integers(0, 5000)) for _ in order], np.int64)
    return CopyList(source_offset, target_offset, num_bytes), noise(8000, 1), max(int(starts[-1]), 1)


def carried_out(copies, source, target_bytes):
    target = np.zeros(target_bytes, np.uint8)
    for start, to, size in zip(*copies.rows(), strict=True):
        target[to : to + size] = source[start : start + size]
    return target


@given(moves())
@settings(deadline=None)
@pytest.mark.parametrize("name", WAYS)
def test_the_rows_arrive_and_no_other_byte_is_written(name, given_move):
    copies, source, target_bytes = given_move
    target = np.zeros(target_bytes, np.uint8)
    receipt = Receipt()
    with way(name):
        move(place_of(source), place_of(target), copies, receipt).run()
    assert receipt.num_landed == copies.total_bytes
    assert np.array_equal(target, carried_out(copies, source, target_bytes))


@pytest.mark.parametrize("shift", [0, 1, 31, 32, 63])
@pytest.mark.parametrize("is_hashed", [False, True], ids=["unchecked", "checked"])
def test_large_reads_at_odd_addresses(each_way, shift, is_hashed):
    """Large enough for the way past the caches; rows of many regions and many rows in a system call."""
    region, count = 5 << 10, 700
    rng = np.random.default_rng(2)
    source, target = noise(region * 1000, 3), np.zeros(region * 1000 + shift, np.uint8)
    to = rng.permutation(1000)[:count] * region
    copies = CopyList(rng.permutation(1000)[:count] * region, to + shift, np.full(count, region, np.int64))
    receipt = Receipt((to + shift)[:, None], region) if is_hashed else Receipt()
    move(place_of(source), place_of(target), copies, receipt).run()
    assert np.array_equal(target, carried_out(copies, source, target.nbytes))
    if is_hashed:
        assert np.array_equal(receipt.found, xxh3_regions(memoryview(source), copies.source_offset, region))


def test_a_large_read_whose_rows_end_inside_chunks(each_way):
    """A chunk is one run in the target, but two rows bring it: it is hashed where it landed."""
    source, target, chunk = noise(2 << 20, 5), np.zeros(2 << 20, np.uint8), 64 << 10
    begins = np.array([0, 100_000, 1_000_001])
    sizes = np.diff(begins, append=source.nbytes)
    copies = CopyList(begins[::-1].copy(), np.cumsum([0, *sizes[::-1]])[:-1], sizes[::-1].copy())
    receipt = Receipt(np.arange(0, target.nbytes, chunk)[:, None], chunk)
    move(place_of(source), place_of(target), copies, receipt).run()
    assert np.array_equal(target, carried_out(copies, source, target.nbytes))
    assert np.array_equal(receipt.found, xxh3_regions(memoryview(target), receipt.pieces[:, 0], chunk))


@pytest.mark.parametrize("region", [64, 700, 300 << 10], ids=["short", "small", "larger than a piece"])
def test_what_is_hashed_is_what_lies_in_the_target(each_way, region):
    """Rows of several regions, hashed one by one; unchecked ones are left out."""
    source, target = noise(8 * region), np.zeros(8 * region, np.uint8)
    copies = CopyList(np.array([3 * region, 0]), np.array([0, 5 * region]), np.array([5 * region, 3 * region]))
    offsets, is_checked = np.arange(8) * region, np.arange(8) % 3 != 1
    receipt = Receipt(offsets[:, None], region, is_checked)
    move(place_of(source), place_of(target), copies, receipt).run()
    expected = xxh3_regions(memoryview(target), offsets, region)
    assert np.array_equal(receipt.found, np.where(is_checked, expected, 0))
    source[0] ^= 1  # a control: the hash is of the bytes
    assert xxh3_regions(memoryview(source), np.array([0]), region) != expected[5]


@pytest.mark.parametrize("piece", [16, 1000], ids=["short", "long"])
def test_chunks_of_several_pieces_are_hashed_as_one(each_way, piece):
    """K and V of two heads each, say, that lie apart in the target."""
    source, target = noise(60 * piece), np.zeros(60 * piece, np.uint8)
    pieces = np.random.default_rng(4).permutation(60)[:40].reshape(10, 4) * piece
    copies = CopyList(np.arange(40) * piece, pieces.ravel(), np.full(40, piece, np.int64))
    receipt = Receipt(pieces, piece)
    move(place_of(source), place_of(target), copies, receipt).run()
    assert np.array_equal(receipt.found, xxh3_regions(memoryview(source), np.arange(10) * 4 * piece, 4 * piece))


@pytest.mark.parametrize(
    ("source_offset", "target_offset", "size"),
    [(-1, 0, 10), (0, -1, 10), (0, 0, -1), (991, 0, 10), (0, 991, 10), (0, 0, 2**62), (2**62, 0, 10)],
)
def test_a_row_outside_either_pool_is_refused_before_a_byte_moves(each_way, source_offset, target_offset, size):
    source, target = np.ones(1000, np.uint8), np.zeros(1000, np.uint8)
    rows = [np.array([0, value]) for value in (source_offset, target_offset, size)]
    rows[2][0] = 5
    copies = CopyList(*rows)
    with pytest.raises(TransportError, match="outside the pool"):
        move(place_of(source), place_of(target), copies, Receipt()).run()
    assert not target.any()


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
