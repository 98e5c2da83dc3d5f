"""Builds a worker's engine from the settings: backend, weights, pool, tiers. On the engine's thread."""

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from kvrelay.config import Settings
from kvrelay.engine.execution.launch import LayerHook
from kvrelay.engine.models.spec import ModelSpec
from kvrelay.engine.scheduling.fair_share import queue_rules
from kvrelay.engine.scheduling.tier_requests import LowerTiers
from kvrelay.engine.speculation.draft_model import make_draft_model
from kvrelay.engine.step.build import Extensions, load_engine
from kvrelay.engine.step.config import EngineConfig
from kvrelay.engine.step.engine import Engine
from kvrelay.engine.step.kv_cache import KvCache
from kvrelay.engine.worker.preflight import check_fit, check_kv_layout, check_quantization, scheme_of
from kvrelay.engine.worker.tier_setup import make_lower_tiers, make_swap_area
from kvrelay.kernels.select import select_backend
from kvrelay.kvcache.memory.storage import DTYPES
from kvrelay.kvcache.stores.namespace import namespace_of
from kvrelay.kvcache.stores.remote import ClusterStore
from kvrelay.machine import physical_cores
from kvrelay.settings.engine import EngineSettings
from kvrelay.types import Role


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
    node_id: str
    secret: bytes
    host: str
    cores: tuple[int, ...] | None
    num_workers: int | None = None
    cluster_store: ClusterStore | None = None


def build_engine(options: WorkerOptions, role: Role, layer_hook: LayerHook | None, wake: Callable[[], None]) -> Engine:
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
    check_kv_layout(backend.name, backend.kv_layouts, settings, role)
    check_quantization(backend.name, settings, quantizes=backend.quantizes)
    draft_model = make_draft_model(own, model_dir, backend) if role is Role.DECODE else None
    checks = settings.transfer.checks

    def tiers(kv: KvCache) -> LowerTiers | None:
        if not settings.cache.host_bytes:
            return None
        namespace = namespace_of(kv.fingerprint, kv.memory.layout)
        return make_lower_tiers(kv.pool, kv.memory, settings.cache, checks, namespace, wake, options.cluster_store)

    extensions = Extensions(
        tiers=tiers,
        swap_area=lambda kv: make_swap_area(kv.memory, own.engine.swap_bytes, checks, wake),
        draft_model=draft_model,
        layer_hook=layer_hook,
        layers_per_hook=settings.transfer.layers_per_announce,
    )
    config = _engine_config(options, own)
    return load_engine(model_dir, backend, DTYPES[own.model.compute_dtype], config, extensions)


def _engine_config(options: WorkerOptions, own: Settings) -> EngineConfig:
    settings, engine = options.settings, own.engine
    return EngineConfig(
        block_size=engine.block_size,
        kv_layout=engine.kv_layout,
        **_pool_size(engine, options.num_workers or settings.cluster.prefill + settings.cluster.decode),
        kv_dtype=own.kv_dtype,
        quantization=scheme_of(own.model),
        token_budget=engine.token_budget,
        max_running=engine.max_running,
        max_waiting=engine.max_waiting,
        max_model_len=settings.model.max_model_len,
        prefix_caching=engine.prefix_caching,
        policy=settings.cache.eviction_policy,
        rules=queue_rules(settings.scheduler),
        preemption=engine.preemption,
        headroom=engine.headroom,
        cascade=engine.cascade == "auto",
        draft_tokens=engine.draft_tokens if engine.speculation != "off" else 0,
        warm_up=engine.warm_up,
        prompt_lookup=engine.speculation != "model",
    )


def _pool_size(engine: EngineSettings, num_workers: int) -> dict[str, Any]:
    """EngineConfig's fields for the pool's size."""
    if (share := engine.kv_memory_share) is not None:
        return {"kv_memory_share": share, "num_workers": num_workers}
    return {"kv_memory_bytes": engine.kv_memory_bytes}
