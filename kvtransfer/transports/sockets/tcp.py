"""TCP: the stream protocol between hosts, under TLS where the cluster has it; several connections for each pair.

One connection is bound by one core at each end, by its window over the round trip, and in clouds by a limit on each
flow (5 Gbit/s in places): between hosts a read is dealt to four of them. On one host one connection is faster.
"""

import socket
import time
from functools import partial

import msgspec

from kvrelay.kvtransfer.transports.base import Transport, TransportError, host_id
from kvrelay.kvtransfer.transports.sockets.channels import LOOK_S, Channel, PlainChannel, TlsChannel, tune
from kvrelay.kvtransfer.transports.sockets.exporter import Peer, StreamExporter
from kvrelay.kvtransfer.transports.sockets.protocol import greet_source, greet_target
from kvrelay.kvtransfer.transports.sockets.reader import StreamReader
from kvrelay.plane.tls import ClusterTls
from kvrelay.types import KvMemory

_BETWEEN_HOSTS = 4  # streams
_REQUEST_BUFFER_BYTES = 256 << 10  # the source's, for requests it has not read yet: sending one never blocks


class _Descriptor(msgspec.Struct, frozen=True):
    host_id: str
    host: str
    port: int
    num_bytes: int
    is_tls: bool


class TcpExporter(StreamExporter):
    """Serves the pool's bytes on a port of this host."""

    name = "tcp"

    def __init__(self, memory: KvMemory, secret: bytes, host: str, tls: ClusterTls | None = None) -> None:
        super().__init__(memory, secret, host)
        self._tls = tls

    def _listen(self) -> socket.socket:
        family = socket.getaddrinfo(self._host, 0, type=socket.SOCK_STREAM)[0][0]
        listener = socket.create_server((self._host, 0), family=family, backlog=64)
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, _REQUEST_BUFFER_BYTES)
        return listener

    def _admit(self, peer: Peer, until: float) -> Channel:
        if self._tls is None:
            return super()._admit(peer, until)
        peer.sock = sock = self._tls.server().wrap_socket(peer.sock, server_side=True, do_handshake_on_connect=False)
        if self._is_closing:  # who shut the socket may have held the one that was wrapped
            raise ConnectionError("the exporter is closing")
        sock.settimeout(max(until - time.monotonic(), 0.0))
        sock.do_handshake()
        greet_target(sock, self._secret, until)
        return TlsChannel(sock, receive_s=None)

    def describe(self) -> bytes:
        assert self._listener is not None
        port = self._listener.getsockname()[1]
        is_tls, num_bytes = self._tls is not None, self._memory.layout.num_bytes
        return msgspec.msgpack.encode(_Descriptor(host_id(), self._host, port, num_bytes, is_tls))


class TcpReader(StreamReader):
    """Reads over one or more TCP connections."""

    name = "tcp"

    def __init__(
        self, memory: KvMemory, secret: bytes, host: str, tls: ClusterTls | None = None, num_streams: int = 0
    ) -> None:
        super().__init__(memory, secret, host)
        self._tls, self._num_streams = tls, num_streams

    async def connect(self, descriptor: bytes) -> None:
        try:
            source = msgspec.msgpack.decode(descriptor, type=_Descriptor)
        except msgspec.DecodeError as error:
            raise TransportError(f"malformed descriptor: {error}") from error
        if source.is_tls != (self._tls is not None):
            there, here = ("on", "off") if source.is_tls else ("off", "on")
            raise TransportError(f"cluster.tls is {there} at the source and {here} here: set it alike")
        is_here = bool(source.host_id) and source.host_id == host_id()
        num_streams = self._num_streams or (1 if is_here else _BETWEEN_HOSTS)
        await self._open(partial(self._dial, source), num_streams, source.num_bytes)

    def _dial(self, source: _Descriptor, until: float) -> Channel:
        sock = socket.create_connection((source.host, source.port), timeout=max(until - time.monotonic(), 0.0))
        try:
            tune(sock)
            if self._tls is None:
                greet_source(sock, self._secret, until)
                return PlainChannel(sock, receive_s=LOOK_S)
            sock = secured = self._tls.client().wrap_socket(sock)
            greet_source(secured, self._secret, until)
            return TlsChannel(secured, receive_s=LOOK_S)
        except BaseException:
            sock.close()
            raise


def _why_not(memory: KvMemory) -> str | None:
    return None if memory.view is not None else "the pool is not in host memory"


def tcp(num_streams: int = 0, tls: ClusterTls | None = None) -> Transport:
    """The transport with these many streams (0: as many as suit the pair), under `tls` if any."""
    return Transport(
        "tcp", partial(TcpExporter, tls=tls), partial(TcpReader, tls=tls, num_streams=num_streams), _why_not
    )


TCP = tcp()
