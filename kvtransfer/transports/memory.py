"""Reads of host memory that this process can address; they are verified while the caches hold them.

Loopback: source and target are in one process. Shared memory (shm): the target maps the source's pool (a memfd)
read-only. The map outlives the source's process, so that a source killed in the middle of a copy cannot crash the
target. The interpreter's lock is released while bytes move and are hashed, so that the engine's thread runs on.
"""

import asyncio
import contextlib
import hashlib
import hmac
import logging
import mmap
import os
import secrets
import socket
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from functools import partial

import msgspec
import numpy as np
from numpy.typing import NDArray

from kvrelay.errors import BackendUnavailable, TransportError
from kvrelay.kvtransfer.mover.copy_plan import CopyList
from kvrelay.kvtransfer.mover.mover import (
    INLINE_BYTES,
    MoverThread,
    NativeMove,
    Place,
    PythonMove,
    Receipt,
    move,
    nothing,
)
from kvrelay.kvtransfer.mover.verification import ArrivingRead
from kvrelay.kvtransfer.transports.base import NAMESPACES, Landed, Transport, host_id, open_off_loop, why_not_on_host
from kvrelay.plane.connection import connections
from kvrelay.types import KvMemory

logger = logging.getLogger(__name__)

Bytes = NDArray[np.uint8]
_PROCESS = secrets.token_bytes(16)  # a forked child has another pid
_exported: dict[bytes, KvMemory] = {}
_LABEL = b"kvrelay-shm-v3\0"
_PROOF_BYTES = hashlib.sha256().digest_size
_TIMEOUT_S = 2.0


class CopyingReader:
    """A Reader that copies from a pool that this process can address: `connect` sets `_source`.

    Tiny reads run on the loop; others on the mover's thread, or on one of Python's where there is no compiler.
    """

    max_in_flight = 4  # a thread must not run dry while the loop is held up: 4 units are a few milliseconds

    def __init__(self, memory: KvMemory, secret: bytes, host: str) -> None:
        assert memory.view is not None
        self._secret = secret
        self._bytes: Bytes = np.frombuffer(memory.view, dtype=np.uint8)
        self._target = place_of(self._bytes)
        self._pool: Bytes | None = None  # keeps the source's memory alive
        self._source: Place | None = None
        self._mover = MoverThread()
        self._thread = ThreadPoolExecutor(max_workers=1, thread_name_prefix="kv-copy")  # starts with the first read

    def _open(self, pool: Bytes) -> None:
        self._pool, self._source = pool, place_of(pool)

    def read(self, copies: CopyList, landed: Landed | None = None) -> "asyncio.Future[None]":
        loop = asyncio.get_running_loop()
        if copies.total_bytes <= INLINE_BYTES:
            done: asyncio.Future[None] = loop.create_future()
            try:
                self.copy(copies, landed)
            except TransportError as error:
                done.set_exception(error)
            else:
                done.set_result(None)
            return done
        if MoverThread.can_be():
            moving, settle = self._move(copies, landed)
            if isinstance(moving, NativeMove):
                return self._mover.submit(moving, settle)
        return loop.run_in_executor(self._thread, self.copy, copies, landed)

    def copy(self, copies: CopyList, landed: Landed | None = None) -> None:
        """Carry out `copies` and verify them, here and now. Raises TransportError (CorruptRead)."""
        try:
            moving, settle = self._move(copies, landed)
            moving.run()
            settle()
        except TransportError:
            raise
        except Exception as error:  # whatever it was, the bytes are not there and none will land
            logger.debug("a read failed", exc_info=True)
            raise TransportError(str(error) or type(error).__name__) from error

    def _move(self, copies: CopyList, landed: Landed | None) -> tuple[NativeMove | PythonMove, Callable[[], object]]:
        """(the read as a move that hashes what it brings, where `landed` can use that; what to call when it is over:
        raises CorruptRead).
        """
        assert self._source is not None
        receipt = landed.receipt() if isinstance(landed, ArrivingRead) else None
        if isinstance(landed, ArrivingRead) and receipt is not None:
            settle: Callable[[], object] = partial(landed.settle, receipt)
        else:
            receipt = Receipt()
            settle = partial(landed, copies.total_bytes) if landed is not None else nothing
        return move(self._source, self._target, copies, receipt), settle

    def abandon(self, read: "asyncio.Future[None]") -> None:
        self._mover.cancel(read)  # others end by themselves within milliseconds

    async def aclose(self) -> None:
        await self._mover.aclose()
        await asyncio.to_thread(self._thread.shutdown)  # its work is bounded by the memory's speed
        self._pool = self._source = None


def place_of(array: Bytes) -> Place:
    """This array's memory. The caller keeps the array alive."""
    return Place(array.ctypes.data, array.nbytes)


# ---- loopback


class _LoopbackDescriptor(msgspec.Struct, frozen=True):
    process: bytes
    pid: int
    key: bytes


class LoopbackExporter:
    """Lists the pool where readers of this process find it."""

    def __init__(self, memory: KvMemory, secret: bytes, host: str) -> None:
        self._memory, self._key = memory, secrets.token_bytes(16)

    async def start(self) -> None:
        _exported[self._key] = self._memory

    def describe(self) -> bytes:
        return msgspec.msgpack.encode(_LoopbackDescriptor(_PROCESS, os.getpid(), self._key))

    def set_busy(self, num_open: int) -> None:
        """Needs no progress."""

    async def aclose(self) -> None:
        _exported.pop(self._key, None)


class LoopbackReader(CopyingReader):
    """Copies from another pool of this process."""

    async def connect(self, descriptor: bytes) -> None:
        try:
            wanted = msgspec.msgpack.decode(descriptor, type=_LoopbackDescriptor)
        except msgspec.DecodeError as error:
            raise TransportError(f"malformed descriptor: {error}") from error
        memory = _exported.get(wanted.key) if (wanted.process, wanted.pid) == (_PROCESS, os.getpid()) else None
        if memory is None or memory.view is None:
            raise TransportError("the source is in another process")
        self._open(np.frombuffer(memory.view, dtype=np.uint8))


LOOPBACK = Transport("loopback", LoopbackExporter, LoopbackReader, why_not_on_host)


# ---- shared memory


class _ShmDescriptor(msgspec.Struct, frozen=True):
    host: str  # host_id(...) of its namespaces
    socket_name: bytes
    device: int  # st_dev and st_ino of the memfd
    inode: int
    num_bytes: int


def _address(name: bytes) -> str:
    return f"\0kvrelay-{name.hex()}"


def _proof(secret: bytes, name: bytes) -> bytes:
    """Good for the socket of this name alone, which travels over the authenticated connection of both ends."""
    return hmac.digest(secret, _LABEL + name, hashlib.sha256)


class ShmExporter:
    """Sends the memfd to readers that prove the cluster's secret, over an abstract Unix socket."""

    def __init__(self, memory: KvMemory, secret: bytes, host: str) -> None:
        assert memory.memfd is not None
        self._memfd, self._num_bytes, self._secret = memory.memfd, memory.layout.num_bytes, secret
        self._name = secrets.token_bytes(16)
        self._listener: socket.socket | None = None
        self._task: asyncio.Task[None] | None = None

    async def start(self) -> None:
        self._listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        try:
            self._listener.setblocking(False)
            self._listener.bind(_address(self._name))
            self._listener.listen(16)
        except OSError as error:
            await self.aclose()
            raise BackendUnavailable("shm", str(error)) from error
        self._task = asyncio.create_task(self._serve(self._listener), name="kv-shm")

    async def _serve(self, listener: socket.socket) -> None:
        async for peer in connections(listener):
            with peer, contextlib.suppress(OSError, TimeoutError):
                async with asyncio.timeout(_TIMEOUT_S):
                    proof = await asyncio.get_running_loop().sock_recv(peer, _PROOF_BYTES)
                if hmac.compare_digest(proof, _proof(self._secret, self._name)):
                    socket.send_fds(peer, [b"k"], [self._memfd])
                else:
                    logger.warning("a process without the cluster's secret asked for the KV pool")

    def describe(self) -> bytes:
        stat = os.fstat(self._memfd)
        return msgspec.msgpack.encode(
            _ShmDescriptor(host_id(*NAMESPACES["shm"]), self._name, stat.st_dev, stat.st_ino, self._num_bytes)
        )

    def set_busy(self, num_open: int) -> None:
        """Needs no progress."""

    async def aclose(self) -> None:
        if self._task is not None:
            self._task.cancel()
            await asyncio.gather(self._task, return_exceptions=True)
            self._task = None
        if self._listener is not None:
            self._listener.close()
            self._listener = None


class ShmReader(CopyingReader):
    """Maps the source's pool once and copies out of it."""

    async def connect(self, descriptor: bytes) -> None:
        try:
            wanted = msgspec.msgpack.decode(descriptor, type=_ShmDescriptor)
            if not wanted.host or wanted.host != host_id(*NAMESPACES["shm"]):
                raise TransportError("the source is on another host")
            fd = await open_off_loop(partial(self._receive, wanted), os.close)
            try:
                mapping = mmap.mmap(fd, wanted.num_bytes, mmap.MAP_SHARED, mmap.PROT_READ)
            finally:
                os.close(fd)
        except (msgspec.DecodeError, OSError, ValueError) as error:
            raise TransportError(f"cannot map the source's pool: {error}") from error
        self._open(np.frombuffer(mapping, dtype=np.uint8))

    def _receive(self, wanted: _ShmDescriptor) -> int:
        """The pool's descriptor from the source. Blocking. Raises OSError."""
        with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as peer:
            peer.settimeout(_TIMEOUT_S)
            peer.connect(_address(wanted.socket_name))
            peer.sendall(_proof(self._secret, wanted.socket_name))
            _, fds, _, _ = socket.recv_fds(peer, 1, 1)
        if not fds:
            raise OSError("the source refused to hand over its pool")
        stat = os.fstat(fds[0])
        if (stat.st_dev, stat.st_ino) == (wanted.device, wanted.inode) and stat.st_size >= wanted.num_bytes:
            return fds[0]
        os.close(fds[0])
        raise OSError("the source handed over something else")


def _why_not_shm(memory: KvMemory) -> str | None:
    if memory.view is None or memory.memfd is None:
        return "the pool is not a shared mapping in host memory"
    return None


SHM = Transport("shm", ShmExporter, ShmReader, _why_not_shm)
