"""Preemption: which running sequences lose their blocks when there are none left, and what becomes of them: swapped,
recomputed, or returned to prefill. Pure.

Costs are seconds that all sequences of the worker lose together: the group's own delay, and what of it keeps the
engine from all other sequences. All speeds are measured ones and arguments; no clock.
"""

import enum
import math
from array import array
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, replace

from kvrelay.engine.scheduling.blocks import SequenceBlocks
from kvrelay.engine.scheduling.groups import merge_group
from kvrelay.engine.scheduling.sequence import Sequence, SequenceGroup, State
from kvrelay.engine.scheduling.tier_requests import LowerTiers
from kvrelay.engine.scheduling.waiting_queue import Queues, victim
from kvrelay.kvcache.memory.swap import SwapArea, SwappedBlocks
from kvrelay.kvcache.pool.block_pool import BlockPool
from kvrelay.kvcache.pool.ledger import BlockIds
from kvrelay.types import BlockId, FinishReason

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
    decode_step_s: float = 0.0


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


class Preemption:
    """Takes running sequences off the batch, and brings swapped ones back.

    Args:
        token_bytes: KV bytes of one token.
        only: always this mode, where it is possible; None: the cheapest.
    """

    def __init__(
        self,
        queues: Queues,
        blocks: SequenceBlocks,
        pool: BlockPool,
        speeds: MeasuredSpeeds,
        area: SwapArea | None = None,
        tiers: LowerTiers | None = None,
        *,
        token_bytes: float,
        only: PreemptionMode | None,
    ) -> None:
        self._queues, self._blocks, self._pool, self._speeds = queues, blocks, pool, speeds
        self.area, self._tiers, self._token_bytes, self.only = area, tiers, token_bytes, only
        self.num_preemptions = 0
        self.num_by_mode: Counter[PreemptionMode] = Counter()  # sequences
        self.recomputed_tokens = 0  # of sequences whose KV was dropped, or found corrupt
        self.returned: list[Sequence] = []

    def take_returned(self) -> list[Sequence]:
        """Sequences that ended here since the last call, to be prefilled again by a prefill worker."""
        returned, self.returned = self.returned, []
        return returned

    def make_room(self, seq: Sequence, preempted: list[Sequence]) -> bool:
        """Preempt a running sequence, with its group. False if that was `seq` itself."""
        gone = self._preempt(victim(self._queues.running, seq))
        preempted += gone
        return all(one is not seq for one in gone)

    def _preempt(self, chosen: Sequence) -> list[Sequence]:
        """Preempt all members of a group at once, unless it runs alone: then one, to go on when the others have ended.

        Beams are not swapped but merged: they move in step, and some might not come back while others hold blocks.
        """
        group = chosen.group
        if group is None or chosen is group.leader or self._runs_alone(group):
            self.preempt_group((chosen,))
            return [chosen]
        members = tuple(one for one in group.members if one.state is State.RUNNING)
        if group.search is None and self.mode_for(members) is PreemptionMode.SWAP and self._swap_out(members):
            return list(members)
        leader, gone = merge_group(group, self._queues, self._blocks)
        self._queues.waiting.push(leader)
        self._count(PreemptionMode.RECOMPUTE, len(gone))
        return gone

    def _runs_alone(self, group: SequenceGroup) -> bool:
        """Whether no other sequence's end will make room for it. Beams were admitted because all fit at once."""
        queues = self._queues
        return group.search is None and not queues.receiving and all(seq.group is group for seq in queues.running)

    def preempt_group(self, group: tuple[Sequence, ...]) -> PreemptionMode:
        """Preempt these running sequences, all in the mode that costs the least; returns it."""
        mode = self.mode_for(group)
        if mode is PreemptionMode.SWAP:
            if self._swap_out(group):
                return mode
            mode = PreemptionMode.RECOMPUTE
        for seq in group:
            if mode is PreemptionMode.RETURN_TO_PREFILL:
                self._blocks.finish(seq, FinishReason.ABORT)
                self.returned.append(seq)
            else:
                self._blocks.leave_batch(seq)
                self.recompute(seq)
        self._count(mode, len(group))
        return mode

    # ---- the choice of a mode

    def mode_for(self, group: tuple[Sequence, ...]) -> PreemptionMode:
        """The mode for running sequences that are preempted together."""
        remote = min((seq.prefill_tokens_per_s for seq in group), default=0.0)
        rates, area = replace(self._speeds, remote_tokens_per_s=remote), self.area
        if area is not None:
            rates.save_bytes_per_s, rates.load_bytes_per_s = area.save_bytes_per_s, area.load_bytes_per_s
            rates.swap_latency_s = area.latency_s
        return choose(self._victims(group), rates, only=self.only)

    def _victims(self, group: tuple[Sequence, ...]) -> VictimGroup:
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
        block_bytes, area = self._token_bytes * block_size, self.area
        return VictimGroup(
            num_tokens=tokens,
            shared_tokens=shared,
            tier_tokens=lower * block_size,
            tier_bytes=int(lower * block_bytes),
            swap_bytes=int(copied * block_bytes),
            transfer_bytes=int(tokens * self._token_bytes),
            num_others=len(self._queues.running) - len(group),
            can_swap=area is not None and copied <= area.num_free and not is_bound,
            can_return=may_return,
        )

    def _swap_out(self, group: tuple[Sequence, ...]) -> bool:
        """Save their KV and take them off the batch. False, and nothing changed: the swap area has no room."""
        if not self._save(group, {copy.target: copy.source for copy in self._blocks.copies}):
            return False
        for seq in group:
            self._blocks.leave_batch(seq)
            seq.num_hashed_blocks = 0
            seq.move_to(State.SWAPPED)
            self._queues.push_swapped(seq)
        self._count(PreemptionMode.SWAP, len(group))
        return True

    def _count(self, mode: PreemptionMode, num_sequences: int) -> None:
        self.num_by_mode[mode] += num_sequences
        self.num_preemptions += num_sequences

    def recompute(self, seq: Sequence) -> None:
        """Queue `seq`, which holds no blocks, to be computed again, at the front. Cached blocks shorten that."""
        self.recomputed_tokens += seq.num_computed
        self._blocks.drop_swapped(seq)
        seq.num_computed = seq.num_hashed_blocks = 0
        seq.prompt_logprobs.clear()  # they are computed again with the prompt
        seq.move_to(State.WAITING)
        self._queues.waiting.push(seq)

    def rewind(self, seq: Sequence) -> None:
        """What is being loaded for `seq` is corrupt: compute it again, without that."""
        self._blocks.leave_batch(seq)
        self.recompute(seq)
        self.num_preemptions += 1

    # ---- the swap area

    def _save(self, group: tuple[Sequence, ...], sources: Mapping[int, int]) -> bool:
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

    def match_swapped(self, seq: Sequence) -> "BlockIds | None":
        """Cached blocks that need not be copied back; None: blocks that it shared are gone, so recompute it."""
        swapped = seq.swapped
        assert swapped is not None
        cached = self._pool.match(seq.block_chain(), min(seq.num_computed // seq.block_size, swapped.end_block))
        if len(cached) < swapped.first_block:
            return None
        self._pool.use(cached, seq.request.hints.priority)
        return array("i", cached.blocks)

    def swap_in(self, seq: Sequence, num_cached: int) -> None:
        """`seq` holds all its blocks again, the first of them cached: the copies of the others begin."""
        swapped, area = seq.swapped, self.area
        assert swapped is not None and area is not None
        blocks = [BlockId(block) for block in seq.blocks[num_cached : swapped.end_block]]
        seq.swapped, seq.load = None, area.load(swapped, num_cached, blocks)
        seq.num_hashed_blocks = num_cached

    def check(self) -> None:
        """Raise AssertionError unless the swap area holds just what this engine's sequences have there."""
        if self.area is not None:
            seqs = self._queues.sequences.values()
            self.area.check([seq.swapped for seq in seqs if seq.swapped is not None])


def num_shared(pool: BlockPool, seq: Sequence) -> int:
    """How many of the first blocks of `seq` are cached and held by another sequence, too."""
    cached = pool.match(seq.block_chain(), seq.num_computed // seq.block_size).blocks
    count = 0
    for own, other in zip(seq.blocks, cached, strict=False):
        if own != other or pool.num_holders(own) < 2:
            break
        count += 1
    return count
