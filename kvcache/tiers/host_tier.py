"""The host tier: a slab of memory, the index over its rows, and each row's checksum and metadata.

Pure; engine's thread.
"""

from collections.abc import Callable, Iterable, Sequence

from kvrelay.kvcache.index.changes import CacheChange
from kvrelay.kvcache.index.tier_index import TierCounts, TierIndex
from kvrelay.kvcache.memory.loads import BlockSlab
from kvrelay.kvcache.stores.store import BlockMeta
from kvrelay.types import BlockHash


class HostTier:
    """Blocks in host memory by hash. Bytes are copied by others, from and to rows that are reserved or held."""

    def __init__(self, slab: BlockSlab, index: TierIndex, clock: Callable[[], float]) -> None:
        self.slab, self.index, self.now_s = slab, index, clock
        self.block_bytes, self.num_rows = slab.block_bytes, index.num_rows
        self._checksums = [0] * index.num_rows
        self._metas: list[BlockMeta | None] = [None] * index.num_rows

    def __contains__(self, digest: BlockHash) -> bool:
        return digest in self.index

    def match(self, hashes: Sequence[BlockHash], start: int) -> int:
        """How many consecutive blocks from `hashes[start]` on are here."""
        return len(self.index.match(hashes, start))

    def use(self, hashes: Sequence[BlockHash], priority: int) -> None:
        """A request of this priority used these blocks, those that are here."""
        self.index.use(hashes, self.now_s(), priority=priority)

    def row(self, digest: BlockHash) -> int | None:
        """The row of this block; None when it is not here."""
        return self.index.row(digest)

    def reserve(self, metas: Sequence[BlockMeta]) -> list[int]:
        """Rows for the first of these blocks, as many as there is room for; each goes to `put` or `cancel`."""
        rows: list[int] = []
        for meta in metas:
            got = self.index.reserve(1, self.now_s(), tenant=meta.tenant)
            if got is None:
                break
            rows += got
        return rows

    def put(self, digest: BlockHash, row: int, checksum: int, meta: BlockMeta) -> None:
        """This reserved row now holds the block; it is freed if another row does already."""
        is_new = self.index.put(
            digest, row, self.now_s(), parent=meta.parent, end_tokens=meta.end_tokens, priority=meta.priority
        )
        if is_new:
            self._checksums[row] = checksum
            self._metas[row] = meta

    def cancel(self, rows: Iterable[int]) -> None:
        """Free reserved rows."""
        self.index.cancel(rows)

    def forget(self, hashes: Iterable[BlockHash]) -> None:
        """Discard these entries."""
        self.index.discard(hashes, self.now_s())

    def entry(self, row: int) -> tuple[BlockMeta, int]:
        """Metadata and checksum of the block in this row."""
        meta = self._metas[row]
        assert meta is not None, f"row {row} holds nothing"
        return meta, self._checksums[row]

    def checksums(self, rows: Sequence[int]) -> list[int]:
        """Checksums of the blocks in these rows when they were put."""
        return [self._checksums[row] for row in rows]

    def hold(self, hashes: Iterable[BlockHash]) -> list[int]:
        """Keep these entries, all of which are here, while they are read; returns their rows."""
        return self.index.hold(hashes)

    def hold_prefix(self, hashes: Sequence[BlockHash]) -> list[int]:
        """Hold the consecutive blocks from the first on that are here; returns their rows."""
        return self.index.hold(hashes[: self.match(hashes, 0)])

    def unhold(self, rows: Iterable[int]) -> None:
        """One hold less on each of these rows."""
        self.index.unhold(rows)

    def pin(self, hashes: Sequence[BlockHash], until_s: float) -> None:
        """Keep these entries, those that are here, until then, within the limit for pins."""
        self.index.pin(hashes, until_s)

    def unpin(self, hashes: Sequence[BlockHash]) -> None:
        """End the pins of these entries."""
        self.index.unpin(hashes)

    def next_victims(self, count: int) -> list[BlockHash]:
        """The blocks that would be evicted next."""
        return self.index.next_victims(count, self.now_s())

    def drain_changes(self) -> CacheChange | None:
        """The net changes since the last call, or None."""
        return self.index.drain_changes()

    def counts(self) -> TierCounts:
        return self.index.counts()
