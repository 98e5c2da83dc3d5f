"""What becomes of a pre-empted group of sequences: swapped, computed again, or handed back to a prefill worker. Pure.

Costs are seconds that all sequences of the worker lose together: the group's own delay, and what of it keeps the engine from
everybody else. All speeds are measured ones and arguments; no clock.
"""

import enum
from dataclasses import dataclass


class Way(enum.StrEnum):
    """What happens to a pre-empted sequence's KV."""

    SWAP = "swap"  # to host memory, and back later
    RECOMPUTE = "recompute"  # dropped; what no cache holds is computed again
    HAND_BACK = "hand-back"  # dropped; a prefill worker computes it and sends it again


WAYS = tuple(Way)


@dataclass(frozen=True, slots=True)
class Stake:
    """What one group would lose or move, summed over its sequences.

    num_tokens: with KV here. shared_tokens: of those, in blocks that others hold, too, so that they are found again.
    tier_tokens: of the rest, in the host tier. swap_bytes: of the blocks that a swap copies, each way. hop_bytes: of the KV that
    a prefill worker would send. num_others: sequences that run meanwhile.
    """

    num_tokens: int
    shared_tokens: int = 0
    tier_tokens: int = 0
    tier_bytes: int = 0
    swap_bytes: int = 0
    hop_bytes: int = 0
    num_others: int = 0
    can_swap: bool = False
    can_hand_back: bool = False


@dataclass(frozen=True, slots=True)
class Rates:
    """Measured speeds; 0: not measured. Latencies: of a swap or a hop however little it moves."""

    save_bytes_per_s: float = 0.0
    load_bytes_per_s: float = 0.0
    compute_tokens_per_s: float = 0.0
    remote_tokens_per_s: float = 0.0
    hop_bytes_per_s: float = 0.0
    hop_latency_s: float = 0.0
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


def swap_cost(stake: Stake, rates: Rates) -> Cost:
    """Out and back again; a step waits for either."""
    seconds = _over(stake.swap_bytes, rates.save_bytes_per_s) + _over(stake.swap_bytes, rates.load_bytes_per_s)
    seconds += rates.swap_latency_s
    return Cost(seconds, seconds)


def recompute_cost(stake: Stake, rates: Rates) -> Cost:
    """What no cache holds is computed among the others' steps, what the host tier holds is brought up."""
    compute_s = _over(stake.num_tokens - stake.shared_tokens - stake.tier_tokens, rates.compute_tokens_per_s)
    seconds = compute_s + _over(stake.tier_bytes, rates.load_bytes_per_s or rates.save_bytes_per_s)
    return Cost(seconds, seconds)


def hand_back_cost(stake: Stake, rates: Rates) -> Cost:
    """Another worker computes everything; this one reads it beside its steps."""
    prefill_s = _over(stake.num_tokens, rates.remote_tokens_per_s)
    hop_s = rates.hop_latency_s + _over(stake.hop_bytes, rates.hop_bytes_per_s)
    return Cost(prefill_s + hop_s, 0.0)


def costs(stake: Stake, rates: Rates) -> dict[Way, Cost]:
    """Of the ways that can be gone; recomputing always can."""
    found = {Way.RECOMPUTE: recompute_cost(stake, rates)}
    if stake.can_swap:
        found[Way.SWAP] = swap_cost(stake, rates)
    if stake.can_hand_back:
        found[Way.HAND_BACK] = hand_back_cost(stake, rates)
    return found


def choose(stake: Stake, rates: Rates, *, only: Way | None = None) -> Way:
    """The way that costs all sequences the least. only: that one, where it can be gone.

    Of equal costs, and where nothing was measured, swap comes first, then recompute: neither asks anything of another worker.
    """
    found = costs(stake, rates)
    if only is not None:
        return only if only in found else Way.RECOMPUTE
    order = [way for way in WAYS if way in found]
    return min(order, key=lambda way: (found[way].total_s(stake.num_others), order.index(way)))


def crossover_tokens(rates: Rates, *, bytes_per_token: float, block_tokens: int, num_others: int = 0) -> int | None:
    """The least number of tokens from which on a swap is cheaper than computing again; None: up to 2^17 it never is."""

    def swaps(num_tokens: int) -> bool:
        num_blocks = -(-num_tokens // block_tokens)
        num_bytes = int(num_blocks * block_tokens * bytes_per_token)
        stake = Stake(num_tokens, swap_bytes=num_bytes, num_others=num_others, can_swap=True)
        return choose(stake, rates) is Way.SWAP

    return next((num_tokens for num_tokens in _lengths(block_tokens) if swaps(num_tokens)), None)


def _lengths(block_tokens: int) -> list[int]:
    """Every one up to four blocks, then whole blocks: the cost of a swap grows by blocks."""
    few = list(range(1, 4 * block_tokens))
    return few + [4 * block_tokens + step * block_tokens for step in range(0, (1 << 17) // block_tokens, 1)]
