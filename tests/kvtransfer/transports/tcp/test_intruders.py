"""Whoever else connects to a data port: refused, bounded in time and number, and of no harm to anybody's reads."""

import asyncio
import contextlib
import os
import socket
import struct
import threading
import time

import msgspec
import numpy as np
import pytest

from kvrelay.errors import TransportError
from kvrelay.kvtransfer.transports.tcp import channels
from kvrelay.kvtransfer.transports.tcp import protocol as streams
from kvrelay.kvtransfer.transports.tcp import reader as stream_reader
from kvrelay.kvtransfer.transports.tcp.protocol import MAX_ROWS, greet_source
from kvrelay.kvtransfer.transports.tcp.reader import TcpDescriptor, tcp
from kvrelay.plane.tls import ClusterTls
from tests.fakes import until
from tests.kvtransfer.copies import plan_copies

SECRET = b"the cluster's secret"
SOON_S = 20.0
TRANSPORTS = {"tcp": tcp(), "tcp+tls": tcp(tls=ClusterTls.derived(SECRET))}


class Port:
    """An exporter that intruders visit, and a reader who must not notice."""

    def __init__(self, kv, kind):
        self.lib, self.transport = kv.lib, TRANSPORTS[kind]
        self.source, self.target = kv.lib.allocate(fill=5), kv.lib.allocate()
        self.exporter = self.transport.make_exporter(self.source, SECRET, "127.0.0.1")
        self.reader = self.transport.make_reader(self.target, SECRET, "127.0.0.1")

    async def start(self):
        await self.exporter.start()
        self.fields = msgspec.msgpack.decode(self.exporter.describe())
        await self.reader.connect(self.exporter.describe())

    def visit(self):
        """A connection that has said nothing yet."""
        sock = socket.create_connection((self.fields["host"], self.fields["port"]))
        sock.settimeout(SOON_S)
        return sock

    async def member(self, secret=SECRET):
        """A connection of somebody with a good certificate, if need be, and this secret."""

        def open_it():
            sock = self.visit()
            if self.fields.get("is_tls"):
                sock = ClusterTls.derived(SECRET).client().wrap_socket(sock)
            try:
                greet_source(sock, secret, time.monotonic() + SOON_S)
            except PermissionError:
                sock.sendall(bytes(32) + request((0, 100)))  # undeterred
            sock.settimeout(SOON_S)
            return sock

        return await asyncio.to_thread(open_it)

    async def assert_serves(self):
        layout = self.lib.LAYOUT
        self.lib.regions(self.target)[:] = 0
        await self.reader.read(plan_copies(layout, layout, [3, 9, 4], [7, 1, 2], range(layout.num_layers)))
        landed, sent = self.lib.regions(self.target), self.lib.regions(self.source)
        assert np.array_equal(landed[:, [7, 1, 2]], sent[:, [3, 9, 4]])

    async def assert_alone(self):
        """Only the good reader's connection is left: no thread, no descriptor of an intruder's."""
        await until(lambda: len(self.exporter._peers) <= 1 and serving() <= 1, SOON_S)

    async def aclose(self):
        await self.reader.aclose()
        await self.exporter.aclose()


def serving():
    return sum(thread.name.endswith("-serve") for thread in threading.enumerate())


def descriptors():
    return len(os.listdir("/proc/self/fd"))


@pytest.fixture(params=TRANSPORTS)
async def port(kv, request):
    made = Port(kv, request.param)
    await made.start()
    yield made
    await made.aclose()


def until_closed(sock):
    """What the exporter still says; ends when it has hung up."""
    said = bytearray()
    with sock, contextlib.suppress(ConnectionError):
        while data := sock.recv(1 << 16):
            said += data
    return bytes(said)


def request(*rows, num_rows=None, num_bytes=None):
    rows_bytes = b"".join(struct.pack("<QQ", start % (1 << 64), size % (1 << 64)) for start, size in rows)
    total = sum(size for _, size in rows) if num_bytes is None else num_bytes
    return struct.pack("<QIQ", 1, len(rows) if num_rows is None else num_rows, total % (1 << 64)) + rows_bytes


@pytest.mark.parametrize(
    "words",
    [b"GET / HTTP/1.1\r\nHost: kv\r\n\r\n" + b"x" * 100, b"\x00" * 200, os.urandom(5000), b"kvrelay-kv1\0" + b"n" * 32],
    ids=["http", "zeros", "noise", "an older protocol"],
)
async def test_who_does_not_speak_the_protocol_is_cut_off(port, words):
    before = descriptors()
    sock = port.visit()
    sock.sendall(words)
    said = await asyncio.to_thread(until_closed, sock)
    assert len(said) <= 100  # an alert at most; never a nonce
    await port.assert_alone()
    assert descriptors() <= before  # fewer where another test's remains are collected meanwhile
    await port.assert_serves()


async def test_who_does_not_know_the_secret_is_cut_off_before_any_byte_of_the_pool(port, caplog):
    sock = await port.member(b"a guess")
    assert await asyncio.to_thread(until_closed, sock) == b""
    await port.assert_alone()
    assert "does not know this cluster's secret" in caplog.text
    await port.assert_serves()


POOL = 4 * 64 * 4096  # bytes of the test pool: 4 layers, 64 blocks


@pytest.mark.parametrize(
    "words",
    [
        request((0, 100), num_rows=0),
        request((0, 100), num_rows=MAX_ROWS + 1),
        request((0, 100), num_rows=(1 << 32) - 1),
        request((POOL, 1)),
        request((POOL - 1, 2)),
        request((-1, 10)),
        request((0, -1), num_bytes=10),
        request((1 << 63, 1 << 63)),
        request(((1 << 64) - 8, 16), num_bytes=16),
        request((0, 100), num_bytes=101),
        request((0, 100), (POOL, 0), (5, POOL)),
    ],
    ids=["no rows", "too many", "far too many", "behind the end", "over the end", "before the start", "negative size",
         "huge", "wraps around", "does not add up", "good and bad rows"],
)  # fmt: skip
async def test_a_request_for_what_is_not_there_gets_nothing(port, words, caplog):
    assert port.lib.LAYOUT.num_bytes == POOL
    sock = await port.member()
    sock.sendall(words)
    assert await asyncio.to_thread(until_closed, sock) == b""
    await port.assert_alone()
    assert "refused a reader" in caplog.text
    await port.assert_serves()


async def test_the_same_words_with_good_offsets_are_answered(port):
    """What the cases above are compared with."""
    sock = await port.member()
    sock.sendall(request((POOL - 100, 100), (0, 50)))
    wanted = struct.pack("<QQ", 1, 150) + bytes(port.source.view[POOL - 100 :]) + bytes(port.source.view[:50])
    with sock:
        got = b""
        while len(got) < len(wanted):
            got += await asyncio.to_thread(sock.recv, 1000)
    assert got == wanted


# ---- time


@pytest.mark.parametrize("step", [0, 1], ids=["says nothing", "a byte now and then"])
async def test_a_handshake_must_end_in_time(port, step, monkeypatch):
    monkeypatch.setattr(stream_reader, "HANDSHAKE_S", 0.2)
    sock = port.visit()
    words = iter(b"\x16\x03\x01\x01\x00" + bytes(300) if port.fields.get("is_tls") else b"kvrelay-kv2\0" + b"n" * 300)

    def dribble():
        with sock, contextlib.suppress(OSError):
            sock.settimeout(0.02)
            while True:
                with contextlib.suppress(TimeoutError):
                    if not sock.recv(100):
                        return
                if step:
                    sock.send(bytes([next(words)]))

    await asyncio.wait_for(asyncio.to_thread(dribble), SOON_S)
    await port.assert_alone()
    await port.assert_serves()


@pytest.mark.parametrize("size", [1, 10, 19, 20, 30], ids=lambda n: f"{n} bytes")
async def test_a_request_that_has_begun_must_end_in_time(port, size, monkeypatch):
    monkeypatch.setattr(streams, "_REST_S", 0.1)
    sock = await port.member()
    sock.sendall(request((0, 100))[:size])
    assert await asyncio.to_thread(until_closed, sock) == b""
    await port.assert_alone()
    await port.assert_serves()


async def test_an_idle_reader_may_stay_as_long_as_it_likes(port, monkeypatch):
    """The limits above begin with a request's first byte."""
    monkeypatch.setattr(streams, "_REST_S", 0.05)
    monkeypatch.setattr(stream_reader, "HANDSHAKE_S", 0.05)
    await asyncio.sleep(0.3)
    await port.assert_serves()


@pytest.mark.parametrize("kind", TRANSPORTS)
async def test_a_reader_that_never_reads_its_answer_is_given_up(kv, kind, monkeypatch):
    monkeypatch.setattr(channels, "STALL_S", 0.2)
    port = Port(kv, kind)
    await port.start()
    try:
        sock = await port.member()
        with sock:
            rows = [(0, POOL)] * 100
            sock.sendall(request(*rows))  # 100 MiB: more than any socket's buffers take
            await port.assert_alone()
        await port.assert_serves()
    finally:
        await port.aclose()


# ---- number


async def test_silent_strangers_cannot_keep_a_reader_out(port, monkeypatch):
    monkeypatch.setattr(stream_reader, "_MAX_STRANGERS", 4)
    crowd = []
    try:
        for _ in range(12):
            crowd.append(port.visit())
            await asyncio.sleep(0)
        other = port.transport.make_reader(port.target, SECRET, "127.0.0.1")
        await other.connect(port.exporter.describe())
        await other.aclose()
        # those that were turned away leave when their threads get to run
        await until(lambda: len(port.exporter._peers) <= 1 + 4 + 1, SOON_S)
        await port.assert_serves()
    finally:
        for sock in crowd:
            sock.close()
    await port.assert_alone()


async def test_connections_are_bounded_and_those_that_stand_are_served(port, monkeypatch):
    monkeypatch.setattr(stream_reader, "_MAX_CONNECTIONS", 2)
    second, third = (port.transport.make_reader(port.target, SECRET, "127.0.0.1") for _ in range(2))
    await second.connect(port.exporter.describe())
    with pytest.raises(TransportError):
        await third.connect(port.exporter.describe())
    await third.aclose()
    await port.assert_serves()
    await second.aclose()
    await port.assert_alone()
    await second.connect(port.exporter.describe())
    await second.aclose()


async def test_a_source_without_threads_to_spare_refuses_and_lives(port, monkeypatch):
    def none(*_):
        raise RuntimeError("can't start new thread")

    with monkeypatch.context() as patched:
        patched.setattr(threading.Thread, "start", none)
        sock = port.visit()
        await until(lambda: port.exporter._num_accepted >= 2, SOON_S)
    assert until_closed(sock) == b""
    await port.assert_serves()


# ---- TLS, and other users


@pytest.mark.parametrize("is_source_on", [True, False])
async def test_ends_that_differ_in_tls_are_told_the_setting(kv, is_source_on):
    ends = [tcp(tls=ClusterTls.derived(SECRET)), tcp()]
    exporter = ends[not is_source_on].make_exporter(kv.lib.allocate(), SECRET, "127.0.0.1")
    reader = ends[is_source_on].make_reader(kv.lib.allocate(), SECRET, "127.0.0.1")
    await exporter.start()
    try:
        with pytest.raises(TransportError, match=r"cluster\.tls is (on|off) at the source"):
            await reader.connect(exporter.describe())
    finally:
        await reader.aclose()
        await exporter.aclose()


@pytest.mark.parametrize(("host", "is_tls"), [("127.0.0.1", False), ("0.0.0.0", True)])
async def test_by_default_kv_is_under_tls_where_other_hosts_reach_the_source(kv, host, is_tls):
    ours = tcp(tls=ClusterTls.derived(SECRET, is_everywhere=False))
    exporter = ours.make_exporter(kv.lib.allocate(), SECRET, host)
    reader = ours.make_reader(kv.lib.allocate(), SECRET, host)
    await exporter.start()
    try:
        assert msgspec.msgpack.decode(exporter.describe(), type=TcpDescriptor).is_tls is is_tls
        await reader.connect(exporter.describe())
        plain = tcp().make_reader(kv.lib.allocate(), SECRET, host)
        if is_tls:
            with pytest.raises(TransportError, match=r"cluster\.tls is on at the source"):
                await plain.connect(exporter.describe())
        await plain.aclose()
    finally:
        await reader.aclose()
        await exporter.aclose()


async def test_a_source_of_another_authority_is_not_read_from(kv):
    exporter = tcp(tls=ClusterTls.derived(b"another")).make_exporter(kv.lib.allocate(), SECRET, "127.0.0.1")
    reader = tcp(tls=ClusterTls.derived(SECRET)).make_reader(kv.lib.allocate(), SECRET, "127.0.0.1")
    await exporter.start()
    try:
        with pytest.raises(TransportError, match="certificate"):
            await reader.connect(exporter.describe())
    finally:
        await reader.aclose()
        await exporter.aclose()
