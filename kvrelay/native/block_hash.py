"""BLAKE2b-128 chained over packed tokens, and the packing: in C, or in Python where no compiler is.

Loaded on first use, once for the process. Both give the same bytes (tests/kvrelay/test_hashing.py).
"""

import functools
import hashlib
import logging
import struct
from array import array
from collections.abc import Sequence
from pathlib import Path
from typing import Protocol

from kvrelay.errors import BackendUnavailable
from kvrelay.native.build import load_extension

logger = logging.getLogger(__name__)

_FOLDER = Path(__file__).parent / "blake2b"
_DIGEST_BYTES = 16


class _Extension(Protocol):
    """What the compiled module has; see `pack` and `chain` below."""

    def pack(self, tokens: list[int], start: int, end: int, /) -> bytes: ...

    def chain(self, parent: bytes, packed: bytes, width: int, /) -> bytes: ...


@functools.cache
def native() -> _Extension | None:
    """The compiled module, or None without a compiler."""
    try:
        extension: _Extension = load_extension(
            "kvrelay_block_hash", [_FOLDER / "module.c", _FOLDER / "blake2b.c"], [_FOLDER / "blake2b.h"]
        )
    except BackendUnavailable as error:
        logger.info("block hashing runs in Python: %s", error)
        return None
    return extension


def chain(parent: bytes, packed: bytes, width: int) -> bytes:
    """16 bytes for every `width` bytes of tokens: the hash of the previous digest (at first `parent`) and these
    tokens.
    """
    extension = native()
    return chain_in_python(parent, packed, width) if extension is None else extension.chain(parent, packed, width)


def chain_in_python(parent: bytes, packed: bytes, width: int) -> bytes:
    """The same as `chain`, with hashlib."""
    digests: list[bytes] = []
    for start in range(0, len(packed) - width + 1, width):
        parent = hashlib.blake2b(parent + packed[start : start + width], digest_size=_DIGEST_BYTES).digest()
        digests.append(parent)
    return b"".join(digests)


def pack(tokens: Sequence[int], start: int, end: int) -> bytes:
    """`tokens[start:end]` as little-endian int32. Raises OverflowError: a token does not fit."""
    extension = native()
    if extension is None or type(tokens) is not list:
        return pack_in_python(tokens, start, end)
    return extension.pack(tokens, start, end)


def pack_in_python(tokens: Sequence[int], start: int, end: int) -> bytes:
    """The same as `pack`, with the standard library. All machines that run this are little-endian."""
    some = tokens[start:end]
    try:
        return struct.pack(f"{len(some)}i", *some)  # twice as fast as array()
    except struct.error:
        return array("i", some).tobytes()  # raises OverflowError or TypeError
