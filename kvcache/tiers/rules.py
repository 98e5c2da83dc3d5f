"""The settings and totals that the parts of the tier controller share. Pure."""

from dataclasses import dataclass

from kvrelay.kvcache.stores.store import BlockMeta
from kvrelay.types import BlockHash, BlockId

WAIT_LIMIT_S = 60.0  # for a request that waits for all of its blocks: a store that hangs must not block it for ever


@dataclass(frozen=True, slots=True)
class TierRules:
    """The settings that govern the tiers (see CacheSettings)."""

    write: str = "write-through"
    write_after_hits: int = 1
    prefetch: str = "timeout"
    prefetch_timeout_s: float = 2.0
    is_checked: bool = True  # verify checksums
    block_tokens: int = 16

    @property
    def longest_wait_s(self) -> float:
        """How long a request waits for its blocks at most."""
        return {"best-effort": 0.0, "wait": WAIT_LIMIT_S}.get(self.prefetch, self.prefetch_timeout_s)


@dataclass(frozen=True, slots=True)
class IndexedBlock:
    """A full block of the pool, with its hash."""

    digest: BlockHash
    block: BlockId
    meta: BlockMeta


@dataclass(slots=True)
class TierStats:
    """Totals since the start. Counts are blocks."""

    saved: int = 0  # pool to host tier
    unsaved: int = 0  # no room in the queue or in the host tier
    loaded: int = 0  # host tier to pool
    corrupt: int = 0  # in the host tier
    save_s: float = 0.0
    load_s: float = 0.0
