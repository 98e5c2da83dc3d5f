"""Whether a model fits the settings, told before anything is loaded. Pure: imports no torch."""

from kvrelay.config import Settings
from kvrelay.engine.spec import ModelSpec
from kvrelay.errors import ConfigError
from kvrelay.types import KvLayout


def dtype_name(settings: Settings) -> str:
    """The type of weights and KV."""
    return "bfloat16" if settings.model.dtype == "auto" else settings.model.dtype


def check_fit(spec: ModelSpec, settings: Settings) -> None:
    """Raises ConfigError when the wanted context is longer than the model's, or the KV memory holds no two blocks."""
    wanted, engine = settings.model.max_model_len, settings.engine
    if wanted is not None and wanted > spec.max_position:
        raise ConfigError(
            f"model.max_model_len: {wanted} tokens, but this model's longest context is {spec.max_position}"
        )
    num_blocks_for(engine.kv_memory_bytes, _layout(spec, engine.block_size, dtype_name(settings)).block_bytes)


def num_blocks_for(budget_bytes: int, block_bytes: int) -> int:
    """How many blocks a byte budget holds. Raises ConfigError when fewer than two."""
    blocks = budget_bytes // block_bytes
    if blocks < 2:
        raise ConfigError(
            f"engine.kv_memory: {budget_bytes} bytes hold {blocks} blocks of {block_bytes} bytes; at least 2 are needed"
        )
    return blocks


def _layout(spec: ModelSpec, block_size: int, dtype: str) -> KvLayout:
    return KvLayout(spec.num_layers, 1, block_size, spec.num_kv_heads, spec.head_dim, dtype)
