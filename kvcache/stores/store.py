"""What every place for blocks below the host tier has in common: disk, the cluster's store, Redis, object stores.

A store keeps whole blocks (all layers of `block_size` tokens, as one run of bytes) under their prefix hashes. Its methods
block and may be called from several threads at once; only the cache controller's I/O threads call them.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol, runtime_checkable

from kvrelay.types import BlockHash


@dataclass(frozen=True, slots=True)
class BlockMeta:
    """What a store may need to know of a block beside its bytes."""

    parent: BlockHash | None  # the block before it in its chain; None: the first
    end_tokens: int  # tokens from the prompt's beginning to its end
    priority: int = 0  # higher stays longer
    tenant: str = ""  # whose quota it counts against: a digest of the tenant's salt, never the salt
    pin_s: float = 0.0  # a client wants it kept for so long: worth storing at its first offer
    checksum: int | None = None  # xxh3-64 of its bytes when they were first copied; None: not known


@dataclass(frozen=True, slots=True)
class StoreStats:
    """Sums since start(), and what is there now."""

    num_blocks: int = 0
    num_bytes: int = 0  # as stored, compressed or not
    capacity_bytes: int = 0  # 0: not limited here
    stored_blocks: int = 0
    stored_bytes: int = 0  # before compression
    loaded_blocks: int = 0
    loaded_bytes: int = 0  # after decompression
    store_s: float = 0.0
    load_s: float = 0.0
    rejected_blocks: int = 0  # not admitted, or no room
    evicted_blocks: int = 0
    corrupt_blocks: int = 0  # failed their checksum and were discarded
    failures: int = 0  # calls that failed as a whole


class BlockStore(Protocol):
    """A place for blocks by hash. Raises StoreError only from start(); afterwards trouble is a miss, logged and counted."""

    name: str
    keeps_checksums: bool  # what it stores is verified by `BlockMeta.checksum` at every load, where one is given

    def start(self) -> None:
        """Open it. Raises StoreError: it cannot be used, or holds another model's blocks; the text says what to do."""

    def contains(self, hashes: Sequence[BlockHash]) -> list[bool]:
        """Which of these it could load now."""

    def load(self, hashes: Sequence[BlockHash], into: Sequence[memoryview]) -> list[bool]:
        """Bring blocks, each verified against its checksum; which of them are in place. `into[i]` is block_bytes long.

        Where False, the bytes of `into[i]` mean nothing.
        """

    def store(
        self, hashes: Sequence[BlockHash], blocks: Sequence[memoryview], metas: Sequence[BlockMeta]
    ) -> list[bool]:
        """Keep copies; which of them are kept (True where it was there already). The caller holds `blocks` meanwhile."""

    def delete(self, hashes: Sequence[BlockHash]) -> None:
        """Forget these, if they are there."""

    def stats(self) -> StoreStats:
        """Sums for metrics."""

    def close(self) -> None:
        """Finish what is being written and let go. Blocks stay where the store outlives the process."""


@runtime_checkable
class PinningStore(BlockStore, Protocol):
    """A store that evicts by itself, and can be asked not to."""

    def pin(self, hashes: Sequence[BlockHash], ttl_s: float) -> object:
        """Keep those that are there for so many seconds, within the store's limit for pins; 0 ends their pins."""
