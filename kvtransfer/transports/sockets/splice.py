"""Sending pages of this process's memory into a socket without copying them: vmsplice into a pipe, splice out of it.

What is on its way are the pages themselves, not what they held when they were sent; streams.py says why that is safe.
Any memory will do, not only a memfd's, and scattered regions take two calls for each MiB; sendfile would take one for
each region, and four times the CPU. Linux, 64 bit.
"""

import ctypes
import fcntl
import os
import socket

import numpy as np
from numpy.typing import NDArray

Iovecs = NDArray[np.uint64]  # [num_pieces, 2]: address, length

_MAX_PIECES = 1024  # of one call: UIO_MAXIOV
_PIPE_BYTES = 1 << 20  # what an unprivileged process may ask for
_USEFUL_PIPE_BYTES = 64 << 10  # the kernel gives small pipes to users that have many
_MOVE, _MORE = 1, 4
_F_SETPIPE_SZ, _F_GETPIPE_SZ = 1031, 1032

_libc = ctypes.CDLL(None, use_errno=True)  # its calls let go of the interpreter lock


_VMSPLICE_ARGUMENTS = (ctypes.c_int, ctypes.c_void_p, ctypes.c_size_t, ctypes.c_uint)
_SPLICE_ARGUMENTS = (
    ctypes.c_int, ctypes.c_void_p, ctypes.c_int, ctypes.c_void_p, ctypes.c_size_t, ctypes.c_uint,
)  # fmt: skip


def _checked(result: int) -> int:
    """The call's result. Raises OSError when it failed (InterruptedError: a signal came before anything happened)."""
    if result >= 0:
        return result
    number = ctypes.get_errno()
    raise OSError(number, os.strerror(number))


def _cut(piece: Iovecs, num_left: int) -> None:
    """Leave its last bytes."""
    piece[0] += piece[1] - np.uint64(num_left)
    piece[1] = num_left


class SplicePipe:
    """The pipe that pages go through. For one thread; of no more use after an error."""

    def __init__(self) -> None:
        """Raises OSError when the kernel gives no pipe of a useful size, AttributeError without these calls."""
        self._vmsplice, self._splice = _libc.vmsplice, _libc.splice
        self._vmsplice.restype = self._splice.restype = ctypes.c_ssize_t
        self._vmsplice.argtypes, self._splice.argtypes = _VMSPLICE_ARGUMENTS, _SPLICE_ARGUMENTS
        self._out, self._in = os.pipe2(os.O_CLOEXEC)
        try:
            num_bytes = fcntl.fcntl(self._in, _F_SETPIPE_SZ, _PIPE_BYTES)
        except OSError:  # more than this user may have
            num_bytes = fcntl.fcntl(self._in, _F_GETPIPE_SZ)
        if num_bytes < _USEFUL_PIPE_BYTES:
            self.close()
            raise OSError("the kernel gave a small pipe only")

    def send_all(self, sock: socket.socket, pieces: Iovecs) -> None:
        """Send `pieces`, which are used up. Raises OSError; BlockingIOError when the socket's send timeout passed."""
        ends = np.cumsum(pieces[:, 1], dtype=np.int64)
        total, sent, first, where = int(ends[-1]), 0, 0, pieces.ctypes.data
        while sent < total:
            try:
                count = min(len(pieces) - first, _MAX_PIECES)
                held = _checked(self._vmsplice(self._in, where + first * pieces.itemsize * 2, count, 0))
            except InterruptedError:
                continue
            sent += held
            self._pass_on(sock, held, _MOVE | (_MORE if sent < total else 0))
            first = int(np.searchsorted(ends, sent, side="right"))
            if first < len(pieces):
                _cut(pieces[first], int(ends[first]) - sent)

    def _pass_on(self, sock: socket.socket, held: int, flags: int) -> None:
        while held:
            try:
                sent = _checked(self._splice(self._out, None, sock.fileno(), None, held, flags))
            except InterruptedError:
                continue
            if not sent:
                raise BrokenPipeError("the socket takes nothing any more")
            held -= sent

    def close(self) -> None:
        os.close(self._in)
        os.close(self._out)


def why_not_splice() -> str | None:
    """Why pages cannot travel here, found by sending some; None: they can."""
    wanted = os.urandom(3 * 4096 + 5)
    content = np.frombuffer(wanted, dtype=np.uint8)
    try:
        ours, theirs = socket.socketpair()
        with ours, theirs:
            theirs.settimeout(1.0)
            pipe = SplicePipe()
            try:
                pipe.send_all(ours, np.array([[content.ctypes.data, len(wanted)]], dtype=np.uint64))
            finally:
                pipe.close()
            got = theirs.recv(len(wanted), socket.MSG_WAITALL)
    except (OSError, AttributeError) as error:
        return str(error)
    return None if got == wanted else "the bytes did not arrive as they left"
