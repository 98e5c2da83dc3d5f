"""Builds an engine: its KV cache, its scheduler, and the parts of a step, each given whole to those that use it."""

import logging
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import torch

from kvrelay.engine.checkpoints.checkpoint import model_digest
from kvrelay.engine.checkpoints.loading import load_model
from kvrelay.engine.checkpoints.preflight import num_blocks_for
from kvrelay.engine.execution.runner import kv_layout
from kvrelay.engine.models.decoder import DecoderModel
from kvrelay.engine.step.config import EngineConfig, Extensions, KvCache
from kvrelay.engine.step.engine import Engine
from kvrelay.grammar.compiler import GrammarCompiler
from kvrelay.hashing import HASH_SEED
from kvrelay.kernels.backend import Backend
from kvrelay.kvcache.eviction.policies import make_policy
from kvrelay.kvcache.memory.storage import DTYPES, KV_DTYPES, KvStorage
from kvrelay.kvcache.pool.block_pool import BlockPool
from kvrelay.machine import free_host_bytes
from kvrelay.plane.messages import PROTOCOL_VERSION
from kvrelay.types import KV_VERSION, Fingerprint

logger = logging.getLogger(__name__)


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
        is_shared=config.shares_weights,
    )
    if config.kv_memory_share is not None:
        budget = pool_bytes(config.kv_memory_share, backend)
        logger.info("KV pool: %.0f MiB, %.0f%% of the free memory", budget / (1 << 20), 100 * config.kv_memory_share)
        config = replace(config, kv_memory_bytes=budget)
    extensions = extensions or Extensions()
    if extensions.grammars is None:
        compiler = GrammarCompiler(folder, model.spec.vocab_size, model.spec.eos_ids)
        extensions = replace(extensions, grammars=compiler)
    engine = make_engine(model, backend, config, extensions, digest=model_digest(folder))
    engine.runner.warm_up()
    return engine


def pool_bytes(share: float, backend: Backend) -> int:
    """Bytes for one worker's pool: `share` of what is free on its device now."""
    free_bytes = backend.free_device_bytes()
    return int(share * (free_host_bytes() if free_bytes is None else free_bytes))


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
    cache = make_kv_cache(model, backend, config, digest)
    return Engine(model, backend, cache, config, extensions or Extensions(), clock)


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
    """Versions of what computes KV: see Fingerprint. torch's build (CPU, CUDA) and patch are left out."""
    return f"KV {KV_VERSION}, torch {'.'.join(torch.__version__.split('.')[:2])}"
