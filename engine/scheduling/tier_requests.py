"""How sequences use the tiers below their engine's pool: what they fetch, load, pin, and leave behind. Pure.

Between the scheduler, which knows sequences, and `kvcache.tiers`, which knows blocks. Lives on the engine's thread.
"""

from collections.abc import Callable, Sequence

from kvrelay.engine.scheduling.sequence import Sequence as Seq
from kvrelay.hashing import HASH_BYTES, HashChain, tenant_name
from kvrelay.kvcache.index.pins import PinRecord, PinRecords
from kvrelay.kvcache.pool.block_pool import BlockPool
from kvrelay.kvcache.tiers.controller import TierController
from kvrelay.types import BlockHash, BlockId, BlockMeta, IndexedBlock


class LowerTiers:
    """The lower tiers of one engine, for its sequences."""

    def __init__(self, controller: TierController, block_size: int) -> None:
        self.controller, self.host, self.fetches = controller, controller.host, controller.fetches
        self._block_size = block_size
        self.hit_tokens = 0

    def arrived(self, seq: Seq, num_in_pool: int) -> None:
        """`seq` is queued; its first blocks are in the pool. Fetch the rest from the stores."""
        hashes = self._usable(seq) if self.fetches.is_on else []
        if len(hashes) > num_in_pool:
            metas = [self._meta(seq, hashes, index) for index in range(len(hashes))]
            self.fetches.fetch(seq.request_id, hashes, metas, num_in_pool)

    def is_waiting(self, seq: Seq) -> bool:
        """Whether `seq` is skipped until its blocks have come."""
        return self.fetches.is_waiting(seq.request_id)

    @staticmethod
    def _usable(seq: Seq) -> Sequence[BlockHash]:
        """Hashes of the blocks that `seq` could load; none where every prompt token's logits are asked for."""
        return [] if seq.request.sampling.prompt_logprobs is not None else seq.block_chain().hashes()

    def _meta(self, seq: Seq, hashes: Sequence[BlockHash] | HashChain, index: int) -> BlockMeta:
        parent = hashes[index - 1] if index else None
        end = (index + 1) * self._block_size
        root = seq.chain.root
        return BlockMeta(parent, end, seq.request.hints.priority, tenant_name(root), root=root)

    def num_below(self, seq: Seq, num_in_pool: int, most: int) -> int:
        """How many blocks after those in the pool the host tier has, `most` blocks in all."""
        return self.host.num_here(seq.block_chain().hashes(num_in_pool, most), 0)

    def bring_up(self, seq: Seq, num_in_pool: int, blocks: Sequence[int]) -> None:
        """Load blocks of `seq` from the host tier into these fresh blocks, which it holds."""
        hashes = seq.block_chain().hashes(num_in_pool, num_in_pool + len(blocks))
        seq.load = self.controller.load(hashes, [BlockId(block) for block in blocks])
        seq.num_loaded_blocks = len(blocks)
        self.hit_tokens += len(blocks) * self._block_size

    def admitted(self, seq: Seq, num_in_pool: int) -> None:
        """`seq` has its blocks. The first were in the pool, and under "selective" are saved."""
        controller, rules, hints = self.controller, self.controller.rules, seq.request.hints
        self.fetches.end(seq.request_id)
        hashes = self._usable(seq)
        controller.used(hashes[: num_in_pool + seq.num_loaded_blocks], hints.priority, keep=hints.keep)
        if not hints.keep or rules.write != "selective":
            return
        found = zip(hashes[:num_in_pool], seq.blocks, strict=False)
        controller.save([IndexedBlock(one, BlockId(b), self._meta(seq, hashes, i)) for i, (one, b) in enumerate(found)])

    def filled(self, seq: Seq, first: int, end: int) -> None:
        """Its blocks first .. end - 1 are full and registered in the prefix cache."""
        if seq.request.hints.keep and self.controller.rules.write == "write-through":
            self.controller.save(self._indexed(seq, first, end))

    def _indexed(self, seq: Seq, first: int, end: int) -> list[IndexedBlock]:
        chain = seq.block_chain()
        return [IndexedBlock(chain[i], BlockId(seq.blocks[i]), self._meta(seq, chain, i)) for i in range(first, end)]

    def pin(self, seq: Seq, count: int, ttl_s: float) -> None:
        """Keep its first blocks, which it holds, in the host tier for so long; missing ones are saved."""
        self.controller.pin(self._indexed(seq, 0, count), self.host.now_s() + ttl_s)

    def keep_ahead(self, seq: Seq, num_in_pool: int, ttl_s: float) -> int:
        """The number of blocks after those in the pool that the host tier has; they stay there for so long."""
        hashes = seq.block_chain().hashes()
        count = self.host.num_here(hashes, num_in_pool)
        self.host.pin(hashes[num_in_pool : num_in_pool + count], self.host.now_s() + ttl_s)
        return count

    def prefetch(self, seq: Seq, num_here: int, ttl_s: float, on_found: Callable[[int], None]) -> bool:
        """Fetch its blocks after the first ones from the stores, and keep them for so long. See Fetches.prefetch."""
        hashes = seq.block_chain().hashes()
        metas = [self._meta(seq, hashes, index) for index in range(num_here, len(hashes))]
        until_s = self.host.now_s() + ttl_s
        return self.fetches.prefetch(seq.request_id, hashes[num_here:], metas, until_s, on_found)

    def gone(self, seq: Seq) -> None:
        """`seq` releases its blocks, or left its queue."""
        seq.end_load()
        seq.num_loaded_blocks = 0
        self.fetches.end(seq.request_id)

    def end_step(self, pool: BlockPool, prefill_tokens_per_s: float) -> None:
        """Under write-back: save what would be evicted next. prefill_tokens_per_s: measured."""
        self.controller.end_step(pool.eviction_candidates, prefill_tokens_per_s)


_RECORDS_PER_BLOCK = 4  # hashes that records may have, for each block of the pool
_MAX_ENDED = 4096


class Pinning:
    """Makes pins and ends them. Each tier keeps its own quotas and pins nothing beyond them."""

    def __init__(self, pool: BlockPool, tiers: LowerTiers | None) -> None:
        self._pool, self._tiers = pool, tiers
        self._records = PinRecords(_RECORDS_PER_BLOCK * pool.num_blocks)
        self._ended: dict[str, None] = {}  # sessions; requests of them may still come

    def pin_prompt(self, seq: Seq) -> None:
        """The prompt of `seq` is computed: keep its KV for as long as its request asks, from now on."""
        hints, count = seq.request.hints, seq.request.num_prompt_tokens // seq.block_size
        seq.is_pinned = True
        if hints.session in self._ended:
            return
        self._pool.pin(seq.block_chain(), count, hints.pin_s, hints.pin_share)
        if self._tiers is not None:
            self._tiers.pin(seq, count, hints.pin_s)
        self._record(seq, count, hints.pin_s)

    def pin_ahead(self, seq: Seq, num_in_pool: int, ttl_s: float) -> None:
        """Keep the first blocks of a prompt, which are in the pool, for a request that is yet to come."""
        if num_in_pool:
            self._pool.pin(seq.block_chain(), num_in_pool, ttl_s, seq.request.hints.pin_share)
        self._record(seq, len(seq.block_chain()), ttl_s)

    def end(self, session: str) -> None:
        """End the pins of a session, and make none for it any more.

        Blocks that other requests have pinned, too, stay.
        """
        if not session:
            return
        self._ended[session] = None
        if len(self._ended) > _MAX_ENDED:
            del self._ended[next(iter(self._ended))]
        now_s, tiers = self._pool.now_s, self._tiers
        ended, others = self._records.end(session, now_s)
        shared = {digest for record in others for digest in record.hashes()}
        for record in ended:
            self._pool.unpin(_chain(record), len(record))
            if tiers is not None:
                tiers.controller.unpin(record.hashes(), shared)
        for record in others:
            self._pool.pin(_chain(record), len(record), record.until_s - now_s, record.pin_share)
            if tiers is not None:
                tiers.host.pin(record.hashes(), tiers.host.now_s() + record.until_s - now_s)

    def _record(self, seq: Seq, count: int, ttl_s: float) -> None:
        now_s, chain, hints = self._pool.now_s, seq.block_chain(), seq.request.hints
        digests = bytes(chain.data[: count * HASH_BYTES])
        record = PinRecord(hints.session, chain.root, digests, now_s + ttl_s, hints.pin_share)
        if record.digests:
            self._records.add(record, now_s)


def _chain(record: PinRecord) -> HashChain:
    return HashChain(record.root, (record.digests,))
