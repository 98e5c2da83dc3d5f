"""Chained hashes of full blocks, which identify KV in caches, routing and transfers.

A block's hash covers its tokens and, through its parent, everything before it, plus the tenant's salt. All processes
compute the same hashes: nothing here is randomised, unlike Python's `hash`.

Hashing, packing and the index of hashes run in C, or in Python where no compiler is; both do the same
(tests/kvrelay/test_hashing.py, tests/kvrelay/test_hash_index.py). C is compiled on first use, once for the process.
"""

import functools
import hashlib
import os
from array import array
from collections.abc import Iterable, Sequence
from itertools import repeat
from pathlib import Path
from typing import Any, Self

from kvrelay.native.build import NativeLibrary
from kvrelay.types import BlockHash

HASH_SEED = "kvrelay-blake2b-128-v1"
HASH_BYTES = 16
TOKEN_BYTES = 4

NAMESPACE_END = "\0"  # in a salt: what stands before it is a namespace; clients cannot send it
_TENANT = b"tenant"  # BLAKE2's personalisation: such a digest never equals a block's
_NAMESPACE = b"namespace"
_SALT = b"salt"
_ACCOUNT_BYTES = HASH_BYTES // 2
TENANT_CHARS = 16  # of a tenant's name
_NATIVE = Path(__file__).parent / "native"


def _library(name: str, folder: str, source: str) -> NativeLibrary:
    path = _NATIVE / folder
    return NativeLibrary(name, [path / "module.c", path / f"{source}.c"], [path / f"{source}.h"], is_extension=True)


BLOCK_HASHES = _library("kvrelay_block_hash", "blake2b", "blake2b")
HASH_TABLE = _library("kvrelay_hash_table", "hash_table", "table")


@functools.lru_cache(1024)
def root_hash(salt: str = "") -> BlockHash:
    """The parent of a sequence's first block; differs for each tenant's salt.

    All roots of one namespace begin with the same 8 bytes, so that quotas hold for a namespace and not for each of the
    salts that its client may choose. The other 8 keep those salts apart.
    """
    namespace, end, _ = salt.partition(NAMESPACE_END)
    seeded = f"{HASH_SEED}\0{salt}".encode()
    if not end:
        return BlockHash(hashlib.blake2b(seeded, digest_size=HASH_BYTES).digest())
    account = hashlib.blake2b(namespace.encode(), digest_size=_ACCOUNT_BYTES, person=_NAMESPACE)
    own = hashlib.blake2b(seeded, digest_size=HASH_BYTES - _ACCOUNT_BYTES)
    return BlockHash(account.digest() + own.digest())


_PLAIN_ROOT = root_hash()


def tenant_name(root: BlockHash) -> str:
    """A tenant's name from one of its root hashes, which reveals neither salt nor root; "" without a salt."""
    if root == _PLAIN_ROOT:
        return ""
    return hashlib.blake2b(account_of(root), digest_size=TENANT_CHARS // 2, person=_TENANT).hexdigest()


def account_of(root: BlockHash) -> bytes:
    """What quotas count by: a namespace, or without one a salt."""
    return root[:_ACCOUNT_BYTES]


def salt_name(salt: str) -> str:
    """A digest that differs for each salt and begins with its tenant's name; "" for ""."""
    root = root_hash(salt)
    tenant = tenant_name(root)
    return tenant and tenant + hashlib.blake2b(root, digest_size=8, person=_SALT).hexdigest()


def tenant_of(name: str) -> str:
    """A tenant's name from its `cache_salt`, user or API key; "" for ""."""
    return tenant_name(root_hash.__wrapped__(name))  # not cached: names come from clients, in any length


def pack_tokens(tokens: Sequence[int], start: int = 0, end: int | None = None) -> bytes:
    """`tokens[start:end]` as little-endian int32. Raises OverflowError: a token does not fit."""
    end = len(tokens) if end is None else min(end, len(tokens))
    extension = hash_extension()
    if extension is None or type(tokens) is not list:
        return array("i", tokens[start:end]).tobytes()  # all machines that run this are little-endian
    packed: bytes = extension.pack(tokens, start, end)
    return packed


def _chain(parent: bytes, packed: bytes, width: int) -> bytes:
    """16 bytes for every `width` bytes of tokens: the BLAKE2b hash of the previous digest (at first `parent`) and these
    tokens.
    """
    extension = hash_extension()
    if extension is not None:
        digests: bytes = extension.chain(parent, packed, width)
        return digests
    found: list[bytes] = []
    for start in range(0, len(packed) - width + 1, width):
        parent = hashlib.blake2b(parent + packed[start : start + width], digest_size=HASH_BYTES).digest()
        found.append(parent)
    return b"".join(found)


@functools.cache
def hash_extension() -> Any:
    """The extension module with `pack(tokens, start, end)` and `chain(parent, packed, width)`; None: no compiler."""
    return BLOCK_HASHES.load_or_none(instead="block hashing runs in Python")


class HashChain:
    """The hashes of a prompt's full blocks, in order, in one bytearray; grows at the end only."""

    __slots__ = ("data", "root")

    def __init__(self, root: BlockHash, hashes: Iterable[bytes] = ()) -> None:
        self.root = root
        self.data = bytearray(b"".join(hashes)) if hashes else bytearray()

    @classmethod
    def of(cls, tokens: Sequence[int], block_size: int, salt: str = "") -> Self:
        """The chain of every full block of `tokens`."""
        chain = cls(root_hash(salt))
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

    def extend(self, packed: bytes, block_size: int) -> None:
        """Append the hashes of the full blocks of these packed tokens; a partial block is left out."""
        self.data += _chain(self.last if self.data else self.root, packed, TOKEN_BYTES * block_size)


def block_hashes(tokens: Sequence[int], block_size: int, salt: str = "") -> list[BlockHash]:
    """Hashes of every full block of `tokens`, in order; a partial block has none."""
    return HashChain.of(tokens, block_size, salt).hashes()


# ---- which row of a column holds each hash

_SPARSE = 4  # the dict is copied once it has held so many times the hashes that it holds
_SMALL = 1024


class PythonHashIndex:
    """The row of each hash that has one, from 1 on. Lists are lists: no other sequence is accepted.

    Owns the row numbers alone: the hashes lie in the caller's bytearray (`column`), 16 bytes for each row. In C an
    entry takes 8 bytes, in a table that is between an eighth and three quarters full. Here it is a dict, which holds
    the hashes too: some 120 bytes each. It is copied when it has become much too large.
    """

    __slots__ = ("_peak", "_row_of")

    def __init__(self) -> None:
        self._row_of: dict[bytes, int] = {}
        self._peak = 0

    def find(self, column: bytearray, kinds: "array[int]", hashes: list[bytes], /) -> tuple[list[int], list[int]]:
        """(the row of each hash, 0 where it has none; `kinds` of that row, which has 32 bits for each)."""
        rows = list(map(self._row_of.get, hashes, repeat(0)))
        return rows, list(map(kinds.__getitem__, rows))

    def find_one(self, column: bytearray, block_hash: bytes, /) -> int:
        """Its row; 0: it has none."""
        return self._row_of.get(block_hash, 0)

    def add(self, column: bytearray, hashes: list[bytes], first: int, /) -> None:
        """Write these hashes, which are distinct and have no row, to the rows from `first` on."""
        column[HASH_BYTES * first : HASH_BYTES * (first + len(hashes))] = b"".join(hashes)
        self._row_of.update(zip(hashes, range(first, first + len(hashes)), strict=True))
        self._peak = max(self._peak, len(self._row_of))

    def move(self, column: bytearray, rows: list[int], first: int, /) -> None:
        """Move the hashes of these rows to those from `first` on. None of those is a row that comes later in the
        list.
        """
        self.add(column, self._hashes(column, rows), first)

    def remove(self, column: bytearray, rows: list[int], /) -> None:
        """The hashes of these rows are no longer found; the column keeps them."""
        for block_hash in self._hashes(column, rows):
            del self._row_of[block_hash]
        if self._peak > _SMALL and _SPARSE * len(self._row_of) < self._peak:
            self._row_of = dict(self._row_of)
            self._peak = len(self._row_of)

    def _hashes(self, column: bytearray, rows: Sequence[int]) -> list[bytes]:
        return [bytes(column[HASH_BYTES * row : HASH_BYTES * (row + 1)]) for row in rows]

    def count(self) -> int:
        """Hashes that have a row."""
        return len(self._row_of)

    def num_bytes(self) -> int:
        """Memory outside of Python's own count."""
        return 0


HashIndex = PythonHashIndex  # the extension's HashTable has the same methods


@functools.cache
def table_extension() -> Any:
    """The extension module with `HashTable(seed)` and `are_distinct(hashes)`; None without a compiler."""
    return HASH_TABLE.load_or_none(instead="the hash index runs in Python")


def table_seed() -> int:
    """Of a table of hashes: random, so that no client can choose prompts whose hashes collide in it."""
    return int.from_bytes(os.urandom(8), "little")


def new_hash_index() -> HashIndex:
    """An empty index."""
    extension = table_extension()
    if extension is None:
        return PythonHashIndex()
    index: HashIndex = extension.HashTable(table_seed())
    return index


def distinct(hashes: Sequence[bytes]) -> list[bytes]:
    """Each of them once, in their order; the list itself where they are distinct."""
    extension = table_extension()
    if extension is not None and type(hashes) is list and extension.are_distinct(hashes):
        return hashes
    return list(dict.fromkeys(hashes))
