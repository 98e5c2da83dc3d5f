"""The stream protocol between an exporter and a reader, with a gate in between that can hold bytes back."""

import asyncio
import gc
import os
import socket
import threading
from contextlib import AsyncExitStack

import msgspec
import numpy as np
import pytest

from kvrelay.errors import CorruptRead, TransportError
from kvrelay.kvtransfer.mover.copy_plan import CopyList
from kvrelay.kvtransfer.transports.tcp import reader as stream_reader
from kvrelay.kvtransfer.transports.tcp.channels import shut
from kvrelay.kvtransfer.transports.tcp.connection import Stream
from kvrelay.kvtransfer.transports.tcp.protocol import PIECE_BYTES
from kvrelay.kvtransfer.transports.tcp.reader import tcp
from kvrelay.plane.connection import connections
from kvrelay.plane.tls import ClusterTls
from kvrelay.types import KvLayout
from tests.fakes import until
from tests.kvtransfer.copies import plan_copies

KINDS = ["tcp", "tcp x3", "tcp+tls"]
PLAIN = ["tcp"]
LAYOUT = KvLayout(num_layers=2, num_blocks=64, block_size=16, num_kv_heads=8, head_dim=64, dtype="bfloat16")  # 32 KiB
SECRET = b"the cluster's secret"


class Gate:
    """Passes connections on; of what the source sends over each, no more than `budget` bytes until it is opened."""

    def __init__(self, address):
        self._address = address
        self.budget = 1 << 60
        self._opened = asyncio.Event()
        self.is_full = asyncio.Event()  # bytes are held back
        self.holding = []  # those of `downward` that had to wait
        self.downward = []  # a task for each connection: from the source to the target
        self._others, self._sockets = set(), []

    async def start(self):
        self._listener = socket.socket()
        self._listener.setblocking(False)
        self._sockets.append(self._listener)
        self._listener.bind(("127.0.0.1", 0))
        self._listener.listen()
        self._others.add(asyncio.create_task(self._accept()))
        return self._listener.getsockname()

    def open(self):
        self._opened.set()

    async def _accept(self):
        async for here in connections(self._listener):
            there = socket.socket()
            there.setblocking(False)
            self._sockets += [here, there]
            await asyncio.get_running_loop().sock_connect(there, self._address)
            self._others.add(asyncio.create_task(self._relay(here, there)))
            self.downward.append(asyncio.create_task(self._relay(there, here, self.budget)))

    async def _relay(self, source, target, budget=None):
        loop = asyncio.get_running_loop()
        try:
            while data := await loop.sock_recv(source, 1 << 16):
                if budget is not None and len(data) > budget:
                    await loop.sock_sendall(target, data[:budget])
                    data, budget = data[budget:], None
                    if not self._opened.is_set():
                        self.holding.append(asyncio.current_task())
                        self.is_full.set()
                        await self._opened.wait()
                elif budget is not None:
                    budget -= len(data)
                await loop.sock_sendall(target, data)
            target.shutdown(socket.SHUT_WR)
        except OSError:
            shut(source)  # whoever sends there sees it

    async def aclose(self):
        tasks = [*self._others, *self.downward]
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        for sock in self._sockets:
            sock.close()


class Pair:
    """An exporter and a connected reader, and their pools."""

    def __init__(self, kv, kind, pools=None):
        _, _, number = kind.removesuffix("+tls").partition(" x")
        own = ClusterTls.derived(SECRET) if kind.endswith("+tls") else None
        transport = tcp(own, num_streams=int(number or 0))
        self.lib = kv.lib
        self.source, self.target = pools or (kv.lib.allocate(LAYOUT, fill=5), kv.lib.allocate(LAYOUT))
        self.exporter = transport.make_exporter(self.source, SECRET, "127.0.0.1")
        self.reader = transport.make_reader(self.target, SECRET, "127.0.0.1")
        self.gate = None

    async def start(self, held_after):
        await self.exporter.start()
        descriptor = self.exporter.describe()
        if held_after is not None:
            descriptor = await self._through_gate(msgspec.msgpack.decode(descriptor), held_after)
        await self.reader.connect(descriptor)

    async def _through_gate(self, fields, held_after):
        self.gate = Gate((fields["host"], fields["port"]))
        self.gate.budget = held_after
        fields["port"] = (await self.gate.start())[1]
        return msgspec.msgpack.encode(fields)

    def read(self, source_blocks, target_blocks, landed=None):
        return self.reader.read(plan(source_blocks, target_blocks), landed)

    def sent(self, blocks):
        return self.lib.regions(self.source)[:, blocks]

    def landed(self, blocks):
        return self.lib.regions(self.target)[:, blocks]

    async def aclose(self):
        await self.reader.aclose()
        await self.exporter.aclose()
        if self.gate is not None:
            await self.gate.aclose()


def plan(source_blocks, target_blocks):
    return plan_copies(LAYOUT, LAYOUT, source_blocks, target_blocks, range(LAYOUT.num_layers))


@pytest.fixture
async def pair(kv):
    """`await pair(kind)`; with `held_after`, a gate holds back what the source sends beyond so many bytes."""
    async with AsyncExitStack() as stack:

        async def make(kind, *, held_after=None):
            made = Pair(kv, kind)
            stack.push_async_callback(made.aclose)
            await made.start(held_after)
            return made

        yield make


async def ends(read):
    """The read's error, or None."""
    await asyncio.wait({read}, timeout=30)
    assert read.done()
    return read.exception()


MANY, OTHERS = list(range(1, 60, 2)), list(range(60, 0, -2))  # 2 x 30 regions of 32 KiB: several pieces
HELD = 3000  # bytes: past every handshake, in the midst of the first answer


# ---- what landed


@pytest.mark.parametrize("kind", KINDS)
async def test_what_is_reported_is_there(pair, kind):
    streams = await pair(kind)
    told, region = [], LAYOUT.region_bytes

    def landed(num_bytes):
        whole = num_bytes // region
        equal = (streams.landed(OTHERS) == streams.sent(MANY)).all(axis=-1).T.ravel()  # block by block
        told.append((num_bytes, bool(equal[:whole].all())))

    assert await ends(streams.read(MANY, OTHERS, landed)) is None
    total = 2 * len(MANY) * region
    counts = [num_bytes for num_bytes, _ in told]
    assert counts == sorted(set(counts)) and counts[-1] == total
    assert all(is_there for _, is_there in told)
    assert max(np.diff([0, *counts])) <= (total if "x" in kind else 2 * PIECE_BYTES)


@pytest.mark.parametrize("kind", KINDS)
async def test_one_region_larger_than_a_piece_at_odd_offsets(pair, kind):
    streams = await pair(kind)
    size = LAYOUT.num_bytes - 1111
    copies = CopyList(*(np.array([value], dtype=np.int64) for value in (1001, 77, size)))
    assert await ends(streams.reader.read(copies)) is None
    assert np.array_equal(streams.target.owner[77 : 77 + size], streams.source.owner[1001 : 1001 + size])
    assert not streams.target.owner[:77].any() and not streams.target.owner[77 + size :].any()


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("blocks", [[3], MANY], ids=["small", "large"])
async def test_what_a_checker_refuses_ends_its_read_alone(pair, kind, blocks):
    streams = await pair(kind)

    def refuse(num_bytes):
        raise CorruptRead(1, 0)

    first, second = streams.read(blocks, blocks, refuse), streams.read(blocks, blocks)
    assert isinstance(await ends(first), CorruptRead)
    assert await ends(second) is None
    assert np.array_equal(streams.landed(blocks), streams.sent(blocks))


@pytest.mark.parametrize("kind", KINDS)
async def test_a_checker_with_a_bug_fails_its_read_alone(pair, kind):
    streams = await pair(kind)
    assert isinstance(await ends(streams.read(MANY, OTHERS, lambda n: 1 // 0)), TransportError)
    assert isinstance(await ends(streams.read([1], [2], lambda n: 1 // 0)), TransportError)
    assert await ends(streams.read(MANY, OTHERS)) is None


async def test_a_small_read_is_done_at_once_where_the_answer_is_soon_there(pair, monkeypatch):
    monkeypatch.setattr(stream_reader, "INLINE_S", 30.0)
    streams = await pair("tcp")
    read = streams.reader.read(plan_copies(LAYOUT, LAYOUT, [1], [2], range(1)))
    assert read.done() and read.exception() is None
    assert np.array_equal(streams.landed([2])[0], streams.sent([1])[0])


@pytest.mark.parametrize("kind", PLAIN)
async def test_a_small_read_goes_on_upon_a_thread_where_it_is_not(pair, kind):
    streams = await pair(kind, held_after=HELD)
    read = streams.reader.read(plan_copies(LAYOUT, LAYOUT, [1], [2], range(1)))
    await streams.gate.is_full.wait()
    assert not read.done()
    streams.gate.open()
    assert await ends(read) is None
    assert np.array_equal(streams.landed([2])[0], streams.sent([1])[0])


# ---- late bytes


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("blocks", [[3], MANY], ids=["small", "large"])
@pytest.mark.parametrize("is_abandoned", [True, False], ids=["abandoned", "left alone"])
async def test_bytes_that_come_after_abandon_never_land(pair, kind, blocks, is_abandoned):
    """The blocks are used again as soon as the read has ended. Left alone, the same bytes do land: the gate had
    them.
    """
    streams = await pair(kind, held_after=HELD)
    read = streams.read(blocks, blocks)
    await streams.gate.is_full.wait()
    if is_abandoned:
        streams.reader.abandon(read)
        assert isinstance(await ends(read), TransportError)
        streams.landed(blocks)[:] = 0
    streams.lib.regions(streams.target)[:, blocks] = 0xAA  # another sequence's
    streams.gate.open()
    if is_abandoned:
        await asyncio.wait(streams.gate.holding, timeout=30)  # all that was held back has left the gate
        assert (streams.landed(blocks) == 0xAA).all()
    else:
        assert await ends(read) is None
        assert not (streams.landed(blocks) == 0xAA).all(axis=-1).any()
    assert await ends(streams.read(MANY, MANY)) is None
    assert np.array_equal(streams.landed(MANY), streams.sent(MANY))


@pytest.mark.parametrize("kind", KINDS)
async def test_the_read_behind_an_abandoned_one_is_asked_for_again(pair, kind):
    streams = await pair(kind, held_after=HELD)
    first, second = streams.read(MANY, MANY), streams.read(MANY, OTHERS)
    await streams.gate.is_full.wait()
    before = len(streams.gate.downward)
    streams.reader.abandon(first)
    assert isinstance(await ends(first), TransportError)
    assert not second.done()
    streams.gate.open()
    assert await ends(second) is None
    assert np.array_equal(streams.landed(OTHERS), streams.sent(MANY))
    assert len(streams.gate.downward) > before


@pytest.mark.parametrize("kind", KINDS)
async def test_a_read_that_is_abandoned_in_line_leaves_the_one_before_it_alone(pair, kind):
    streams = await pair(kind, held_after=HELD)
    first, second = streams.read(MANY, MANY), streams.read(MANY, OTHERS)
    await streams.gate.is_full.wait()
    streams.reader.abandon(second)
    streams.gate.open()
    assert await ends(first) is None
    assert isinstance(await ends(second), TransportError)
    assert np.array_equal(streams.landed(MANY), streams.sent(MANY))
    assert not streams.landed(OTHERS).any()
    assert await ends(streams.read(MANY, OTHERS)) is None


@pytest.mark.parametrize("kind", KINDS)
async def test_abandoning_with_the_last_byte_does_not_hurt_the_next_read(pair, kind):
    streams = await pair(kind)
    reads = []

    def landed(num_bytes):
        if num_bytes == 2 * len(MANY) * LAYOUT.region_bytes:
            streams.reader.abandon(reads[0])

    reads += [streams.read(MANY, MANY, landed), streams.read(MANY, OTHERS)]
    await ends(reads[0])
    assert await ends(reads[1]) is None
    assert np.array_equal(streams.landed(OTHERS), streams.sent(MANY))


@pytest.mark.parametrize("kind", KINDS)
async def test_reads_with_random_ends_keep_apart(pair, kind):
    """Every read has blocks of its own: those that were not abandoned hold what they should, whatever else went on."""
    streams, random = await pair(kind), np.random.default_rng(7)
    for _ in range(12):
        streams.lib.regions(streams.target)[:] = 0
        blocks, reads = random.permutation(LAYOUT.num_blocks), []
        for mine in np.split(blocks, np.sort(random.choice(np.arange(1, 64), 7, replace=False))):
            sources = random.permutation(LAYOUT.num_blocks)[: len(mine)]
            reads.append((streams.read(sources.tolist(), mine.tolist()), sources, mine, random.random() < 0.4))
        await asyncio.sleep(0)
        for read, _, _, is_abandoned in reads:
            if is_abandoned:
                streams.reader.abandon(read)
        for read, sources, mine, is_abandoned in reads:
            error = await ends(read)
            assert error is None or is_abandoned
            if error is None:
                assert np.array_equal(streams.landed(mine), streams.sent(sources))


# ---- the end of either side


@pytest.mark.parametrize("kind", KINDS)
async def test_closing_the_reader_ends_a_read_that_is_held(pair, kind):
    streams = await pair(kind, held_after=HELD)
    read = streams.read(MANY, MANY)
    await streams.gate.is_full.wait()
    await streams.reader.aclose()
    assert isinstance(await ends(read), TransportError)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("blocks", [[3], MANY], ids=["small", "large"])
async def test_reads_from_a_closed_source_fail(pair, kind, blocks):
    streams = await pair(kind)
    await streams.exporter.aclose()
    for _ in range(2):
        assert isinstance(await ends(streams.read(blocks, blocks)), TransportError)
    assert not streams.landed(blocks).any()


async def test_a_small_read_fails_at_once_when_the_source_has_gone(pair):
    streams = await pair("tcp")
    await streams.exporter.aclose()
    one = plan_copies(LAYOUT, LAYOUT, [1], [2], range(1))
    for _ in range(3):
        assert isinstance(await ends(streams.reader.read(one)), TransportError)


@pytest.mark.parametrize("kind", KINDS)
async def test_nothing_is_left_behind(kv, kind):
    async def use():
        streams = Pair(kv, kind, pools)
        await streams.start(None)
        reads = [streams.read(MANY, OTHERS) for _ in range(3)]
        streams.reader.abandon(reads[1])
        for read in reads:
            await ends(read)
        assert await ends(streams.read(MANY, OTHERS)) is None
        await streams.aclose()

    pools = kv.lib.allocate(LAYOUT, fill=5), kv.lib.allocate(LAYOUT)  # which keep their memfds
    await use()  # what a first use makes for good (the loop's own threads)
    before, earlier = descriptors(), kv_threads()
    for _ in range(3):
        await use()
    assert descriptors() <= before
    assert kv_threads() <= earlier


async def test_a_close_that_is_cancelled_closes_every_stream_all_the_same(kv, monkeypatch):
    pair = Pair(kv, "tcp x3", (kv.lib.allocate(LAYOUT, fill=5), kv.lib.allocate(LAYOUT)))
    await pair.start(None)
    stopped, may_stop, stop = [], threading.Event(), Stream.stop

    def slow(stream):
        may_stop.wait(5)
        stop(stream)
        stopped.append(stream)

    monkeypatch.setattr(Stream, "stop", slow)
    closing = asyncio.create_task(pair.reader.aclose())
    await asyncio.sleep(0)
    closing.cancel()
    may_stop.set()
    with pytest.raises(asyncio.CancelledError):
        await closing
    await until(lambda: len(stopped) >= 3, 5)
    await pair.aclose()


def kv_threads():
    return {thread for thread in threading.enumerate() if thread.name.startswith("kv-")}


def descriptors():
    gc.collect()  # of earlier tests' pools
    return len(os.listdir("/proc/self/fd"))


async def test_a_dead_host_shows_within_seconds(pair):
    """The kernel's own timers are set on both ends: unanswered probes and unacknowledged bytes end the connection."""
    streams = await pair("tcp")
    ours = streams.reader._streams[0]._channel._sock
    theirs = next(iter(streams.exporter._peers.values())).sock
    for sock in (ours, theirs):
        assert sock.getsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE)
        idle, every, probes = (
            sock.getsockopt(socket.IPPROTO_TCP, option)
            for option in (socket.TCP_KEEPIDLE, socket.TCP_KEEPINTVL, socket.TCP_KEEPCNT)
        )
        assert idle + every * probes <= 10
        assert 0 < sock.getsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT) <= 10_000
