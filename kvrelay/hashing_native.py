"""BLAKE2b-128 chained over packed tokens, and the packing: in C, or in Python where no compiler is.

Loaded at the first use, once for the process. Both ways give the same bytes (tests/spec/test_hashing.py).
"""

import functools
import hashlib
import logging
import sys
from array import array
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from kvrelay.errors import BackendUnavailable
from kvrelay.native import load_builtins

logger = logging.getLogger(__name__)

_FOLDER = Path(__file__).parent / "native_hash"
_DIGEST_BYTES = 16


class _Native:
    """The compiled functions."""

    def __init__(self) -> None:
        self._pack, self.chain = load_builtins("hashing", sorted(_FOLDER.glob("*.c")))
        self._layout = _layout_of_ints()

    def pack(self, tokens: list[int], start: int, end: int) -> bytes:
        packed: bytes = self._pack(tokens, start, end, self._layout)
        return packed


def _layout_of_ints() -> int:
    """Which layout of lists and ints the C may read directly; 0: only through the interpreter's functions, 4 times slower."""
    is_known = sys.implementation.name == "cpython" and sys.version_info[:2] in ((3, 11), (3, 12))
    is_usual = sys.maxsize > 1 << 32 and sys.int_info.bits_per_digit == 30 and not hasattr(sys, "gettotalrefcount")
    return sys.version_info.minor if is_known and is_usual else 0


@functools.cache
def native() -> _Native | None:
    """The compiled library, or None where it cannot be had."""
    try:
        return _Native()
    except BackendUnavailable as error:
        logger.info("hashing in Python: %s", error)
        return None


def chain(parent: bytes, packed: bytes, width: int) -> bytes:
    """16 bytes for every `width` bytes of tokens, each the hash of the one before it (first: `parent`) and its own."""
    library: Any = native()
    digests: bytes = (chain_in_python if library is None else library.chain)(parent, packed, width)
    return digests


def chain_in_python(parent: bytes, packed: bytes, width: int) -> bytes:
    """What `chain` gives, by hashlib."""
    digests: list[bytes] = []
    for start in range(0, len(packed) - width + 1, width):
        parent = hashlib.blake2b(parent + packed[start : start + width], digest_size=_DIGEST_BYTES).digest()
        digests.append(parent)
    return b"".join(digests)


def pack(tokens: Sequence[int], start: int, end: int) -> bytes:
    """`tokens[start:end]` as little-endian int32. Raises OverflowError: a token is no int32."""
    library: Any = native() if type(tokens) is list else None
    packed: bytes = (pack_in_python if library is None else library.pack)(tokens, start, end)
    return packed


def pack_in_python(tokens: Sequence[int], start: int, end: int) -> bytes:
    """What `pack` gives, by the standard library. Machines that run this are little-endian."""
    return array("i", tokens[start:end]).tobytes()
