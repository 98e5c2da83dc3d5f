"""TCP: the target asks for regions by offset, the source streams them, the target receives in place.

Bytes go from pool to pool without a staging copy in Python (vectored send, scattered receive).
To stop a read is to drop its connection: after that nothing of it can land. Blocking sockets
on threads of their own: the loops of both workers stay free, and idle connections cost nothing.
"""

import asyncio
import contextlib
import hashlib
import hmac
import logging
import os
import socket
import struct
import threading
from dataclasses import dataclass
from functools import partial

import msgspec
import numpy as np

from kvrelay.errors import BackendUnavailable
from kvrelay.kvtransfer.plans import CopyList
from kvrelay.kvtransfer.transports.base import (
    Landed,
    Transport,
    TransportError,
    check_bounds,
    connections,
    open_off_loop,
)
from kvrelay.kvtransfer.transports.threaded import ReadThread
from kvrelay.types import KvMemory

logger = logging.getLogger(__name__)

_MAGIC = b"kvrelay-kv1\0"
_NONCE_BYTES = 32
_PROOF_BYTES = hashlib.sha256().digest_size
_HEADER = struct.Struct("<IQ")  # number of rows, bytes in all; then the rows: int64 offset, int64 length
_ROW_BYTES = 16
_MAX_ROWS = 1 << 20
_MAX_CONNECTIONS = 256
_VECTOR = 256  # buffers in one system call; the kernel's limit is 1,024
_TIMEOUT_S = 5.0


class _Descriptor(msgspec.Struct, frozen=True):
    host: str
    port: int
    num_bytes: int


def _proof(secret: bytes, label: bytes, nonces: bytes) -> bytes:
    return hmac.digest(secret, b"kvrelay-tcp-v1\0" + label + nonces, hashlib.sha256)


def _receive_exactly(sock: socket.socket, size: int) -> bytes:
    """Raises ConnectionError at end-of-file."""
    data = bytearray(size)
    _receive_into(sock, [memoryview(data)])
    return bytes(data)


def _receive_into(sock: socket.socket, views: list[memoryview]) -> None:
    """Fill all `views`, in order. Raises ConnectionError at end-of-file."""
    first = 0
    while first < len(views):
        got = sock.recvmsg_into(views[first : first + _VECTOR])[0]
        if not got:
            raise ConnectionError("the source closed the connection")
        first = _advance(views, first, got)


def _send_all(sock: socket.socket, views: list[memoryview]) -> None:
    first = 0
    while first < len(views):
        first = _advance(views, first, sock.sendmsg(views[first : first + _VECTOR]))


def _advance(views: list[memoryview], first: int, done: int) -> int:
    """Index of the first view that is not done yet, cut to its rest in place."""
    while first < len(views) and done >= len(views[first]):
        done -= len(views[first])
        first += 1
    if done:
        views[first] = views[first][done:]
    return first


def _tune(sock: socket.socket) -> None:
    sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)


def _bytes_of(view: memoryview) -> memoryview:
    return view if view.format == "B" and view.ndim == 1 else view.cast("B")


class TcpExporter:
    """Serves the pool's bytes to those that prove the cluster's secret; a thread for each."""

    def __init__(self, memory: KvMemory, secret: bytes, host: str) -> None:
        assert memory.view is not None
        self._view = _bytes_of(memory.view).toreadonly()
        self._num_bytes = memory.layout.num_bytes
        self._secret, self._host = secret, host
        self._listener: socket.socket | None = None
        self._accepting: asyncio.Task[None] | None = None
        self._peers: dict[socket.socket, threading.Thread] = {}

    async def start(self) -> None:
        try:
            family = socket.getaddrinfo(self._host, 0, type=socket.SOCK_STREAM)[0][0]
            self._listener = socket.create_server((self._host, 0), family=family, backlog=64)
        except OSError as error:
            raise BackendUnavailable("tcp", f"cannot listen on {self._host}: {error}") from error
        self._listener.setblocking(False)
        self._accepting = asyncio.create_task(self._accept(self._listener), name="kv-tcp-accept")

    def describe(self) -> bytes:
        assert self._listener is not None
        port = self._listener.getsockname()[1]
        return msgspec.msgpack.encode(_Descriptor(self._host, port, self._num_bytes))

    async def _accept(self, listener: socket.socket) -> None:
        async for peer in connections(listener):
            self._peers = {sock: thread for sock, thread in self._peers.items() if thread.is_alive()}
            if len(self._peers) >= _MAX_CONNECTIONS:
                peer.close()
                continue
            thread = threading.Thread(target=self._serve, args=(peer,), name="kv-tcp-serve", daemon=True)
            self._peers[peer] = thread
            thread.start()

    def _serve(self, peer: socket.socket) -> None:
        with peer:
            try:
                _tune(peer)
                peer.settimeout(_TIMEOUT_S)
                self._authenticate(peer)
                peer.settimeout(None)
                while True:
                    self._answer(peer)
            except PermissionError as error:
                logger.warning("refused a reader of the KV pool: %s", error)
            except OSError as error:
                logger.debug("a reader of the KV pool is gone: %s", error)

    def _authenticate(self, peer: socket.socket) -> None:
        hello = _receive_exactly(peer, len(_MAGIC) + _NONCE_BYTES)
        if not hello.startswith(_MAGIC):
            raise PermissionError("it does not speak this protocol")
        nonce = os.urandom(_NONCE_BYTES)
        nonces = nonce + hello[len(_MAGIC) :]
        peer.sendall(nonce + _proof(self._secret, b"source", nonces))
        if not hmac.compare_digest(_receive_exactly(peer, _PROOF_BYTES), _proof(self._secret, b"target", nonces)):
            raise PermissionError("it does not know this cluster's secret")

    def _answer(self, peer: socket.socket) -> None:
        num_rows, total = _HEADER.unpack(_receive_exactly(peer, _HEADER.size))
        if num_rows > _MAX_ROWS:
            raise PermissionError(f"it asked for {num_rows} regions at once")
        rows = np.frombuffer(_receive_exactly(peer, num_rows * _ROW_BYTES), dtype="<i8").reshape(-1, 2)
        offsets, sizes = rows[:, 0], rows[:, 1]
        inside = (offsets >= 0) & (sizes > 0) & (offsets <= self._num_bytes - sizes)
        if not inside.all() or int(sizes.sum()) != total:
            raise PermissionError("it asked for bytes outside the pool")
        _send_all(peer, [self._view[start : start + size] for start, size in rows.tolist()])

    def set_busy(self, num_open: int) -> None:
        """Needs no progress."""

    async def aclose(self) -> None:
        if self._accepting is not None:
            self._accepting.cancel()
            await asyncio.gather(self._accepting, return_exceptions=True)
            self._accepting = None
        if self._listener is not None:
            self._listener.close()
            self._listener = None
        peers, self._peers = self._peers, {}
        for peer in peers:
            with contextlib.suppress(OSError):
                peer.shutdown(socket.SHUT_RDWR)
        for thread in peers.values():
            await asyncio.to_thread(thread.join, 1.0)


@dataclass(slots=True, eq=False)
class _Job:
    abandoned: bool = False


class TcpReader:
    """One connection to one source, opened again after an abandoned or failed read."""

    max_in_flight = 1

    def __init__(self, memory: KvMemory, secret: bytes, host: str) -> None:
        assert memory.view is not None
        self._view = _bytes_of(memory.view)
        self._secret = secret
        self._source: _Descriptor | None = None
        self._socket: socket.socket | None = None
        self._running: _Job | None = None  # written by the thread only
        self._jobs: dict[asyncio.Future[None], _Job] = {}
        self._thread = ReadThread("kv-tcp", inline_bytes=-1)  # a socket may block: never on the loop

    async def connect(self, descriptor: bytes) -> None:
        try:
            self._source = msgspec.msgpack.decode(descriptor, type=_Descriptor)
            self._socket = await open_off_loop(self._open, socket.socket.close)
        except (msgspec.DecodeError, OSError) as error:
            raise TransportError(f"cannot reach the source's data port: {error}") from error

    def _open(self) -> socket.socket:
        """Connect and prove the secret, both ways. Raises OSError."""
        assert self._source is not None
        sock = socket.create_connection((self._source.host, self._source.port), timeout=_TIMEOUT_S)
        try:
            _tune(sock)
            nonce = os.urandom(_NONCE_BYTES)
            sock.sendall(_MAGIC + nonce)
            answer = _receive_exactly(sock, _NONCE_BYTES + _PROOF_BYTES)
            nonces = answer[:_NONCE_BYTES] + nonce
            if not hmac.compare_digest(answer[_NONCE_BYTES:], _proof(self._secret, b"source", nonces)):
                raise PermissionError("the source does not know this cluster's secret")
            sock.sendall(_proof(self._secret, b"target", nonces))
            sock.settimeout(None)
        except BaseException:
            sock.close()
            raise
        return sock

    def read(self, copies: CopyList, landed: Landed | None = None) -> "asyncio.Future[None]":
        job = _Job()
        done = self._thread.submit(partial(self._fetch, job, landed), copies)
        self._jobs[done] = job
        done.add_done_callback(lambda _: self._jobs.pop(done, None))
        return done

    def _fetch(self, job: _Job, landed: Landed | None, copies: CopyList) -> None:
        """On the thread: ask, receive in place. Any trouble ends the connection, so nothing more can land."""
        assert self._source is not None
        check_bounds(copies, self._source.num_bytes, len(self._view))
        self._running = job
        try:
            if self._socket is None:
                self._socket = self._open()
            if job.abandoned:
                raise TransportError("abandoned")
            self._transfer(self._socket, copies)
        except BaseException:
            sock, self._socket = self._socket, None
            if sock is not None:
                sock.close()
            raise
        finally:
            self._running = None
        if landed is not None:
            landed(copies.total_bytes)

    def _transfer(self, sock: socket.socket, copies: CopyList) -> None:
        sources, targets, sizes = copies.expanded()
        for first in range(0, len(sizes), _MAX_ROWS):
            rows = slice(first, first + _MAX_ROWS)
            request = np.stack((sources[rows], sizes[rows]), axis=1).astype("<i8", copy=False)
            sock.sendall(_HEADER.pack(len(request), int(sizes[rows].sum())) + request.tobytes())
            spans = zip(targets[rows].tolist(), sizes[rows].tolist(), strict=True)
            _receive_into(sock, [self._view[start : start + size] for start, size in spans])

    def abandon(self, read: "asyncio.Future[None]") -> None:
        """Drop the connection under this read."""
        job = self._jobs.get(read)
        if job is None:
            return
        job.abandoned = True
        sock = self._socket
        if self._running is job and sock is not None:
            with contextlib.suppress(OSError):
                sock.shutdown(socket.SHUT_RDWR)

    @property
    def in_flight(self) -> int:
        return self._thread.in_flight

    async def aclose(self) -> None:
        for read in list(self._jobs):
            self.abandon(read)
        try:
            await self._thread.aclose()
        finally:
            sock, self._socket = self._socket, None
            if sock is not None:
                sock.close()


def _why_not(memory: KvMemory) -> str | None:
    return None if memory.view is not None else "the pool is not in host memory"


TCP = Transport("tcp", TcpExporter, TcpReader, _why_not)
