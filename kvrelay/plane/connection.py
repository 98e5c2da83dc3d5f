"""Framed, authenticated TCP connections: what the request and KV control planes run on.

A frame is a 4-byte little-endian length and that many bytes. Both ends prove that they know
the cluster's secret before the first frame (HMAC challenge, both ways), so that nobody else on
the network can inject work. A dead peer shows as end-of-file at once, which is why this is
plain TCP and not a message queue that would hide it. With `tls` the same goes on inside TLS.

Without TLS a server also listens at a Unix socket named after its address, and a client of the same user on the same
machine connects there. Imports nothing of ours but errors, tls and its own parts (direct, frame_reader, local_socket).
"""

import asyncio
import hashlib
import hmac
import logging
import os
import socket
import ssl
from collections.abc import AsyncIterator, Awaitable, Callable
from functools import partial

from kvrelay.errors import AuthenticationFailed, ConnectionLost, ProtocolError, TlsMismatch
from kvrelay.plane.direct import Direct
from kvrelay.plane.frame_reader import FrameReader
from kvrelay.plane.local_socket import local_listener, local_socket
from kvrelay.plane.tls import ClusterTls

logger = logging.getLogger(__name__)

MAX_FRAME_BYTES = 256 << 20
MAX_BUFFERED_BYTES = 64 << 20
_MAGIC = b"kvrelay1"
_TLS_ONLY = b"kvrelayT"  # in place of the magic: what a server under TLS tells a plain client, plainly
_TLS_HANDSHAKE = 0x16  # the first byte of a client that speaks TLS
_NONCE_BYTES = 32
_HANDSHAKE_S = 5.0
_REMEDY = "set cluster.tls alike on every node"
_ACCEPT_PAUSE_S = 0.2  # after a failed accept
_BACKLOG = 128


class Connection:
    """One authenticated, framed connection. For the event loop's thread alone, but for `send_from_thread`."""

    def __init__(self, reader: FrameReader, writer: asyncio.StreamWriter, peer: str | None = None) -> None:
        self._reader, self._writer = reader, writer
        name = writer.get_extra_info("peername")
        self.peer: str = peer or (f"{name[0]}:{name[1]}" if isinstance(name, tuple) else "a local peer")
        self._direct: Direct | None = None

    def allow_threads(self) -> None:
        """Make `send_from_thread` work, where it can: not inside TLS. The connection must be ended by `abort` or `aclose`."""
        if self._direct is None and self._writer.get_extra_info("ssl_object") is None:
            self._direct = Direct(self._writer.transport)

    def send_from_thread(self, frame: bytes) -> bool:
        """Send one frame from any thread, at once where the peer keeps up. False: it is to be sent on the loop's thread."""
        return self._direct is not None and self._direct.send(_framed(frame))

    def send_nowait(self, frame: bytes) -> None:
        """Queue one frame. Raises ConnectionLost when closed or when the peer does not read."""
        if self._writer.is_closing():
            raise ConnectionLost(f"{self.peer} closed the connection")
        if self._writer.transport.get_write_buffer_size() > MAX_BUFFERED_BYTES:
            self.abort()
            raise ConnectionLost(f"{self.peer} reads too slowly; dropped")
        if self._direct is not None:
            self._direct.send_on_loop(_framed(frame))
        else:
            self._writer.write(_framed(frame))

    async def send(self, frame: bytes) -> None:
        """Queue one frame and wait while the peer is slow."""
        self.send_nowait(frame)
        try:
            await self._writer.drain()
        except OSError as error:
            raise ConnectionLost(f"{self.peer}: {error}") from error

    async def receive(self) -> bytes:
        """The next frame. Raises ConnectionLost at end-of-file, ProtocolError on a huge frame."""
        try:
            size = int.from_bytes(await self._reader.readexactly(4), "little")
            if size > MAX_FRAME_BYTES:
                self.abort()
                raise ProtocolError(f"{self.peer} announced a frame of {size} bytes")
            return await self._reader.readexactly(size)
        except (asyncio.IncompleteReadError, OSError) as error:
            raise ConnectionLost(f"{self.peer} closed the connection") from error

    async def hand_out(self, take: Callable[[bytes], None]) -> None:
        """Call `take` with each frame as soon as it is here; nobody may `receive` any more.

        Raises: ConnectionLost at end-of-file, ProtocolError on a huge frame, what `take` raises.
        """
        try:
            await self._reader.hand_out(take, most_bytes=MAX_FRAME_BYTES)
        except ProtocolError:
            self.abort()
            raise
        except OSError as error:
            raise ConnectionLost(f"{self.peer} closed the connection") from error
        raise ConnectionLost(f"{self.peer} closed the connection")

    def abort(self) -> None:
        """Drop the connection now, unsent frames included."""
        self._close_direct()
        self._writer.transport.abort()

    async def aclose(self) -> None:
        """Send what is queued, then close. Never raises."""
        self._close_direct()
        try:
            self._writer.close()
            async with asyncio.timeout(1.0):
                await self._writer.wait_closed()
        except (OSError, TimeoutError):
            self.abort()

    def _close_direct(self) -> None:
        if self._direct is not None:
            self._direct.close()


def _framed(frame: bytes) -> bytes:
    return len(frame).to_bytes(4, "little") + frame


def _proof(secret: bytes, label: bytes, first: bytes, second: bytes) -> bytes:
    return hmac.digest(secret, label + first + second, hashlib.sha256)


async def _authenticate(
    reader: asyncio.StreamReader, writer: asyncio.StreamWriter, secret: bytes, *, is_server: bool
) -> None:
    """Both ends send a nonce, then prove knowledge of `secret` over both nonces."""
    mine = os.urandom(_NONCE_BYTES)
    writer.write(_MAGIC + mine)
    hello = await reader.readexactly(len(_MAGIC) + _NONCE_BYTES)
    if hello.startswith(_TLS_ONLY):
        raise TlsMismatch(f"the peer speaks TLS only: {_REMEDY}")
    if hello[0] == _TLS_HANDSHAKE:
        raise TlsMismatch(f"the peer speaks TLS, which is off here: {_REMEDY}")
    if not hello.startswith(_MAGIC):
        raise ProtocolError("the peer does not speak kvrelay's protocol")
    theirs = hello[len(_MAGIC) :]
    server_nonce, client_nonce = (mine, theirs) if is_server else (theirs, mine)
    labels = (b"server", b"client") if is_server else (b"client", b"server")
    writer.write(_proof(secret, labels[0], server_nonce, client_nonce))
    answer = await reader.readexactly(hashlib.sha256().digest_size)
    if not hmac.compare_digest(answer, _proof(secret, labels[1], server_nonce, client_nonce)):
        raise AuthenticationFailed("the peer does not know this cluster's secret")


def _tune(writer: asyncio.StreamWriter) -> None:
    sock = writer.get_extra_info("socket")
    if sock is not None and sock.family in (socket.AF_INET, socket.AF_INET6):
        sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)


def _without_tls(error: ssl.SSLError) -> AuthenticationFailed | TlsMismatch:
    """What a TLS handshake failed of."""
    if error.reason == "WRONG_VERSION_NUMBER":  # it did not look like TLS at all
        return TlsMismatch(f"the peer does not speak TLS: {_REMEDY}")
    why = (getattr(error, "verify_message", "") or str(error.reason or error)).lower().replace("_", " ")
    if "alert" in why:
        return AuthenticationFailed(f"the peer does not take our certificate: {why}")
    return AuthenticationFailed(f"the peer shows no certificate of this cluster: {why}")


async def connect(
    host: str, port: int, secret: bytes, *, timeout_s: float = 5.0, tls: ClusterTls | None = None
) -> Connection:
    """Open and authenticate one connection.

    Raises: ConnectionLost (refused, unreachable, timed out), AuthenticationFailed, ProtocolError, TlsMismatch.
    """
    writer: asyncio.StreamWriter | None = None
    try:
        async with asyncio.timeout(timeout_s):
            reader, writer = await _open(host, port, tls)
            await _authenticate(reader, writer, secret, is_server=False)
            return Connection(reader, writer, f"{host}:{port}")
    except ssl.SSLError as error:
        _abort(writer)
        raise _without_tls(error) from error
    except (OSError, asyncio.IncompleteReadError) as error:  # TimeoutError is an OSError
        _abort(writer)
        raise ConnectionLost(f"{host}:{port}: {str(error) or 'timed out'}") from error
    except BaseException:
        _abort(writer)
        raise


async def _open(host: str, port: int, tls: ClusterTls | None) -> tuple[FrameReader, asyncio.StreamWriter]:
    loop, reader = asyncio.get_running_loop(), FrameReader()
    protocol = asyncio.StreamReaderProtocol(reader)
    transport: asyncio.WriteTransport
    if tls is None and (sock := local_socket(host, port)) is not None:
        transport, _ = await loop.create_unix_connection(lambda: protocol, sock=sock)
    else:
        context = None if tls is None else tls.client()
        transport, _ = await loop.create_connection(lambda: protocol, host, port, ssl=context)
    writer = asyncio.StreamWriter(transport, protocol, reader, loop)
    _tune(writer)
    return reader, writer


def _abort(writer: asyncio.StreamWriter | None) -> None:
    if writer is not None:
        writer.transport.abort()


class Server:
    """Accepts authenticated connections and runs `handler` for each until it returns.

    The handler owns nothing: the connection is closed when it returns or raises.
    """

    def __init__(
        self, handler: Callable[[Connection], Awaitable[None]], secret: bytes, *, tls: ClusterTls | None = None
    ) -> None:
        self._handler, self._secret, self._tls = handler, secret, tls
        self._listeners: list[socket.socket] = []
        self._accepting: list[asyncio.Task[None]] = []
        self._tasks: set[asyncio.Task[None]] = set()

    async def start(self, host: str, port: int = 0) -> int:
        """Listen; returns the port. Raises OSError."""
        addresses = await asyncio.get_running_loop().getaddrinfo(host, port, type=socket.SOCK_STREAM)
        family, _, _, _, address = addresses[0]
        listener = socket.create_server(address[:2], family=family, backlog=_BACKLOG)
        self._listeners = [listener]
        bound = int(listener.getsockname()[1])
        if self._tls is None and (local := local_listener(host, bound, _BACKLOG)) is not None:
            self._listeners.append(local)
        for one in self._listeners:
            one.setblocking(False)
        self._accepting = [asyncio.create_task(self._accept(one), name="accept") for one in self._listeners]
        return bound

    async def _accept(self, listener: socket.socket) -> None:
        async for sock in connections(listener):
            task = asyncio.create_task(self._serve(sock), name="connection")
            self._tasks.add(task)
            task.add_done_callback(partial(self._on_served, sock))

    def _on_served(self, sock: socket.socket, task: "asyncio.Task[None]") -> None:
        self._tasks.discard(task)
        sock.close()  # also where the task was cancelled before it began

    async def _serve(self, sock: socket.socket) -> None:
        """One connection, from its first byte to its end."""
        peer, writer, connection = "a peer", None, None
        try:
            async with asyncio.timeout(_HANDSHAKE_S):
                reader, writer = await self._streams(sock)
                connection = Connection(reader, writer)
                peer = connection.peer
                await _authenticate(reader, writer, self._secret, is_server=True)
            await self._handler(connection)
        except ssl.SSLError as error:
            logger.warning("refused %s: %s", peer, _without_tls(error))
        except (AuthenticationFailed, ProtocolError) as error:
            logger.warning("refused %s: %s", peer, error)
        except (ConnectionLost, OSError, asyncio.IncompleteReadError):
            logger.debug("%s is gone", peer)
        except asyncio.CancelledError:
            logger.debug("%s: closed by us", peer)  # the task ends here
        except Exception:
            logger.exception("handler of %s failed", peer)
        finally:
            if connection is not None:
                connection.abort()
            _abort(writer)

    async def _streams(self, sock: socket.socket) -> tuple[FrameReader, asyncio.StreamWriter]:
        """The socket as streams, inside TLS where that is on. Raises TlsMismatch, ssl.SSLError, OSError."""
        loop = asyncio.get_running_loop()
        if self._tls is not None:
            await _expect_tls(sock)
        reader = FrameReader()
        protocol = asyncio.StreamReaderProtocol(reader)
        context = None if self._tls is None else self._tls.server()
        transport, _ = await loop.connect_accepted_socket(lambda: protocol, sock, ssl=context)
        writer = asyncio.StreamWriter(transport, protocol, reader, loop)
        _tune(writer)
        return reader, writer

    async def aclose(self) -> None:
        """Stop listening and end every handler."""
        listeners, self._listeners = self._listeners, []
        if not listeners:
            return
        for accepting in self._accepting:
            accepting.cancel()
        await asyncio.gather(*self._accepting, return_exceptions=True)
        for listener in listeners:
            listener.close()
        tasks = list(self._tasks)
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)


async def _expect_tls(sock: socket.socket) -> None:
    """Wait for the client's first byte, and leave it there. Raises TlsMismatch, having told the client."""
    while True:
        try:
            first = sock.recv(1, socket.MSG_PEEK)
            break
        except BlockingIOError:
            await _readable(sock)
    if not first:
        raise ConnectionLost("it closed the connection")
    if first[0] != _TLS_HANDSHAKE:
        await asyncio.get_running_loop().sock_sendall(sock, _TLS_ONLY + bytes(_NONCE_BYTES))
        sock.recv(len(_MAGIC) + _NONCE_BYTES)  # what is unread would make closing a reset that overtakes the answer
        raise TlsMismatch(f"it does not speak TLS, which is on here: {_REMEDY}")


async def _readable(sock: socket.socket) -> None:
    loop = asyncio.get_running_loop()
    is_readable = asyncio.Event()
    loop.add_reader(sock, is_readable.set)
    try:
        await is_readable.wait()
    finally:
        loop.remove_reader(sock)


async def connections(listener: socket.socket) -> AsyncIterator[socket.socket]:
    """Whoever connects to `listener` (non-blocking), until cancelled; a failed accept is logged and tried again.

    Not loop.sock_accept: cancelled in the wrong moment, that forgets a connection which it has taken.
    """
    while True:
        try:
            sock, _ = listener.accept()
        except BlockingIOError:
            await _readable(listener)
            continue
        except OSError as error:  # out of file descriptors, or the peer left in between
            logger.warning("cannot take a connection: %s", error)
            await asyncio.sleep(_ACCEPT_PAUSE_S)
            continue
        sock.setblocking(False)
        yield sock
