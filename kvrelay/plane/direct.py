"""Sending on a connection of an event loop from other threads. Imports nothing of ours."""

import asyncio
import contextlib
import os
import socket
import threading

MOST_WAITING_BYTES = 64 << 20  # a peer that has not read so much is lost


class Direct:
    """Whole frames from any thread, past the event loop, as long as the socket takes them at once.

    What it does not take goes the loop's way, and so does everything after that, until the loop has sent it all: frames
    stay whole and in the order of their sending. The socket is a duplicate: the transport may close its own at any time.
    """

    def __init__(self, transport: asyncio.WriteTransport) -> None:
        sock = transport.get_extra_info("socket")
        self._socket: socket.socket | None = socket.socket(sock.family, sock.type, fileno=os.dup(sock.fileno()))
        self._transport, self._loop = transport, asyncio.get_running_loop()
        self._lock = threading.Lock()
        self._rest = bytearray()  # of frames, on its way to the transport
        self._given_bytes = transport.get_write_buffer_size()  # to the transport, and not sent when it was last asked
        self._is_loops_turn = self._given_bytes > 0

    def send(self, data: bytes) -> bool:
        """From any thread. False: not taken, since the connection is closed, or its peer has not read for too long."""
        with self._lock:
            if self._socket is None or self._given_bytes + len(self._rest) > MOST_WAITING_BYTES:
                return False
            self._send(data)
            return True

    def send_on_loop(self, data: bytes) -> None:
        """From the loop's thread; never refuses."""
        with self._lock:
            self._hand_over()
            if self._is_loops_turn or self._socket is None:
                self._transport.write(data)
            else:
                self._send(data)

    def _send(self, data: bytes) -> None:
        """To the socket what it takes, the rest to the loop."""
        assert self._socket is not None
        sent = 0
        if not self._is_loops_turn:
            try:
                with contextlib.suppress(BlockingIOError):
                    sent = self._socket.send(data, socket.MSG_DONTWAIT | socket.MSG_NOSIGNAL)
            except OSError:  # the connection is lost, which its reader notices
                return
        if sent < len(data):
            if not self._rest:
                with contextlib.suppress(RuntimeError):  # the loop is closed: nobody listens
                    self._loop.call_soon_threadsafe(self._resume)
            self._is_loops_turn = True
            self._rest += data[sent:]

    def _resume(self) -> None:
        with self._lock:
            self._hand_over()

    def _hand_over(self) -> None:
        """On the loop: what waits goes to the transport; once that has sent everything, threads send again."""
        if self._rest:
            self._transport.write(bytes(self._rest))
            self._rest.clear()
        self._given_bytes = self._transport.get_write_buffer_size()
        self._is_loops_turn = self._given_bytes > 0

    def close(self) -> None:
        """No more past the loop. Idempotent."""
        with self._lock:
            self._hand_over()
            if self._socket is not None:
                self._socket.close()
            self._socket = None
