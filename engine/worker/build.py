"""Builds a worker's engine from the settings: backend, weights, pool, tiers. On the engine's thread."""

import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import torch

from kvrelay.config import Settings
from kvrelay.engine.checkpoints.preflight import check_backend, check_fit
from kvrelay.engine.execution.launch import LayerHook
from kvrelay.engine.models.spec import ModelSpec
from kvrelay.engine.scheduling.blocks import HEADROOM_SHARE
from kvrelay.engine.scheduling.fair_share import queue_rules
from kvrelay.engine.scheduling.tier_requests import LowerTiers
from kvrelay.engine.speculation.draft_choice import DRAFT_TOKENS
from kvrelay.engine.speculation.draft_model import make_draft_model
from kvrelay.engine.step.build import load_engine
from kvrelay.engine.step.config import EngineConfig, Extensions, KvCache
from kvrelay.engine.step.engine import Engine
from kvrelay.engine.step.warm_up import warm_up
from kvrelay.engine.worker.sizing import EngineSizes, engine_sizes
from kvrelay.kernels.common.quant_scheme import scheme_of
from kvrelay.kernels.select import select_backend
from kvrelay.kvcache.eviction.policies import make_policy
from kvrelay.kvcache.memory.host import HostSlab, make_slab
from kvrelay.kvcache.memory.storage import DTYPES
from kvrelay.kvcache.memory.swap import SwapArea
from kvrelay.kvcache.pool.block_pool import BlockPool
from kvrelay.kvcache.stores.codecs import Codec, make_codec
from kvrelay.kvcache.stores.disk.tier import DiskOptions, DiskStore
from kvrelay.kvcache.stores.namespace import Namespace, namespace_of
from kvrelay.kvcache.stores.remote import ClusterStore, make_store
from kvrelay.kvcache.stores.sealing import SealedCodec
from kvrelay.kvcache.stores.store import BlockStore
from kvrelay.kvcache.tiers.controller import TierController
from kvrelay.kvcache.tiers.host_tier import TierRules, make_host_tier
from kvrelay.machine import free_host_bytes, physical_cores
from kvrelay.settings.cache import CacheSettings
from kvrelay.settings.choices import ChecksMode
from kvrelay.types import KvMemory, Role


@dataclass(frozen=True, slots=True, kw_only=True)
class WorkerOptions:
    """Everything that a worker is made from.

    `num_workers`: workers of this machine, which share its memory; None: as many as the settings count.
    `cluster_store`: makes this process's client of the cluster's store; None: there is none.
    """

    settings: Settings
    model_dir: Path
    model_name: str
    worker_id: str
    secret: bytes = b""
    node_id: str = "local"
    host: str = "127.0.0.1"
    cores: tuple[int, ...] | None = None
    num_workers: int | None = None
    cluster_store: ClusterStore | None = None

    @property
    def machine_workers(self) -> int:
        """Workers that share this machine's memory."""
        return self.num_workers or max(1, self.settings.cluster.prefill + self.settings.cluster.decode)


def build_engine(
    options: WorkerOptions, role: Role, layer_hook: LayerHook | None, wake: Callable[[], None]
) -> tuple[Engine, EngineSizes]:
    """Load the model and make its pool and tiers. Raises ModelError, ConfigError, BackendUnavailable, StoreError.

    Args:
        layer_hook: called when layers of held sequences are final.
        wake: called from any thread when a tier has something for the engine.
    """
    settings, model_dir = options.settings, options.model_dir
    check_fit(ModelSpec.from_folder(model_dir), settings, role)
    own = settings.for_role(role)
    num_threads = own.engine.num_threads or (len(physical_cores(options.cores)) if options.cores else None)
    if num_threads:
        torch.set_num_threads(num_threads)
    backend = select_backend(own.engine.backend, own.engine.device, num_threads)
    check_backend(backend, settings, role)
    sizes = engine_sizes(
        own.engine,
        has_device=backend.free_device_bytes() is not None,
        free_host_bytes=free_host_bytes(),
        num_workers=options.machine_workers,
        gpus_per_worker=settings.cluster.num_gpus_per_worker,
    )
    draft_model = make_draft_model(own, model_dir, backend, sizes.max_running) if role is Role.DECODE else None
    checks = settings.transfer.checks

    def tiers(kv: KvCache) -> LowerTiers | None:
        if settings.cache.host_memory is None:
            return None
        namespace = namespace_of(kv.fingerprint, kv.memory.layout)
        cache, secret = settings.cache, options.secret
        return make_lower_tiers(kv.pool, kv.memory, cache, checks, namespace, wake, options.cluster_store, secret)

    extensions = Extensions(
        tiers=tiers,
        swap_area=lambda kv: make_swap_area(kv.memory, own.engine.swap_memory, checks, wake),
        draft_model=draft_model,
        layer_hook=layer_hook,
    )
    engine = own.engine
    config = EngineConfig(
        block_size=engine.block_size,
        kv_layout=engine.kv_layout,
        kv_memory_bytes=sizes.kv_memory_bytes or 0,
        kv_memory_share=sizes.kv_memory_share,
        kv_dtype=own.kv_dtype,
        quantization=scheme_of(own.model.quantization),
        token_budget=sizes.token_budget,
        max_running=sizes.max_running,
        max_model_len=settings.model.max_model_len,
        shares_weights=True,
        prefix_caching=engine.prefix_caching,
        policy=settings.cache.eviction_policy,
        rules=queue_rules(settings.router.max_queue_s),
        preemption=engine.preemption,
        headroom=HEADROOM_SHARE,
        draft_tokens=DRAFT_TOKENS if engine.speculation != "off" else 0,
        prompt_lookup=engine.speculation != "model",
    )
    made = load_engine(model_dir, backend, DTYPES[own.model.compute_dtype], config, extensions)
    if backend.asynchronous is None:  # such a backend has captured and chosen in the runner's own warm-up
        warm_up(made.model, backend, made.config)
    return made, sizes


_MOST_POOLS = 8  # more of what is swapped out than so many pools waits longer than any client


def make_lower_tiers(
    pool: BlockPool,
    memory: KvMemory,
    settings: CacheSettings,
    checks: ChecksMode,
    namespace: Namespace,
    wake: Callable[[], None],
    cluster_store: ClusterStore | None = None,
    secret: bytes = b"",
) -> LowerTiers:
    """Started. Raises ConfigError (no room for a block, or no secret), StoreError (a store cannot be used)."""
    slab = make_slab(memory, settings.host_memory or 0)
    is_checked, block_tokens = checks != "off", memory.layout.block_size
    rules = TierRules(settings.write_policy, settings.prefetch, is_checked=is_checked, block_tokens=block_tokens)
    codec = make_codec(settings.compression, memory.layout)
    if settings.sealed:
        codec = SealedCodec(codec, secret, namespace)
    stores = make_stores(slab, settings, namespace, codec, cluster_store)
    host = make_host_tier(settings, slab, time.monotonic)
    tiers = TierController(pool, host, stores, rules, wake=wake)
    tiers.start()
    return LowerTiers(tiers, memory.layout.block_size)


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
    slab = make_slab(memory, min(num_bytes, memory.layout.num_blocks * memory.layout.block_bytes * _MOST_POOLS))
    area = SwapArea(slab, is_checked=checks != "off", wake=wake, clock=clock)
    area.start()
    return area


def make_stores(
    slab: HostSlab, settings: CacheSettings, namespace: Namespace, codec: Codec, cluster_store: ClusterStore | None
) -> list[BlockStore]:
    """What lies below the host tier, nearest first; not started. Raises ConfigError: there is no such store."""
    stores: list[BlockStore] = []
    if settings.disk_path is not None:
        is_new_each_time = settings.write_policy != "selective"  # what a hit has earned a place is admitted at once
        quota = int(settings.tenant_share * settings.disk_size) if settings.tenant_share < 1 else None
        options = DiskOptions(
            policy=lambda num_rows: make_policy(settings.eviction_policy, num_rows),
            is_admission_on=is_new_each_time,
            quota=None if quota is None else lambda tenant: quota,
        )
        stores.append(
            DiskStore(settings.disk_path, settings.disk_size, slab.block_bytes, namespace, codec=codec, options=options)
        )
    if settings.remote is not None:
        stores.append(
            make_store(
                settings.remote, slab.block_bytes, namespace, codec=codec, memory=slab.memory, cluster=cluster_store
            )
        )
    return stores
