"""The host tier: a slab of memory, the index over its rows, and each row's checksum and metadata; and the settings that
the parts of the tier controller share.

Pure; engine's thread.
"""

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

from kvrelay.kvcache.eviction.policies import EvictionPolicy, make_policy
from kvrelay.kvcache.index.tier_index import TierIndex
from kvrelay.kvcache.memory.jobs import BlockSlab
from kvrelay.settings.cache import CacheSettings
from kvrelay.types import BlockHash, BlockMeta

PREFETCH_TIMEOUT_S = 2.0  # under "timeout": longer than a disk or a store in the same network takes for a long prompt
WAIT_LIMIT_S = 60.0  # for a request that waits for all of its blocks: a store that hangs must not block it for ever


@dataclass(frozen=True, slots=True)
class TierRules:
    """The settings that govern the tiers (see CacheSettings)."""

    write: str = "write-through"
    prefetch: str = "timeout"
    prefetch_timeout_s: float = PREFETCH_TIMEOUT_S
    is_checked: bool = True  # verify checksums
    block_tokens: int = 16

    @property
    def longest_wait_s(self) -> float:
        """How long a request waits for its blocks at most."""
        return {"best-effort": 0.0, "wait": WAIT_LIMIT_S}.get(self.prefetch, self.prefetch_timeout_s)


class HostTier(TierIndex):
    """Blocks in host memory by hash. Bytes are copied by others, from and to rows that are reserved or held."""

    def __init__(
        self,
        slab: BlockSlab,
        policy: EvictionPolicy,
        clock: Callable[[], float],
        *,
        quota: int | None = None,
        pin_limit: int | None = None,
    ) -> None:
        """No blocks. `quota`: most rows of each tenant. `pin_limit`: see TierIndex."""
        quota_of = None if quota is None else lambda tenant: quota
        super().__init__(slab.num_rows, policy, quota=quota_of, pin_limit=pin_limit, keep_changes=True)
        self.slab, self.now_s, self.block_bytes = slab, clock, slab.block_bytes
        self._checksums = [0] * slab.num_rows
        self._metas: list[BlockMeta | None] = [None] * slab.num_rows

    def num_here(self, hashes: Sequence[BlockHash], start: int) -> int:
        """How many consecutive blocks from `hashes[start]` on are here."""
        return len(self.match(hashes, start))

    def reserve_for(self, metas: Sequence[BlockMeta]) -> list[int]:
        """Rows for the first of these blocks, as many as there is room for; each goes to `put_block` or `cancel`."""
        rows: list[int] = []
        for meta in metas:
            got = self.reserve(1, self.now_s(), tenant=meta.tenant)
            if got is None:
                break
            rows += got
        return rows

    def put_block(self, digest: BlockHash, row: int, checksum: int, meta: BlockMeta) -> None:
        """This reserved row now holds the block; it is freed if another row does already."""
        is_new = self.put(
            digest, row, self.now_s(), parent=meta.parent, end_tokens=meta.end_tokens, priority=meta.priority
        )
        if is_new:
            self._checksums[row] = checksum
            self._metas[row] = meta

    def forget(self, hashes: Iterable[BlockHash]) -> None:
        """Discard these entries."""
        self.discard(hashes, self.now_s())

    def entry(self, row: int) -> tuple[BlockMeta, int]:
        """Metadata and checksum of the block in this row."""
        meta = self._metas[row]
        assert meta is not None, f"row {row} holds nothing"
        return meta, self._checksums[row]

    def checksums(self, rows: Sequence[int]) -> list[int]:
        """Checksums of the blocks in these rows when they were put."""
        return [self._checksums[row] for row in rows]


def make_host_tier(cache: CacheSettings, slab: BlockSlab, clock: Callable[[], float]) -> HostTier:
    """An empty host tier in this slab."""
    quota = max(1, int(cache.tenant_share * slab.num_rows)) if cache.tenant_share < 1 else None
    return HostTier(slab, make_policy(cache.eviction_policy, slab.num_rows), clock, quota=quota)
