"""Framed connections. A frame is a 4-byte little-endian length and that many bytes.

A dead peer shows as end-of-file at once, which is why this is plain TCP and not a message queue that would hide it.
Imports nothing of ours but errors.
"""

import asyncio
import contextlib
import os
import socket
import threading
import time
from collections.abc import Callable

from kvrelay.errors import ConnectionLost, ProtocolError

MAX_FRAME_BYTES = 256 << 20
MAX_BUFFERED_BYTES = 64 << 20
MAX_UNSENT_BYTES = 64 << 20  # of a sender on other threads


class FrameReader(asyncio.StreamReader):
    """A stream that can also pass on its frames as they arrive, without waking a task for each."""

    def __init__(self) -> None:
        super().__init__()
        self.heard_s = time.monotonic()  # when the last bytes came
        self._max_bytes = 0  # of a frame
        self._num_buffered = 0  # bytes fed and not yet read
        self._take: Callable[[bytes], None] | None = None
        self._partial = bytearray()  # the beginning of a frame
        self._ended: asyncio.Future[None] | None = None

    async def readexactly(self, n: int) -> bytes:
        data = await super().readexactly(n)
        self._num_buffered -= n
        return data

    async def read_all(self, take: Callable[[bytes], None], *, max_bytes: int) -> None:
        """Call `take` with every frame until the stream ends.

        Raises OSError, ProtocolError (over max_bytes), what `take` raises.
        """
        self._max_bytes = max_bytes
        self._ended = ended = asyncio.get_running_loop().create_future()
        waiting = await self.readexactly(self._num_buffered)  # already fed: does not wait
        self._take = take
        self._cut(waiting)
        if self.at_eof():
            self._end(None)
        await ended

    def feed_data(self, data: bytes) -> None:  # type: ignore[override]  # transports pass bytes
        self.heard_s = time.monotonic()
        if self._take is not None:
            self._cut(data)
            return
        self._num_buffered += len(data)
        super().feed_data(data)

    def feed_eof(self) -> None:
        super().feed_eof()
        self._end(None)

    def set_exception(self, exc: Exception) -> None:
        super().set_exception(exc)
        self._end(exc)

    def _end(self, error: Exception | None) -> None:
        self._take = None
        if self._ended is None or self._ended.done():
            return
        if error is None:
            self._ended.set_result(None)
        else:
            self._ended.set_exception(error)

    def _cut(self, data: bytes) -> None:
        if self._partial:
            self._partial += data
        begin, view = 0, self._partial or data
        try:
            while self._take is not None and (end := frame_end(view, begin, self._max_bytes)) is not None:
                self._take(bytes(view[begin + 4 : end]))
                begin = end
        except Exception as error:  # raised by read_all
            self._end(error)
        if view is self._partial:
            del self._partial[:begin]
        else:
            self._partial += data[begin:]


def frame_end(data: bytes | bytearray, begin: int, max_bytes: int) -> int | None:
    """End of the frame that begins at `begin`; None: it is incomplete.

    Raises ProtocolError when it is over max_bytes.
    """
    if len(data) - begin < 4:
        return None
    size = int.from_bytes(data[begin : begin + 4], "little")
    if size > max_bytes:
        raise ProtocolError(f"the peer announced a frame of {size} bytes")
    end = begin + 4 + size
    return end if end <= len(data) else None


class ThreadSender:
    """Writes whole frames to the socket from any thread, past the event loop, as long as the socket accepts them at
    once.

    What the socket does not accept is left to the loop, and so is everything after it until the loop has sent it all:
    frames stay whole and in order. The socket is a duplicate, since the transport may close its own at any time.
    """

    def __init__(self, transport: asyncio.WriteTransport) -> None:
        sock = transport.get_extra_info("socket")
        self._socket: socket.socket | None = socket.socket(sock.family, sock.type, fileno=os.dup(sock.fileno()))
        self._transport, self._loop = transport, asyncio.get_running_loop()
        self._lock = threading.Lock()
        self._unsent = bytearray()  # bytes of frames, to be written by the transport
        self._transport_bytes = transport.get_write_buffer_size()  # in the transport's buffer when last checked
        self._is_loop_sending = self._transport_bytes > 0

    def send(self, data: bytes) -> bool:
        """From any thread. False: not sent, as the connection is closed or the peer reads too slowly."""
        with self._lock:
            if self._socket is None or self._transport_bytes + len(self._unsent) > MAX_UNSENT_BYTES:
                return False
            self._send(data)
            return True

    def send_on_loop(self, data: bytes) -> None:
        """From the loop's thread; always accepted."""
        with self._lock:
            self._flush_to_loop()
            if self._is_loop_sending or self._socket is None:
                self._transport.write(data)
            else:
                self._send(data)

    def _send(self, data: bytes) -> None:
        """Write what the socket accepts; the loop writes the rest."""
        assert self._socket is not None
        sent = 0
        if not self._is_loop_sending:
            try:
                with contextlib.suppress(BlockingIOError):
                    sent = self._socket.send(data, socket.MSG_DONTWAIT | socket.MSG_NOSIGNAL)
            except OSError:  # the connection is lost; its reader notices
                return
        if sent < len(data):
            if not self._unsent:
                with contextlib.suppress(RuntimeError):  # the loop is closed
                    self._loop.call_soon_threadsafe(self._resume)
            self._is_loop_sending = True
            self._unsent += data[sent:]

    def _resume(self) -> None:
        with self._lock:
            self._flush_to_loop()

    def _flush_to_loop(self) -> None:
        """On the loop: pass the unsent bytes to the transport; once it has sent everything, threads write again."""
        if self._unsent:
            self._transport.write(bytes(self._unsent))
            self._unsent.clear()
        self._transport_bytes = self._transport.get_write_buffer_size()
        self._is_loop_sending = self._transport_bytes > 0

    def close(self) -> None:
        """Stop writing from threads. Idempotent."""
        with self._lock:
            self._flush_to_loop()
            if self._socket is not None:
                self._socket.close()
            self._socket = None


class Connection:
    """One authenticated, framed connection. Only `send_from_thread` may be called outside the event loop's thread."""

    def __init__(self, reader: FrameReader, writer: asyncio.StreamWriter, peer: str | None = None) -> None:
        self._reader, self._writer = reader, writer
        name = writer.get_extra_info("peername")
        self.peer: str = peer or (f"{name[0]}:{name[1]}" if isinstance(name, tuple) else "a local peer")
        self._sender: ThreadSender | None = None

    @property
    def heard_s(self) -> float:
        """When the peer's last bytes came, by time.monotonic."""
        return self._reader.heard_s

    def allow_threads(self) -> None:
        """Enable `send_from_thread`, except under TLS. The connection must be closed by `abort` or `aclose`."""
        if self._sender is None and self._writer.get_extra_info("ssl_object") is None:
            self._sender = ThreadSender(self._writer.transport)

    def send_from_thread(self, frame: bytes) -> bool:
        """Send one frame from any thread. False: it was not sent; send it on the loop's thread."""
        return self._sender is not None and self._sender.send(framed(frame))

    def send_nowait(self, frame: bytes) -> None:
        """Queue one frame. Raises ConnectionLost when closed or when the peer does not read."""
        if self._writer.is_closing():
            raise ConnectionLost(f"{self.peer} closed the connection")
        if self._writer.transport.get_write_buffer_size() > MAX_BUFFERED_BYTES:
            self.abort()
            raise ConnectionLost(f"{self.peer} reads too slowly; dropped")
        if self._sender is not None:
            self._sender.send_on_loop(framed(frame))
        else:
            self._writer.write(framed(frame))

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

    async def read_all(self, take: Callable[[bytes], None]) -> None:
        """Call `take` with each frame as it arrives; `receive` must not be called any more.

        Raises: ConnectionLost at end-of-file, ProtocolError on a huge frame, what `take` raises.
        """
        try:
            await self._reader.read_all(take, max_bytes=MAX_FRAME_BYTES)
        except ProtocolError:
            self.abort()
            raise
        except OSError as error:
            raise ConnectionLost(f"{self.peer} closed the connection") from error
        raise ConnectionLost(f"{self.peer} closed the connection")

    def abort(self) -> None:
        """Drop the connection now, unsent frames included."""
        self._close_sender()
        self._writer.transport.abort()

    async def aclose(self) -> None:
        """Send what is queued, then close. Never raises."""
        self._close_sender()
        try:
            self._writer.close()
            async with asyncio.timeout(1.0):
                await self._writer.wait_closed()
        except (OSError, TimeoutError):
            self.abort()

    def _close_sender(self) -> None:
        if self._sender is not None:
            self._sender.close()


def framed(frame: bytes) -> bytes:
    return len(frame).to_bytes(4, "little") + frame
