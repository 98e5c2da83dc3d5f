"""What becomes of a preempted group of sequences: swapped, recomputed, or returned to prefill. Pure.

Costs are seconds that all sequences of the worker lose together: the group's own delay, and what of it keeps the
engine from all other sequences. All speeds are measured ones and arguments; no clock.
"""

import enum
from dataclasses import dataclass

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


PREEMPTION_MODES = tuple(PreemptionMode)


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


@dataclass(frozen=True, slots=True)
class PreemptionRates:
    """Measured speeds; 0: not measured. Latencies: of a swap or a KV transfer, however little it moves."""

    save_bytes_per_s: float = 0.0
    load_bytes_per_s: float = 0.0
    compute_tokens_per_s: float = 0.0
    remote_tokens_per_s: float = 0.0
    transfer_bytes_per_s: float = 0.0
    transfer_latency_s: float = 0.0
    swap_latency_s: float = 0.0


@dataclass(frozen=True, slots=True)
class Cost:
    """delay_s: the group is back later by so much. stall_s: of it, the engine does nothing for others."""

    delay_s: float
    stall_s: float

    def total_s(self, num_others: int) -> float:
        return self.delay_s + (num_others * self.stall_s if num_others else 0.0)  # infinity times none is none


def _over(amount: float, speed: float) -> float:
    """Seconds; infinite when the speed was not measured."""
    if amount <= 0:
        return 0.0
    return amount / speed if speed > 0 else float("inf")


def swap_cost(victims: VictimGroup, rates: PreemptionRates) -> Cost:
    """Out and back again; a step waits for either."""
    seconds = _over(victims.swap_bytes, rates.save_bytes_per_s) + _over(victims.swap_bytes, rates.load_bytes_per_s)
    seconds += rates.swap_latency_s
    return Cost(seconds, seconds)


def recompute_cost(victims: VictimGroup, rates: PreemptionRates) -> Cost:
    """What no cache holds is computed among the others' steps, what the host tier holds is brought up."""
    compute_s = _over(victims.num_tokens - victims.shared_tokens - victims.tier_tokens, rates.compute_tokens_per_s)
    seconds = compute_s + _over(victims.tier_bytes, rates.load_bytes_per_s or rates.save_bytes_per_s)
    return Cost(seconds, seconds)


def return_cost(victims: VictimGroup, rates: PreemptionRates) -> Cost:
    """Another worker computes everything; this one reads it beside its steps."""
    prefill_s = _over(victims.num_tokens, rates.remote_tokens_per_s)
    transfer_s = rates.transfer_latency_s + _over(victims.transfer_bytes, rates.transfer_bytes_per_s)
    return Cost(prefill_s + transfer_s, 0.0)


def costs(victims: VictimGroup, rates: PreemptionRates) -> dict[PreemptionMode, Cost]:
    """Of the ways that can be gone; recomputing always can."""
    found = {PreemptionMode.RECOMPUTE: recompute_cost(victims, rates)}
    if victims.can_swap:
        found[PreemptionMode.SWAP] = swap_cost(victims, rates)
    if victims.can_return:
        found[PreemptionMode.RETURN_TO_PREFILL] = return_cost(victims, rates)
    return found


def choose(victims: VictimGroup, rates: PreemptionRates, *, only: PreemptionMode | None = None) -> PreemptionMode:
    """The way that costs all sequences the least. only: that one, where it can be gone.

    Of equal costs, and where nothing was measured, swap comes first, then recompute: neither asks anything of another
    worker.
    """
    found = costs(victims, rates)
    if only is not None:
        return only if only in found else PreemptionMode.RECOMPUTE
    order = [way for way in PREEMPTION_MODES if way in found]
    return min(order, key=lambda way: (found[way].total_s(victims.num_others), order.index(way)))


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


def num_shared(pool: BlockPool, seq: Sequence) -> int:
    """How many of the first blocks of `seq` are cached and held by another sequence, too."""
    cached = pool.match(seq.block_chain(), seq.num_computed // seq.block_size).blocks
    count = 0
    for own, other in zip(seq.blocks, cached, strict=False):
        if own != other or pool.num_holders(own) < 2:
            break
        count += 1
    return count


def _may_swap(seq: Sequence) -> bool:
    """Not while its blocks are being loaded, nor once a transfer knows which blocks hold its KV."""
    return seq.load is None and not seq.hold


def _may_return(seq: Sequence) -> bool:
    """Whether a prefill worker has computed its prompt and may do so again."""
    return seq.prefill_tokens_per_s > 0 and seq.request.num_prefill_returns < MAX_RETURNS and not seq.hold
