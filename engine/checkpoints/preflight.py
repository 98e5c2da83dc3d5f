"""Whether a model fits the settings, checked before anything is loaded. Pure: imports no torch."""

from typing import Any

from kvrelay.config import Settings
from kvrelay.engine.models.spec import ModelSpec
from kvrelay.errors import ConfigError
from kvrelay.types import KvLayout, Role


def check_fit(spec: ModelSpec, settings: Settings, role: Role) -> None:
    """For the workers of one role. Raises ConfigError, naming the key.

    When the wanted context is longer than the model's, or the KV memory holds no two blocks.
    """
    own = settings.for_role(role)
    wanted, engine = own.model.max_model_len, own.engine
    if wanted is not None and wanted > spec.max_position:
        raise ConfigError(
            f"model.max_model_len: {wanted} tokens, but this model's longest context is {spec.max_position}"
        )
    if engine.kv_memory_bytes is None:
        return  # the engine looks what is free once the weights are there
    layout = KvLayout(
        spec.num_layers,
        1,
        engine.block_size,
        spec.num_kv_heads,
        spec.head_dim,
        own.kv_dtype,
        is_latent=spec.latent is not None,
    )
    num_blocks_for(engine.kv_memory_bytes, layout.block_bytes, key=settings.key_of(role, "kv_memory"))


def num_blocks_for(budget_bytes: int, block_bytes: int, *, key: str = "engine.kv_memory") -> int:
    """How many blocks a byte budget holds. Raises ConfigError, naming `key`, when fewer than two."""
    blocks = budget_bytes // block_bytes
    if blocks < 2:
        raise ConfigError(
            f"{key}: {budget_bytes} bytes hold {blocks} blocks of {block_bytes} bytes; at least 2 are needed"
        )
    return blocks


def check_backend(backend: Any, settings: Settings, role: Role) -> None:
    """For a role's backend, or its class. Raises ConfigError, naming the key.

    When it does not take the role's layout of the cache.
    """
    name, layout = backend.name, settings.for_role(role).engine.kv_layout
    if layout not in backend.kv_layouts:
        known, key = " or ".join(backend.kv_layouts), settings.key_of(role, "kv_layout")
        raise ConfigError(f"{key}: the {name} backend takes {known}, not {layout}: choose that, or another backend")
