"""A channel: one connected socket, plain or under TLS, between a pool and a peer that has proved itself.

Blocking, for one thread at a time; `shut` alone may come from another one. Knows bytes, not the protocol.
"""

import contextlib
import ctypes
import select
import socket
import ssl
import struct
import time
from collections.abc import Sequence

LOOK_S = 0.25  # a receive call that gets nothing comes back after this, so that the thread can be stopped
STALL_S = 15.0  # a peer that takes no byte for so long is given up
_USER_TIMEOUT_MS = 8_000  # unacknowledged bytes mean a dead host after this
_KEEPALIVE = ((socket.TCP_KEEPIDLE, 3), (socket.TCP_KEEPINTVL, 1), (socket.TCP_KEEPCNT, 4))  # seconds, seconds, probes
_VECTOR = 1024  # buffers of one call: UIO_MAXIOV


def tune(sock: socket.socket) -> None:
    """A dead host shows within seconds, and small messages are not held back."""
    sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, _USER_TIMEOUT_MS)
    for option, value in _KEEPALIVE:
        sock.setsockopt(socket.IPPROTO_TCP, option, value)


def shut(sock: socket.socket) -> None:
    """Of any kind; what is under way in another thread ends. Never raises."""
    with contextlib.suppress(OSError):
        socket.socket.shutdown(sock, socket.SHUT_RDWR)  # an SSLSocket's own would forget its keys under the reader


class Channel:
    """Over the socket itself, vectored. Every method may raise OSError; the channel is then of no more use."""

    can_look = True  # whether `land` can be asked not to wait

    def __init__(self, sock: socket.socket, *, receive_s: float | None) -> None:
        """`receive_s`: what a receive call waits for at most; None: for ever."""
        sock.settimeout(None)
        for option, seconds in ((socket.SO_RCVTIMEO, receive_s), (socket.SO_SNDTIMEO, STALL_S)):
            whole, part = divmod(seconds or 0.0, 1)
            sock.setsockopt(socket.SOL_SOCKET, option, struct.pack("@ll", int(whole), int(part * 1e6)))
        self._sock = sock

    def send(self, data: bytes) -> None:
        """All of it. For messages that the socket's buffers hold."""
        self._sock.sendall(data)

    def send_answer(self, header: bytes, views: Sequence[memoryview], num_bytes: int) -> None:
        """The header, then the `num_bytes` that `views` show. Raises OSError when the peer took nothing for STALL_S."""
        left, num_left = [memoryview(header), *views], len(header) + num_bytes
        while num_left:
            sent = self._sock.sendmsg(left[:_VECTOR])
            num_left -= sent
            left = rest(left, sent) if num_left else []

    def land(self, views: Sequence[memoryview], *, may_wait: bool = True) -> int:
        """Receive into `views`, in order, until they are full or LOOK_S passed; the number of bytes that came.

        Raises ConnectionError at the end of the stream.
        """
        try:
            flags = socket.MSG_WAITALL if may_wait else socket.MSG_DONTWAIT
            return _not_ended(self._sock.recvmsg_into(views[:_VECTOR], 0, flags)[0])
        except BlockingIOError:
            return 0

    def wait(self, timeout_s: float) -> bool:
        """Whether there is something to receive (or an end) within `timeout_s`, to the microsecond."""
        return _wait_readable(self._sock, timeout_s)

    def receive_some(self, buffer: memoryview, timeout_s: float | None) -> int:
        """At least one byte. Raises TimeoutError, ConnectionError at the end of the stream."""
        if timeout_s is not None and not _wait_readable(self._sock, timeout_s):
            raise TimeoutError("the rest of a request did not come")
        return _not_ended(self._sock.recv_into(buffer))

    def shut(self) -> None:
        """From any thread: nothing more comes or goes. Never raises."""
        shut(self._sock)

    def close(self) -> None:
        """By the channel's own thread."""
        self._sock.close()


class TlsChannel(Channel):
    """Over TLS: a record of up to 16 KiB at a time, decrypted right into the pool."""

    can_look = False
    _sock: ssl.SSLSocket

    def __init__(self, sock: ssl.SSLSocket, *, receive_s: float | None) -> None:
        self._sock, self._receive_s = sock, receive_s

    def send(self, data: bytes) -> None:
        self._sock.settimeout(STALL_S)
        self._sock.sendall(data)

    def send_answer(self, header: bytes, views: Sequence[memoryview], num_bytes: int) -> None:
        self.send(header)
        for view in views:
            self._sock.sendall(view)

    def land(self, views: Sequence[memoryview], *, may_wait: bool = True) -> int:
        self._sock.settimeout(self._receive_s)
        landed, until = 0, time.monotonic() + LOOK_S
        try:
            for view in views:
                got = 0
                while got < len(view):
                    if landed and time.monotonic() > until:
                        return landed
                    num_bytes = _not_ended(self._sock.recv_into(view[got:]))
                    got += num_bytes
                    landed += num_bytes
        except TimeoutError:
            pass
        return landed

    def wait(self, timeout_s: float) -> bool:
        return self._sock.pending() > 0 or _wait_readable(self._sock, timeout_s)

    def receive_some(self, buffer: memoryview, timeout_s: float | None) -> int:
        self._sock.settimeout(timeout_s)
        return _not_ended(self._sock.recv_into(buffer))


def rest(views: list[memoryview], done: int) -> list[memoryview]:
    """What is left of `views` after their first `done` bytes."""
    for first, view in enumerate(views):
        if done < len(view):
            return [view[done:], *views[first + 1 :]] if done else views[first:]
        done -= len(view)
    return []


def _not_ended(num_bytes: int) -> int:
    if not num_bytes:
        raise ConnectionError("the peer closed the connection")
    return num_bytes


class _PollFd(ctypes.Structure):
    _fields_ = (("fd", ctypes.c_int), ("events", ctypes.c_short), ("revents", ctypes.c_short))


class _Timespec(ctypes.Structure):
    _fields_ = (("seconds", ctypes.c_long), ("nanoseconds", ctypes.c_long))


_ppoll = ctypes.CDLL(None).ppoll
_ppoll.argtypes = (ctypes.c_void_p, ctypes.c_ulong, ctypes.c_void_p, ctypes.c_void_p)


def _wait_readable(sock: socket.socket, timeout_s: float) -> bool:
    """False, too, where a signal came in between. select.poll counts in milliseconds, and select takes few files."""
    polled = _PollFd(sock.fileno(), select.POLLIN, 0)
    wait = _Timespec(int(timeout_s), int(timeout_s % 1 * 1e9))
    return int(_ppoll(ctypes.byref(polled), 1, ctypes.byref(wait), None)) > 0
