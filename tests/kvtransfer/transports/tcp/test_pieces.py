"""How a read is cut, dealt to streams and asked for: nothing lost, nothing twice, everybody's share alike."""

import itertools
import threading

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvrelay.errors import CorruptRead, TransportError
from kvrelay.kvtransfer.mover.copy_plan import CopyList
from kvrelay.kvtransfer.transports.tcp.connection import ReadProgress
from kvrelay.kvtransfer.transports.tcp.protocol import MAX_ROWS, PIECE_BYTES, Inbox, cut_into_pieces, deal, requests_for

pytestmark = pytest.mark.pure


FAR = 1 << 50
KIB = 1 << 10


def copies(sizes, *, repeats=1, sources=None):
    """Rows of these sizes, with gaps on both sides."""
    sizes = np.tile(np.array(sizes, dtype=np.int64), repeats)
    ends = np.cumsum(sizes + 7)
    source = ends - sizes if sources is None else np.array(sources, dtype=np.int64)
    return CopyList(source, (ends - sizes)[::-1].copy(), sizes)


row_lists = st.lists(st.integers(1, 3 * PIECE_BYTES), min_size=1, max_size=40) | st.lists(
    st.integers(1, 4 * KIB), min_size=1, max_size=40
)


def bytes_of(rows):
    """Rows of (source, target, size) joined where they touch, so that cuts do not show."""
    joined = []
    for source, target, size in rows:
        if joined and joined[-1][0] + joined[-1][2] == source and joined[-1][1] + joined[-1][2] == target:
            joined[-1][2] += size
        else:
            joined.append([source, target, size])
    return joined


@given(row_lists, st.integers(1, 30))
def test_pieces_are_the_read_in_its_order(sizes, repeats):
    wanted = copies(sizes, repeats=repeats)
    pieces = cut_into_pieces(wanted, FAR, FAR)
    rows = [row for piece in pieces for row in zip(piece.sources, piece.targets, piece.sizes, strict=True)]
    assert bytes_of(rows) == bytes_of(zip(*wanted.rows(), strict=True))
    assert [piece.index for piece in pieces] == list(range(len(pieces)))
    for piece in pieces:
        assert piece.num_bytes == sum(piece.sizes)
        assert 0 < len(piece.sizes) <= MAX_ROWS


@given(row_lists, st.integers(1, 8))
def test_shares_differ_by_no_more_than_a_piece_and_none_is_empty(sizes, num_streams):
    wanted = copies(sizes, repeats=5)
    pieces = cut_into_pieces(wanted, FAR, FAR)
    largest_row = min(max(sizes), PIECE_BYTES)
    assert all(piece.num_bytes <= PIECE_BYTES + largest_row for piece in pieces)
    shares = deal(pieces, num_streams)
    assert len(shares) == min(num_streams, len(pieces))
    assert sorted(piece.index for share in shares for piece in share) == list(range(len(pieces)))
    assert all(shares)
    counts = [len(share) for share in shares]
    assert max(counts) - min(counts) <= 1


def test_many_small_rows_are_cut_by_their_number():
    pieces = cut_into_pieces(copies([16] * (5 * MAX_ROWS + 3)), FAR, FAR)
    assert [len(piece.sizes) for piece in pieces] == [MAX_ROWS] * 5 + [3]


@given(row_lists, st.integers(1, 60))
def test_requests_hold_every_piece_once_and_stay_small(sizes, repeats):
    pieces = cut_into_pieces(copies(sizes, repeats=repeats), FAR, FAR)
    requests = requests_for(pieces)
    assert [piece.index for request in requests for piece in request.pieces] == list(range(len(pieces)))
    for request in requests:
        assert sum(len(piece.sizes) for piece in request.pieces) <= MAX_ROWS
    for one, other in itertools.pairwise(requests):  # as few as that allows
        assert sum(len(piece.sizes) for piece in one.pieces) + len(other.pieces[0].sizes) > MAX_ROWS


def test_nothing_to_copy_is_no_piece():
    assert cut_into_pieces(copies([]), FAR, FAR) == []


@pytest.mark.parametrize("sizes", [[100], [100, 100]], ids=["one region", "several"])
@pytest.mark.parametrize(("source_bytes", "target_bytes"), [(106, FAR), (FAR, 106)])
def test_a_copy_outside_either_pool_is_refused(sizes, source_bytes, target_bytes):
    wanted = copies(sizes)
    with pytest.raises(TransportError, match="outside the pool"):
        cut_into_pieces(wanted, source_bytes, target_bytes)
    end = 107 * len(sizes)
    assert cut_into_pieces(wanted, end, end)


def test_a_negative_offset_is_refused():
    with pytest.raises(TransportError, match="outside the pool"):
        cut_into_pieces(copies([100], sources=[-1]), FAR, FAR)


# ---- the source's side of a request


class Given:
    """A channel on which these bytes come, so many at a time."""

    def __init__(self, data, step):
        self._data, self._step = data, step

    def receive_some(self, buffer, timeout_s):
        if not self._data:
            raise TimeoutError
        some, self._data = self._data[: self._step], self._data[self._step :]
        some, self._data = some[: len(buffer)], some[len(buffer) :] + self._data
        buffer[: len(some)] = some
        return len(some)


@given(st.lists(row_lists, min_size=1, max_size=4), st.integers(1, 40_000))
def test_a_request_is_understood_however_it_is_cut_on_its_way(reads, step):
    sent = [request for sizes in reads for request in requests_for(cut_into_pieces(copies(sizes), FAR, FAR))]
    expected = [[(s, n) for p in r.pieces for s, n in zip(p.sources, p.sizes, strict=True)] for r in sent]
    data = b"".join(request.encode(number) for number, request in enumerate(sent))
    inbox = Inbox(Given(data, step), FAR)
    for number, rows in enumerate(expected):
        wanted = inbox.next()
        assert wanted.number == number
        assert wanted.num_bytes == sum(size for _, size in rows)
        assert wanted.rows == rows
    with pytest.raises(TimeoutError):
        inbox.next()


# ---- what has landed


def progress(sizes, told):
    return ReadProgress(sizes, told.append)


def test_only_what_is_there_without_a_gap_is_reported():
    told = []
    pieces = progress([10, 20, 30], told)
    pieces.add(1, 20)
    pieces.add(2, 5)
    assert told == []
    pieces.add(0, 4)
    pieces.add(0, 6)
    pieces.add(2, 25)
    assert told == [4, 35, 60]


@given(st.lists(st.integers(1, 50), min_size=1, max_size=12), st.randoms(use_true_random=False))
def test_reports_only_grow_and_end_with_everything(sizes, random):
    told = []
    pieces = progress(sizes, told)
    order = [i for i, size in enumerate(sizes) for _ in range(size)]
    random.shuffle(order)
    for index in order:
        pieces.add(index, 1)
    assert told == sorted(set(told))
    assert told[-1] == sum(sizes)


def test_one_thread_reports_at_a_time_and_for_the_others_too():
    told, is_in, may_go = [], threading.Event(), threading.Event()

    def report(num_bytes):
        told.append(num_bytes)
        if len(told) == 1:
            is_in.set()
            assert may_go.wait(10)

    pieces = ReadProgress([10, 10], report)
    slow = threading.Thread(target=pieces.add, args=(0, 10))
    slow.start()
    assert is_in.wait(10)
    pieces.add(1, 10)  # comes back at once: somebody else is reporting
    assert told == [10]
    may_go.set()
    slow.join()
    assert told == [10, 20]


def test_after_an_error_nothing_more_is_reported():
    def report(num_bytes):
        told.append(num_bytes)
        raise CorruptRead(1, 0)

    told = []
    pieces = ReadProgress([10, 10], report)
    with pytest.raises(CorruptRead):
        pieces.add(0, 10)
    pieces.add(1, 10)
    assert told == [10]
