"""What becomes of a preempted group of sequences: swapped, recomputed, or returned to prefill. Pure.

Costs are seconds that all sequences of the worker lose together: the group's own delay, and what of it keeps the
engine from all other sequences. All speeds are measured ones and arguments; no clock.
"""

import enum
from dataclasses import dataclass


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
