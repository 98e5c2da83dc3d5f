"""Carries out what `preemption.py` decides: which way a pre-empted group goes, its copies to the swap area and back. Pure.

Between the scheduler, which owns the queues, and `kvcache.swap`, which knows blocks. Lives on the engine's thread.
"""

from array import array
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from kvrelay.engine.scheduling.preemption_policy import PreemptionMode, PreemptionRates, VictimGroup, choose
from kvrelay.engine.scheduling.sequence import Sequence as Seq
from kvrelay.engine.scheduling.tier_requests import LowerTiers
from kvrelay.kvcache.memory.swap import SwapArea, SwappedBlocks
from kvrelay.kvcache.pool.block_pool import BlockPool
from kvrelay.kvcache.pool.ledger import BlockIds
from kvrelay.types import BlockId

MAX_RETURNS = 2  # of one request: each costs a whole prefill elsewhere


@dataclass(slots=True)
class MeasuredSpeeds:
    """What others have measured for the choice; 0: not yet."""

    compute_tokens_per_s: float = 0.0
    transfer_bytes_per_s: float = 0.0
    transfer_latency_s: float = 0.0


class Preemptor:
    """One engine's. `only`: always that way, where it can be gone; None: the cheapest."""

    def __init__(self, pool: BlockPool, block_size: int) -> None:
        self._pool, self._block_size = pool, block_size
        self.only: PreemptionMode | None = None
        self.area: SwapArea | None = None
        self.measured = MeasuredSpeeds()
        self.token_bytes = 0.0  # of KV
        self.num_by_mode: Counter[PreemptionMode] = Counter()  # sequences
        self.recomputed_tokens = 0  # dropped with a sequence, or found wrong

    # ---- the choice

    def mode_for(self, group: Sequence[Seq], *, num_others: int, tiers: LowerTiers | None) -> PreemptionMode:
        """Where these, which are pre-empted together, go."""
        speed = min((seq.prefill_tokens_per_s for seq in group), default=0.0)
        return choose(self._victim_group(group, num_others, tiers), self._rates(speed), only=self.only)

    def _victim_group(self, group: Sequence[Seq], num_others: int, tiers: LowerTiers | None) -> VictimGroup:
        tokens = shared = below = copied = 0
        for seq in group:
            num_shared = self._num_shared(seq)
            num_computed = seq.blocks_for(seq.num_computed)
            num_full = seq.num_computed // self._block_size
            is_kept = tiers is not None and seq.request.sampling.prompt_logprobs is None
            num_below = tiers.num_below(seq, num_shared, num_full) if tiers is not None and is_kept else 0
            tokens += seq.num_computed
            shared += num_shared * self._block_size
            below += num_below
            copied += num_computed - num_shared
        block_bytes = self.token_bytes * self._block_size
        area = self.area
        return VictimGroup(
            tokens, shared, below * self._block_size, int(below * block_bytes), int(copied * block_bytes),
            int(tokens * self.token_bytes), num_others,
            can_swap=area is not None and copied <= area.num_free and all(_may_move(seq) for seq in group),
            can_return=all(_may_go(seq) for seq in group),
        )  # fmt: skip

    def _rates(self, remote_tokens_per_s: float) -> PreemptionRates:
        area, measured = self.area, self.measured
        return PreemptionRates(
            save_bytes_per_s=area.save_bytes_per_s if area is not None else 0.0,
            load_bytes_per_s=area.load_bytes_per_s if area is not None else 0.0,
            compute_tokens_per_s=measured.compute_tokens_per_s,
            remote_tokens_per_s=remote_tokens_per_s,
            transfer_bytes_per_s=measured.transfer_bytes_per_s,
            transfer_latency_s=measured.transfer_latency_s,
            swap_latency_s=area.latency_s if area is not None else 0.0,
        )

    def _num_shared(self, seq: Seq) -> int:
        """Blocks from its first on that can be matched and that somebody else holds, too."""
        named = self._pool.match(seq.block_chain(), seq.num_computed // self._block_size).blocks
        count = 0
        for own, other in zip(seq.blocks, named, strict=False):
            if own != other or self._pool.num_holders(own) < 2:
                break
            count += 1
        return count

    # ---- out

    def swap_out(self, group: Sequence[Seq], sources: Mapping[int, int]) -> bool:
        """Save all of them, or none: False when there is no room.

        sources: of blocks whose content is still to be copied from another, that other one.
        """
        area = self.area
        if area is None:
            return False
        saved: list[SwappedBlocks] = []
        for seq in group:
            first = self._num_shared(seq)
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

    # ---- back

    def hit(self, seq: Seq) -> "BlockIds | None":
        """Cached blocks that spare a swapped sequence copies; None: what it shared with others is gone, and it begins anew."""
        swapped = seq.swapped
        assert swapped is not None
        named = self._pool.match(seq.block_chain(), min(seq.num_computed // self._block_size, swapped.end_block))
        if len(named) < swapped.first_block:
            return None
        self._pool.use(named, seq.request.hints.priority)
        return array("i", named.blocks)

    def bring_back(self, seq: Seq, num_hit: int) -> None:
        """It holds all blocks again, the first ones with their KV: the rest is on its way from now on."""
        swapped, area = seq.swapped, self.area
        assert swapped is not None and area is not None
        blocks = [BlockId(block) for block in seq.blocks[num_hit : swapped.end_block]]
        seq.swapped, seq.load = None, area.load(swapped, num_hit, blocks)
        seq.num_hashed_blocks = num_hit

    def drop(self, seq: Seq) -> None:
        """It is computed again, or has ended."""
        if seq.swapped is not None and self.area is not None:
            self.area.drop(seq.swapped)
            seq.swapped = None


def _may_move(seq: Seq) -> bool:
    """Not while it is being brought up, nor where a transfer has been told which blocks hold its KV."""
    return seq.load is None and not seq.hold


def _may_go(seq: Seq) -> bool:
    """Whether a prefill worker has computed its prompt and may do so again."""
    return seq.prefill_tokens_per_s > 0 and seq.request.num_prefill_returns < MAX_RETURNS and not seq.hold
