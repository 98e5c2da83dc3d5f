"""The blocks of one engine's sequences: copy on write, blocks set aside, the prefix cache's share, the headroom that
admission leaves free for running sequences, and their release. Pure.

Sequences grow by a token a step and release their blocks when they end. From the lengths of recent outputs follows
how long each sequence will still run, and that gives the largest number of blocks that all of them will need at the
same time. Source: the past-future scheduler (Gong et al., ASPLOS 2025).
"""

import math
from array import array
from collections import Counter, deque
from collections.abc import Iterable
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from kvrelay.engine.scheduling.sequence import Sequence, State
from kvrelay.engine.scheduling.tier_requests import LowerTiers, Pinning
from kvrelay.engine.scheduling.waiting_queue import Queues
from kvrelay.hashing import pack_tokens
from kvrelay.kvcache.memory.swap import SwapArea
from kvrelay.kvcache.pool.block_pool import BlockPool
from kvrelay.kvcache.pool.ledger import BlockIds
from kvrelay.types import BlockId, FinishReason

HEADROOM_SHARE = 1.0  # of the blocks that running sequences are expected to need: less preempts them, more idles
_WINDOW = 256  # outputs that are remembered
_ENOUGH = 8  # outputs before they are believed
_PRIOR_TOKENS = 128  # what an output is taken for until then


@dataclass(frozen=True, slots=True)
class BlockCopy:
    """`seq` continues in a copy of a block that it shares with others, since it is about to write there."""

    seq: Sequence
    source: BlockId
    target: BlockId


class OutputLengths:
    """Tokens of the outputs that ended last."""

    def __init__(self) -> None:
        self._last: deque[int] = deque(maxlen=_WINDOW)
        self._sorted = np.zeros(0)
        self._totals = np.zeros(1)  # of the longest n
        self._is_stale = False
        self._sum = 0

    def observe(self, num_output: int) -> None:
        """An output ended by itself after so many tokens."""
        self._sum += num_output - (self._last[0] if len(self._last) == _WINDOW else 0)
        self._last.append(num_output)
        self._is_stale = True

    @property
    def mean_tokens(self) -> float:
        """0: too few have ended."""
        return self._sum / len(self._last) if len(self._last) >= _ENOUGH else 0.0

    def remaining(self, so_far: NDArray[np.float64], most: NDArray[np.float64]) -> NDArray[np.float64]:
        """Tokens that outputs of so many tokens will still have, on the average; with `most` as the limit of each.

        Those that are longer than all that was seen are taken to have come half-way.
        """
        if len(self._last) < _ENOUGH:
            expected = np.maximum(_PRIOR_TOKENS, 2 * so_far)
        else:
            if self._is_stale:
                self._sorted = np.sort(np.asarray(self._last, np.float64))
                self._totals = np.concatenate(([0.0], np.cumsum(self._sorted[::-1])))
                self._is_stale = False
            longer = len(self._sorted) - np.searchsorted(self._sorted, so_far, side="right")
            expected = np.where(longer > 0, self._totals[longer] / np.maximum(longer, 1), 2 * so_far)
        return np.asarray(np.clip(np.minimum(expected, most) - so_far, 0.0, None))


def growth_blocks(remaining: NDArray[np.float64], own_blocks: NDArray[np.float64], block_size: int) -> float:
    """The most blocks, beyond those that they have now, that these sequences will need at once.

    remaining: tokens each will still have. own_blocks: those that become free when it ends.
    """
    order = np.argsort(-remaining, kind="stable")
    left, own = remaining[order], own_blocks[order]
    alive = np.arange(1, len(left) + 1)  # when the i-th longest is about to end, so many still run
    freed = own.sum() - np.cumsum(own)  # by those that ended before
    need = alive * left / block_size - freed
    return float(max(0.0, need.max(initial=0.0)))


class Headroom:
    """The blocks to leave free when one more sequence joins those that run.

    Args:
        share: how much of the blocks that they are expected to need is left free; 0: one block for each sequence.
    """

    def __init__(self, share: float, block_size: int) -> None:
        self._share, self._block_size = share, block_size
        self.lengths = OutputLengths()
        self._longest_output = 0

    def observe_request(self, max_tokens: int) -> None:
        """A request that may have so many tokens of output has arrived."""
        self._longest_output = max(self._longest_output, max_tokens)

    def at_most(self, num_others: int) -> int:
        """An upper bound of `blocks`: as if every output became as long as any request has allowed."""
        blocks = (num_others + 1) * self._longest_output / self._block_size
        return max(num_others, math.ceil(self._share * blocks))

    def blocks(self, seq: Sequence, num_own: int, others: list[Sequence]) -> int:
        """Blocks to leave free when `seq` joins `others` with `num_own` fresh blocks."""
        if not others or not self._share:
            return len(others)
        return max(len(others), math.ceil(self._share * self.expected_growth(seq, num_own, others)))

    def expected_growth(self, seq: Sequence, num_own: int, others: list[Sequence]) -> float:
        """Blocks beyond those that they have that all of these sequences are expected to need at the same time."""
        everyone = [seq, *others]
        count = len(everyone)
        so_far = np.fromiter((one.num_output for one in everyone), np.float64, count)
        most = np.fromiter((one.max_output for one in everyone), np.float64, count)
        own = np.fromiter((len(one.blocks) - one.num_cached // self._block_size for one in everyone), np.float64, count)
        own[0] = num_own
        return growth_blocks(self.lengths.remaining(so_far, most), np.maximum(own, 0.0), self._block_size)


class SequenceBlocks:
    """What sequences hold, and how they give it back; and used blocks that no sequence holds.

    Those are set aside: in quarantine, read by a step in flight, used by a probe, or being saved.

    Args:
        lengths: observes outputs that end by themselves.
        area: where preempted sequences' KV may be.
    """

    def __init__(
        self,
        pool: BlockPool,
        queues: Queues,
        lengths: OutputLengths,
        area: SwapArea | None = None,
        tiers: LowerTiers | None = None,
    ) -> None:
        self._pool, self._queues, self._lengths = pool, queues, lengths
        self._area, self._tiers, self.pinning = area, tiers, Pinning(pool, tiers)
        self.copies: list[BlockCopy] = []  # of the step that is being planned
        self.copy_sources: list[BlockId] = []  # held until their copies are made
        self.quarantined: dict[int, BlockIds] = {}  # by arrival, or below zero
        self.probe_blocks: set[BlockId] = set()
        self._num_kept = 0

    # ---- copy on write

    def try_own(self, seq: Sequence) -> bool:
        """Make the partial block that `seq` writes next its own, by a copy if others hold it.

        False: no block is free.
        """
        index, offset = divmod(seq.num_computed, seq.block_size)
        if not offset or self._pool.is_own(source := BlockId(seq.blocks[index])):
            return True
        target = self._pool.writable(source)
        if target is None:
            return False
        seq.blocks[index] = target
        self.copies.append(BlockCopy(seq, source, target))
        # else it could go to a sequence whose blocks are written at once: from a lower tier
        self._pool.acquire((source,))
        self.copy_sources.append(source)
        return True

    def copied(self) -> None:
        """The pending copies are made: their sources may be reused."""
        self.copies = []
        while self.copy_sources:
            self._pool.release((self.copy_sources.pop(),))

    # ---- blocks set aside

    def quarantine(self, seq: Sequence) -> int:
        """Take a sequence's blocks, which a transfer may still write; returns the key for `unquarantine`."""
        self.quarantined[seq.arrival] = seq.blocks
        seq.blocks = array("i")
        return seq.arrival

    def keep(self, blocks: Iterable[int]) -> int:
        """Hold blocks that a step in flight uses; returns the key for `unquarantine`."""
        kept = array("i", blocks)
        self._pool.acquire(kept)
        self._num_kept += 1
        self.quarantined[-self._num_kept] = kept
        return -self._num_kept

    def unquarantine(self, key: int) -> None:
        """Nothing writes or reads these blocks any more: release them."""
        self._pool.release(self.quarantined.pop(key))

    def take_probe_blocks(self, count: int) -> list[BlockId]:
        """Up to `count` free blocks for a probe of the KV paths; none while a sequence is queued for blocks.

        Leaves one for each running sequence, so that a probe preempts none.
        """
        queues = self._queues
        spare = self._pool.counts().free - len(queues.running) - len(queues.receiving)
        count = max(0, min(count, spare))
        blocks = None if queues.has_demand else self._pool.allocate(count)
        taken = [BlockId(block) for block in blocks or ()]
        self.probe_blocks.update(taken)
        return taken

    def return_probe_blocks(self, blocks: Iterable[BlockId]) -> None:
        """The probe is done with these."""
        returned = list(blocks)
        self.probe_blocks.difference_update(returned)
        self._pool.release(returned)

    def aside(self) -> Counter[int]:
        """How often each block is held by something else than a sequence or a pending copy."""
        holders: Counter[int] = Counter(self.probe_blocks)
        for blocks in self.quarantined.values():
            holders.update(blocks)
        if self._tiers is not None:
            holders.update(self._tiers.controller.held_blocks())
        return holders

    # ---- the prefix cache

    def register(self, seq: Sequence) -> None:
        """Others may use the full blocks of `seq` from now on; once its prompt is computed, pin it if asked to."""
        hints, size, first = seq.request.hints, seq.block_size, seq.num_hashed_blocks
        full = seq.num_computed // size
        if full > first and hints.keep:
            tokens = pack_tokens(seq.token_ids, first * size, full * size)
            self._pool.insert(seq.block_chain(), seq.blocks, first, full, tokens, priority=hints.priority)
            if self._tiers is not None:
                self._tiers.filled(seq, first, full)
        seq.num_hashed_blocks = max(first, full)
        if not seq.is_pinned and seq.num_computed >= seq.request.num_prompt_tokens:
            self.pinning.pin_prompt(seq)

    # ---- release

    def finish(self, seq: Sequence, reason: FinishReason) -> None:
        """End a sequence, the one way for it: whatever it holds is released, or HELD for its transfer."""
        if seq.state is State.FINISHED:
            return
        queues = self._queues
        if seq.state is State.RUNNING:
            queues.running.remove(seq)
            seq.finish_reason = reason
            if seq.hold and reason in (FinishReason.LENGTH, FinishReason.STOP):
                seq.move_to(State.HELD)
                queues.held[seq.request_id] = seq
                return
        queues.remove_parked(seq)
        self.stop_loading(seq)
        queues.fair_share.give_back(seq)
        self.drop_swapped(seq)
        if seq.num_output and reason in (FinishReason.LENGTH, FinishReason.STOP):
            self._lengths.observe(seq.num_output)
        if seq.group is not None:
            queues.end_in_group(seq)
        seq.finish_reason = seq.finish_reason or reason
        seq.move_to(State.FINISHED)
        self._release(seq)
        del queues.sequences[seq.request_id]

    def leave_batch(self, seq: Sequence) -> None:
        """Take a running sequence off the batch, without its blocks."""
        self._queues.running.remove(seq)
        self.stop_loading(seq)
        self._release(seq)
        seq.writable_until = seq.plain_until = 0
        self._queues.fair_share.give_back(seq)

    def _release(self, seq: Sequence) -> None:
        self._pool.release(seq.blocks)
        seq.blocks = array("i")

    def stop_loading(self, seq: Sequence) -> None:
        """On return nothing is written into the blocks of `seq` any more, and nothing is fetched for it."""
        if seq.load is not None:
            seq.end_load()
        if self._tiers is not None:
            self._tiers.gone(seq)

    def drop_swapped(self, seq: Sequence) -> None:
        """Forget what was saved of `seq` in the swap area: it is recomputed, or has ended."""
        if seq.swapped is not None and self._area is not None:
            self._area.drop(seq.swapped)
            seq.swapped = None

    def check(self) -> None:
        """Raise AssertionError unless each reference to a block in the pool has a holder."""
        pool = self._pool
        pool.check()
        holders = Counter(pool.pinned) + self.aside()
        for seq in self._queues.sequences.values():
            holders.update(seq.blocks)
        holders.update(self.copy_sources)
        for block, count in holders.items():
            found = pool.num_holders(block)
            assert count == found, f"block {block}: {count} holders, {found} references"
        used = pool.counts().used
        held = sum(count > (block in pool.pinned) for block, count in holders.items())
        assert used == held, f"{used} blocks are used, but sequences and others hold {held}: {used - held} leaked"
