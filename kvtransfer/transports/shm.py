"""Shared memory: the target maps the source's pool (a memfd) and copies out of it.

The map is read-only and outlives the source's process, so that a source killed in the middle
of a copy cannot crash the target. The descriptor is opened through /proc; where that is refused
(another user, another PID namespace), it comes over an abstract Unix socket instead.
"""

import logging
import mmap
import os
import secrets
import socket
from functools import partial
from pathlib import Path

import msgspec
import numpy as np

from kvrelay.errors import BackendUnavailable
from kvrelay.kvtransfer.transports.authenticated_socket import AuthenticatedSocket, connect_authenticated
from kvrelay.kvtransfer.transports.base import Transport, TransportError, host_id, open_off_loop
from kvrelay.kvtransfer.transports.copying import Bytes, CopyingReader, place_of
from kvrelay.types import KvMemory

logger = logging.getLogger(__name__)

_LABEL = b"kvrelay-shm-v2"


class _Descriptor(msgspec.Struct, frozen=True):
    host: str  # host_id()
    pid: int
    fd: int
    device: int  # st_dev and st_ino of the memfd: a re-used pid or descriptor shows
    inode: int
    num_bytes: int
    nonce: bytes
    nonce_fd: int  # a second memfd that holds the nonce
    socket_name: bytes


class ShmExporter:
    """Describes where the memfd is, and sends it to readers that prove the cluster's secret."""

    def __init__(self, memory: KvMemory, secret: bytes, host: str) -> None:
        assert memory.memfd is not None
        self._memory, self._memfd = memory, memory.memfd
        self._nonce = secrets.token_bytes(16)
        self._nonce_fd: int | None = None
        self._socket = AuthenticatedSocket(secret, _LABEL, lambda peer: socket.send_fds(peer, [b"k"], [self._memfd]))

    async def start(self) -> None:
        try:
            self._nonce_fd = os.memfd_create("kvrelay-nonce", os.MFD_CLOEXEC)
            os.write(self._nonce_fd, self._nonce)
            await self._socket.start()
        except OSError as error:
            await self.aclose()
            raise BackendUnavailable("shm", str(error)) from error

    def describe(self) -> bytes:
        assert self._nonce_fd is not None
        stat = os.fstat(self._memfd)
        return msgspec.msgpack.encode(
            _Descriptor(
                host=host_id(), pid=os.getpid(), fd=self._memfd, device=stat.st_dev, inode=stat.st_ino,
                num_bytes=self._memory.layout.num_bytes, nonce=self._nonce, nonce_fd=self._nonce_fd,
                socket_name=self._socket.name,
            )
        )  # fmt: skip

    def set_busy(self, num_open: int) -> None:
        """Needs no progress."""

    async def aclose(self) -> None:
        await self._socket.aclose()
        if self._nonce_fd is not None:
            os.close(self._nonce_fd)
            self._nonce_fd = None


def _is_pool(fd: int, wanted: _Descriptor) -> bool:
    stat = os.fstat(fd)
    return (stat.st_dev, stat.st_ino) == (wanted.device, wanted.inode) and stat.st_size >= wanted.num_bytes


def _open_through_proc(wanted: _Descriptor) -> int:
    """The pool's descriptor from the source's table. Raises OSError when refused or not the same process."""
    folder = Path(f"/proc/{wanted.pid}/fd")
    if (folder / str(wanted.nonce_fd)).read_bytes() != wanted.nonce:
        raise OSError(f"process {wanted.pid} is not the source")
    fd = os.open(folder / str(wanted.fd), os.O_RDONLY | os.O_CLOEXEC)
    if _is_pool(fd, wanted):
        return fd
    os.close(fd)
    raise OSError(f"descriptor {wanted.fd} of process {wanted.pid} is not the pool")


def _receive_from_source(wanted: _Descriptor, secret: bytes) -> int:
    """The pool's descriptor from the source itself. Blocking. Raises OSError."""
    with connect_authenticated(wanted.socket_name, secret, _LABEL) as peer:
        _, fds, _, _ = socket.recv_fds(peer, 1, 1)
    if not fds:
        raise OSError("the source refused to hand over its pool")
    if _is_pool(fds[0], wanted):
        return fds[0]
    os.close(fds[0])
    raise OSError("the source handed over something else")


class ShmReader(CopyingReader):
    """Maps the source's pool once and copies on a thread of its own."""

    def __init__(self, memory: KvMemory, secret: bytes, host: str) -> None:
        super().__init__("kv-shm", memory)
        self._secret = secret
        self._pool: Bytes | None = None

    async def connect(self, descriptor: bytes) -> None:
        try:
            wanted = msgspec.msgpack.decode(descriptor, type=_Descriptor)
            if not wanted.host or wanted.host != host_id():
                raise TransportError("the source is on another host")
            fd = await open_off_loop(partial(self._open, wanted), os.close)
        except (msgspec.DecodeError, OSError) as error:
            raise TransportError(f"cannot map the source's pool: {error}") from error
        try:
            mapping = mmap.mmap(fd, wanted.num_bytes, mmap.MAP_SHARED, mmap.PROT_READ)
        except (OSError, ValueError) as error:
            raise TransportError(f"cannot map the source's pool: {error}") from error
        finally:
            os.close(fd)
        self._pool = np.frombuffer(mapping, dtype=np.uint8)  # keeps the mapping alive
        self._source = place_of(self._pool)

    def _open(self, wanted: _Descriptor) -> int:
        try:
            return _open_through_proc(wanted)
        except OSError as error:
            logger.debug("/proc refused the pool (%s); asking the source", error)
            return _receive_from_source(wanted, self._secret)

    async def aclose(self) -> None:
        await super().aclose()
        self._pool = None


def _why_not(memory: KvMemory) -> str | None:
    if memory.view is None or memory.memfd is None:
        return "the pool is not a shared mapping in host memory"
    if not hasattr(os, "memfd_create"):
        return "this system has no memfd"
    return None


SHM = Transport("shm", ShmExporter, ShmReader, _why_not)
