"""What an engine is configured with and made of, its KV cache, and what its steps return."""

from collections.abc import Callable
from dataclasses import dataclass, field

from kvrelay.engine.execution.launch import LayerHook
from kvrelay.engine.scheduling.fair_share import QueueRules
from kvrelay.engine.scheduling.scheduler import SchedulerConfig
from kvrelay.engine.scheduling.tier_requests import LowerTiers
from kvrelay.engine.speculation.draft_model import DraftModel
from kvrelay.grammar.compiler import GrammarCompiler
from kvrelay.kernels.backend import KvOrder
from kvrelay.kernels.common.quant_scheme import Scheme
from kvrelay.kvcache.memory.storage import KvStorage
from kvrelay.kvcache.memory.swap import SwapArea
from kvrelay.kvcache.pool.block_pool import BlockPool
from kvrelay.plane.messages import TokenOutput
from kvrelay.plane.reports import KvEvents, LoadReport
from kvrelay.types import BlockId, Fingerprint, KvMemory


@dataclass(frozen=True, slots=True)
class EngineConfig(SchedulerConfig):
    """What an engine needs to know, its scheduler's part first. Memory is bytes, the rest tokens and sequences."""

    block_size: int = 16
    kv_layout: KvOrder = "NHD"
    kv_memory_bytes: int = 256 << 20
    kv_memory_share: float | None = None  # of what is free once the weights are loaded, instead of `kv_memory_bytes`
    kv_dtype: str = "auto"  # the model's, or a key of KV_DTYPES
    quantization: Scheme | None = None  # of the products' weights
    max_model_len: int | None = None
    shares_weights: bool = False  # with other workers of the machine: see load_model
    prefix_caching: bool = True
    policy: str = "lru"  # of eviction: see kvcache/eviction/policies.py
    rules: QueueRules = field(default_factory=QueueRules)  # the order of the queues
    draft_tokens: int = 0  # at most, behind a sequence's next token in a step; 0: no speculation
    prompt_lookup: bool = True  # drafts from a sequence's own text


@dataclass(frozen=True, slots=True)
class Reservation:
    """Blocks reserved for a transfer. `target_blocks` are for blocks first_block .. num_blocks - 1 of the prompt."""

    request_id: str
    first_block: int
    num_blocks: int
    target_blocks: tuple[BlockId, ...]
    held_tokens: int
    waited_s: float


@dataclass(slots=True)
class StepResult:
    """What a call of `step` has done. Tokens and seconds are those of the steps that were collected in it.

    seconds: from a step's launch, or the end of the one before if that was later, until its tokens were here.
    """

    outputs: list[TokenOutput] = field(default_factory=list)
    reservations: list[Reservation] = field(default_factory=list)
    refused: list[tuple[str, str, str]] = field(default_factory=list)  # queued before: (request, reason, message)
    returned_to_prefill: list[str] = field(default_factory=list)  # requests that end here, to be prefilled again
    failed: list[tuple[str, str]] = field(default_factory=list)  # ended, with the reason: beyond their grammar's limits
    num_tokens: int = 0
    num_decode: int = 0
    seconds: float = 0.0
    is_stuck: bool = False  # nothing was done, and nothing can be until the engine is called otherwise
    events: KvEvents | None = None
    load: LoadReport | None = None


@dataclass(frozen=True, slots=True)
class KvCache:
    """One engine's."""

    storage: KvStorage
    pool: BlockPool
    fingerprint: Fingerprint

    @property
    def memory(self) -> KvMemory:
        return self.storage.memory


@dataclass(frozen=True, slots=True)
class Extensions:
    """What an engine may have beside its model and its pool.

    Args:
        tiers: makes the lower tiers of a KV cache; started.
        swap_area: makes the area to which preempted sequences are swapped; started.
        draft_model: drafts tokens.
        layer_hook: called as layers of held sequences become final.
        grammars: compiles grammars for its model; None: `load_engine` makes it, from the checkpoint's tokenizer.
    """

    tiers: Callable[[KvCache], LowerTiers | None] = lambda cache: None
    swap_area: Callable[[KvCache], SwapArea | None] = lambda cache: None
    draft_model: DraftModel | None = None
    layer_hook: LayerHook | None = None
    grammars: GrammarCompiler | None = None
