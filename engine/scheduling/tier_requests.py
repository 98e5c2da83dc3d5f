"""How sequences use the tiers below their engine's pool: what they ask for, bring up, and leave behind. Pure.

Between the scheduler, which knows sequences, and `kvcache.tiers`, which knows blocks. Lives on the engine's thread.
"""

from collections.abc import Callable, Sequence
from typing import Protocol

from kvrelay.engine.scheduling.sequence import Sequence as Seq
from kvrelay.hashing import HashChain, tenant_name
from kvrelay.kvcache.memory.loads import Load
from kvrelay.kvcache.pool.block_pool import BlockPool
from kvrelay.kvcache.stores.store import BlockMeta
from kvrelay.kvcache.tiers.controller import TierController
from kvrelay.kvcache.tiers.rules import IndexedBlock
from kvrelay.types import BlockHash, BlockId


class Sketch(Protocol):
    """Counts what was seen of late (kvcache/eviction/sketch.py)."""

    def touch(self, digest: BlockHash) -> int: ...


class LowerTiers:
    """One engine's tiers, from the point of view of its sequences."""

    def __init__(self, tiers: TierController, block_size: int, matches: Sketch) -> None:
        self.tiers, self._block_size, self._matches = tiers, block_size, matches
        self.hit_tokens = 0

    # ---- in line

    def arrived(self, seq: Seq, num_in_pool: int) -> None:
        """It is in line; the first blocks are in the pool. Ask the stores for the rest."""
        hashes = self._wanted(seq) if self.tiers.is_fetching else []
        if len(hashes) > num_in_pool:
            metas = [self._meta(seq, hashes, index) for index in range(len(hashes))]
            self.tiers.fetch(seq.request_id, hashes, metas, num_in_pool)

    def is_waiting(self, seq: Seq) -> bool:
        """Whether it stands back until its blocks have come."""
        return self.tiers.is_waiting(seq.request_id)

    @staticmethod
    def _wanted(seq: Seq) -> Sequence[BlockHash]:
        """Hashes of what a store could spare it; none where every prompt token's logits are asked for."""
        return [] if seq.request.sampling.prompt_logprobs is not None else seq.full_hashes()

    def _meta(self, seq: Seq, hashes: Sequence[BlockHash] | HashChain, index: int) -> BlockMeta:
        parent = hashes[index - 1] if index else None
        end = (index + 1) * self._block_size
        return BlockMeta(parent, end, seq.request.hints.priority, tenant_name(seq.chain.root))

    # ---- admitted

    def num_below(self, seq: Seq, num_in_pool: int, most: int) -> int:
        """How many blocks after those in the pool the host tier has, `most` blocks in all."""
        return self.tiers.match(seq.block_chain().hashes(num_in_pool, most), 0)

    def bring_up(self, seq: Seq, num_in_pool: int, blocks: Sequence[int]) -> None:
        """It holds these fresh blocks for what comes from the host tier."""
        hashes = seq.block_chain().hashes(num_in_pool, num_in_pool + len(blocks))
        seq.load = self.tiers.load(hashes, [BlockId(block) for block in blocks])
        seq.num_loaded_blocks = len(blocks)
        self.hit_tokens += len(blocks) * self._block_size

    def admitted(self, seq: Seq, num_in_pool: int) -> None:
        """It has its blocks; the first were in the pool, and are worth saving if that happens often."""
        self.tiers.end_fetch(seq.request_id)
        hashes = self._wanted(seq)
        hints = seq.request.hints
        self.tiers.used(hashes[: num_in_pool + seq.num_loaded_blocks], hints.priority, keep=hints.keep)
        if not hints.keep or self.tiers.rules.write != "selective":
            return
        often = [i for i in range(num_in_pool) if self._matches.touch(hashes[i]) >= self.tiers.rules.write_after_hits]
        self.tiers.save([IndexedBlock(hashes[i], BlockId(seq.blocks[i]), self._meta(seq, hashes, i)) for i in often])

    def filled(self, seq: Seq, first: int, end: int) -> None:
        """Its blocks first .. end - 1 are full and named in the pool."""
        if seq.request.hints.keep and self.tiers.rules.write == "write-through":
            self.tiers.write_through(self._named(seq, first, end))

    def _named(self, seq: Seq, first: int, end: int) -> list[IndexedBlock]:
        chain = seq.block_chain()
        return [IndexedBlock(chain[i], BlockId(seq.blocks[i]), self._meta(seq, chain, i)) for i in range(first, end)]

    def pin(self, seq: Seq, count: int, ttl_s: float) -> None:
        """Its first blocks, which it holds, stay in the host tier for so long; what is not there is saved."""
        self.tiers.pin(self._named(seq, 0, count), self.tiers.now_s() + ttl_s)

    # ---- ahead of its request

    def keep_ahead(self, seq: Seq, num_in_pool: int, ttl_s: float) -> int:
        """Blocks after those in the pool that the host tier has; they stay there for so long."""
        hashes = seq.full_hashes()
        count = self.tiers.match(hashes, num_in_pool)
        self.tiers.pin_cached(hashes[num_in_pool : num_in_pool + count], self.tiers.now_s() + ttl_s)
        return count

    def prefetch(self, seq: Seq, num_here: int, ttl_s: float, told: Callable[[int], None]) -> bool:
        """Have the stores bring its blocks after the first ones; what comes stays for so long. See Fetches.prefetch."""
        hashes = seq.full_hashes()
        metas = [self._meta(seq, hashes, index) for index in range(num_here, len(hashes))]
        until_s = self.tiers.now_s() + ttl_s
        return self.tiers.prefetch(seq.request_id, hashes[num_here:], metas, until_s, told)

    # ---- the end

    @staticmethod
    def settle(seq: Seq) -> Load | None:
        """Nothing is written into its blocks any more, on return; what was being brought up, if anything."""
        load, seq.load = seq.load, None
        if load is not None:
            load.wait_over()
        return load

    def gone(self, seq: Seq) -> None:
        """It gives its blocks back, or is in line no more."""
        self.settle(seq)
        seq.num_loaded_blocks = 0
        self.tiers.end_fetch(seq.request_id)

    # ---- for the engine

    def end_step(self, pool: BlockPool) -> None:
        """Under write-back: save what would be evicted next."""

        def coldest(count: int) -> list[IndexedBlock]:
            return [
                IndexedBlock(
                    cold.digest, cold.block, BlockMeta(cold.parent, cold.end_tokens, cold.priority, cold.tenant)
                )
                for cold in pool.eviction_candidates(count)
            ]

        self.tiers.write_back(coldest)
