"""Sending on a connection of an event loop from other threads. Imports nothing of ours."""

import asyncio
import contextlib
import os
import socket
import threading


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
        self._is_loops_turn = transport.get_write_buffer_size() > 0

    def send(self, data: bytes) -> bool:
        """From any thread. False: not sent, the loop must do it, with `send_on_loop`."""
        with self._lock:
            return not self._is_loops_turn and self._push(data)

    def send_on_loop(self, data: bytes) -> None:
        """From the loop's thread; never refuses."""
        with self._lock:
            self._hand_over()
            if self._is_loops_turn and self._transport.get_write_buffer_size() == 0:
                self._is_loops_turn = False
            if self._is_loops_turn or not self._push(data):
                self._transport.write(data)

    def _push(self, data: bytes) -> bool:
        if self._socket is None:
            return False
        try:
            sent = self._socket.send(data, socket.MSG_DONTWAIT | socket.MSG_NOSIGNAL)
        except BlockingIOError:
            sent = 0
        except OSError:  # the connection is lost, which its reader notices
            return True
        if sent < len(data):
            self._is_loops_turn = True
            self._rest += data[sent:]
            with contextlib.suppress(RuntimeError):  # the loop is closed: nobody listens
                self._loop.call_soon_threadsafe(self._resume)
        return True

    def _resume(self) -> None:
        with self._lock:
            self._hand_over()

    def _hand_over(self) -> None:
        if self._rest:
            self._transport.write(bytes(self._rest))
            self._rest.clear()

    def close(self) -> None:
        """No more past the loop. Idempotent."""
        with self._lock:
            self._hand_over()
            self._is_loops_turn = True
            if self._socket is not None:
                self._socket.close()
            self._socket = None
