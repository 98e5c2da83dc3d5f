"""The source's side of the stream protocol: a listener, and a thread for each connection that is read over.

A peer has HANDSHAKE_S to prove the cluster's secret; a peer that breaks the protocol is cut off. Connections, and those
among them
that have proved nothing yet, are bounded: strangers can neither keep readers out nor pile up threads.
"""

import asyncio
import logging
import socket
import threading
import time
from dataclasses import dataclass, field

import msgspec

from kvrelay.errors import BackendUnavailable
from kvrelay.kvtransfer.transports.base import host_id
from kvrelay.kvtransfer.transports.tcp.channels import Channel, TlsChannel, shut, tune
from kvrelay.kvtransfer.transports.tcp.protocol import HANDSHAKE_S, Inbox, bytes_of, greet_target
from kvrelay.plane.connection import connections
from kvrelay.plane.tls import ClusterTls
from kvrelay.types import KvMemory

logger = logging.getLogger(__name__)

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
        self._secret, self._host, self._tls = secret, host, tls
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
        family = socket.getaddrinfo(self._host, 0, type=socket.SOCK_STREAM)[0][0]
        listener = socket.create_server((self._host, 0), family=family, backlog=64)
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, _REQUEST_BUFFER_BYTES)
        return listener

    def describe(self) -> bytes:
        assert self._listener is not None
        port = self._listener.getsockname()[1]
        is_tls, num_bytes = self._tls is not None, self._memory.layout.num_bytes
        return msgspec.msgpack.encode(TcpDescriptor(host_id(), self._host, port, num_bytes, is_tls))

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
