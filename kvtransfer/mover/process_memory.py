"""Host memory as places: this process's, or another's, read with process_vm_readv.

Every read of another process brings its nonce along, in the same system call: one call reads one process, so a
pid that has been given to somebody else never passes. native/move.c does the same in C.
"""

import ctypes
import errno
import os
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from kvrelay.kvtransfer.transports.base import TransportError

NONCE_BYTES = 16
_MAX_VECTORS = 500  # in one call; the kernel's limit is 1,024
_PR_SET_PTRACER, _ANYONE = 0x59616D61, 2 ** (8 * ctypes.sizeof(ctypes.c_ulong)) - 1
Span = tuple[int, int, int]  # address in the source, address here, length


@dataclass(frozen=True, slots=True)
class Place:
    """Memory that bytes come from or go to: this process's, or another's (`pid` > 0) while `nonce` lies in it."""

    address: int
    num_bytes: int
    pid: int = 0
    nonce_address: int = 0
    nonce: bytes = b""


class NotTheSource(TransportError):
    """The pid is another process's by now, or the source no longer exports its pool."""

    def __init__(self, pid: int) -> None:
        super().__init__(pid)
        self.pid = pid

    def __str__(self) -> str:
        return f"process {self.pid} is not the source (any more)"


class _Vector(ctypes.Structure):
    """struct iovec."""

    _fields_ = (("base", ctypes.c_void_p), ("size", ctypes.c_size_t))


_libc: Any = ctypes.CDLL(None, use_errno=True)


def why_not() -> str | None:
    """Why this system cannot read another process's memory, or None."""
    return None if hasattr(_libc, "process_vm_readv") else "this system has no process_vm_readv"


def set_ptracer(*, is_anyone: bool) -> None:
    """Let every process of this user read this one, or nobody but its ancestors: Yama's rules. Raises OSError."""
    if _libc.prctl(_PR_SET_PTRACER, ctypes.c_ulong(_ANYONE if is_anyone else 0), 0, 0, 0):
        raise OSError(ctypes.get_errno(), os.strerror(ctypes.get_errno()))


def bytes_at(address: int, num_bytes: int) -> memoryview:
    """This process's memory as bytes. Whoever asks keeps it alive."""
    return memoryview((ctypes.c_char * num_bytes).from_address(address)).cast("B")


def copy_from_process(source: Place, spans: Sequence[Span]) -> None:
    """Carry out `spans` of another process. Raises OSError when the kernel refuses, NotTheSource on a wrong nonce.

    After an error the bytes that landed must not be used.
    """
    for first in range(0, len(spans), _MAX_VECTORS):
        rest = spans[first : first + _MAX_VECTORS]
        while rest:
            rest = _behind(rest, _copy_some(source, rest))


def _copy_some(source: Place, spans: Sequence[Span]) -> int:
    """One system call; the bytes of `spans` that it brought, at least one."""
    before, behind = ctypes.create_string_buffer(NONCE_BYTES), ctypes.create_string_buffer(NONCE_BYTES)
    nonces = [(source.nonce_address, ctypes.addressof(buffer), NONCE_BYTES) for buffer in (before, behind)]
    rows = [nonces[0], *spans, nonces[1]]
    theirs = (_Vector * len(rows))(*(_Vector(start, size) for start, _, size in rows))
    ours = (_Vector * len(rows))(*(_Vector(start, size) for _, start, size in rows))
    got: int = _libc.process_vm_readv(source.pid, ours, len(rows), theirs, len(rows), 0)
    if got < 0:
        raise OSError(ctypes.get_errno(), os.strerror(ctypes.get_errno()))
    wanted = sum(size for _, _, size in spans)
    if got >= NONCE_BYTES and before.raw != source.nonce:
        raise NotTheSource(source.pid)
    if got == wanted + 2 * NONCE_BYTES:
        if behind.raw != source.nonce:
            raise NotTheSource(source.pid)
        return wanted
    part = got - NONCE_BYTES
    if not 0 < part < wanted:
        raise OSError(errno.EFAULT, os.strerror(errno.EFAULT))
    return part


def _behind(spans: Sequence[Span], done: int) -> list[Span]:
    """What is left of `spans` after their first `done` bytes."""
    left = []
    for source, target, size in spans:
        skip = min(done, size)
        done -= skip
        if skip < size:
            left.append((source + skip, target + skip, size - skip))
    return left
