"""The mover's own thread: results come to the loop, nothing is left behind, and the interpreter is never needed."""

import asyncio
import gc
import os
import sys
import threading
import time

import numpy as np
import pytest

from kvrelay.errors import CorruptRead, TransportError
from kvrelay.kvtransfer.mover import mover
from kvrelay.kvtransfer.mover.copy_plan import CopyList
from kvrelay.kvtransfer.mover.mover import INLINE_BYTES, MoverThread, Receipt, hash_in_place, move
from kvrelay.kvtransfer.mover.verification import ArrivingRead, checksums_of
from kvrelay.kvtransfer.transports.memory import LOOPBACK, place_of
from tests.kvtransfer.copies import plan_copies, region_offsets

pytestmark = pytest.mark.skipif(not MoverThread.can_be(), reason="no compiled mover, or no eventfd")

SIZE = 32 << 20


@pytest.fixture
async def thread():
    thread = MoverThread()
    yield thread
    await thread.aclose()


class Whole:
    """A move of SIZE bytes."""

    def __init__(self, num_bytes=SIZE, region=1 << 20):
        self.source, self.target = np.full(num_bytes, 7, np.uint8), np.zeros(num_bytes, np.uint8)
        self.receipt = Receipt(np.arange(0, num_bytes, region)[:, None], region)
        rows = CopyList(*(np.array([value]) for value in (0, 0, num_bytes)))
        self.moving = move(place_of(self.source), place_of(self.target), rows, self.receipt)

    def submit(self, thread):
        done = thread.submit(self.moving)
        done.add_done_callback(lambda _: self)  # a move holds addresses only: the arrays must outlive it
        return done

    @property
    def has_landed(self):
        return bool((self.target == 7).all())


class Held:
    """The library, but that moves reach its thread only with `go`."""

    def __init__(self):
        self._lib, self._moves = mover.library(), []

    def __getattr__(self, name):
        return getattr(self._lib, name)

    def kt_worker_submit(self, worker, address):
        self._moves.append((worker, address))

    def go(self):
        for worker, address in self._moves:
            self._lib.kt_worker_submit(worker, address)


@pytest.fixture
def held(monkeypatch):
    held = Held()
    monkeypatch.setattr("kvrelay.kvtransfer.mover.mover.library", lambda: held)
    return held


def threads_and_files():
    gc.collect()
    return len(os.listdir("/proc/self/task")), len(os.listdir("/proc/self/fd"))


async def test_moves_end_in_order_and_are_in_place_then(thread):
    moves = [Whole(4 << 20) for _ in range(5)]
    ended = []
    for i, whole in enumerate(moves):
        whole.submit(thread).add_done_callback(lambda _, i=i: ended.append((i, moves[i].has_landed)))
    assert ended == []
    last = Whole(1 << 20)
    await last.submit(thread)
    assert ended == [(i, True) for i in range(5)]
    assert last.receipt.found.tolist() == [mover.xxh3_regions(memoryview(last.target), np.array([0]), 1 << 20)[0]]


async def test_what_finish_raises_is_the_futures_end(thread):
    def corrupt():
        raise CorruptRead(1, 3)

    def broken():
        raise ZeroDivisionError("our own mistake")

    for finish, kind in ((corrupt, CorruptRead), (broken, TransportError)):
        whole = Whole(1 << 20)  # whoever moves keeps the memory: a move holds addresses only
        with pytest.raises(kind):
            await thread.submit(whole.moving, finish)
    another = Whole(1 << 20)
    await another.submit(thread)  # and it goes on
    assert another.has_landed


async def test_a_cancelled_move_does_not_begin(held, thread):
    first, second = Whole(), Whole()
    ends = first.submit(thread), second.submit(thread)
    thread.cancel(ends[1])
    held.go()
    await ends[0]
    with pytest.raises(TransportError, match="abandoned"):
        await ends[1]
    assert first.has_landed
    assert not second.target.any()


def test_a_cancelled_move_goes_no_further():
    for size in (SIZE, 4 * SIZE, 16 * SIZE):  # larger where it ended before it could be cancelled
        whole = Whole(size)
        running = threading.Thread(target=lambda whole=whole: whole.moving._lib.kt_move(whole.moving.address))
        running.start()
        while not whole.receipt.num_landed:
            pass
        whole.moving.cancel()
        running.join()
        if (num_landed := whole.receipt.num_landed) < size:
            break
    assert (whole.target[:num_landed] == 7).all() and not whole.target[num_landed:].any()
    with pytest.raises(TransportError, match="abandoned"):
        whole.moving.run()


async def test_closing_waits_for_the_moves_and_leaves_nothing_behind():
    thread, whole = MoverThread(), Whole()
    await asyncio.to_thread(lambda: None)  # the loop's own threads are there
    before = threads_and_files()
    end = whole.submit(thread)
    assert threads_and_files()[0] == before[0] + 1
    await thread.aclose()
    assert end.done() and whole.has_landed
    await thread.aclose()  # once more is nothing
    assert threads_and_files() == before


async def test_a_move_that_nobody_waits_for_any_more_still_ends(thread):
    whole = Whole()
    whole.submit(thread).cancel()
    await Whole(1 << 20).submit(thread)
    assert whole.has_landed


async def test_a_closed_thread_starts_anew(thread):
    await Whole(1 << 20).submit(thread)
    await thread.aclose()
    await Whole(1 << 20).submit(thread)


async def test_it_works_while_another_thread_keeps_the_interpreter(thread):
    """This very thread keeps it: nothing here gives it up, so that a thread of Python could not even begin."""
    await Whole(1 << 20).submit(thread)  # it has started
    whole, interval = Whole(), sys.getswitchinterval()
    sys.setswitchinterval(1000)
    try:
        end, give_up = whole.submit(thread), time.monotonic() + 60
        while not whole.moving.is_done and time.monotonic() < give_up:
            pass
        assert whole.moving.is_done and not end.done()
    finally:
        sys.setswitchinterval(interval)
    await end
    assert whole.has_landed


async def test_regions_are_hashed_where_they_lie(thread):
    data = np.random.default_rng(0).integers(0, 256, 1 << 20, dtype=np.uint8)
    pieces = np.random.default_rng(1).integers(0, (1 << 20) - 700, (50, 3))
    receipt = Receipt(pieces, 700)
    hashing = hash_in_place(memoryview(data), receipt)
    await thread.submit(hashing, hashing.result)
    whole = [np.concatenate([data[start : start + 700] for start in starts]) for starts in pieces]
    assert receipt.found.tolist() == [mover.xxh3_regions(memoryview(chunk), np.array([0]), 2100)[0] for chunk in whole]


# ---- readers


@pytest.fixture
async def reader(kv, monkeypatch):
    """(source pool, target pool, a loopback reader that may not use a thread of Python)."""
    source, target = kv.lib.allocate(fill=1), kv.lib.allocate()
    exporter = LOOPBACK.make_exporter(source, kv.lib.SECRET, "")
    reader = LOOPBACK.make_reader(target, kv.lib.SECRET, "")
    await exporter.start()
    await reader.connect(exporter.describe())
    monkeypatch.setattr(reader, "copy", lambda *_: pytest.fail("a thread of Python"))
    yield source, target, reader
    await reader.aclose()
    await exporter.aclose()


BLOCKS = list(range(40))


def whole_read(kv, source, target):
    """(copies, arrival) of BLOCKS in every layer."""
    layout, layers = kv.lib.LAYOUT, kv.lib.ALL_LAYERS
    copies = plan_copies(layout, layout, BLOCKS, BLOCKS, layers)
    assert copies.total_bytes > INLINE_BYTES
    pieces = region_offsets(layout, BLOCKS, layers)[:, None]
    return copies, ArrivingRead(target, pieces, layout.region_bytes, checksums_of(source, pieces, layout.region_bytes))


async def test_a_large_read_is_verified_there_too(kv, reader):
    source, target, reading = reader
    copies, arrival = whole_read(kv, source, target)
    await reading.read(copies, arrival)
    assert arrival.num_landed == copies.total_bytes and arrival.check_s > 0
    assert np.array_equal(kv.lib.regions(target)[:, BLOCKS], kv.lib.regions(source)[:, BLOCKS])
    kv.lib.regions(source)[2, 7, 5] ^= 1  # after it was hashed
    copies, arrival = whole_read(kv, target, target)
    with pytest.raises(CorruptRead) as error:
        await reading.read(copies, arrival)
    assert (error.value.num_regions, error.value.region) == (1, 7 * len(kv.lib.ALL_LAYERS) + 2)


async def test_an_abandoned_large_read_ends_by_itself(kv, held, reader):
    source, target, reading = reader
    reads = [reading.read(*whole_read(kv, source, target)) for _ in range(3)]
    reading.abandon(reads[-1])
    assert not any(read.done() for read in reads)
    held.go()
    await asyncio.gather(*reads[:-1])
    with pytest.raises(TransportError, match="abandoned"):
        await reads[-1]
