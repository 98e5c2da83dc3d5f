"""Builds an engine's tiers below the pool from the settings. Called once, on the engine's thread."""

import time
from collections.abc import Callable

from kvrelay.engine.scheduling.tier_requests import LowerTiers
from kvrelay.kvcache.eviction.registry import make_policy
from kvrelay.kvcache.eviction.sketch import FrequencySketch
from kvrelay.kvcache.index.tier_index import TierIndex
from kvrelay.kvcache.memory.host import HostSlab
from kvrelay.kvcache.memory.swap import SwapArea
from kvrelay.kvcache.pool.block_pool import BlockPool
from kvrelay.kvcache.stores.codecs import make_codec
from kvrelay.kvcache.stores.disk.tier import DiskOptions, DiskStore
from kvrelay.kvcache.stores.namespace import Namespace
from kvrelay.kvcache.stores.remote import ClusterStore, make_store
from kvrelay.kvcache.stores.store import BlockStore
from kvrelay.kvcache.tiers.controller import TierController
from kvrelay.kvcache.tiers.rules import TierRules
from kvrelay.settings.cache import CacheSettings
from kvrelay.settings.choices import ChecksMode
from kvrelay.types import KvMemory

_MOST_POOLS = 8  # more of what is swapped out than so many pools waits longer than any client


def make_lower_tiers(
    pool: BlockPool,
    memory: KvMemory,
    settings: CacheSettings,
    checks: ChecksMode,
    namespace: Namespace,
    wake: Callable[[], None],
    cluster_store: ClusterStore | None = None,
) -> LowerTiers:
    """Started. Raises ConfigError (no room for a block), StoreError (a store cannot be used)."""
    slab = HostSlab(memory, settings.host_bytes)
    share = settings.tenant_share
    index = TierIndex(
        slab.num_rows,
        make_policy(settings.eviction_policy, slab.num_rows),
        quotas={"": None},
        default_quota=max(1, int(share * slab.num_rows)) if share < 1 else None,
        keep_changes=True,
    )
    rules = TierRules(
        write=settings.write_policy,
        write_after_hits=settings.write_after_hits,
        prefetch=settings.prefetch,
        prefetch_timeout_s=settings.prefetch_timeout_s,
        is_checked=checks != "off",
        block_tokens=memory.layout.block_size,
    )
    tiers = TierController(
        pool, slab, index, make_stores(memory, slab, settings, namespace, cluster_store), rules,
        num_threads=settings.io_threads, max_bytes=settings.inflight_bytes, wake=wake, clock=time.monotonic,
    )  # fmt: skip
    tiers.start()
    return LowerTiers(tiers, memory.layout.block_size, FrequencySketch(4 * pool.num_blocks))


def make_swap_area(
    memory: KvMemory,
    num_bytes: int,
    checks: ChecksMode,
    wake: Callable[[], None],
    *,
    clock: Callable[[], float] = time.monotonic,
) -> SwapArea | None:
    """Started; None where so few bytes hold no block."""
    if num_bytes < memory.layout.block_bytes:
        return None
    slab = HostSlab(memory, min(num_bytes, memory.layout.num_blocks * memory.layout.block_bytes * _MOST_POOLS))
    area = SwapArea(slab, is_checked=checks != "off", wake=wake, clock=clock)
    area.start()
    return area


def make_stores(
    memory: KvMemory, slab: HostSlab, settings: CacheSettings, namespace: Namespace, cluster_store: ClusterStore | None
) -> list[BlockStore]:
    """What lies below the host tier, nearest first; not started. Raises ConfigError: there is no such store."""
    codec = make_codec(settings.compression, memory.layout)
    stores: list[BlockStore] = []
    if settings.disk_path is not None:
        is_new_each_time = settings.write_policy != "selective"  # what a hit has earned a place is admitted at once
        quota = int(settings.tenant_share * settings.disk_bytes) if settings.tenant_share < 1 else None
        options = DiskOptions(
            policy=lambda num_rows: make_policy(settings.eviction_policy, num_rows),
            is_admission_on=is_new_each_time, quota_bytes=quota,
        )  # fmt: skip
        stores.append(
            DiskStore(
                settings.disk_path, settings.disk_bytes, slab.block_bytes, namespace, codec=codec, options=options
            )
        )
    if settings.remote is not None:
        stores.append(
            make_store(
                settings.remote, slab.block_bytes, namespace, codec=codec, memory=slab.memory, cluster=cluster_store
            )
        )
    return stores
