"""Builds an engine: its KV cache, its scheduler, and the parts of a step, each given whole to those that use it."""

import logging
import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path

import torch

from kvrelay import __version__
from kvrelay.engine.checkpoints.checkpoint import model_digest
from kvrelay.engine.checkpoints.loading import load_model
from kvrelay.engine.checkpoints.preflight import num_blocks_for
from kvrelay.engine.execution.launch import LayerEvents, LayerHook, StepExecutor, StepLoads
from kvrelay.engine.execution.runner import Runner, kv_layout
from kvrelay.engine.execution.sampler import OutputProcessor, Sampler
from kvrelay.engine.models.decoder import DecoderModel
from kvrelay.engine.scheduling.blocks import Headroom
from kvrelay.engine.scheduling.fair_share import FairShare
from kvrelay.engine.scheduling.groups import GroupSteps
from kvrelay.engine.scheduling.preemption_policy import MeasuredSpeeds, PreemptionMode
from kvrelay.engine.scheduling.scheduler import Scheduler, SchedulerConfig
from kvrelay.engine.scheduling.tier_requests import LowerTiers
from kvrelay.engine.speculation.draft_model import DraftModel
from kvrelay.engine.speculation.speculation import DraftSteps
from kvrelay.engine.step.config import EngineConfig, KvCache
from kvrelay.engine.step.engine import Engine
from kvrelay.engine.step.reports import EngineMonitor, StepRecorder, StepTiming
from kvrelay.engine.step.requests import Batch, Requests
from kvrelay.hashing import HASH_SEED
from kvrelay.kernels.backend import Backend
from kvrelay.kvcache.eviction.policies import make_policy
from kvrelay.kvcache.memory.storage import DTYPES, KV_DTYPES, KvStorage
from kvrelay.kvcache.memory.swap import SwapArea
from kvrelay.kvcache.pool.block_pool import BlockPool
from kvrelay.machine import free_host_bytes
from kvrelay.plane.messages import PROTOCOL_VERSION
from kvrelay.types import Fingerprint

logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class Extensions:
    """What an engine may have beside its model and its pool.

    Args:
        tiers: makes the lower tiers of a KV cache; started.
        swap_area: makes the area to which preempted sequences are swapped; started.
        draft_model: drafts tokens.
        layer_hook: called as layers of held sequences become final.
    """

    tiers: Callable[[KvCache], LowerTiers | None] = lambda cache: None
    swap_area: Callable[[KvCache], SwapArea | None] = lambda cache: None
    draft_model: DraftModel | None = None
    layer_hook: LayerHook | None = None


def load_engine(
    folder: Path, backend: Backend, dtype: torch.dtype, config: EngineConfig, extensions: Extensions | None = None
) -> Engine:
    """An engine for the checkpoint in a prepared folder. Raises ModelError, ConfigError."""
    kv_dtype = dtype if config.kv_dtype == "auto" else KV_DTYPES[config.kv_dtype]
    model = load_model(
        folder,
        backend,
        dtype,
        block_size=config.block_size,
        kv_layout=config.kv_layout,
        kv_dtype=kv_dtype,
        quantization=config.quantization,
    )
    if config.kv_memory_share is not None:
        budget = pool_bytes(config.kv_memory_share, backend, config.num_workers)
        logger.info("KV pool: %.0f MiB, %.0f%% of the free memory", budget / (1 << 20), 100 * config.kv_memory_share)
        config = replace(config, kv_memory_bytes=budget)
    engine = make_engine(model, backend, config, extensions, digest=model_digest(folder))
    engine.runner.warm_up()
    return engine


def pool_bytes(share: float, backend: Backend, num_workers: int) -> int:
    """Bytes for one worker's pool: `share` of what is free on its device now.

    Args:
        num_workers: of this machine, which share its memory. Of no account on a GPU: what others took is not free.
    """
    if (free_bytes := backend.free_device_bytes()) is not None:
        return int(share * free_bytes)
    return int(share * free_host_bytes() / max(num_workers, 1))


def make_engine(
    model: DecoderModel,
    backend: Backend,
    config: EngineConfig,
    extensions: Extensions | None = None,
    *,
    digest: str = "",
    clock: Callable[[], float] = time.monotonic,
) -> Engine:
    """An engine of these parts. Raises ConfigError. digest: the checkpoint's, for the fingerprint."""
    extensions, spec = extensions or Extensions(), model.spec
    cache = make_kv_cache(model, backend, config, digest)
    tiers, area = extensions.tiers(cache), extensions.swap_area(cache)
    if area is not None:
        area.probe(range(cache.pool.num_blocks))
    max_model_len = min(spec.max_position, cache.pool.num_blocks * config.block_size, config.max_model_len or 1 << 62)
    max_running = min(config.max_running, config.token_budget)  # each gets a token in every step
    headroom, speeds = Headroom(config.headroom, config.block_size), MeasuredSpeeds()
    limits = SchedulerConfig(
        config.token_budget,
        max_running,
        config.max_waiting,
        config.headroom,
        preemption=None if config.preemption == "auto" else PreemptionMode(config.preemption),
        token_bytes=cache.memory.layout.block_bytes / config.block_size,
    )
    scheduler = Scheduler(
        cache.pool,
        limits,
        fair_share=FairShare(config.rules),
        headroom=headroom,
        speeds=speeds,
        area=area,
        tiers=tiers,
        eos_ids=tuple(spec.eos_ids),
    )
    runner = Runner(
        model,
        backend,
        cache.storage.layers,
        block_size=config.block_size,
        max_running=max_running,
        max_blocks=-(-max_model_len // config.block_size) + 1,
        max_tokens=config.token_budget,
    )
    drafts = DraftSteps(
        cache.pool,
        most=config.draft_tokens,
        token_budget=config.token_budget,
        max_model_len=max_model_len,
        lookup=config.prompt_lookup,
        model=extensions.draft_model,
        lengths=headroom.lengths,
    )
    batch = Batch(scheduler, runner, drafts)
    loads = StepLoads(scheduler, tiers, num_layers=spec.num_layers, may_load=tiers is not None or area is not None)
    outputs = OutputProcessor(batch.end, clock, eos_ids=spec.eos_ids, max_model_len=max_model_len)
    groups = GroupSteps(scheduler.groups, batch.end, runner.forget)
    hook = extensions.layer_hook
    layer_events = None if hook is None else LayerEvents(hook, num_layers=spec.num_layers)
    executor = StepExecutor(
        scheduler,
        runner,
        cache.storage,
        loads,
        Sampler(backend, tuple(spec.eos_ids)),
        outputs,
        groups,
        drafts.note,
        layer_events,
        backend.asynchronous,
        clock,
    )
    requests = Requests(
        scheduler, batch, groups, loads, outputs, speeds, clock, vocab_size=spec.vocab_size, max_model_len=max_model_len
    )
    timing = StepTiming()
    return Engine(
        config=replace(config, max_running=max_running, max_model_len=max_model_len),
        model=model,
        backend=backend,
        cache=cache,
        scheduler=scheduler,
        tiers=tiers,
        runner=runner,
        drafts=drafts,
        requests=requests,
        batch=batch,
        loads=loads,
        executor=executor,
        outputs=outputs,
        recorder=StepRecorder(timing, speeds, drafts, cache.pool, tiers, clock),
        reports=EngineMonitor(scheduler, timing, headroom.lengths, drafts, backend, tiers),
        clock=clock,
    )


def make_kv_cache(model: DecoderModel, backend: Backend, config: EngineConfig, digest: str = "") -> KvCache:
    """The memory of an engine's KV, its pool and its fingerprint.

    Raises ConfigError: there is no room for two blocks.
    """
    shape = model.attention_shape
    compute_dtype = next(name for name, value in DTYPES.items() if value is shape.dtype)
    layout = kv_layout(model)
    num_blocks = num_blocks_for(config.kv_memory_bytes, layout.block_bytes)
    layout = replace(layout, num_blocks=num_blocks)
    fingerprint = Fingerprint(
        PROTOCOL_VERSION,
        digest,
        layout.dtype,
        config.block_size,
        layout.num_layers,
        layout.num_kv_heads,
        shape.head_dim,
        HASH_SEED,
        order=layout.order,
        versions=versions(),
        compute_dtype=compute_dtype,
        num_parts=layout.num_parts,
        quantization=str(config.quantization or "none"),
    )
    pool = BlockPool(
        num_blocks,
        block_size=config.block_size,
        prefix_caching=config.prefix_caching,
        policy=make_policy(config.policy, num_blocks),
    )
    return KvCache(KvStorage(layout, backend.device), pool, fingerprint)


def versions() -> str:
    """Versions of what computes KV and hashes: see Fingerprint. torch's build (CPU, CUDA) and patch are left out."""
    return f"kvrelay {__version__}, torch {'.'.join(torch.__version__.split('.')[:2])}"
