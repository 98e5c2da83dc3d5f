"""BLAKE2b-128 chained over packed tokens, and the packing: in C, or in Python where no compiler is.

Loaded at the first use, once for the process. Both ways give the same bytes (tests/spec/test_hashing.py).
"""

import ctypes
import functools
import hashlib
import logging
from array import array
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from kvrelay.errors import BackendUnavailable
from kvrelay.native import load_native

logger = logging.getLogger(__name__)

_FOLDER = Path(__file__).parent / "native_hash"
_DIGEST_BYTES = 16
_FEW_BYTES = 512  # less is done in Python: a call into C costs as much
_RELEASE_BYTES = 1 << 18  # from here on other threads may run meanwhile; below, getting the lock back costs more


class _Native:
    """The library twice: called with the interpreter's lock held, and without it."""

    def __init__(self) -> None:
        free = load_native("hashing", sorted(_FOLDER.glob("*.c")))
        held = ctypes.PyDLL(str(free._name))
        self.chain_free, self.chain_held, self.pack_ints = free.kr_chain, held.kr_chain, held.kr_pack_ints
        for function in (self.chain_free, self.chain_held):
            function.argtypes = [ctypes.c_char_p, ctypes.c_char_p, ctypes.c_size_t, ctypes.c_size_t, ctypes.c_void_p]
            function.restype = None
        self.pack_ints.argtypes = [ctypes.py_object, ctypes.c_ssize_t, ctypes.c_ssize_t, ctypes.c_void_p]
        self.pack_ints.restype = ctypes.c_int

    def chain(self, parent: bytes, packed: bytes, width: int, count: int) -> bytearray:
        out = bytearray(_DIGEST_BYTES * count)
        call = self.chain_held if len(packed) < _RELEASE_BYTES else self.chain_free
        if count:
            call(parent, packed, width, count, ctypes.addressof(ctypes.c_char.from_buffer(out)))
        return out

    def pack(self, tokens: list[int], start: int, count: int) -> bytes:
        out = array("i", bytes(4 * count))
        if self.pack_ints(tokens, start, count, out.buffer_info()[0]) != 0:
            raise OverflowError("a token is no int32")
        return out.tobytes()


@functools.cache
def native() -> _Native | None:
    """The compiled library, or None where it cannot be had."""
    try:
        return _Native()
    except (BackendUnavailable, AttributeError, OSError) as error:
        logger.info("hashing in Python: %s", error)
        return None


def chain(parent: bytes, packed: bytes, width: int) -> bytes | bytearray:
    """16 bytes for every `width` bytes of tokens, each the hash of the one before it (first: `parent`) and its own."""
    count = len(packed) // width
    library: Any = native() if len(packed) >= _FEW_BYTES else None
    return chain_in_python(parent, packed, width) if library is None else library.chain(parent, packed, width, count)


def chain_in_python(parent: bytes, packed: bytes, width: int) -> bytes:
    """What `chain` gives, by hashlib."""
    digests: list[bytes] = []
    for start in range(0, len(packed) - width + 1, width):
        parent = hashlib.blake2b(parent + packed[start : start + width], digest_size=_DIGEST_BYTES).digest()
        digests.append(parent)
    return b"".join(digests)


def pack(tokens: Sequence[int], start: int, end: int) -> bytes:
    """`tokens[start:end]` as little-endian int32. Raises OverflowError: a token is no int32."""
    count = max(0, end - start)
    library: Any = native() if type(tokens) is list and count * 4 >= _FEW_BYTES else None
    return pack_in_python(tokens, start, end) if library is None else library.pack(tokens, start, count)


def pack_in_python(tokens: Sequence[int], start: int, end: int) -> bytes:
    """What `pack` gives, by the standard library. Machines that run this are little-endian."""
    return array("i", tokens[start:end]).tobytes()
