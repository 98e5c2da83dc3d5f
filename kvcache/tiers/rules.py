"""The settings that the parts of the tier controller share. Pure."""

from collections.abc import Callable
from dataclasses import dataclass

from kvrelay.kvcache.eviction.policies import make_policy
from kvrelay.kvcache.memory.jobs import BlockSlab
from kvrelay.kvcache.stores.store import BlockMeta
from kvrelay.kvcache.tiers.host_tier import HostTier
from kvrelay.settings.cache import CacheSettings
from kvrelay.types import BlockHash, BlockId

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


def tier_rules(cache: CacheSettings, *, is_checked: bool, block_tokens: int) -> TierRules:
    """The rules that the settings ask for."""
    return TierRules(cache.write_policy, cache.prefetch, is_checked=is_checked, block_tokens=block_tokens)


def host_tier(cache: CacheSettings, slab: BlockSlab, clock: Callable[[], float]) -> HostTier:
    """An empty host tier in this slab."""
    quota = max(1, int(cache.tenant_share * slab.num_rows)) if cache.tenant_share < 1 else None
    policy = make_policy(cache.eviction_policy, slab.num_rows)
    return HostTier(slab, policy, clock, quotas={"": None}, default_quota=quota)


@dataclass(frozen=True, slots=True)
class IndexedBlock:
    """A full block of the pool, with its hash."""

    digest: BlockHash
    block: BlockId
    meta: BlockMeta
