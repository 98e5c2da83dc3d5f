"""BLAKE2b-128 chained over packed tokens, and the packing: in C, or in Python where no compiler is.

Loaded at the first use, once for the process. Both ways give the same bytes (tests/kvrelay/test_hashing.py).
"""

import functools
import hashlib
import logging
import sys
from array import array
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import NamedTuple

from kvrelay.errors import BackendUnavailable
from kvrelay.native.build import load_builtins

logger = logging.getLogger(__name__)

_FOLDER = Path(__file__).parent / "hash"
_DIGEST_BYTES = 16


class Native(NamedTuple):
    """The compiled functions: what `pack` and `chain` below do."""

    pack: Callable[[list[int], int, int], bytes]
    chain: Callable[[bytes, bytes, int], bytes]
    use_layout: Callable[[int], None]


def layout_of_ints() -> int:
    """Which layout of lists and ints the C may read directly: the minor version of CPython 3, or 0 for none."""
    is_known = sys.implementation.name == "cpython" and sys.version_info[:2] in ((3, 11), (3, 12))
    is_usual = sys.maxsize > 1 << 32 and sys.int_info.bits_per_digit == 30 and not hasattr(sys, "gettotalrefcount")
    return sys.version_info.minor if is_known and is_usual else 0


@functools.cache
def native() -> Native | None:
    """The compiled library, or None where it cannot be had."""
    try:
        library = Native(*load_builtins("hashing", sorted(_FOLDER.glob("*.c"))))
    except BackendUnavailable as error:
        logger.info("hashing in Python: %s", error)
        return None
    library.use_layout(layout_of_ints())
    return library


def chain(parent: bytes, packed: bytes, width: int) -> bytes:
    """16 bytes for every `width` bytes of tokens, each the hash of the one before it (first: `parent`) and its own."""
    library = native()
    return chain_in_python(parent, packed, width) if library is None else library.chain(parent, packed, width)


def chain_in_python(parent: bytes, packed: bytes, width: int) -> bytes:
    """What `chain` gives, by hashlib."""
    digests: list[bytes] = []
    for start in range(0, len(packed) - width + 1, width):
        parent = hashlib.blake2b(parent + packed[start : start + width], digest_size=_DIGEST_BYTES).digest()
        digests.append(parent)
    return b"".join(digests)


def pack(tokens: Sequence[int], start: int, end: int) -> bytes:
    """`tokens[start:end]` as little-endian int32. Raises OverflowError: a token is no int32."""
    library = native()
    if library is None or type(tokens) is not list:
        return pack_in_python(tokens, start, end)
    return library.pack(tokens, start, end)


def pack_in_python(tokens: Sequence[int], start: int, end: int) -> bytes:
    """What `pack` gives, by the standard library. Machines that run this are little-endian."""
    return array("i", tokens[start:end]).tobytes()
