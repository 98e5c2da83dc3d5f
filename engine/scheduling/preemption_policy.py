"""What becomes of a preempted group of sequences: swapped, recomputed, or returned to prefill. Pure.

Costs are seconds that all sequences of the worker lose together: the group's own delay, and what of it keeps the
engine from all other sequences. All speeds are measured ones and arguments; no clock.
"""

import enum
import math
from dataclasses import dataclass, replace

from kvrelay.engine.scheduling.sequence import Sequence
from kvrelay.engine.scheduling.tier_requests import LowerTiers
from kvrelay.kvcache.memory.swap import SwapArea
from kvrelay.kvcache.pool.block_pool import BlockPool

MAX_RETURNS = 2  # of one request to prefill: each costs a whole prefill elsewhere


class PreemptionMode(enum.StrEnum):
    """What happens to a pre-empted sequence's KV."""

    SWAP = "swap"  # to host memory, and back later
    RECOMPUTE = "recompute"  # dropped; what no cache holds is computed again
    RETURN_TO_PREFILL = "return-to-prefill"  # dropped; a prefill worker computes it and sends it again


@dataclass(frozen=True, slots=True)
class VictimGroup:
    """What one group would lose or move, summed over its sequences.

    num_tokens: with KV here. shared_tokens: of those, in blocks that others hold, too, so that they are found again.
    tier_tokens: of the rest, in the host tier. swap_bytes: of the blocks that a swap copies, each way.
    transfer_bytes: of the KV that a prefill worker would send. num_others: sequences that run meanwhile.
    """

    num_tokens: int
    shared_tokens: int = 0
    tier_tokens: int = 0
    tier_bytes: int = 0
    swap_bytes: int = 0
    transfer_bytes: int = 0
    num_others: int = 0
    can_swap: bool = False
    can_return: bool = False


@dataclass(slots=True)
class MeasuredSpeeds:
    """Speeds that the engine, its swap area and its transfers have measured; 0: not yet.

    Latencies: of a swap or a KV transfer, however little it moves.
    """

    compute_tokens_per_s: float = 0.0
    transfer_bytes_per_s: float = 0.0
    transfer_latency_s: float = 0.0
    remote_tokens_per_s: float = 0.0
    save_bytes_per_s: float = 0.0
    load_bytes_per_s: float = 0.0
    swap_latency_s: float = 0.0


def _over(amount: float, speed: float) -> float:
    """Seconds; infinite when the speed was not measured."""
    if amount <= 0:
        return 0.0
    return amount / speed if speed > 0 else math.inf


def costs(victims: VictimGroup, speeds: MeasuredSpeeds) -> dict[PreemptionMode, float]:
    """Seconds of each possible mode; recomputing always is."""
    num_lost = victims.num_tokens - victims.shared_tokens - victims.tier_tokens
    recompute_s = _over(num_lost, speeds.compute_tokens_per_s)
    recompute_s += _over(victims.tier_bytes, speeds.load_bytes_per_s or speeds.save_bytes_per_s)
    num_delayed = 1 + victims.num_others  # the engine computes, or waits for copies, for all of them
    found = {PreemptionMode.RECOMPUTE: num_delayed * recompute_s}
    if victims.can_swap:  # out and back again
        swap_s = _over(victims.swap_bytes, speeds.save_bytes_per_s) + _over(victims.swap_bytes, speeds.load_bytes_per_s)
        found[PreemptionMode.SWAP] = num_delayed * (swap_s + speeds.swap_latency_s)
    if victims.can_return:  # another worker computes, and the KV is read beside this one's steps
        transfer_s = speeds.transfer_latency_s + _over(victims.transfer_bytes, speeds.transfer_bytes_per_s)
        found[PreemptionMode.RETURN_TO_PREFILL] = _over(victims.num_tokens, speeds.remote_tokens_per_s) + transfer_s
    return found


def choose(victims: VictimGroup, speeds: MeasuredSpeeds, *, only: PreemptionMode | None = None) -> PreemptionMode:
    """The mode that costs all sequences the least. only: that one, where it is possible.

    Of equal costs, and where nothing was measured, swap comes first, then recompute: neither asks anything of another
    worker.
    """
    found = costs(victims, speeds)
    if only is not None:
        return only if only in found else PreemptionMode.RECOMPUTE
    return min((mode for mode in PreemptionMode if mode in found), key=lambda mode: found[mode])


class PreemptionChoice:
    """Chooses the preemption mode of a group of sequences.

    Args:
        token_bytes: KV bytes of one token.
        only: always this mode, where it is possible; None: the cheapest.
    """

    def __init__(
        self,
        pool: BlockPool,
        speeds: MeasuredSpeeds,
        *,
        token_bytes: float,
        only: PreemptionMode | None,
        area: SwapArea | None,
        tiers: LowerTiers | None,
    ) -> None:
        self._pool, self._speeds, self._area, self._tiers = pool, speeds, area, tiers
        self._token_bytes = token_bytes
        self.only = only

    def mode_for(self, group: tuple[Sequence, ...], *, num_others: int) -> PreemptionMode:
        """The mode for sequences that are preempted together. num_others: sequences that keep running."""
        speed = min((seq.prefill_tokens_per_s for seq in group), default=0.0)
        return choose(self._victims(group, num_others), self._rates(speed), only=self.only)

    def _victims(self, group: tuple[Sequence, ...], num_others: int) -> VictimGroup:
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
        # not while blocks are being loaded, nor once a transfer knows which ones hold the KV
        is_bound = any(seq.load is not None or seq.hold for seq in group)
        may_return = all(
            seq.prefill_tokens_per_s > 0 and seq.request.num_prefill_returns < MAX_RETURNS and not seq.hold
            for seq in group
        )
        block_bytes, area = self._token_bytes * block_size, self._area
        return VictimGroup(
            num_tokens=tokens,
            shared_tokens=shared,
            tier_tokens=lower * block_size,
            tier_bytes=int(lower * block_bytes),
            swap_bytes=int(copied * block_bytes),
            transfer_bytes=int(tokens * self._token_bytes),
            num_others=num_others,
            can_swap=area is not None and copied <= area.num_free and not is_bound,
            can_return=may_return,
        )

    def _rates(self, remote_tokens_per_s: float) -> MeasuredSpeeds:
        if (area := self._area) is None:
            return replace(self._speeds, remote_tokens_per_s=remote_tokens_per_s)
        return replace(
            self._speeds,
            remote_tokens_per_s=remote_tokens_per_s,
            save_bytes_per_s=area.save_bytes_per_s,
            load_bytes_per_s=area.load_bytes_per_s,
            swap_latency_s=area.latency_s,
        )


def num_shared(pool: BlockPool, seq: Sequence) -> int:
    """How many of the first blocks of `seq` are cached and held by another sequence, too."""
    cached = pool.match(seq.block_chain(), seq.num_computed // seq.block_size).blocks
    count = 0
    for own, other in zip(seq.blocks, cached, strict=False):
        if own != other or pool.num_holders(own) < 2:
            break
        count += 1
    return count
