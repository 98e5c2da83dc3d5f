"""The format of a block in an external store (Redis, S3): a header with namespace and hash, a checksum, the bytes.
Pure.

Everything read back is verified: a block of another model, truncated or changed, is not served.
"""

import struct

import xxhash

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
