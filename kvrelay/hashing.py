"""Chained hashes of full blocks, which identify KV in caches, routing and transfers.

A block's hash covers its tokens and, through its parent, everything before it, plus the tenant's salt, the adapter and
other inputs behind its tokens (`extras`, such as an image). All processes compute the same hashes: nothing here is
randomised, unlike Python's `hash`. kvrelay/native/block_hash.py does the work, in C or with hashlib.
"""

import functools
import hashlib
from collections.abc import Iterable, Mapping, Sequence
from typing import Self

from kvrelay.native import block_hash
from kvrelay.types import BlockHash

HASH_SEED = "kvrelay-blake2b-128-v1"
HASH_BYTES = 16
TOKEN_BYTES = 4

_ADAPTER = b"adapter"  # BLAKE2's personalisation: these digests never equal a block's
_EXTRAS = b"extras"
_TENANT = b"tenant"


@functools.lru_cache(1024)
def root_hash(salt: str = "", adapter: str = "") -> BlockHash:
    """The parent of a sequence's first block; differs for each tenant's salt and each adapter."""
    root = hashlib.blake2b(f"{HASH_SEED}\0{salt}".encode(), digest_size=HASH_BYTES).digest()
    if adapter:
        root = hashlib.blake2b(root + adapter.encode(), digest_size=HASH_BYTES, person=_ADAPTER).digest()
    return BlockHash(root)


_PLAIN_ROOT = root_hash()


def tenant_name(root: BlockHash) -> str:
    """A tenant's name from its root hash, which reveals neither salt nor root; "" without salt and adapter."""
    if root == _PLAIN_ROOT:
        return ""
    return hashlib.blake2b(root, digest_size=8, person=_TENANT).hexdigest()


def tenant_of(name: str) -> str:
    """A tenant's name from its `cache_salt`, user or API key; "" for ""."""
    return tenant_name(root_hash.__wrapped__(name))  # not cached: names come from clients, in any length


def pack_tokens(tokens: Sequence[int], start: int = 0, end: int | None = None) -> bytes:
    """`tokens[start:end]` as little-endian int32. Raises OverflowError: a token does not fit."""
    return block_hash.pack(tokens, start, len(tokens) if end is None else min(end, len(tokens)))


class HashChain:
    """The hashes of a prompt's full blocks, in order, in one bytearray; grows at the end only."""

    __slots__ = ("data", "root")

    def __init__(self, root: BlockHash, hashes: Iterable[bytes] = ()) -> None:
        self.root = root
        self.data = bytearray(b"".join(hashes)) if hashes else bytearray()

    @classmethod
    def of(cls, tokens: Sequence[int], block_size: int, salt: str = "", adapter: str = "") -> Self:
        """The chain of every full block of `tokens`."""
        chain = cls(root_hash(salt, adapter))
        chain.extend(pack_tokens(tokens), block_size)
        return chain

    def __len__(self) -> int:
        return len(self.data) // HASH_BYTES

    def __getitem__(self, index: int) -> BlockHash:
        start = range(len(self))[index] * HASH_BYTES
        return BlockHash(bytes(self.data[start : start + HASH_BYTES]))

    @property
    def last(self) -> BlockHash:
        """The parent of the next block."""
        return BlockHash(bytes(self.data[-HASH_BYTES:])) if self.data else self.root

    def hashes(self, first: int = 0, last: int | None = None) -> list[BlockHash]:
        """Hashes first .. last - 1; last None: to the end."""
        data = bytes(self.data[first * HASH_BYTES : None if last is None else last * HASH_BYTES])
        return [BlockHash(data[i : i + HASH_BYTES]) for i in range(0, len(data), HASH_BYTES)]

    def extend(self, packed: bytes, block_size: int, extras: Mapping[int, bytes] | None = None) -> None:
        """Append the hashes of the full blocks of these packed tokens; a partial block is left out.

        extras: digests of other inputs (an image) behind a block's tokens, by the block's index in `packed`. They
        change the block's hash.
        """
        width = TOKEN_BYTES * block_size
        if extras:
            packed = self._extend_to_last_extras(packed, width, extras)
        self.data += block_hash.chain(self.last if self.data else self.root, packed, width)

    def _extend_to_last_extras(self, packed: bytes, width: int, extras: Mapping[int, bytes]) -> bytes:
        """Append hashes up to the last full block with extras; the packed tokens that are left."""
        begin, count = 0, len(packed) // width
        for index in sorted(i for i in extras if i < count):
            self.data += block_hash.chain(self.last, packed[begin * width : index * width], width)
            block = packed[index * width : (index + 1) * width]
            self.data += _hash_with_extras(self.last, block, extras[index])
            begin = index + 1
        return packed[begin * width :]


def _hash_with_extras(parent: bytes, block: bytes, extras: bytes) -> bytes:
    mixed = hashlib.blake2b(extras, digest_size=HASH_BYTES, person=_EXTRAS).digest()
    return hashlib.blake2b(parent + mixed + block, digest_size=HASH_BYTES, person=_EXTRAS).digest()


def block_hashes(
    tokens: Sequence[int], block_size: int, salt: str = "", adapter: str = "", extras: Mapping[int, bytes] | None = None
) -> list[BlockHash]:
    """Hashes of every full block of `tokens`, in order; a partial block has none. extras: see HashChain.extend."""
    chain = HashChain(root_hash(salt, adapter))
    chain.extend(pack_tokens(tokens), block_size, extras)
    return chain.hashes()
