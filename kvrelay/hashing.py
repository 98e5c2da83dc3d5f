"""Chained hashes of full blocks: the names under which KV is cached, routed and shared.

A block's hash covers its tokens and, through its parent, everything before it, plus the tenant's salt, the adapter and what
its tokens stand for beside text (`extras`); two processes agree because nothing here is randomised (Python's `hash` is).
The work is done in C where a compiler is (native/block_hash.py), else by hashlib: the digests are the same.
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

_ADAPTER = b"adapter"  # BLAKE2's personalisation keeps these apart from digests of blocks
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
    """A name for whose chains begin at this root that gives away neither salt nor root; "" for those without either."""
    if root == _PLAIN_ROOT:
        return ""
    return hashlib.blake2b(root, digest_size=8, person=_TENANT).hexdigest()


def tenant_of(name: str) -> str:
    """A tenant's digest by the name (a `cache_salt`, a user, an API key) that its requests come with; "" for ""."""
    return tenant_name(root_hash.__wrapped__(name))  # not remembered: names come from clients, in any length


def pack_tokens(tokens: Sequence[int], start: int = 0, end: int | None = None) -> bytes:
    """`tokens[start:end]` as little-endian int32. Raises OverflowError: a token is no int32."""
    return block_hash.pack(tokens, start, len(tokens) if end is None else min(end, len(tokens)))


class HashChain:
    """The hashes of a prompt's full blocks, first to last, in one run of bytes; grows at the end only."""

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
        """The hash that the next block is chained to."""
        return BlockHash(bytes(self.data[-HASH_BYTES:])) if self.data else self.root

    def hashes(self, first: int = 0, last: int | None = None) -> list[BlockHash]:
        """Those from `first` up to `last`, or to the end, which is not included."""
        data = bytes(self.data[first * HASH_BYTES : None if last is None else last * HASH_BYTES])
        return [BlockHash(data[i : i + HASH_BYTES]) for i in range(0, len(data), HASH_BYTES)]

    def extend(self, packed: bytes, block_size: int, extras: Mapping[int, bytes] | None = None) -> None:
        """Append the hashes of the full blocks of these packed tokens; a partial tail is left out.

        extras: for blocks, counted from the first of `packed`, whose tokens stand for something beside text (an image):
        a digest of that. Blocks with unlike extras have unlike hashes.
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


def next_hash(parent: BlockHash, block_tokens: Sequence[int], extras: bytes = b"") -> BlockHash:
    """The hash of one full block that follows `parent`."""
    data = pack_tokens(block_tokens)
    if extras:
        return BlockHash(_hash_with_extras(parent, data, extras))
    return BlockHash(hashlib.blake2b(parent + data, digest_size=HASH_BYTES).digest())


def block_hashes(
    tokens: Sequence[int], block_size: int, salt: str = "", adapter: str = "", extras: Mapping[int, bytes] | None = None
) -> list[BlockHash]:
    """Hashes of every full block of `tokens`, first to last. A partial tail has none. `extras`: see HashChain.extend."""
    chain = HashChain(root_hash(salt, adapter))
    chain.extend(pack_tokens(tokens), block_size, extras)
    return chain.hashes()
