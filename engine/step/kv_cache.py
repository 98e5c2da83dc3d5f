"""An engine's KV cache: its memory, the pool of its blocks, and the fingerprint by which engines compare theirs."""

from dataclasses import dataclass

from kvrelay.kvcache.memory.storage import KvStorage
from kvrelay.kvcache.pool.block_pool import BlockPool
from kvrelay.types import Fingerprint, KvMemory


@dataclass(frozen=True, slots=True)
class KvCache:
    """One engine's."""

    storage: KvStorage
    pool: BlockPool
    fingerprint: Fingerprint

    @property
    def memory(self) -> KvMemory:
        return self.storage.memory
