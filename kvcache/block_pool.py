"""The blocks of one worker: who holds which, which are cached, in what order they are re-used.

The only writer of reference counts, generations and the prefix cache. Pure: no torch, no clock.

A block is in exactly one state:
  free    no content worth keeping
  used    ref-counted by sequences, reservations or transfers
  cached  nobody holds it, but its hash can still be matched; least recently used goes first
"""

from collections import OrderedDict, deque
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from kvrelay.types import BlockHash, BlockId


@dataclass(frozen=True, slots=True)
class BlockCounts:
    """How many blocks are in each state; they add up to the pool's size."""

    free: int
    used: int
    cached: int


@dataclass(frozen=True, slots=True)
class CacheChange:
    """Hashes that became matchable and that ceased to be, since the last drain, in order of neither."""

    stored: tuple[BlockHash, ...]
    removed: tuple[BlockHash, ...]


class BlockPool:
    """Allocates, shares, caches and evicts fixed-size blocks. Not thread-safe: one owner thread."""

    def __init__(self, num_blocks: int, *, prefix_caching: bool = True) -> None:
        if num_blocks < 1:
            raise ValueError(f"a pool needs at least one block, not {num_blocks}")
        self.num_blocks = num_blocks
        self._prefix_caching = prefix_caching
        self._free: deque[BlockId] = deque(BlockId(i) for i in range(num_blocks))
        self._cached: OrderedDict[BlockId, None] = OrderedDict()  # first goes first
        self._refs = [0] * num_blocks
        self._generations = [0] * num_blocks
        self._hashes: list[BlockHash | None] = [None] * num_blocks
        self._by_hash: dict[BlockHash, BlockId] = {}
        self._stored: dict[BlockHash, None] = {}
        self._removed: dict[BlockHash, None] = {}

    # ---- allocation

    @property
    def num_available(self) -> int:
        """Blocks that `allocate` could hand out now, cached ones included."""
        return len(self._free) + len(self._cached)

    def allocate(self, count: int) -> list[BlockId] | None:
        """`count` fresh blocks with one reference each, or None (and no change) when there are not enough."""
        if count > self.num_available:
            return None
        blocks: list[BlockId] = []
        for _ in range(count):
            block = self._free.popleft() if self._free else self._evict()
            self._refs[block] = 1
            self._generations[block] += 1
            blocks.append(block)
        return blocks

    def _evict(self) -> BlockId:
        block, _ = self._cached.popitem(last=False)
        self._forget(block)
        return block

    def _forget(self, block: BlockId) -> None:
        digest = self._hashes[block]
        assert digest is not None
        self._hashes[block] = None
        del self._by_hash[digest]
        if self._stored.pop(digest, 0) == 0:  # not merely stored since the last drain
            self._removed[digest] = None

    def generation(self, block: int) -> int:
        """How often this block has been handed out: a reference with an older number is stale."""
        return self._generations[block]

    # ---- sharing

    def acquire(self, blocks: Iterable[BlockId]) -> None:
        """One more holder for each of these used or cached blocks."""
        for block in blocks:
            if self._refs[block] == 0:
                del self._cached[block]
            self._refs[block] += 1

    def release(self, blocks: Sequence[BlockId]) -> None:
        """One holder less for each. A sequence's last blocks become evictable before its first."""
        for block in reversed(blocks):
            assert self._refs[block] > 0, f"block {block} released more often than held"
            self._refs[block] -= 1
            if self._refs[block]:
                continue
            if self._hashes[block] is None:
                self._free.append(block)
            else:
                self._cached[block] = None

    # ---- prefix cache

    def match(self, hashes: Sequence[BlockHash]) -> list[BlockId]:
        """Blocks of the longest cached prefix of this chain of hashes; not acquired yet."""
        blocks: list[BlockId] = []
        for digest in hashes:
            block = self._by_hash.get(digest)
            if block is None:
                break
            blocks.append(block)
        return blocks

    def cache(self, block: BlockId, digest: BlockHash) -> None:
        """This held block is full and holds `digest`'s content. A second copy stays unnamed."""
        assert self._refs[block] > 0, f"block {block} is not held"
        if not self._prefix_caching or digest in self._by_hash or self._hashes[block] is not None:
            return
        self._hashes[block] = digest
        self._by_hash[digest] = block
        if self._removed.pop(digest, 0) == 0:
            self._stored[digest] = None

    def reset_cache(self) -> int:
        """Forget every cached block that nobody holds; returns how many."""
        count = len(self._cached)
        while self._cached:
            self._free.append(self._evict())
        return count

    def drain_changes(self) -> CacheChange | None:
        """What changed in the prefix cache since the last call, or None."""
        if not self._stored and not self._removed:
            return None
        change = CacheChange(tuple(self._stored), tuple(self._removed))
        self._stored.clear()
        self._removed.clear()
        return change

    def cached_hashes(self) -> list[BlockHash]:
        """Every hash that `match` can find now, changes not yet drained included."""
        return list(self._by_hash)

    # ---- the ledger

    def counts(self) -> BlockCounts:
        free, cached = len(self._free), len(self._cached)
        return BlockCounts(free, self.num_blocks - free - cached, cached)

    def check(self) -> None:
        """Raise AssertionError unless every block is in exactly one state and the index agrees."""
        free, cached = set(self._free), set(self._cached)
        assert len(free) == len(self._free), "a block is free twice"
        assert not free & cached, "a block is both free and cached"
        for index in range(self.num_blocks):
            block = BlockId(index)
            idle = block in free or block in cached
            assert idle == (self._refs[block] == 0), f"block {block}: {self._refs[block]} references, idle={idle}"
            assert block not in free or self._hashes[block] is None, f"free block {block} has a hash"
            assert block not in cached or self._hashes[block] is not None, f"cached block {block} has no hash"
        named = {digest: BlockId(i) for i, digest in enumerate(self._hashes) if digest is not None}
        assert named == self._by_hash, "the prefix index and the blocks disagree"
