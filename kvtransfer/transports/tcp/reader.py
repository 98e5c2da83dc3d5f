"""Both sides of the stream protocol: the source's listener, and the target's reads, dealt to one or more connections.

The listener has a thread for each connection that is read over. A peer has HANDSHAKE_S to prove the cluster's secret; a
peer that breaks the protocol is cut off. Connections, and those among them that have proved nothing yet, are bounded:
strangers can neither keep readers out nor pile up threads.
"""

import asyncio
import contextlib
import logging
import socket
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial

import msgspec

from kvrelay.errors import BackendUnavailable, TransportError
from kvrelay.kvtransfer.mover.copy_plan import CopyList
from kvrelay.kvtransfer.transports.base import NAMESPACES, Landed, Transport, host_id, open_off_loop, why_not_on_host
from kvrelay.kvtransfer.transports.tcp.channels import LOOK_S, Channel, TlsChannel, shut, tune
from kvrelay.kvtransfer.transports.tcp.connection import Share, Stream, StreamRead
from kvrelay.kvtransfer.transports.tcp.protocol import (
    HANDSHAKE_S,
    Inbox,
    Piece,
    Request,
    bytes_of,
    cut_into_pieces,
    deal,
    greet_source,
    greet_target,
    requests_for,
)
from kvrelay.plane.connection import connections
from kvrelay.plane.ports import listen
from kvrelay.plane.tls import ClusterTls, tls_at
from kvrelay.types import KvMemory

logger = logging.getLogger(__name__)

_BETWEEN_HOSTS = 4  # streams
INLINE_BYTES = 128 << 10  # a read up to this is tried on the loop
INLINE_S = 100e-6  # and waited for there so long; a source on another host may need more, then the loop must not wait
_MAX_SKIPPED = 64  # small reads that go to the thread unasked, at most, before the loop is tried again
_MAX_CONNECTIONS = 512
_MAX_STRANGERS = 32  # in the middle of their handshake; one more and the oldest has to go
_JOIN_S = 2.0
_REQUEST_BUFFER_BYTES = 256 << 10  # for requests not read yet: sending one never blocks the target


class TcpDescriptor(msgspec.Struct, frozen=True):
    """What a reader needs to connect."""

    host_id: str
    host: str
    port: int
    num_bytes: int
    is_tls: bool


@dataclass(slots=True, eq=False)
class TcpPeer:
    sock: socket.socket
    is_proven: bool = False
    thread: threading.Thread | None = None
    since: float = field(default_factory=time.monotonic)


class TcpExporter:
    """Serves the pool's bytes on a port of this host."""

    def __init__(self, memory: KvMemory, secret: bytes, host: str, tls: ClusterTls | None = None) -> None:
        assert memory.view is not None
        self._memory, self._pool = memory, bytes_of(memory.view).toreadonly()
        self._secret, self._host, self._tls = secret, host, tls_at(tls, host)
        self._listener: socket.socket | None = None
        self._accepting: asyncio.Task[None] | None = None
        self._peers: dict[int, TcpPeer] = {}  # by their number; a thread takes itself out
        self._num_accepted = 0
        self._is_closing = False

    # ---- the life of the listener

    async def start(self) -> None:
        try:
            self._listener = self._listen()
        except OSError as error:
            raise BackendUnavailable("tcp", f"cannot listen: {error}") from error
        self._listener.setblocking(False)
        self._accepting = asyncio.create_task(self._accept(self._listener), name="kv-tcp-accept")

    async def _accept(self, listener: socket.socket) -> None:
        async for sock in connections(listener):
            if len(self._peers) >= _MAX_CONNECTIONS:
                logger.warning("refused a reader of the KV pool: there are %d already", len(self._peers))
                sock.close()
                continue
            self._make_room()
            self._num_accepted += 1
            self._begin(self._num_accepted, TcpPeer(sock))

    def _begin(self, number: int, peer: TcpPeer) -> None:
        self._peers[number] = peer
        peer.thread = threading.Thread(target=self._serve, args=(number, peer), name="kv-tcp-serve", daemon=True)
        try:
            peer.thread.start()
        except RuntimeError as error:  # no more threads
            logger.warning("cannot serve a reader of the KV pool: %s", error)
            del self._peers[number]
            peer.sock.close()

    def _make_room(self) -> None:
        strangers = [peer for peer in list(self._peers.values()) if not peer.is_proven]
        if len(strangers) >= _MAX_STRANGERS:
            shut(min(strangers, key=lambda peer: peer.since).sock)

    def _listen(self) -> socket.socket:
        """Raises OSError."""
        listener = listen(self._host, backlog=64)
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, _REQUEST_BUFFER_BYTES)
        return listener

    def describe(self) -> bytes:
        assert self._listener is not None
        port = self._listener.getsockname()[1]
        is_tls, num_bytes = self._tls is not None, self._memory.layout.num_bytes
        return msgspec.msgpack.encode(TcpDescriptor(host_id(*NAMESPACES["tcp"]), self._host, port, num_bytes, is_tls))

    def set_busy(self, num_open: int) -> None:
        """Needs no progress."""

    async def aclose(self) -> None:
        self._is_closing = True
        if self._accepting is not None:
            self._accepting.cancel()
            await asyncio.gather(self._accepting, return_exceptions=True)
            self._accepting = None
        if self._listener is not None:
            self._listener.close()
            self._listener = None
        peers = list(self._peers.values())
        for peer in peers:
            shut(peer.sock)
        for peer in peers:
            if peer.thread is not None:
                await asyncio.to_thread(peer.thread.join, _JOIN_S)

    # ---- on a peer's thread

    def _serve(self, number: int, peer: TcpPeer) -> None:
        channel: Channel | None = None
        try:
            tune(peer.sock)
            channel = self._admit(peer, time.monotonic() + HANDSHAKE_S)
            peer.is_proven = True
            self._answer_all(channel)
        except PermissionError as error:
            logger.warning("refused a reader of the KV pool: %s", error)
        except OSError as error:
            logger.debug("a reader of the KV pool is gone: %s", error)
        except Exception:  # a thread's edge: this connection ends, the worker lives
            logger.exception("serving a reader of the KV pool failed")
        finally:
            (channel or peer.sock).close()
            self._peers.pop(number, None)

    def _admit(self, peer: TcpPeer, until: float) -> Channel:
        """The channel to a peer that has proved itself. Raises PermissionError, OSError."""
        if self._tls is None:
            greet_target(peer.sock, self._secret, until)
            return Channel(peer.sock, receive_s=None)
        peer.sock = sock = self._tls.server().wrap_socket(peer.sock, server_side=True, do_handshake_on_connect=False)
        if self._is_closing:  # aclose() may have shut the socket that was wrapped
            raise ConnectionError("the exporter is closing")
        sock.settimeout(max(until - time.monotonic(), 0.0))
        sock.do_handshake()
        greet_target(sock, self._secret, until)
        return TlsChannel(sock, receive_s=None)

    def _answer_all(self, channel: Channel) -> None:
        inbox = Inbox(channel, len(self._pool))
        while not self._is_closing:
            wanted = inbox.next()
            channel.send_answer(wanted.header, wanted.views(self._pool), wanted.num_bytes)


class TcpReader:
    """Reads over one or more TCP connections, under TLS where the cluster has it.

    One connection is bound by one core at each end, by its window over the round trip, and in clouds by a limit on each
    flow (5 Gbit/s in places): between hosts a read is spread over four of them. On one host one connection is faster.
    """

    max_in_flight = 2  # the second's request is under way before the first one's answer has ended

    def __init__(
        self, memory: KvMemory, secret: bytes, host: str, tls: ClusterTls | None = None, num_streams: int = 0
    ) -> None:
        """`num_streams`: connections to the source; 0: as many as suit the pair."""
        assert memory.view is not None
        self._tls, self._num_streams = tls, num_streams
        self._pool, self._secret = bytes_of(memory.view), secret
        self._source_bytes = 0
        self._streams: list[Stream] = []
        self._reads: dict[asyncio.Future[None], StreamRead] = {}
        self._num_missed = self._num_to_skip = 0  # small reads that the loop waited for in vain, in a row

    async def connect(self, descriptor: bytes) -> None:
        try:
            source = msgspec.msgpack.decode(descriptor, type=TcpDescriptor)
        except msgspec.DecodeError as error:
            raise TransportError(f"malformed descriptor: {error}") from error
        self._tls = tls_at(self._tls, source.host)
        if source.is_tls != (self._tls is not None):
            there, here = ("on", "off") if source.is_tls else ("off", "on")
            raise TransportError(f"cluster.tls is {there} at the source and {here} here: set it alike")
        is_here = bool(source.host_id) and source.host_id == host_id(*NAMESPACES["tcp"])
        await self._open(source, self._num_streams or (1 if is_here else _BETWEEN_HOSTS))

    def _dial(self, source: TcpDescriptor) -> Channel:
        """Raises OSError."""
        until = time.monotonic() + HANDSHAKE_S
        sock = socket.create_connection((source.host, source.port), timeout=HANDSHAKE_S)
        try:
            tune(sock)
            if self._tls is None:
                greet_source(sock, self._secret, until)
                return Channel(sock, receive_s=LOOK_S)
            sock = secured = self._tls.client().wrap_socket(sock)
            greet_source(secured, self._secret, until)
            return TlsChannel(secured, receive_s=LOOK_S)
        except BaseException:
            sock.close()
            raise

    async def _open(self, source: TcpDescriptor, num_streams: int) -> None:
        """Open `num_streams` connections, or as many as the source accepts, at least one. Raises TransportError."""
        self._source_bytes = source.num_bytes
        streams = [Stream(f"kv-tcp-{i}", self._pool, partial(self._dial, source)) for i in range(num_streams)]
        for stream in streams:
            try:
                await open_off_loop(stream.open, lambda _, stream=stream: stream.stop())  # type: ignore[misc]
            except OSError as error:
                if not self._streams:
                    raise TransportError(f"cannot reach the source's data port: {error}") from error
                logger.warning("KV comes over %d of %d streams: %s", len(self._streams), num_streams, error)
                return
            self._streams.append(stream)

    def read(self, copies: CopyList, landed: Landed | None = None) -> "asyncio.Future[None]":
        try:
            pieces = cut_into_pieces(copies, self._source_bytes, len(self._pool))
        except TransportError as error:
            return _ended(error)
        if not pieces:
            if landed is not None:
                landed(0)
            return _ended(None)
        if len(pieces) == 1 and pieces[0].num_bytes <= INLINE_BYTES:
            done = self._read_now(pieces[0], landed)
            if done is not None:
                return done
        read = self._begin(pieces, landed)
        shares = [Share(read, requests_for(mine)) for mine in deal(pieces, len(self._streams))]
        for share, stream in zip(shares, sorted(self._streams, key=lambda s: s.num_waiting), strict=False):
            stream.put(share)
        return read.done

    def _begin(self, pieces: list[Piece], landed: Landed | None) -> StreamRead:
        read = StreamRead(pieces, landed, self._settle_on_loop(asyncio.get_running_loop()))
        self._reads[read.done] = read
        return read

    def _read_now(self, piece: Piece, landed: Landed | None) -> "asyncio.Future[None] | None":
        """A small read done here, or begun here to go on upon the stream's thread. None: neither."""
        if self._num_to_skip:
            self._num_to_skip -= 1
            return None
        request, stream = Request([piece]), self._streams[0]
        try:
            num_landed = stream.read_now(request, INLINE_S)
            if num_landed is None:
                return None
            if num_landed == piece.num_bytes:
                self._num_missed = 0
                if landed is not None:
                    landed(num_landed)
                return _ended(None)
        except TransportError as error:
            return _ended(error)
        except Exception as error:  # the socket's, or a bug in `landed`: the bytes are not there, and none will land
            logger.debug("a read failed", exc_info=True)
            return _ended(TransportError(str(error) or type(error).__name__))
        self._num_missed += 1
        self._num_to_skip = min(1 << self._num_missed, _MAX_SKIPPED)
        read = self._begin([piece], landed)
        if num_landed:
            try:
                read.progress.add(0, num_landed)
            except TransportError as error:
                read.fail(error)
        stream.go_on(Share(read, [request]))
        return read.done

    def _settle_on_loop(self, loop: asyncio.AbstractEventLoop) -> Callable[[StreamRead], None]:
        def settle(read: StreamRead) -> None:
            with contextlib.suppress(RuntimeError):  # the loop is closed
                loop.call_soon_threadsafe(self._settle, read)

        return settle

    def _settle(self, read: StreamRead) -> None:
        del self._reads[read.done]
        if read.done.cancelled():
            return
        if read.error is None:
            read.done.set_result(None)
        else:
            read.done.set_exception(read.error)

    def abandon(self, read: "asyncio.Future[None]") -> None:
        """Drop the connections under this read."""
        mine = self._reads.get(read)
        if mine is not None:
            mine.fail(TransportError("abandoned"))
            for stream in self._streams:
                stream.cut(mine)

    async def aclose(self) -> None:
        for read in list(self._reads):
            self.abandon(read)
        closing = asyncio.get_running_loop().run_in_executor(None, self._stop_all)
        await asyncio.shield(closing)  # the caller may be cancelled: every connection is closed all the same

    def _stop_all(self) -> None:
        for stream in self._streams:
            stream.stop()


def _ended(error: TransportError | None) -> "asyncio.Future[None]":
    done: asyncio.Future[None] = asyncio.get_running_loop().create_future()
    if error is None:
        done.set_result(None)
    else:
        done.set_exception(error)
    return done


def tcp(tls: ClusterTls | None = None, *, num_streams: int = 0) -> Transport:
    """The transport between hosts, and on one host where no memory can be shared: under `tls` if any.

    `num_streams`: connections of a pair; 0: as many as suit it.
    """
    return Transport(
        "tcp", partial(TcpExporter, tls=tls), partial(TcpReader, tls=tls, num_streams=num_streams), why_not_on_host
    )
