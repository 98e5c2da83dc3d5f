"""Unix sockets: the stream protocol on one host, for pools that cannot be mapped by their readers.

An abstract address: it needs no folder, cannot be left behind by a killed process, and is seen only in its network
namespace. Since file permissions do not guard it, both ends ask the kernel whose process the peer is, besides the
proof of the cluster's secret.
"""

import os
import secrets
import socket
import struct
import sys
import time
from functools import partial

import msgspec

from kvrelay.kvtransfer.transports.base import Transport, TransportError, host_id
from kvrelay.kvtransfer.transports.sockets.channels import LOOK_S, Channel, PlainChannel, tune
from kvrelay.kvtransfer.transports.sockets.exporter import Peer, StreamExporter
from kvrelay.kvtransfer.transports.sockets.protocol import greet_source
from kvrelay.kvtransfer.transports.sockets.reader import StreamReader
from kvrelay.types import KvMemory

_CREDENTIALS = struct.Struct("@3i")  # pid, uid, gid


class _Descriptor(msgspec.Struct, frozen=True):
    host_id: str
    address: bytes  # abstract: begins with a zero byte
    num_bytes: int


def check_user(sock: socket.socket) -> None:
    """Raises PermissionError unless the process at the other end runs as the user that we run as."""
    credentials = sock.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _CREDENTIALS.size)
    pid, user, _ = _CREDENTIALS.unpack(credentials)
    if user != os.geteuid():
        raise PermissionError(f"process {pid} runs as user {user}, not {os.geteuid()}")


class UnixExporter(StreamExporter):
    """Serves the pool's bytes to processes of the same user on this host."""

    name = "unix"

    def _listen(self) -> socket.socket:
        listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        try:
            listener.bind(b"\0kvrelay-kv-" + secrets.token_hex(16).encode())
            listener.listen(64)
        except OSError:
            listener.close()
            raise
        return listener

    def _admit(self, peer: Peer, until: float) -> Channel:
        check_user(peer.sock)
        return super()._admit(peer, until)

    def describe(self) -> bytes:
        assert self._listener is not None
        address = self._listener.getsockname()
        return msgspec.msgpack.encode(_Descriptor(host_id(), address, self._memory.layout.num_bytes))


class UnixReader(StreamReader):
    """Reads over one connection: two cores are all that one pair can use here, and one connection uses them."""

    name = "unix"

    async def connect(self, descriptor: bytes) -> None:
        try:
            source = msgspec.msgpack.decode(descriptor, type=_Descriptor)
        except msgspec.DecodeError as error:
            raise TransportError(f"malformed descriptor: {error}") from error
        if not source.host_id or source.host_id != host_id():
            raise TransportError("the source is on another host")
        await self._open(partial(self._dial, source.address), 1, source.num_bytes)

    def _dial(self, address: bytes, until: float) -> Channel:
        sock = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        try:
            sock.settimeout(max(until - time.monotonic(), 0.0))
            sock.connect(address)
            check_user(sock)
            tune(sock)
            greet_source(sock, self._secret, until)
            return PlainChannel(sock, receive_s=LOOK_S)
        except BaseException:
            sock.close()
            raise


def _why_not(memory: KvMemory) -> str | None:
    if sys.platform != "linux":
        return "abstract Unix sockets are Linux's"
    return None if memory.view is not None else "the pool is not in host memory"


UNIX = Transport("unix", UnixExporter, UnixReader, _why_not)
