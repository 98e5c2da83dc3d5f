"""Framed, authenticated TCP connections: what the request and KV control planes run on.

A frame is a 4-byte little-endian length and that many bytes. Both ends prove that they know
the cluster's secret before the first frame (HMAC challenge, both ways), so that nobody else on
the network can inject work. A dead peer shows as end-of-file at once, which is why this is
plain TCP and not a message queue that would hide it. Imports nothing of ours but errors.
"""

import asyncio
import hashlib
import hmac
import logging
import os
import socket
from collections.abc import Awaitable, Callable

from kvrelay.errors import AuthenticationFailed, ConnectionLost, ProtocolError

logger = logging.getLogger(__name__)

MAX_FRAME_BYTES = 256 << 20
MAX_BUFFERED_BYTES = 64 << 20
_MAGIC = b"kvrelay1"
_NONCE_BYTES = 32


class Connection:
    """One authenticated, framed connection. Not for use from several threads."""

    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self._reader, self._writer = reader, writer
        peer = writer.get_extra_info("peername")
        self.peer: str = f"{peer[0]}:{peer[1]}" if isinstance(peer, tuple) else str(peer)

    def send_nowait(self, frame: bytes) -> None:
        """Queue one frame. Raises ConnectionLost when closed or when the peer does not read."""
        if self._writer.is_closing():
            raise ConnectionLost(f"{self.peer} closed the connection")
        if self._writer.transport.get_write_buffer_size() > MAX_BUFFERED_BYTES:
            self.abort()
            raise ConnectionLost(f"{self.peer} reads too slowly; dropped")
        self._writer.write(len(frame).to_bytes(4, "little") + frame)

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

    def abort(self) -> None:
        """Drop the connection now, unsent frames included."""
        self._writer.transport.abort()

    async def aclose(self) -> None:
        """Send what is queued, then close. Never raises."""
        try:
            self._writer.close()
            async with asyncio.timeout(1.0):
                await self._writer.wait_closed()
        except (OSError, TimeoutError):
            self.abort()


def _proof(secret: bytes, label: bytes, first: bytes, second: bytes) -> bytes:
    return hmac.digest(secret, label + first + second, hashlib.sha256)


async def _authenticate(
    reader: asyncio.StreamReader, writer: asyncio.StreamWriter, secret: bytes, *, is_server: bool
) -> None:
    """Both ends send a nonce, then prove knowledge of `secret` over both nonces."""
    mine = os.urandom(_NONCE_BYTES)
    writer.write(_MAGIC + mine)
    hello = await reader.readexactly(len(_MAGIC) + _NONCE_BYTES)
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


async def connect(host: str, port: int, secret: bytes, *, timeout_s: float = 5.0) -> Connection:
    """Open and authenticate one connection.

    Raises: ConnectionLost (refused, unreachable, timed out), AuthenticationFailed, ProtocolError.
    """
    writer: asyncio.StreamWriter | None = None
    try:
        async with asyncio.timeout(timeout_s):
            reader, writer = await asyncio.open_connection(host, port)
            _tune(writer)
            await _authenticate(reader, writer, secret, is_server=False)
            return Connection(reader, writer)
    except (OSError, asyncio.IncompleteReadError) as error:  # TimeoutError is an OSError
        if writer is not None:
            writer.transport.abort()
        raise ConnectionLost(f"{host}:{port}: {str(error) or 'timed out'}") from error
    except BaseException:
        if writer is not None:
            writer.transport.abort()
        raise


class Server:
    """Accepts authenticated connections and runs `handler` for each until it returns.

    The handler owns nothing: the connection is closed when it returns or raises.
    """

    def __init__(self, handler: Callable[[Connection], Awaitable[None]], secret: bytes) -> None:
        self._handler, self._secret = handler, secret
        self._server: asyncio.Server | None = None
        self._tasks: set[asyncio.Task[None]] = set()

    async def start(self, host: str, port: int = 0) -> int:
        """Listen; returns the port."""
        self._server = await asyncio.start_server(self._accept, host, port)
        return int(self._server.sockets[0].getsockname()[1])

    async def _accept(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        task = asyncio.current_task()
        assert task is not None
        self._tasks.add(task)
        _tune(writer)
        connection = Connection(reader, writer)
        try:
            async with asyncio.timeout(5.0):
                await _authenticate(reader, writer, self._secret, is_server=True)
            await self._handler(connection)
        except (AuthenticationFailed, ProtocolError) as error:
            logger.warning("refused %s: %s", connection.peer, error)
        except (ConnectionLost, OSError, asyncio.IncompleteReadError):
            logger.debug("%s is gone", connection.peer)
        except asyncio.CancelledError:
            logger.debug(
                "%s: closed by us", connection.peer
            )  # the task ends here; asyncio's streams log it as an error
        except Exception:
            logger.exception("handler of %s failed", connection.peer)
        finally:
            self._tasks.discard(task)
            connection.abort()

    async def aclose(self) -> None:
        """Stop listening and end every handler."""
        if self._server is None:
            return
        self._server.close()
        await asyncio.sleep(0)  # a connection accepted just now has its task by then
        tasks = list(self._tasks)
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        self._server = None
