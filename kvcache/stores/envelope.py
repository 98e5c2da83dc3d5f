"""Blocks in external stores (Redis, S3), each in an envelope: a header with namespace and hash, a checksum, the bytes.

Everything read back is verified: a block of another model, truncated or changed, is not served.
"""

import logging
import struct
import threading
from collections.abc import Callable

import xxhash

from kvrelay.kvcache.stores.codecs import Codec, CodecError, NoCodec
from kvrelay.kvcache.stores.store import BackOff, CountingStore
from kvrelay.types import BlockHash

logger = logging.getLogger(__name__)

# magic, version, 0, namespace, hash, length, XXH3-64 of all of these and the bytes
_HEADER = struct.Struct("<4sHH16s16sQQ")
_MAGIC, _VERSION = b"kvrB", 1
HEADER_BYTES = _HEADER.size


class BadEnvelope(ValueError):
    """The value is not the requested block; the message says why."""


def seal(namespace: bytes, digest: bytes, data: memoryview) -> bytes:
    """The envelope of a block, in one copy."""
    bare = _HEADER.pack(_MAGIC, _VERSION, 0, namespace, digest, data.nbytes, 0)
    checksum = _checksum(bare, data)
    return b"".join((_HEADER.pack(_MAGIC, _VERSION, 0, namespace, digest, data.nbytes, checksum), data))


def _checksum(bare: bytes, data: memoryview) -> int:
    state = xxhash.xxh3_64(bare)
    state.update(data)
    return int(state.intdigest())


def unseal(value: bytes | memoryview, namespace: bytes, digest: bytes, max_bytes: int) -> memoryview:
    """The block's bytes, verified, without a copy. Raises BadEnvelope."""
    view = memoryview(value)
    if view.nbytes < HEADER_BYTES:
        raise BadEnvelope(f"{view.nbytes} bytes are no block")
    magic, version, _, whose, which, size, checksum = _HEADER.unpack(view[:HEADER_BYTES])
    if (magic, version) != (_MAGIC, _VERSION):
        raise BadEnvelope("not written by this version of kvrelay")
    if (whose, which) != (namespace, digest):
        raise BadEnvelope("another block, or another model's")
    data = view[HEADER_BYTES:]
    if size != data.nbytes or size > max_bytes:
        raise BadEnvelope(f"{data.nbytes} bytes instead of {size}")
    if _checksum(_HEADER.pack(magic, version, 0, whose, which, size, 0), data) != checksum:
        raise BadEnvelope("its checksum does not match")
    return data


class EnvelopeStore(CountingStore):
    """A store that keeps each block in an envelope, and backs off after a failure. Thread-safe."""

    keeps_checksums = False  # its envelopes have checksums of their own

    def __init__(
        self, name: str, block_bytes: int, namespace: bytes, codec: Codec | None, clock: Callable[[], float]
    ) -> None:
        super().__init__(clock)
        self.name, self._block_bytes, self._namespace = name, block_bytes, namespace
        self._codec = codec or NoCodec()
        self._lock, self._back_off = threading.Lock(), BackOff()

    def _sealed(self, digest: BlockHash, block: memoryview) -> bytes | None:
        """A block's envelope; None: the codec cannot encode it."""
        try:
            return seal(self._namespace, digest, self._codec.encode(block.cast("B")))
        except CodecError as error:
            logger.warning("a block is not sent to %s: %s", self.name, error)
            return None

    def _opened(self, digest: BlockHash, view: memoryview, value: bytes) -> bool:
        """Decode an envelope into the caller's memory. False: it is corrupt, and deleted."""
        try:
            most_bytes = self._codec.most_bytes(self._block_bytes)
            self._codec.decode(unseal(value, self._namespace, digest, most_bytes), view.cast("B"))
        except (BadEnvelope, CodecError) as error:
            logger.warning("a block in %s is discarded: %s", self.name, error)
            self.count(corrupt_blocks=1)
            self.delete([digest])
            return False
        return True

    def _is_backing_off(self) -> bool:
        return self._back_off.is_backing_off(self._clock())

    def _succeeded(self) -> None:
        with self._lock:
            self._back_off.succeeded()

    def _failed(self, error: Exception) -> None:
        with self._lock:
            back_off_s = self._back_off.failed(self._clock())
        self.count(failures=1)
        logger.warning("backing off from %s for %.0f s: %s", self.name, back_off_s, error)
