"""Opens and accepts framed, authenticated connections: what the request plane and the KV control plane run on.

Both ends prove that they know the cluster's secret before the first frame (HMAC challenge, both ways), so that no other
process on the network can inject work. With `tls` the same happens inside TLS.

Unless TLS is wanted everywhere, a server also listens on an abstract Unix socket named after its address, where a small
frame costs less than half the CPU of loopback TCP. A client of the same user on the same machine connects there; any
other takes TCP. Imports nothing of ours but errors, framing, ports and tls.
"""

import asyncio
import hashlib
import hmac
import logging
import os
import socket
import ssl
import struct
import sys
from collections.abc import AsyncIterator, Awaitable, Callable
from functools import partial

from kvrelay.errors import AuthenticationFailed, ConnectionLost, ProtocolError, TlsMismatch
from kvrelay.plane.framing import Connection, FrameReader
from kvrelay.plane.ports import listen
from kvrelay.plane.tls import ClusterTls, tls_at

logger = logging.getLogger(__name__)

_MAGIC = b"kvrelay1"
_TLS_ONLY = b"kvrelayT"  # in place of the magic: a server under TLS sends it to a plain client
_TLS_HANDSHAKE = 0x16  # the first byte of a client that speaks TLS
_NONCE_BYTES = 32
_HANDSHAKE_S = 5.0
_REMEDY = "set cluster.tls alike on every node"
_ACCEPT_PAUSE_S = 0.2  # after a failed accept
_BACKLOG = 128


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
    """Why a TLS handshake failed."""
    if error.reason == "WRONG_VERSION_NUMBER":  # it did not look like TLS at all
        return TlsMismatch(f"the peer does not speak TLS: {_REMEDY}")
    why = (getattr(error, "verify_message", "") or str(error.reason or error)).lower().replace("_", " ")
    if "alert" in why:
        return AuthenticationFailed(f"the peer rejects our certificate: {why}")
    return AuthenticationFailed(f"the peer has no certificate of this cluster: {why}")


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
    if _is_plain_here(tls) and (sock := local_socket(host, port)) is not None:
        transport, _ = await loop.create_unix_connection(lambda: protocol, sock=sock)
    else:
        tls = tls_at(tls, host)
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
        """Listen, at port 0 where this process may (ports.py); returns the port. Raises OSError."""
        listener = listen(host, port, backlog=_BACKLOG)
        self._listeners = [listener]
        bound = int(listener.getsockname()[1])
        if _is_plain_here(self._tls) and (local := local_listener(host, bound, _BACKLOG)) is not None:
            self._listeners.append(local)
        for one in self._listeners:
            one.setblocking(False)
        wanted = (tls_at(self._tls, host), None)  # on the Unix socket there is none
        accepting = zip(self._listeners, wanted, strict=False)
        self._accepting = [asyncio.create_task(self._accept(*one), name="accept") for one in accepting]
        return bound

    async def _accept(self, listener: socket.socket, tls: ClusterTls | None) -> None:
        async for sock in connections(listener):
            task = asyncio.create_task(self._serve(sock, tls), name="connection")
            self._tasks.add(task)
            task.add_done_callback(partial(self._on_served, sock))

    def _on_served(self, sock: socket.socket, task: "asyncio.Task[None]") -> None:
        self._tasks.discard(task)
        sock.close()  # also where the task was cancelled before it began

    async def _serve(self, sock: socket.socket, tls: ClusterTls | None) -> None:
        """Serve one connection, from its first byte to its end."""
        peer, writer, connection = "a peer", None, None
        try:
            async with asyncio.timeout(_HANDSHAKE_S):
                reader, writer = await self._streams(sock, tls)
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
            logger.debug("%s: this server closed it", peer)  # the task ends here
        except Exception:
            logger.exception("handler of %s failed", peer)
        finally:
            if connection is not None:
                connection.abort()
            _abort(writer)

    @staticmethod
    async def _streams(sock: socket.socket, tls: ClusterTls | None) -> tuple[FrameReader, asyncio.StreamWriter]:
        """The socket as streams, inside TLS where that is on. Raises TlsMismatch, ssl.SSLError, OSError."""
        loop = asyncio.get_running_loop()
        if tls is not None:
            await _expect_tls(sock)
        reader = FrameReader()
        protocol = asyncio.StreamReaderProtocol(reader)
        context = None if tls is None else tls.server()
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
    """Wait for the client's first byte, without consuming it.

    Raises TlsMismatch, after sending the client the reason.
    """
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
        sock.recv(
            len(_MAGIC) + _NONCE_BYTES
        )  # unread bytes would turn the close into a reset that overtakes the answer
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
    """Every connection to `listener` (non-blocking), until cancelled; a failed accept is logged and retried.

    Not loop.sock_accept: when it is cancelled at the wrong moment, it loses an accepted connection.
    """
    while True:
        try:
            sock, _ = listener.accept()
        except BlockingIOError:
            await _readable(listener)
            continue
        except OSError as error:  # out of file descriptors, or the peer left in between
            logger.warning("cannot accept a connection: %s", error)
            await asyncio.sleep(_ACCEPT_PAUSE_S)
            continue
        sock.setblocking(False)
        yield sock


# ---- the Unix socket beside a server's port


def _is_plain_here(tls: ClusterTls | None) -> bool:
    """Whether processes of one machine may talk without TLS."""
    return tls is None or not tls.is_everywhere


def local_name(host: str, port: int) -> str:
    """The abstract Unix socket beside host:port. Like ports, such names belong to the network namespace."""
    return f"\0kvrelay-plane-{host}:{port}"


def local_socket(host: str, port: int) -> socket.socket | None:
    """A socket connected to the Unix socket of this user's server there, or None. Does not wait."""
    if not sys.platform.startswith("linux"):
        return None
    sock = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    try:
        sock.setblocking(False)
        sock.connect(local_name(host, port))
        if peer_uid(sock) == os.getuid():
            return sock
    except OSError:  # elsewhere, not listening, or too busy: use TCP
        pass
    sock.close()
    return None


def peer_uid(sock: socket.socket) -> int:
    """The user id of the process at the other end. Linux only."""
    _, uid, _ = struct.unpack("3i", sock.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, struct.calcsize("3i")))
    return int(uid)


def local_listener(host: str, port: int, backlog: int) -> socket.socket | None:
    if not sys.platform.startswith("linux"):
        return None
    listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    try:
        listener.bind(local_name(host, port))
        listener.listen(backlog)
    except OSError as error:  # another user has the name: clients see that by its user id
        logger.warning("no Unix socket beside %s:%d: %s", host, port, error)
        listener.close()
        return None
    return listener
