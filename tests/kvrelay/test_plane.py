"""The framed plane: who knows the secret is heard, everybody else is not; a lost peer shows at once."""

import asyncio
import logging
import os
import socket
from contextlib import asynccontextmanager, suppress

import pytest

from kvrelay.errors import AuthenticationFailed, ConnectionLost, ProtocolError
from kvrelay.plane import connection as plane
from kvrelay.plane import framing
from kvrelay.plane.framing import ThreadSender
from kvrelay.plane.tls import ClusterTls
from tests.fakes import until

pytestmark = pytest.mark.pure


SECRET = b"the cluster's secret"
HOST = "127.0.0.1"


@pytest.fixture(params=["plain", "tls"])
def tls(request):
    """Every rule holds on either kind of plane."""
    return ClusterTls.derived(SECRET) if request.param == "tls" else None


def writer_of(connection):
    """The stream under a connection's frames: for bytes that are none."""
    return connection._writer


async def echo(connection):
    while True:
        await connection.send(await connection.receive())


@asynccontextmanager
async def serving(tls, handler=echo, secret=SECRET):
    server = plane.Server(handler, secret, tls=tls)
    port = await server.start(HOST)
    try:
        async with asyncio.timeout(60):
            yield port
    finally:
        await server.aclose()


@asynccontextmanager
async def connected(port, tls=None):
    connection = await plane.connect(HOST, port, SECRET, tls=tls)
    try:
        yield connection
    finally:
        await connection.aclose()


@asynccontextmanager
async def raw_server(talk):
    """A server that does not speak our protocol; its connections are over when this ends."""
    ended: list[asyncio.Task[None]] = []

    async def accept(reader, writer):
        ended.append(asyncio.current_task())
        with suppress(ConnectionError):  # the client may drop it with bytes unread
            await talk(reader, writer)
        writer.close()

    server = await asyncio.start_server(accept, HOST, 0)
    try:
        yield server.sockets[0].getsockname()[1]
    finally:
        server.close()
        await asyncio.gather(*ended)


@pytest.mark.parametrize("frame", [b"", b"x", b"y" * 3_000_000], ids=len)
async def test_a_frame_comes_back_as_sent(tls, frame):
    async with serving(tls) as port, connected(port, tls) as connection:
        await connection.send(frame)
        assert await connection.receive() == frame


async def test_frames_keep_their_order_and_bounds(tls):
    async with serving(tls) as port, connected(port, tls) as connection:
        frames = [bytes([i]) * i for i in range(50)]
        for frame in frames:
            connection.send_nowait(frame)
        assert [await connection.receive() for _ in frames] == frames


async def test_a_wrong_secret_is_refused_and_its_frames_reach_nobody(tls, caplog):
    heard = []

    async def handler(connection):
        heard.append(await connection.receive())

    with caplog.at_level(logging.WARNING):
        async with serving(tls, handler) as port:
            with pytest.raises((AuthenticationFailed, ConnectionLost)):
                await plane.connect(HOST, port, b"a guess", tls=tls)
            async with connected(port, tls) as good:
                await good.send(b"hello")
                with pytest.raises(ConnectionLost):
                    await good.receive()
    assert heard == [b"hello"]
    assert any("refused" in record.message for record in caplog.records)


async def test_a_server_with_another_secret_is_not_trusted(tls):
    """The client asks for proof as well: whoever took over the port learns nothing it can use."""
    async with serving(tls, secret=b"another cluster") as port:
        with pytest.raises((AuthenticationFailed, ConnectionLost)):
            await plane.connect(HOST, port, SECRET, tls=tls)


async def test_another_protocol_is_refused():
    async def http(reader, writer):
        writer.write(b"HTTP/1.1 400 Bad Request\r\n" + b"x" * 100)
        await reader.read(1)

    async with raw_server(http) as port:
        with pytest.raises(ProtocolError, match="does not speak"):
            await plane.connect(HOST, port, SECRET)


async def test_a_replayed_proof_is_worthless():
    """Nonces are new each time: bytes recorded from a good client do not open a second connection."""
    async with serving(None) as port:
        recorded = await record_a_good_client(port)
        reader, writer = await asyncio.open_connection(HOST, port)
        try:
            writer.write(recorded)
            answer = await reader.read()  # until the server closes
        finally:
            writer.close()
        assert len(answer) <= len(plane._MAGIC) + plane._NONCE_BYTES + 32  # its nonce and proof, never an echo


async def record_a_good_client(port):
    """What an authenticated client sends first, frame included, as seen by someone on the path."""
    seen = bytearray()

    async def relay(source, target, keep):
        while data := await source.read(1 << 16):
            if keep:
                seen.extend(data)
            target.write(data)
            await target.drain()
        target.close()

    async def between(reader, writer):
        to_server, from_client = await asyncio.open_connection(HOST, port)
        await asyncio.gather(relay(reader, from_client, True), relay(to_server, writer, False))

    async with raw_server(between) as tapped, connected(tapped) as connection:
        await connection.send(b"order 66")
        assert await connection.receive() == b"order 66"
    return bytes(seen)


async def test_a_huge_frame_is_refused_before_it_is_read(tls, monkeypatch):
    seen = asyncio.get_running_loop().create_future()

    async def handler(connection):
        try:
            await connection.receive()
        except ProtocolError as error:
            seen.set_result(str(error))

    monkeypatch.setattr(framing, "MAX_FRAME_BYTES", 1000)
    async with serving(tls, handler) as port, connected(port, tls) as connection:
        connection.send_nowait(b"x" * 1001)
        assert "1001 bytes" in await seen
        with pytest.raises(ConnectionLost):
            await connection.receive()


async def test_a_peer_that_goes_is_noticed(tls):
    async def leave(connection):
        await connection.send(b"bye")

    async with serving(tls, leave) as port, connected(port, tls) as connection:
        assert await connection.receive() == b"bye"
        with pytest.raises(ConnectionLost):
            await connection.receive()


async def test_a_frame_cut_short_is_a_lost_connection(tls):
    async def half(connection):
        writer_of(connection).write((100).to_bytes(4, "little") + b"only this")
        await writer_of(connection).drain()

    async with serving(tls, half) as port, connected(port, tls) as connection:
        with pytest.raises(ConnectionLost):
            await connection.receive()


async def test_closing_sends_what_is_queued(tls):
    got = asyncio.get_running_loop().create_future()

    async def handler(connection):
        got.set_result(await connection.receive())

    async with serving(tls, handler) as port:
        connection = await plane.connect(HOST, port, SECRET, tls=tls)
        connection.send_nowait(b"last words")
        await connection.aclose()
        assert await got == b"last words"
        with pytest.raises(ConnectionLost):
            connection.send_nowait(b"too late")


async def test_a_peer_that_does_not_read_is_dropped_not_buffered_for(tls, monkeypatch):
    release = asyncio.Event()

    async def deaf(connection):
        await release.wait()

    monkeypatch.setattr(framing, "MAX_BUFFERED_BYTES", 1 << 20)
    async with serving(tls, deaf) as port, connected(port, tls) as connection:
        with pytest.raises(ConnectionLost, match="too slowly"):
            for _ in range(100):
                connection.send_nowait(b"x" * (1 << 20))
        release.set()


async def test_nobody_there_is_a_lost_connection(tls):
    async with serving(tls) as port:
        pass
    with pytest.raises(ConnectionLost):
        await plane.connect(HOST, port, SECRET, tls=tls)


async def test_a_silent_server_times_out(tls):
    async def mute(reader, writer):
        while await reader.read(1 << 10):
            pass

    async with raw_server(mute) as port:
        with pytest.raises(ConnectionLost, match="timed out"):
            await plane.connect(HOST, port, SECRET, timeout_s=0.05, tls=tls)


async def test_a_handler_that_fails_costs_only_its_own_connection(tls, caplog):
    async def moody(connection):
        if await connection.receive() == b"bad":
            raise ValueError("a bug")
        await connection.send(b"good")

    async with serving(tls, moody) as port, connected(port, tls) as first, connected(port, tls) as second:
        await first.send(b"bad")
        with pytest.raises(ConnectionLost):
            await first.receive()
        await second.send(b"fine")
        assert await second.receive() == b"good"
    assert "a bug" in caplog.text


async def test_closing_the_server_ends_its_connections(tls):
    server = plane.Server(echo, SECRET, tls=tls)
    port = await server.start(HOST)
    connection = await plane.connect(HOST, port, SECRET, tls=tls)
    await connection.send(b"x")
    await connection.receive()
    await server.aclose()
    with pytest.raises(ConnectionLost):
        await connection.receive()
    await server.aclose()  # again: nothing to do
    await connection.aclose()


# ---- past the event loop


def family_of(connection) -> int:
    return writer_of(connection).get_extra_info("socket").family


async def test_a_local_peer_is_reached_over_a_unix_socket(tls):
    async with serving(tls) as port, connected(port, tls) as connection:
        assert (family_of(connection) == socket.AF_UNIX) == (tls is None)
        assert connection.peer == f"{HOST}:{port}"
        await connection.send(b"near")
        assert await connection.receive() == b"near"


async def test_a_unix_socket_of_another_user_is_not_ours(monkeypatch):
    monkeypatch.setattr(plane, "peer_uid", lambda sock: os.getuid() + 1)
    async with serving(None) as port, connected(port) as connection:
        assert family_of(connection) == socket.AF_INET
        await connection.send(b"over TCP")
        assert await connection.receive() == b"over TCP"


async def test_a_name_that_is_taken_leaves_tcp(monkeypatch, caplog):
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as stranger:
        monkeypatch.setattr(plane, "local_name", lambda host, port: "\0kvrelay-test-taken")
        stranger.bind("\0kvrelay-test-taken")
        async with serving(None) as port, connected(port) as connection:
            assert family_of(connection) == socket.AF_INET
            await connection.send(b"x")
            assert await connection.receive() == b"x"
    assert "no Unix socket" in caplog.text


async def test_the_name_is_free_once_the_server_is_closed():
    async with serving(None) as port:
        pass
    assert plane.local_socket(HOST, port) is None


def sent_from_a_thread(connection, loop, frames) -> int:
    """In a thread: every frame, by the loop where it cannot be sent at once; how many went past the loop."""
    num_direct = 0
    for frame in frames:
        if connection.send_from_thread(frame):
            num_direct += 1
        else:
            loop.call_soon_threadsafe(connection.send_nowait, frame)
    return num_direct


async def test_frames_of_a_thread_stay_whole_and_in_order_beside_the_loops(tls, monkeypatch):
    """Large ones do not fit into the socket's buffer: those begin past the loop, and the loop sends their rest."""
    counts, turns, real = [], [], ThreadSender._resume
    monkeypatch.setattr(ThreadSender, "_resume", lambda self: (turns.append(1), real(self)))

    def frames(who: bytes) -> list[bytes]:
        return [who + bytes([index]) * (700_000 if index % 7 == 0 else 30) for index in range(60)]

    async def both(connection):
        connection.allow_threads()
        loop = asyncio.get_running_loop()
        counts.append(await asyncio.to_thread(sent_from_a_thread, connection, loop, [b"first"] * 3))
        from_thread = asyncio.ensure_future(asyncio.to_thread(sent_from_a_thread, connection, loop, frames(b"thread")))
        for frame in frames(b"loop"):
            connection.send_nowait(frame)
            await asyncio.sleep(0)
        counts.append(await from_thread)
        assert await connection.receive() == b"all here"
        counts.append(await asyncio.to_thread(sent_from_a_thread, connection, loop, [b"later"] * 3))
        connection.send_nowait(b"the loop again")
        counts.append(await asyncio.to_thread(sent_from_a_thread, connection, loop, [b"last"] * 3))

    async with serving(tls, both) as port, connected(port, tls) as connection:
        assert [await connection.receive() for _ in range(3)] == [b"first"] * 3
        got = [await connection.receive() for _ in range(120)]
        for who in (b"thread", b"loop"):
            assert [frame for frame in got if frame.startswith(who)] == frames(who)
        await connection.send(b"all here")
        assert [await connection.receive() for _ in range(7)] == [b"later"] * 3 + [b"the loop again"] + [b"last"] * 3
    if tls is None:
        assert counts == [3, 60, 3, 3]
        assert turns, "the loop's turn never came"
    else:
        assert counts == [0, 0, 0, 0], "nothing may go past TLS"


async def test_what_the_socket_did_not_take_is_not_overtaken_once_it_does_again():
    """The loop sends something while a thread's frames wait for it; the thread goes on at once when the socket is
    free.
    """
    small = [b"%d" % index for index in range(4)]

    async def handler(connection):
        connection.allow_threads()
        loop = asyncio.get_running_loop()
        first = b"x" * 8_000_000
        assert await asyncio.to_thread(sent_from_a_thread, connection, loop, [first]) == 1  # its rest is the loop's
        # without the loop running in between, as an engine's thread would find it
        assert sent_from_a_thread(connection, loop, small[:2]) == 2
        await until(lambda: not writer_of(connection).transport.get_write_buffer_size())
        connection.send_nowait(small[2])
        assert await asyncio.to_thread(sent_from_a_thread, connection, loop, [small[3]]) == 1
        await connection.receive()

    async with serving(None, handler) as port, connected(port) as connection:
        assert len(await connection.receive()) == 8_000_000
        assert [await connection.receive() for _ in small] == small


async def test_a_peer_that_does_not_read_is_given_up():
    """What waits for it is bounded, whoever sends."""
    ended = asyncio.get_running_loop().create_future()

    async def handler(connection):
        connection.allow_threads()
        loop, frame, sent = asyncio.get_running_loop(), bytes(16 << 20), 0
        while sent < 100 and await asyncio.to_thread(sent_from_a_thread, connection, loop, [frame]):
            sent += 1
        with pytest.raises(ConnectionLost):
            connection.send_nowait(b"more")
        ended.set_result(sent)

    async with serving(None, handler) as port, connected(port):
        assert 4 <= await ended <= 8


async def test_a_connection_that_threads_send_on_ends_with_its_handler():
    async def leave(connection):
        connection.allow_threads()
        assert connection.send_from_thread(b"bye")

    async with serving(None, leave) as port, connected(port) as connection:
        assert await connection.receive() == b"bye"
        with pytest.raises(ConnectionLost):
            await connection.receive()


async def test_a_thread_may_send_on_a_lost_connection():
    ended = asyncio.get_running_loop().create_future()

    async def handler(connection):
        connection.allow_threads()
        with suppress(ConnectionLost):
            await connection.receive()
        connection.send_from_thread(b"nobody reads this")
        connection.abort()
        ended.set_result(connection.send_from_thread(b"nor this"))

    async with serving(None, handler) as port:
        async with connected(port):
            pass
        assert await ended is False


# ---- handed out


async def taken(connection) -> tuple[list[bytes], Exception]:
    """All frames, and what ended them."""
    frames: list[bytes] = []
    with pytest.raises(Exception) as ended:
        await connection.read_all(frames.append)
    return frames, ended.value


async def test_frames_are_handed_out_as_sent_whatever_the_pieces(tls):
    """The first of them came while nobody was listening."""
    frames = [b"", b"x", b"y" * 3_000_000, b"", *(bytes([i]) * i for i in range(50))]
    data = b"".join(framing.framed(frame) for frame in frames)

    async def in_pieces(connection):
        begin = 0
        for size in (1, 2, 3, 100, 70_000, 1, 5_000_000, len(data)):
            writer_of(connection).write(data[begin : begin + size])
            await writer_of(connection).drain()
            await asyncio.sleep(0.001)
            begin += size

    async with serving(tls, in_pieces) as port, connected(port, tls) as connection:
        first = await connection.receive()
        await until(lambda: connection._reader._num_buffered >= 100)
        rest, ended = await taken(connection)
        assert [first, *rest] == frames and isinstance(ended, ConnectionLost)


async def test_frames_are_handed_out_to_the_end_even_if_it_has_come_already(tls):
    async def leave(connection):
        for frame in (b"one", b"two"):
            connection.send_nowait(frame)
        await connection.aclose()

    async with serving(tls, leave) as port, connected(port, tls) as connection:
        await until(lambda: connection._reader._eof)
        frames, ended = await taken(connection)
        assert frames == [b"one", b"two"] and isinstance(ended, ConnectionLost)


async def test_who_fails_to_take_a_frame_gets_no_more_and_hears_of_it(tls):
    async def talk(connection):
        for _ in range(3):
            connection.send_nowait(b"again")
        await connection.receive()

    def refuse(frame: bytes) -> None:
        seen.append(frame)
        raise ValueError("not this one")

    seen: list[bytes] = []
    async with serving(tls, talk) as port, connected(port, tls) as connection:
        with pytest.raises(ValueError, match="not this one"):
            await connection.read_all(refuse)
        assert seen == [b"again"]


async def test_a_huge_frame_is_not_handed_out(tls, monkeypatch):
    async def talk(connection):
        connection.send_nowait(b"x" * 1001)
        await connection.receive()

    monkeypatch.setattr(framing, "MAX_FRAME_BYTES", 1000)
    async with serving(tls, talk) as port, connected(port, tls) as connection:
        frames, ended = await taken(connection)
        assert not frames and isinstance(ended, ProtocolError)
