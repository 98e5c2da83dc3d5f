"""The blocks of one engine's sequences: copy on write, blocks set aside, the prefix cache's share, and their release.

Pure.
"""

from array import array
from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import dataclass

from kvrelay.engine.groups.group_table import GroupTable
from kvrelay.engine.scheduling.fair_share import FairShare
from kvrelay.engine.scheduling.headroom import OutputLengths
from kvrelay.engine.scheduling.pinning import Pinning
from kvrelay.engine.scheduling.sequence import Sequence, State
from kvrelay.engine.scheduling.swapping import Swapping
from kvrelay.engine.scheduling.tier_requests import LowerTiers
from kvrelay.engine.scheduling.waiting_queue import Queues
from kvrelay.hashing import pack_tokens
from kvrelay.kvcache.pool.block_pool import BlockPool
from kvrelay.kvcache.pool.ledger import BlockIds
from kvrelay.types import BlockId, FinishReason


@dataclass(frozen=True, slots=True)
class BlockCopy:
    """`seq` continues in a copy of a block that it shares with others, since it is about to write there."""

    seq: Sequence
    source: BlockId
    target: BlockId


class CopyOnWrite:
    """The block copies of the step that is being planned."""

    def __init__(self, pool: BlockPool) -> None:
        self._pool = pool
        self.pending: list[BlockCopy] = []
        self.sources: list[BlockId] = []  # held until their copies are made

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
        self.pending.append(BlockCopy(seq, source, target))
        self._pool.acquire(
            (source,)
        )  # else it could go to a sequence whose blocks are written at once: from a lower tier
        self.sources.append(source)
        return True

    def source_of(self) -> Mapping[int, int]:
        """For each block whose content is still to be copied, the block that holds it now."""
        return {copy.target: copy.source for copy in self.pending}

    def copied(self) -> None:
        """The pending copies are made: their sources may be reused."""
        self.pending = []
        while self.sources:
            self._pool.release((self.sources.pop(),))


class BlocksAside:
    """Used blocks that no sequence holds: in quarantine, read by a step in flight, used by a probe, or being saved."""

    def __init__(self, pool: BlockPool, queues: Queues, tiers: LowerTiers | None) -> None:
        self._pool, self._queues, self._tiers = pool, queues, tiers
        self.quarantined: dict[int, BlockIds] = {}  # by arrival, or below zero
        self.probe_blocks: set[BlockId] = set()
        self._num_kept = 0

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

    def holders(self) -> Counter[int]:
        """How often each of these blocks is held."""
        holders: Counter[int] = Counter(self.probe_blocks)
        for blocks in self.quarantined.values():
            holders.update(blocks)
        if self._tiers is not None:
            holders.update(self._tiers.held_blocks())
        return holders

    def __bool__(self) -> bool:
        return bool(self.quarantined or self.probe_blocks or (self._tiers is not None and self._tiers.held_blocks()))


class PrefixRegistration:
    """Registers the full blocks of sequences in the prefix cache, and pins prompts."""

    def __init__(self, pool: BlockPool, pinning: Pinning, tiers: LowerTiers | None) -> None:
        self._pool, self._tiers = pool, tiers
        self.pinning = pinning

    def register(self, seq: Sequence) -> None:
        """Other sequences may use the full blocks of `seq` from now on; once its prompt is computed, pin it if asked
        to.
        """
        full = seq.num_computed // seq.block_size
        if full > seq.num_hashed_blocks:
            self.register_full(seq, full)
        if not seq.is_pinned:
            self.pin(seq)

    def register_full(self, seq: Sequence, full: int) -> None:
        """Register its first `full` blocks."""
        if (hints := seq.request.hints).keep:
            first, size = seq.num_hashed_blocks, seq.block_size
            tokens = pack_tokens(seq.token_ids, first * size, full * size)
            self._pool.insert(seq.block_chain(), seq.blocks, first, full, tokens, priority=hints.priority)
            if self._tiers is not None:
                self._tiers.filled(seq, first, full)
        seq.num_hashed_blocks = full

    def pin(self, seq: Sequence) -> None:
        """Keep the prompt of `seq` for as long as its request asks, once it is computed."""
        if not seq.is_pinned and seq.num_computed >= seq.request.num_prompt_tokens:
            self.pinning.pin_prompt(seq)


class Release:
    """The one way by which a sequence ends and gives back what it holds."""

    def __init__(
        self, pool: BlockPool, queues: Queues, fair_share: FairShare, groups: GroupTable, swapping: Swapping,
        lengths: OutputLengths, tiers: LowerTiers | None,
    ) -> None:  # fmt: skip
        self._pool, self._queues, self._fair_share, self._groups = pool, queues, fair_share, groups
        self._swapping, self._lengths, self._tiers = swapping, lengths, tiers

    def finish(self, seq: Sequence, reason: FinishReason) -> None:
        """End a sequence: whatever it holds is released, or HELD for its transfer."""
        if seq.state is State.FINISHED:
            return
        if seq.state is State.RUNNING:
            self._queues.running.remove(seq)
            seq.finish_reason = reason
            if seq.hold and reason in (FinishReason.LENGTH, FinishReason.STOP):
                seq.move_to(State.HELD)
                self._queues.held[seq.request_id] = seq
                return
        self._queues.remove_parked(seq)
        self.stop_loading(seq)
        self._fair_share.give_back(seq)
        self._swapping.drop(seq)
        if seq.num_output and reason in (FinishReason.LENGTH, FinishReason.STOP):
            self._lengths.observe(seq.num_output)
        self._groups.ended(seq)
        seq.finish_reason = seq.finish_reason or reason
        seq.move_to(State.FINISHED)
        self.release_blocks(seq)
        del self._queues.sequences[seq.request_id]

    def leave_batch(self, seq: Sequence) -> None:
        """Take a running sequence off the batch, without its blocks."""
        self._queues.running.remove(seq)
        self.stop_loading(seq)
        self.release_blocks(seq)
        seq.writable_until = seq.plain_until = 0
        self._fair_share.give_back(seq)

    def stop_loading(self, seq: Sequence) -> None:
        """On return nothing is written into the blocks of `seq` any more, and nothing is fetched for it."""
        LowerTiers.settle(seq)
        if self._tiers is not None:
            self._tiers.gone(seq)

    def release_blocks(self, seq: Sequence) -> None:
        self._pool.release(seq.blocks)
        seq.blocks = array("i")


def check_holders(pool: BlockPool, queues: Queues, aside: BlocksAside, copies: CopyOnWrite) -> None:
    """Raise AssertionError unless each reference to a block in the pool has a holder."""
    pool.check()
    holders = Counter(pool.pinned) + aside.holders()
    for seq in queues.sequences.values():
        holders.update(seq.blocks)
    holders.update(copies.sources)
    for block, count in holders.items():
        assert count == pool.num_holders(block), f"block {block}: {count} holders, {pool.num_holders(block)} references"
    used = pool.counts().used
    held = sum(count > (block in pool.pinned) for block, count in holders.items())
    assert used == held, f"{used} blocks are used, but sequences and others hold {held}: {used - held} leaked"
