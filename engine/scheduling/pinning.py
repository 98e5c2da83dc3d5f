"""The pins of one engine: prompts that their requests, or a prefetch, want kept, in the pool and in the host tier.

Pure.
"""

from kvrelay.engine.scheduling.sequence import Sequence
from kvrelay.engine.scheduling.tier_requests import LowerTiers
from kvrelay.hashing import HASH_BYTES, HashChain
from kvrelay.kvcache.index.pins import PinRecord, PinRecords
from kvrelay.kvcache.pool.block_pool import BlockPool

_RECORDS_PER_BLOCK = 4  # hashes that records may have, for each block of the pool
_MAX_ENDED = 4096


class Pinning:
    """Makes pins and ends them. Each tier keeps its own quotas and pins nothing beyond them."""

    def __init__(self, pool: BlockPool, tiers: LowerTiers | None) -> None:
        self._pool, self._tiers = pool, tiers
        self._records = PinRecords(_RECORDS_PER_BLOCK * pool.num_blocks)
        self._ended: dict[str, None] = {}  # sessions; requests of them may still come

    def pin_prompt(self, seq: Sequence) -> None:
        """The prompt of `seq` is computed: keep its KV for as long as its request asks, from now on."""
        hints, count = seq.request.hints, seq.request.num_prompt_tokens // seq.block_size
        seq.is_pinned = True
        if hints.session in self._ended:
            return
        self._pool.pin(seq.block_chain(), count, hints.pin_s)
        if self._tiers is not None:
            self._tiers.pin(seq, count, hints.pin_s)
        self._record(seq, count, hints.pin_s)

    def pin_ahead(self, seq: Sequence, num_in_pool: int, ttl_s: float) -> None:
        """Keep the first blocks of a prompt, which are in the pool, for a request that is yet to come."""
        if num_in_pool:
            self._pool.pin(seq.block_chain(), num_in_pool, ttl_s)
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
                tiers.unpin(record.hashes(), shared)
        for record in others:
            self._pool.pin(_chain(record), len(record), record.until_s - now_s)
            if tiers is not None:
                tiers.pin_hashes(record.hashes(), record.until_s - now_s)

    def _record(self, seq: Sequence, count: int, ttl_s: float) -> None:
        now_s, chain = self._pool.now_s, seq.block_chain()
        record = PinRecord(
            seq.request.hints.session, chain.root, bytes(chain.data[: count * HASH_BYTES]), now_s + ttl_s
        )
        if record.digests:
            self._records.add(record, now_s)


def _chain(record: PinRecord) -> HashChain:
    return HashChain(record.root, (record.digests,))
