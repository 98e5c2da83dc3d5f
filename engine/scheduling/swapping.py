"""Preempted sequences' KV: which way out costs the least, and the copies to the swap area and back. Pure.

Between the scheduler, which owns the queues, and `kvcache.memory.swap`, which knows blocks. Lives on the engine's
thread.
"""

from array import array
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from kvrelay.engine.scheduling.preemption_policy import PreemptionMode, PreemptionRates, VictimGroup, choose
from kvrelay.engine.scheduling.sequence import Sequence as Seq
from kvrelay.engine.scheduling.tier_requests import LowerTiers
from kvrelay.kvcache.memory.swap import SwapArea, SwappedBlocks
from kvrelay.kvcache.pool.block_pool import BlockPool
from kvrelay.kvcache.pool.ledger import BlockIds
from kvrelay.types import BlockId

MAX_RETURNS = 2  # of one request to prefill: each costs a whole prefill elsewhere


@dataclass(slots=True)
class MeasuredSpeeds:
    """Speeds that the engine and its transfers have measured; 0: not yet."""

    compute_tokens_per_s: float = 0.0
    transfer_bytes_per_s: float = 0.0
    transfer_latency_s: float = 0.0


class PreemptionChoice:
    """Chooses the preemption mode of a group of sequences.

    Args:
        token_bytes: KV bytes of one token.
        only: always this mode, where it is possible; None: the cheapest.
    """

    def __init__(
        self, pool: BlockPool, speeds: MeasuredSpeeds, *, token_bytes: float, only: PreemptionMode | None,
        area: SwapArea | None, tiers: LowerTiers | None,
    ) -> None:  # fmt: skip
        self._pool, self._speeds, self._area, self._tiers = pool, speeds, area, tiers
        self._token_bytes = token_bytes
        self.only = only

    def mode_for(self, group: Sequence[Seq], *, num_others: int) -> PreemptionMode:
        """The mode for sequences that are preempted together. num_others: sequences that keep running."""
        speed = min((seq.prefill_tokens_per_s for seq in group), default=0.0)
        return choose(self._victims(group, num_others), self._rates(speed), only=self.only)

    def _victims(self, group: Sequence[Seq], num_others: int) -> VictimGroup:
        block_size, tiers = self._pool.block_size, self._tiers
        tokens = shared = lower = copied = 0
        for seq in group:
            num_shared_blocks = num_shared(self._pool, seq)
            num_computed = seq.blocks_for(seq.num_computed)
            num_full = seq.num_computed // block_size
            is_kept = tiers is not None and seq.request.sampling.prompt_logprobs is None
            num_lower = tiers.num_below(seq, num_shared_blocks, num_full) if tiers is not None and is_kept else 0
            tokens += seq.num_computed
            shared += num_shared_blocks * block_size
            lower += num_lower
            copied += num_computed - num_shared_blocks
        block_bytes = self._token_bytes * block_size
        area = self._area
        return VictimGroup(
            num_tokens=tokens,
            shared_tokens=shared,
            tier_tokens=lower * block_size,
            tier_bytes=int(lower * block_bytes),
            swap_bytes=int(copied * block_bytes),
            transfer_bytes=int(tokens * self._token_bytes),
            num_others=num_others,
            can_swap=area is not None and copied <= area.num_free and all(_may_swap(seq) for seq in group),
            can_return=all(_may_return(seq) for seq in group),
        )

    def _rates(self, remote_tokens_per_s: float) -> PreemptionRates:
        area, speeds = self._area, self._speeds
        return PreemptionRates(
            save_bytes_per_s=area.save_bytes_per_s if area is not None else 0.0,
            load_bytes_per_s=area.load_bytes_per_s if area is not None else 0.0,
            compute_tokens_per_s=speeds.compute_tokens_per_s,
            remote_tokens_per_s=remote_tokens_per_s,
            transfer_bytes_per_s=speeds.transfer_bytes_per_s,
            transfer_latency_s=speeds.transfer_latency_s,
            swap_latency_s=area.latency_s if area is not None else 0.0,
        )


class Swapping:
    """Copies preempted sequences' KV to the swap area and back. area: None: nothing can be swapped."""

    def __init__(self, pool: BlockPool, area: SwapArea | None) -> None:
        self._pool = pool
        self.area = area

    def swap_out(self, group: Sequence[Seq], sources: Mapping[int, int]) -> bool:
        """Save all of these sequences, or none: False when there is no room.

        sources: for blocks whose content is still to be copied from another block, that other block.
        """
        area = self.area
        if area is None:
            return False
        saved: list[SwappedBlocks] = []
        for seq in group:
            first = num_shared(self._pool, seq)
            blocks = seq.blocks[first : seq.blocks_for(seq.num_computed)]
            swapped = area.save(first, [sources.get(block, block) for block in blocks])
            if swapped is None:
                break
            saved.append(swapped)
        if len(saved) < len(group):
            for swapped in saved:
                area.drop(swapped)
            return False
        for seq, swapped in zip(group, saved, strict=True):
            seq.swapped = swapped
        return True

    def match(self, seq: Seq) -> "BlockIds | None":
        """Cached blocks that need not be copied back;

        None: blocks that it shared are gone, so it must be recomputed.
        """
        swapped = seq.swapped
        assert swapped is not None
        cached = self._pool.match(seq.block_chain(), min(seq.num_computed // seq.block_size, swapped.end_block))
        if len(cached) < swapped.first_block:
            return None
        self._pool.use(cached, seq.request.hints.priority)
        return array("i", cached.blocks)

    def swap_in(self, seq: Seq, num_cached: int) -> None:
        """`seq` holds all its blocks again, the first of them cached: the copies of the others begin."""
        swapped, area = seq.swapped, self.area
        assert swapped is not None and area is not None
        blocks = [BlockId(block) for block in seq.blocks[num_cached : swapped.end_block]]
        seq.swapped, seq.load = None, area.load(swapped, num_cached, blocks)
        seq.num_hashed_blocks = num_cached

    def drop(self, seq: Seq) -> None:
        """Forget what was saved of `seq`: it is recomputed, or has ended."""
        if seq.swapped is not None and self.area is not None:
            self.area.drop(seq.swapped)
            seq.swapped = None

    def check(self, seqs: Sequence[Seq]) -> None:
        """Raise AssertionError unless the area holds just what these sequences have there."""
        if self.area is not None:
            self.area.check([seq.swapped for seq in seqs if seq.swapped is not None])


def num_shared(pool: BlockPool, seq: Seq) -> int:
    """How many of the first blocks of `seq` are cached and held by another sequence, too."""
    cached = pool.match(seq.block_chain(), seq.num_computed // seq.block_size).blocks
    count = 0
    for own, other in zip(seq.blocks, cached, strict=False):
        if own != other or pool.num_holders(own) < 2:
            break
        count += 1
    return count


def _may_swap(seq: Seq) -> bool:
    """Not while its blocks are being loaded, nor once a transfer knows which blocks hold its KV."""
    return seq.load is None and not seq.hold


def _may_return(seq: Seq) -> bool:
    """Whether a prefill worker has computed its prompt and may do so again."""
    return seq.prefill_tokens_per_s > 0 and seq.request.num_prefill_returns < MAX_RETURNS and not seq.hold
