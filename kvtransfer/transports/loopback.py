"""Loopback: source and target in one process. A read is a plain copy."""

import os
import secrets

import msgspec
import numpy as np

from kvrelay.kvtransfer.transports.base import Transport, TransportError
from kvrelay.kvtransfer.transports.copying import Bytes, CopyingReader, place_of
from kvrelay.types import KvMemory

_PROCESS = secrets.token_bytes(16)  # a forked child has another pid
_exported: dict[bytes, KvMemory] = {}


class _Descriptor(msgspec.Struct, frozen=True):
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
        return msgspec.msgpack.encode(_Descriptor(_PROCESS, os.getpid(), self._key))

    def set_busy(self, num_open: int) -> None:
        """Needs no progress."""

    async def aclose(self) -> None:
        _exported.pop(self._key, None)


class LoopbackReader(CopyingReader):
    """Copies from the other pool of this process."""

    def __init__(self, memory: KvMemory, secret: bytes, host: str) -> None:
        super().__init__("kv-loopback", memory)
        self._pool: Bytes | None = None

    async def connect(self, descriptor: bytes) -> None:
        try:
            wanted = msgspec.msgpack.decode(descriptor, type=_Descriptor)
        except msgspec.DecodeError as error:
            raise TransportError(f"malformed descriptor: {error}") from error
        memory = _exported.get(wanted.key) if (wanted.process, wanted.pid) == (_PROCESS, os.getpid()) else None
        if memory is None or memory.view is None:
            raise TransportError("the source is in another process")
        self._pool = np.frombuffer(memory.view, dtype=np.uint8)
        self._source = place_of(self._pool)


def _why_not(memory: KvMemory) -> str | None:
    return None if memory.view is not None else "the pool is not in host memory"


LOOPBACK = Transport("loopback", LoopbackExporter, LoopbackReader, _why_not)
